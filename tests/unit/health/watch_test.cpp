// What the watch sees in an engine's counters, on a virtual clock.
#include "health/watch.h"

#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <random>

using namespace ddtree;
using Catch::Matchers::ContainsSubstring;

namespace {

constexpr auto kTree = static_cast<size_t>(SpeculationMode::kDdtree);

struct Bench {
  Watch watch;
  EngineSnapshot s;
  double now = 0;
  std::vector<Finding> found;
  explicit Bench(WatchLimits limits = {}) : watch(limits) { watch.restart(0); }
  void look(double seconds) {
    now += seconds;
    for (Finding& f : watch.observe(now, s)) found.push_back(std::move(f));
  }
  // One decoding round a tick of ten sequences that accept so many.
  void rounds(int n, double accepted, double pass_ms = 10) {
    for (int i = 0; i < n; ++i) {
      ++s.passes, ++s.timed_passes;
      s.pass_ms += pass_ms, s.promised_ms += 10;
      s.draft_rounds[kTree] += 10;
      s.draft_accepted[kTree] += static_cast<int64_t>(accepted * 10);
      look(pass_ms / 1000);
    }
  }
};

}  // namespace

TEST_CASE("a stuck round is seen after its time, once, and no idle or slowly moving engine is") {
  Bench b;
  b.look(1000);  // idle
  CHECK(b.watch.still_seconds(b.now) == 0);
  b.s.running = 2;
  for (int i = 0; i < 100; ++i) ++b.s.passes, b.look(29);
  CHECK(b.found.empty());
  for (int i = 0; i < 29; ++i) b.look(1);
  CHECK(b.found.empty());
  CHECK_FALSE(b.watch.stuck(b.now));
  b.look(1);
  REQUIRE(b.found.size() == 1);
  CHECK(b.found[0].kind == FaultKind::kStuckRound);
  CHECK_THAT(b.found[0].reason, ContainsSubstring("30 s"));
  CHECK(b.watch.stuck(b.now));
  b.look(10);
  CHECK(b.found.size() == 1);
  ++b.s.passes;
  b.look(1);
  CHECK_FALSE(b.watch.stuck(b.now));
  // A request that only waits counts too: it should have been started.
  b.s.running = 0, b.s.waiting = 1;
  ++b.s.passes;
  b.look(1);
  b.look(31);
  CHECK(b.found.size() == 2);
  b.s.waiting = 0;
  b.look(1);
  CHECK(b.watch.still_seconds(b.now) == 0);
}

TEST_CASE("a rank that is lost is one finding, whatever passes fail after it") {
  Bench b;
  b.look(1);
  for (int i = 0; i < 3; ++i) {
    ++b.s.lost_passes, b.s.lost_code = Code::kEngineFault, b.s.lost_message = b.s.gone = "rank 1 of 2: its card is gone";
    b.look(1);
  }
  REQUIRE(b.found.size() == 1);
  CHECK(b.found[0].kind == FaultKind::kRankLost);
  CHECK_THAT(b.found[0].reason, ContainsSubstring("rank 1 of 2"));
}

TEST_CASE("faults that the engine counts become findings of their kind") {
  Bench b;
  b.s.nan_faults = 3, b.s.nan_message = "row 5";
  b.look(1);
  REQUIRE(b.found.size() == 1);
  CHECK(b.found[0].kind == FaultKind::kNanLogits);
  CHECK_THAT(b.found[0].reason, ContainsSubstring("3 requests") && ContainsSubstring("row 5"));
  const std::pair<Code, FaultKind> kinds[] = {{Code::kUnavailable, FaultKind::kDeviceLost},
                                              {Code::kDoesNotFit, FaultKind::kOutOfMemory},
                                              {Code::kEngineFault, FaultKind::kPassFailed}};
  for (const auto& [code, kind] : kinds) {
    b.found.clear();
    ++b.s.lost_passes;
    b.s.lost_code = code, b.s.lost_message = "gone";
    b.look(1);
    REQUIRE(b.found.size() == 1);
    CHECK(b.found[0].kind == kind);
  }
  b.found.clear();
  b.look(1);
  CHECK(b.found.empty());
}

TEST_CASE("acceptance: a collapse is suspicious within 200 rounds, ordinary ups and downs are not") {
  Bench b;
  b.rounds(100, 3);
  CHECK(b.watch.suspicion().empty());
  // Harder and easier text, each for a while.
  std::mt19937 random(5);
  for (int i = 0; i < 200; ++i) b.rounds(3, 0.8 + static_cast<double>(random() % 50) / 10);
  CHECK(b.watch.suspicion().empty());
  int rounds = 0;
  while (b.watch.suspicion().empty() && rounds < 500) b.rounds(1, 0), rounds += 10;
  CHECK(rounds <= 200);
  CHECK_THAT(b.watch.suspicion(), ContainsSubstring("DDTREE"));
  // The canary said that it is the text: quiet, until it was good once and is bad again.
  b.watch.acquit();
  b.rounds(50, 0);
  CHECK(b.watch.suspicion().empty());
  b.rounds(40, 3);
  b.rounds(20, 0);
  CHECK_FALSE(b.watch.suspicion().empty());
  // After a step of the ladder it is looked at anew.
  b.watch.moved();
  b.rounds(5, 0);
  CHECK(b.watch.suspicion().empty());
  b.rounds(10, 0);
  CHECK_FALSE(b.watch.suspicion().empty());
}

