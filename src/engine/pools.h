// Who has which KV page and which recurrent-state slot. The memory itself is the executor's.
#pragma once

#include <cstdint>
#include <vector>

namespace ddtree {

// A fixed set of equal things, handed out by index. Not thread-safe: the engine's thread owns it.
class IndexPool {
 public:
  explicit IndexPool(int32_t count = 0);
  // Appends `count` indices to *out; false, with nothing taken, if there are not so many.
  bool take(int32_t count, std::vector<int32_t>* out);
  // Gives back what was taken. Giving back what is free already would hand one page to two sequences: that is an assertion failure.
  void give_back(std::vector<int32_t>* indices);
  int32_t free() const { return static_cast<int32_t>(free_.size()); }
  int32_t total() const { return static_cast<int32_t>(taken_.size()); }
  int32_t used() const { return total() - free(); }

 private:
  std::vector<int32_t> free_;
  std::vector<uint8_t> taken_;
};

// Pages that a sequence needs for its whole life: prompt + max_tokens, and the positions that drafting may touch beyond them. Known before
// it starts, so that it never fails half-way.
int32_t pages_needed(int32_t prompt, int32_t max_tokens, int32_t overshoot, int32_t page_size);

// Splits a pass's prompt rows between sequences that still have `left[i]` prompt rows: equal shares, what a short one does not need goes
// to the others; earlier ones get the odd rows.
std::vector<int32_t> share_rows(const std::vector<int32_t>& left, int32_t rows);

}  // namespace ddtree
