#include "spec/budget.h"

#include <algorithm>
#include <catch2/catch_approx.hpp>
#include <catch2/catch_test_macros.hpp>
#include <cmath>
#include <random>

#include "spec/acceptance.h"
#include "spec/cost.h"

using namespace ddtree;
using Catch::Approx;

namespace {

DraftTree random_tree(std::mt19937& rng, int32_t nodes) {
  DraftTree tree = root_only(1);
  for (int32_t i = 1; i <= nodes; ++i) {
    const int32_t parent = static_cast<int32_t>(rng() % static_cast<unsigned>(i));
    tree.append(1000 + i, parent, tree.child(parent, 1000) < 0 ? static_cast<int32_t>(rng() % 2) : 1,
                tree.log_prob[static_cast<size_t>(parent)] - static_cast<double>(rng() % 1000) / 500);
  }
  return tree;
}

}  // namespace

TEST_CASE("merged nodes: any count is a set of whole trees with the largest expectations") {
  std::mt19937 rng(1);
  Calibration calibration;
  for (int round = 0; round < 50; ++round) {
    std::vector<DraftTree> trees;
    std::vector<std::vector<double>> expected;
    for (int i = 0; i < 4; ++i) trees.push_back(random_tree(rng, static_cast<int32_t>(rng() % 40)));
    for (const auto& t : trees) expected.push_back(expected_acceptance(calibration, t, round % 2 == 0));
    std::vector<PoolView> pools;
    for (size_t i = 0; i < trees.size(); ++i) pools.push_back({&trees[i], expected[i]});
    const MergedNodes merged = merge_pools(pools);
    REQUIRE(std::is_sorted(merged.expected.rbegin(), merged.expected.rend()));
    const int32_t count = static_cast<int32_t>(rng() % (merged.node.size() + 1));
    const auto masks = masks_of(merged, count, pools);
    int32_t total = 0;
    for (size_t i = 0; i < trees.size(); ++i) {
      for (int32_t n = 1; n < trees[i].size(); ++n)
        if (masks[i][static_cast<size_t>(n)]) REQUIRE(masks[i][static_cast<size_t>(trees[i].parent[static_cast<size_t>(n)])]);
      std::vector<int32_t> places;
      const DraftTree cut = select_nodes(trees[i], masks[i], &places);
      total += cut.nodes();
      for (int32_t n = 0; n < cut.size(); ++n) {
        const size_t k = static_cast<size_t>(n);
        REQUIRE(cut.token[k] == trees[i].token[static_cast<size_t>(places[k])]);
        REQUIRE(cut.depth[k] == trees[i].depth[static_cast<size_t>(places[k])]);
        if (n > 0) REQUIRE(places[static_cast<size_t>(cut.parent[k])] == trees[i].parent[static_cast<size_t>(places[k])]);
      }
    }
    REQUIRE(total == count);
  }
}

TEST_CASE("the count steps over an unprofitable node where the far edge of a bucket pays") {
  MergedNodes merged;
  for (int i = 0; i < 64; ++i) merged.expected.push_back(0.9 - 0.01 * i), merged.pool.push_back(0), merged.node.push_back(i + 1);
  // Rows cost by buckets of 16: node 16 (row 17) opens a bucket and alone does not pay for it; the bucket's other 15 do.
  const auto staircase = [](int32_t b, double) { return 4.0 + 3.0 * ((1 + b + 15) / 16); };
  const int32_t best = choose_count(merged, 1, 64, staircase);
  double phi = 0, best_rate = 1 / staircase(0, 0);
  int32_t by_hand = 0;
  for (int32_t b = 1; b <= 64; ++b) {
    phi += merged.expected[static_cast<size_t>(b - 1)];
    if ((1 + phi) / staircase(b, 0) > best_rate) best_rate = (1 + phi) / staircase(b, 0), by_hand = b;
  }
  CHECK(best == by_hand);
  CHECK(best > 15);
  CHECK((best + 1) % 16 == 0);
  CHECK(choose_count(merged, 1, 7, staircase) == 7);
  CHECK(choose_count(merged, 1, 64, [](int32_t b, double) { return 1.0 + b; }) == 0);
}

