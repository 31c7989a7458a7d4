// Random values and checkpoint tensors for the tests of ops: the CPU's against float64 oracles, a card's against the CPU.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "base/bf16.h"
#include "model/tensor.h"

namespace ddtree::testing {

using Floats = std::vector<float>;

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t bits() {  // splitmix64
    uint64_t z = (state_ += 0x9E3779B97F4A7C15u);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
  }
  int32_t below(int64_t n) { return static_cast<int32_t>(bits() % static_cast<uint64_t>(n)); }
  // About normal, within ±3.5: the sum of four uniform numbers.
  float normal(float scale = 1.0f) {
    const uint64_t b = bits();
    const auto sum = static_cast<int32_t>((b & 0xFFFF) + (b >> 16 & 0xFFFF) + (b >> 32 & 0xFFFF) + (b >> 48));
    return static_cast<float>(sum - 2 * 65535) * (1.7320508f / 65536.0f) * scale;
  }
  Floats normals(int64_t n, float scale = 1.0f) {
    Floats v(static_cast<size_t>(n));
    for (float& x : v) x = normal(scale);
    return v;
  }
  Floats activations(int64_t n, float scale = 1.0f) {  // the same in float32 and BF16
    Floats v(static_cast<size_t>(n));
    for (float& x : v) x = round_to_bf16(normal(scale));
    return v;
  }

 private:
  uint64_t state_;
};

// Storage of a checkpoint tensor: BF16 (values rounded) or float32.
struct HostWeight {
  HostWeight(Floats v, int64_t n, int64_t k, bool bf16) : values(std::move(v)) {
    view.dtype = bf16 ? DType::kBf16 : DType::kF32;
    view.shape = {n, k};
    view.bytes = values.size() * (bf16 ? 2 : 4);
    bytes = std::make_unique<std::byte[]>(view.bytes + 1);
    std::byte* data = bytes.get() + 1;  // unaligned, as in a file
    for (size_t i = 0; i < values.size(); ++i) {
      if (bf16) {
        const uint16_t bits = float_to_bf16(values[i]);
        values[i] = bf16_to_float(bits);
        std::memcpy(data + 2 * i, &bits, 2);
      } else {
        std::memcpy(data + 4 * i, &values[i], 4);
      }
    }
    view.data = data;
  }
  // Random BF16 values of magnitudes 2^-8 … 2^-5, made fast: for matrices of hundreds of millions.
  HostWeight(Random* random, int64_t n, int64_t k) {
    const auto count = static_cast<size_t>(n * k);
    view.dtype = DType::kBf16;
    view.shape = {n, k};
    view.bytes = count * 2;
    bytes = std::make_unique_for_overwrite<std::byte[]>(view.bytes + 8);
    for (size_t i = 0; i < count; i += 4) {  // four values of 64 random bits: sign and fraction, and two bits of exponent above 2^-8
      const uint64_t b = random->bits();
      const uint64_t word = (b & 0x807F807F807F807Fu) + 0x3B803B803B803B80u + (b & 0x0180018001800180u);
      std::memcpy(bytes.get() + 2 * i, &word, 8);
    }
    view.data = bytes.get();
  }
  HostWeight(const HostWeight&) = delete;
  Floats values;  // empty for the fast kind
  std::unique_ptr<std::byte[]> bytes;
  TensorView view;
};

}  // namespace ddtree::testing
