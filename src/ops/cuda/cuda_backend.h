// The CUDA backend: BF16 weights and activations, float32 residual, states and accumulation, one stream.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "ops/backend.h"
#include "ops/cuda/blas_lt.h"
#include "ops/cuda/device.h"
#include "ops/cuda/storage.h"
#include "ops/weight_loader.h"

namespace ddtree::ops::cuda {

struct CudaOptions {
  int device = 0;
  bool portable_kernels = false;  // never the Hopper kernels: for testing the path of other cards
  bool library = true;            // cuBLASLt for many rows, where it can be loaded; false: own kernels alone
  // Device memory taken at once and handed out piece by piece: the memory plan's figure. What comes beyond it is taken singly, with a
  // warning. 0: every piece is an allocation of its own, so that compute-sanitizer sees a step past one's end.
  int64_t arena_bytes = 0;
  bool graphs = true;        // segments are recorded as CUDA graphs; false: the same launches one by one
  int32_t most_graphs = 96;  // kept at a time
};

class CudaBackend final : public Backend {
 public:
  static Result<std::unique_ptr<CudaBackend>> create(const CudaOptions& options);
  ~CudaBackend() override;

  const DeviceInfo& device() const { return device_; }

  const char* name() const override { return name_.c_str(); }
  Status set_limits(const BackendLimits& limits) override;
  Element activation() const override { return Element::kBfloat16; }
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
  Result<DeltaTrace*> make_delta_trace(DeltaShape shape, int32_t rows, int32_t tentative) override;

  void stage_begin(Lane lane) override;
  const void* stage_bytes(Lane lane, const void* data, int64_t bytes) override;
  void upload(std::span<const float> values, const Tensor& to) override;
  Status finish() override;
  Result<const float*> host_floats(const Tensor& t) override;
  void reset_state(StatePool* states, int32_t slot) override;
  bool fixed_shapes() const override { return true; }
  void segment(const SegmentKey& key, const std::function<void()>& ops) override;
  void once(const std::function<void()>& ops) override;
  int64_t graph_count() const { return recorded_; }
  int64_t graph_bytes() const { return graph_bytes_; }  // of device memory, as the driver reports them

  void embed(const EmbedArgs& args) override;
  void copy_rows(const CopyRowsArgs& args) override;
  void rms_norm(const RmsNormArgs& args) override;
  void add_rms_norm(const AddRmsNormArgs& args) override;
  void gated_rms_norm(const GatedRmsNormArgs& args) override;
  void linear(const LinearArgs& args) override;
  void silu_mul(const SiluMulArgs& args) override;
  void linear_silu(const LinearSiluArgs& args) override;
  RowScale linear_add_norm(const LinearAddNormArgs& args) override;
  void attention_prepare(const AttentionPrepareArgs& args) override;
  void attention(const AttentionArgs& args) override;
  void draft_attention(const DraftAttentionArgs& args) override;
  void draft_context(const DraftContextArgs& args) override;
  void kv_commit(const KvCommitArgs& args) override;
  void conv(const ConvArgs& args) override;
  void delta_rule(const DeltaRuleArgs& args) override;
  void gated_delta_mixer(const GatedDeltaMixerArgs& args) override;
  void delta_commit(const DeltaCommitArgs& args) override;
  void finish_logits(const FinishLogitsArgs& args) override;
  void top_k_log_probs(const TopKArgs& args) override;
  void best_two(const BestTwoArgs& args) override;
  void sample_rows(const SampleRowsArgs& args) override;
  bool in_host_memory() const override { return false; }
  void time_ops(bool on) override;
  std::vector<OpTime> op_times() override;
  void time_segments(bool on) override;
  double segment_ms() override { return std::exchange(segment_ms_, 0.0); }
  Result<DeviceRates> measure_rates() override;
  Result<double> measure_link() override;

