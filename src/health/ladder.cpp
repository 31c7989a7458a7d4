#include "health/ladder.h"

#include <fmt/core.h>

#include <algorithm>

namespace ddtree {
namespace {

// How deep a fault of this kind may lead, and how deep it leads at once.
Rung deepest(FaultKind kind) {
  switch (kind) {
    case FaultKind::kAcceptance: return Rung::kNone;  // there, nothing is drafted
    case FaultKind::kSpeed: return Rung::kDegraded;
    default: return Rung::kExit;
  }
}
Rung shallowest(FaultKind kind) {
  switch (kind) {
    case FaultKind::kPassFailed:
    case FaultKind::kDeviceLost: return Rung::kRestart;  // no mode runs on a lost device
    case FaultKind::kRankLost:
    case FaultKind::kStuckRound: return Rung::kExit;  // a thread inside a pass cannot be joined, so the engine cannot be restarted
    default: return Rung::kReset;
  }
}

}  // namespace

const char* fault_name(FaultKind kind) {
  switch (kind) {
    case FaultKind::kNanLogits: return "nan-logits";
    case FaultKind::kPassFailed: return "pass-failed";
    case FaultKind::kOutOfMemory: return "out-of-memory";
    case FaultKind::kDeviceLost: return "device-lost";
    case FaultKind::kRankLost: return "rank-lost";
    case FaultKind::kWrongText: return "wrong-text";
    case FaultKind::kAcceptance: return "acceptance";
    case FaultKind::kSpeed: return "speed";
    case FaultKind::kStuckRound: return "stuck-round";
    case FaultKind::kCanary: return "canary";
  }
  return "";
}

Ladder::Ladder(SpeculationMode configured, Limits limits, double now, int64_t wall_ms)
    : configured_(configured), limits_(limits), proof_(limits.proof_seconds), last_fault_(now), moved_(now) {
  for (Rung r : {Rung::kFull, Rung::kReset, Rung::kDflash, Rung::kNone, Rung::kDegraded, Rung::kRestart, Rung::kExit})
    if (has(r)) state_.steps.push_back(name(r));
  state_.step = name(Rung::kFull);
  state_.most = configured;
  state_.since_ms = wall_ms;
}

bool Ladder::has(Rung rung) const {
  switch (rung) {
    case Rung::kReset:
    case Rung::kNone: return configured_ != SpeculationMode::kNone;
    case Rung::kDflash: return configured_ == SpeculationMode::kDdtree;
    default: return true;
  }
}

std::string Ladder::name(Rung rung) const {
  switch (rung) {
    case Rung::kFull: return mode_name(configured_);
    case Rung::kReset: return "reset";
    case Rung::kDflash: return mode_name(SpeculationMode::kDflash);
    // Without a drafter or MTP head the top is called NONE already.
    case Rung::kNone: return mode_name(SpeculationMode::kNone);
    case Rung::kDegraded: return "degraded";
    case Rung::kRestart: return "restart";
    case Rung::kExit: return "exit";
  }
  return "";
}

SpeculationMode Ladder::most(Rung rung) const {
  switch (rung) {
    case Rung::kFull:
    case Rung::kReset:
    case Rung::kRestart: return configured_;  // a new engine has proved all its modes in the smoke test
    case Rung::kDflash: return SpeculationMode::kDflash;
    default: return SpeculationMode::kNone;
  }
}

LadderMove Ladder::move(Rung to, std::optional<FaultKind> fault, std::string reason, double now, int64_t wall_ms) {
  LadderMove m{state_.rung, to, state_.step, name(to), fault, std::move(reason)};
  state_.rung = to;
  state_.step = m.to_step;
  state_.most = most(to);
  state_.reason = m.reason;
  state_.since_ms = wall_ms;
  moved_ = now;
  return m;
}

std::optional<LadderMove> Ladder::fault(FaultKind kind, const std::string& reason, double now, int64_t wall_ms) {
  // Eight streams in one broken pass are one fault, and what was running when a step was taken may still show the old one.
  const bool stepped_down = state_.rung != Rung::kFull && climbed_ < 0;
  if (stepped_down && now - moved_ < limits_.settle_seconds && shallowest(kind) <= state_.rung) {
    last_fault_ = now;
    return {};
  }
  const double clean = now - std::max(last_fault_, moved_);
  last_fault_ = now;
  Rung to = std::max(static_cast<Rung>(std::min(static_cast<int>(state_.rung) + 1, static_cast<int>(Rung::kExit))), shallowest(kind));
  while (!has(to)) to = static_cast<Rung>(static_cast<int>(to) + 1);
  if (to > deepest(kind) || state_.rung == Rung::kExit) return {};
  // A step up that did not hold: more proof before the next. One that held is forgotten.
  if (climbed_ >= 0) proof_ = clean >= proof_ ? limits_.proof_seconds : std::min(proof_ * 2, limits_.longest_proof_seconds);
  climbed_ = -1;
  unproved_ = true;
  return move(to, kind, reason, now, wall_ms);
}

bool Ladder::wants_canary(double now) const {
  if (state_.rung == Rung::kExit) return false;
  if (unproved_) return now - moved_ >= limits_.settle_seconds;
  return state_.rung != Rung::kFull && now - std::max(last_fault_, moved_) >= proof_;
}

std::optional<LadderMove> Ladder::canary_passed(double started, double now, int64_t wall_ms) {
  if (started - moved_ >= limits_.settle_seconds) unproved_ = false;
  if (state_.rung == Rung::kFull || state_.rung == Rung::kExit) return {};
  const double clean = started - std::max(last_fault_, moved_);
  if (clean < proof_) return {};
  Rung to = Rung::kFull;
  if (state_.rung == Rung::kDegraded) to = Rung::kNone;
  else if (state_.rung == Rung::kNone) to = Rung::kDflash;
  while (!has(to)) to = static_cast<Rung>(static_cast<int>(to) - 1);
  if (to == Rung::kReset) to = Rung::kFull;  // nothing is reset on the way up
  climbed_ = now;
  return move(to, {}, fmt::format("no fault for {:.0f} s and the canary passed", clean), now, wall_ms);
}

}  // namespace ddtree
