#include "nn/drafter.h"

#include <array>

#include "nn/assign.h"

namespace ddtree::nn {

Drafter::Drafter(ops::Backend* backend, const DrafterSpec& spec, DrafterLimits limits, const Embedding& embedding,
                 const ops::RopeTable* rope)
    : backend_(backend), spec_(spec), limits_(limits), embedding_(embedding), rope_(rope) {
  shape_ = {.hidden = spec.hidden_size,
            .intermediate = spec.intermediate_size,
            .heads = static_cast<int32_t>(spec.heads),
            .kv_heads = static_cast<int32_t>(spec.kv_heads),
            .head_dim = static_cast<int32_t>(spec.head_dim),
            .gate = false,
            .eps = spec.norm_eps};
}

Result<std::unique_ptr<Drafter>> Drafter::create(ops::Backend* backend, const DrafterSpec& spec, const DrafterTensors* tensors,
                                                 DrafterLimits limits, const Embedding& embedding, const ops::RopeTable* rope) {
  std::unique_ptr<Drafter> drafter(new Drafter(backend, spec, limits, embedding, rope));
  backend->set_owner(ops::MemoryOwner::kDrafter);
  if (tensors) DDTREE_RETURN_IF_ERROR(drafter->load(*tensors));
  DDTREE_RETURN_IF_ERROR(drafter->make_storage());
  return drafter;
}

Status Drafter::load(const DrafterTensors& tensors) {
  DDTREE_ASSIGN(fc_, backend_->pack_weight(std::array{tensors.fc}));
  DDTREE_ASSIGN(hidden_norm_, backend_->norm_weight(tensors.hidden_norm, 0.0f));
  DDTREE_ASSIGN(norm_, backend_->norm_weight(tensors.norm, 0.0f));
  std::vector<TensorView> kv;
  std::vector<float> k_norms;
  for (const DrafterLayer& t : tensors.layers) {
    Layer layer;
    DDTREE_ASSIGN(layer.input_norm, backend_->norm_weight(t.input_norm, 0.0f));
    DDTREE_ASSIGN(layer.post_norm, backend_->norm_weight(t.post_attention_norm, 0.0f));
    DDTREE_ASSIGN(layer.attention, pack_attention(backend_, t.attention, false));
    DDTREE_ASSIGN(layer.mlp, pack_mlp(backend_, t.mlp));
    layers_.push_back(layer);
    kv.push_back(t.attention.k_proj);
    kv.push_back(t.attention.v_proj);
    std::vector<float> k_norm;
    DDTREE_ASSIGN(k_norm, read_float32(t.attention.k_norm));
    k_norms.insert(k_norms.end(), k_norm.begin(), k_norm.end());
  }
  DDTREE_ASSIGN(context_kv_, backend_->pack_weight(kv));
  DDTREE_ASSIGN(context_k_norm_, backend_->constant(k_norms, static_cast<int64_t>(layers_.size()), shape_.head_dim));
  return {};
}

Status Drafter::make_storage() {
  const auto count = static_cast<int32_t>(spec_.layers.size());
  const int64_t taps = static_cast<int64_t>(spec_.taps.size()) * shape_.hidden,
                kv_columns = int64_t{count} * 2 * shape_.kv_heads * shape_.head_dim;
  const ops::Element element = backend_->activation();
  const ops::KvShape shape{.layers = count, .kv_heads = shape_.kv_heads, .head_dim = shape_.head_dim};
  DDTREE_ASSIGN(kv_, backend_->make_kv_pool(shape, limits_.pages, limits_.page_size));
  // A block's own K and V are read by one layer and forgotten.
  DDTREE_ASSIGN(scratch_,
                backend_->make_kv_scratch({.layers = 1, .kv_heads = shape_.kv_heads, .head_dim = shape_.head_dim}, limits_.block_rows));
  DDTREE_ASSIGN(buffers_, make_buffers(backend_, shape_, limits_.block_rows, shape_.packed(), int64_t{shape_.heads} * shape_.head_dim));
  DDTREE_ASSIGN(features_, backend_->make_tensor(limits_.context_rows, taps, element));
  DDTREE_ASSIGN(context_, backend_->make_tensor(limits_.context_rows, shape_.hidden, element));
  DDTREE_ASSIGN(context_normed_, backend_->make_tensor(limits_.context_rows, shape_.hidden, element));
  DDTREE_ASSIGN(kv_rows_, backend_->make_tensor(limits_.context_rows, kv_columns, element));
  DDTREE_ASSIGN(hidden_, backend_->make_tensor(limits_.block_rows, shape_.hidden, element));
  return {};
}

void Drafter::feed(int32_t rows, const int32_t* position, const int32_t* place) {
  const ops::Tensor context = context_.row_range(0, rows), normed = context_normed_.row_range(0, rows), kv = kv_rows_.row_range(0, rows);
  backend_->linear({.x = features_.row_range(0, rows), .weight = fc_, .y = context});
  backend_->rms_norm({.x = context, .w = hidden_norm_, .eps = shape_.eps, .y = normed});
  backend_->linear({.x = normed, .weight = context_kv_, .y = kv});
  backend_->draft_context({.rows = rows,
                           .position = position,
                           .place = place,
                           .kv = kv,
                           .k_norm = context_k_norm_,
                           .eps = shape_.eps,
                           .rope = rope_,
                           .pool = kv_});
}

void Drafter::forward(const ops::Forest& forest) {
  const int64_t rows = forest.rows;
  const ops::Tensor x = buffers_.x.row_range(0, rows), h = buffers_.h.row_range(0, rows), o = buffers_.o.row_range(0, rows);
  embed(backend_, forest, embedding_, x);
  backend_->rms_norm({.x = x, .w = layers_[0].input_norm, .eps = shape_.eps, .y = h});
  ops::RowScale scale;
  for (size_t i = 0; i < layers_.size(); ++i) {
    const Layer& layer = layers_[i];
    const AttentionStorage storage{.scratch = scratch_, .pool = kv_, .pool_layer = static_cast<int32_t>(i), .rope = rope_};
    prepare_attention(backend_, shape_, layer.attention, storage, forest, buffers_, scale);
    backend_->draft_attention({.forest = &forest,
                               .heads = shape_.heads,
                               .q = buffers_.q.row_range(0, rows),
                               .scratch = scratch_,
                               .scratch_layer = 0,
                               .pool = kv_,
                               .pool_layer = static_cast<int32_t>(i),
                               .causal = spec_.layers[i].causal,
                               .window = spec_.layers[i].sliding ? spec_.window : 0,
                               .o = o});
    scale = add_and_norm(backend_, shape_, buffers_, o, layer.attention.o,
                         {.residual = x, .w = layer.post_norm, .y = h, .next = layer.mlp.gate_up});
    NormAfter after{.residual = x, .w = norm_, .y = hidden_.row_range(0, rows)};
    if (i + 1 < layers_.size()) after = {.residual = x, .w = layers_[i + 1].input_norm, .y = h, .next = layers_[i + 1].attention.packed};
    scale = run_mlp(backend_, shape_, layer.mlp, buffers_, rows, scale, after);
  }
}

}  // namespace ddtree::nn
