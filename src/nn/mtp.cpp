#include "nn/mtp.h"

#include <array>

#include "nn/assign.h"

namespace ddtree::nn {

Result<std::unique_ptr<Mtp>> Mtp::create(ops::Backend* backend, const MtpTensors* tensors, const LayerShape& shape, MtpLimits limits,
                                         const Embedding& embedding, const ops::RopeTable* rope) {
  std::unique_ptr<Mtp> mtp(new Mtp(backend, shape, limits, embedding, rope));
  backend->set_owner(ops::MemoryOwner::kMtp);
  if (tensors) DDTREE_RETURN_IF_ERROR(mtp->load(*tensors));
  DDTREE_RETURN_IF_ERROR(mtp->make_storage());
  return mtp;
}

Status Mtp::load(const MtpTensors& tensors) {
  DDTREE_ASSIGN(fc_, backend_->pack_weight(std::array{tensors.fc}));
  DDTREE_ASSIGN(norm_embedding_, backend_->norm_weight(tensors.pre_norm_embedding, 1.0f));
  DDTREE_ASSIGN(norm_hidden_, backend_->norm_weight(tensors.pre_norm_hidden, 1.0f));
  DDTREE_ASSIGN(norm_, backend_->norm_weight(tensors.norm, 1.0f));
  DDTREE_ASSIGN(input_norm_, backend_->norm_weight(tensors.layer.input_norm, 1.0f));
  DDTREE_ASSIGN(post_norm_, backend_->norm_weight(tensors.layer.post_attention_norm, 1.0f));
  DDTREE_ASSIGN(attention_, pack_attention(backend_, tensors.layer.attention, true));
  DDTREE_ASSIGN(mlp_, pack_mlp(backend_, tensors.layer.mlp));
  return {};
}

Status Mtp::make_storage() {
  const int64_t rows = limits_.max_rows, hidden = shape_.hidden;
  const ops::Element element = backend_->activation();
  const ops::KvShape kv{.layers = 1, .kv_heads = shape_.kv_heads, .head_dim = shape_.head_dim};
  DDTREE_ASSIGN(kv_, backend_->make_kv_pool(kv, limits_.pages, limits_.page_size));
  DDTREE_ASSIGN(scratch_, backend_->make_kv_scratch(kv, limits_.max_rows));
  DDTREE_ASSIGN(buffers_, make_buffers(backend_, shape_, rows, shape_.packed(), int64_t{shape_.heads} * shape_.head_dim));
  DDTREE_ASSIGN(gathered_, backend_->make_tensor(rows, hidden, element));
  DDTREE_ASSIGN(both_, backend_->make_tensor(rows, 2 * hidden, element));
  DDTREE_ASSIGN(picked_, backend_->make_tensor(rows, hidden, ops::Element::kFloat32));
  DDTREE_ASSIGN(output_, backend_->make_tensor(rows, hidden, element));
  DDTREE_ASSIGN(chain_states_, backend_->make_tensor(rows, hidden, element));
  DDTREE_ASSIGN(slots_, backend_->make_tensor(limits_.slots, hidden, element));
  return {};
}

void Mtp::forward(const ops::Forest& forest, const ops::Tensor& hidden, const int32_t* from, const int32_t* wanted, int32_t count) {
  const int64_t rows = forest.rows, width = shape_.hidden;
  const ops::Tensor x = buffers_.x.row_range(0, rows), h = buffers_.h.row_range(0, rows);
  const ops::Tensor gathered = gathered_.row_range(0, rows), both = both_.row_range(0, rows);
  embed(backend_, forest, embedding_, x);
  backend_->rms_norm({.x = x, .w = norm_embedding_, .eps = shape_.eps, .y = both.col_range(0, width)});
  backend_->copy_rows({.count = forest.rows, .x = hidden, .from = from, .y = gathered});
  backend_->rms_norm({.x = gathered, .w = norm_hidden_, .eps = shape_.eps, .y = both.col_range(width, width)});
  // The residual stream begins with fc's output, as an activation (BF16 boundaries round it once).
  backend_->linear({.x = both.col_range(limits_.fc_first, fc_->k()), .weight = fc_, .y = gathered});
  if (shape_.across_ranks) backend_->all_reduce({.x = gathered});
  backend_->rms_norm({.x = gathered, .w = input_norm_, .eps = shape_.eps, .y = h});
  const AttentionStorage storage{.scratch = scratch_, .pool = kv_, .rope = rope_};
  prepare_attention(backend_, shape_, attention_, storage, forest, buffers_, {});

  const ops::Tensor o = buffers_.o.row_range(0, count), picked = picked_.row_range(0, count);
  backend_->attention({.forest = &forest,
                       .heads = shape_.heads,
                       .q = buffers_.q.row_range(0, rows),
                       .packed = buffers_.packed.row_range(0, rows),
                       .gate = shape_.gate,
                       .scratch = scratch_,
                       .pool = kv_,
                       .row = wanted,
                       .count = count,
                       .o = o});
  backend_->copy_rows({.count = count, .x = gathered, .from = wanted, .y = picked});
  const ops::RowScale scale =
      add_and_norm(backend_, shape_, buffers_, o, attention_.o,
                   {.residual = picked, .w = post_norm_, .y = buffers_.h.row_range(0, count), .next = mlp_.gate_up});
  run_mlp(backend_, shape_, mlp_, buffers_, count, scale, {.residual = picked, .w = norm_, .y = output_.row_range(0, count)});
}

}  // namespace ddtree::nn
