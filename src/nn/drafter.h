// The DFlash drafter: context from the target's tapped features, and one block of masked positions at once.
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

struct DrafterLimits {
  int32_t context_rows = 0;  // of one feed()
  int32_t block_rows = 0;    // of one draft()
  int32_t pages = 0, page_size = 0;
};

class Drafter {
 public:
  // `embedding` is the target's. `rope` must cover every position of a block. Without tensors there are no weights (for plans).
  static Result<std::unique_ptr<Drafter>> create(ops::Backend* backend, const DrafterSpec& spec, const DrafterTensors* tensors,
                                                 DrafterLimits limits, const Embedding& embedding, const ops::RopeTable* rope);

  // Where the features of newly committed rows go before feed(): [context_rows, taps · H], in the order of spec.taps.
  ops::Tensor features() const { return features_; }

  // Appends the K and V of features()[0, rows) to every layer's pages. position and place are staged [rows].
  void feed(int32_t rows, const int32_t* position, const int32_t* place);

  // Runs blocks over their committed context. Every segment of the forest is one block (anchor, masks), not certain.
  void forward(const ops::Forest& forest);

  ops::Tensor hidden() const { return hidden_; }  // [block_rows, H] after the last norm, of the last forward(); the target's head reads it
  const DrafterSpec& spec() const { return spec_; }
  const ops::KvPool* kv() const { return kv_; }

 private:
  struct Layer {
    ops::Tensor input_norm, post_norm;
    AttentionWeights attention;
    MlpWeights mlp;
  };

  Drafter(ops::Backend* backend, const DrafterSpec& spec, DrafterLimits limits, const Embedding& embedding, const ops::RopeTable* rope);
  Status load(const DrafterTensors& tensors);
  Status make_storage();

  ops::Backend* backend_;
  DrafterSpec spec_;
  DrafterLimits limits_;
  LayerShape shape_;
  Embedding embedding_;
  const ops::RopeTable* rope_;
  const ops::Weight* fc_ = nullptr;          // [H, taps · H]
  const ops::Weight* context_kv_ = nullptr;  // [layers · (K | V), H]: every layer's k_proj and v_proj again, for one call
  ops::Tensor context_k_norm_;               // [layers, D]
  ops::Tensor hidden_norm_, norm_;
  std::vector<Layer> layers_;
  LayerBuffers buffers_;
  ops::Tensor features_, context_, context_normed_, kv_rows_, hidden_;
  ops::KvPool* kv_ = nullptr;
  ops::KvScratch* scratch_ = nullptr;
};

}  // namespace ddtree::nn
