// config.json, generation_config.json: the published files parse to the published numbers; everything else is refused by name.
#include "model/config.h"

#include <algorithm>
#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <functional>
#include <nlohmann/json.hpp>

#include "model/describe.h"
#include "support/small_model.h"

using namespace ddtree;
using namespace ddtree::test;
using Catch::Matchers::ContainsSubstring;
using nlohmann::json;

namespace {

struct Published {
  const char* name;
  int64_t hidden, intermediate, layers, heads, kv_heads, key_heads, value_heads;
  bool tied;
};
// The published dense sizes; all share vocabulary 248320, head_dim 256, 128-wide delta heads, convolution 4 and an interval of 4.
const Published kPublished[] = {
    {"Qwen3.5-0.8B", 1024, 3584, 24, 8, 2, 16, 16, true},   {"Qwen3.5-2B", 2048, 6144, 24, 8, 2, 16, 16, true},
    {"Qwen3.5-4B", 2560, 9216, 32, 16, 4, 16, 32, true},    {"Qwen3.5-9B", 4096, 12288, 32, 16, 4, 16, 32, false},
    {"Qwen3.5-27B", 5120, 17408, 64, 24, 4, 16, 48, false}, {"Qwen3.6-27B", 5120, 17408, 64, 24, 4, 16, 48, false},
};

json text_config(const Published& m) {
  json layer_types = json::array();
  for (int64_t i = 0; i < m.layers; ++i) layer_types.push_back(i % 4 == 3 ? "full_attention" : "linear_attention");
  return {{"model_type", "qwen3_5_text"},
          {"dtype", "bfloat16"},
          {"hidden_size", m.hidden},
          {"intermediate_size", m.intermediate},
          {"num_hidden_layers", m.layers},
          {"num_attention_heads", m.heads},
          {"num_key_value_heads", m.kv_heads},
          {"head_dim", 256},
          {"hidden_act", "silu"},
          {"attention_bias", false},
          {"attention_dropout", 0.0},
          {"attn_output_gate", true},
          {"full_attention_interval", 4},
          {"layer_types", layer_types},
          {"linear_num_key_heads", m.key_heads},
          {"linear_num_value_heads", m.value_heads},
          {"linear_key_head_dim", 128},
          {"linear_value_head_dim", 128},
          {"linear_conv_kernel_dim", 4},
          {"mamba_ssm_dtype", "float32"},
          {"rms_norm_eps", 1e-6},
          {"vocab_size", 248320},
          {"max_position_embeddings", 262144},
          {"tie_word_embeddings", m.tied},
          {"rope_parameters",
           {{"rope_theta", 10000000},
            {"rope_type", "default"},
            {"partial_rotary_factor", 0.25},
            {"mrope_section", {11, 11, 10}},
            {"mrope_interleaved", true}}},
          {"mtp_num_hidden_layers", 1},
          {"mtp_use_dedicated_embeddings", false},
          {"bos_token_id", 248044},
          {"eos_token_id", 248044},
          {"pad_token_id", nullptr},
          {"use_cache", true}};
}

json nested(const Published& m) {
  return {{"architectures", {"Qwen3_5ForConditionalGeneration"}},
          {"model_type", "qwen3_5"},
          {"text_config", text_config(m)},
          {"tie_word_embeddings", m.tied},
          {"image_token_id", 248056},
          {"vision_config", {{"depth", 27}, {"hidden_size", 1152}}},
          {"transformers_version", "4.57.1"}};
}

// A text-only re-export with the older keys: flat, torch_dtype, rope_theta beside the rest, no layer_types.
json flat(const Published& m) {
  json c = text_config(m);
  c["architectures"] = {"Qwen3_5ForCausalLM"};
  for (const char* key : {"dtype", "rope_parameters", "layer_types"}) c.erase(key);
  c["torch_dtype"] = "bfloat16";
  c["rope_theta"] = 1e7;
  c["partial_rotary_factor"] = 0.25;
  c["rope_scaling"] = {{"type", "mrope"}, {"mrope_section", {11, 11, 10}}};
  c["eos_token_id"] = {248046, 248044};
  return c;
}

void check_published(const Published& m, const ModelSpec& s) {
  INFO(m.name);
  CHECK(s.hidden_size == m.hidden);
  CHECK(s.intermediate_size == m.intermediate);
  REQUIRE(s.num_layers() == m.layers);
  for (int64_t i = 0; i < m.layers; ++i) CHECK((s.layers[static_cast<size_t>(i)] == LayerKind::kFullAttention) == ((i + 1) % 4 == 0));
  CHECK(s.heads == m.heads);
  CHECK(s.kv_heads == m.kv_heads);
  CHECK(s.head_dim == 256);
  CHECK(s.rotary_dim == 64);
  CHECK(s.rope_theta == 1e7);
  CHECK(s.key_heads == m.key_heads);
  CHECK(s.value_heads == m.value_heads);
  CHECK(s.key_dim == 128);
  CHECK(s.value_dim == 128);
  CHECK(s.conv_width == 4);
  CHECK(s.norm_eps == 1e-6f);
  CHECK(s.vocab_size == 248320);
  CHECK(s.max_positions == 262144);
  CHECK(s.mtp_layers == 1);
  CHECK(s.tied_head == m.tied);
  CHECK(s.output_gate);
  CHECK(s.dtype == "bfloat16");
}

std::string target_error(const json& c) {
  Result<ModelSpec> r = parse_model_config(c.dump(), "config.json");
  if (!r.ok()) CHECK(r.status().code() == Code::kBadModel);
  return r.ok() ? "accepted" : r.status().message();
}

std::string drafter_error(const json& c, int64_t target_layers = 0) {
  Result<DrafterSpec> r = parse_drafter_config(c.dump(), "config.json", target_layers);
  if (!r.ok()) CHECK(r.status().code() == Code::kBadModel);
  return r.ok() ? "accepted" : r.status().message();
}

json with(json c, const char* pointer, json value) {
  c[json::json_pointer(pointer)] = std::move(value);
  return c;
}
json without(json c, const char* key) {
  c["text_config"].erase(key);
  return c;
}

}  // namespace

