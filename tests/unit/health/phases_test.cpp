#include "health/phases.h"

#include <atomic>
#include <catch2/catch_test_macros.hpp>
#include <string>
#include <thread>

using namespace ddtree;

TEST_CASE("the way up, one phase after the other, tells its listeners once each") {
  PhaseMachine machine;
  std::string path;
  machine.add_listener([&](const PhaseState& from, const PhaseState& to) {
    CHECK(from.sequence + 1 == to.sequence);
    path += std::string(phase_name(from.phase)) + ">" + phase_name(to.phase) + " ";
  });
  for (const Phase phase : {Phase::kDevices, Phase::kWeights, Phase::kCollectives, Phase::kGraphs, Phase::kSmoke})
    REQUIRE(machine.enter(phase).ok());
  machine.set_smoke(SmokeState::kPassed);
  REQUIRE(machine.enter(Phase::kReady).ok());
  REQUIRE(machine.enter(Phase::kDegraded, "acceptance 1.2, usual is 5.1").ok());
  const int64_t since = machine.state().ready_since_ms;
  CHECK(since > 0);
  REQUIRE(machine.enter(Phase::kReady).ok());
  CHECK(machine.state().ready_since_ms == since);  // it served all along
  REQUIRE(machine.enter(Phase::kDraining).ok());
  CHECK(machine.state().ready_since_ms == 0);
  REQUIRE(machine.enter(Phase::kStopped).ok());
  CHECK(machine.state().over());
  CHECK(path ==
        "starting>devices devices>weights weights>collectives collectives>graphs graphs>smoke smoke>ready ready>degraded degraded>ready "
        "ready>draining draining>stopped ");
}

TEST_CASE("phases may be left out, but not gone back to") {
  PhaseMachine machine;
  REQUIRE(machine.enter(Phase::kWeights).ok());
  const Status back = machine.enter(Phase::kDevices);
  CHECK_FALSE(back.ok());
  CHECK(back.message() == "phase devices cannot follow weights");
  CHECK(machine.state().phase == Phase::kWeights);
  CHECK_FALSE(machine.enter(Phase::kStopped).ok());  // not without draining
  CHECK_FALSE(machine.enter(Phase::kDegraded).ok());
  REQUIRE(machine.enter(Phase::kSmoke).ok());
  REQUIRE(machine.enter(Phase::kFailed, "the drafter's fc takes 768 features, the target hands over 512").ok());
  for (const Phase phase : {Phase::kReady, Phase::kDraining, Phase::kStarting}) CHECK_FALSE(machine.enter(phase).ok());
  CHECK(machine.state().sentence() == "Failed: the drafter's fc takes 768 features, the target hands over 512.");
  CHECK(machine.enter(Phase::kStopped).ok());
  CHECK_FALSE(machine.enter(Phase::kFailed).ok());
}

TEST_CASE("nothing is ready before the smoke test passed or was skipped") {
  PhaseMachine machine;
  for (const SmokeState smoke : {SmokeState::kNotRun, SmokeState::kRunning, SmokeState::kFailed}) {
    machine.set_smoke(smoke);
    const Status early = machine.enter(Phase::kReady);
    CHECK_FALSE(early.ok());
    CHECK(early.message().find(smoke_state_name(smoke)) != std::string::npos);
  }
  machine.set_smoke(SmokeState::kSkipped);
  REQUIRE(machine.enter(Phase::kReady).ok());
  CHECK(machine.state().sentence() == "Ready; smoke test skipped.");
  REQUIRE(machine.enter(Phase::kReady, "smoke test skipped (--skip-smoke)").ok());
  CHECK(machine.state().sentence() == "Ready: smoke test skipped (--skip-smoke).");
  // A smoke run on demand that fails is the caller's to judge; the way between ready and degraded stays open.
  machine.set_smoke(SmokeState::kFailed);
  CHECK(machine.enter(Phase::kDegraded, "the smoke test failed").ok());
  CHECK(machine.enter(Phase::kReady).ok());
}

TEST_CASE("progress belongs to its phase") {
  PhaseMachine machine;
  REQUIRE(machine.enter(Phase::kWeights, "model-00001-of-00002.safetensors").ok());
  CHECK(machine.progress(Phase::kWeights, 0.437));
  CHECK(machine.state().sentence() == "Loading weights, 43 %: model-00001-of-00002.safetensors.");
  CHECK(machine.progress(Phase::kWeights, 7));
  CHECK(machine.state().progress == 1);
  REQUIRE(machine.enter(Phase::kGraphs).ok());
  CHECK_FALSE(machine.progress(Phase::kWeights, 0.5));
  CHECK(machine.state().progress == -1);
  CHECK(machine.state().reason.empty());
}

TEST_CASE("a listener may enter the next phase itself; order is kept") {
  PhaseMachine machine;
  std::string path;
  machine.add_listener([&](const PhaseState&, const PhaseState& to) {
    path += std::string(phase_name(to.phase)) + " ";
    if (to.phase == Phase::kDraining) CHECK(machine.enter(Phase::kStopped).ok());
  });
  const int second =
      machine.add_listener([&](const PhaseState&, const PhaseState& to) { path += std::string("2:") + phase_name(to.phase) + " "; });
  REQUIRE(machine.enter(Phase::kDraining).ok());
  CHECK(path == "draining 2:draining stopped 2:stopped ");
  machine.remove_listener(second);
}

TEST_CASE("threads that race see one order, and waiters wake") {
  PhaseMachine machine;
  machine.set_smoke(SmokeState::kPassed);
  REQUIRE(machine.enter(Phase::kReady).ok());
  const uint64_t start = machine.state().sequence;
  uint64_t expected = start;
  bool in_order = true;
  std::atomic<int> inside{0};
  machine.add_listener([&](const PhaseState& from, const PhaseState& to) {
    if (inside.fetch_add(1) != 0 || from.sequence != expected || to.sequence != expected + 1) in_order = false;
    expected = to.sequence;
    inside.fetch_sub(1);
  });
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 500; ++i) (void)machine.enter((i + t) % 2 == 0 ? Phase::kDegraded : Phase::kReady);
    });
  }
  for (auto& thread : threads) thread.join();
  CHECK(in_order);
  CHECK(expected == machine.state().sequence);
  CHECK(expected > start);

  std::thread later([&] { CHECK(machine.enter(Phase::kDraining).ok()); });
  const PhaseState woken = machine.wait_change(expected, 600);
  later.join();
  CHECK(woken.phase == Phase::kDraining);
  CHECK(machine.wait_change(woken.sequence, 0).phase == Phase::kDraining);  // nothing new: returns what is
}
