// Where the server stands, as one state machine: starting → devices → weights n% → collectives → graphs → smoke → ready ⇄ degraded →
// draining → stopped, or failed with its reason. Every endpoint, systemd's STATUS=, the log and the store read this one object.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/status.h"

namespace ddtree {

enum class Phase : uint8_t {
  kStarting,
  kDevices,      // finding and claiming devices
  kWeights,      // reading the checkpoints; has progress
  kCollectives,  // links between ranks
  kGraphs,       // measuring costs, capturing graphs
  kSmoke,        // the smoke suite runs
  kReady,
  kDegraded,  // serves, but not as well as it should: the reason says how
  kDraining,  // asked to stop: running requests finish
  kStopped,
  kFailed,  // cannot serve: the reason says why
};
const char* phase_name(Phase phase);  // "starting" … "failed"

// What the smoke suite says of this process.
enum class SmokeState : uint8_t { kNotRun, kRunning, kPassed, kFailed, kSkipped };
const char* smoke_state_name(SmokeState state);  // "not run", "running", "pass", "fail", "skipped"

struct PhaseState {
  Phase phase = Phase::kStarting;
  double progress = -1;  // 0 … 1 where the phase measures it, else -1
  std::string reason;    // in words: what is being done, why degraded or failed; may be empty
  SmokeState smoke = SmokeState::kNotRun;
  int64_t since_ms = 0;        // wall clock, when the phase was entered
  int64_t ready_since_ms = 0;  // when it last became able to serve (ready or degraded); 0: it is not
  double seconds = 0;          // in this phase so far, by the steady clock (filled by state())
  uint64_t sequence = 0;       // counts entered phases

  bool serving() const { return phase == Phase::kReady || phase == Phase::kDegraded; }
  bool loading() const { return phase < Phase::kReady; }
  bool over() const { return phase == Phase::kStopped || phase == Phase::kFailed; }
  // One sentence for people: "Loading weights, 43 %.", "Ready; the smoke test was skipped (--skip-smoke)."
  std::string sentence() const;
};

class PhaseMachine {
 public:
  // Called after a phase was entered (from.phase != to.phase), in order, one at a time, on a thread that is inside enter(). May call
  // back; may be called once more while remove_listener() returns on another thread.
  using Listener = std::function<void(const PhaseState& from, const PhaseState& to)>;

  PhaseMachine();

  PhaseState state() const;

  // Enters a phase; in the same phase only replaces the reason (no listener is called). Allowed: forward through the start-up phases,
  // leaving any out; ready ⇄ degraded; from both back to devices, where the engine is restarted; draining and failed from anywhere that is
  // not over; stopped from draining or failed; smoke may lead to degraded. kInvalidArgument names both phases; the state is then unchanged.
  // ready and degraded need smoke passed or skipped: also refused.
  Status enter(Phase phase, std::string reason = {});
  // Progress and words within the current phase; ignored (false) if another phase was entered meanwhile.
  bool progress(Phase phase, double fraction, std::string detail = {});
  void set_smoke(SmokeState smoke);

  int add_listener(Listener listener);
  void remove_listener(int id);

  // Waits until the phase differs from `from` (by sequence) or the time is over; returns the state then.
  PhaseState wait_change(uint64_t sequence, double seconds) const;

  static bool allowed(Phase from, Phase to);

 private:
  struct Change {
    PhaseState from, to;
  };
  void notify(std::unique_lock<std::mutex>& lock);
  PhaseState with_seconds() const;

  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  PhaseState state_;
  int64_t entered_steady_ns_ = 0;
  std::vector<std::pair<int, Listener>> listeners_;
  std::vector<Change> pending_;
  bool notifying_ = false;
  int next_listener_ = 1;
};

}  // namespace ddtree
