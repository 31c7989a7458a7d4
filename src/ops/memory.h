// What a backend has taken of its device, booked while it is set up: whose it is and what it is for. A plan is made of the same books, so
// the two can be compared line by line.
#pragma once

#include <array>
#include <cstdint>

namespace ddtree::ops {

enum class MemoryOwner : uint8_t { kTarget, kEmbedding, kHead, kMtp, kDrafter, kPass };  // kPass: the backend's own, whoever computes
inline constexpr int kMemoryOwners = 6;

enum class MemoryUse : uint8_t {
  kWeights,      // packed matrices, norms and convolution taps, as computed with
  kKvPages,      // K and V of committed tokens
  kStates,       // recurrent states and convolution windows of the slots
  kTrace,        // delta-rule factors and convolution inputs of a pass's rows, until its commit
  kKvScratch,    // K and V of a pass's rows
  kActivations,  // between two ops of a pass; of kHead: logits
  kTables,       // cos and sin of the rotary embedding
  kStaging,      // arrays on their way to the device, results on their way back
  kWorkspace,    // of single ops
};
inline constexpr int kMemoryUses = 9;

class MemoryLedger {
 public:
  void set_owner(MemoryOwner owner) { owner_ = owner; }
  MemoryOwner owner() const { return owner_; }
  // Bytes may be negative: what is given back.
  void book(MemoryUse use, int64_t bytes) { device_[static_cast<size_t>(owner_)][static_cast<size_t>(use)] += bytes; }
  void book(MemoryOwner owner, MemoryUse use, int64_t bytes) { device_[static_cast<size_t>(owner)][static_cast<size_t>(use)] += bytes; }
  void pin(int64_t bytes) { pinned_ += bytes; }

  int64_t bytes(MemoryOwner owner, MemoryUse use) const { return device_[static_cast<size_t>(owner)][static_cast<size_t>(use)]; }
  int64_t of_owner(MemoryOwner owner) const {
    int64_t sum = 0;
    for (const int64_t n : device_[static_cast<size_t>(owner)]) sum += n;
    return sum;
  }
  int64_t of_use(MemoryUse use) const {
    int64_t sum = 0;
    for (const auto& owner : device_) sum += owner[static_cast<size_t>(use)];
    return sum;
  }
  int64_t total() const {
    int64_t sum = 0;
    for (const auto& owner : device_)
      for (const int64_t n : owner) sum += n;
    return sum;
  }
  int64_t pinned() const { return pinned_; }  // host memory that the device reads; 0 on the CPU

 private:
  std::array<std::array<int64_t, kMemoryUses>, kMemoryOwners> device_{};
  int64_t pinned_ = 0;
  MemoryOwner owner_ = MemoryOwner::kPass;
};

}  // namespace ddtree::ops
