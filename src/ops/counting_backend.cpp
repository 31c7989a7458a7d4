#include "ops/counting_backend.h"

#include <cstdlib>

#include "base/log.h"
#include "base/thread_pool.h"
#include "ops/cpu/layout.h"
#include "ops/cuda/layout.h"

namespace ddtree::ops {
namespace {

struct CountedWeight final : Weight {
  using Weight::Weight;
  CountedWeight(int64_t n, int64_t k) : Weight(n, k) {}
};
struct CountedRope final : RopeTable {
  CountedRope(int64_t positions, int64_t rotary_dim) : RopeTable(positions, rotary_dim) {}
};
struct CountedKvPool final : KvPool {
  CountedKvPool(KvShape s, int32_t pages, int32_t page_size) : KvPool(s, pages, page_size) {}
};
struct CountedKvScratch final : KvScratch {
  CountedKvScratch(KvShape s, int32_t rows) : KvScratch(s, rows) {}
};
struct CountedStatePool final : StatePool {
  CountedStatePool(DeltaShape s, int32_t slots) : StatePool(s, slots) {}
};
struct CountedTrace final : DeltaTrace {
  CountedTrace(DeltaShape s, int32_t rows) : DeltaTrace(s, rows) {}
};

}  // namespace

CountingBackend::CountingBackend(DeviceKind kind, int threads) : kind_(kind), threads_(threads > 0 ? threads : usable_cores()) {
  if (kind_ == DeviceKind::kCpu) return;
  take(MemoryUse::kStaging, 0, 0, cuda::layout::kResults);
  ledger_.pin(cuda::layout::kResults);
}

void CountingBackend::none() {
  log::error("a backend that only counts memory was asked to compute");
  std::abort();
}

template <class T, class... A>
T* CountingBackend::keep(A&&... a) {
  auto owned = std::make_shared<T>(std::forward<A>(a)...);
  handles_.push_back(owned);
  return owned.get();
}

void CountingBackend::take(MemoryUse use, int64_t cpu_elements, int64_t cpu_size, int64_t cuda_bytes) {
  ledger_.book(use, kind_ == DeviceKind::kCpu ? cpu::layout::block_bytes(cpu_elements, cpu_size) : cuda::layout::padded(cuda_bytes));
}

void CountingBackend::worker(int64_t floats) {
  if (kind_ != DeviceKind::kCpu || floats <= worker_floats_) return;
  const int64_t before = worker_floats_ > 0 ? cpu::layout::block_bytes(worker_floats_, 4) : 0;
  ledger_.book(MemoryOwner::kPass, MemoryUse::kWorkspace, threads_ * (cpu::layout::block_bytes(floats, 4) - before));
  worker_floats_ = floats;
}

Status CountingBackend::set_limits(const BackendLimits& limits) {
  limits_ = limits;
  for (int lane = 0; lane < kLanes; ++lane) take(MemoryUse::kStaging, limits.staged_bytes, 1, limits.staged_bytes);
  if (kind_ == DeviceKind::kCpu) {
    take(MemoryUse::kWorkspace, cpu::layout::linear_floats(limits), 4, 0);
    worker(cpu::layout::kLinearWorker);
    return {};
  }
  take(MemoryUse::kWorkspace, 0, 0, cuda::layout::logits_work(limits));
  take(MemoryUse::kWorkspace, 0, 0, cuda::layout::kBlasWork);
  ledger_.pin(kLanes * limits.staged_bytes + cuda::layout::logit_row(limits));
  return {};
}

Tensor CountingBackend::counted(int64_t rows, int64_t cols, Element element, MemoryUse use) {
  take(use, cpu::layout::tensor_floats(rows, cols), 4, cuda::layout::tensor(rows, cols, element));
  return {nullptr, element, rows, cols, cols};
}

Result<Tensor> CountingBackend::make_tensor(int64_t rows, int64_t cols, Element element) {
  return counted(rows, cols, element, MemoryUse::kActivations);
}

Result<const Weight*> CountingBackend::pack_weight(std::span<const TensorView> parts) {
  Result<PackedShape> s = packed_shape(parts);
  if (!s.ok()) return s.status();
  take(MemoryUse::kWeights, cpu::layout::weight_words(s->n, s->k, s->bf16), 4, cuda::layout::weight(s->n, s->k, s->bf16));
  return static_cast<const Weight*>(keep<CountedWeight>(s->n, s->k));
}

Result<Tensor> CountingBackend::norm_weight(const TensorView& weight, float) {
  return counted(1, weight.elements(), Element::kFloat32, MemoryUse::kWeights);
}

Result<Tensor> CountingBackend::constant(std::span<const float>, int64_t rows, int64_t cols) {
  return counted(rows, cols, Element::kFloat32, MemoryUse::kWeights);
}

Result<const RopeTable*> CountingBackend::make_rope(int64_t positions, int64_t rotary_dim, double) {
  if (kind_ == DeviceKind::kCpu) take(MemoryUse::kTables, cpu::layout::rope_floats(positions, rotary_dim), 4, 0);
  else
    for (int half = 0; half < 2; ++half) take(MemoryUse::kTables, 0, 0, cuda::layout::rope_half(positions, rotary_dim));
  return static_cast<const RopeTable*>(keep<CountedRope>(positions, rotary_dim));
}

Result<KvPool*> CountingBackend::make_kv_pool(KvShape shape, int32_t pages, int32_t page_size) {
  for (int half = 0; half < 2; ++half)
    take(MemoryUse::kKvPages, cpu::layout::kv_pool_floats(shape, pages, page_size), 4, cuda::layout::kv(shape, int64_t{pages} * page_size));
  return static_cast<KvPool*>(keep<CountedKvPool>(shape, pages, page_size));
}

Result<KvScratch*> CountingBackend::make_kv_scratch(KvShape shape, int32_t rows) {
  take(MemoryUse::kKvScratch, cpu::layout::scratch_k_floats(shape, rows), 4, cuda::layout::kv(shape, rows));
  take(MemoryUse::kKvScratch, cpu::layout::scratch_v_floats(shape, rows), 4, cuda::layout::kv(shape, rows));
  worker(cpu::layout::attend_worker(shape, limits_));
  if (kind_ == DeviceKind::kCuda && !attention_work_) {
    ledger_.book(MemoryOwner::kPass, MemoryUse::kWorkspace, cuda::layout::padded(cuda::layout::kAttentionWork));
    attention_work_ = true;
  }
  return static_cast<KvScratch*>(keep<CountedKvScratch>(shape, rows));
}

Result<StatePool*> CountingBackend::make_state_pool(DeltaShape shape, int32_t slots) {
  take(MemoryUse::kStates, cpu::layout::state_floats(shape, slots), 4, cuda::layout::states(shape, slots));
  take(MemoryUse::kStates, cpu::layout::window_floats(shape, slots), 4, cuda::layout::windows(shape, slots));
  return static_cast<StatePool*>(keep<CountedStatePool>(shape, slots));
}

Result<DeltaTrace*> CountingBackend::make_delta_trace(DeltaShape shape, int32_t rows, int32_t tentative) {
  if (kind_ == DeviceKind::kCpu) {
    const cpu::layout::Trace t = cpu::layout::trace(shape, rows);
    for (const int64_t floats : {t.inputs, t.keys, t.updates, t.queries, t.betas}) take(MemoryUse::kTrace, floats, 4, 0);
    take(MemoryUse::kTrace, t.prefixes, 8, 0);
    worker(cpu::layout::delta_worker(shape, rows));
  } else {
    const cuda::layout::Trace t = cuda::layout::trace(shape, rows, tentative);
    for (const int64_t bytes : {t.k, t.u, t.gate, t.input, t.q, t.q, t.dots, t.turns, t.tiles}) take(MemoryUse::kTrace, 0, 0, bytes);
  }
  return static_cast<DeltaTrace*>(keep<CountedTrace>(shape, rows));
}

}  // namespace ddtree::ops
