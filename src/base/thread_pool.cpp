#include "base/thread_pool.h"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "base/flush_denormals.h"

namespace ddtree {
namespace {

inline void cpu_relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

struct ThreadPool::Impl {
  std::mutex mutex;
  std::condition_variable wake, idle;
  const std::function<void(int64_t, int64_t)>* body = nullptr;
  int64_t count = 0, piece = 0;
  std::atomic<int64_t> next{0};
  std::atomic<uint64_t> generation{0};
  int running = 0;
  bool stop = false;
  std::vector<std::thread> workers;

  void drain(const std::function<void(int64_t, int64_t)>& loop) {
    for (int64_t begin; (begin = next.fetch_add(piece, std::memory_order_relaxed)) < count;) loop(begin, std::min(begin + piece, count));
  }

  void work() {
    const FlushDenormals flush;
    uint64_t seen = 0;
    for (;;) {
      const std::function<void(int64_t, int64_t)>* loop;
      // A round is hundreds of short loops, so spin a little before sleeping: a futex wake costs more than most of them.
      for (int spin = 0; spin < 2000 && generation.load(std::memory_order_acquire) == seen; ++spin) cpu_relax();
      {
        std::unique_lock lock(mutex);
        wake.wait(lock, [&] { return stop || generation.load(std::memory_order_relaxed) != seen; });
        if (stop) return;
        seen = generation.load(std::memory_order_relaxed);
        loop = body;
        if (loop == nullptr) continue;  // the loop ended before this worker came
        ++running;
      }
      drain(*loop);
      std::lock_guard lock(mutex);
      if (--running == 0) idle.notify_one();
    }
  }
};

int usable_cores() {
  cpu_set_t set;
  const int n = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : static_cast<int>(std::thread::hardware_concurrency());
  return std::max(n, 1);
}

ThreadPool::ThreadPool(int threads) : threads_(threads), impl_(std::make_unique<Impl>()) {
  if (threads_ <= 0) threads_ = usable_cores();
  for (int i = 1; i < threads_; ++i) impl_->workers.emplace_back([this] { impl_->work(); });
}

ThreadPool::~ThreadPool() {
  {
    std::lock_guard lock(impl_->mutex);
    impl_->stop = true;
  }
  impl_->wake.notify_all();
  for (auto& w : impl_->workers) w.join();
}

void ThreadPool::parallel_for(int64_t count, int64_t grain, const std::function<void(int64_t, int64_t)>& body) {
  if (count <= 0) return;
  const FlushDenormals flush;  // the same on every thread, so that which one runs a piece changes nothing
  grain = std::max<int64_t>(grain, 1);
  if (threads_ == 1 || count <= grain) {
    body(0, count);
    return;
  }
  {
    std::lock_guard lock(impl_->mutex);
    impl_->body = &body;
    impl_->count = count;
    // Four pieces a thread even out unequal ones without much contention.
    impl_->piece = std::max(grain, (count + threads_ * 4 - 1) / (threads_ * 4));
    impl_->next.store(0, std::memory_order_relaxed);
    impl_->generation.fetch_add(1, std::memory_order_release);
  }
  impl_->wake.notify_all();
  impl_->drain(body);
  std::unique_lock lock(impl_->mutex);
  impl_->body = nullptr;  // a worker that has not started yet must not
  impl_->idle.wait(lock, [&] { return impl_->running == 0; });
}

}  // namespace ddtree