TEST_CASE("published targets parse, nested and flat") {
  for (const Published& m : kPublished) {
    INFO(m.name);
    Result<ModelSpec> a = parse_model_config(nested(m).dump(), "config.json");
    REQUIRE(a.status().message() == "");
    check_published(m, *a);
    CHECK(a->architecture == "Qwen3_5ForConditionalGeneration");
    CHECK(a->eos_ids == std::vector<int32_t>{248044});
    Result<ModelSpec> b = parse_model_config(flat(m).dump(), "config.json");
    REQUIRE(b.status().message() == "");
    check_published(m, *b);
    CHECK(b->eos_ids == std::vector<int32_t>{248046, 248044});
  }
}

TEST_CASE("parameter counts of the 27B pair are the published ones") {
  ModelSpec s = *parse_model_config(nested(kPublished[5]).dump(), "config.json");
  CHECK(std::abs(static_cast<double>(parameter_count(s)) - 26.896e9) < 1e6);
  CHECK(s.conv_channels() == 10240);
}

TEST_CASE("what this build does not serve is refused by key, value and alternative") {
  const json good = nested(kPublished[5]);
  REQUIRE(target_error(good) == "accepted");

  json moe = with(with(good, "/model_type", "qwen3_5_moe"), "/architectures/0", "Qwen3_5MoeForConditionalGeneration");
  moe["text_config"]["model_type"] = "qwen3_5_moe_text";
  moe["text_config"]["num_experts"] = 256;
  moe["text_config"].erase("intermediate_size");
  CHECK(target_error(moe) ==
        "config.json: num_experts is 256, which this build does not serve; mixture-of-experts models are not built yet; supported: the "
        "dense Qwen3.5, "
        "Qwen3.6 and Qwen3.8 models (model_type qwen3_5 or qwen3_5_text)");

  const json fp8 = {{"quant_method", "fp8"}, {"fmt", "e4m3"}, {"weight_block_size", {128, 128}}};
  CHECK(target_error(with(good, "/quantization_config", fp8)) ==
        "config.json: quantization_config is of method \"fp8\", which this build does not serve; quantised checkpoints are not built yet: "
        "the BF16 checkpoint "
        "of the same model works instead");
  CHECK_THAT(target_error(with(good, "/text_config/quantization_config", fp8)),
             ContainsSubstring("text_config.quantization_config is of method \"fp8\""));

  CHECK_THAT(target_error({{"architectures", {"Qwen3ForCausalLM"}}, {"model_type", "qwen3"}, {"hidden_size", 4096}}),
             ContainsSubstring("model_type is \"qwen3\"") && ContainsSubstring("qwen3_5"));
  CHECK_THAT(target_error({{"architectures", {"Qwen3NextForCausalLM"}}, {"model_type", "qwen3_next"}, {"num_experts", 512}}),
             ContainsSubstring("mixture-of-experts"));
  CHECK_THAT(target_error({{"architectures", {"LlamaForCausalLM"}}, {"model_type", "llama"}}),
             ContainsSubstring("model_type is \"llama\""));
  CHECK_THAT(target_error(with(good, "/architectures/0", "Qwen4ForCausalLM")), ContainsSubstring("architectures is \"Qwen4ForCausalLM\""));
  CHECK_THAT(target_error(small_drafter_config()), ContainsSubstring("it is a drafter: give it with --speculative-draft-model-path"));

  CHECK_THAT(target_error(with(good, "/text_config/rope_parameters/rope_type", "yarn")),
             ContainsSubstring("text_config.rope_parameters.rope_type is \"yarn\"") && ContainsSubstring("original context length"));
  CHECK_THAT(target_error(with(good, "/text_config/rope_scaling", {{"type", "linear"}, {"factor", 4}})),
             ContainsSubstring("text_config.rope_scaling.type is \"linear\""));
  CHECK_THAT(target_error(with(good, "/text_config/hidden_act", "gelu")),
             ContainsSubstring("text_config.hidden_act is \"gelu\"; supported: \"silu\""));
  CHECK_THAT(target_error(with(good, "/text_config/attention_bias", true)),
             ContainsSubstring("text_config.attention_bias is true; supported: false"));
  CHECK_THAT(target_error(with(good, "/text_config/attn_output_gate", false)), ContainsSubstring("text_config.attn_output_gate is false"));
  CHECK_THAT(target_error(with(good, "/text_config/output_gate_type", "sigmoid")),
             ContainsSubstring("text_config.output_gate_type is \"sigmoid\""));
  CHECK_THAT(target_error(with(good, "/text_config/layer_types/5", "chunked_attention")),
             ContainsSubstring("text_config.layer_types[5] is \"chunked_attention\""));
}

