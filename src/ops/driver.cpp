#include "ops/driver.h"

#include <fmt/core.h>

namespace ddtree::ops {

std::string cuda_version_text(int version) { return fmt::format("{}.{}", version / 1000, version % 1000 / 10); }

std::vector<std::string> cublas_lt_files(int cuda_version) {
  const int major = cuda_version / 1000;
  const std::string name = fmt::format("libcublasLt.so.{}", major);
  return {name, fmt::format("/usr/local/cuda-{}/lib64/{}", cuda_version_text(cuda_version), name), "/usr/local/cuda/lib64/" + name,
          fmt::format("/usr/local/cuda-{}/lib64/{}", major, name)};
}

Status check_driver(const DriverState& s) {
  if (s.driver_version == 0)
    return {Code::kUnavailable,
            fmt::format("no NVIDIA driver answers on this machine; this build needs one for CUDA {} or later. `ddtree serve --device cpu` "
                        "serves small models without a card",
                        cuda_version_text(s.needed_version))};
  if (s.error == kCudaInsufficientDriver || s.driver_version / 1000 < s.needed_version / 1000)
    return {Code::kUnavailable, fmt::format("the NVIDIA driver is for CUDA {}, this build needs {} or later: update the driver",
                                            cuda_version_text(s.driver_version), cuda_version_text(s.needed_version))};
  if (s.error == kCudaDriverMismatch || s.error == kCudaSystemNotReady || s.error == kCudaDevicesUnavailable)
    return {Code::kTemporary,
            fmt::format("the NVIDIA driver does not answer properly yet ({}): after a driver update, reload its kernel module or restart "
                        "the machine",
                        s.error_text)};
  if (s.error != 0 || s.cards == 0)
    return {Code::kUnavailable, fmt::format("the NVIDIA driver (CUDA {}) shows no card ({}): check nvidia-smi and CUDA_VISIBLE_DEVICES",
                                            cuda_version_text(s.driver_version), s.error_text.empty() ? "none is there" : s.error_text)};
  return {};
}

Status check_card(int index, const std::string& name, int major, int minor, bool has_code) {
  if (has_code && major >= 8) return {};
  return {Code::kUnavailable, fmt::format("this build has no code for card {} ({}, compute capability {}.{}); it needs 8.0 or later", index,
                                          name, major, minor)};
}

}  // namespace ddtree::ops
