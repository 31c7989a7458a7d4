#include "server/watcher.h"

#include <fmt/core.h>

#include <algorithm>
#include <chrono>

#include "base/log.h"
#include "server/json.h"
#include "server/serving_smoke.h"

namespace ddtree {
namespace {

constexpr int32_t kCanaryTokens = 64;
constexpr int32_t kCanaryBudget = 16;  // of its trees: `auto` may find that none pays just now, and then shows nothing of the drafter
constexpr double kIdleSeconds = 5;     // without requests before a canary may run

double steady() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }
int64_t wall_ms() {
  return std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::system_clock::now().time_since_epoch()).count();
}

}  // namespace

Watcher::Watcher(const ServiceOptions& options, Hands hands)
    : options_(options), asked_(options.engine.mode), hands_(std::move(hands)), watch_(options.watch) {}

Watcher::~Watcher() { end(); }

CanaryAnswer Watcher::ask(const Serving& serving, const std::vector<int32_t>& prompt, SpeculationMode mode, double limit_seconds,
                          const std::function<bool()>& stopping) {
  struct Pending {
    std::mutex mutex;
    std::condition_variable done;
    CanaryAnswer answer;
    bool finished = false;
  };
  const auto pending = std::make_shared<Pending>();  // a late delta may come after the wait was given up
  Request r;
  r.id = "canary";
  r.prompt = prompt;
  r.max_tokens = std::min(kCanaryTokens, serving.info.context_length - static_cast<int32_t>(prompt.size()));
  r.sampling.temperature = 0;
  r.mode = mode;
  r.own = r.ahead = true;
  if (mode == SpeculationMode::kDdtree) r.budget = kCanaryBudget;
  const auto sink = [pending](Delta&& d) {
    const std::lock_guard lock(pending->mutex);
    CanaryAnswer& a = pending->answer;
    a.ids.insert(a.ids.end(), d.ids.begin(), d.ids.end());
    for (const TextPiece& piece : d.pieces)
      if (!piece.special) a.text += piece.text;
    if (!d.finished) return;
    a.stats = std::move(d.stats);
    if (d.finish == FinishReason::kError) a.error = d.error.empty() ? "the engine ended it with an error" : d.error;
    if (d.finish == FinishReason::kCancelled) a.error = "it was cancelled";
    pending->finished = true;
    pending->done.notify_all();
  };
  CanaryAnswer none;
  int64_t passes = serving.engine->snapshot().passes;
  double moved = steady();
  const auto given_up = [&] {
    if (const int64_t now = serving.engine->snapshot().passes; now != passes) passes = now, moved = steady();
    return stopping() || steady() - moved > limit_seconds;
  };
  auto id = serving.engine->submit(r, sink);
  while (!id && id.status().code() == Code::kTemporary && !given_up()) {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    id = serving.engine->submit(r, sink);
  }
  if (!id) return none.error = id.status().message(), none;
  std::unique_lock lock(pending->mutex);
  while (!pending->finished) {
    pending->done.wait_for(lock, std::chrono::milliseconds(200));
    if (pending->finished || !given_up()) continue;
    serving.engine->cancel(*id);
    none = pending->answer;
    return none.error = stopping() ? "it was stopped" : fmt::format("no pass ended within {:.0f} s", limit_seconds), none;
  }
  return pending->answer;
}

void Watcher::begin(std::shared_ptr<const Serving> serving) {
  const SpeculationMode configured = serving->engine->options().mode;
  Canary known;
  const std::string user = smoke_inputs(*serving).coherent.front().user;
  if (auto prompt = smoke_encode(serving)({.messages = {{"user", user}}}); prompt && !prompt->empty()) known.prompt = std::move(*prompt);
  if (static_cast<int64_t>(known.prompt.size()) >= serving->info.context_length) known.prompt.clear();
  if (!known.prompt.empty()) {
    std::vector<SpeculationMode> modes{SpeculationMode::kNone};
    if (configured == SpeculationMode::kDdtree) modes.push_back(SpeculationMode::kDflash);
    if (configured != SpeculationMode::kNone) modes.push_back(configured);
    const auto stopping = [this] {
      const std::lock_guard lock(mutex_);
      return stopping_;
    };
    for (const SpeculationMode mode : modes) {
      if (stopping()) break;
      CanaryAnswer a = ask(*serving, known.prompt, mode, options_.watch.canary_limit_seconds, stopping);
      if (stopping()) break;
      if (!a.error.empty()) {
        log::warn("the canary's first answer in mode {}: {}; it is not watched by", mode_name(mode), a.error);
        continue;
      }
      known.first.emplace_back(mode, std::move(a));
    }
  }
  const std::lock_guard lock(mutex_);
  const double now = steady();
  if (!ladder_) ladder_.emplace(configured, options_.ladder, now, wall_ms());  // after a restart it stands on that step
  known_ = std::move(known);
  for (const auto& [mode, a] : known_.first)
    if (a.stats.rounds > 0) watch_.expect(mode, static_cast<double>(a.stats.accepted) / a.stats.rounds);
  watch_.restart(now);
  serving_ = std::move(serving);
  canary_ended_ = now;
  idle_since_ = -1;
}