TEST_CASE("every number of a target is checked for type, range and divisibility") {
  const json good = nested(kPublished[5]);
  for (const char* key :
       {"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
        "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim", "max_position_embeddings"}) {
    INFO(key);
    const std::string pointer = std::string("/text_config/") + key, path = std::string("config.json: text_config.") + key;
    CHECK_THAT(target_error(without(good, key)), ContainsSubstring(path + " is missing; it must be an integer from 1 to "));
    for (const json& value : {json(0), json(-1), json(1.5), json("16"), json(true), json(1000000000000000), json(18446744073709551615u),
                              json(1e300), json::array({1})})
      CHECK_THAT(target_error(with(good, pointer.c_str(), value)),
                 ContainsSubstring(path + " is " + value.dump() + "; it must be an integer from 1 to "));
  }
  CHECK(target_error(with(good, "/text_config/hidden_size", 5120.0)) == "accepted");
  CHECK(target_error(with(good, "/text_config/num_key_value_heads", 5)) ==
        "config.json: text_config.num_key_value_heads is 5; it must divide num_attention_heads (24)");
  CHECK_THAT(target_error(with(good, "/text_config/linear_num_value_heads", 40)),
             ContainsSubstring("linear_num_key_heads is 16; it must divide linear_num_value_heads (40)"));
  CHECK_THAT(target_error(with(good, "/text_config/num_hidden_layers", 63)),
             ContainsSubstring("layer_types is a list of 64; it must be a list of num_hidden_layers (63) names"));
  CHECK_THAT(target_error(with(good, "/text_config/rope_parameters/partial_rotary_factor", 0.002)),
             ContainsSubstring("partial_rotary_factor is 0.002; times head_dim (256) it must be an even number of at least 2, and is 0"));
  CHECK_THAT(target_error(with(good, "/text_config/rope_parameters/partial_rotary_factor", 0.13)), ContainsSubstring("and is 33"));
  CHECK_THAT(target_error(with(good, "/text_config/rope_parameters/partial_rotary_factor", 1.5)),
             ContainsSubstring("it must be a number from 0.001 to 1"));
  CHECK_THAT(target_error(with(good, "/text_config/rope_parameters/rope_theta", 0)),
             ContainsSubstring("rope_parameters.rope_theta is 0; it must be a number"));
  CHECK_THAT(target_error(with(good, "/text_config/rms_norm_eps", -1)), ContainsSubstring("rms_norm_eps is -1; it must be a number"));
  CHECK_THAT(target_error(with(good, "/text_config/eos_token_id", 248320)),
             ContainsSubstring("eos_token_id is 248320; it must be an integer from 0 to 248319"));
  CHECK_THAT(target_error(with(good, "/text_config/eos_token_id", {1, "x"})), ContainsSubstring("eos_token_id is [1,\"x\"] with \"x\""));
  CHECK_THAT(target_error(with(good, "/text_config/tie_word_embeddings", "no")),
             ContainsSubstring("tie_word_embeddings is \"no\"; it must be true or false"));
  CHECK_THAT(target_error(with(good, "/text_config", 3)), ContainsSubstring("text_config is 3; it must be an object"));
  CHECK_THAT(target_error(json::array()), ContainsSubstring("it is [], expected an object"));
}

