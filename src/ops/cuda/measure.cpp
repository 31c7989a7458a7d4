// What the card can do and what ops take: measured, never looked up.
#include <cuda_runtime_api.h>
#include <fmt/core.h>

#include <algorithm>
#include <map>

#include "ops/cuda/cuda_backend.h"

namespace ddtree::ops::cuda {

void CudaBackend::time_ops(bool on) {
  check(cudaStreamSynchronize(stream_), "time_ops");
  timing_ = on;
}

std::vector<OpTime> CudaBackend::op_times() {
  check(cudaStreamSynchronize(stream_), "op_times");
  std::map<std::string, OpTime> sums;
  for (const OpEvents& e : op_events_) {
    float ms = 0;
    check(cudaEventElapsedTime(&ms, e.begin, e.end), "op_times");
    OpTime& sum = sums[e.op];
    sum.op = e.op, ++sum.calls, sum.ms += ms;
    cudaEventDestroy(e.begin), cudaEventDestroy(e.end);
  }
  op_events_.clear();
  std::vector<OpTime> out;
  for (auto& [op, sum] : sums) out.push_back(sum);
  std::sort(out.begin(), out.end(), [](const OpTime& a, const OpTime& b) { return a.ms > b.ms; });
  return out;
}

Result<DeviceRates> CudaBackend::measure_rates() {
  // As much as is free, up to 8 GB: several times any cache.
  size_t free = 0, total = 0;
  cudaMemGetInfo(&free, &total);
  const int64_t bytes = std::min<int64_t>(int64_t{8} << 30, static_cast<int64_t>(free) - (int64_t{256} << 20)) / (1 << 20) * (1 << 20);
  if (bytes < (int64_t{256} << 20))
    return Status(Code::kDoesNotFit, fmt::format("measuring the read bandwidth: {} MiB are free, 512 are needed", free >> 20));
  void* memory = nullptr;
  if (cudaMalloc(&memory, static_cast<size_t>(bytes)) != cudaSuccess) {
    cudaGetLastError();
    return Status(Code::kDoesNotFit, fmt::format("measuring the read bandwidth: {} MiB of device memory refused", bytes >> 20));
  }
  check(kernels::fill(stream_, memory, bytes / 2, 7, 0.0f, 1.0f), "measure_rates");
  cudaEvent_t begin, end;
  cudaEventCreate(&begin), cudaEventCreate(&end);
  std::vector<float> times;
  for (int i = 0; i < 12; ++i) {
    cudaEventRecord(begin, stream_);
    check(kernels::read_all(stream_, memory, bytes, small_, device_.multiprocessors), "measure_rates");
    cudaEventRecord(end, stream_);
    check(cudaStreamSynchronize(stream_), "measure_rates");
    float ms = 0;
    cudaEventElapsedTime(&ms, begin, end);
    if (i > 1) times.push_back(ms);
  }
  std::sort(times.begin(), times.end());
  DeviceRates rates;
  rates.read_bytes_per_second = static_cast<double>(bytes) / (times[times.size() / 2] * 1e-3);
  // A square product whose three matrices fit into what was read.
  if (constexpr int64_t kSide = 8192; blas_ && bytes >= 6 * kSide * kSide) {
    auto* w = static_cast<std::byte*>(memory);
    const Tensor x{w + 2 * kSide * kSide, Element::kBfloat16, kSide, kSide, kSide},
        y{w + 4 * kSide * kSide, Element::kBfloat16, kSide, kSide, kSide};
    times.clear();
    bool ran = true;
    for (int i = 0; i < 8 && ran; ++i) {
      cudaEventRecord(begin, stream_);
      const Result<bool> done = blas_->linear(stream_, w, kSide, kSide, x, y, blas_work_);
      cudaEventRecord(end, stream_);
      check(cudaStreamSynchronize(stream_), "measure_rates");
      if (!done.ok() && error_.ok()) error_ = done.status();
      ran = done.ok() && *done;
      float ms = 0;
      cudaEventElapsedTime(&ms, begin, end);
      if (ran && i > 1) times.push_back(ms);
    }
    std::sort(times.begin(), times.end());
    if (ran) rates.bf16_flop_per_second = 2.0 * kSide * kSide * kSide / (times[times.size() / 2] * 1e-3);
  }
  cudaEventDestroy(begin), cudaEventDestroy(end);
  cudaFree(memory);
  if (!error_.ok()) return std::exchange(error_, Status());
  return rates;
}

Result<double> CudaBackend::measure_link() {
  constexpr int64_t kBytes = int64_t{64} << 20, kPiece = int64_t{4} << 20;
  constexpr int kTimes = 32;  // over the same memory: 2 GiB
  void *host = nullptr, *device = nullptr;
  cudaError_t e = cudaMallocHost(&host, kBytes);
  if (e == cudaSuccess) e = cudaMalloc(&device, kBytes);
  cudaEvent_t begin = nullptr, end = nullptr;
  if (e == cudaSuccess) e = cudaEventCreate(&begin);
  if (e == cudaSuccess) e = cudaEventCreate(&end);
  const auto copy = [&](int times) {
    for (int i = 0; i < times; ++i)
      for (int64_t at = 0; at < kBytes && e == cudaSuccess; at += kPiece)
        e = cudaMemcpyAsync(static_cast<std::byte*>(device) + at, static_cast<std::byte*>(host) + at, kPiece, cudaMemcpyHostToDevice,
                            stream_);
  };
  float ms = 0;
  copy(4);
  if (e == cudaSuccess) e = cudaEventRecord(begin, stream_);
  copy(kTimes);
  if (e == cudaSuccess) e = cudaEventRecord(end, stream_);
  if (const cudaError_t done = cudaStreamSynchronize(stream_); e == cudaSuccess) e = done;
  if (e == cudaSuccess) e = cudaEventElapsedTime(&ms, begin, end);
  if (begin != nullptr) cudaEventDestroy(begin);
  if (end != nullptr) cudaEventDestroy(end);
  cudaFree(device), cudaFreeHost(host);
  if (e != cudaSuccess) {
    cudaGetLastError();
    return Status(Code::kUnavailable, fmt::format("measuring the link to the card: {}", cudaGetErrorString(e)));
  }
  return static_cast<double>(kBytes) * kTimes / (ms * 1e-3);
}

}  // namespace ddtree::ops::cuda
