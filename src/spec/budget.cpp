#include "spec/budget.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace ddtree {
namespace {

size_t at(int32_t i) { return static_cast<size_t>(i); }
// Upper edges of -log_prob; the last bin is open.
constexpr std::array<double, 15> kEdges = {0.02, 0.05, 0.1, 0.2, 0.35, 0.55, 0.8, 1.15, 1.6, 2.2, 3.0, 4.0, 5.5, 7.5, 10.0};
constexpr double kMemory = 2000;  // nodes of a cell; older rounds fade beyond them

}  // namespace

Calibration::Calibration() {
  // Off the spine: published 22 % against 65 to 84 % on it.
  constexpr double kPrior[] = {1.0, 0.6, 0.35};
  for (int b = 0; b < kBins; ++b)
    for (int kind = 0; kind < 6; ++kind) {
      Cell& c = cells_[at(b * 6 + kind)];
      const double middle = b < 15 ? (kEdges[at(b)] + (b > 0 ? kEdges[at(b - 1)] : 0)) / 2 : 12;
      c.prior = kPrior[kind % 3];
      c.weight = 4 * std::exp(-middle);  // as if 4 nodes had been seen
    }
}

Calibration::Kind Calibration::kind_of(const DraftTree& pool, int32_t node) {
  if (pool.spine[at(node)]) return kSpine;
  return pool.spine[at(pool.parent[at(node)])] ? kBranch : kContinuation;
}

size_t Calibration::index(double own_log_prob, Kind kind, bool sampled) {
  const auto bin = std::upper_bound(kEdges.begin(), kEdges.end(), -own_log_prob) - kEdges.begin();
  return static_cast<size_t>(bin) * 6 + kind + (sampled ? 3 : 0);
}

double Calibration::expected(double own_log_prob, Kind kind, bool sampled) const {
  const Cell& c = cells_[index(own_log_prob, kind, sampled)];
  const double ratio = (c.right + c.weight * c.prior) / (c.raw + c.weight);
  return std::clamp(ratio * std::exp(own_log_prob), 1e-9, 1.0);
}

namespace {

double own_log_prob(const DraftTree& pool, int32_t node) { return pool.log_prob[at(node)] - pool.log_prob[at(pool.parent[at(node)])]; }

}  // namespace

void Calibration::observe(const DraftTree& pool, std::span<const int32_t> path, int32_t next, bool sampled) {
  // choice[i]: the target's token at a walked node, -1 elsewhere.
  std::vector<int32_t> choice(at(pool.size()), -1);
  int32_t before = 0;
  for (int32_t node : path) {
    choice[at(before)] = pool.token[at(node)];
    before = node;
  }
  choice[at(before)] = next;
  for (int32_t i = 1; i < pool.size(); ++i) {
    const int32_t chosen = choice[at(pool.parent[at(i)])];
    if (chosen < 0) continue;
    const double own = own_log_prob(pool, i), raw = std::exp(own);
    Cell& c = cells_[index(own, kind_of(pool, i), sampled)];
    c.raw += raw;
    c.right += pool.token[at(i)] == chosen ? 1 : 0;
    if (c.raw > kMemory * raw) c.raw *= 0.5, c.right *= 0.5;
  }
}

std::vector<double> expected_acceptance(const Calibration& calibration, const DraftTree& pool, bool sampled) {
  std::vector<double> out(at(pool.size()), 1.0), children(at(pool.size()), 0.0);
  for (int32_t i = 1; i < pool.size(); ++i) {
    out[at(i)] = calibration.expected(own_log_prob(pool, i), Calibration::kind_of(pool, i), sampled);
    children[at(pool.parent[at(i)])] += out[at(i)];
  }
  for (int32_t i = 1; i < pool.size(); ++i) {
    const size_t parent = at(pool.parent[at(i)]);
    out[at(i)] *= out[parent] / std::max(children[parent], 1.0);
  }
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

Outlook Outlook::chain(int32_t positions, double probability) {
  std::vector<double> expected;
  double product = 1;
  for (int32_t i = 0; i < positions; ++i) expected.push_back(product *= probability);
  return Outlook(std::move(expected));
}

Outlook Outlook::blend(const Outlook& own, const Outlook& all) {
  constexpr double kAll = 3;  // drafts that the others' count for
  const double weight = own.seen_ / (own.seen_ + kAll);
  std::vector<double> expected(kNodes, 0.0);
  for (size_t i = 0; i < kNodes; ++i) {
    if (i < own.expected_.size()) expected[i] += weight * own.expected_[i];
    if (i < all.expected_.size()) expected[i] += (1 - weight) * all.expected_[i];
  }
  return Outlook(std::move(expected));
}

void Outlook::observe(std::span<const double> expected) {
  std::vector<double> sorted(expected.begin(), expected.end());
  std::sort(sorted.begin(), sorted.end(), std::greater<>());
  sorted.resize(kNodes, 0.0);
  if (expected_.size() < kNodes) expected_.resize(kNodes, 0.0);
  ++seen_;
  const double rate = 1.0 / std::min(seen_, 8);
  for (size_t i = 0; i < kNodes; ++i) expected_[i] += rate * (sorted[i] - expected_[i]);
}

double Outlook::total() const {
  double sum = 0;
  for (double e : expected_) sum += e;
  return sum;
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