TEST_CASE("text that is no JSON, or nests without end, is an error with its place") {
  const auto message = [](std::string_view text) { return parse_model_config(text, "x/config.json").status().message(); };
  CHECK_THAT(message("{\"a\": }"), ContainsSubstring("x/config.json: not valid JSON: line 1, column 7: unexpected"));
  CHECK_THAT(message(""), ContainsSubstring("not valid JSON"));
  CHECK_THAT(message("{\"hidden_size\": 1e999}"), ContainsSubstring("not valid JSON") && ContainsSubstring("1e999"));
  CHECK_THAT(message(std::string(1 << 20, '[')), ContainsSubstring("nested deeper than 64 levels"));
  CHECK_THAT(message("{\"a\": \"\xff\xfe\"}"), ContainsSubstring("not valid JSON"));
}

TEST_CASE("an MTP head that cannot be run is left out, not refused") {
  const json good = nested(kPublished[5]);
  CHECK(parse_model_config(with(good, "/text_config/mtp_num_hidden_layers", 3).dump(), "c")->mtp_layers == 0);
  CHECK(parse_model_config(with(good, "/text_config/mtp_use_dedicated_embeddings", true).dump(), "c")->mtp_layers == 0);
  CHECK(parse_model_config(without(good, "mtp_num_hidden_layers").dump(), "c")->mtp_layers == 0);
}

namespace {

struct PublishedDrafter {
  const char* name;
  int64_t hidden, intermediate, layers, kv_heads, target_layers;
  std::vector<int32_t> taps;
  int sliding;
};

json drafter_config(const PublishedDrafter& d) {
  json types = json::array();
  for (int i = 0; i < d.layers; ++i) types.push_back(i < d.sliding ? "sliding_attention" : "full_attention");
  return {{"architectures", {"DFlashDraftModel"}},
          {"model_type", "qwen3"},
          {"hidden_size", d.hidden},
          {"intermediate_size", d.intermediate},
          {"num_hidden_layers", d.layers},
          {"num_attention_heads", 32},
          {"num_key_value_heads", d.kv_heads},
          {"head_dim", 128},
          {"num_target_layers", d.target_layers},
          {"layer_types", types},
          {"sliding_window", d.sliding ? json(2048) : json(nullptr)},
          {"use_sliding_window", d.sliding > 0},
          {"max_window_layers", d.layers},
          {"block_size", 16},
          {"dflash_config", {{"mask_token_id", 248070}, {"target_layer_ids", d.taps}}},
          {"rms_norm_eps", 1e-6},
          {"rope_theta", 10000000},
          {"rope_scaling", nullptr},
          {"hidden_act", "silu"},
          {"attention_bias", false},
          {"max_position_embeddings", 262144},
          {"tie_word_embeddings", false},
          {"vocab_size", 248320},
          {"dtype", "bfloat16"}};
}

const PublishedDrafter kDrafters[] = {
    {"Qwen3.5-4B-DFlash", 2560, 9728, 5, 8, 32, {1, 8, 15, 22, 29}, 0},
    {"Qwen3.5-27B-DFlash", 5120, 17408, 5, 8, 64, {1, 16, 31, 46, 61}, 0},
    {"Qwen3.6-27B-DFlash", 5120, 17408, 5, 8, 64, {1, 16, 31, 46, 61}, 4},
};

}  // namespace

