// Whether a CUDA driver can carry this build: the one judgement, asked by serve through the runtime and by doctor without it.
#pragma once

#include <string>
#include <vector>

#include "base/status.h"

namespace ddtree::ops {

// Results of the driver that mean something here; the driver's and the runtime's numbers are the same.
inline constexpr int kCudaInsufficientDriver = 35, kCudaDevicesUnavailable = 46, kCudaNoDevice = 100, kCudaSystemNotReady = 802,
                     kCudaDriverMismatch = 803;

struct DriverState {
  int driver_version = 0;  // CUDA that the driver speaks, 13000 = 13.0; 0: no driver answers
  int needed_version = 0;  // CUDA that this build was made with; any driver of that major carries it
  int error = 0;           // of starting the driver or counting cards; 0: none
  std::string error_text;  // its words
  int cards = 0;
};

std::string cuda_version_text(int version);  // "13.0"

// kUnavailable: no driver, too old a driver, no card, with what was found and what is needed; kTemporary: a driver that does not match its
// kernel module, or cards that do not answer yet.
Status check_driver(const DriverState& state);

// Where cuBLASLt of that CUDA's major is looked for, in order: by the loader's own rules, then where toolkits are installed.
std::vector<std::string> cublas_lt_files(int cuda_version);

// Cards before compute capability 8.0 have no BF16 matrix units. kUnavailable for those, and for any that the build has no code for
// (has_code false).
Status check_card(int index, const std::string& name, int major, int minor, bool has_code);

}  // namespace ddtree::ops
