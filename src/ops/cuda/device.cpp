#include "ops/cuda/device.h"

#include <cuda_runtime_api.h>
#include <fmt/core.h>

#include "kernels/kernels.h"

namespace ddtree::ops::cuda {

Result<DeviceInfo> find_device(int index) {
  DeviceInfo d;
  d.index = index;
  cudaRuntimeGetVersion(&d.runtime_version);
  const auto version = [](int v) { return fmt::format("{}.{}", v / 1000, v % 1000 / 10); };
  if (cudaDriverGetVersion(&d.driver_version) != cudaSuccess || d.driver_version == 0)
    return Status(
        Code::kUnavailable,
        fmt::format(
            "no NVIDIA driver answers on this machine; this build needs one for CUDA {} or later. `ddtree serve --device cpu` serves "
            "small models without a card",
            version(d.runtime_version)));
  int count = 0;
  const cudaError_t found = cudaGetDeviceCount(&count);
  if (found == cudaErrorInsufficientDriver)
    return Status(Code::kUnavailable, fmt::format("the NVIDIA driver is for CUDA {}, this build needs {} or later: update the driver",
                                                  version(d.driver_version), version(d.runtime_version)));
  if (found == cudaErrorSystemDriverMismatch || found == cudaErrorSystemNotReady || found == cudaErrorDevicesUnavailable)
    return Status(
        Code::kTemporary,
        fmt::format(
            "the NVIDIA driver does not answer properly yet ({}): after a driver update, reload its kernel module or restart the machine",
            cudaGetErrorString(found)));
  if (found != cudaSuccess || count == 0)
    return Status(Code::kUnavailable,
                  fmt::format("the NVIDIA driver (CUDA {}) shows no card ({}): check nvidia-smi and CUDA_VISIBLE_DEVICES",
                              version(d.driver_version), cudaGetErrorString(found)));
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
  const int code = kernels::binary_version();
  if (code < 0)
    return Status(Code::kUnavailable,
                  fmt::format("this build has no code for card {} ({}, compute capability {}.{}); it needs 8.0 or later", index, d.name,
                              d.major, d.minor));
  d.hopper = d.major == 9 && kernels::has_hopper_code();
  return d;
}

}  // namespace ddtree::ops::cuda
