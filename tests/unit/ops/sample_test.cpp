#include "ops/sample.h"

#include <algorithm>
#include <catch2/catch_approx.hpp>
#include <catch2/catch_test_macros.hpp>
#include <cmath>
#include <limits>
#include <map>
#include <random>

using namespace ddtree::ops;
using Catch::Approx;

namespace {

constexpr float kMinusInf = -std::numeric_limits<float>::infinity();

// The processed distribution, by definition and in the plainest way. `generated` is everything generated, the path included.
std::map<int32_t, double> distribution(std::vector<float> logits, const SampleParams& p, const std::vector<int32_t>& prompt,
                                       const std::vector<int32_t>& generated, const std::vector<int32_t>& banned) {
  for (size_t i = 0; i < logits.size(); ++i) {
    const auto id = static_cast<int32_t>(i);
    const auto times = std::count(generated.begin(), generated.end(), id);
    const bool seen = times > 0 || std::count(prompt.begin(), prompt.end(), id) > 0;
    if (seen) logits[i] = logits[i] > 0 ? logits[i] / p.repetition_penalty : logits[i] * p.repetition_penalty;
    if (times > 0) logits[i] -= p.frequency_penalty * static_cast<float>(times), logits[i] -= p.presence_penalty;
    if (std::count(banned.begin(), banned.end(), id)) logits[i] = kMinusInf;
  }
  std::vector<int32_t> order(logits.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int32_t>(i);
  std::stable_sort(order.begin(), order.end(),
                   [&](int32_t a, int32_t b) { return logits[static_cast<size_t>(a)] > logits[static_cast<size_t>(b)]; });
  if (p.temperature == 0) return {{order[0], 1.0}};
  if (p.top_k > 0 && static_cast<size_t>(p.top_k) < order.size()) order.resize(static_cast<size_t>(p.top_k));
  std::vector<std::pair<int32_t, double>> weights;
  double total = 0;
  for (int32_t id : order) {
    weights.push_back(
        {id, std::exp((static_cast<double>(logits[static_cast<size_t>(id)]) - static_cast<double>(logits[static_cast<size_t>(order[0])])) /
                      static_cast<double>(p.temperature))});
    total += weights.back().second;
  }
  double before = 0;
  std::map<int32_t, double> out;
  double kept = 0;
  for (const auto& [id, w] : weights) {
    const bool in = (before / total < static_cast<double>(p.top_p) || before == 0) && w >= static_cast<double>(p.min_p);
    before += w;
    if (in && w > 0) out[id] = w, kept += w;
  }
  for (auto& [id, w] : out) w /= kept;
  return out;
}

struct Case {
  std::vector<float> logits;
  SampleParams params;
  std::vector<int32_t> prompt, generated, path, banned;
};

Case random_case(std::mt19937& rng, int32_t vocab) {
  Case c;
  std::normal_distribution<float> normal(0, 2);
  for (int32_t i = 0; i < vocab; ++i) c.logits.push_back(rng() % 20 == 0 ? kMinusInf : std::round(normal(rng) * 8) / 8);
  c.logits[static_cast<size_t>(vocab - 1)] = 0;  // at least one is finite
  const auto maybe = [&](auto value, auto off) { return rng() % 2 ? value : off; };
  c.params.temperature = rng() % 6 == 0 ? 0.0F : 0.3F + static_cast<float>(rng() % 100) / 50;
  c.params.top_k = maybe(1 + static_cast<int32_t>(rng() % 30), 0);
  c.params.top_p = maybe(0.05F + static_cast<float>(rng() % 90) / 100, 1.0F);
  c.params.min_p = maybe(static_cast<float>(rng() % 50) / 100, 0.0F);
  c.params.presence_penalty = maybe(static_cast<float>(rng() % 30) / 10 - 1, 0.0F);
  c.params.frequency_penalty = maybe(static_cast<float>(rng() % 30) / 10 - 1, 0.0F);
  c.params.repetition_penalty = maybe(0.7F + static_cast<float>(rng() % 10) / 10, 1.0F);
  for (auto* list : {&c.prompt, &c.generated, &c.path})
    for (unsigned n = rng() % 6; n > 0; --n) list->push_back(static_cast<int32_t>(rng() % 12));
  for (unsigned n = rng() % 3; n > 0; --n) c.banned.push_back(static_cast<int32_t>(rng() % 10));
  return c;
}

TokenHistory history_of(const Case& c) {
  TokenHistory h;
  h.prompt.insert(c.prompt.begin(), c.prompt.end());
  for (int32_t id : c.generated) ++h.generated[id];
  return h;
}

}  // namespace

TEST_CASE("philox gives the published words") {
  CHECK(philox4x32({0, 0, 0, 0}, {0, 0}) == std::array<uint32_t, 4>{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8});
  CHECK(philox4x32({~0U, ~0U, ~0U, ~0U}, {~0U, ~0U}) == std::array<uint32_t, 4>{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd});
  CHECK(philox4x32({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}) ==
        std::array<uint32_t, 4>{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1});
}

TEST_CASE("gumbel noise has the right mean and spread and depends on every key") {
  double sum = 0, squares = 0;
  constexpr int kCount = 200000;
  for (int i = 0; i < kCount; ++i) {
    const double g = gumbel(17, 0, i / 500, i % 500);
    sum += g, squares += g * g;
  }
  const double mean = sum / kCount, variance = squares / kCount - mean * mean;
  CHECK(mean == Approx(0.5772).margin(0.012));
  CHECK(variance == Approx(1.6449).margin(0.04));
  const double base = gumbel(1, 2, 3, 4);
  for (double other : {gumbel(2, 2, 3, 4), gumbel(1, 3, 3, 4), gumbel(1, 2, 4, 4), gumbel(1, 2, 3, 5), gumbel(1ULL << 40 | 1, 2, 3, 4),
                       gumbel(1, 2, 3LL << 33 | 3, 4)})
    CHECK(other != base);
  CHECK(gumbel(1, 2, 3, 4) == base);
}

TEST_CASE("a sample is Gumbel-max over exactly the processed distribution") {
  std::mt19937 rng(3);
  SampleScratch scratch;
  int wide = 0;
  for (int round = 0; round < 3000; ++round) {
    const int32_t vocab = round % 3 == 0 ? 400 : 40;
    const Case c = random_case(rng, vocab);
    std::vector<int32_t> everything = c.generated;
    everything.insert(everything.end(), c.path.begin(), c.path.end());
    const auto expected = distribution(c.logits, c.params, c.prompt, everything, c.banned);
    const TokenHistory history = history_of(c);
    SampleParams p = c.params;
    for (uint64_t seed = 1; seed <= 5; ++seed) {
      p.seed = seed * 7919;
      p.choice = static_cast<uint32_t>(round % 3);
      const Sampled got = sample(c.logits, p, &history, c.path, c.banned, round, scratch);
      REQUIRE(got.margin >= 0);
      double best = -1e300;
      int32_t winner = -1;
      for (const auto& [id, probability] : expected) {
        const double score = std::log(probability) + gumbel(p.seed, p.choice, round, id);
        if (score > best) best = score, winner = id;
      }
      if (expected.size() == 1 || got.margin > 1e-4F) REQUIRE(got.token == winner);
      wide += expected.size() > 5 ? 1 : 0;
    }
  }
  CHECK(wide > 2000);
}

TEST_CASE("ties go to the smaller id and are reported as such") {
  SampleScratch scratch;
  SampleParams greedy;
  greedy.temperature = 0;
  std::vector<float> logits = {0, 3, 1, 3, kMinusInf};
  Sampled s = sample(logits, greedy, nullptr, {}, {}, 0, scratch);
  CHECK(s.token == 1);
  CHECK(s.margin == 0);
  logits[1] = 2.5F;
  s = sample(logits, greedy, nullptr, {}, {}, 0, scratch);
  CHECK(s.token == 3);
  CHECK(s.margin == Approx(0.5));
  const std::vector<int32_t> banned = {3};
  CHECK(sample(logits, greedy, nullptr, {}, banned, 0, scratch).token == 1);
  SampleParams top_one;
  top_one.top_k = 1;
  logits[1] = 3;
  for (uint64_t seed = 0; seed < 20; ++seed) {
    top_one.seed = seed;
    CHECK(sample(logits, top_one, nullptr, {}, {}, 5, scratch).token == 1);
  }
}

TEST_CASE("a margin tells whether a small change of the logits can change the choice") {
  std::mt19937 rng(9);
  SampleScratch scratch;
  int changed = 0, unexplained = 0, small = 0;
  constexpr float kNoise = 2e-4F;
  for (int round = 0; round < 20000; ++round) {
    Case c = random_case(rng, 60);
    const TokenHistory history = history_of(c);
    c.params.seed = static_cast<uint64_t>(round);
    const Sampled before = sample(c.logits, c.params, &history, c.path, c.banned, 1, scratch);
    for (float& x : c.logits) x += kNoise * (static_cast<float>(rng() % 2001) / 1000 - 1);
    const Sampled after = sample(c.logits, c.params, &history, c.path, c.banned, 1, scratch);
    small += before.margin < 0.01F ? 1 : 0;
    if (before.token == after.token) continue;
    ++changed;
    if (before.margin >= 0.01F) ++unexplained;
  }
  CHECK(changed > 20);
  CHECK(unexplained == 0);
  CHECK(small < 20000 / 4);
}

TEST_CASE("draws over many seeds fit the distribution; a path changes it") {
  SampleScratch scratch;
  SampleParams p;
  p.temperature = 0.8F;
  p.top_p = 0.95F;
  p.presence_penalty = 1.5F;
  const std::vector<float> logits = {2, 1.5F, 1, 0.5F, 0, -1, -2, 1.9F};
  const std::vector<int32_t> prompt = {0}, path = {7, 1};
  TokenHistory history;
  history.prompt = {0};
  const auto expected = distribution(logits, p, prompt, path, {});
  std::map<int32_t, int> counts;
  constexpr int kDraws = 40000;
  for (int i = 0; i < kDraws; ++i) {
    p.seed = static_cast<uint64_t>(i);
    ++counts[sample(logits, p, &history, path, {}, 12, scratch).token];
  }
  double chi = 0;
  for (const auto& [id, probability] : expected) chi += std::pow(counts[id] - probability * kDraws, 2) / (probability * kDraws);
  for (const auto& [id, n] : counts) CHECK(expected.contains(id));
  CHECK(chi < 30);  // 6 or 7 cells: about one in 30,000 by chance
  const auto without_path = distribution(logits, p, prompt, {}, {});
  chi = 0;
  for (const auto& [id, probability] : without_path) chi += std::pow(counts[id] - probability * kDraws, 2) / (probability * kDraws);
  CHECK(chi > 1000);
}
