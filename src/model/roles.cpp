#include "model/roles.h"

#include <fmt/core.h>

#include <algorithm>
#include <set>
#include <string>

#include "base/log.h"

namespace ddtree {
namespace {

// Takes tensors out of a checkpoint by name, checking shape and type; keeps the first error; knows afterwards which were not taken.
class Binder {
 public:
  explicit Binder(const Checkpoint& checkpoint) : checkpoint_(checkpoint) {}

  TensorView take(const std::string& name, std::vector<int64_t> shape) {
    if (!status_.ok()) return {};
    if (checkpoint_.is_dummy()) {
      TensorView made = checkpoint_.make(name, shape);
      taken_.insert(made.name);
      return made;
    }
    const TensorView* tensor = checkpoint_.find(name);
    if (tensor == nullptr) {
      fail(fmt::format("{}: tensor {} is missing, expected {}{}", checkpoint_.location(), name, shape_text(shape), count_text()));
      return {};
    }
    const auto where = [&] { return fmt::format("{}/{}: tensor {}", checkpoint_.location(), tensor->file, name); };
    if (tensor->shape != shape) {
      fail(fmt::format("{}: shape {}, expected {} (from config.json)", where(), shape_text(tensor->shape), shape_text(shape)));
      return {};
    }
    if (tensor->dtype != DType::kBf16 && tensor->dtype != DType::kF16 && tensor->dtype != DType::kF32) {
      const bool quantised = dtype_size(tensor->dtype) == 1 || tensor->dtype == DType::kI32;
      fail(fmt::format(
          "{}: dtype {}, expected BF16, F16 or F32{}", where(), dtype_name(tensor->dtype),
          quantised ? " (a quantised checkpoint? those are not built yet: the BF16 checkpoint of the same model works instead)" : ""));
      return {};
    }
    taken_.insert(tensor->name);
    return *tensor;
  }

  bool any(std::string_view prefix) const {
    const auto it = checkpoint_.tensors().lower_bound(prefix);
    return it != checkpoint_.tensors().end() && it->first.starts_with(prefix);
  }
  std::vector<std::string> left() const {
    std::vector<std::string> out;
    for (const auto& [name, tensor] : checkpoint_.tensors())
      if (!taken_.contains(name)) out.push_back(name);
    return out;
  }
  void fail(std::string message) {
    if (status_.ok()) status_ = Status(Code::kBadModel, std::move(message));
  }
  const Status& status() const { return status_; }
  const Checkpoint& checkpoint() const { return checkpoint_; }

 private:
  // The name of one tensor that is there tells a user who mixed folders up which model this is.
  std::string count_text() const {
    const auto& all = checkpoint_.tensors();
    return all.empty() ? "; the checkpoint holds no tensors"
                       : fmt::format("; the checkpoint holds {} tensors, {} among them", all.size(), all.begin()->first);
  }

