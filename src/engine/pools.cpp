#include "engine/pools.h"

#include <algorithm>
#include <cstdlib>

#include "base/log.h"

namespace ddtree {

IndexPool::IndexPool(int32_t count) : taken_(static_cast<size_t>(count), 0) {
  for (int32_t i = count - 1; i >= 0; --i) free_.push_back(i);  // 0 goes out first
}

bool IndexPool::take(int32_t count, std::vector<int32_t>* out) {
  if (count > free()) return false;
  for (int32_t i = 0; i < count; ++i) {
    const int32_t index = free_.back();
    free_.pop_back();
    taken_[static_cast<size_t>(index)] = 1;
    out->push_back(index);
  }
  return true;
}

void IndexPool::give_back(std::vector<int32_t>* indices) {
  for (auto it = indices->rbegin(); it != indices->rend(); ++it) {
    if (*it < 0 || *it >= total() || !taken_[static_cast<size_t>(*it)]) {
      log::error("index {} of {} was given back twice", *it, total());
      std::abort();
    }
    taken_[static_cast<size_t>(*it)] = 0;
    free_.push_back(*it);
  }
  indices->clear();
}

int32_t pages_needed(int32_t prompt, int32_t max_tokens, int32_t overshoot, int32_t page_size) {
  const int64_t positions = int64_t{prompt} + max_tokens + overshoot;
  return static_cast<int32_t>((positions + page_size - 1) / page_size);
}

std::vector<int32_t> share_rows(const std::vector<int32_t>& left, int32_t rows) {
  std::vector<int32_t> share(left.size(), 0);
  while (rows > 0) {
    int32_t open = 0;
    for (size_t i = 0; i < left.size(); ++i) open += share[i] < left[i] ? 1 : 0;
    if (open == 0) break;
    const int32_t each = std::max(rows / open, 1);
    for (size_t i = 0; i < left.size() && rows > 0; ++i) {
      const int32_t give = std::min({each, left[i] - share[i], rows});
      share[i] += give;
      rows -= give;
    }
  }
  return share;
}

}  // namespace ddtree
