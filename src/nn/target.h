// The target's forward pass over a forest, written once over the op interface.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "base/status.h"
#include "model/roles.h"
#include "model/spec.h"
#include "nn/layers.h"
#include "ops/backend.h"

namespace ddtree::nn {

struct TargetLimits {
  int32_t max_rows = 0, max_tentative_rows = 0, slots = 0, pages = 0, page_size = 0;
  // Layers whose output each pass keeps, in this order: the drafter's taps. -1 is the embedding.
  std::vector<int32_t> captures;
  int32_t first_id = 0;       // of the embedding's and the head's rows, where `spec` and tensors are a rank's (model/shard.h)
  bool across_ranks = false;  // they are
};

class Target {
 public:
  // Packs the weights and makes pools, scratch and buffers. `rope` must cover every position. Without tensors there are no weights: that
  // is for plans, which count what the rest takes.
  static Result<std::unique_ptr<Target>> create(ops::Backend* backend, const ModelSpec& spec, const TargetTensors* tensors,
                                                TargetLimits limits, const ops::RopeTable* rope);

  // Runs all layers and the final norm. Certain segments advance pages, states and windows; tentative ones leave factors and scratch.
  void forward(const ops::Forest& forest);

  // Makes paths of tentative segments last: folds factors, shifts windows, appends K/V. `forest` is that of the last forward().
  void commit(const ops::Forest& forest, const ops::Paths& paths);

  void reset_slot(int32_t slot);

  // logits = head · x for x [n, H] of this target's width; float32, unmasked. On a rank: of its own rows of the head.
  void head(const ops::Tensor& x, const ops::Tensor& logits);

  ops::Tensor hidden() const { return hidden_; }      // [max_rows, H] after the final norm, of the last pass
  ops::Tensor features() const { return features_; }  // [max_rows, captures · H] of the last pass; absent without captures
  Embedding embedding() const { return {embed_, limits_.first_id}; }
  const LayerShape& shape() const { return shape_; }
  const ops::KvPool* kv() const { return kv_; }             // null: no such layer
  const ops::StatePool* states() const { return states_; }  // null: no such layer

 private:
  struct DeltaWeights {
    const ops::Weight* packed = nullptr;  // [C qkv | v·dv z | v a | v b, H]
    const ops::Weight* out = nullptr;     // [H, v·dv]
    ops::Tensor conv;                     // [W, C]
    ops::Tensor a_log, dt_bias;           // [1, v]
    ops::Tensor norm;                     // [1, dv]
  };
  struct Layer {
    LayerKind kind = LayerKind::kFullAttention;
    int32_t index = 0;  // among the layers of its kind
    ops::Tensor input_norm, post_norm;
    DeltaWeights delta;
    AttentionWeights attention;
    MlpWeights mlp;
    const ops::Weight* first() const { return kind == LayerKind::kGatedDelta ? delta.packed : attention.packed; }  // reads the normed rows
  };

  Target(ops::Backend* backend, const ModelSpec& spec, TargetLimits limits, const ops::RopeTable* rope);
  Status load(const TargetTensors& tensors);
  Status make_storage();
  Result<DeltaWeights> pack_delta(const GatedDeltaTensors& tensors);
  // The mixer of h, whose rows `scale` belongs to; then the residual's update and the norm.
  ops::RowScale run_delta(const Layer& layer, const ops::Forest& forest, const ops::RowScale& scale, const NormAfter& after);
  ops::RowScale run_attention(const Layer& layer, const ops::Forest& forest, const ops::RowScale& scale, const NormAfter& after);
  ops::Tensor tap(int32_t layer, int64_t rows) const;  // where the output of `layer` goes first; absent if nobody wants it
  void copy_tap(int32_t layer, int64_t rows) const;    // a second capture of the same layer

  ops::Backend* backend_;
  ModelSpec spec_;
  TargetLimits limits_;
  LayerShape shape_;
  ops::DeltaShape delta_shape_;
  const ops::RopeTable* rope_;
  const ops::Weight* embed_ = nullptr;
  const ops::Weight* head_ = nullptr;
  ops::Tensor final_norm_;
  std::vector<Layer> layers_;
  LayerBuffers buffers_;
  ops::Tensor conv_, hidden_, features_;
  ops::KvPool* kv_ = nullptr;
  ops::KvScratch* scratch_ = nullptr;
  ops::StatePool* states_ = nullptr;
  ops::DeltaTrace* trace_ = nullptr;
};

}  // namespace ddtree::nn
