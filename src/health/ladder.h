// What the service does about faults, one step at a time: reset draft state → mode DFLASH → mode NONE → degraded → restart the engine →
// exit 70. Each fault leads to the next step; proof (a clean time, then a canary that passes) leads back up. Pure: it is told the time and
// says what to do; server/watch.cpp does it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "engine/request.h"

namespace ddtree {

enum class FaultKind : uint8_t {
  kNanLogits,    // logits that are not finite
  kPassFailed,   // a whole pass lost
  kOutOfMemory,  // a pass found no memory
  kDeviceLost,   // the device or a library of it is gone
  kWrongText,    // degenerate text that the target does not stand by
  kAcceptance,   // drafts are no longer accepted, the canary's neither
  kSpeed,        // passes take many times what was measured
  kRankLost,     // a rank of several failed, hangs or disagrees
  kStuckRound,   // requests run and no pass ends
  kCanary,       // the known request is answered otherwise than at the start
};
const char* fault_name(FaultKind kind);  // "nan-logits", …; the event's kind is "fault." and this

enum class Rung : uint8_t { kFull, kReset, kDflash, kNone, kDegraded, kRestart, kExit };

struct LadderState {
  Rung rung = Rung::kFull;
  std::string step;                // "DDTREE" (the configured mode), "reset", "DFLASH", "NONE", "degraded", "restart", "exit"
  SpeculationMode most{};          // the mode that requests get at most
  std::string reason;              // of the last move; empty: none was made
  int64_t since_ms = 0;            // wall clock of the last move, or of the start
  std::vector<std::string> steps;  // all steps of this service, top to bottom
};

struct LadderMove {
  Rung from, to;
  std::string from_step, to_step;
  std::optional<FaultKind> fault;  // empty: up
  std::string reason;
  bool down() const { return to > from; }
};

class Ladder {
 public:
  struct Limits {
    double settle_seconds = 5;   // faults so soon after a step down belong to what it was taken for
    double proof_seconds = 300;  // without a fault before a step up; doubles with each step up that did not hold
    double longest_proof_seconds = 4800;
  };
  // configured: the mode without the ladder. Steps that cannot differ from the one above are left out (DFLASH for NEXTN, …).
  Ladder(SpeculationMode configured, Limits limits, double now, int64_t wall_ms);

  // A fault, its reason in words. The move that it leads to; empty where it belongs to the last one, or the ladder may go no deeper for
  // this kind: slow passes and lost acceptance never stop the service (a hot or shared card is no reason for an outage).
  std::optional<LadderMove> fault(FaultKind kind, const std::string& reason, double now, int64_t wall_ms);

  // Whether a canary should run now, whatever its interval: after each step down (did it help?) and before each step up.
  bool wants_canary(double now) const;
  // A canary that was started at `started` passed; the move up that it proves, if the clean time was long enough.
  std::optional<LadderMove> canary_passed(double started, double now, int64_t wall_ms);

  const LadderState& state() const { return state_; }

 private:
  bool has(Rung rung) const;
  std::string name(Rung rung) const;
  SpeculationMode most(Rung rung) const;
  LadderMove move(Rung to, std::optional<FaultKind> fault, std::string reason, double now, int64_t wall_ms);

  const SpeculationMode configured_;
  const Limits limits_;
  LadderState state_;
  double proof_;               // seconds wanted now
  double last_fault_, moved_;  // steady seconds
  double climbed_ = -1;        // when the last step up was taken; -1: none since the last step down
  bool unproved_ = false;      // no canary has passed since the last step down
};

}  // namespace ddtree