void Watcher::hush() {
  const std::lock_guard lock(mutex_);
  stopping_ = true;
  changed_.notify_all();
}

void Watcher::end() {
  std::thread canary;
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    serving_ = nullptr;
    queued_.clear();
    stuck_ = false;
    canary = std::move(canary_thread_);
  }
  changed_.notify_all();
  if (canary.joinable()) canary.join();
  const std::lock_guard lock(mutex_);
  stopping_ = false;
  canary_.running = false;
}

// A finding as an event, and as a move of the ladder.
void Watcher::take(const Finding& finding, double now) {
  const auto kind = static_cast<size_t>(finding.kind);
  ++faults_[kind];
  auto move = finding.kind == FaultKind::kStuckRound &&
                      (options_.watch.stuck_exit_seconds <= 0 || watch_.still_seconds(now) < options_.watch.stuck_exit_seconds)
                  ? std::nullopt  // it may still move; the ladder's answer is the end of the process
                  : ladder_->fault(finding.kind, finding.reason, now, wall_ms());
  // A fault in each of a thousand requests must not fill the history: one event in a while, and one with each move.
  if (move || told_at_[kind] == 0 || now - told_at_[kind] >= std::max(options_.ladder.settle_seconds, 1.0)) {
    told_at_[kind] = now;
    Event e;
    e.severity = Severity::kError;
    e.kind = std::string("fault.") + fault_name(finding.kind);
    e.message = finding.reason;
    e.detail = dump_json(Json{{"count", faults_[kind]}});
    events_.push_back(std::move(e));
  }
  if (move) todo_.push_back(std::move(*move)), watch_.moved();
}

void Watcher::tick(bool serving, bool busy) {
  std::unique_lock lock(mutex_);
  if (!serving_ || !ladder_) return;
  const std::shared_ptr<const Serving> held = serving_;
  const double now = steady();
  const EngineSnapshot s = held->engine->snapshot();
  const std::vector<Finding> found = watch_.observe(now, s);
  if (serving) {
    for (const Finding& f : found) take(f, now);
    for (const Finding& f : std::exchange(queued_, {})) take(f, now);
  }
  // Also while it drains: a drain would wait for ever.
  if (const double limit = options_.watch.stuck_exit_seconds, still = watch_.still_seconds(now);
      limit > 0 && still >= std::max(limit, options_.watch.stuck_seconds) && ladder_->state().rung != Rung::kExit)
    take({FaultKind::kStuckRound, fmt::format("no pass has ended for {:.0f} s", still)}, now);
  stuck_ = watch_.stuck(now);
  if (busy) idle_since_ = -1;
  else if (idle_since_ < 0) idle_since_ = now;
  if (serving && !canary_.running && !stuck_ && todo_.empty() && ladder_->state().rung != Rung::kExit) {
    const double every = options_.watch.canary_seconds, since = now - canary_ended_;
    const bool idle = idle_since_ >= 0 && now - idle_since_ >= std::min(kIdleSeconds, every);
    // Where canaries pass and the ladder still wants one, it is the settling that it waits for: not ten a second.
    const bool wanted = ladder_->wants_canary(now) || !watch_.suspicion().empty();
    if ((wanted && since >= std::min(1.0, options_.ladder.settle_seconds)) || (every > 0 && since >= (idle ? every : 4 * every)))
      start_canary(now);
  }
  std::vector<LadderMove> moves;
  std::vector<Event> events;
  moves.swap(todo_);
  events.swap(events_);
  const LadderState state = ladder_->state();
  const bool stuck = stuck_;
  lock.unlock();
  for (Event& e : events) {
    if (e.severity == Severity::kError) log::error("{}: {}", e.kind, e.message);
    else if (e.severity == Severity::kWarning) log::warn("{}: {}", e.kind, e.message);
    else log::info("{}: {}", e.kind, e.message);
    hands_.tell(std::move(e));
  }
  for (const LadderMove& m : moves) apply(m);
  Condition ladder;
  if (state.rung == Rung::kReset) ladder.words = "drafting was reset: " + state.reason;
  else if (state.rung == Rung::kDflash || state.rung == Rung::kNone)
    ladder.words = fmt::format("speculation is limited to {}: {}", state.step, state.reason);
  else if (state.rung == Rung::kDegraded) ladder = {true, "plain decoding only, and its answers are in doubt: " + state.reason};
  else if (state.rung == Rung::kRestart) ladder.words = "the engine was restarted: " + state.reason;
  hands_.condition("ladder", ladder);
  hands_.condition("stuck", stuck ? Condition{true, fmt::format("a round is stuck: no pass has ended for {:g} s or longer",
                                                                options_.watch.stuck_seconds)}
                                  : Condition());
}

