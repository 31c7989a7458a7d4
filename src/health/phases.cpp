#include "health/phases.h"

#include <fmt/core.h>

#include <algorithm>
#include <chrono>

namespace ddtree {
namespace {

int64_t steady_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}
int64_t wall_ms() {
  return std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::system_clock::now().time_since_epoch()).count();
}

const char* doing(Phase phase) {
  switch (phase) {
    case Phase::kStarting: return "Starting";
    case Phase::kDevices: return "Claiming devices";
    case Phase::kWeights: return "Loading weights";
    case Phase::kCollectives: return "Linking ranks";
    case Phase::kGraphs: return "Measuring costs and capturing graphs";
    case Phase::kSmoke: return "Running the smoke test";
    case Phase::kReady: return "Ready";
    case Phase::kDegraded: return "Serving, but degraded";
    case Phase::kDraining: return "Draining: running requests finish, new ones are refused";
    case Phase::kStopped: return "Stopped";
    case Phase::kFailed: return "Failed";
  }
  return "";
}

}  // namespace

const char* phase_name(Phase phase) {
  switch (phase) {
    case Phase::kStarting: return "starting";
    case Phase::kDevices: return "devices";
    case Phase::kWeights: return "weights";
    case Phase::kCollectives: return "collectives";
    case Phase::kGraphs: return "graphs";
    case Phase::kSmoke: return "smoke";
    case Phase::kReady: return "ready";
    case Phase::kDegraded: return "degraded";
    case Phase::kDraining: return "draining";
    case Phase::kStopped: return "stopped";
    case Phase::kFailed: return "failed";
  }
  return "";
}

const char* smoke_state_name(SmokeState state) {
  switch (state) {
    case SmokeState::kNotRun: return "not run";
    case SmokeState::kRunning: return "running";
    case SmokeState::kPassed: return "pass";
    case SmokeState::kFailed: return "fail";
    case SmokeState::kSkipped: return "skipped";
  }
  return "";
}

std::string PhaseState::sentence() const {
  std::string text = doing(phase);
  // Rounded down: 100 % is said when it is done.
  if (progress >= 0 && loading()) text += fmt::format(", {} %", static_cast<int>(progress * 100));
  if (!reason.empty()) text += ": " + reason;
  if (serving() && smoke == SmokeState::kSkipped && reason.find("smoke test skipped") == std::string::npos) text += "; smoke test skipped";
  if (text.back() != '.') text += '.';
  return text;
}

PhaseMachine::PhaseMachine() {
  state_.since_ms = wall_ms();
  entered_steady_ns_ = steady_ns();
}

bool PhaseMachine::allowed(Phase from, Phase to) {
  if (from == Phase::kStopped || from == Phase::kFailed) return from == Phase::kFailed && to == Phase::kStopped;
  switch (to) {
    case Phase::kFailed: return true;
    case Phase::kDraining: return from != Phase::kDraining;
    case Phase::kStopped: return from == Phase::kDraining;
    case Phase::kReady: return from != Phase::kReady && from != Phase::kDraining;
    case Phase::kDegraded: return from == Phase::kReady || from == Phase::kSmoke;
    // Start-up phases: forward only; a service whose engine is restarted goes through them again.
    case Phase::kDevices:
      if (from == Phase::kReady || from == Phase::kDegraded) return true;
      [[fallthrough]];
    default: return from < to && from < Phase::kReady;
  }
}

PhaseState PhaseMachine::with_seconds() const {
  PhaseState state = state_;
  state.seconds = static_cast<double>(steady_ns() - entered_steady_ns_) * 1e-9;
  return state;
}

PhaseState PhaseMachine::state() const {
  std::lock_guard lock(mutex_);
  return with_seconds();
}

Status PhaseMachine::enter(Phase phase, std::string reason) {
  std::unique_lock lock(mutex_);
  if (phase == state_.phase) {
    state_.reason = std::move(reason);
    return {};
  }
  if (!allowed(state_.phase, phase)) {
    return Status(Code::kInvalidArgument, fmt::format("phase {} cannot follow {}", phase_name(phase), phase_name(state_.phase)));
  }
  const bool serving = phase == Phase::kReady || phase == Phase::kDegraded;
  // Readiness is a claim about text: nobody may make it before the smoke suite passed, or was left out on purpose.
  if (serving && !state_.serving() && state_.smoke != SmokeState::kPassed && state_.smoke != SmokeState::kSkipped) {
    return Status(Code::kInvalidArgument, fmt::format("phase {} needs a smoke test that passed or was skipped; it is: {}",
                                                      phase_name(phase), smoke_state_name(state_.smoke)));
  }
  Change change{with_seconds(), {}};
  const int64_t now = wall_ms();
  if (serving && !state_.serving()) state_.ready_since_ms = now;
  if (!serving) state_.ready_since_ms = 0;
  state_.phase = phase;
  state_.progress = -1;
  state_.reason = std::move(reason);
  state_.since_ms = now;
  ++state_.sequence;
  entered_steady_ns_ = steady_ns();
  change.to = with_seconds();
  pending_.push_back(std::move(change));
  changed_.notify_all();
  notify(lock);
  return {};
}

// Listeners are called without the lock, so that they may call back; a change that comes meanwhile is queued behind.
void PhaseMachine::notify(std::unique_lock<std::mutex>& lock) {
  if (notifying_) return;
  notifying_ = true;
  while (!pending_.empty()) {
    const Change change = std::move(pending_.front());
    pending_.erase(pending_.begin());
    const auto listeners = listeners_;
    lock.unlock();
    for (const auto& [id, listener] : listeners) listener(change.from, change.to);
    lock.lock();
  }
  notifying_ = false;
  changed_.notify_all();
}

bool PhaseMachine::progress(Phase phase, double fraction, std::string detail) {
  std::lock_guard lock(mutex_);
  if (state_.phase != phase) return false;
  state_.progress = std::clamp(fraction, 0.0, 1.0);
  if (!detail.empty()) state_.reason = std::move(detail);
  return true;
}

void PhaseMachine::set_smoke(SmokeState smoke) {
  std::lock_guard lock(mutex_);
  state_.smoke = smoke;
}

int PhaseMachine::add_listener(Listener listener) {
  std::lock_guard lock(mutex_);
  listeners_.emplace_back(next_listener_, std::move(listener));
  return next_listener_++;
}

void PhaseMachine::remove_listener(int id) {
  std::lock_guard lock(mutex_);
  std::erase_if(listeners_, [&](const auto& entry) { return entry.first == id; });
}

PhaseState PhaseMachine::wait_change(uint64_t sequence, double seconds) const {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, std::chrono::duration<double>(seconds), [&] { return state_.sequence != sequence; });
  return with_seconds();
}

}  // namespace ddtree
