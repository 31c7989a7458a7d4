// A complete Qwen3.5-shaped model of a few kilobytes and its drafter, as files: what loader tests break in one place at a time. The names
// and shapes here are written down independently of src/model/roles.cpp.
#pragma once

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>

#include "support/safetensors_writer.h"

namespace ddtree::test {

// Odd sizes on purpose: no two extents are equal by accident, so that a swapped shape is seen.
inline nlohmann::json small_config() {
  return nlohmann::json::parse(R"({"architectures":["Qwen3_5ForConditionalGeneration"],"model_type":"qwen3_5","tie_word_embeddings":false,
    "vision_config":{"depth":27},
    "text_config":{"model_type":"qwen3_5_text","dtype":"bfloat16","vocab_size":96,"hidden_size":20,"intermediate_size":28,"num_hidden_layers":3,
      "num_attention_heads":6,"num_key_value_heads":2,"head_dim":16,"hidden_act":"silu","attention_bias":false,"attn_output_gate":true,
      "layer_types":["linear_attention","full_attention","linear_attention"],"linear_num_key_heads":2,"linear_num_value_heads":6,
      "linear_key_head_dim":8,"linear_value_head_dim":4,"linear_conv_kernel_dim":4,"rms_norm_eps":1e-6,"max_position_embeddings":512,
      "rope_parameters":{"rope_type":"default","rope_theta":10000000,"partial_rotary_factor":0.25},
      "mtp_num_hidden_layers":1,"eos_token_id":5,"tie_word_embeddings":false}})");
}

inline void add_mlp(TestTensors& t, const std::string& p, int64_t h, int64_t i) {
  t[p + "input_layernorm.weight"].shape = {h};
  t[p + "post_attention_layernorm.weight"].shape = {h};
  t[p + "mlp.gate_proj.weight"].shape = {i, h};
  t[p + "mlp.up_proj.weight"].shape = {i, h};
  t[p + "mlp.down_proj.weight"].shape = {h, i};
}

inline void add_attention(TestTensors& t, const std::string& p, int64_t h, int64_t q_rows, int64_t kv_rows, int64_t o_columns, int64_t d) {
  t[p + "self_attn.q_proj.weight"].shape = {q_rows, h};
  t[p + "self_attn.k_proj.weight"].shape = {kv_rows, h};
  t[p + "self_attn.v_proj.weight"].shape = {kv_rows, h};
  t[p + "self_attn.o_proj.weight"].shape = {h, o_columns};
  t[p + "self_attn.q_norm.weight"].shape = {d};
  t[p + "self_attn.k_norm.weight"].shape = {d};
}

inline TestTensors small_tensors(const std::string& prefix = "model.language_model.") {
  TestTensors t;
  t[prefix + "embed_tokens.weight"].shape = {96, 20};
  t[prefix + "norm.weight"].shape = {20};
  t["lm_head.weight"].shape = {96, 20};
  for (const int i : {0, 2}) {
    const std::string p = prefix + "layers." + std::to_string(i) + ".";
    add_mlp(t, p, 20, 28);
    t[p + "linear_attn.in_proj_qkv.weight"].shape = {56, 20};
    t[p + "linear_attn.in_proj_z.weight"].shape = {24, 20};
    t[p + "linear_attn.in_proj_a.weight"].shape = {6, 20};
    t[p + "linear_attn.in_proj_b.weight"].shape = {6, 20};
    t[p + "linear_attn.conv1d.weight"].shape = {56, 1, 4};
    t[p + "linear_attn.A_log"].shape = {6};
    t[p + "linear_attn.dt_bias"].shape = {6};
    t[p + "linear_attn.norm.weight"].shape = {4};
    t[p + "linear_attn.out_proj.weight"].shape = {20, 24};
  }
  add_mlp(t, prefix + "layers.1.", 20, 28);
  add_attention(t, prefix + "layers.1.", 20, 192, 32, 96, 16);
  t["mtp.fc.weight"].shape = {20, 40};
  for (const char* name : {"mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight", "mtp.norm.weight"}) t[name].shape = {20};
  add_mlp(t, "mtp.layers.0.", 20, 28);
  add_attention(t, "mtp.layers.0.", 20, 192, 32, 96, 16);
  t["model.visual.patch_embed.proj.weight"].shape = {3, 7};
  return t;
}