TEST_CASE("published drafters parse") {
  for (const PublishedDrafter& d : kDrafters) {
    INFO(d.name);
    Result<DrafterSpec> r = parse_drafter_config(drafter_config(d).dump(), "config.json");
    REQUIRE(r.status().message() == "");
    CHECK(r->hidden_size == d.hidden);
    CHECK(r->taps == d.taps);
    CHECK(r->mask_id == 248070);
    CHECK(r->block_size == 16);
    CHECK(r->rope_theta == 1e7);
    CHECK(r->window == (d.sliding ? 2048 : 0));
    for (int i = 0; i < d.layers; ++i) {
      CHECK(r->layers[static_cast<size_t>(i)].sliding == (i < d.sliding));
      CHECK(r->layers[static_cast<size_t>(i)].causal == (i < d.sliding));  // sliding layers of these drafters are causal inside the block
    }
    // The documented default gives the published taps.
    json c = drafter_config(d);
    c["dflash_config"].erase("target_layer_ids");
    CHECK(parse_drafter_config(c.dump(), "config.json")->taps == d.taps);
  }
  CHECK(parameter_count(*parse_drafter_config(drafter_config(kDrafters[2]).dump(), "c")) ==
        131072000 + 5 * (319815680 + 2 * 5120 + 2 * 128) + 2 * 5120);  // fc, layers, norms
}

TEST_CASE("a drafter's other spellings") {
  const json good = drafter_config(kDrafters[2]);
  json c = good;
  c.erase("block_size");
  c["dflash_config"]["block_size"] = 8;
  c["rope_parameters"] = {{"rope_theta", 5000000}, {"rope_type", "default"}};
  c.erase("rope_theta");
  c["is_causal"] = false;
  Result<DrafterSpec> r = parse_drafter_config(c.dump(), "config.json");
  REQUIRE(r.status().message() == "");
  CHECK(r->block_size == 8);
  CHECK(r->rope_theta == 5e6);
  CHECK(r->layers[0].sliding);
  CHECK_FALSE(r->layers[0].causal);  // is_causal is obeyed where it is given
  c["is_causal"] = true;
  CHECK(parse_drafter_config(c.dump(), "config.json")->layers[4].causal);

  c = good;  // layer_types wins over use_sliding_window
  c["use_sliding_window"] = false;
  CHECK(parse_drafter_config(c.dump(), "config.json")->layers[0].sliding);
  c = good;  // without layer_types: max_window_layers and use_sliding_window
  c.erase("layer_types");
  c["max_window_layers"] = 3;
  r = parse_drafter_config(c.dump(), "config.json");
  REQUIRE(r.status().message() == "");
  CHECK_FALSE(r->layers[2].sliding);
  CHECK(r->layers[3].sliding);
  c = good;
  c["dflash_config"].erase("mask_token_id");
  CHECK(parse_drafter_config(c.dump(), "config.json")->mask_id == -1);
  c = good;
  c.erase("num_target_layers");
  c["dflash_config"].erase("target_layer_ids");
  CHECK_THAT(drafter_error(c),
             ContainsSubstring("num_target_layers is missing; it is needed where dflash_config.target_layer_ids is missing too"));
  CHECK(parse_drafter_config(c.dump(), "config.json", 64)->taps == std::vector<int32_t>{1, 16, 31, 46, 61});
}

TEST_CASE("default taps") {
  CHECK(default_taps(36, 5) == std::vector<int32_t>{1, 9, 17, 25, 33});
  CHECK(default_taps(40, 8) == std::vector<int32_t>{1, 6, 11, 16, 22, 27, 32, 37});
  CHECK(default_taps(24, 1) == std::vector<int32_t>{12});
}

