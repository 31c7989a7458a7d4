// Set-up, staging and results of the CUDA backend; the ops themselves are in cuda_ops.cpp.
#include "ops/cuda/cuda_backend.h"

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "base/bf16.h"
#include "base/log.h"
#include "ops/cuda/layout.h"

namespace ddtree::ops::cuda {
namespace {

int64_t round_up(int64_t n, int64_t m) { return (n + m - 1) / m * m; }

decltype(&cuTensorMapEncodeTiled) tensor_map_encoder() {
  static const auto encode = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found{};
    if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found) != cudaSuccess ||
        found != cudaDriverEntryPointSuccess)
      entry = nullptr;
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(entry);
  }();
  return encode;
}

// Rank kRank, innermost first; strides in elements.
template <size_t kRank>
bool encode_map(CUtensorMap* map, const void* data, const std::array<int64_t, kRank>& size, const std::array<int64_t, kRank - 1>& stride,
                const std::array<int, kRank>& box) {
  const auto encode = tensor_map_encoder();
  if (!encode || size[0] % 8 || reinterpret_cast<uintptr_t>(data) % 16) return false;
  cuuint64_t sizes[kRank], strides[kRank - 1];
  cuuint32_t boxes[kRank], steps[kRank];
  for (size_t i = 0; i < kRank; ++i) {
    sizes[i] = static_cast<cuuint64_t>(size[i]), boxes[i] = static_cast<cuuint32_t>(box[i]), steps[i] = 1;
    if (i + 1 == kRank) break;
    if (stride[i] % 8) return false;
    strides[i] = static_cast<cuuint64_t>(stride[i]) * 2;
  }
  // No L2 promotion: asking for 256-byte sectors cost 2 % of the read bandwidth.
  return encode(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, kRank, const_cast<void*>(data), sizes, strides, boxes, steps,
                CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_NONE,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// Bulk copies of 32 places; attention does without where they do not fit (pages that cut them, small heads, more than 2^31 places).
template <class Store>
void map_places(Store* store, int64_t layers, int page_size) {
  kernels::KvStorage& s = store->all;
  const int64_t cols = int64_t{s.kv_heads} * s.head_dim, rows = layers * s.layer_stride / cols;
  if (s.head_dim % 64 || page_size % 32 || rows >= int64_t{1} << 31) return;
  if (encode_map<2>(&store->k_map, s.k, {cols, rows}, {cols}, {64, 32}) &&
      encode_map<2>(&store->v_map, s.v, {cols, rows}, {cols}, {64, 32}))
    s.k_map = &store->k_map, s.v_map = &store->v_map;
}

}  // namespace

Result<std::unique_ptr<CudaBackend>> CudaBackend::create(const CudaOptions& options) {
  Result<DeviceInfo> device = find_device(options.device);
  if (!device.ok()) return device.status();
  std::unique_ptr<CudaBackend> backend(new CudaBackend(options, *device));
  if (const cudaError_t e = cudaStreamCreateWithFlags(&backend->stream_, cudaStreamNonBlocking); e != cudaSuccess)
    return Status(Code::kUnavailable, fmt::format("CUDA stream: {}", cudaGetErrorString(e)));
  if (options.library) {
    Result<std::unique_ptr<BlasLt>> blas = BlasLt::open();
    if (blas.ok()) backend->blas_ = std::move(*blas);
    else log::warn("without cuBLASLt prompts are read by the kernels for few rows, several times slower: {}", blas.status().message());
  }
  DDTREE_RETURN_IF_ERROR(backend->take_arena());
  Result<std::byte*> results = backend->pinned(layout::kResults);
  if (!results.ok()) return results.status();
  backend->results_ = *results;
  backend->results_size_ = layout::kResults;
  DDTREE_RETURN_IF_ERROR(backend->allocate(&backend->small_, layout::kResults, MemoryUse::kStaging, "op results"));
  return backend;
}

CudaBackend::CudaBackend(const CudaOptions& options, DeviceInfo device) : options_(options), device_(std::move(device)) {
  hopper_ = device_.hopper && !options_.portable_kernels && tensor_map_encoder() != nullptr;
  shared_limit_ = static_cast<size_t>(device_.shared_per_block) - 1024;  // static shared memory and the system's share
  name_ = fmt::format("cuda {} ({}.{}, {} kernels)", device_.name, device_.major, device_.minor, hopper_ ? "Hopper" : "portable");
}

CudaBackend::~CudaBackend() {
  if (stream_) cudaStreamSynchronize(stream_);
  drop_graphs();
  blas_.reset();
  if (stream_) cudaStreamDestroy(stream_);
  for (void* p : device_blocks_) cudaFree(p);
  for (void* p : host_blocks_) cudaFreeHost(p);
}

template <class T, class... A>
T* CudaBackend::keep(A&&... a) {
  auto owned = std::make_shared<T>(std::forward<A>(a)...);
  owned_.push_back(owned);
  return owned.get();
}

Status CudaBackend::take_arena() {
  if (options_.arena_bytes <= 0) return {};
  size_t free = 0, total = 0;
  cudaMemGetInfo(&free, &total);
  void* p = nullptr;
  cudaError_t e = cudaMalloc(&p, static_cast<size_t>(options_.arena_bytes));
  if (e == cudaSuccess) {
    device_blocks_.push_back(p);
    arena_ = static_cast<std::byte*>(p);
    e = cudaMemsetAsync(p, 0, static_cast<size_t>(options_.arena_bytes), stream_);
  }
  if (e == cudaSuccess) return {};
  cudaGetLastError();
  return {Code::kDoesNotFit, fmt::format("the memory plan's {} MiB of device memory were refused ({}); {} of {} MiB were free",
                                         options_.arena_bytes >> 20, cudaGetErrorString(e), free >> 20, total >> 20)};
}

Result<void*> CudaBackend::allocate(int64_t bytes, MemoryUse use, const char* what) {
  bytes = layout::padded(bytes);
  void* p = nullptr;
  if (arena_ && arena_used_ + bytes <= options_.arena_bytes) {
    p = arena_ + arena_used_;
    arena_used_ += bytes;
    ledger_.book(use, bytes);
    return p;
  }
  if (arena_) log::warn("{}: {} KiB of device memory are outside the memory plan, which left them out", what, bytes >> 10);
  cudaError_t e = cudaMalloc(&p, static_cast<size_t>(bytes));
  if (e == cudaSuccess)
    device_blocks_.push_back(p), ledger_.book(use, bytes), e = cudaMemsetAsync(p, 0, static_cast<size_t>(bytes), stream_);
  if (e != cudaSuccess) {
    cudaGetLastError();
    return Status(Code::kDoesNotFit, fmt::format("{}: {} MiB of device memory refused ({}); {} MiB are taken already", what,
                                                 (bytes >> 20) + 1, cudaGetErrorString(e), ledger_.total() >> 20));
  }
  return p;
}

template <class T>
Status CudaBackend::allocate(T** pointer, int64_t bytes, MemoryUse use, const char* what) {
  Result<void*> p = allocate(bytes, use, what);
  if (!p.ok()) return p.status();
  *pointer = static_cast<T*>(*p);
  return {};
}

Result<std::byte*> CudaBackend::pinned(int64_t bytes) {
  void* p = nullptr;
  if (const cudaError_t e = cudaMallocHost(&p, static_cast<size_t>(bytes)); e != cudaSuccess)
    return Status(Code::kDoesNotFit, fmt::format("pinned host memory: {} MiB refused ({})", (bytes >> 20) + 1, cudaGetErrorString(e)));
  host_blocks_.push_back(p);
  ledger_.pin(bytes);
  return static_cast<std::byte*>(p);
}

Status CudaBackend::set_limits(const BackendLimits& limits) {
  limits_ = limits;
  for (StagingLane& lane : lanes_) {
    Result<std::byte*> host = pinned(limits.staged_bytes);
    if (!host.ok()) return host.status();
    lane.host = *host;
    DDTREE_RETURN_IF_ERROR(allocate(&lane.device, limits.staged_bytes, MemoryUse::kStaging, "staged arrays"));
  }
  // What reading and ranking logits takes, now rather than in the first round that does.
  work_size_ = layout::logits_work(limits);
  DDTREE_RETURN_IF_ERROR(allocate(&work_, work_size_, MemoryUse::kWorkspace, "workspace of the logits ops"));
  DDTREE_RETURN_IF_ERROR(allocate(&blas_work_, layout::kBlasWork, MemoryUse::kWorkspace, "workspace of cuBLASLt"));
  bounce_size_ = layout::logit_row(limits);
  Result<std::byte*> bounce = pinned(bounce_size_);
  if (!bounce.ok()) return bounce.status();
  bounce_ = *bounce;
  return {};
}

Result<Tensor> CudaBackend::make_tensor(int64_t rows, int64_t cols, Element element) {
  return new_tensor(rows, cols, element, MemoryUse::kActivations, "activations");
}

Result<Tensor> CudaBackend::new_tensor(int64_t rows, int64_t cols, Element element, MemoryUse use, const char* what) {
  Tensor t{nullptr, element, rows, cols, cols};
  Result<void*> p = allocate(layout::tensor(rows, cols, element), use, what);
  if (!p.ok()) return p.status();
  t.data = *p;
  return t;
}

Result<const Weight*> CudaBackend::pack_weight(std::span<const TensorView> parts) {
  Result<PackedShape> shape = packed_shape(parts);
  if (!shape.ok()) return shape.status();
  const auto [n, k, bf16] = *shape;
  auto* w = keep<CudaWeight>(n, k, bf16);
  Result<void*> memory = allocate(layout::weight(n, k, bf16), MemoryUse::kWeights, "weights");
  if (!memory.ok()) return memory.status();
  w->data = *memory;
  auto* to = static_cast<std::byte*>(w->data);
  for (const TensorView& p : parts) {
    if (bf16 && p.fill.seed != 0 && p.blocks.empty()) {
      // Drawn where they are used: nothing to read.
      if (const cudaError_t e = kernels::fill(stream_, to, p.elements(), p.fill.seed, p.fill.centre, p.fill.spread); e != cudaSuccess)
        return Status(Code::kEngineFault, fmt::format("filling tensor {} on the card: {}", p.name, cudaGetErrorString(e)));
    } else {
      load_later(p, bf16 ? Element::kBfloat16 : Element::kFloat32, 0, to);
    }
    to += p.elements() * (bf16 ? 2 : 4);
  }
  if (!loading_) DDTREE_RETURN_IF_ERROR(finish_loading({}));
  if (bf16 && hopper_) {
    w->tile = kernels::few_rows_tile(n, device_.multiprocessors);
    w->mapped = encode_map<2>(&w->map, w->data, {k, n}, {k}, {64, w->tile});
    w->paired =
        w->mapped && n % 8 == 0 && encode_map<4>(&w->pairs, w->data, {k, 4, 2, n / 8}, {k, n / 2 * k, 4 * k}, {64, 4, 2, w->tile / 8});
  }
  return static_cast<const Weight*>(w);
}

Result<Tensor> CudaBackend::constant_of(const float* values, int64_t rows, int64_t cols, MemoryUse use) {
  Result<Tensor> t = new_tensor(rows, cols, Element::kFloat32, use, "constants");
  if (!t.ok()) return t;
  cudaError_t e = cudaMemcpyAsync(t->data, values, static_cast<size_t>(rows * cols) * 4, cudaMemcpyHostToDevice, stream_);
  if (e == cudaSuccess) e = cudaStreamSynchronize(stream_);
  if (e != cudaSuccess) return Status(Code::kEngineFault, fmt::format("copying constants to the card: {}", cudaGetErrorString(e)));
  return t;
}

Result<Tensor> CudaBackend::constant(std::span<const float> values, int64_t rows, int64_t cols) {
  if (static_cast<int64_t>(values.size()) != rows * cols)
    return Status(Code::kEngineFault, fmt::format("constant of {} values for a [{}, {}] tensor", values.size(), rows, cols));
  return constant_of(values.data(), rows, cols, MemoryUse::kWeights);
}

Result<const RopeTable*> CudaBackend::make_rope(int64_t positions, int64_t rotary_dim, double theta) {
  if (rotary_dim < 0 || rotary_dim % 2) return Status(Code::kBadModel, fmt::format("rotary dimension is {}: it must be even", rotary_dim));
  const int64_t half = rotary_dim / 2;
  std::vector<float> cos(static_cast<size_t>(positions * half)), sin(cos.size());
  // Frequency and angle are rounded to float32 as the models' own code rounds them: at long positions that is part of what was trained.
  for (int64_t i = 0; i < half; ++i) {
    const auto frequency = static_cast<float>(1.0 / std::pow(theta, 2.0 * static_cast<double>(i) / static_cast<double>(rotary_dim)));
    for (int64_t p = 0; p < positions; ++p) {
      const float angle = static_cast<float>(p) * frequency;
      cos[p * half + i] = static_cast<float>(std::cos(static_cast<double>(angle)));
      sin[p * half + i] = static_cast<float>(std::sin(static_cast<double>(angle)));
    }
  }
  Result<Tensor> c = constant_of(cos.data(), positions, half, MemoryUse::kTables),
                 s = constant_of(sin.data(), positions, half, MemoryUse::kTables);
  if (!c.ok()) return c.status();
  if (!s.ok()) return s.status();
  auto* rope = keep<CudaRope>(positions, rotary_dim);
  rope->table = {c->f32(), s->f32(), static_cast<int>(rotary_dim)};
  return static_cast<const RopeTable*>(rope);
}

Result<KvPool*> CudaBackend::make_kv_pool(KvShape shape, int32_t pages, int32_t page_size) {
  auto* pool = keep<CudaKvPool>(shape, pages, page_size);
  pool->all = {nullptr,        nullptr,        static_cast<int64_t>(pages) * page_size * shape.kv_heads * shape.head_dim,
               shape.kv_heads, shape.head_dim, page_size};
  const int64_t bytes = layout::kv(shape, static_cast<int64_t>(pages) * page_size);
  DDTREE_RETURN_IF_ERROR(allocate(&pool->all.k, bytes, MemoryUse::kKvPages, "K pages"));
  DDTREE_RETURN_IF_ERROR(allocate(&pool->all.v, bytes, MemoryUse::kKvPages, "V pages"));
  if (hopper_) map_places(pool, shape.layers, page_size);
  return static_cast<KvPool*>(pool);
}

Result<KvScratch*> CudaBackend::make_kv_scratch(KvShape shape, int32_t rows) {
  if (shape.head_dim % 32 || shape.head_dim > 256 || shape.head_dim == 96 || shape.head_dim == 160 || shape.head_dim == 192 ||
      shape.head_dim == 224)
    return Status(Code::kBadModel, fmt::format("head_dim is {}: the CUDA kernels take 32, 64, 128 and 256", shape.head_dim));
  auto* scratch = keep<CudaKvScratch>(shape, rows);
  scratch->all = {nullptr, nullptr, static_cast<int64_t>(rows) * shape.kv_heads * shape.head_dim, shape.kv_heads, shape.head_dim, 0};
  DDTREE_RETURN_IF_ERROR(allocate(&scratch->all.k, layout::kv(shape, rows), MemoryUse::kKvScratch, "K scratch"));
  DDTREE_RETURN_IF_ERROR(allocate(&scratch->all.v, layout::kv(shape, rows), MemoryUse::kKvScratch, "V scratch"));
  if (hopper_) map_places(scratch, shape.layers, 32);
  if (!attention_work_.partial) {
    attention_work_.capacity = layout::kAttentionWork / 4;
    // The portable kernels, where they are asked for, keep within the smallest cards' shared memory: so that this path is tried too.
    attention_work_.shared_limit = options_.portable_kernels ? std::min(shared_limit_, size_t{98} << 10) : shared_limit_;
    attention_work_.hopper = hopper_;
    const MemoryOwner asked = ledger_.owner();
    ledger_.set_owner(MemoryOwner::kPass);  // every attention's, whoever comes first
    DDTREE_RETURN_IF_ERROR(allocate(&attention_work_.partial, layout::kAttentionWork, MemoryUse::kWorkspace, "attention workspace"));
    ledger_.set_owner(asked);
  }
  return static_cast<KvScratch*>(scratch);
}

Result<StatePool*> CudaBackend::make_state_pool(DeltaShape shape, int32_t slots) {
  if (shape.key_dim % 32 || shape.key_dim > 256)
    return Status(Code::kBadModel,
                  fmt::format("linear_key_head_dim is {}: the CUDA kernels take multiples of 32 up to 256", shape.key_dim));
  if (shape.conv_width < 2 || shape.conv_width > 8)
    return Status(Code::kBadModel, fmt::format("linear_conv_kernel_dim is {}: 2 to 8 are supported", shape.conv_width));
  auto* pool = keep<CudaStatePool>(shape, slots);
  pool->storage.slots = slots, pool->storage.shape = shape;
  DDTREE_RETURN_IF_ERROR(allocate(&pool->storage.state, layout::states(shape, slots), MemoryUse::kStates, "recurrent states"));
  DDTREE_RETURN_IF_ERROR(allocate(&pool->storage.window, layout::windows(shape, slots), MemoryUse::kStates, "convolution windows"));
  return static_cast<StatePool*>(pool);
}

Result<DeltaTrace*> CudaBackend::make_delta_trace(DeltaShape shape, int32_t rows, int32_t tentative) {
  auto* trace = keep<CudaDeltaTrace>(shape, rows);
  kernels::TraceStorage& t = trace->storage;
  t.rows = tentative;
  const layout::Trace size = layout::trace(shape, rows, tentative);
  DDTREE_RETURN_IF_ERROR(allocate(&t.k, size.k, MemoryUse::kTrace, "delta-rule factors"));
  DDTREE_RETURN_IF_ERROR(allocate(&t.u, size.u, MemoryUse::kTrace, "delta-rule factors"));
  DDTREE_RETURN_IF_ERROR(allocate(&t.gate, size.gate, MemoryUse::kTrace, "delta-rule factors"));
  DDTREE_RETURN_IF_ERROR(allocate(&t.input, size.input, MemoryUse::kTrace, "convolution inputs"));
  kernels::DeltaWork& w = trace->work;
  DDTREE_RETURN_IF_ERROR(allocate(&w.q, size.q, MemoryUse::kTrace, "delta-rule queries"));
  DDTREE_RETURN_IF_ERROR(allocate(&w.k, size.q, MemoryUse::kTrace, "delta-rule keys"));
  DDTREE_RETURN_IF_ERROR(allocate(&w.dots, size.dots, MemoryUse::kTrace, "delta-rule products"));
  DDTREE_RETURN_IF_ERROR(allocate(&w.turns, size.turns, MemoryUse::kTrace, "delta-rule turns"));
  DDTREE_RETURN_IF_ERROR(allocate(&w.tile, size.tiles, MemoryUse::kTrace, "delta-rule chunks"));
  w.tiles = static_cast<int>(layout::delta_tiles(shape, rows));
  // Portable: as the smaller cards have it.
  w.shared_limit = options_.portable_kernels ? std::min<size_t>(shared_limit_, 98 << 10) : shared_limit_;
  w.pairs = hopper_;
  return static_cast<DeltaTrace*>(trace);
}

void CudaBackend::stage_begin(Lane lane) {
  StagingLane& l = lanes_[static_cast<int>(lane)];
  // A copy of the lane's last use may still read the pinned memory; between passes finish() has waited already and this returns at once.
  if (l.flushed > 0) check(cudaStreamSynchronize(stream_), "staging");
  l.used = l.flushed = 0;
}

const void* CudaBackend::stage_bytes(Lane lane, const void* data, int64_t bytes) {
  StagingLane& l = lanes_[static_cast<int>(lane)];
  const int64_t at = round_up(l.used, 16);
  if (at + bytes > limits_.staged_bytes) return nullptr;
  if (bytes > 0) std::memcpy(l.host + at, data, static_cast<size_t>(bytes));
  l.used = at + bytes;
  return l.device + at;
}

void CudaBackend::flush() {
  if (timing_ && op_begin_ == nullptr) {
    cudaEventCreate(&op_begin_);
    cudaEventRecord(op_begin_, stream_);
  }
  for (StagingLane& l : lanes_)
    if (l.used > l.flushed) {
      check(cudaMemcpyAsync(l.device + l.flushed, l.host + l.flushed, static_cast<size_t>(l.used - l.flushed), cudaMemcpyHostToDevice,
                            stream_),
            "staging");
      l.flushed = l.used;
    }
}

void CudaBackend::check(cudaError_t error, const char* op) {
  if (timing_ && op_begin_ != nullptr) {
    OpEvents e{op, op_begin_, nullptr};
    cudaEventCreate(&e.end);
    cudaEventRecord(e.end, stream_);
    op_events_.push_back(e);
    op_begin_ = nullptr;
  }
  if (error != cudaSuccess && error_.ok())
    error_ = Status(Code::kEngineFault, fmt::format("CUDA op {}: {}", op, cudaGetErrorString(error)));
}

void CudaBackend::later(void* host, const void* device, int64_t bytes) {
  later([host](const std::byte* from, int64_t n) { std::memcpy(host, from, static_cast<size_t>(n)); }, device, bytes);
}

void CudaBackend::later(std::function<void(const std::byte*, int64_t)> take, const void* device, int64_t bytes) {
  if (results_used_ + bytes > results_size_) {
    check(cudaErrorInvalidValue, "results (too many for one pass)");
    return;
  }
  check(cudaMemcpyAsync(results_ + results_used_, device, static_cast<size_t>(bytes), cudaMemcpyDeviceToHost, stream_), "results");
  pending_.push_back({std::move(take), results_used_, bytes});
  results_used_ += round_up(bytes, 16);
}

std::byte* CudaBackend::take_results(int64_t bytes) {
  if (small_used_ + bytes > layout::kResults) {
    check(cudaErrorInvalidValue, "results (too many for one pass)");
    return nullptr;
  }
  std::byte* out = small_ + small_used_;
  small_used_ += round_up(bytes, 256);
  return out;
}

bool CudaBackend::work_fits(int64_t bytes) {
  if (bytes <= work_size_) return true;
  Result<void*> p = allocate(bytes, MemoryUse::kWorkspace, "workspace of the logits ops");
  if (!p.ok()) {
    if (error_.ok()) error_ = p.status();
    return false;
  }
  work_ = static_cast<std::byte*>(*p), work_size_ = bytes;
  return true;
}

void CudaBackend::upload(std::span<const float> values, const Tensor& to) {
  std::vector<uint16_t> narrow;
  const void* from = values.data();
  if (to.element == Element::kBfloat16) {
    narrow.resize(values.size());
    for (size_t i = 0; i < values.size(); ++i) narrow[i] = float_to_bf16(values[i]);
    from = narrow.data();
  }
  const auto width = static_cast<size_t>(to.cols * to.size());
  check(cudaMemcpy2DAsync(to.data, static_cast<size_t>(to.stride * to.size()), from, width, width, static_cast<size_t>(to.rows),
                          cudaMemcpyHostToDevice, stream_),
        "upload");
  check(cudaStreamSynchronize(stream_), "upload");  // `from` is pageable and may go
}

Status CudaBackend::finish() {
  check(cudaStreamSynchronize(stream_), "finish");
  for (const Pending& p : pending_) p.take(results_ + p.offset, p.bytes);
  pending_.clear();
  if (!segment_events_.empty()) read_segment_times();
  results_used_ = small_used_ = 0;
  return std::exchange(error_, Status());
}

Result<const float*> CudaBackend::host_floats(const Tensor& t) {
  const int64_t bytes = t.rows * t.cols * t.size();
  if (bytes > bounce_size_) {
    Result<std::byte*> p = pinned(bytes);
    if (!p.ok()) return p.status();
    bounce_ = *p, bounce_size_ = bytes;
  }
  check(cudaMemcpy2DAsync(bounce_, static_cast<size_t>(t.cols * t.size()), t.data, static_cast<size_t>(t.stride * t.size()),
                          static_cast<size_t>(t.cols * t.size()), static_cast<size_t>(t.rows), cudaMemcpyDeviceToHost, stream_),
        "host_floats");
  DDTREE_RETURN_IF_ERROR(finish());
  if (t.element == Element::kFloat32) return reinterpret_cast<const float*>(bounce_);
  host_.resize(static_cast<size_t>(t.rows * t.cols));
  for (size_t i = 0; i < host_.size(); ++i) {
    uint16_t bits;
    std::memcpy(&bits, bounce_ + i * 2, 2);
    const uint32_t wide = static_cast<uint32_t>(bits) << 16;
    std::memcpy(&host_[i], &wide, 4);
  }
  return static_cast<const float*>(host_.data());
}

void CudaBackend::reset_state(StatePool* states, int32_t slot) {
  const kernels::DeltaStorage& s = static_cast<CudaStatePool*>(states)->storage;
  const int64_t state = static_cast<int64_t>(s.shape.value_heads) * s.shape.key_dim * s.shape.value_dim,
                window = static_cast<int64_t>(s.shape.conv_width - 1) * s.shape.channels();
  check(cudaMemset2DAsync(s.state + slot * state, static_cast<size_t>(s.slots * state) * 4, 0, static_cast<size_t>(state) * 4,
                          static_cast<size_t>(s.shape.layers), stream_),
        "reset_state");
  check(cudaMemset2DAsync(s.window + slot * window, static_cast<size_t>(s.slots * window) * 2, 0, static_cast<size_t>(window) * 2,
                          static_cast<size_t>(s.shape.layers), stream_),
        "reset_state");
}

const CUtensorMap* CudaBackend::row_map(const Tensor& x, int bucket) {
  const MapKey key{x.data, x.rows, x.cols, x.stride};
  const auto found = maps_.find(key);
  if (found != maps_.end()) return &found->second;
  CUtensorMap map{};
  // Only x.rows rows are promised to exist, and a box may reach past the end of what was allocated: the rest of it comes as zeros.
  if (!encode_map<2>(&map, x.data, {x.cols, x.rows}, {x.stride}, {64, bucket})) return nullptr;
  return &maps_.emplace(key, map).first->second;
}

const CUtensorMap* CudaBackend::few_rows_map(const Tensor& x) {
  const int bucket = kernels::few_rows_bucket(static_cast<int>(x.rows));
  return bucket > 0 ? row_map(x, bucket) : nullptr;
}

kernels::FewRowsWeight CudaBackend::few_rows_weight(const CudaWeight& w, const CUtensorMap& map) const {
  return {&map, w.n(), w.k(), w.tile, device_.multiprocessors, shared_limit_};
}

}  // namespace ddtree::ops::cuda
