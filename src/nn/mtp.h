// The multi-token-prediction (NEXTN) head: one gated-attention layer over [norm(embedding of the next token), norm(hidden state)].
#pragma once

#include <cstdint>
#include <memory>

#include "base/status.h"
#include "model/roles.h"
#include "model/spec.h"
#include "nn/layers.h"
#include "ops/backend.h"

namespace ddtree::nn {

struct MtpLimits {
  int32_t max_rows = 0, slots = 0, pages = 0, page_size = 0;
  int64_t fc_first = 0;  // where fc's columns begin, of a rank's
};

class Mtp {
 public:
  // `shape` and `embedding` are the target's. Without tensors there are no weights (for plans).
  static Result<std::unique_ptr<Mtp>> create(ops::Backend* backend, const MtpTensors* tensors, const LayerShape& shape, MtpLimits limits,
                                             const Embedding& embedding, const ops::RopeTable* rope);

  // Rows of `forest` are MTP rows: token = the token after the row's position, hidden state = `hidden`[from[r]] (staged [rows]).
  // Certain segments append their K and V to the head's pages. The layer is finished for the rows of `wanted` only (staged [count],
  // ascending): nothing else reads the others' output. Leaves it in output()[0, count).
  void forward(const ops::Forest& forest, const ops::Tensor& hidden, const int32_t* from, const int32_t* wanted, int32_t count);

  ops::Tensor output() const { return output_; }  // [max_rows, H] after mtp.norm: goes to the head, and is the next step's hidden state
  ops::Tensor slots() const { return slots_; }    // [slots, H] output of each slot's last committed row; kept by the caller
  ops::Tensor chain_states() const { return chain_states_; }  // [max_rows, H] hidden states of recursive drafts; kept by the caller
  const ops::KvPool* kv() const { return kv_; }

 private:
  Mtp(ops::Backend* backend, const LayerShape& shape, MtpLimits limits, const Embedding& embedding, const ops::RopeTable* rope)
      : backend_(backend), shape_(shape), limits_(limits), embedding_(embedding), rope_(rope) {}
  Status load(const MtpTensors& tensors);
  Status make_storage();

  ops::Backend* backend_;
  LayerShape shape_;
  MtpLimits limits_;
  Embedding embedding_;
  const ops::RopeTable* rope_;
  const ops::Weight* fc_ = nullptr;  // [H, 2·H], or a rank's columns
  ops::Tensor norm_embedding_, norm_hidden_, input_norm_, post_norm_, norm_;
  AttentionWeights attention_;
  MlpWeights mlp_;
  LayerBuffers buffers_;
  ops::Tensor gathered_, both_, picked_, output_, slots_, chain_states_;
  ops::KvPool* kv_ = nullptr;
  ops::KvScratch* scratch_ = nullptr;
};

}  // namespace ddtree::nn
