// Finding the card before anything else touches CUDA: driver first, then card, then what this build has code for.
#pragma once

#include <cstdint>
#include <string>

#include "base/status.h"

namespace ddtree::ops::cuda {

struct DeviceInfo {
  int index = 0;
  std::string name;
  int major = 0, minor = 0;  // compute capability
  int multiprocessors = 0;
  int64_t memory_bytes = 0, free_bytes = 0;
  int64_t shared_per_block = 0;                 // opt-in limit, bytes
  int driver_version = 0, runtime_version = 0;  // 13000 = 13.0
  bool hopper = false;                          // the wgmma kernels can run (their machine code is in this build and the card is 9.0)
};

int built_for();  // the CUDA that this build was made with, 13000 = 13.0

// kUnavailable: no driver, no card, or a card this build has no code for, with what was found and what is needed; kTemporary: a driver
// that does not match its kernel module or a card that does not answer yet.
Result<DeviceInfo> find_device(int index);

}  // namespace ddtree::ops::cuda
