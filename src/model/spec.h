// What config.json says, in our terms. Every shape in the engine comes from here; nothing is assumed of a model's size.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace ddtree {

enum class LayerKind : uint8_t { kGatedDelta, kFullAttention };

// The target (reference: the published Qwen3.5/3.6 configs; nested text_config or flat).
struct ModelSpec {
  std::string architecture;  // architectures[0]; "" where the file has none
  std::string dtype;         // dtype or torch_dtype as written ("bfloat16"); "" where the file has none
  int64_t vocab_size = 0;    // rows of embed_tokens (padded)
  int64_t hidden_size = 0;
  int64_t intermediate_size = 0;
  std::vector<LayerKind> layers;                  // [num_hidden_layers]
  int64_t heads = 0, kv_heads = 0, head_dim = 0;  // full attention; head h reads kv head h / (heads / kv_heads)
  int64_t rotary_dim = 0;                         // head_dim · partial_rotary_factor, even; NeoX pairing (i, i + rotary_dim/2)
  double rope_theta = 1e7;
  bool output_gate = true;                 // sigmoid gate, interleaved with q per head in q_proj
  int64_t key_heads = 0, value_heads = 0;  // gated delta: value head j reads key head j / (value_heads / key_heads)
  int64_t key_dim = 0, value_dim = 0;      // per head
  int64_t conv_width = 4;
  float norm_eps = 1e-6f;
  bool tied_head = false;  // no lm_head.weight in the checkpoint
  int mtp_layers = 0;      // 0: no MTP head
  int64_t max_positions = 0;
  std::vector<int32_t> eos_ids;  // config.json's own; generation_config.json's come first where present

  int64_t num_layers() const { return static_cast<int64_t>(layers.size()); }
  int64_t conv_channels() const { return 2 * key_heads * key_dim + value_heads * value_dim; }
};

// The DFlash drafter. All its norms are plain (w·x/rms), unlike the target's (1 + w).
struct DrafterSpec {
  int64_t hidden_size = 0, intermediate_size = 0;
  int64_t heads = 0, kv_heads = 0, head_dim = 0;
  struct Layer {
    bool sliding = false;  // sees positions >= own - (window - 1)
    bool causal = false;   // inside the block; `is_causal` if the config has it, else sliding
  };
  std::vector<Layer> layers;
  int64_t window = 0;         // sliding_window
  int64_t block_size = 0;     // anchor + masks
  int32_t mask_id = -1;       // never negative once loaded (load_pair)
  std::vector<int32_t> taps;  // target_layer_ids: OUTPUT of decoder layer id, 0-based
  int64_t num_target_layers = 0;
  double rope_theta = 1e7;
  float norm_eps = 1e-6f;
  int64_t vocab_size = 0;
  int64_t max_positions = 0;
};

// generation_config.json: what a request gets where it says nothing.
struct GenerationDefaults {
  bool do_sample = false;
  float temperature = 1.0f, top_p = 1.0f, min_p = 0.0f, repetition_penalty = 1.0f;
  int32_t top_k = 0;             // 0: off
  std::vector<int32_t> eos_ids;  // every stop id of the file
};

}  // namespace ddtree
