// Tensor names -> the part each tensor plays. Names are those of the published Qwen3.5/3.6/3.8 and DFlash checkpoints; shapes are
// computed from the spec and checked here, so that what follows never checks a shape again.
//
// Shapes use: H hidden, I intermediate, V vocab, Q heads, K kv_heads, D head_dim; for gated delta layers k key_heads, v value_heads,
// dk key_dim, dv value_dim, C = 2·k·dk + v·dv. Linear weights are [out, in], row-major. dtype: BF16, F16 or F32, each tensor its own.
#pragma once

#include <optional>
#include <vector>

#include "base/status.h"
#include "model/checkpoint.h"
#include "model/spec.h"
#include "model/tensor.h"

namespace ddtree {

struct MlpTensors {
  TensorView gate_proj;  // [I, H]
  TensorView up_proj;    // [I, H]
  TensorView down_proj;  // [H, I]
};

// q_proj of a target layer: per head h, rows 2·D·h … +D are the query, the next D its output gate (spec.output_gate).
struct FullAttentionTensors {
  TensorView q_proj;  // [2·Q·D, H] with output gate, [Q·D, H] without (drafter)
  TensorView k_proj;  // [K·D, H]
  TensorView v_proj;  // [K·D, H]
  TensorView o_proj;  // [H, Q·D]
  TensorView q_norm;  // [D]  zero-centred in the target and MTP, plain in the drafter
  TensorView k_norm;  // [D]  likewise
};

struct GatedDeltaTensors {
  TensorView in_proj_qkv;  // [C, H]  rows: q (k·dk), k (k·dk), v (v·dv); heads are consecutive blocks inside each
  TensorView in_proj_z;    // [v·dv, H]
  TensorView in_proj_a;    // [v, H]
  TensorView in_proj_b;    // [v, H]
  TensorView conv1d;       // [C, 1, W]  tap W-1 multiplies the current token; no bias
  TensorView a_log;        // [v]
  TensorView dt_bias;      // [v]
  TensorView norm;         // [dv]  plain (no +1), shared by all value heads
  TensorView out_proj;     // [H, v·dv]
};

struct TargetLayer {
  LayerKind kind = LayerKind::kFullAttention;
  TensorView input_norm;           // [H]  input_layernorm, zero-centred
  TensorView post_attention_norm;  // [H]  post_attention_layernorm, zero-centred
  GatedDeltaTensors delta;         // filled if kind is kGatedDelta
  FullAttentionTensors attention;  // filled if kind is kFullAttention
  MlpTensors mlp;
};

// The NEXTN head: x = fc · [norm(embedding of the next token), norm(hidden of this one)], one full-attention layer, norm, LM head.
struct MtpTensors {
  TensorView fc;                  // [H, 2·H]  columns 0…H-1 take the embedding, H…2H-1 the hidden state
  TensorView pre_norm_embedding;  // [H]  pre_fc_norm_embedding, zero-centred
  TensorView pre_norm_hidden;     // [H]  pre_fc_norm_hidden, zero-centred
  TensorView norm;                // [H]  zero-centred
  TargetLayer layer;              // kFullAttention
};

struct TargetTensors {
  TensorView embed;                 // [V, H]
  std::vector<TargetLayer> layers;  // [spec.num_layers()]
  TensorView final_norm;            // [H]  zero-centred
  TensorView lm_head;               // [V, H]  a view of embed where the head is tied
  bool tied_head = false;           // no lm_head.weight in the checkpoint
  std::optional<MtpTensors> mtp;    // none: the config has none, or a re-export dropped the tensors (a warning is logged)
};

// All norms of the drafter are plain (w·x/rms). It has no embedding and no head: the target's serve both.
struct DrafterLayer {
  TensorView input_norm;           // [H]
  TensorView post_attention_norm;  // [H]
  FullAttentionTensors attention;  // no output gate; Q, K, D are the drafter's own
  MlpTensors mlp;                  // I is the drafter's own
};

struct DrafterTensors {
  TensorView fc;                     // [H, taps·H]  feature = concatenated outputs of the target's tapped layers, in taps' order
  TensorView hidden_norm;            // [H]  after fc
  TensorView norm;                   // [H]  after the last layer
  std::vector<DrafterLayer> layers;  // [spec.layers.size()]
};

// kBadModel naming tensor, file, found and expected. Sets spec->tied_head, and spec->mtp_layers to 0 where the MTP tensors are absent.
// Tensors of a known layer that nothing here uses (a bias, a quantisation scale) are refused: ignoring them gives garbage that looks like
// text.
Result<TargetTensors> bind_target(const Checkpoint& checkpoint, ModelSpec* spec);

// Also compares fc's width with taps × hidden, giving both figures and the likely cause.
Result<DrafterTensors> bind_drafter(const Checkpoint& checkpoint, const DrafterSpec& spec);

// Was this drafter made for this target? hidden, vocabulary, layer count, taps, mask id; kBadModel with both figures.
Status check_pair(const ModelSpec& target, const DrafterSpec& drafter);

}  // namespace ddtree
