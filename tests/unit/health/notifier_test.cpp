// What systemd is told, on a virtual clock and on a real socket.
#include "health/notifier.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <cstdlib>
#include <cstring>
#include <string>

#include "health/sd_notify.h"

using namespace ddtree;
using Catch::Matchers::ContainsSubstring;

namespace {

bool has(const std::string& lines, const char* word) { return lines.find(word) != std::string::npos; }

PhaseState phase(Phase p, uint64_t sequence, double progress = -1) {
  PhaseState s;
  s.phase = p;
  s.sequence = sequence;
  s.progress = progress;
  return s;
}

}  // namespace

TEST_CASE("loading asks for more time while it works, and not while it stands still") {
  Notifier n({.watchdog_seconds = 20, .extend_every = 5, .extend_by = 30, .still_after = 15, .longest_phase = 100});
  std::string sent = n.tick(0, {phase(Phase::kDevices, 1), true, 0});
  CHECK_THAT(sent, ContainsSubstring("EXTEND_TIMEOUT_USEC=30000000") && ContainsSubstring("STATUS=Claiming devices"));
  CHECK_FALSE(has(sent, "READY"));
  // Each phase that is entered asks at once, however soon after the last.
  CHECK(has(n.tick(0.1, {phase(Phase::kWeights, 2), true, 0}), "EXTEND_TIMEOUT_USEC"));
  int asked = 0;
  int64_t work = 0;
  for (double t = 0.3; t < 60; t += 0.2) asked += has(n.tick(t, {phase(Phase::kWeights, 2), true, work += 100'000}), "EXTEND") ? 1 : 0;
  CHECK(asked >= 10);
  CHECK(asked <= 13);
  // No work: after a while nothing is asked for, and nothing pinged.
  asked = 0;
  for (double t = 60; t < 75; t += 0.2) (void)n.tick(t, {phase(Phase::kWeights, 2), true, work});
  for (double t = 75.2; t < 200; t += 0.2) {
    const std::string lines = n.tick(t, {phase(Phase::kWeights, 2), true, work});
    CHECK_FALSE(has(lines, "EXTEND"));
    CHECK_FALSE(has(lines, "WATCHDOG"));
  }
  // It goes on.
  CHECK(has(n.tick(200, {phase(Phase::kWeights, 2, 0.5), true, work}), "EXTEND"));
  // A phase that only burns processor time is not extended for ever.
  for (double t = 200; t < 301; t += 0.2) (void)n.tick(t, {phase(Phase::kWeights, 2, 0.5), true, work += 100'000});
  for (double t = 301; t < 400; t += 0.2) CHECK_FALSE(has(n.tick(t, {phase(Phase::kWeights, 2, 0.5), true, work += 100'000}), "EXTEND"));
}

TEST_CASE("READY comes with the first phase that serves, and once; words whenever they change") {
  Notifier n({});
  for (Phase p : {Phase::kStarting, Phase::kDevices, Phase::kWeights, Phase::kGraphs, Phase::kSmoke})
    CHECK_FALSE(has(n.tick(static_cast<double>(p), {phase(p, static_cast<uint64_t>(p)), true, 0}), "READY"));
  std::string sent = n.tick(10, {phase(Phase::kReady, 9), true, 0});
  CHECK_THAT(sent, ContainsSubstring("READY=1\nSTATUS=Ready."));
  CHECK_FALSE(has(sent, "EXTEND"));
  CHECK(n.tick(11, {phase(Phase::kReady, 9), true, 0}).empty());
  PhaseState worse = phase(Phase::kDegraded, 10);
  worse.reason = "two\nlines";
  CHECK(n.tick(12, {worse, true, 0}) == "STATUS=Serving, but degraded: two lines.");
  CHECK(has(n.tick(13, {phase(Phase::kDraining, 11), true, 0}), "STOPPING=1"));
  CHECK_FALSE(has(n.tick(14, {phase(Phase::kStopped, 12), true, 0}), "STOPPING=1"));
}

TEST_CASE("pings come at half the watchdog's time while alive, and stop with a stuck round") {
  Notifier n({.watchdog_seconds = 10});
  int pings = 0;
  for (double t = 0; t < 60; t += 0.2) pings += has(n.tick(t, {phase(Phase::kReady, 1), true, 0}), "WATCHDOG=1") ? 1 : 0;
  CHECK(pings >= 11);
  CHECK(pings <= 13);
  for (double t = 60; t < 120; t += 0.2) CHECK_FALSE(has(n.tick(t, {phase(Phase::kReady, 1), false, 0}), "WATCHDOG"));
  CHECK(has(n.tick(120, {phase(Phase::kReady, 1), true, 0}), "WATCHDOG"));
  Notifier unasked({.watchdog_seconds = 0});
  for (double t = 0; t < 60; t += 0.2) CHECK_FALSE(has(unasked.tick(t, {phase(Phase::kReady, 1), true, 0}), "WATCHDOG"));
}

TEST_CASE("the watchdog's time is the environment's, for this process only") {
  ::setenv("WATCHDOG_USEC", "30000000", 1);
  ::unsetenv("WATCHDOG_PID");
  CHECK(Notifier::watchdog_of_environment() == 30);
  ::setenv("WATCHDOG_PID", std::to_string(getpid()).c_str(), 1);
  CHECK(Notifier::watchdog_of_environment() == 30);
  ::setenv("WATCHDOG_PID", std::to_string(getpid() + 1).c_str(), 1);
  CHECK(Notifier::watchdog_of_environment() == 0);
  ::unsetenv("WATCHDOG_PID");
  ::setenv("WATCHDOG_USEC", "soon", 1);
  CHECK(Notifier::watchdog_of_environment() == 0);
  ::unsetenv("WATCHDOG_USEC");
  CHECK(Notifier::watchdog_of_environment() == 0);
  const int64_t before = Notifier::work_so_far();
  volatile double x = 1;
  for (int i = 0; i < 30'000'000; ++i) x = x * 1.0000001;
  CHECK(Notifier::work_so_far() > before);
}

TEST_CASE("variables that systemd would not have set so are named, with value and what would be right") {
  const char* const names[] = {"NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"};
  const auto with = [&](const char* socket, const char* usec, const char* pid) {
    const char* const values[] = {socket, usec, pid};
    for (int i = 0; i < 3; ++i) values[i] ? setenv(names[i], values[i], 1) : unsetenv(names[i]);
    return notify_environment_troubles();
  };
  CHECK(with(nullptr, nullptr, nullptr).empty());
  CHECK(with("", "", "").empty());
  CHECK(with("/run/systemd/notify", "60000000", "1234").empty());
  CHECK(with("@abstract", "1", nullptr).empty());
  const std::string longest = "/" + std::string(106, 'x');
  CHECK(with(longest.c_str(), nullptr, nullptr).empty());
  REQUIRE(with((longest + "x").c_str(), nullptr, nullptr).size() == 1);
  CHECK_THAT(with((longest + "x").c_str(), nullptr, nullptr)[0], ContainsSubstring("108 bytes long, and at most 107"));
  auto all = with("run/notify", "60s", "-3");
  REQUIRE(all.size() == 3);
  CHECK_THAT(all[0], ContainsSubstring("NOTIFY_SOCKET is \"run/notify\", but must be an absolute path"));
  CHECK_THAT(all[1], ContainsSubstring("WATCHDOG_USEC is \"60s\", but must be a whole number of microseconds"));
  CHECK_THAT(all[2], ContainsSubstring("WATCHDOG_PID is \"-3\""));
  for (const char* wrong : {"0", "-5", " 60000000", "6e7", "99999999999999999999"}) {
    CHECK(with(nullptr, wrong, nullptr).size() == 1);
    CHECK(Notifier::watchdog_of_environment() == 0);
  }
  (void)with("/nowhere/notify", nullptr, nullptr);
  std::string why;
  CHECK_FALSE(sd_notify("READY=1", &why));
  CHECK(why == "NOTIFY_SOCKET=/nowhere/notify: No such file or directory");
  (void)with(nullptr, nullptr, nullptr);
  why.clear();
  CHECK_FALSE(sd_notify("READY=1", &why));
  CHECK(why.empty());
}
