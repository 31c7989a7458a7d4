// A place where ops run: its memory, its packed weights, and one method an op. nn/ is written once over this; ops/cpu/ is the reference,
// ops/cuda/ its twin. Each op's contract stands in its header.
//
// Ops are enqueued in order and may run later; errors of the device appear in finish(). Nothing is allocated after set-up: tensors,
// weights, pools and tables are made once and live as long as the backend. Shapes are the caller's duty (nn derives them from the checked
// spec); backends assert them in debug builds. One thread at a time.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "model/tensor.h"
#include "ops/attention.h"
#include "ops/collectives.h"
#include "ops/delta.h"
#include "ops/forest.h"
#include "ops/limits.h"
#include "ops/linear.h"
#include "ops/load.h"
#include "ops/logits.h"
#include "ops/memory.h"
#include "ops/norm.h"
#include "ops/rates.h"
#include "ops/rows.h"
#include "ops/sample_rows.h"
#include "ops/segment.h"
#include "ops/silu_mul.h"
#include "ops/tensor.h"

namespace ddtree::ops {

// The matrix that pack_weight() makes of parts: rows one below another.
struct PackedShape {
  int64_t n = 0, k = 0;
  bool bf16 = true;  // all parts are
};
// kBadModel naming the part that does not stand below the others.
Result<PackedShape> packed_shape(std::span<const TensorView> parts);

class Backend {
 public:
  virtual ~Backend() = default;
  virtual const char* name() const = 0;  // for logs: "cpu avx512"

  // Whose the next allocations are, and what was taken so far. Every allocation is booked, and sized by the backend's layout.h, from which
  // the memory plan comes too.
  void set_owner(MemoryOwner owner) { ledger_.set_owner(owner); }
  const MemoryLedger& ledger() const { return ledger_; }

  // Makes this backend one rank of several, before set_limits(): its tensors are then a rank's, all_reduce() and the ops over logits work
  // with the others (ops/collectives.h). kUnavailable: it cannot.
  virtual Status join(std::shared_ptr<Collectives>) {
    return {Code::kUnavailable, std::string(name()) + " backends work alone: tensor parallelism is built for the CPU only"};
  }
  Collectives* group() const { return group_.get(); }  // null: alone

  // --- set-up. kDoesNotFit with the size in MiB where memory ends; kBadModel for shapes the backend cannot run. ------------------------
  virtual Status set_limits(const BackendLimits& limits) = 0;                           // once, before any op
  virtual Element activation() const = 0;                                               // element type of activations
  virtual Result<Tensor> make_tensor(int64_t rows, int64_t cols, Element element) = 0;  // zeroed
  // From here on to finish_loading(), weights and norms are only laid out: memory is taken, so that what does not fit is known before
  // anything is read, and the tensors must stay until finish_loading() has read them all at once. Otherwise each is read when asked for.
  virtual void begin_loading() {}
  virtual Status finish_loading(const LoadOptions&) { return {}; }  // WeightLoader::run's errors
  // Rows of the parts, one below another; all [n, K] (a vector [n] counts as [n, 1]), BF16 only if all are.
  virtual Result<const Weight*> pack_weight(std::span<const TensorView> parts) = 0;
  // [1, n] float32 in the backend's memory: the tensor's values plus `add` (1 for zero-centred norms), added in float32.
  virtual Result<Tensor> norm_weight(const TensorView& weight, float add) = 0;
  // [rows, cols] float32 from host values.
  virtual Result<Tensor> constant(std::span<const float> values, int64_t rows, int64_t cols) = 0;
  virtual Result<const RopeTable*> make_rope(int64_t positions, int64_t rotary_dim, double theta) = 0;
  virtual Result<KvPool*> make_kv_pool(KvShape shape, int32_t pages, int32_t page_size) = 0;
  virtual Result<KvScratch*> make_kv_scratch(KvShape shape, int32_t rows) = 0;
  virtual Result<StatePool*> make_state_pool(DeltaShape shape, int32_t slots) = 0;
  // For passes of up to `rows` rows, of which only the first `tentative` may be of tentative segments.
  virtual Result<DeltaTrace*> make_delta_trace(DeltaShape shape, int32_t rows, int32_t tentative) = 0;

