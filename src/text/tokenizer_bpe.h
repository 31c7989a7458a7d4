// Byte-pair encoding of one word: the innermost and hottest part of the tokenizer.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

namespace ddtree {

// The merge rules and the ids of single bytes. Filled once, then immutable.
class BpeMerges {
 public:
  struct Rule {
    uint32_t rank = UINT32_MAX;  // lower is applied first; UINT32_MAX: there is no such rule
    int32_t merged = -1;         // id of the joined token
  };

  void reserve(size_t rules);
  // A later rule for the same pair replaces the earlier one.
  void add(int32_t left, int32_t right, uint32_t rank, int32_t merged);
  Rule find(int32_t left, int32_t right) const;

  // Ids of single bytes; -1 where the vocabulary lacks one: such bytes give unknown_id, or nothing if that is -1 too.
  std::array<int32_t, 256> byte_id = filled();
  int32_t unknown_id = -1;
  bool fuse_unknown = false;  // a run of unknown bytes gives one id

 private:
  struct Slot {
    uint64_t pair = UINT64_MAX;
    Rule rule;
  };
  static std::array<int32_t, 256> filled() {
    std::array<int32_t, 256> ids;
    ids.fill(-1);
    return ids;
  }
  size_t slot_of(uint64_t pair) const;

  std::vector<Slot> slots_;  // open addressing, a power of two, at most half full
  size_t used_ = 0;
  int shift_ = 64;
};

// Encodes words. One thread at a time; holds a bounded cache of short words.
class BpeEncoder {
 public:
  explicit BpeEncoder(const BpeMerges& merges);

  // Appends the ids of word. Time is O(n log n) in its length.
  void encode(std::string_view word, std::vector<int32_t>* out);

 private:
  static constexpr size_t kCacheSlots = 1 << 14;
  static constexpr size_t kKeyBytes = 30;
  static constexpr size_t kCachedIds = 8;
  struct alignas(64) CacheSlot {
    uint8_t length = 0;  // 0: empty
    uint8_t count = 0;
    char key[kKeyBytes] = {};
    int32_t ids[kCachedIds] = {};
  };
  static_assert(sizeof(CacheSlot) == 64);

  void merge_short(std::vector<int32_t>* out);
  void merge_long(std::vector<int32_t>* out);

  const BpeMerges* merges_;
  std::vector<CacheSlot> cache_;  // direct-mapped: a newcomer takes the place of whatever was there
  std::vector<int32_t> symbols_;  // of the word at hand
  std::vector<uint32_t> ranks_;
  std::vector<uint32_t> next_, previous_;
  std::vector<uint64_t> heap_;  // rank << 32 | position
};

}  // namespace ddtree
