// Runs of ops that repeat: recorded once, replayed as one launch (a CUDA graph).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace ddtree::ops {

// What decides every launch of a segment: its kind, and the sizes that launches are shaped by. Never what sequences are in, nor their mode.
struct SegmentKey {
  static constexpr size_t kParts = 10;
  std::array<int32_t, kParts> part{};
  bool operator==(const SegmentKey&) const = default;
};

struct SegmentKeyHash {
  size_t operator()(const SegmentKey& key) const {
    uint64_t h = 0;
    for (const int32_t p : key.part) h = (h ^ static_cast<uint32_t>(p)) * 0x9E3779B97F4A7C15u, h ^= h >> 29;
    return static_cast<size_t>(h);
  }
};

}  // namespace ddtree::ops