  // --- host side of a pass ---------------------------------------------------------------------------------------------------------
  virtual void stage_begin(Lane lane) = 0;  // forgets what was staged in the lane
  // Copies `bytes` from the host; null if the lane is full (BackendLimits::staged_bytes).
  virtual const void* stage_bytes(Lane lane, const void* data, int64_t bytes) = 0;
  template <class T>
  const T* stage(Lane lane, std::span<const T> values) {
    return static_cast<const T*>(stage_bytes(lane, values.data(), static_cast<int64_t>(values.size_bytes())));
  }
  virtual void upload(std::span<const float> values, const Tensor& to) = 0;  // row-major host values, as many as `to` has
  virtual Status finish() = 0;                                               // waits for all that was enqueued
  virtual Result<const float*> host_floats(
      const Tensor& t) = 0;  // contiguous float32 [rows, cols], valid until the next call or op; finishes
  virtual void reset_state(StatePool* states, int32_t slot) = 0;  // zero state and window, all layers
  // Whether passes should be rounded up to few shapes by padding (ops/forest.h), so that segment() meets the same key again.
  virtual bool fixed_shapes() const { return false; }
  // Runs `ops`. The same key promises the same calls with the same arguments, pointers to staged arrays and host arrays of results
  // included; only what stands there may differ. So they may be recorded once and replayed. Everything is staged before, and finish()
  // comes between two segments with results.
  virtual void segment(const SegmentKey&, const std::function<void()>& ops) { ops(); }
  virtual void once(const std::function<void()>& ops) { ops(); }  // the same for ops that no key promises to repeat: timed alike

  // --- ops ---------------------------------------------------------------------------------------------------------------------------
  virtual void embed(const EmbedArgs& args) = 0;
  virtual void copy_rows(const CopyRowsArgs& args) = 0;
  virtual void rms_norm(const RmsNormArgs& args) = 0;
  virtual void add_rms_norm(const AddRmsNormArgs& args) = 0;
  virtual void gated_rms_norm(const GatedRmsNormArgs& args) = 0;
  virtual void linear(const LinearArgs& args) = 0;
  virtual void silu_mul(const SiluMulArgs& args) = 0;
  virtual void linear_silu(const LinearSiluArgs& args) {
    linear({.x = args.x, .weight = args.weight, .y = args.gate_up, .scale = args.scale});
    silu_mul({.x = args.gate_up, .y = args.y});
  }
  virtual RowScale linear_add_norm(const LinearAddNormArgs& args) {
    linear({.x = args.x, .weight = args.weight, .y = args.delta});
    if (args.across_ranks) all_reduce({.x = args.delta});
    add_rms_norm({.x = args.residual, .delta = args.delta, .w = args.w, .eps = args.eps, .y = args.y, .tap = args.tap});
    return {};
  }
  virtual void all_reduce(const AllReduceArgs&) {}  // alone, a sum over the ranks is what it is
  virtual void attention_prepare(const AttentionPrepareArgs& args) = 0;
  virtual void attention(const AttentionArgs& args) = 0;
  virtual void draft_attention(const DraftAttentionArgs& args) = 0;
  virtual void draft_context(const DraftContextArgs& args) = 0;
  virtual void kv_commit(const KvCommitArgs& args) = 0;
  virtual void conv(const ConvArgs& args) = 0;
  virtual void delta_rule(const DeltaRuleArgs& args) = 0;
  virtual void gated_delta_mixer(const GatedDeltaMixerArgs& args);  // conv, delta_rule and gated_rms_norm, unless a backend has it whole
  virtual void delta_commit(const DeltaCommitArgs& args) = 0;
  virtual void finish_logits(const FinishLogitsArgs& args) = 0;
  virtual void top_k_log_probs(const TopKArgs& args) = 0;
  virtual void best_two(const BestTwoArgs& args) = 0;
  virtual void sample_rows(const SampleRowsArgs& args) = 0;

  // --- what it costs here ------------------------------------------------------------------------------------------------------------
  // Whether tensors lie in the host's memory, so that reading all logits of a pass costs nothing.
  virtual bool in_host_memory() const = 0;
  // While on, every op is timed by itself (the device idles between ops: shares, not sums). op_times() forgets what it gives.
  virtual void time_ops(bool) {}
  virtual std::vector<OpTime> op_times() { return {}; }
  // While on, segments are timed on the device. segment_ms(): of all that were finished since it was last asked.
  virtual void time_segments(bool) {}
  virtual double segment_ms() { return 0; }
  virtual Result<DeviceRates> measure_rates() { return Status(Code::kUnavailable, "this backend measures no rates"); }
  // Bytes a second from pinned host memory to the device, by copies of the loader's size: no load can be faster. 0: nothing to cross.
  virtual Result<double> measure_link() { return 0.0; }

 protected:
  MemoryLedger ledger_;
  std::shared_ptr<Collectives> group_;
};

}  // namespace ddtree::ops
