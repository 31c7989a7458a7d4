#include "health/watch.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>

#include "health/degeneracy.h"

namespace ddtree {
namespace {

constexpr double kWorthWatching = 0.5;  // accepted drafts a round: where fewer were accepted anyway, nothing can be lost
constexpr int64_t kLongMemory = 2000;   // rounds that the mean before remembers

}  // namespace

void Watch::restart(double now) {
  last_ = EngineSnapshot();
  seen_ = true;
  still_since_ = -1;
  stuck_told_ = false;
  for (Mode& m : modes_) {
    const double expected = m.expected;
    m = Mode();
    m.expected = expected;
  }
  suspicion_.clear();
  acquitted_ = false;
  timed_.clear();
  timed_.push_back({now, 0, 0, 0});
}

std::vector<Finding> Watch::observe(double now, const EngineSnapshot& s) {
  std::vector<Finding> found;
  if (!seen_ || s.passes < last_.passes) restart(now);
  const bool busy = s.running + s.waiting > 0;
  if (!busy) still_since_ = -1;
  else if (s.passes != last_.passes || still_since_ < 0) still_since_ = now;
  if (!stuck(now)) stuck_told_ = false;
  else if (!stuck_told_) {
    stuck_told_ = true;
    found.push_back({FaultKind::kStuckRound, fmt::format("{} requests run and {} wait, and no pass has ended for {:.0f} s", s.running,
                                                         s.waiting, still_seconds(now))});
  }
  if (const int64_t n = s.nan_faults - last_.nan_faults; n > 0)
    found.push_back(
        {FaultKind::kNanLogits, fmt::format("{} request{} ended by logits that are not finite: {}", n, n > 1 ? "s" : "", s.nan_message)});
  if (!s.gone.empty()) {
    if (last_.gone.empty()) found.push_back({FaultKind::kRankLost, s.gone});
  } else if (s.lost_passes > last_.lost_passes) {
    const FaultKind kind = s.lost_code == Code::kUnavailable  ? FaultKind::kDeviceLost
                           : s.lost_code == Code::kDoesNotFit ? FaultKind::kOutOfMemory
                                                              : FaultKind::kPassFailed;
    found.push_back({kind, fmt::format("a pass was lost: {}", s.lost_message)});
  }
  acceptance(s);
  speed(now, s, &found);
  last_ = s;
  return found;
}

void Watch::acceptance(const EngineSnapshot& s) {
  suspicion_.clear();
  for (size_t m = 0; m < modes_.size(); ++m) {
    Mode& mode = modes_[m];
    const int64_t rounds = s.draft_rounds[m] - mode.rounds, accepted = s.draft_accepted[m] - mode.accepted;
    mode.rounds = s.draft_rounds[m], mode.accepted = s.draft_accepted[m];
    if (rounds > 0) {
      mode.window.emplace_back(rounds, accepted);
      mode.window_rounds += rounds, mode.window_accepted += accepted;
    }
    while (!mode.window.empty() && mode.window_rounds - mode.window.front().first >= limits_.acceptance_rounds) {
      const auto [r, a] = mode.window.front();
      mode.window.pop_front();
      mode.window_rounds -= r, mode.window_accepted -= a;
      mode.old_rounds += r, mode.old_accepted += a;
      if (mode.old_rounds > kLongMemory) mode.old_rounds /= 2, mode.old_accepted /= 2;
    }
    if (mode.window_rounds < limits_.acceptance_rounds) continue;
    const double before = mode.old_rounds >= limits_.acceptance_rounds
                              ? static_cast<double>(mode.old_accepted) / static_cast<double>(mode.old_rounds)
                              : mode.expected;
    const double lately = static_cast<double>(mode.window_accepted) / static_cast<double>(mode.window_rounds);
    const bool lost = before >= kWorthWatching && lately < limits_.acceptance_share * before;
    if (!lost) {
      if (rounds > 0) acquitted_ = false;
      continue;
    }
    if (!acquitted_)
      suspicion_ = fmt::format("{}: {:.2f} drafted tokens accepted a round over the last {}, {:.2f} before",
                               mode_name(static_cast<SpeculationMode>(m)), lately, mode.window_rounds, before);
  }
}

void Watch::moved() {
  suspicion_.clear();
  acquitted_ = false;
  for (Mode& mode : modes_) {
    mode.window.clear();
    mode.window_rounds = mode.window_accepted = 0;
  }
}

void Watch::acquit() {
  acquitted_ = true;
  suspicion_.clear();
}

void Watch::speed(double now, const EngineSnapshot& s, std::vector<Finding>* found) {
  // A pass that was stuck has its own finding and would make its neighbours look slow for minutes: the measure begins anew behind it.
  if (stuck_told_ || was_stuck_) {
    was_stuck_ = stuck_told_;
    timed_.assign(1, {now, s.timed_passes, s.pass_ms, s.promised_ms});
    return;
  }
  if (timed_.empty() || s.timed_passes > timed_.back().passes) timed_.push_back({now, s.timed_passes, s.pass_ms, s.promised_ms});
  // The shortest stretch that is long enough, in passes and in the time that they took.
  const auto long_enough = [&](const Timed& from) {
    return s.timed_passes - from.passes >= limits_.slow_passes && s.pass_ms - from.ms >= limits_.slow_seconds * 1e3;
  };
  while (timed_.size() > 1 && long_enough(timed_[1])) timed_.pop_front();
  const Timed& from = timed_.front();
  if (!long_enough(from)) return;
  const double took = s.pass_ms - from.ms, promised = s.promised_ms - from.promised;
  if (promised <= 0 || took < limits_.slow_factor * promised) return;
  const auto passes = static_cast<double>(s.timed_passes - from.passes);
  found->push_back({FaultKind::kSpeed, fmt::format("passes take {:.1f} ms where the measured costs promise {:.1f} ms, over the last {:.0f}",
                                                   took / passes, promised / passes, passes)});
  timed_.clear();
  timed_.push_back({now, s.timed_passes, s.pass_ms, s.promised_ms});
}

TailVerdict judge_tail(const Score& score, const WatchLimits& limits, const std::string& suspicion) {
  int64_t against = 0;
  double log_prob = 0;
  for (const ScoredToken& t : score.tokens) {
    against += !t.agrees(limits.score_margin);
    log_prob += t.log_prob;
  }
  const auto count = static_cast<int64_t>(score.tokens.size());
  TailVerdict v;
  v.fault = against >= limits.score_disagreements;
  const std::string figures = fmt::format("{} of its last {} tokens, mean log-probability {:.2f}", against, count,
                                          count > 0 ? log_prob / static_cast<double>(count) : 0.0);
  v.reason =
      v.fault
          ? fmt::format("degenerate text ({}) that the target does not stand by: it would have chosen otherwise at {}", suspicion, figures)
          : fmt::format("degenerate text ({}) that is the model's own: the target would have chosen otherwise at {}", suspicion, figures);
  return v;
}

CanaryVerdict judge_canary(const CanaryAnswer& first, const CanaryAnswer& now, const WatchLimits& limits) {
  CanaryVerdict v;
  if (now.stats.decode_ms > 0) v.tokens_per_second = (now.stats.completion_tokens - 1) * 1000.0 / now.stats.decode_ms;
  if (!now.error.empty()) return v.reason = "the canary was not answered: " + now.error, v;
  const auto tie = [](const CanaryAnswer& a) {
    return a.stats.first_near_tie >= 0 ? static_cast<size_t>(a.stats.first_near_tie) : SIZE_MAX;
  };
  const size_t same = std::min({tie(first), tie(now), std::max(first.ids.size(), now.ids.size())});
  for (size_t i = 0; i < same; ++i) {
    const int32_t a = i < first.ids.size() ? first.ids[i] : -1, b = i < now.ids.size() ? now.ids[i] : -1;
    if (a == b) continue;
    return v.reason = fmt::format("the canary is answered otherwise than at the start from token {} on: '{}', at the start '{}'", i,
                                  now.text.substr(0, 80), first.text.substr(0, 80)),
           v;
  }
  if (std::string bad = incoherence(now.text, now.ids); !bad.empty() && incoherence(first.text, first.ids).empty())
    return v.reason = "the canary's answer is not coherent: " + bad, v;
  v.passed = true;
  if (first.stats.rounds > 0 && now.stats.rounds > 0 && first.stats.mode == now.stats.mode && first.stats.mode != SpeculationMode::kNone) {
    const double before = static_cast<double>(first.stats.accepted) / first.stats.rounds;
    const double lately = static_cast<double>(now.stats.accepted) / now.stats.rounds;
    if (before >= kWorthWatching && lately < limits.canary_acceptance_share * before) {
      v.acceptance_lost = true;
      v.reason = fmt::format("{:.2f} drafted tokens of the canary accepted a round, {:.2f} at the start", lately, before);
    }
  }
  return v;
}

}  // namespace ddtree