void Watcher::apply(const LadderMove& m) {
  std::shared_ptr<const Serving> serving;
  SpeculationMode most;
  {
    const std::lock_guard lock(mutex_);
    serving = serving_;
    most = ladder_->state().most;
  }
  Event e;
  e.severity = !m.down() ? Severity::kInfo : m.to >= Rung::kDegraded ? Severity::kError : Severity::kWarning;
  e.kind = "ladder";
  e.message = fmt::format("{} → {}: {}", m.from_step, m.to_step, m.reason);
  e.detail = dump_json(Json{{"from", m.from_step},
                            {"to", m.to_step},
                            {"direction", m.down() ? "down" : "up"},
                            {"fault", m.fault ? Json(fault_name(*m.fault)) : Json()},
                            {"reason", m.reason}});
  log::warn("ladder: {}", e.message);
  hands_.tell(std::move(e));
  if (m.to == Rung::kExit) return hands_.give_up({Code::kEngineFault, m.reason});
  if (m.to == Rung::kRestart) return hands_.restart(m.reason);
  if (!serving) return;
  serving->engine->limit_mode(most);
  if (m.to == Rung::kReset) serving->engine->reset_drafts();
}

// With the lock.
void Watcher::start_canary(double now) {
  if (known_.prompt.empty() || known_.first.empty() || stopping_) {
    canary_ended_ = now;
    return;
  }
  const SpeculationMode most = ladder_->state().most;
  const auto known = std::find_if(known_.first.rbegin(), known_.first.rend(), [&](const auto& f) { return f.first == most; });
  const SpeculationMode mode = known == known_.first.rend() ? known_.first.front().first : most;
  if (canary_thread_.joinable()) canary_thread_.join();  // it has ended: running is false
  canary_.running = true;
  canary_thread_ = std::thread([this, serving = serving_, mode, prompt = known_.prompt, started = now] {
    const CanaryAnswer a = ask(*serving, prompt, mode, options_.watch.canary_limit_seconds, [this] {
      const std::lock_guard lock(mutex_);
      return stopping_;
    });
    finish_canary(a, mode, started);
  });
}

void Watcher::finish_canary(const CanaryAnswer& a, SpeculationMode mode, double started) {
  const double now = steady();
  std::unique_lock lock(mutex_);
  canary_.running = false;
  if (!stopping_ && ladder_) {
    const auto first = std::find_if(known_.first.begin(), known_.first.end(), [&](const auto& f) { return f.first == mode; });
    const CanaryVerdict v = judge_canary(first->second, a, options_.watch);
    const bool before = canary_.passed || !canary_.ran;
    canary_.ran = true;
    canary_.passed = v.passed && !v.acceptance_lost;
    canary_.at_ms = wall_ms();
    canary_.mode = mode;
    canary_.tokens_per_second = v.tokens_per_second;
    canary_.tokens_per_round = a.stats.rounds > 0 ? 1.0 + static_cast<double>(a.stats.accepted) / a.stats.rounds : 0;
    canary_.text = a.text;
    canary_.reason = v.reason;
    canary_ended_ = now;
    // A fault during the canary was counted by the engine, and leads down by itself; an answer that is wrong without one is the canary's.
    const bool counted = !a.error.empty();
    if (!v.passed && !counted) queued_.push_back({FaultKind::kCanary, v.reason});
    else if (v.acceptance_lost) {
      queued_.push_back({FaultKind::kAcceptance, watch_.suspicion().empty() ? v.reason : watch_.suspicion() + "; " + v.reason});
    } else if (v.passed) {
      if (!watch_.suspicion().empty()) {
        Event e;
        e.kind = "acceptance.low";
        e.message = watch_.suspicion() + "; the canary's is as ever, so it is the text";
        events_.push_back(std::move(e));
        watch_.acquit();
      }
      if (!before) {
        Event e;
        e.kind = "canary.passed";
        e.message = fmt::format("the canary passes again, {:.1f} tokens/s", v.tokens_per_second);
        events_.push_back(std::move(e));
      }
      if (auto up = ladder_->canary_passed(started, now, wall_ms())) todo_.push_back(std::move(*up)), watch_.moved();
    }
  }
  lock.unlock();
  changed_.notify_all();
}