TEST_CASE("drafters that are broken or of another kind are refused") {
  const json good = drafter_config(kDrafters[2]);
  REQUIRE(drafter_error(good) == "accepted");
  CHECK_THAT(drafter_error(nested(kPublished[5])),
             ContainsSubstring("a drafter must be a DFlash checkpoint (architectures [\"DFlashDraftModel\"])"));
  CHECK_THAT(drafter_error(with(good, "/architectures/0", "LlamaForCausalLMEagle3")),
             ContainsSubstring("architectures is \"LlamaForCausalLMEagle3\""));
  CHECK_THAT(drafter_error(with(good, "/dflash_config/selector_rank", 256)),
             ContainsSubstring("dflash_config.selector_rank is 256") && ContainsSubstring("no candidate selector"));
  CHECK_THAT(drafter_error(with(good, "/conv_kernel_size", 2)), ContainsSubstring("conv_kernel_size is 2"));
  CHECK_THAT(drafter_error(with(good, "/quantization_config", {{"quant_method", "gptq"}})),
             ContainsSubstring("quantization_config is of method \"gptq\""));
  CHECK_THAT(drafter_error(with(good, "/rope_scaling", {{"rope_type", "yarn"}})), ContainsSubstring("rope_scaling.rope_type is \"yarn\""));
  CHECK_THAT(drafter_error(with(good, "/dflash_config/mask_token_id", 248320)),
             ContainsSubstring("dflash_config.mask_token_id is 248320; it must be an integer from 0 to 248319"));
  CHECK_THAT(drafter_error(with(good, "/dflash_config/target_layer_ids", {1, 64})),
             ContainsSubstring("target_layer_ids is [1,64] with 64; it must be an integer from 0 to 63"));
  CHECK(drafter_error(with(good, "/dflash_config/target_layer_ids", {1, 63})) == "accepted");  // the last layer is a legal tap
  CHECK_THAT(drafter_error(with(good, "/dflash_config/target_layer_ids", {5, 1, 5})), ContainsSubstring("no layer may come twice"));
  CHECK_THAT(drafter_error(with(good, "/dflash_config/target_layer_ids", json::array())),
             ContainsSubstring("it must name at least one layer"));
  CHECK_THAT(drafter_error(with(good, "/block_size", 1)), ContainsSubstring("block_size is 1; it must be an integer from 2 to 256"));
  CHECK_THAT(drafter_error(with(good, "/sliding_window", 0)), ContainsSubstring("sliding_window is 0"));
  CHECK_THAT(drafter_error(with(good, "/sliding_window", nullptr)), ContainsSubstring("sliding_window is missing"));
  CHECK_THAT(drafter_error(with(good, "/head_dim", 127)), ContainsSubstring("head_dim is 127; it must be even"));
  CHECK_THAT(drafter_error(with(good, "/num_key_value_heads", 7)),
             ContainsSubstring("num_key_value_heads is 7; it must divide num_attention_heads (32)"));
  CHECK_THAT(drafter_error(with(good, "/hidden_act", "gelu")), ContainsSubstring("hidden_act is \"gelu\""));
  CHECK_THAT(drafter_error(with(good, "/attention_bias", true)), ContainsSubstring("attention_bias is true"));
  CHECK_THAT(drafter_error(with(good, "/dflash_config", 5)), ContainsSubstring("dflash_config is 5; it must be an object"));
  json c = good;
  c.erase("rope_theta");
  CHECK_THAT(drafter_error(c), ContainsSubstring("rope_theta is missing; it must be a number"));
}

TEST_CASE("generation_config.json") {
  const auto parse = [](const char* text) { return parse_generation_config(text, "generation_config.json", 248320); };
  Result<GenerationDefaults> d =
      parse(R"({"bos_token_id":248044,"eos_token_id":[248046,248044,248046],"do_sample":true,"temperature":1.0,"top_k":20,"top_p":0.95})");
  REQUIRE(d.ok());
  CHECK(d->eos_ids == std::vector<int32_t>{248046, 248044});
  CHECK(d->do_sample);
  CHECK(d->top_k == 20);
  CHECK(d->top_p == 0.95f);
  CHECK(d->min_p == 0.0f);
  CHECK(d->repetition_penalty == 1.0f);
  CHECK(parse(R"({"eos_token_id":7})")->eos_ids == std::vector<int32_t>{7});
  CHECK(parse("{}")->eos_ids.empty());
  CHECK(parse(R"({"top_k":-1,"temperature":null})")->top_k == 0);
  CHECK_THAT(parse(R"({"temperature":-0.5})").status().message(),
             ContainsSubstring("generation_config.json: temperature is -0.5; it must be a number from 0 to 100"));
  CHECK_THAT(parse(R"({"top_p":0})").status().message(), ContainsSubstring("top_p is 0"));
  CHECK_THAT(parse(R"({"eos_token_id":[1,999999]})").status().message(),
             ContainsSubstring("eos_token_id is [1,999999] with 999999; it must be an integer from 0 to 248319"));
}
