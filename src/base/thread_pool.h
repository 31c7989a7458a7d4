// A fixed pool for data-parallel loops inside one op.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

namespace ddtree {

int usable_cores();  // that this process may use; at least 1

class ThreadPool {
 public:
  // threads counts the caller: 1 runs everything inline. 0 = one for each core this process may use.
  explicit ThreadPool(int threads = 0);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const { return threads_; }

  // Calls body(begin, end) over [0, count) in contiguous pieces of at least `grain`, and returns when all are done. Which
  // thread runs a piece never changes its result. Denormal floats count as zero inside (base/flush_denormals.h). One caller at a
  // time; body must not call parallel_for of the same pool.
  void parallel_for(int64_t count, int64_t grain, const std::function<void(int64_t, int64_t)>& body);

 private:
  struct Impl;
  int threads_;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ddtree