TEST_CASE("acceptance of a fresh engine is held against the canary's own; a drafter that never fitted is not lost") {
  Bench fresh;
  fresh.watch.expect(SpeculationMode::kDdtree, 2.5);
  fresh.rounds(10, 0);
  CHECK_FALSE(fresh.watch.suspicion().empty());
  Bench poor;
  poor.watch.expect(SpeculationMode::kDdtree, 0.2);
  poor.rounds(100, 0.3);
  poor.rounds(100, 0);
  CHECK(poor.watch.suspicion().empty());
}

TEST_CASE("speed: passes that take ten times what was promised, for long enough") {
  Bench b;
  b.rounds(100, 3, 40);  // a busy machine
  CHECK(b.found.empty());
  b.rounds(10, 3, 200);  // not long enough
  CHECK(b.found.empty());
  b.rounds(60, 3, 200);
  REQUIRE_FALSE(b.found.empty());
  CHECK(b.found[0].kind == FaultKind::kSpeed);
  CHECK_THAT(b.found[0].reason, ContainsSubstring("10.0 ms"));
  const size_t told = b.found.size();
  b.rounds(100, 3, 20);
  CHECK(b.found.size() == told);
}

TEST_CASE("speed: a pass that was stuck is its own finding, and no slowness of those around it") {
  Bench b;
  b.s.running = 1;
  b.rounds(5, 5);
  for (int i = 0; i < 40; ++i) b.look(1);
  REQUIRE(b.found.size() == 1);
  CHECK(b.found[0].kind == FaultKind::kStuckRound);
  b.rounds(1, 5, 41'000);  // it ends
  b.rounds(200, 5);
  CHECK(b.found.size() == 1);
  b.rounds(60, 5, 150);  // slowness behind it is seen as ever
  REQUIRE(b.found.size() >= 2);
  CHECK(b.found[1].kind == FaultKind::kSpeed);
}

TEST_CASE("a new engine's counters start from zero") {
  Bench b;
  b.rounds(100, 3);
  b.s.nan_faults = 7;
  b.look(1);
  CHECK(b.found.size() == 1);
  b.s = EngineSnapshot();
  b.look(1);
  b.s.nan_faults = 1;
  b.look(1);
  CHECK(b.found.size() == 2);
}

TEST_CASE("a scored tail is a fault where the target would have chosen otherwise, not where another rounding would") {
  WatchLimits limits;
  Score s;
  for (int i = 0; i < 500; ++i) s.tokens.push_back({5, 5, -0.01F, 8});
  CHECK_FALSE(judge_tail(s, limits, "loop").fault);
  CHECK_THAT(judge_tail(s, limits, "loop").reason, ContainsSubstring("model's own"));
  s.tokens[3] = {5, 6, -3, 0.02F};
  s.tokens[9] = {5, 6, -3, 0.1F};
  CHECK_FALSE(judge_tail(s, limits, "loop").fault);  // near-ties
  s.tokens[20] = {5, 6, -9, 4};
  CHECK_FALSE(judge_tail(s, limits, "loop").fault);
  s.tokens[21] = {5, 6, -9, 4};
  // Where a loop began is enough: from then on the target itself goes on with it.
  CHECK(judge_tail(s, limits, "loop").fault);
  CHECK_THAT(judge_tail(s, limits, "loop").reason, ContainsSubstring("2 of its last 500"));
}

TEST_CASE("canaries: text up to the first near-tie, coherence, and acceptance against the first") {
  WatchLimits limits;
  CanaryAnswer first;
  for (int i = 0; i < 20; ++i) first.ids.push_back(i);
  first.text = "1, 2, 3, 4, 5, 6, 7";
  first.stats.mode = SpeculationMode::kDdtree;
  first.stats.rounds = 5, first.stats.accepted = 14, first.stats.completion_tokens = 20, first.stats.decode_ms = 100;
  CHECK(judge_canary(first, first, limits).passed);
  CHECK(judge_canary(first, first, limits).tokens_per_second == 190);
  CanaryAnswer other = first;
  other.ids[12] = 99;
  other.text = "1, 2, 3, 4, 9, 9, 9";
  CHECK_FALSE(judge_canary(first, other, limits).passed);
  CHECK_THAT(judge_canary(first, other, limits).reason, ContainsSubstring("token 12"));
  CanaryAnswer tied = other;
  tied.stats.first_near_tie = 12;
  CHECK(judge_canary(first, tied, limits).passed);
  tied.stats.first_near_tie = 13;
  CHECK_FALSE(judge_canary(first, tied, limits).passed);
  CanaryAnswer shorter = first;
  shorter.ids.resize(10);
  CHECK_FALSE(judge_canary(first, shorter, limits).passed);
  CanaryAnswer failed = first;
  failed.error = "engine fault";
  CHECK_FALSE(judge_canary(first, failed, limits).passed);
  CanaryAnswer undrafted = first;
  undrafted.stats.rounds = 19, undrafted.stats.accepted = 0;
  CHECK(judge_canary(first, undrafted, limits).passed);
  CHECK(judge_canary(first, undrafted, limits).acceptance_lost);
  undrafted.stats.mode = SpeculationMode::kNone;
  CHECK_FALSE(judge_canary(first, undrafted, limits).acceptance_lost);
}
