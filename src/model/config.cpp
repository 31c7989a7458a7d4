#include "model/config.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "base/log.h"
#include "model/json_reader.h"

namespace ddtree {
namespace {

using nlohmann::json;

// Far above any model of the family, far below what could overflow a product of three in 64 bits or ask for absurd memory.
constexpr int64_t kMaxVocab = int64_t{1} << 22, kMaxWidth = int64_t{1} << 17, kMaxHeads = 1024, kMaxHeadDim = 1024, kMaxLayers = 1024,
                  kMaxPositions = int64_t{1} << 30, kMaxBlock = 256;

Status unsupported(std::string_view file, std::string_view key, std::string_view found, std::string_view supported) {
  return Status(Code::kBadModel, fmt::format("{}: {} is {}, which this build does not serve; {}", file, key, found, supported));
}

constexpr std::string_view kFamily = "supported: the dense Qwen3.5, Qwen3.6 and Qwen3.8 models (model_type qwen3_5 or qwen3_5_text)";

std::string first_architecture(const json& object) {
  const auto it = object.find("architectures");
  if (it == object.end()) return "";
  if (it->is_array() && !it->empty() && (*it)[0].is_string()) return (*it)[0].get<std::string>();
  return it->is_string() ? it->get<std::string>() : "";
}

// quantization_config, at either level, of either kind of checkpoint.
Status refuse_quantised(const json& object, std::string_view file, std::string_view prefix) {
  for (const char* key : {"quantization_config", "compression_config"}) {
    const auto it = object.find(key);
    if (it == object.end() || it->is_null()) continue;
    std::string method = json_text(*it);
    if (it->is_object() && it->contains("quant_method")) method = json_text((*it)["quant_method"]);
    return unsupported(file, fmt::format("{}{}", prefix, key), "of method " + method,
                       "quantised checkpoints are not built yet: the BF16 checkpoint of the same model works instead");
  }
  return {};
}

// The rotary settings of either spelling: rope_parameters (new) or rope_theta, partial_rotary_factor and rope_scaling (old). mrope is plain
// rotary embedding for text, because its three positions are then equal.
struct Rope {
  double theta = 0, factor = 0;
};

Rope read_rope(JsonReader& in, std::string_view file, const std::string& prefix, std::optional<double> default_theta,
               double default_factor) {
  Rope rope;
  const json empty = json::object();
  const json* parameters = in.find("rope_parameters");
  for (const char* key : {"rope_parameters", "rope_scaling"}) {
    const json* settings = in.find(key);
    if (settings == nullptr) continue;
    if (!settings->is_object()) {
      in.fail(key, json_text(*settings), "it must be an object");
      return rope;
    }
    JsonReader s(*settings, file, fmt::format("{}{}.", prefix, key));
    for (const char* type_key : {"rope_type", "type"}) {
      const std::string type = s.string(type_key, "default");
      if (type != "default" && type != "mrope")
        s.fail(type_key, json_text(type),
               "only the default rotary embedding is built (no yarn, linear, dynamic … scaling): remove it to serve the original context "
               "length");
    }
    if (settings->contains("full_attention") || settings->contains("sliding_attention"))
      s.fail("full_attention", "given", "one rotary setting for all layers is supported, not one for each layer type");
    in.merge(s);
  }
  JsonReader p(parameters != nullptr && parameters->is_object() ? *parameters : empty, file, prefix + "rope_parameters.");
  JsonReader& theta = p.has("rope_theta") ? p : in;
  rope.theta = theta.number("rope_theta", 1.0, 1e12, default_theta);
  JsonReader& factor = p.has("partial_rotary_factor") ? p : in;
  rope.factor = factor.number("partial_rotary_factor", 1e-3, 1.0, default_factor);
  in.merge(p);
  return rope;
}

void check_divides(JsonReader& in, const char* small_key, int64_t small, const char* large_key, int64_t large) {
  if (in.ok() && large % small != 0) in.fail(small_key, fmt::format("{}", small), fmt::format("it must divide {} ({})", large_key, large));
}

std::string dtype_of(JsonReader& in) { return in.string(in.has("dtype") ? "dtype" : "torch_dtype", ""); }

Status check_family(const json& outer, const json& text, std::string_view file) {
  const std::string architecture = first_architecture(outer);
  const auto type_of = [](const json& o) {
    const auto it = o.find("model_type");
    return it != o.end() && it->is_string() ? it->get<std::string>() : std::string();
  };
  const std::string type = type_of(outer);
  if (architecture.find("DFlash") != std::string::npos || outer.contains("dflash_config"))
    return unsupported(file, "architectures", json_text(architecture),
                       "it is a drafter: give it with --speculative-draft-model-path beside its target");
  for (const json* o : {&text, &outer})
    for (const char* key : {"num_experts", "num_local_experts", "n_routed_experts"})
      if (const auto it = o->find(key); it != o->end() && !it->is_null() && *it != 0)
        return unsupported(file, key, json_text(*it), "mixture-of-experts models are not built yet; " + std::string(kFamily));
  if (type.find("moe") != std::string::npos || architecture.find("Moe") != std::string::npos)
    return unsupported(file, "model_type", json_text(type), "mixture-of-experts models are not built yet; " + std::string(kFamily));
  if (type != "qwen3_5" && type != "qwen3_5_text")
    return unsupported(file, "model_type", type.empty() ? "missing" : json_text(type), kFamily);
  if (const std::string inner = type_of(text); !inner.empty() && inner != "qwen3_5_text" && inner != "qwen3_5")
    return unsupported(file, "text_config.model_type", json_text(inner), kFamily);
  if (!architecture.empty() && architecture != "Qwen3_5ForConditionalGeneration" && architecture != "Qwen3_5ForCausalLM" &&
      architecture != "Qwen3_5TextForCausalLM" && architecture != "Qwen3_5Model" && architecture != "Qwen3_5TextModel")
    return unsupported(file, "architectures", json_text(architecture), "supported: Qwen3_5ForConditionalGeneration and Qwen3_5ForCausalLM");
  return {};
}

void read_layers(JsonReader& in, int64_t count, std::vector<LayerKind>* layers) {
  if (!in.ok()) return;
  const json* types = in.find("layer_types");
  if (types == nullptr) {
    const int64_t interval = in.integer("full_attention_interval", 1, kMaxLayers, 4);
    for (int64_t i = 0; i < count; ++i) layers->push_back((i + 1) % interval == 0 ? LayerKind::kFullAttention : LayerKind::kGatedDelta);
    return;
  }
  if (!types->is_array() || static_cast<int64_t>(types->size()) != count)
    return in.fail("layer_types", types->is_array() ? fmt::format("a list of {}", types->size()) : json_text(*types),
                   fmt::format("it must be a list of num_hidden_layers ({}) names", count));
  for (size_t i = 0; i < types->size(); ++i) {
    const json& t = (*types)[i];
    if (t == "linear_attention") layers->push_back(LayerKind::kGatedDelta);
    else if (t == "full_attention") layers->push_back(LayerKind::kFullAttention);
    else return in.fail(fmt::format("layer_types[{}]", i), json_text(t), "supported: \"linear_attention\" and \"full_attention\"");
  }
}

void read_target_features(JsonReader& in) {
  if (const std::string act = in.string("hidden_act", "silu"); act != "silu" && act != "swish")
    in.fail("hidden_act", json_text(act), "supported: \"silu\"");
  if (const std::string gate = in.string("output_gate_type", "swish"); gate != "swish" && gate != "silu")
    in.fail("output_gate_type", json_text(gate), "supported: \"swish\"");
  if (in.boolean("attention_bias", false)) in.fail("attention_bias", "true", "supported: false");
  if (!in.boolean("attn_output_gate", true))
    in.fail("attn_output_gate", "false", "supported: true (all published models of the family have the gate)");
  if (const json* only = in.find("mlp_only_layers"); only != nullptr && !only->empty())
    in.fail("mlp_only_layers", json_text(*only), "supported: an empty list");
}

void read_rotary_dim(JsonReader& in, double factor, int64_t head_dim, int64_t* rotary_dim) {
  *rotary_dim = static_cast<int64_t>(std::floor(static_cast<double>(head_dim) * factor + 1e-9));
  if (in.ok() && (*rotary_dim < 2 || *rotary_dim % 2 != 0))
    in.fail("partial_rotary_factor", fmt::format("{}", factor),
            fmt::format("times head_dim ({}) it must be an even number of at least 2, and is {}", head_dim, *rotary_dim));
}

}  // namespace

std::vector<int32_t> default_taps(int64_t target_layers, int64_t drafter_layers) {
  if (drafter_layers == 1) return {static_cast<int32_t>(target_layers / 2)};
  std::vector<int32_t> taps;
  for (int64_t i = 0; i < drafter_layers; ++i) {
    // Python's round(): ties to even, which nearbyint gives in the default rounding mode.
    const double at = 1.0 + static_cast<double>(i * (target_layers - 4)) / static_cast<double>(drafter_layers - 1);
    taps.push_back(static_cast<int32_t>(std::nearbyint(at)));
  }
  return taps;
}

Result<ModelSpec> parse_model_config(std::string_view text, std::string_view file) {
  Result<json> parsed = parse_json(text, file);
  if (!parsed.ok()) return parsed.status();
  const json& outer = *parsed;
  if (!outer.is_object()) return Status(Code::kBadModel, fmt::format("{}: it is {}, expected an object", file, json_text(outer)));
  const auto nested = outer.find("text_config");
  const bool is_nested = nested != outer.end() && !nested->is_null();
  if (is_nested && !nested->is_object())
    return Status(Code::kBadModel, fmt::format("{}: text_config is {}; it must be an object", file, json_text(*nested)));
  const json& object = is_nested ? *nested : outer;
  const std::string prefix = is_nested ? "text_config." : "";
  DDTREE_RETURN_IF_ERROR(check_family(outer, object, file));
  DDTREE_RETURN_IF_ERROR(refuse_quantised(outer, file, ""));
  DDTREE_RETURN_IF_ERROR(refuse_quantised(object, file, prefix));

  JsonReader in(object, file, prefix);
  ModelSpec spec;
  spec.architecture = first_architecture(outer);
  spec.vocab_size = in.integer("vocab_size", 1, kMaxVocab);
  spec.hidden_size = in.integer("hidden_size", 1, kMaxWidth);
  spec.intermediate_size = in.integer("intermediate_size", 1, kMaxWidth);
  const int64_t layers = in.integer("num_hidden_layers", 1, kMaxLayers);
  spec.heads = in.integer("num_attention_heads", 1, kMaxHeads);
  spec.kv_heads = in.integer("num_key_value_heads", 1, kMaxHeads);
  spec.head_dim = in.integer("head_dim", 1, kMaxHeadDim);
  spec.key_heads = in.integer("linear_num_key_heads", 1, kMaxHeads);
  spec.value_heads = in.integer("linear_num_value_heads", 1, kMaxHeads);
  spec.key_dim = in.integer("linear_key_head_dim", 1, kMaxHeadDim);
  spec.value_dim = in.integer("linear_value_head_dim", 1, kMaxHeadDim);
  spec.conv_width = in.integer("linear_conv_kernel_dim", 1, 16, 4);
  spec.norm_eps = static_cast<float>(in.number("rms_norm_eps", 1e-12, 0.1, 1e-6));
  spec.max_positions = in.integer("max_position_embeddings", 1, kMaxPositions);
  spec.mtp_layers = static_cast<int>(in.integer("mtp_num_hidden_layers", 0, kMaxLayers, 0));
  check_divides(in, "num_key_value_heads", spec.kv_heads, "num_attention_heads", spec.heads);
  check_divides(in, "linear_num_key_heads", spec.key_heads, "linear_num_value_heads", spec.value_heads);
  read_layers(in, layers, &spec.layers);
  read_target_features(in);
  const Rope rope = read_rope(in, file, prefix, 1e7, 0.25);
  spec.rope_theta = rope.theta;
  read_rotary_dim(in, rope.factor, spec.head_dim, &spec.rotary_dim);
  spec.dtype = dtype_of(in);

  const json* mtp_embedding = in.find("mtp_use_dedicated_embeddings");
  if (spec.mtp_layers > 1 || (spec.mtp_layers > 0 && mtp_embedding != nullptr && *mtp_embedding == true)) {
    log::warn(
        "{}: {}mtp_num_hidden_layers is {}{}; one MTP layer that shares the embedding is supported, so the MTP head is left out and NEXTN "
        "is not available",
        file, prefix, spec.mtp_layers, spec.mtp_layers > 1 ? "" : " with dedicated embeddings");
    spec.mtp_layers = 0;
  }
  spec.eos_ids = in.ids("eos_token_id", 0, spec.vocab_size - 1);
  JsonReader top(outer, file);
  // The key occurs at both levels, and defaults differ between exports: only a file that says false and nowhere true is untied for sure.
  // bind_target decides by what the checkpoint holds.
  const bool tied = in.boolean("tie_word_embeddings", false) || top.boolean("tie_word_embeddings", false);
  spec.tied_head = tied || (!in.has("tie_word_embeddings") && !top.has("tie_word_embeddings"));
  if (is_nested) {
    if (spec.dtype.empty()) spec.dtype = dtype_of(top);
    for (const int32_t id : top.ids("eos_token_id", 0, spec.vocab_size - 1))
      if (std::find(spec.eos_ids.begin(), spec.eos_ids.end(), id) == spec.eos_ids.end()) spec.eos_ids.push_back(id);
  }
  in.merge(top);
  if (!in.ok()) return in.status();
  return spec;
}

namespace {

// What later drafters (DFlash 2 and its kin) add, by key: running them without it would only lower acceptance, silently.
Status refuse_other_drafters(const json& object, std::string_view file, std::string_view prefix) {
  for (const char* key : {"selector_rank", "selector_top_k", "conv_kernel_size", "conv_group_size", "final_logit_softcapping",
                          "output_multiplier", "input_embedding_scale", "sample_from_anchor", "markov_rank", "num_experts"}) {
    const auto it = object.find(key);
    if (it == object.end() || it->is_null() || *it == false || *it == 0) continue;
    return unsupported(file, fmt::format("{}{}", prefix, key), json_text(*it),
                       "supported: DFlash drafters of the first form (no candidate selector, no convolutions, no logit scaling)");
  }
  return {};
}

void read_drafter_layers(JsonReader& in, int64_t count, DrafterSpec* spec, std::string_view file) {
  if (!in.ok()) return;
  spec->layers.resize(static_cast<size_t>(count));
  const bool use_window = in.boolean("use_sliding_window", false);
  if (const json* types = in.find("layer_types"); types != nullptr) {
    if (!types->is_array() || static_cast<int64_t>(types->size()) != count)
      return in.fail("layer_types", types->is_array() ? fmt::format("a list of {}", types->size()) : json_text(*types),
                     fmt::format("it must be a list of num_hidden_layers ({}) names", count));
    bool any = false;
    for (size_t i = 0; i < types->size(); ++i) {
      const json& t = (*types)[i];
      if (t != "sliding_attention" && t != "full_attention")
        return in.fail(fmt::format("layer_types[{}]", i), json_text(t), "supported: \"sliding_attention\" and \"full_attention\"");
      spec->layers[i].sliding = t == "sliding_attention";
      any = any || spec->layers[i].sliding;
    }
    if (in.has("use_sliding_window") && use_window != any)
      log::warn("{}: use_sliding_window is {}, but layer_types {} a sliding layer; layer_types is followed", file, use_window,
                any ? "has" : "has not");
  } else if (use_window) {
    // Without layer_types: the layers from max_window_layers on slide.
    const int64_t first = in.integer("max_window_layers", 0, INT32_MAX, 0);
    for (int64_t i = first; i < count; ++i) spec->layers[static_cast<size_t>(i)].sliding = true;
  }
  const bool any = std::any_of(spec->layers.begin(), spec->layers.end(), [](const auto& l) { return l.sliding; });
  if (any) spec->window = in.integer("sliding_window", 1, kMaxPositions);
  const bool obey = in.has("is_causal");
  const bool causal = in.boolean("is_causal", false);
  for (auto& layer : spec->layers) layer.causal = obey ? causal : layer.sliding;
}

void read_taps(JsonReader& in, JsonReader& dflash, int64_t target_layers, DrafterSpec* spec) {
  if (!in.ok() || !dflash.ok()) return;
  const int64_t known = spec->num_target_layers > 0 ? spec->num_target_layers : target_layers;
  JsonReader& at = dflash.has("target_layer_ids") || !in.has("target_layer_ids") ? dflash : in;
  spec->taps = at.ids("target_layer_ids", 0, (known > 0 ? known : kMaxLayers) - 1);
  if (!at.ok()) return;
  if (spec->taps.empty()) {
    if (at.has("target_layer_ids")) return at.fail("target_layer_ids", "empty", "it must name at least one layer of the target");
    if (known == 0) return in.fail("num_target_layers", "missing", "it is needed where dflash_config.target_layer_ids is missing too");
    spec->taps = default_taps(known, static_cast<int64_t>(spec->layers.size()));
    for (const int32_t tap : spec->taps)
      if (tap < 0 || tap >= known)
        return at.fail(
            "target_layer_ids", "missing",
            fmt::format("its default for {} layers of {} would be {}, outside 0 … {}", spec->layers.size(), known, tap, known - 1));
  }
  std::vector<int32_t> sorted = spec->taps;
  std::sort(sorted.begin(), sorted.end());
  if (std::adjacent_find(sorted.begin(), sorted.end()) != sorted.end())
    at.fail("target_layer_ids", json_text(json(spec->taps)), "no layer may come twice");
}

}  // namespace

Result<DrafterSpec> parse_drafter_config(std::string_view text, std::string_view file, int64_t target_layers) {
  Result<json> parsed = parse_json(text, file);
  if (!parsed.ok()) return parsed.status();
  const json& object = *parsed;
  if (!object.is_object()) return Status(Code::kBadModel, fmt::format("{}: it is {}, expected an object", file, json_text(object)));
  const std::string architecture = first_architecture(object);
  const auto special = object.find("dflash_config");
  const bool has_special = special != object.end() && !special->is_null();
  if (has_special && !special->is_object())
    return Status(Code::kBadModel, fmt::format("{}: dflash_config is {}; it must be an object", file, json_text(*special)));
  if (architecture != "DFlashDraftModel" && !(architecture.empty() && has_special))
    return unsupported(file, "architectures", architecture.empty() ? "missing" : json_text(architecture),
                       "a drafter must be a DFlash checkpoint (architectures [\"DFlashDraftModel\"])");
  DDTREE_RETURN_IF_ERROR(refuse_quantised(object, file, ""));
  DDTREE_RETURN_IF_ERROR(refuse_other_drafters(object, file, ""));
  const json empty = json::object();
  const json& inner = has_special ? *special : empty;
  DDTREE_RETURN_IF_ERROR(refuse_other_drafters(inner, file, "dflash_config."));

  JsonReader in(object, file), dflash(inner, file, "dflash_config.");
  DrafterSpec spec;
  spec.vocab_size = in.integer("vocab_size", 1, kMaxVocab);
  spec.hidden_size = in.integer("hidden_size", 1, kMaxWidth);
  spec.intermediate_size = in.integer("intermediate_size", 1, kMaxWidth);
  const int64_t layers = in.integer("num_hidden_layers", 1, kMaxLayers);
  spec.heads = in.integer("num_attention_heads", 1, kMaxHeads);
  spec.kv_heads = in.integer("num_key_value_heads", 1, kMaxHeads);
  spec.head_dim = in.integer("head_dim", 2, kMaxHeadDim);
  spec.norm_eps = static_cast<float>(in.number("rms_norm_eps", 1e-12, 0.1, 1e-6));
  spec.max_positions = in.integer("max_position_embeddings", 1, kMaxPositions);
  spec.num_target_layers = in.integer("num_target_layers", 1, kMaxLayers, 0);
  check_divides(in, "num_key_value_heads", spec.kv_heads, "num_attention_heads", spec.heads);
  if (in.ok() && spec.head_dim % 2 != 0)
    in.fail("head_dim", fmt::format("{}", spec.head_dim), "it must be even: rotary embedding pairs its halves");
  if (const std::string act = in.string("hidden_act", "silu"); act != "silu" && act != "swish")
    in.fail("hidden_act", json_text(act), "supported: \"silu\"");
  if (in.boolean("attention_bias", false)) in.fail("attention_bias", "true", "supported: false");
  const Rope rope = read_rope(in, file, "", std::nullopt, 1.0);
  spec.rope_theta = rope.theta;
  if (in.ok() && rope.factor != 1.0)
    in.fail("partial_rotary_factor", fmt::format("{}", rope.factor), "a DFlash drafter rotates the whole head (1.0)");

  JsonReader& block = dflash.has("block_size") && !in.has("block_size") ? dflash : in;
  spec.block_size = block.integer("block_size", 2, kMaxBlock);
  JsonReader& mask = dflash.has("mask_token_id") || !in.has("mask_token_id") ? dflash : in;
  spec.mask_id = static_cast<int32_t>(mask.integer("mask_token_id", 0, spec.vocab_size - 1, -1));
  read_drafter_layers(in, layers, &spec, file);
  read_taps(in, dflash, target_layers, &spec);
  in.merge(dflash);
  if (!in.ok()) return in.status();
  return spec;
}

Result<GenerationDefaults> parse_generation_config(std::string_view text, std::string_view file, int64_t vocab_size) {
  Result<json> parsed = parse_json(text, file);
  if (!parsed.ok()) return parsed.status();
  if (!parsed->is_object()) return Status(Code::kBadModel, fmt::format("{}: it is {}, expected an object", file, json_text(*parsed)));
  JsonReader in(*parsed, file);
  GenerationDefaults out;
  out.do_sample = in.boolean("do_sample", out.do_sample);
  out.temperature = static_cast<float>(in.number("temperature", 0.0, 100.0, out.temperature));
  out.top_p = static_cast<float>(in.number("top_p", 1e-6, 1.0, out.top_p));
  out.min_p = static_cast<float>(in.number("min_p", 0.0, 1.0, out.min_p));
  out.top_k = static_cast<int32_t>(in.integer("top_k", -1, INT32_MAX, out.top_k));
  if (out.top_k < 0) out.top_k = 0;  // -1 is "off" in some exports
  out.repetition_penalty = static_cast<float>(in.number("repetition_penalty", 1e-3, 100.0, out.repetition_penalty));
  for (const int32_t id : in.ids("eos_token_id", 0, vocab_size - 1))
    if (std::find(out.eos_ids.begin(), out.eos_ids.end(), id) == out.eos_ids.end()) out.eos_ids.push_back(id);
  if (!in.ok()) return in.status();
  return out;
}

}  // namespace ddtree