CanaryState Watcher::canary() const {
  const std::lock_guard lock(mutex_);
  return canary_;
}

CanaryState Watcher::canary_now(double seconds, double busy_seconds) {
  std::unique_lock lock(mutex_);
  CanaryState none;
  if (!serving_ || !ladder_ || known_.prompt.empty()) return none.reason = "no canary is known: the model is not loaded", none;
  const double asked = steady();
  if (!canary_.running) {
    if (canary_.ran && asked - canary_ended_ < 1) return canary_;
    start_canary(asked);
  }
  const std::shared_ptr<const Serving> serving = serving_;
  const int64_t passes = serving->engine->snapshot().passes;
  const auto over = [&] { return !canary_.running || stopping_; };
  if (changed_.wait_for(lock, std::chrono::duration<double>(std::min(busy_seconds, seconds)), over) && !stopping_) return canary_;
  none.running = true;
  // It goes before all that wait, but takes no pages away from what runs. Where those are short and passes end, the engine is busy, which
  // is no fault; one whose last canary failed has to show that it can answer.
  const auto busy = [&] {
    const EngineSnapshot s = serving->engine->snapshot();
    if (stopping_ || (canary_.ran && !canary_.passed) || watch_.stuck(steady()) || s.passes == passes) return false;
    none.busy = true;
    none.reason = fmt::format("busy: {} requests run, {} wait, and {} passes ended in the last {:.0f} s, while the canary waited",
                              s.running, s.waiting, s.passes - passes, steady() - asked);
    return true;
  };
  if (busy()) return none;
  if (changed_.wait_for(lock, std::chrono::duration<double>(std::max(seconds - busy_seconds, 0.0)), over) && !stopping_) return canary_;
  if (!busy()) none.reason = fmt::format("the canary was not answered within {:.0f} s", seconds);
  return none;
}

void Watcher::judge(const std::shared_ptr<const Serving>& serving, ScoreRequest request, const std::string& request_id,
                    const std::string& suspicion, std::function<void(const std::string& error)> verdict) {
  const int64_t tokens = static_cast<int64_t>(request.generated.size());
  const auto sink = [this, request_id, suspicion, verdict, tokens](Score&& score) {
    Event e;
    std::string error;
    {
      const std::lock_guard lock(mutex_);
      e.severity = Severity::kWarning;
      e.detail = dump_json(Json{{"request_id", request_id}, {"tokens", tokens}});
      if (!score.error.empty()) {
        e.kind = "text.not-judged";
        e.message = fmt::format("degenerate text ({}) could not be judged: {}", suspicion, score.error);
      } else {
        const TailVerdict v = judge_tail(score, options_.watch, suspicion);
        e.kind = v.fault ? "text.wrong" : "text.own";
        e.message = v.reason;
        if (v.fault) {
          error = "the engine wrote text that the model does not stand by: " + suspicion;
          queued_.push_back({FaultKind::kWrongText, v.reason});
          e.severity = Severity::kError;
        }
      }
      events_.push_back(std::move(e));  // told by the next tick: this is the engine's thread
    }
    verdict(error);
  };
  if (const Status s = serving->engine->score(std::move(request), sink); !s.ok()) {
    Score failed;
    failed.error = s.message();
    sink(std::move(failed));
  }
}

LadderState Watcher::ladder() const {
  const std::lock_guard lock(mutex_);
  if (ladder_) return ladder_->state();
  LadderState none;
  none.step = mode_name(asked_);
  none.most = asked_;
  return none;
}

double Watcher::still_seconds() const {
  const std::lock_guard lock(mutex_);
  return serving_ ? watch_.still_seconds(steady()) : 0;
}

bool Watcher::stuck() const {
  const std::lock_guard lock(mutex_);
  return serving_ && stuck_;
}

std::vector<std::pair<std::string, int64_t>> Watcher::fault_counts() const {
  const std::lock_guard lock(mutex_);
  std::vector<std::pair<std::string, int64_t>> out;
  for (int k = 0; k <= static_cast<int>(FaultKind::kCanary); ++k) out.emplace_back(fault_name(static_cast<FaultKind>(k)), faults_[k]);
  return out;
}

}  // namespace ddtree
