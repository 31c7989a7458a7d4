// What a device can do and what ops took on it.
#pragma once

#include <cstdint>
#include <string>

namespace ddtree::ops {

struct OpTime {
  std::string op;
  int64_t calls = 0;
  double ms = 0;
};

// Measured, not looked up: the ceilings that everything else is compared with.
struct DeviceRates {
  double read_bytes_per_second = 0;  // a kernel of 16-byte loads over several GB
  double bf16_flop_per_second = 0;   // a large BF16 matrix product through the library; 0: no library
};

}  // namespace ddtree::ops