TEST_CASE("calibration learns how often candidates are right, also those that were not verified") {
  Calibration calibration;
  using K = Calibration;
  const double half = std::log(0.5);
  CHECK(calibration.expected(half, K::kSpine, false) == Approx(0.5).margin(0.01));
  CHECK(calibration.expected(half, K::kBranch, false) < 0.35);
  CHECK(calibration.expected(half, K::kContinuation, false) < 0.2);
  DraftTree pool = root_only(1);
  const int32_t a = pool.append(10, 0, 0, half), b = pool.append(20, 0, 1, half);
  pool.append(11, a, 0, 2 * half), pool.append(21, b, 0, 2 * half);
  std::mt19937 rng(3);
  for (int i = 0; i < 3000; ++i) {
    const unsigned u = rng() % 10;  // the spine is right 7 in 10, the sibling 2 in 10, then what follows the spine 9 in 10
    if (u < 7)
      calibration.observe(pool, std::vector<int32_t>{a}, rng() % 10 < 9 ? 11 : 99, false);  // its child was not verified: known anyway
    else calibration.observe(pool, std::vector<int32_t>{}, u < 9 ? 20 : 99, false);
  }
  CHECK(calibration.expected(half, K::kSpine, false) == Approx((3000 * 0.7 + 2100 * 0.9) / 5100).margin(0.04));
  CHECK(calibration.expected(half, K::kBranch, false) == Approx(0.2).margin(0.03));
  CHECK(calibration.expected(half, K::kContinuation, false) < 0.2);                // nothing was heard of it
  CHECK(calibration.expected(half, K::kSpine, true) == Approx(0.5).margin(0.01));  // sampled rounds are learnt apart
  const auto expected = expected_acceptance(calibration, pool, false);
  CHECK(expected[0] == 1.0);
  CHECK(expected[3] <= expected[1]);
  CHECK(expected[1] + expected[2] <= 1.0 + 1e-9);
}

TEST_CASE("trees that exceed a forest keep the batch's best nodes") {
  std::mt19937 rng(5);
  DraftTree a = root_only(1), b = root_only(2);
  for (int i = 1; i <= 10; ++i) a.append(i, i - 1, 0, -0.1 * i), b.append(i, i - 1, 0, -0.33 * i);
  const DraftTree* trees[] = {&a, &b};
  CHECK(fit_nodes(trees, 100) == std::vector<int32_t>{10, 10});
  CHECK(fit_nodes(trees, 10) == std::vector<int32_t>{8, 2});
  CHECK(fit_nodes(trees, 0) == std::vector<int32_t>{0, 0});
}

TEST_CASE("a cost curve interpolates, learns and never falls") {
  CostCurve curve({1, 8, 16, 64});
  curve.set(0, 2), curve.set(1, 3), curve.set(2, 2.5), curve.set(3, 9);
  CHECK(curve(1) == Approx(2));
  CHECK(curve(4.5) == Approx(2.375));
  CHECK(curve(16) == Approx(2.75));  // a noisy start value does not make more rows cheaper
  CHECK(curve(40) == Approx(5.875));
  CHECK(curve(112) == Approx(15.25));
  for (int i = 0; i < 400; ++i) curve.observe(12, 6);
  CHECK(curve(12) == Approx(6).epsilon(0.05));
  for (int i = 1; i < 100; ++i) CHECK(curve(i) <= curve(i + 1));
  const double before = curve(64);
  curve.observe(64, 1e6);  // one stalled pass
  CHECK(curve(64) < 1.4 * before);
}

TEST_CASE("break-even: what a draft must win, alone and shared") {
  // Alone: plain 4 ms a token; draft and rows cost 6 ms more, so 1.5 draft tokens a round pay for them.
  CHECK(break_even({10, 4, 4, 1, 1, 0}) == Approx(1.5));
  // Eight sequences share a dear drafter pass: each one's own part is small, all together must still win it back.
  CHECK(break_even({24, 23, 8, 8, 8, 7}) == Approx(2.0));
}

