// Ops over rows of logits.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

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

// A row's best column and how good the second is, of all columns taken so far in any order.
struct BestTwo {
  Candidate best{-std::numeric_limits<float>::infinity(), kNone};
  float second = -std::numeric_limits<float>::infinity();
  int32_t bad = 0;
  void take(const Candidate& c) {
    if (better(c, best)) second = best.logit, best = c;
    else if (c.logit > second) second = c.logit;
  }
};

// Σ exp(l - max) of a row's columns, by their largest.
struct RowSum {
  float max = -std::numeric_limits<float>::infinity();
  double sum = 0;
};
RowSum joined(const RowSum& a, const RowSum& b) {
  if (std::isnan(a.sum) || std::isnan(b.sum)) return {a.max, std::numeric_limits<double>::quiet_NaN()};
  if (b.sum == 0) return a;  // no real column
  if (a.sum == 0) return b;
  const float max = std::max(a.max, b.max);
  return {max, a.sum * std::exp(static_cast<double>(a.max) - max) + b.sum * std::exp(static_cast<double>(b.max) - max)};
}

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

// On one rank the candidates go to the caller; in a group, every rank's go to every rank, and each ranks them for itself.
void CpuBackend::top_k_log_probs(const TopKArgs& args) {
  constexpr int64_t kBlock = 64;
  const int64_t rows = args.logits.rows, held_most = std::min<int64_t>(args.top_k, args.real_vocab);
  const int32_t ranks = group_ ? group_->ranks() : 1;
  std::vector<Candidate> all(static_cast<size_t>(ranks * rows * args.top_k), Candidate{-std::numeric_limits<float>::infinity(), kNone});
  std::vector<RowSum> sums(static_cast<size_t>(ranks * rows));
  std::vector<Candidate> mine_candidates(group_ ? static_cast<size_t>(rows * args.top_k) : 0, all.empty() ? Candidate{} : all.front());
  std::vector<RowSum> mine_sums(group_ ? static_cast<size_t>(rows) : 0);
  Candidate* const mine = group_ ? mine_candidates.data() : all.data();
  RowSum* const mine_sum = group_ ? mine_sums.data() : sums.data();
  pool_.parallel_for(rows, grain(args.real_vocab * 8), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const float* x = args.logits.f32(r);
      Candidate* heap = mine + r * args.top_k;
      mine_sum[r].max = kernels_.max(args.real_vocab, x);
      mine_sum[r].sum = kernels_.sum_exp(args.real_vocab, x, mine_sum[r].max);
      int64_t held = 0;
      for (int64_t first = 0; first < args.real_vocab; first += kBlock) {
        const int64_t last = std::min(first + kBlock, args.real_vocab);
        if (held == held_most && kernels_.max(last - first, x + first) <= heap[0].logit) continue;  // later ids lose ties
        for (int64_t i = first; i < last; ++i) {
          const Candidate c{x[i], args.first_id + static_cast<int32_t>(i)};
          if (held < held_most) {
            heap[held++] = c;
            std::push_heap(heap, heap + held, better);
          } else if (better(c, heap[0])) {
            std::pop_heap(heap, heap + held, better);
            heap[held - 1] = c;
            std::push_heap(heap, heap + held, better);
          }
        }
      }
      std::sort(heap, heap + held, better);
    }
  });
  if (group_) {
    group_->all_gather(mine, rows * args.top_k * static_cast<int64_t>(sizeof(Candidate)), all.data());
    group_->all_gather(mine_sum, rows * static_cast<int64_t>(sizeof(RowSum)), sums.data());
  }
  int32_t bad = kNone;
  std::vector<Candidate> best;
  for (int64_t r = 0; r < rows; ++r) {
    best.clear();
    RowSum row = sums[static_cast<size_t>(r)];
    for (int32_t rank = 0; rank < ranks; ++rank) {
      const Candidate* from = all.data() + (rank * rows + r) * args.top_k;
      best.insert(best.end(), from, from + args.top_k);
      if (rank > 0) row = joined(row, sums[static_cast<size_t>(rank * rows + r)]);
    }
    if (ranks > 1) std::sort(best.begin(), best.end(), better);
    if (!std::isfinite(row.sum) || !std::isfinite(row.max)) bad = std::min(bad, static_cast<int32_t>(r));
    const double log_sum = std::log(row.sum);
    for (int32_t i = 0; i < args.top_k; ++i) {
      const Candidate& c = best[static_cast<size_t>(i)];
      args.token[r * args.top_k + i] = c.id == kNone ? 0 : c.id;  // none: the group broke
      args.log_prob[r * args.top_k + i] = static_cast<float>(static_cast<double>(c.logit) - row.max - log_sum);
    }
  }
  *args.bad_row = or_none(bad);
}

void CpuBackend::best_two(const BestTwoArgs& args) {
  const int64_t rows = args.logits.rows;
  std::vector<BestTwo> mine(static_cast<size_t>(rows));
  pool_.parallel_for(rows, grain(args.real_vocab), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const float* x = args.logits.f32(r);
      BestTwo& two = mine[static_cast<size_t>(r)];
      for (int64_t i = 0; i < args.real_vocab; ++i) two.take({x[i], args.first_id + static_cast<int32_t>(i)});
      two.bad = kernels_.finite(args.real_vocab, x) ? 0 : 1;
    }
  });
  if (group_) {
    std::vector<BestTwo> all(static_cast<size_t>(group_->ranks()) * mine.size());
    group_->all_gather(mine.data(), rows * static_cast<int64_t>(sizeof(BestTwo)), all.data());
    for (size_t r = 0; r < mine.size(); ++r) {
      mine[r] = all[r];
      for (size_t from = mine.size() + r; from < all.size(); from += mine.size()) {
        mine[r].take({all[from].best.logit, all[from].best.id});
        mine[r].take({all[from].second, kNone});  // its id is asked for by nobody
        mine[r].bad |= all[from].bad;
      }
    }
  }
  for (int64_t r = 0; r < rows; ++r) {
    const BestTwo& two = mine[static_cast<size_t>(r)];
    args.token[r] = two.best.id == kNone ? 0 : two.best.id;
    args.margin[r] = two.best.logit - two.second;
    args.bad[r] = static_cast<uint8_t>(two.bad);
  }
}

}  // namespace ddtree::ops::cpu
