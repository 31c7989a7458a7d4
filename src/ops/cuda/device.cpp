#include "ops/cuda/device.h"

#include <cuda_runtime_api.h>
#include <fmt/core.h>

#include "kernels/kernels.h"
#include "ops/driver.h"

namespace ddtree::ops::cuda {

int built_for() { return CUDART_VERSION; }

Result<DeviceInfo> find_device(int index) {
  DeviceInfo d;
  d.index = index;
  cudaRuntimeGetVersion(&d.runtime_version);
  if (cudaDriverGetVersion(&d.driver_version) != cudaSuccess) d.driver_version = 0;
  int count = 0;
  const cudaError_t found = d.driver_version == 0 ? cudaSuccess : cudaGetDeviceCount(&count);
  DDTREE_RETURN_IF_ERROR(check_driver({.driver_version = d.driver_version,
                                       .needed_version = d.runtime_version,
                                       .error = static_cast<int>(found),
                                       .error_text = found == cudaSuccess ? "" : cudaGetErrorString(found),
                                       .cards = count}));
  if (index < 0 || index >= count)
    return Status(Code::kUnavailable, fmt::format("there is no CUDA card {}: {} found, counted from 0", index, count));
  cudaDeviceProp p{};
  cudaError_t e = cudaGetDeviceProperties(&p, index);
  if (e == cudaSuccess) e = cudaSetDevice(index);
  size_t free = 0, total = 0;
  if (e == cudaSuccess) e = cudaMemGetInfo(&free, &total);
  if (e != cudaSuccess) return Status(Code::kUnavailable, fmt::format("CUDA card {} cannot be used: {}", index, cudaGetErrorString(e)));
  d.name = p.name;
  d.major = p.major, d.minor = p.minor;
  d.multiprocessors = p.multiProcessorCount;
  d.memory_bytes = static_cast<int64_t>(total), d.free_bytes = static_cast<int64_t>(free);
  d.shared_per_block = static_cast<int64_t>(p.sharedMemPerBlockOptin);
  DDTREE_RETURN_IF_ERROR(check_card(index, d.name, d.major, d.minor, kernels::binary_version() >= 0));
  d.hopper = d.major == 9 && kernels::has_hopper_code();
  return d;
}

}  // namespace ddtree::ops::cuda
