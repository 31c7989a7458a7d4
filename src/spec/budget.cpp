#include "spec/budget.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace ddtree {
namespace {

size_t at(int32_t i) { return static_cast<size_t>(i); }
// Upper edges of -log_prob; the last bin is open.
constexpr std::array<double, 15> kEdges = {0.02, 0.05, 0.1, 0.2, 0.35, 0.55, 0.8, 1.15, 1.6, 2.2, 3.0, 4.0, 5.5, 7.5, 10.0};
constexpr double kMemory = 4000;  // raw mass × this many nodes: older rounds fade beyond it

}  // namespace

Calibration::Calibration() {
  for (int b = 0; b < kBins; ++b)
    for (int kind = 0; kind < 4; ++kind) {
      Cell& c = cells_[at(b * 4 + kind)];
      const double middle = b < 15 ? (kEdges[at(b)] + (b > 0 ? kEdges[at(b - 1)] : 0)) / 2 : 12;
      c.prior = (kind & 1) ? 1.0 : 0.35;  // off the spine: published 22 % against 65–84 % on it
      c.weight = 12 * std::exp(-middle);  // as if 12 nodes had been seen
    }
}

int Calibration::bin(double log_prob) {
  return static_cast<int>(std::upper_bound(kEdges.begin(), kEdges.end(), -log_prob) - kEdges.begin());
}

const Calibration::Cell& Calibration::cell(double log_prob, bool spine, bool sampled) const {
  return cells_[at(bin(log_prob) * 4 + (spine ? 1 : 0) + (sampled ? 2 : 0))];
}

double Calibration::expected(double log_prob, bool spine, bool sampled) const {
  const Cell& c = cell(log_prob, spine, sampled);
  const double ratio = (c.accepted + c.weight * c.prior) / (c.raw + c.weight);
  return std::clamp(ratio * std::exp(log_prob), 1e-9, 1.0);
}

void Calibration::observe(const DraftTree& pool, std::span<const uint8_t> verified, std::span<const int32_t> path, int32_t next,
                          bool sampled) {
  enum : uint8_t { kWrong, kRight, kUnknown };
  std::vector<uint8_t> outcome(at(pool.size()), kWrong);
  outcome[0] = kRight;
  for (int32_t node : path) outcome[at(node)] = kRight;
  const int32_t last = path.empty() ? 0 : path.back();
  for (int32_t i = 1; i < pool.size(); ++i) {
    const int32_t parent = pool.parent[at(i)];
    if (outcome[at(i)] == kRight) {
      // on the path
    } else if (outcome[at(parent)] == kUnknown || (outcome[at(parent)] == kRight && !verified[at(parent)])) {
      outcome[at(i)] = kUnknown;  // hangs below a node that was right but not verified: nobody asked the target there
      continue;
    } else if (parent == last && pool.token[at(i)] == next) {
      outcome[at(i)] = kRight;
    }
    Cell& c = const_cast<Cell&>(cell(pool.log_prob[at(i)], pool.spine[at(i)] != 0, sampled));
    const double raw = std::exp(pool.log_prob[at(i)]);
    c.raw += raw;
    c.accepted += outcome[at(i)] == kRight ? 1 : 0;
    if (c.raw > kMemory * raw) c.raw *= 0.5, c.accepted *= 0.5;
  }
}

std::vector<double> expected_acceptance(const Calibration& calibration, const DraftTree& pool, bool sampled) {
  std::vector<double> out(at(pool.size()), 1.0);
  for (int32_t i = 1; i < pool.size(); ++i)
    out[at(i)] = std::min(out[at(pool.parent[at(i)])], calibration.expected(pool.log_prob[at(i)], pool.spine[at(i)] != 0, sampled));
  return out;
}

MergedNodes merge_pools(std::span<const PoolView> pools) {
  MergedNodes out;
  for (size_t p = 0; p < pools.size(); ++p)
    for (int32_t i = 1; i < pools[p].tree->size(); ++i) {
      out.pool.push_back(static_cast<int32_t>(p));
      out.node.push_back(i);
      out.expected.push_back(pools[p].expected[at(i)]);
    }
  std::vector<size_t> order(out.node.size());
  std::iota(order.begin(), order.end(), size_t{0});
  // Stable: a child never has more than its parent and stands after it, so every prefix is closed under parents.
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return out.expected[a] > out.expected[b]; });
  MergedNodes sorted;
  for (size_t i : order) {
    sorted.pool.push_back(out.pool[i]);
    sorted.node.push_back(out.node[i]);
    sorted.expected.push_back(out.expected[i]);
  }
  return sorted;
}

std::vector<std::vector<uint8_t>> masks_of(const MergedNodes& merged, int32_t count, std::span<const PoolView> pools) {
  std::vector<std::vector<uint8_t>> masks;
  for (const PoolView& p : pools) {
    masks.emplace_back(at(p.tree->size()), uint8_t{0});
    masks.back()[0] = 1;
  }
  for (int32_t i = 0; i < count; ++i) masks[at(merged.pool[at(i)])][at(merged.node[at(i)])] = 1;
  return masks;
}

DraftTree select_nodes(const DraftTree& pool, std::span<const uint8_t> mask, std::vector<int32_t>* places) {
  DraftTree out = root_only(pool.token[0]);
  std::vector<int32_t> place(at(pool.size()), 0);
  places->assign(1, 0);
  for (int32_t i = 1; i < pool.size(); ++i)
    if (mask[at(i)]) {
      place[at(i)] = out.append(pool.token[at(i)], place[at(pool.parent[at(i)])], pool.rank[at(i)], pool.log_prob[at(i)]);
      places->push_back(i);
    }
  return out;
}

std::vector<int32_t> fit_nodes(std::span<const DraftTree* const> trees, int32_t limit) {
  std::vector<int32_t> keep(trees.size(), 0);
  struct Entry {
    double key;
    size_t tree;
  };
  std::vector<Entry> all;
  for (size_t t = 0; t < trees.size(); ++t) {
    double lowest = 0;  // a seeded chain's log-probs are not sorted; the running minimum keeps prefixes
    for (int32_t i = 1; i < trees[t]->size(); ++i) all.push_back({lowest = std::min(lowest, trees[t]->log_prob[at(i)]), t});
  }
  std::stable_sort(all.begin(), all.end(), [](const Entry& a, const Entry& b) { return a.key > b.key; });
  for (size_t i = 0; i < all.size() && static_cast<int32_t>(i) < limit; ++i) ++keep[all[i].tree];
  return keep;
}

double break_even(const BreakEven& r) {
  // Marginal: this sequence's draft against a round of the same batch without it.
  const double marginal = (r.with_all - r.without_this) * (r.sequences + r.gain_of_others) / std::max(r.without_this, 1e-9);
  // Joint: a drafter pass is shared, so each sequence may look cheap while all together lose against plain decoding.
  const double joint = (r.with_all - r.without_any) * r.sequences / std::max(r.without_any, 1e-9) / std::max(r.drafting, 1);
  return std::max({marginal, joint, 0.0});
}

}  // namespace ddtree
