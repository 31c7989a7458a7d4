#include "ops/cpu/cpu_backend.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/bf16.h"

namespace ddtree::ops::cpu {
namespace {

Status no_memory(const char* what, int64_t bytes) {
  return {Code::kDoesNotFit, fmt::format("{}: {} MiB could not be allocated", what, (bytes >> 20) + 1)};
}

Status multiple_of_16(const char* what, int64_t n) {
  if (n > 0 && n % kLanes16 == 0) return {};
  return {Code::kBadModel, fmt::format("{} is {}: the CPU kernels need a positive multiple of {}", what, n, kLanes16)};
}

}  // namespace

CpuBackend::CpuBackend(const CpuOptions& options)
    : kernels_(options.kernels ? *options.kernels : best_kernels()),
      name_(fmt::format("cpu {}", kernels_.name)),
      bfloat16_(options.bfloat16_boundaries),
      bfloat16_residual_(options.bfloat16_boundaries && options.bfloat16_residual),
      pool_(options.threads),
      workers_(pool_.threads()) {}

CpuBackend::~CpuBackend() = default;

template <class T>
Status CpuBackend::allocate(Block<T>* block, int64_t count, MemoryUse use, const char* what) {
  if (!block->allocate(count)) return no_memory(what, count * static_cast<int64_t>(sizeof(T)));
  ledger_.book(use, layout::block_bytes(count, sizeof(T)));
  return {};
}

Status CpuBackend::set_limits(const BackendLimits& limits) {
  limits_ = limits;
  DDTREE_RETURN_IF_ERROR(allocate(&packed_, layout::linear_floats(limits), MemoryUse::kWorkspace, "linear workspace"));
  for (auto& lane : lanes_) DDTREE_RETURN_IF_ERROR(allocate(&lane, limits.staged_bytes, MemoryUse::kStaging, "staged arrays"));
  return reserve_worker(layout::kLinearWorker);
}

Status CpuBackend::reserve_worker(int64_t floats) {
  if (floats <= worker_floats_) return {};
  for (auto& w : workers_) {
    if (!w.allocate(floats)) return no_memory("op workspace", floats * 4);
    // Whoever asks for more, the space is for every op.
    ledger_.book(MemoryOwner::kPass, MemoryUse::kWorkspace,
                 layout::block_bytes(floats, 4) - (worker_floats_ > 0 ? layout::block_bytes(worker_floats_, 4) : 0));
  }
  worker_floats_ = floats;
  return {};
}

Result<Tensor> CpuBackend::make_tensor(int64_t rows, int64_t cols, Element element) {
  if (element != Element::kFloat32) return Status(Code::kEngineFault, "the CPU backend keeps activations as float32");
  return new_tensor(rows, cols, MemoryUse::kActivations, "activations");
}

Result<Tensor> CpuBackend::new_tensor(int64_t rows, int64_t cols, MemoryUse use, const char* what) {
  auto* block = keep<Block<float>>();
  DDTREE_RETURN_IF_ERROR(allocate(block, layout::tensor_floats(rows, cols), use, what));
  return Tensor{block->data(), Element::kFloat32, rows, cols, cols};
}

Result<Tensor> CpuBackend::constant(std::span<const float> values, int64_t rows, int64_t cols) {
  if (static_cast<int64_t>(values.size()) != rows * cols) {
    return Status(Code::kEngineFault, fmt::format("constant of {} values for a [{}, {}] tensor", values.size(), rows, cols));
  }
  Result<Tensor> t = new_tensor(rows, cols, MemoryUse::kWeights, "weights");
  if (t.ok()) std::copy(values.begin(), values.end(), t->f32());
  return t;
}

Result<const RopeTable*> CpuBackend::make_rope(int64_t positions, int64_t rotary_dim, double theta) {
  if (rotary_dim < 0 || rotary_dim % 2) return Status(Code::kBadModel, fmt::format("rotary dimension is {}: it must be even", rotary_dim));
  auto* rope = keep<CpuRope>(positions, rotary_dim);
  DDTREE_RETURN_IF_ERROR(allocate(&rope->table, layout::rope_floats(positions, rotary_dim), MemoryUse::kTables, "rotary table"));
  const int64_t half = rotary_dim / 2;
  // Frequency and angle are rounded to float32 as the models' own code rounds them: at long positions that is part of what was trained.
  std::vector<float> frequency(half);
  for (int64_t i = 0; i < half; ++i) {
    frequency[i] = static_cast<float>(1.0 / std::pow(theta, 2.0 * static_cast<double>(i) / static_cast<double>(rotary_dim)));
  }
  pool_.parallel_for(positions, 256, [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p) {
      float* row = rope->table.data() + p * rotary_dim;
      for (int64_t i = 0; i < half; ++i) {
        const float angle = static_cast<float>(p) * frequency[i];
        row[i] = static_cast<float>(std::cos(static_cast<double>(angle)));
        row[half + i] = static_cast<float>(std::sin(static_cast<double>(angle)));
      }
    }
  });
  return static_cast<const RopeTable*>(rope);
}

