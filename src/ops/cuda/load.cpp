// Weights to the card: pinned staging buffers, copied on a stream of their own while the next ones are read.
#include <cuda_runtime_api.h>
#include <fmt/core.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "ops/cuda/cuda_backend.h"

namespace ddtree::ops::cuda {
namespace {

// Enough that a copy (80 µs at 53 GB/s) takes much longer than starting it, and so little that all of them stay in a server's last-level
// cache between reader and link, and are pinned in milliseconds.
constexpr int64_t kBufferBytes = 4 << 20;
// A reader copies 5 to 10 GB/s from the page cache; the link takes up to 55.
constexpr int kReaders = 8;
constexpr size_t kHugePage = 2 << 20;

}  // namespace

struct CudaBackend::Sink final : LoadSink {
  Sink(int d, const std::vector<std::byte*>& p) : device(d), places(p) {}
  ~Sink() override { close(); }

  Status failed(cudaError_t e, const char* what) const {
    cudaGetLastError();
    return {Code::kEngineFault, fmt::format("loading weights: {}: {}", what, cudaGetErrorString(e))};
  }

  // Huge pages that are pinned afterwards: 14 ms for 64 MiB, where cudaMallocHost takes 44 ms of a load that takes 200.
  Result<std::byte*> open(int count, int64_t bytes) override {
    const size_t all = (static_cast<size_t>(count * bytes) + kHugePage - 1) / kHugePage * kHugePage;
    memory = std::aligned_alloc(kHugePage, all);
    cudaError_t e = cudaErrorMemoryAllocation;
    if (memory != nullptr) {
      madvise(memory, all, MADV_HUGEPAGE);  // a wish: small pages serve too
      std::memset(memory, 0, all);
      e = cudaHostRegister(memory, all, cudaHostRegisterDefault);
    }
    if (e != cudaSuccess) {
      cudaGetLastError();
      std::free(memory);
      memory = nullptr;
      return Status(Code::kDoesNotFit,
                    fmt::format("staging of weights: {} MiB of pinned host memory refused ({})", all >> 20, cudaGetErrorString(e)));
    }
    e = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    if (e != cudaSuccess) return failed(e, "stream");
    copied.resize(static_cast<size_t>(count));
    for (cudaEvent_t& event : copied) {
      e = cudaEventCreateWithFlags(&event, cudaEventDisableTiming | cudaEventBlockingSync);
      if (e != cudaSuccess) return failed(e, "event");
    }
    return static_cast<std::byte*>(memory);
  }
  void close() override {
    if (stream != nullptr) cudaStreamSynchronize(stream), cudaStreamDestroy(stream), stream = nullptr;
    for (cudaEvent_t event : copied)
      if (event != nullptr) cudaEventDestroy(event);
    copied.clear();
    if (memory != nullptr) cudaHostUnregister(memory), std::free(memory), memory = nullptr;
  }
  Status begin_thread() override {
    const cudaError_t e = cudaSetDevice(device);
    return e == cudaSuccess ? Status() : failed(e, "card");
  }
  Status put(int buffer, const std::byte* from, const LoadItem& item, int64_t first, int64_t count) override {
    const int64_t size = item.element == Element::kFloat32 ? 4 : 2;
    cudaError_t e =
        cudaMemcpyAsync(places[item.place] + first * size, from, static_cast<size_t>(count * size), cudaMemcpyHostToDevice, stream);
    if (e == cudaSuccess) e = cudaEventRecord(copied[buffer], stream);
    if (e == cudaSuccess) return {};
    cudaGetLastError();
    return {Code::kEngineFault, fmt::format("copying tensor {} to the card: {}", item.from.name, cudaGetErrorString(e))};
  }
  Status wait(int buffer) override {
    const cudaError_t e = cudaEventSynchronize(copied[buffer]);
    return e == cudaSuccess ? Status() : failed(e, "copying to the card");
  }

  int device;
  const std::vector<std::byte*>& places;
  void* memory = nullptr;
  cudaStream_t stream = nullptr;
  std::vector<cudaEvent_t> copied;
};

void CudaBackend::load_later(const TensorView& from, Element element, float add, void* to) {
  loader_.add({.from = from, .element = element, .add = add, .place = static_cast<int64_t>(places_.size())});
  places_.push_back(static_cast<std::byte*>(to));
}

Status CudaBackend::finish_loading(const LoadOptions& options) {
  LoadOptions o = options;
  const int cores = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  if (o.threads <= 0) o.threads = loading_ ? std::min(cores, kReaders) : 1;
  if (o.buffer_bytes <= 0) o.buffer_bytes = kBufferBytes;
  if (o.buffers <= 0) o.buffers = 2 * o.threads;
  // What the memory is cleared with runs on the ops' stream: it must not come after the weights.
  const cudaError_t e = cudaStreamSynchronize(stream_);
  Sink sink(device_.index, places_);
  const Status status = e == cudaSuccess ? loader_.run(&sink, o) : sink.failed(e, "clearing memory");
  places_.clear();
  loading_ = false;
  return status;
}

Result<Tensor> CudaBackend::norm_weight(const TensorView& weight, float add) {
  Result<Tensor> t = new_tensor(1, weight.elements(), Element::kFloat32, MemoryUse::kWeights, "norms");
  if (!t.ok()) return t;
  load_later(weight, Element::kFloat32, add, t->data);
  if (!loading_) DDTREE_RETURN_IF_ERROR(finish_loading({}));
  return t;
}

}  // namespace ddtree::ops::cuda
