// A backend that takes no memory: its set-up calls only book what another one would take for them, so that nn/'s own set-up code makes the
// memory plan. It computes nothing; an op that is called ends the process.
#pragma once

#include <deque>
#include <memory>

#include "ops/backend.h"

namespace ddtree::ops {

enum class DeviceKind : uint8_t { kCpu, kCuda };

class CountingBackend final : public Backend {
 public:
  // threads: the CPU's, each of which has a workspace (0: all cores).
  explicit CountingBackend(DeviceKind kind, int threads = 0);

  const char* name() const override { return kind_ == DeviceKind::kCpu ? "counting cpu" : "counting cuda"; }
  Status set_limits(const BackendLimits& limits) override;
  Element activation() const override { return kind_ == DeviceKind::kCpu ? Element::kFloat32 : Element::kBfloat16; }
  Result<Tensor> make_tensor(int64_t rows, int64_t cols, Element element) override;
  Result<const Weight*> pack_weight(std::span<const TensorView> parts) override;
  Result<Tensor> norm_weight(const TensorView& weight, float add) override;
  Result<Tensor> constant(std::span<const float> values, int64_t rows, int64_t cols) override;
  Result<const RopeTable*> make_rope(int64_t positions, int64_t rotary_dim, double theta) override;
  Result<KvPool*> make_kv_pool(KvShape shape, int32_t pages, int32_t page_size) override;
  Result<KvScratch*> make_kv_scratch(KvShape shape, int32_t rows) override;
  Result<StatePool*> make_state_pool(DeltaShape shape, int32_t slots) override;
  Result<DeltaTrace*> make_delta_trace(DeltaShape shape, int32_t rows, int32_t tentative) override;

  void stage_begin(Lane) override { none(); }
  const void* stage_bytes(Lane, const void*, int64_t) override { return none(), nullptr; }
  void upload(std::span<const float>, const Tensor&) override { none(); }
  Status finish() override { return {}; }  // set-up ends with it
  Result<const float*> host_floats(const Tensor&) override { return none(), static_cast<const float*>(nullptr); }
  void reset_state(StatePool*, int32_t) override { none(); }
  void embed(const EmbedArgs&) override { none(); }
  void copy_rows(const CopyRowsArgs&) override { none(); }
  void rms_norm(const RmsNormArgs&) override { none(); }
  void add_rms_norm(const AddRmsNormArgs&) override { none(); }
  void gated_rms_norm(const GatedRmsNormArgs&) override { none(); }
  void linear(const LinearArgs&) override { none(); }
  void silu_mul(const SiluMulArgs&) override { none(); }
  void attention_prepare(const AttentionPrepareArgs&) override { none(); }
  void attention(const AttentionArgs&) override { none(); }
  void draft_attention(const DraftAttentionArgs&) override { none(); }
  void draft_context(const DraftContextArgs&) override { none(); }
  void kv_commit(const KvCommitArgs&) override { none(); }
  void conv(const ConvArgs&) override { none(); }
  void delta_rule(const DeltaRuleArgs&) override { none(); }
  void delta_commit(const DeltaCommitArgs&) override { none(); }
  void finish_logits(const FinishLogitsArgs&) override { none(); }
  void top_k_log_probs(const TopKArgs&) override { none(); }
  void best_two(const BestTwoArgs&) override { none(); }
  void sample_rows(const SampleRowsArgs&) override { none(); }
  bool in_host_memory() const override { return kind_ == DeviceKind::kCpu; }

 private:
  [[noreturn]] static void none();
  Tensor counted(int64_t rows, int64_t cols, Element element, MemoryUse use);
  void take(MemoryUse use, int64_t cpu_elements, int64_t cpu_size, int64_t cuda_bytes);  // by kind
  void worker(int64_t floats);
  template <class T, class... A>
  T* keep(A&&... a);

  DeviceKind kind_;
  int threads_;
  BackendLimits limits_;
  int64_t worker_floats_ = 0;
  bool attention_work_ = false;
  std::deque<std::shared_ptr<void>> handles_;
};

}  // namespace ddtree::ops
