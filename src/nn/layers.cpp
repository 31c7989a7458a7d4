#include "nn/layers.h"

#include <algorithm>
#include <array>

#include "nn/assign.h"

namespace ddtree::nn {

void embed(ops::Backend* backend, const ops::Forest& forest, const Embedding& embedding, const ops::Tensor& x) {
  backend->embed({.token = forest.token, .rows = forest.rows, .weight = embedding.weight, .y = x, .first_id = embedding.first_id});
  backend->all_reduce({.x = x, .keep_float32 = true});
}

Result<MlpWeights> pack_mlp(ops::Backend* backend, const MlpTensors& tensors) {
  MlpWeights w;
  DDTREE_ASSIGN(w.gate_up, backend->pack_weight(std::array{tensors.gate_proj, tensors.up_proj}));
  DDTREE_ASSIGN(w.down, backend->pack_weight(std::array{tensors.down_proj}));
  return w;
}

Result<AttentionWeights> pack_attention(ops::Backend* backend, const FullAttentionTensors& tensors, bool zero_centred) {
  AttentionWeights w;
  const float add = zero_centred ? 1.0f : 0.0f;
  DDTREE_ASSIGN(w.packed, backend->pack_weight(std::array{tensors.q_proj, tensors.k_proj, tensors.v_proj}));
  DDTREE_ASSIGN(w.o, backend->pack_weight(std::array{tensors.o_proj}));
  DDTREE_ASSIGN(w.q_norm, backend->norm_weight(tensors.q_norm, add));
  DDTREE_ASSIGN(w.k_norm, backend->norm_weight(tensors.k_norm, add));
  return w;
}

Result<LayerBuffers> make_buffers(ops::Backend* backend, const LayerShape& shape, int64_t rows, int64_t packed, int64_t mixer_output) {
  LayerBuffers b;
  const ops::Element element = backend->activation();
  DDTREE_ASSIGN(b.x, backend->make_tensor(rows, shape.hidden, ops::Element::kFloat32));
  DDTREE_ASSIGN(b.h, backend->make_tensor(rows, shape.hidden, element));
  DDTREE_ASSIGN(b.delta, backend->make_tensor(rows, shape.hidden, element));
  DDTREE_ASSIGN(b.packed, backend->make_tensor(rows, packed, element));
  DDTREE_ASSIGN(b.q, backend->make_tensor(rows, int64_t{shape.heads} * shape.head_dim, element));
  DDTREE_ASSIGN(b.o, backend->make_tensor(rows, mixer_output, element));
  DDTREE_ASSIGN(b.gate_up, backend->make_tensor(rows, 2 * shape.intermediate, element));
  DDTREE_ASSIGN(b.act, backend->make_tensor(rows, shape.intermediate, element));
  DDTREE_ASSIGN(b.squares, backend->make_tensor(std::min(rows, ops::kUnscaledRows), ops::kNormParts, ops::Element::kFloat32));
  return b;
}

ops::RowScale add_and_norm(ops::Backend* backend, const LayerShape& shape, const LayerBuffers& buffers, const ops::Tensor& x,
                           const ops::Weight* weight, const NormAfter& after) {
  return backend->linear_add_norm({.x = x,
                                   .weight = weight,
                                   .delta = buffers.delta.row_range(0, x.rows),
                                   .residual = after.residual,
                                   .w = after.w,
                                   .eps = shape.eps,
                                   .y = after.y,
                                   .tap = after.tap,
                                   .next = after.next,
                                   .squares = buffers.squares,
                                   .across_ranks = shape.across_ranks});
}

ops::RowScale run_mlp(ops::Backend* backend, const LayerShape& shape, const MlpWeights& weights, const LayerBuffers& buffers, int64_t rows,
                      const ops::RowScale& scale, const NormAfter& after) {
  const ops::Tensor act = buffers.act.row_range(0, rows);
  backend->linear_silu({.x = buffers.h.row_range(0, rows),
                        .weight = weights.gate_up,
                        .gate_up = buffers.gate_up.row_range(0, rows),
                        .y = act,
                        .scale = scale});
  return add_and_norm(backend, shape, buffers, act, weights.down, after);
}

void prepare_attention(ops::Backend* backend, const LayerShape& shape, const AttentionWeights& weights, const AttentionStorage& storage,
                       const ops::Forest& forest, const LayerBuffers& buffers, const ops::RowScale& scale) {
  const ops::Tensor packed = buffers.packed.row_range(0, forest.rows).col_range(0, shape.packed());
  backend->linear({.x = buffers.h.row_range(0, forest.rows), .weight = weights.packed, .y = packed, .scale = scale});
  backend->attention_prepare({.forest = &forest,
                              .heads = shape.heads,
                              .gate = shape.gate,
                              .packed = packed,
                              .q_norm = weights.q_norm,
                              .k_norm = weights.k_norm,
                              .eps = shape.eps,
                              .rope = storage.rope,
                              .q = buffers.q.row_range(0, forest.rows),
                              .scratch = storage.scratch,
                              .scratch_layer = storage.scratch_layer,
                              .pool = storage.pool,
                              .pool_layer = storage.pool_layer});
}

}  // namespace ddtree::nn
