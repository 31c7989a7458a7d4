#include "nn/target.h"

#include <algorithm>
#include <array>

#include "nn/assign.h"

namespace ddtree::nn {

Target::Target(ops::Backend* backend, const ModelSpec& spec, TargetLimits limits, const ops::RopeTable* rope)
    : backend_(backend), spec_(spec), limits_(std::move(limits)), rope_(rope) {
  shape_ = {.hidden = spec.hidden_size,
            .intermediate = spec.intermediate_size,
            .heads = static_cast<int32_t>(spec.heads),
            .kv_heads = static_cast<int32_t>(spec.kv_heads),
            .head_dim = static_cast<int32_t>(spec.head_dim),
            .gate = spec.output_gate,
            .eps = spec.norm_eps,
            .across_ranks = limits_.across_ranks};
  delta_shape_ = {.layers = static_cast<int32_t>(std::count(spec.layers.begin(), spec.layers.end(), LayerKind::kGatedDelta)),
                  .key_heads = static_cast<int32_t>(spec.key_heads),
                  .value_heads = static_cast<int32_t>(spec.value_heads),
                  .key_dim = static_cast<int32_t>(spec.key_dim),
                  .value_dim = static_cast<int32_t>(spec.value_dim),
                  .conv_width = static_cast<int32_t>(spec.conv_width)};
}

Result<std::unique_ptr<Target>> Target::create(ops::Backend* backend, const ModelSpec& spec, const TargetTensors* tensors,
                                               TargetLimits limits, const ops::RopeTable* rope) {
  std::unique_ptr<Target> target(new Target(backend, spec, std::move(limits), rope));
  if (tensors) DDTREE_RETURN_IF_ERROR(target->load(*tensors));
  DDTREE_RETURN_IF_ERROR(target->make_storage());
  return target;
}

Result<Target::DeltaWeights> Target::pack_delta(const GatedDeltaTensors& tensors) {
  DeltaWeights w;
  DDTREE_ASSIGN(w.packed, backend_->pack_weight(std::array{tensors.in_proj_qkv, tensors.in_proj_z, tensors.in_proj_a, tensors.in_proj_b}));
  DDTREE_ASSIGN(w.out, backend_->pack_weight(std::array{tensors.out_proj}));
  const int64_t channels = spec_.conv_channels(), width = spec_.conv_width;
  std::vector<float> taps, by_tap(channels * width);
  DDTREE_ASSIGN(taps, read_float32(tensors.conv1d));
  for (int64_t c = 0; c < channels; ++c) {
    for (int64_t t = 0; t < width; ++t) by_tap[t * channels + c] = taps[c * width + t];
  }
  DDTREE_ASSIGN(w.conv, backend_->constant(by_tap, width, channels));
  DDTREE_ASSIGN(w.a_log, backend_->norm_weight(tensors.a_log, 0.0f));
  DDTREE_ASSIGN(w.dt_bias, backend_->norm_weight(tensors.dt_bias, 0.0f));
  DDTREE_ASSIGN(w.norm, backend_->norm_weight(tensors.norm, 0.0f));  // plain
  return w;
}

Status Target::load(const TargetTensors& tensors) {
  backend_->set_owner(ops::MemoryOwner::kEmbedding);
  DDTREE_ASSIGN(embed_, backend_->pack_weight(std::array{tensors.embed}));
  head_ = embed_;
  backend_->set_owner(ops::MemoryOwner::kHead);
  if (!tensors.tied_head) DDTREE_ASSIGN(head_, backend_->pack_weight(std::array{tensors.lm_head}));
  backend_->set_owner(ops::MemoryOwner::kTarget);
  DDTREE_ASSIGN(final_norm_, backend_->norm_weight(tensors.final_norm, 1.0f));
  int32_t count[2] = {0, 0};
  for (const TargetLayer& t : tensors.layers) {
    Layer layer;
    layer.kind = t.kind;
    layer.index = count[static_cast<int>(t.kind)]++;
    DDTREE_ASSIGN(layer.input_norm, backend_->norm_weight(t.input_norm, 1.0f));
    DDTREE_ASSIGN(layer.post_norm, backend_->norm_weight(t.post_attention_norm, 1.0f));
    if (t.kind == LayerKind::kGatedDelta) {
      DDTREE_ASSIGN(layer.delta, pack_delta(t.delta));
    } else {
      DDTREE_ASSIGN(layer.attention, pack_attention(backend_, t.attention, true));
    }
    DDTREE_ASSIGN(layer.mlp, pack_mlp(backend_, t.mlp));
    layers_.push_back(layer);
  }
  return {};
}

Status Target::make_storage() {
  backend_->set_owner(ops::MemoryOwner::kTarget);
  const int64_t rows = limits_.max_rows;
  const ops::Element element = backend_->activation();
  const auto full = static_cast<int32_t>(std::count(spec_.layers.begin(), spec_.layers.end(), LayerKind::kFullAttention));
  int64_t packed = 0, output = 0;
  if (full > 0) {
    const ops::KvShape kv{.layers = full, .kv_heads = shape_.kv_heads, .head_dim = shape_.head_dim};
    DDTREE_ASSIGN(kv_, backend_->make_kv_pool(kv, limits_.pages, limits_.page_size));
    DDTREE_ASSIGN(scratch_, backend_->make_kv_scratch(kv, limits_.max_rows));
    packed = shape_.packed();
    output = int64_t{shape_.heads} * shape_.head_dim;
  }
  if (delta_shape_.layers > 0) {
    const int64_t values = spec_.value_heads * spec_.value_dim;
    DDTREE_ASSIGN(states_, backend_->make_state_pool(delta_shape_, limits_.slots));
    DDTREE_ASSIGN(trace_, backend_->make_delta_trace(delta_shape_, limits_.max_rows, limits_.max_tentative_rows));
    DDTREE_ASSIGN(conv_, backend_->make_tensor(rows, spec_.conv_channels(), element));
    packed = std::max(packed, spec_.conv_channels() + values + 2 * spec_.value_heads);
    output = std::max(output, values);
  }
  DDTREE_ASSIGN(buffers_, make_buffers(backend_, shape_, rows, packed, output));
  DDTREE_ASSIGN(hidden_, backend_->make_tensor(rows, shape_.hidden, element));
  if (!limits_.captures.empty()) {
    backend_->set_owner(ops::MemoryOwner::kDrafter);
    DDTREE_ASSIGN(features_, backend_->make_tensor(rows, static_cast<int64_t>(limits_.captures.size()) * shape_.hidden, element));
  }
  return {};
}

ops::Tensor Target::tap(int32_t layer, int64_t rows) const {
  const auto at = std::find(limits_.captures.begin(), limits_.captures.end(), layer);
  if (at == limits_.captures.end()) return {};
  return features_.row_range(0, rows).col_range((at - limits_.captures.begin()) * shape_.hidden, shape_.hidden);
}

void Target::copy_tap(int32_t layer, int64_t rows) const {
  const ops::Tensor first = tap(layer, rows);
  for (size_t i = 0; i < limits_.captures.size(); ++i) {
    const ops::Tensor to = features_.row_range(0, rows).col_range(static_cast<int64_t>(i) * shape_.hidden, shape_.hidden);
    if (limits_.captures[i] == layer && to.data != first.data) {
      backend_->copy_rows({.count = static_cast<int32_t>(rows), .x = first, .y = to});
    }
  }
}

ops::RowScale Target::run_delta(const Layer& layer, const ops::Forest& forest, const ops::RowScale& scale, const NormAfter& after) {
  const int64_t rows = forest.rows, channels = spec_.conv_channels(), values = spec_.value_heads * spec_.value_dim;
  const DeltaWeights& w = layer.delta;
  const ops::Tensor packed = buffers_.packed.row_range(0, rows).col_range(0, w.packed->n());
  const ops::Tensor o = buffers_.o.row_range(0, rows).col_range(0, values);
  backend_->linear({.x = buffers_.h.row_range(0, rows), .weight = w.packed, .y = packed, .scale = scale});
  backend_->gated_delta_mixer({.forest = &forest,
                               .x = packed.col_range(0, channels),
                               .z = packed.col_range(channels, values),
                               .a = packed.col_range(channels + values, spec_.value_heads),
                               .b = packed.col_range(channels + values + spec_.value_heads, spec_.value_heads),
                               .taps = w.conv,
                               .a_log = w.a_log,
                               .dt_bias = w.dt_bias,
                               .norm = w.norm,
                               .eps = shape_.eps,
                               .states = states_,
                               .trace = trace_,
                               .layer = layer.index,
                               .c = conv_.row_range(0, rows),
                               .o = o});
  return add_and_norm(backend_, shape_, buffers_, o, w.out, after);
}

ops::RowScale Target::run_attention(const Layer& layer, const ops::Forest& forest, const ops::RowScale& scale, const NormAfter& after) {
  const AttentionStorage storage{.scratch = scratch_, .scratch_layer = layer.index, .pool = kv_, .pool_layer = layer.index, .rope = rope_};
  prepare_attention(backend_, shape_, layer.attention, storage, forest, buffers_, scale);
  const ops::Tensor o = buffers_.o.row_range(0, forest.rows).col_range(0, int64_t{shape_.heads} * shape_.head_dim);
  backend_->attention({.forest = &forest,
                       .heads = shape_.heads,
                       .q = buffers_.q.row_range(0, forest.rows),
                       .packed = buffers_.packed.row_range(0, forest.rows).col_range(0, shape_.packed()),
                       .gate = shape_.gate,
                       .scratch = scratch_,
                       .scratch_layer = layer.index,
                       .pool = kv_,
                       .pool_layer = layer.index,
                       .o = o});
  return add_and_norm(backend_, shape_, buffers_, o, layer.attention.o, after);
}

void Target::forward(const ops::Forest& forest) {
  const int64_t rows = forest.rows;
  const ops::Tensor x = buffers_.x.row_range(0, rows), h = buffers_.h.row_range(0, rows);
  embed(backend_, forest, embedding(), x);
  if (const ops::Tensor to = tap(-1, rows); to.present()) backend_->copy_rows({.count = forest.rows, .x = x, .y = to});
  backend_->rms_norm({.x = x, .w = layers_[0].input_norm, .eps = shape_.eps, .y = h});
  ops::RowScale scale;
  for (size_t i = 0; i < layers_.size(); ++i) {
    const Layer& layer = layers_[i];
    const auto index = static_cast<int32_t>(i);
    const NormAfter mixer{.residual = x, .w = layer.post_norm, .y = h, .next = layer.mlp.gate_up};
    scale = layer.kind == LayerKind::kGatedDelta ? run_delta(layer, forest, scale, mixer) : run_attention(layer, forest, scale, mixer);
    NormAfter mlp{.residual = x, .w = final_norm_, .y = hidden_.row_range(0, rows), .tap = tap(index, rows)};
    if (i + 1 < layers_.size()) {
      const Layer& next = layers_[i + 1];
      mlp.w = next.input_norm, mlp.y = h, mlp.next = next.first();
    }
    scale = run_mlp(backend_, shape_, layer.mlp, buffers_, rows, scale, mlp);
    copy_tap(index, rows);
  }
}

void Target::commit(const ops::Forest& forest, const ops::Paths& paths) {
  if (paths.count == 0) return;
  if (states_) backend_->delta_commit({.paths = paths, .states = states_, .trace = trace_});
  if (kv_) backend_->kv_commit({.forest = &forest, .paths = paths, .scratch = scratch_, .pool = kv_});
}

void Target::reset_slot(int32_t slot) {
  if (states_) backend_->reset_state(states_, slot);
}

void Target::head(const ops::Tensor& x, const ops::Tensor& logits) {
  backend_->linear({.x = x, .weight = head_, .y = logits, .keep_float32 = true});
}

}  // namespace ddtree::nn
