// How many nodes a round verifies, and which (design.md section 4): one threshold for the batch.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "spec/tree.h"

namespace ddtree {

// How often a node is accepted, learnt from the rounds so far. Raw path products overrate branches: the drafter's positions are marginals,
// so a continuation after a sibling is right far less often than the product says, while the spine is right more often. Cells are (path
// log-prob bin) × (on or off the spine) × (greedy or sampled); a cell keeps accepted nodes over the sum of raw probabilities.
class Calibration {
 public:
  Calibration();
  double expected(double log_prob, bool spine, bool sampled) const;  // in (0, 1]

  // Learns from a pool of which `verified[i]` nodes were in the pass (the root counts as verified). The walk also tells of nodes that were
  // not: a child of a walked node was right or wrong whether it was verified or not, so no exploring rounds are needed.
  // path: accepted nodes, next: the target's token after them.
  void observe(const DraftTree& pool, std::span<const uint8_t> verified, std::span<const int32_t> path, int32_t next, bool sampled);

 private:
  static constexpr int kBins = 16;
  struct Cell {
    double accepted = 0, raw = 0;  // decayed sums
    double prior = 1, weight = 1;
  };
  static int bin(double log_prob);
  const Cell& cell(double log_prob, bool spine, bool sampled) const;
  std::array<Cell, kBins * 4> cells_;
};

// Per node of the pool, [n]: calibrated probability to be accepted, never above its parent's (the root has 1).
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
template <class Milliseconds>
int32_t choose_count(const MergedNodes& merged, double sequences, int32_t limit, Milliseconds&& milliseconds) {
  double phi = 0, best_rate = sequences / milliseconds(0);
  int32_t best = 0;
  for (int32_t b = 1; b <= limit && b <= static_cast<int32_t>(merged.expected.size()); ++b) {
    phi += merged.expected[static_cast<size_t>(b - 1)];
    const double rate = (sequences + phi) / milliseconds(b);
    if (rate > best_rate) best_rate = rate, best = b;
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
