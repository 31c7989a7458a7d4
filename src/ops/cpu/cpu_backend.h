// The CPU backend: float32 activations in plain memory, one fixed thread pool, kernels chosen by the machine's instruction set.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/thread_pool.h"
#include "ops/backend.h"
#include "ops/cpu/kernels.h"
#include "ops/cpu/storage.h"
#include "ops/weight_loader.h"

namespace ddtree::ops::cpu {

struct CpuOptions {
  int threads = 0;                   // 0: all cores
  bool bfloat16_boundaries = false;  // round activations to BF16 where the ops' contracts say so (storage stays float32)
  bool bfloat16_residual = false;    // with the former: the residual stream too
  const Kernels* kernels = nullptr;  // null: the best of this machine
};

class CpuBackend final : public Backend {
 public:
  explicit CpuBackend(const CpuOptions& options);
  ~CpuBackend() override;

  const char* name() const override { return name_.c_str(); }
  Status join(std::shared_ptr<Collectives> group) override { return group_ = std::move(group), Status(); }
  Status set_limits(const BackendLimits& limits) override;
  Element activation() const override { return Element::kFloat32; }
  Result<Tensor> make_tensor(int64_t rows, int64_t cols, Element element) override;
  void begin_loading() override { loading_ = true; }
  Status finish_loading(const LoadOptions& options) override;
  Result<const Weight*> pack_weight(std::span<const TensorView> parts) override;
  Result<Tensor> norm_weight(const TensorView& weight, float add) override;
  Result<Tensor> constant(std::span<const float> values, int64_t rows, int64_t cols) override;
  Result<const RopeTable*> make_rope(int64_t positions, int64_t rotary_dim, double theta) override;
  Result<KvPool*> make_kv_pool(KvShape shape, int32_t pages, int32_t page_size) override;
  Result<KvScratch*> make_kv_scratch(KvShape shape, int32_t rows) override;
  Result<StatePool*> make_state_pool(DeltaShape shape, int32_t slots) override;
  Result<DeltaTrace*> make_delta_trace(DeltaShape shape, int32_t rows, int32_t) override;

  void stage_begin(Lane lane) override;
  const void* stage_bytes(Lane lane, const void* data, int64_t bytes) override;
  void upload(std::span<const float> values, const Tensor& to) override;
  Status finish() override { return group_ ? group_->status() : Status(); }
  Result<const float*> host_floats(const Tensor& t) override;
  void reset_state(StatePool* states, int32_t slot) override;

  void embed(const EmbedArgs& args) override;
  void copy_rows(const CopyRowsArgs& args) override;
  void rms_norm(const RmsNormArgs& args) override;
  void add_rms_norm(const AddRmsNormArgs& args) override;
  void gated_rms_norm(const GatedRmsNormArgs& args) override;
  void linear(const LinearArgs& args) override;
  void silu_mul(const SiluMulArgs& args) override;
  void all_reduce(const AllReduceArgs& args) override;
  void attention_prepare(const AttentionPrepareArgs& args) override;
  void attention(const AttentionArgs& args) override;
  void draft_attention(const DraftAttentionArgs& args) override;
  void draft_context(const DraftContextArgs& args) override;
  void kv_commit(const KvCommitArgs& args) override;
  void conv(const ConvArgs& args) override;
  void delta_rule(const DeltaRuleArgs& args) override;
  void delta_commit(const DeltaCommitArgs& args) override;
  void finish_logits(const FinishLogitsArgs& args) override;
  void top_k_log_probs(const TopKArgs& args) override;
  void best_two(const BestTwoArgs& args) override;
  void sample_rows(const SampleRowsArgs& args) override;
  bool in_host_memory() const override { return true; }

 private:
  struct Sink;    // where loaded tensors go
  struct Attend;  // the shared core of attention and draft_attention
  void attend(const Attend& args);
  void fold(const CpuStatePool& states, const CpuDeltaTrace& trace, int32_t layer, int32_t head, int32_t slot, const int32_t* row,
            int64_t count, float* workspace) const;
  void round(int64_t n, float* y) const {
    if (bfloat16_) kernels_.round_bf16(n, y);
  }
  // Rows of the parallel loop that are worth a second thread, where one row costs about `work` multiply-adds.
  static int64_t grain(int64_t work) { return work >= 32768 ? 1 : 32768 / (work + 1) + 1; }
  // f(worker, item) for every item; a worker runs one item at a time, so it may own a workspace.
  template <class F>
  void for_items(int64_t count, int64_t work, const F& f);
  // At set-up only, and booked.
  template <class T>
  Status allocate(Block<T>* block, int64_t count, MemoryUse use, const char* what);
  Status reserve_worker(int64_t floats);
  Result<Tensor> new_tensor(int64_t rows, int64_t cols, MemoryUse use, const char* what);
  float* worker(int index) const { return workers_[index].data(); }
  template <class T, class... A>
  T* keep(A&&... a) {
    auto owned = std::make_shared<T>(std::forward<A>(a)...);
    owned_.push_back(owned);
    return owned.get();
  }

  const Kernels& kernels_;
  std::string name_;
  bool bfloat16_, bfloat16_residual_;
  ThreadPool pool_;
  BackendLimits limits_;
  std::vector<std::shared_ptr<void>> owned_;  // handles and tensors
  std::vector<Block<float>> workers_;         // [threads]
  int64_t worker_floats_ = 0;
  Block<float> packed_;  // linear: x in tiles, k-major
  Block<std::byte> lanes_[kLanes];
  int64_t lane_used_[kLanes] = {};
  std::vector<float> host_;  // host_floats of a strided view
  struct Place {
    CpuWeight* weight = nullptr;  // rows from `row` on, or null:
    int64_t row = 0;
    float* values = nullptr;
  };
  std::vector<Place> places_;  // of the loader's items
  WeightLoader loader_;
  bool loading_ = false;
  struct Item {
    int32_t segment, head, first, count;
  };
  std::vector<Item> items_;
};

}  // namespace ddtree::ops::cpu