inline nlohmann::json small_drafter_config() {
  return nlohmann::json::parse(R"({"architectures":["DFlashDraftModel"],"model_type":"qwen3","hidden_size":20,"intermediate_size":36,
    "num_hidden_layers":2,"num_attention_heads":4,"num_key_value_heads":2,"head_dim":12,"num_target_layers":3,
    "layer_types":["sliding_attention","full_attention"],"sliding_window":64,"use_sliding_window":true,"block_size":8,
    "dflash_config":{"mask_token_id":90,"target_layer_ids":[0,2]},"rms_norm_eps":1e-6,"rope_theta":1e7,"rope_scaling":null,
    "hidden_act":"silu","attention_bias":false,"max_position_embeddings":512,"tie_word_embeddings":false,"vocab_size":96,"dtype":"bfloat16"})");
}

inline TestTensors small_drafter_tensors() {
  TestTensors t;
  t["fc.weight"].shape = {20, 40};
  t["hidden_norm.weight"].shape = {20};
  t["norm.weight"].shape = {20};
  for (const int i : {0, 1}) {
    const std::string p = "layers." + std::to_string(i) + ".";
    add_mlp(t, p, 20, 36);
    add_attention(t, p, 20, 48, 24, 48, 12);
  }
  return t;
}

// A tokenizer of single bytes with a few added tokens: valid, and as small as one can be.
inline nlohmann::json small_tokenizer() {
  nlohmann::json vocab = nlohmann::json::object();
  const char* letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,!?";
  for (int i = 0; letters[i] != 0; ++i) vocab[std::string(1, letters[i])] = i;
  nlohmann::json added = nlohmann::json::array();
  for (const auto& [id, text] : {std::pair{80, "<|im_end|>"}, {81, "<|endoftext|>"}, {91, "<|MASK|>"}})
    added.push_back({{"id", id},
                     {"content", text},
                     {"single_word", false},
                     {"lstrip", false},
                     {"rstrip", false},
                     {"normalized", false},
                     {"special", true}});
  return {{"version", "1.0"},
          {"truncation", nullptr},
          {"padding", nullptr},
          {"added_tokens", added},
          {"normalizer", {{"type", "NFC"}}},
          {"pre_tokenizer", {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", false}, {"use_regex", false}}},
          {"post_processor", nullptr},
          {"decoder", {{"type", "ByteLevel"}}},
          {"model",
           {{"type", "BPE"},
            {"dropout", nullptr},
            {"unk_token", nullptr},
            {"fuse_unk", false},
            {"byte_fallback", false},
            {"ignore_merges", false},
            {"vocab", vocab},
            {"merges", nlohmann::json::array({"a b"})}}}};
}

// A model folder in parts: change one and write.
struct SmallModel {
  nlohmann::json config = small_config();
  TestTensors tensors = small_tensors();
  nlohmann::json generation = {{"do_sample", true}, {"temperature", 0.6}, {"top_k", 20}, {"top_p", 0.95}, {"eos_token_id", {80, 81}}};

  nlohmann::json& text() { return config["text_config"]; }
  void write(const std::filesystem::path& folder, size_t shards = 1) const {
    write_file(folder / "config.json", config.dump());
    if (!generation.is_null()) write_file(folder / "generation_config.json", generation.dump());
    write_file(folder / "tokenizer.json", small_tokenizer().dump());
    write_file(folder / "tokenizer_config.json", R"({"eos_token":"<|im_end|>","chat_template":"{{ messages[0].content }}"})");
    if (shards == 1) write_single(folder, tensors);
    else write_sharded(folder, tensors, shards);
  }
};

struct SmallDrafter {
  nlohmann::json config = small_drafter_config();
  TestTensors tensors = small_drafter_tensors();
  void write(const std::filesystem::path& folder) const {
    write_file(folder / "config.json", config.dump());
    write_single(folder, tensors);
  }
};

}  // namespace ddtree::test