 private:
  explicit CudaBackend(const CudaOptions& options, DeviceInfo device);
  // Device memory that lives as long as the backend, zeroed and booked; sizes come from layout.h. kDoesNotFit with the size.
  Result<void*> allocate(int64_t bytes, MemoryUse use, const char* what);
  template <class T>
  Status allocate(T** pointer, int64_t bytes, MemoryUse use, const char* what);
  Status take_arena();
  Result<std::byte*> pinned(int64_t bytes);
  Result<Tensor> new_tensor(int64_t rows, int64_t cols, Element element, MemoryUse use, const char* what);
  template <class T, class... A>
  T* keep(A&&... a);
  void flush();                                                      // uploads what was staged since the last flush
  void check(cudaError_t error, const char* op);                     // remembers the first error until finish()
  bool library_linear(const CudaWeight& w, const LinearArgs& args);  // false: not its kind of product
  // A host array filled from device memory at finish(), or a function that is given the bytes then.
  void later(void* host, const void* device, int64_t bytes);
  void later(std::function<void(const std::byte*, int64_t)> take, const void* device, int64_t bytes);
  std::byte* take_results(int64_t bytes);  // device memory of an op's results until finish(); null (and an error) where they are too many
  bool work_fits(int64_t bytes);           // makes work_ at least so large at set-up's expense; an error and false where memory ends
  void load_later(const TensorView& from, Element element, float add, void* to);  // `to`: device memory
  Result<Tensor> constant_of(const float* values, int64_t rows, int64_t cols, MemoryUse use);
  const CUtensorMap* row_map(const Tensor& x, int bucket);
  const CUtensorMap* few_rows_map(const Tensor& x);  // null where the kernels for few rows do not take x
  kernels::FewRowsWeight few_rows_weight(const CudaWeight& w, const CUtensorMap& map) const;

  struct StagingLane {
    std::byte *host = nullptr, *device = nullptr;  // pinned, and its copy
    int64_t used = 0, flushed = 0;
  };
  struct Pending {
    std::function<void(const std::byte*, int64_t)> take;
    int64_t offset, bytes;
  };
  struct OpEvents {
    const char* op;
    cudaEvent_t begin, end;
  };
  struct Graph {  // graphs.cpp
    cudaGraphExec_t exec = nullptr;
    cudaEvent_t begin = nullptr, end = nullptr;  // while segments are timed
    std::vector<Pending> pending;                // what finish() does with its results
    int64_t results = 0, small = 0;              // and how much room they take
    int64_t bytes = 0;                           // of device memory
    uint64_t used = 0;                           // when
  };
  bool record(Graph* graph, const std::function<void()>& ops);
  void drop(Graph* graph);
  void drop_graphs();
  void make_room_for_graphs();
  void read_segment_times();

  CudaOptions options_;
  DeviceInfo device_;
  std::string name_;
  BackendLimits limits_;
  cudaStream_t stream_ = nullptr;
  bool hopper_ = false;
  size_t shared_limit_ = 0;
  std::vector<void*> device_blocks_, host_blocks_;
  std::byte* arena_ = nullptr;
  int64_t arena_used_ = 0;
  std::vector<std::shared_ptr<void>> owned_;
  StagingLane lanes_[kLanes];
  std::vector<Pending> pending_;
  std::byte* results_ = nullptr;  // pinned: device results on their way to the host
  int64_t results_used_ = 0, results_size_ = 0;
  std::vector<float> host_;
  std::byte* bounce_ = nullptr;  // pinned, for host_floats
  int64_t bounce_size_ = 0;
  std::byte* small_ = nullptr;  // device results of logits ops
  int64_t small_used_ = 0;
  kernels::AttentionWork attention_work_;
  std::unique_ptr<BlasLt> blas_;  // null: own kernels for any number of rows
  std::byte* blas_work_ = nullptr;
  std::byte* work_ = nullptr;  // partial results of logits ops
  int64_t work_size_ = 0;
  std::unordered_map<SegmentKey, Graph, SegmentKeyHash> graphs_;  // without exec: seen once
  int64_t recorded_ = 0, graph_bytes_ = 0;
  uint64_t graph_clock_ = 0;
  bool time_segments_ = false;
  std::vector<std::pair<cudaEvent_t, cudaEvent_t>> segment_events_;  // since the last finish()
  double segment_ms_ = 0;
  bool timing_ = false;
  cudaEvent_t op_begin_ = nullptr;
  std::vector<OpEvents> op_events_;
  struct MapKey {
    const void* data;
    int64_t rows, cols, stride;
    bool operator==(const MapKey&) const = default;
  };
  struct MapHash {
    size_t operator()(const MapKey& k) const {
      return std::hash<const void*>()(k.data) ^ static_cast<size_t>((k.cols * 31 + k.stride) * 131 + k.rows);
    }
  };
  std::unordered_map<MapKey, CUtensorMap, MapHash> maps_;
  Status error_;
  struct Sink;                      // where loaded tensors go
  std::vector<std::byte*> places_;  // of the loader's items, in device memory
  WeightLoader loader_;
  bool loading_ = false;
};

}  // namespace ddtree::ops::cuda