TEST_CASE("an outlook tells before the draft whether drafting pays, alone and in a batch") {
  Outlook good, poor;
  for (int i = 0; i < 20; ++i) {
    std::vector<double> chain;
    for (int d = 1; d <= 15; ++d) chain.push_back(std::pow(0.95, d));
    good.observe(chain);
    for (double& e : chain) e *= 0.2;
    poor.observe(chain);
  }
  CHECK(good.seen() == 20);
  CHECK(good.expected()[0] == Approx(0.95));
  CHECK(good.total() > 9);
  // A processor: a row costs 0.3 ms once it no longer hides behind reading the weights, a draft 0.9 ms.
  const auto round = [](int sequences, int drafts) {
    return [=](int32_t b, double phi) { return 0.9 * drafts + std::max(1.0, 0.3 * (sequences + b)) + 0.03 * phi; };
  };
  const Outlook* one_good[] = {&good};
  const Outlook* one_poor[] = {&poor};
  CHECK(best_rate(one_good, 1, 500, round(1, 1)) > 1.3 / round(1, 0)(0, 0));
  CHECK(best_rate(one_poor, 1, 500, round(1, 1)) < 1 / round(1, 0)(0, 0));
  std::vector<const Outlook*> eight(8, &good);
  CHECK(best_rate(eight, 8, 500, round(8, 8)) < 8 / round(8, 0)(0, 0));
  // A GPU: rows are nearly free, so eight that draft win too.
  const auto gpu = [](int drafts) { return [=](int32_t b, double) { return (drafts > 0 ? 1.5 : 0) + 13 + 0.02 * b; }; };
  CHECK(best_rate(eight, 8, 500, gpu(8)) > 5 * 8 / gpu(0)(0, 0));
}

TEST_CASE("acceptance statistics hold their identities") {
  std::mt19937 rng(8);
  for (int round = 0; round < 100; ++round) {
    AcceptanceStats stats;
    int64_t committed = 0;
    const int rounds = 1 + static_cast<int>(rng() % 30);
    bool cut = false;
    for (int i = 0; i < rounds; ++i) {
      const int32_t nodes = static_cast<int32_t>(rng() % 40),
                    confirmed = static_cast<int32_t>(rng() % static_cast<unsigned>(std::min(nodes, 15) + 1));
      int32_t kept = confirmed + 1;
      if (i + 1 == rounds && rng() % 2)
        kept = 1 + static_cast<int32_t>(rng() % static_cast<unsigned>(confirmed + 1)), cut = kept <= confirmed;
      stats.add(nodes, confirmed, kept);
      committed += kept;
    }
    int64_t sum = 0, weighted = 0, at = 0, emitted = 0;
    for (size_t j = 0; j < stats.histogram.size(); ++j) sum += stats.histogram[j], weighted += static_cast<int64_t>(j) * stats.histogram[j];
    for (int32_t n : stats.accepted_at) at += n;
    for (int32_t n : stats.emitted) emitted += n;
    REQUIRE(sum == stats.rounds);
    REQUIRE(weighted == stats.accepted);
    REQUIRE(at == stats.accepted);
    REQUIRE(emitted == committed);
    REQUIRE(stats.accepted + stats.rounds - (cut ? 1 : 0) == committed);
    REQUIRE(stats.accepted <= stats.drafted);
  }
}

TEST_CASE("drafting that does not pay stops, pauses longer and longer, and comes back when it pays again") {
  FallbackPolicy policy;
  int32_t fallbacks = 0, drafts = 0;
  for (int i = 0; i < 2000; ++i) {
    if (policy.wants_draft()) {
      ++drafts;
      fallbacks += policy.drafted(0, FallbackPolicy::kFixedBreakEven) ? 1 : 0;
    } else {
      policy.plain();
    }
  }
  CHECK(fallbacks >= 4);
  CHECK(drafts < 80);
  int32_t later = 0;
  for (int i = 0; i < 1200; ++i) {
    if (!policy.wants_draft()) {
      policy.plain();
      continue;
    }
    ++later;
    CHECK_FALSE(policy.drafted(3, FallbackPolicy::kFixedBreakEven));
  }
  CHECK(later > 600);
  FallbackPolicy fine;
  for (int i = 0; i < 500; ++i) REQUIRE_FALSE(fine.drafted(i % 3 == 0 ? 1 : 0, FallbackPolicy::kFixedBreakEven));
}
