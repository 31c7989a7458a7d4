// The fault ladder on a virtual clock: down with faults, up with proof, never further than a kind of fault may lead.
#include "health/ladder.h"

#include <catch2/catch_test_macros.hpp>

using namespace ddtree;

namespace {

Ladder ladder(SpeculationMode mode) {
  return Ladder(mode, {.settle_seconds = 5, .proof_seconds = 100, .longest_proof_seconds = 400}, 0, 1);
}

std::string down(Ladder& l, FaultKind kind, double now) {
  const auto m = l.fault(kind, "why", now, 1);
  return m ? m->to_step : "";
}

}  // namespace

TEST_CASE("each fault leads one step down, to the end") {
  Ladder l = ladder(SpeculationMode::kDdtree);
  CHECK(l.state().steps == std::vector<std::string>{"DDTREE", "reset", "DFLASH", "NONE", "degraded", "restart", "exit"});
  CHECK(l.state().step == "DDTREE");
  CHECK(l.state().reason.empty());
  double now = 1000;
  const std::pair<const char*, SpeculationMode> expected[] = {{"reset", SpeculationMode::kDdtree},   {"DFLASH", SpeculationMode::kDflash},
                                                              {"NONE", SpeculationMode::kNone},      {"degraded", SpeculationMode::kNone},
                                                              {"restart", SpeculationMode::kDdtree}, {"exit", SpeculationMode::kNone}};
  for (const auto& [step, most] : expected) {
    const auto m = l.fault(FaultKind::kNanLogits, "row 3", now += 10, 77);
    REQUIRE(m);
    CHECK(m->to_step == step);
    CHECK(m->down());
    CHECK(m->fault == FaultKind::kNanLogits);
    CHECK(l.state().most == most);
    CHECK(l.state().reason == "row 3");
    CHECK(l.state().since_ms == 77);
  }
  CHECK_FALSE(l.fault(FaultKind::kNanLogits, "again", now += 10, 1));
}

TEST_CASE("steps that change nothing are left out") {
  Ladder chain = ladder(SpeculationMode::kDflash), nextn = ladder(SpeculationMode::kNextn), plain = ladder(SpeculationMode::kNone);
  CHECK(chain.state().steps == std::vector<std::string>{"DFLASH", "reset", "NONE", "degraded", "restart", "exit"});
  CHECK(nextn.state().steps == std::vector<std::string>{"NEXTN", "reset", "NONE", "degraded", "restart", "exit"});
  CHECK(plain.state().steps == std::vector<std::string>{"NONE", "degraded", "restart", "exit"});
  CHECK(down(nextn, FaultKind::kWrongText, 10) == "reset");
  CHECK(down(nextn, FaultKind::kWrongText, 20) == "NONE");
  CHECK(down(plain, FaultKind::kWrongText, 10) == "degraded");
}

TEST_CASE("what comes right after a step down belongs to it") {
  Ladder l = ladder(SpeculationMode::kDdtree);
  CHECK(down(l, FaultKind::kNanLogits, 10) == "reset");
  CHECK(down(l, FaultKind::kNanLogits, 11).empty());
  CHECK(down(l, FaultKind::kWrongText, 14.9).empty());
  CHECK(down(l, FaultKind::kWrongText, 15.1) == "DFLASH");
  // A lost device is more than what the step was for.
  CHECK(down(l, FaultKind::kDeviceLost, 15.2) == "restart");
  CHECK(down(l, FaultKind::kDeviceLost, 15.3).empty());
  CHECK(down(l, FaultKind::kDeviceLost, 21) == "exit");
}

TEST_CASE("some kinds begin further down, some never lead to a restart") {
  Ladder lost = ladder(SpeculationMode::kDdtree), pass = ladder(SpeculationMode::kDdtree), stuck = ladder(SpeculationMode::kDdtree);
  CHECK(down(lost, FaultKind::kDeviceLost, 10) == "restart");
  CHECK(down(pass, FaultKind::kPassFailed, 10) == "restart");
  CHECK(down(stuck, FaultKind::kStuckRound, 10) == "exit");
  Ladder rank = ladder(SpeculationMode::kDdtree);
  CHECK(down(rank, FaultKind::kRankLost, 10) == "exit");  // another engine in this process would wait for the same thread
  Ladder slow = ladder(SpeculationMode::kDdtree), drafts = ladder(SpeculationMode::kDdtree);
  std::string last;
  for (int i = 1; i < 20; ++i)
    if (std::string step = down(slow, FaultKind::kSpeed, i * 10); !step.empty()) last = step;
  CHECK(last == "degraded");
  for (int i = 1; i < 20; ++i)
    if (std::string step = down(drafts, FaultKind::kAcceptance, i * 10); !step.empty()) last = step;
  CHECK(last == "NONE");
}

TEST_CASE("up one step at a time, after a clean time and a canary; a step that does not hold doubles the proof") {
  Ladder l = ladder(SpeculationMode::kDdtree);
  double now = 0;
  for (int i = 0; i < 4; ++i) down(l, FaultKind::kNanLogits, now += 10);
  CHECK(l.state().step == "degraded");
  CHECK_FALSE(l.wants_canary(now + 4.9));
  CHECK(l.wants_canary(now + 5));  // did it help?
  CHECK_FALSE(l.canary_passed(now + 5, now + 6, 1));
  CHECK_FALSE(l.wants_canary(now + 99));
  CHECK(l.wants_canary(now + 100));
  const char* expected[] = {"NONE", "DFLASH", "DDTREE"};
  for (const char* step : expected) {
    CHECK_FALSE(l.canary_passed(now + 99, now + 99.5, 1));  // started before the time was over
    now += 100;
    const auto m = l.canary_passed(now, now, 5);
    REQUIRE(m);
    CHECK_FALSE(m->down());
    CHECK_FALSE(m->fault);
    CHECK(m->to_step == step);
  }
  CHECK(l.state().most == SpeculationMode::kDdtree);
  CHECK_FALSE(l.wants_canary(now + 1000));
  // Down again soon after: the climb did not hold.
  CHECK(down(l, FaultKind::kAcceptance, now += 50) == "reset");
  CHECK_FALSE(l.canary_passed(now + 150, now + 150, 1));
  CHECK(l.canary_passed(now + 200, now + 200, 1)->to_step == "DDTREE");
  // Long after: it held, and the first proof is enough again.
  CHECK(down(l, FaultKind::kAcceptance, now += 5000) == "reset");
  CHECK(l.canary_passed(now + 100, now + 100, 1)->to_step == "DDTREE");
}

TEST_CASE("a restarted engine has to prove itself before the top is reached again") {
  Ladder l = ladder(SpeculationMode::kDflash);
  CHECK(down(l, FaultKind::kPassFailed, 10) == "restart");
  CHECK(l.state().most == SpeculationMode::kDflash);  // the smoke test has proved its modes
  CHECK(l.canary_passed(111, 112, 1)->to_step == "DFLASH");
  CHECK(down(l, FaultKind::kPassFailed, 150) == "restart");
  CHECK(down(l, FaultKind::kNanLogits, 170) == "exit");
  CHECK_FALSE(l.wants_canary(1e6));
}
