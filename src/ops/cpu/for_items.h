// CpuBackend::for_items, shared by the op files.
#pragma once

#include <algorithm>
#include <atomic>

#include "base/flush_denormals.h"
#include "ops/cpu/cpu_backend.h"

namespace ddtree::ops::cpu {

template <class F>
void CpuBackend::for_items(int64_t count, int64_t work, const F& f) {
  if (count <= 0) return;
  const int64_t threads = std::min<int64_t>(pool_.threads(), count);
  if (threads == 1 || count * work < 2 * 32768) {
    const FlushDenormals flush;  // as inside the pool's loops: how much else is in a pass must not change a row's bits
    for (int64_t i = 0; i < count; ++i) f(0, i);
    return;
  }
  std::atomic<int64_t> next{0};
  pool_.parallel_for(threads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t w = begin; w < end; ++w) {
      for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) f(static_cast<int>(w), i);
    }
  });
}

}  // namespace ddtree::ops::cpu
