// Ops over rows of logits.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <utility>

#include "ops/cpu/cpu_backend.h"
#include "ops/cpu/for_items.h"

namespace ddtree::ops::cpu {
namespace {

void lower(std::atomic<int32_t>* first, int32_t row) {
  int32_t seen = first->load(std::memory_order_relaxed);
  while (row < seen && !first->compare_exchange_weak(seen, row, std::memory_order_relaxed)) {
  }
}

constexpr int32_t kNone = std::numeric_limits<int32_t>::max();
int32_t or_none(int32_t row) { return row == kNone ? -1 : row; }

struct Candidate {
  float logit;
  int32_t id;
};
// The heap's front is the worst: smallest logit, and of equal ones the largest id.
bool better(const Candidate& a, const Candidate& b) { return a.logit > b.logit || (a.logit == b.logit && a.id < b.id); }

}  // namespace

void CpuBackend::finish_logits(const FinishLogitsArgs& args) {
  const int64_t vocab = args.logits.cols;
  std::atomic<int32_t> bad{kNone};
  pool_.parallel_for(args.logits.rows, grain(vocab), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      float* row = args.logits.f32(r);
      if (!kernels_.finite(args.real_vocab, row)) lower(&bad, static_cast<int32_t>(r));
      std::fill(row + args.real_vocab, row + vocab, -std::numeric_limits<float>::infinity());
    }
  });
  *args.bad_row = or_none(bad.load());
}

void CpuBackend::top_k_log_probs(const TopKArgs& args) {
  constexpr int64_t kBlock = 64;
  std::atomic<int32_t> bad{kNone};
  pool_.parallel_for(args.logits.rows, grain(args.real_vocab * 8), [&](int64_t begin, int64_t end) {
    std::vector<Candidate> heap(args.top_k);
    for (int64_t r = begin; r < end; ++r) {
      const float* x = args.logits.f32(r);
      const float max = kernels_.max(args.real_vocab, x);
      const double sum = kernels_.sum_exp(args.real_vocab, x, max);
      if (!std::isfinite(sum) || !std::isfinite(max)) lower(&bad, static_cast<int32_t>(r));
      int32_t held = 0;
      for (int64_t first = 0; first < args.real_vocab; first += kBlock) {
        const int64_t last = std::min(first + kBlock, args.real_vocab);
        if (held == args.top_k && kernels_.max(last - first, x + first) <= heap.front().logit) continue;  // later ids lose ties
        for (int64_t i = first; i < last; ++i) {
          const Candidate c{x[i], static_cast<int32_t>(i)};
          if (held < args.top_k) {
            heap[held++] = c;
            std::push_heap(heap.begin(), heap.begin() + held, better);
          } else if (better(c, heap.front())) {
            std::pop_heap(heap.begin(), heap.end(), better);
            heap.back() = c;
            std::push_heap(heap.begin(), heap.end(), better);
          }
        }
      }
      std::sort(heap.begin(), heap.end(), better);
      const double log_sum = std::log(sum);
      for (int32_t i = 0; i < args.top_k; ++i) {
        args.token[r * args.top_k + i] = heap[i].id;
        args.log_prob[r * args.top_k + i] = static_cast<float>(static_cast<double>(heap[i].logit) - max - log_sum);
      }
    }
  });
  *args.bad_row = or_none(bad.load());
}

void CpuBackend::best_two(const BestTwoArgs& args) {
  pool_.parallel_for(args.logits.rows, grain(args.real_vocab), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const float* x = args.logits.f32(r);
      Candidate best{-std::numeric_limits<float>::infinity(), kNone}, second = best;
      for (int64_t i = 0; i < args.real_vocab; ++i) {
        const Candidate c{x[i], static_cast<int32_t>(i)};
        if (better(c, best)) second = best, best = c;
        else if (better(c, second)) second = c;
      }
      args.token[r] = best.id == kNone ? 0 : best.id;
      args.margin[r] = best.logit - second.logit;
      args.bad[r] = kernels_.finite(args.real_vocab, x) ? 0 : 1;
    }
  });
}

}  // namespace ddtree::ops::cpu
