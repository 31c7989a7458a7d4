// How many nodes a round verifies, and which (design.md section 4): one threshold for the batch.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "spec/tree.h"

namespace ddtree {

// How often a node is right where its parent was, learnt from the rounds so far. Raw probabilities overrate branches: the drafter's
// positions are marginals, so a continuation after a sibling is right far less often than they say, while the spine is right more often.
// Cells are (the node's own log-prob) × (spine, branch off it, continuation of a branch) × (greedy or sampled); a cell keeps right nodes
// over the sum of raw probabilities.
class Calibration {
 public:
  Calibration();
  enum Kind : uint8_t { kSpine, kBranch, kContinuation };
  static Kind kind_of(const DraftTree& pool, int32_t node);
  double expected(double own_log_prob, Kind kind, bool sampled) const;  // in (0, 1], given that the parent is right

  // Learns from a pool what the walk tells: at every walked node (the root, the path) the target's choice, so all candidates there were
  // right or wrong, whether they were verified or not. No exploring rounds are needed. path: accepted nodes, next: the target's token after
  // them.
  void observe(const DraftTree& pool, std::span<const int32_t> path, int32_t next, bool sampled);

 private:
  static constexpr int kBins = 16;
  struct Cell {
    double right = 0, raw = 0;  // decayed sums
    double prior = 1, weight = 1;
  };
  static size_t index(double own_log_prob, Kind kind, bool sampled);
  std::array<Cell, kBins * 6> cells_;
};

// Per node of the pool, [n]: calibrated probability to be accepted: the product along its path, so never above its parent's (the root has
// 1); siblings together have no more than their parent.
std::vector<double> expected_acceptance(const Calibration& calibration, const DraftTree& pool, bool sampled);

struct PoolView {
  const DraftTree* tree = nullptr;
  std::span<const double> expected;  // [n] as above
};

// All pools' nodes in falling expected order, ties in the order of the pools' nodes: any prefix is a set of trees.
struct MergedNodes {
  std::vector<int32_t> pool, node;  // [m]
  std::vector<double> expected;     // [m] non-increasing
};
MergedNodes merge_pools(std::span<const PoolView> pools);

// The count b of merged nodes to verify, 0 … limit: argmax of (sequences + Φ_b) / milliseconds(b), where Φ_b sums the b first expectations
// (`sequences`: tokens that come anyway: one a sequence, and what fixed trees beside them will win).
// All counts are tried: rows are free inside a bucket of the device and dear at its edge, so the first unprofitable node proves nothing.
// milliseconds(b, phi): of the whole round with b nodes of which phi are expected to be accepted.
template <class Milliseconds>
int32_t choose_count(const MergedNodes& merged, double sequences, int32_t limit, Milliseconds&& milliseconds) {
  double phi = 0, best_rate = sequences / milliseconds(0, 0.0);
  int32_t best = 0;
  for (int32_t b = 1; b <= limit && b <= static_cast<int32_t>(merged.expected.size()); ++b) {
    phi += merged.expected[static_cast<size_t>(b - 1)];
    const double rate = (sequences + phi) / milliseconds(b, phi);
    if (rate > best_rate) best_rate = rate, best = b;
  }
  return best;
}

// What a draft of one sequence is likely to offer, before it is made: running means of its pools' expectations, best first.
class Outlook {
 public:
  static constexpr size_t kNodes = 48;
  Outlook() = default;
  explicit Outlook(std::vector<double> expected) : expected_(std::move(expected)) {}
  // A chain of which each token is right with that probability where those before it were. 1: no draft can be better.
  static Outlook chain(int32_t positions, double probability);
  // own, weighted by what was seen of it, with all sequences'.
  static Outlook blend(const Outlook& own, const Outlook& all);

  void observe(std::span<const double> expected);  // of one pool's nodes, any order, the root left out
  std::span<const double> expected() const { return expected_; }
  int32_t seen() const { return seen_; }
  double total() const;

 private:
  std::vector<double> expected_;
  int32_t seen_ = 0;
};

// The best rate (tokens a millisecond) of a round in which the given sequences draft, over all counts of nodes up to limit.
template <class Milliseconds>
double best_rate(std::span<const Outlook* const> drafting, double sequences, int32_t limit, Milliseconds&& milliseconds) {
  std::vector<double> all;
  for (const Outlook* o : drafting) all.insert(all.end(), o->expected().begin(), o->expected().end());
  std::sort(all.begin(), all.end(), std::greater<>());
  double phi = 0, best = sequences / milliseconds(0, 0.0);
  for (int32_t b = 1; b <= limit && b <= static_cast<int32_t>(all.size()); ++b) {
    phi += all[static_cast<size_t>(b - 1)];
    best = std::max(best, (sequences + phi) / milliseconds(b, phi));
  }
  return best;
}

// The first `count` merged nodes as masks over the pools' nodes (roots set), and a pool cut down to a mask; places[i] is the pool's node
// of node i.
std::vector<std::vector<uint8_t>> masks_of(const MergedNodes& merged, int32_t count, std::span<const PoolView> pools);
DraftTree select_nodes(const DraftTree& pool, std::span<const uint8_t> mask, std::vector<int32_t>* places);

// Nodes to keep of each tree so that all together are at most `limit`: the largest path log-probs of the batch. Each is a prefix in node
// order. Used where fixed budgets together exceed a forest's rows.
std::vector<int32_t> fit_nodes(std::span<const DraftTree* const> trees, int32_t limit);

// Draft tokens a round that a sequence must win to pay for its draft and its `nodes` rows, beside what the rest of the batch does.
// All costs in milliseconds of a round: with everything, without this sequence's draft, without any draft.
struct BreakEven {
  double with_all = 0, without_this = 0, without_any = 0;
  int32_t sequences = 1, drafting = 1;
  double gain_of_others = 0;  // expected draft tokens of the other sequences
};
double break_even(const BreakEven& round);

}  // namespace ddtree
