// The parts that target, MTP head and drafter share: packed weights of a layer, the MLP, the attention mixer, their workspace.
#pragma once

#include "base/status.h"
#include "model/roles.h"
#include "ops/backend.h"

namespace ddtree::nn {

// Sizes that one stack of layers needs.
struct LayerShape {
  int64_t hidden = 0, intermediate = 0;
  int32_t heads = 0, kv_heads = 0, head_dim = 0;
  bool gate = false;  // sigmoid output gate
  float eps = 1e-6f;
  bool across_ranks = false;  // heads and columns are one rank's: what a mixer or an MLP adds is a partial sum
  int64_t q_columns() const { return int64_t{heads} * head_dim * (gate ? 2 : 1); }
  int64_t packed() const { return q_columns() + int64_t{2} * kv_heads * head_dim; }
};

// The embedding that target, MTP head and drafter share; on a rank of several its rows from `first_id` on.
struct Embedding {
  const ops::Weight* weight = nullptr;  // [V, H]
  int32_t first_id = 0;
};
// x[r] = the embedding of the forest's token r, on every rank.
void embed(ops::Backend* backend, const ops::Forest& forest, const Embedding& embedding, const ops::Tensor& x);

struct MlpWeights {
  const ops::Weight* gate_up = nullptr;  // [2·I, H]
  const ops::Weight* down = nullptr;     // [H, I]
};

struct AttentionWeights {
  const ops::Weight* packed = nullptr;  // [q|gate per head, k, v; H]
  const ops::Weight* o = nullptr;       // [H, heads · D]
  ops::Tensor q_norm, k_norm;           // [1, D]
};

// Activations of one stack, for at most `rows` rows; made once.
struct LayerBuffers {
  ops::Tensor x;        // [rows, H] residual stream, float32
  ops::Tensor h;        // [rows, H] normed input of a mixer or MLP
  ops::Tensor delta;    // [rows, H] what a mixer or MLP adds
  ops::Tensor packed;   // [rows, widest packed projection]
  ops::Tensor q;        // [rows, heads · D]
  ops::Tensor o;        // [rows, widest mixer output]
  ops::Tensor gate_up;  // [rows, 2·I]
  ops::Tensor act;      // [rows, I]
  ops::Tensor squares;  // [few rows, parts] of the scale that h's rows may still need
};

// The residual's update behind a mixer or an MLP, and the norm that follows it.
struct NormAfter {
  ops::Tensor residual;  // [rows, H], updated
  ops::Tensor w;         // [1, H]
  ops::Tensor y;         // [rows, H]
  ops::Tensor tap;       // [rows, H] or absent
  // The weight that y goes to, in this layer or the next; null: y is read in other ways too and must be normed.
  const ops::Weight* next = nullptr;
};

// `zero_centred`: the norms' weights get +1 (target and MTP), or not (drafter).
Result<MlpWeights> pack_mlp(ops::Backend* backend, const MlpTensors& tensors);
Result<AttentionWeights> pack_attention(ops::Backend* backend, const FullAttentionTensors& tensors, bool zero_centred);
Result<LayerBuffers> make_buffers(ops::Backend* backend, const LayerShape& shape, int64_t rows, int64_t packed, int64_t mixer_output);

// residual += x · W, then the norm. What is returned goes to the product of after.y with after.next.
ops::RowScale add_and_norm(ops::Backend* backend, const LayerShape& shape, const LayerBuffers& buffers, const ops::Tensor& x,
                           const ops::Weight* weight, const NormAfter& after);

// residual += mlp(h), all of `rows` rows; then the norm, as above. `scale` is h's.
ops::RowScale run_mlp(ops::Backend* backend, const LayerShape& shape, const MlpWeights& weights, const LayerBuffers& buffers, int64_t rows,
                      const ops::RowScale& scale, const NormAfter& after);

// packed = h · W (`scale` is h's); q, K and V prepared (certain rows' K and V go to the pool). What an attention op then reads.
struct AttentionStorage {
  ops::KvScratch* scratch = nullptr;
  int32_t scratch_layer = 0;
  ops::KvPool* pool = nullptr;
  int32_t pool_layer = 0;
  const ops::RopeTable* rope = nullptr;
};
void prepare_attention(ops::Backend* backend, const LayerShape& shape, const AttentionWeights& weights, const AttentionStorage& storage,
                       const ops::Forest& forest, const LayerBuffers& buffers, const ops::RowScale& scale);

}  // namespace ddtree::nn