Result<KvPool*> CpuBackend::make_kv_pool(KvShape shape, int32_t pages, int32_t page_size) {
  DDTREE_RETURN_IF_ERROR(multiple_of_16("head_dim", shape.head_dim));
  if (page_size <= 0 || page_size % kLanes16) {
    return Status(Code::kInvalidArgument, fmt::format("page_size is {}: it must be a positive multiple of {}", page_size, kLanes16));
  }
  auto* pool = keep<CpuKvPool>(shape, pages, page_size);
  const int64_t floats = layout::kv_pool_floats(shape, pages, page_size);
  DDTREE_RETURN_IF_ERROR(allocate(&pool->k, floats, MemoryUse::kKvPages, "K pages"));
  DDTREE_RETURN_IF_ERROR(allocate(&pool->v, floats, MemoryUse::kKvPages, "V pages"));
  return static_cast<KvPool*>(pool);
}

Result<KvScratch*> CpuBackend::make_kv_scratch(KvShape shape, int32_t rows) {
  DDTREE_RETURN_IF_ERROR(multiple_of_16("head_dim", shape.head_dim));
  auto* scratch = keep<CpuKvScratch>(shape, rows);
  DDTREE_RETURN_IF_ERROR(allocate(&scratch->k, layout::scratch_k_floats(shape, rows), MemoryUse::kKvScratch, "K scratch"));
  DDTREE_RETURN_IF_ERROR(allocate(&scratch->v, layout::scratch_v_floats(shape, rows), MemoryUse::kKvScratch, "V scratch"));
  DDTREE_RETURN_IF_ERROR(reserve_worker(layout::attend_worker(shape, limits_)));
  items_.reserve(limits_.max_rows * 8);
  return static_cast<KvScratch*>(scratch);
}

Result<StatePool*> CpuBackend::make_state_pool(DeltaShape shape, int32_t slots) {
  DDTREE_RETURN_IF_ERROR(multiple_of_16("linear_key_head_dim", shape.key_dim));
  DDTREE_RETURN_IF_ERROR(multiple_of_16("linear_value_head_dim", shape.value_dim));
  if (shape.conv_width < 2 || shape.conv_width > 8) {
    return Status(Code::kBadModel, fmt::format("linear_conv_kernel_dim is {}: 2 to 8 are supported", shape.conv_width));
  }
  auto* pool = keep<CpuStatePool>(shape, slots);
  DDTREE_RETURN_IF_ERROR(allocate(&pool->states, layout::state_floats(shape, slots), MemoryUse::kStates, "recurrent states"));
  DDTREE_RETURN_IF_ERROR(allocate(&pool->windows, layout::window_floats(shape, slots), MemoryUse::kStates, "convolution windows"));
  return static_cast<StatePool*>(pool);
}

// Certain rows have factors as well: their chunks are folded from them.
Result<DeltaTrace*> CpuBackend::make_delta_trace(DeltaShape shape, int32_t rows, int32_t) {
  auto* trace = keep<CpuDeltaTrace>(shape, rows);
  const layout::Trace size = layout::trace(shape, rows);
  DDTREE_RETURN_IF_ERROR(allocate(&trace->inputs, size.inputs, MemoryUse::kTrace, "convolution inputs"));
  DDTREE_RETURN_IF_ERROR(allocate(&trace->keys, size.keys, MemoryUse::kTrace, "delta-rule factors"));
  DDTREE_RETURN_IF_ERROR(allocate(&trace->updates, size.updates, MemoryUse::kTrace, "delta-rule factors"));
  DDTREE_RETURN_IF_ERROR(allocate(&trace->prefixes, size.prefixes, MemoryUse::kTrace, "delta-rule factors"));
  DDTREE_RETURN_IF_ERROR(allocate(&trace->queries, size.queries, MemoryUse::kTrace, "delta-rule queries"));
  DDTREE_RETURN_IF_ERROR(allocate(&trace->betas, size.betas, MemoryUse::kTrace, "delta-rule gates"));
  DDTREE_RETURN_IF_ERROR(reserve_worker(layout::delta_worker(shape, rows)));
  return static_cast<DeltaTrace*>(trace);
}

void CpuBackend::stage_begin(Lane lane) { lane_used_[static_cast<int>(lane)] = 0; }

const void* CpuBackend::stage_bytes(Lane lane, const void* data, int64_t bytes) {
  const int i = static_cast<int>(lane);
  const int64_t at = round_up(lane_used_[i], 16);
  if (at + bytes > lanes_[i].count()) return nullptr;
  std::byte* to = lanes_[i].data() + at;
  if (bytes > 0) std::memcpy(to, data, bytes);
  lane_used_[i] = at + bytes;
  return to;
}

void CpuBackend::upload(std::span<const float> values, const Tensor& to) {
  for (int64_t r = 0; r < to.rows; ++r) std::copy_n(values.data() + r * to.cols, to.cols, to.f32(r));
}

Result<const float*> CpuBackend::host_floats(const Tensor& t) {
  if (t.stride == t.cols || t.rows <= 1) return static_cast<const float*>(t.f32());
  host_.resize(t.rows * t.cols);
  for (int64_t r = 0; r < t.rows; ++r) std::copy_n(t.f32(r), t.cols, host_.data() + r * t.cols);
  return static_cast<const float*>(host_.data());
}

void CpuBackend::reset_state(StatePool* states, int32_t slot) {
  const auto& s = static_cast<const CpuStatePool&>(*states);
  std::fill_n(s.state(slot, 0, 0), s.shape().layers * s.layer_state(), 0.0f);
  std::fill_n(s.window(slot, 0), s.shape().layers * s.layer_window(), 0.0f);
}

}  // namespace ddtree::ops::cpu