  const Checkpoint& checkpoint_;
  std::set<std::string_view> taken_;
  Status status_;
};

MlpTensors take_mlp(Binder& in, const std::string& p, int64_t hidden, int64_t intermediate) {
  MlpTensors out;
  out.gate_proj = in.take(p + "mlp.gate_proj.weight", {intermediate, hidden});
  out.up_proj = in.take(p + "mlp.up_proj.weight", {intermediate, hidden});
  out.down_proj = in.take(p + "mlp.down_proj.weight", {hidden, intermediate});
  return out;
}

FullAttentionTensors take_attention(Binder& in, const std::string& p, int64_t hidden, int64_t heads, int64_t kv_heads, int64_t head_dim,
                                    bool gate) {
  FullAttentionTensors out;
  out.q_proj = in.take(p + "self_attn.q_proj.weight", {(gate ? 2 : 1) * heads * head_dim, hidden});
  out.k_proj = in.take(p + "self_attn.k_proj.weight", {kv_heads * head_dim, hidden});
  out.v_proj = in.take(p + "self_attn.v_proj.weight", {kv_heads * head_dim, hidden});
  out.o_proj = in.take(p + "self_attn.o_proj.weight", {hidden, heads * head_dim});
  out.q_norm = in.take(p + "self_attn.q_norm.weight", {head_dim});
  out.k_norm = in.take(p + "self_attn.k_norm.weight", {head_dim});
  return out;
}

GatedDeltaTensors take_delta(Binder& in, const std::string& p, const ModelSpec& s) {
  const int64_t values = s.value_heads * s.value_dim;
  GatedDeltaTensors out;
  out.in_proj_qkv = in.take(p + "linear_attn.in_proj_qkv.weight", {s.conv_channels(), s.hidden_size});
  out.in_proj_z = in.take(p + "linear_attn.in_proj_z.weight", {values, s.hidden_size});
  out.in_proj_a = in.take(p + "linear_attn.in_proj_a.weight", {s.value_heads, s.hidden_size});
  out.in_proj_b = in.take(p + "linear_attn.in_proj_b.weight", {s.value_heads, s.hidden_size});
  out.conv1d = in.take(p + "linear_attn.conv1d.weight", {s.conv_channels(), 1, s.conv_width});
  out.a_log = in.take(p + "linear_attn.A_log", {s.value_heads});
  out.dt_bias = in.take(p + "linear_attn.dt_bias", {s.value_heads});
  out.norm = in.take(p + "linear_attn.norm.weight", {s.value_dim});
  out.out_proj = in.take(p + "linear_attn.out_proj.weight", {s.hidden_size, values});
  return out;
}

TargetLayer take_layer(Binder& in, const std::string& p, LayerKind kind, const ModelSpec& s) {
  TargetLayer out;
  out.kind = kind;
  out.input_norm = in.take(p + "input_layernorm.weight", {s.hidden_size});
  out.post_attention_norm = in.take(p + "post_attention_layernorm.weight", {s.hidden_size});
  if (kind == LayerKind::kGatedDelta) {
    out.delta = take_delta(in, p, s);
  } else {
    out.attention = take_attention(in, p, s.hidden_size, s.heads, s.kv_heads, s.head_dim, s.output_gate);
  }
  out.mlp = take_mlp(in, p, s.hidden_size, s.intermediate_size);
  return out;
}

// Buffers that some exports save although they follow from the config.
bool is_buffer(std::string_view name) { return name.ends_with("rotary_emb.inv_freq"); }

// What was not taken inside the parts that are computed: a bias, a scale, a layer more than the config has.
void refuse_left(Binder& in, std::string_view prefix) {
  for (const std::string& name : in.left()) {
    if (!name.starts_with(prefix) || is_buffer(name)) continue;
    const TensorView* t = in.checkpoint().find(name);
    return in.fail(
        fmt::format("{}/{}: tensor {} ({} {}) has no place in the model that config.json describes; leaving it out would change the output",
                    in.checkpoint().location(), t->file, name, dtype_name(t->dtype), shape_text(t->shape)));
  }
}

}  // namespace

Result<TargetTensors> bind_target(const Checkpoint& checkpoint, ModelSpec* spec) {
  Binder in(checkpoint);
  const ModelSpec& s = *spec;
  // Multimodal checkpoints nest the text model; text-only re-exports do not.
  const std::string p = in.any("model.language_model.") ? "model.language_model." : "model.";
  TargetTensors out;
  out.embed = in.take(p + "embed_tokens.weight", {s.vocab_size, s.hidden_size});
  for (int64_t i = 0; i < s.num_layers() && in.status().ok(); ++i)
    out.layers.push_back(take_layer(in, fmt::format("{}layers.{}.", p, i), s.layers[static_cast<size_t>(i)], s));
  out.final_norm = in.take(p + "norm.weight", {s.hidden_size});
  // Whether the head is tied is what the checkpoint holds, not what the config says: an untied head that is ignored gives garbage.
  out.tied_head = checkpoint.is_dummy() ? s.tied_head : checkpoint.find("lm_head.weight") == nullptr;
  out.lm_head = out.tied_head ? out.embed : in.take("lm_head.weight", {s.vocab_size, s.hidden_size});
  if (out.tied_head && !s.tied_head)
    in.fail(fmt::format("{}: tensor lm_head.weight is missing, expected {} because config.json says tie_word_embeddings false",
                        checkpoint.location(), shape_text({s.vocab_size, s.hidden_size})));
  if (!out.tied_head && s.tied_head)
    log::warn("{}: config.json says tie_word_embeddings true, but the checkpoint has its own lm_head.weight, which is used",
              checkpoint.location());

  int mtp_layers = s.mtp_layers;
  if (mtp_layers > 0 && !checkpoint.is_dummy() && !in.any("mtp.")) {
    log::warn(
        "{}: config.json says mtp_num_hidden_layers {}, but the checkpoint has no mtp.* tensors (some re-exports drop them): NEXTN is not "
        "available",
        checkpoint.location(), mtp_layers);
    mtp_layers = 0;
  }
  if (mtp_layers > 0) {
    MtpTensors mtp;
    mtp.fc = in.take("mtp.fc.weight", {s.hidden_size, 2 * s.hidden_size});
    mtp.pre_norm_embedding = in.take("mtp.pre_fc_norm_embedding.weight", {s.hidden_size});
    mtp.pre_norm_hidden = in.take("mtp.pre_fc_norm_hidden.weight", {s.hidden_size});
    mtp.norm = in.take("mtp.norm.weight", {s.hidden_size});
    mtp.layer = take_layer(in, "mtp.layers.0.", LayerKind::kFullAttention, s);
    refuse_left(in, "mtp.");
    out.mtp = std::move(mtp);
  }
  refuse_left(in, p == "model." ? "model." : "model.language_model.");
  if (!in.status().ok()) return in.status();
  size_t ignored = 0;
  for (const std::string& name : in.left()) ignored += !is_buffer(name) && !name.starts_with("mtp.");
  if (ignored > 0) log::warn("{}: {} tensors outside the text model are ignored", checkpoint.location(), ignored);
  spec->tied_head = out.tied_head;
  spec->mtp_layers = mtp_layers;
  return out;
}

Result<DrafterTensors> bind_drafter(const Checkpoint& checkpoint, const DrafterSpec& s) {
  Binder in(checkpoint);
  DrafterTensors out;
  const int64_t hidden = s.hidden_size, taps = static_cast<int64_t>(s.taps.size());
  if (const TensorView* fc = checkpoint.find("fc.weight"); fc != nullptr && fc->shape.size() == 2 && fc->shape[1] != taps * hidden) {
    const int64_t width = fc->shape[1];
    const std::string cause =
        width % hidden == 0 ? fmt::format("it was trained on {} taps, and target_layer_ids in config.json has {}", width / hidden, taps)
                            : "config.json and the checkpoint are of different drafters";
    in.fail(fmt::format("{}/{}: tensor fc.weight takes features of width {} (shape {}), but {} taps × hidden {} = {}; likely cause: {}",
                        checkpoint.location(), fc->file, width, shape_text(fc->shape), taps, hidden, taps * hidden, cause));
  }
  out.fc = in.take("fc.weight", {hidden, taps * hidden});
  out.hidden_norm = in.take("hidden_norm.weight", {hidden});
  out.norm = in.take("norm.weight", {hidden});
  for (size_t i = 0; i < s.layers.size() && in.status().ok(); ++i) {
    const std::string p = fmt::format("layers.{}.", i);
    DrafterLayer layer;
    layer.input_norm = in.take(p + "input_layernorm.weight", {hidden});
    layer.post_attention_norm = in.take(p + "post_attention_layernorm.weight", {hidden});
    layer.attention = take_attention(in, p, hidden, s.heads, s.kv_heads, s.head_dim, /*gate=*/false);
    layer.mlp = take_mlp(in, p, hidden, s.intermediate_size);
    out.layers.push_back(std::move(layer));
  }
  // Some exports carry copies of the target's embedding and head, which the target serves itself. All else belongs to another architecture.
  if (in.status().ok())
    for (const std::string& name : in.left()) {
      if (name == "embed_tokens.weight" || name == "lm_head.weight")
        log::info("{}: {} is not used: the target's serves the drafter", checkpoint.location(), name);
      else refuse_left(in, name);
    }
  if (!in.status().ok()) return in.status();
  return out;
}

Status check_pair(const ModelSpec& target, const DrafterSpec& drafter) {
  const auto differ = [](std::string_view what, int64_t draft, int64_t of_target, std::string_view cause) {
    return Status(Code::kBadModel, fmt::format("the drafter was made for another target: its {} is {}, the target's is {}; {}", what, draft,
                                               of_target, cause));
  };
  constexpr std::string_view kSize = "likely cause: a drafter of another model size";
  if (drafter.hidden_size != target.hidden_size) return differ("hidden_size", drafter.hidden_size, target.hidden_size, kSize);
  if (drafter.vocab_size != target.vocab_size)
    return differ("vocab_size", drafter.vocab_size, target.vocab_size,
                  "likely cause: a drafter of another model generation, with another tokenizer");
  if (drafter.num_target_layers != target.num_layers())
    return differ("num_target_layers", drafter.num_target_layers, target.num_layers(), kSize);
  for (const int32_t tap : drafter.taps)
    if (tap < 0 || tap >= target.num_layers())
      return Status(Code::kBadModel, fmt::format("the drafter taps layer {} (target_layer_ids), but the target has layers 0 … {}", tap,
                                                 target.num_layers() - 1));
  if (drafter.mask_id < 0 || drafter.mask_id >= target.vocab_size)
    return Status(Code::kBadModel, fmt::format("the drafter's mask_token_id is {}, but the target's ids are 0 … {}", drafter.mask_id,
                                               target.vocab_size - 1));
  return {};
}

}  // namespace ddtree
