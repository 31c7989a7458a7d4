#include "spec/acceptance.h"

#include <algorithm>

namespace ddtree {

void AcceptanceStats::add(int32_t nodes, int32_t confirmed, int32_t committed) {
  const int32_t kept = std::min(confirmed, committed);
  const size_t k = static_cast<size_t>(kept);
  ++rounds;
  drafted += nodes;
  accepted += kept;
  if (histogram.size() <= k) histogram.resize(k + 1, 0);
  if (accepted_at.size() < k) accepted_at.resize(k, 0);
  ++histogram[k];
  for (size_t i = 0; i < k; ++i) ++accepted_at[i];
  emitted.push_back(committed);
}

bool FallbackPolicy::drafted(int32_t accepted, double break_even) {
  ++seen_;
  // A plain mean until the window is full, then a running one.
  const double rate = 1.0 / std::min(seen_, kWindow);
  mean_ += rate * (accepted - mean_);
  mean_break_even_ += rate * (break_even - mean_break_even_);
  if (seen_ < (probing_ ? kProbe : kWindow)) return false;
  if (mean_ >= kTolerance * mean_break_even_) {
    if (probing_) probing_ = false, next_pause_ = kFirstPause;
    return false;
  }
  give_up();
  return true;
}

void FallbackPolicy::give_up() {
  pause_left_ = next_pause_;
  next_pause_ = std::min(2 * next_pause_, kLongestPause);
}

void FallbackPolicy::plain() {
  if (pause_left_ == 0 || --pause_left_ > 0) return;
  probing_ = true;
  seen_ = 0;
  mean_ = mean_break_even_ = 0;
}

}  // namespace ddtree
