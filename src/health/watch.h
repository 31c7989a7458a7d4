// Looks at an engine's counters a few times a second and says what is wrong with it. Pure: it is given the time and the snapshots, and
// tests run it on a virtual clock. What is done about a finding is the ladder's business.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "health/ladder.h"

namespace ddtree {

struct WatchLimits {
  double stuck_seconds = 30;  // requests run and no pass ends: /livez is 503 and systemd hears nothing
  double stuck_exit_seconds =
      55;  // and nothing still: exit 70, before systemd's watchdog (60 s in our unit) kills without a word. 0: never
  // Accepted drafts a round over the last rounds that drafted, against what this mode accepted before.
  int64_t acceptance_rounds = 64;
  double acceptance_share = 0.2;         // of the mean before: suspicious, and the canary is asked
  double canary_acceptance_share = 0.3;  // of the canary's own first figure: the drafter is at fault, not the text
  // Passes against the costs measured at start.
  double slow_factor = 10;
  int64_t slow_passes = 20;
  double slow_seconds = 5;           // and they took at least so long
  double canary_seconds = 300;       // between canaries when idle; four times that under load. 0: only when the ladder wants one
  double canary_limit_seconds = 60;  // for its answer while nothing else moves
  float score_margin = 0.5F;         // logits: where the target's choice was closer than this, another token is no disagreement
  int64_t score_disagreements = 2;   // of the tail's tokens: this many are an engine fault
};

struct Finding {
  FaultKind kind;
  std::string reason;
};

class Watch {
 public:
  explicit Watch(WatchLimits limits = {}) : limits_(limits) {}

  // A new engine: its counters start from zero.
  void restart(double now);

  // Everything found since the last call. `now` in steady seconds.
  std::vector<Finding> observe(double now, const EngineSnapshot& snapshot);

  // Requests run and no pass has ended for so long; 0 while idle.
  double still_seconds(double now) const { return still_since_ < 0 ? 0 : now - still_since_; }
  bool stuck(double now) const { return still_seconds(now) >= limits_.stuck_seconds; }

  // Acceptance looks lost in this mode: a canary in it decides between hard text and a broken drafter. Empty: it does not.
  const std::string& suspicion() const { return suspicion_; }
  // What a mode accepts a round on text that is easy here (the canary's first figure): stands in until clients' requests have shown more.
  void expect(SpeculationMode mode, double accepted_a_round) { modes_[static_cast<size_t>(mode)].expected = accepted_a_round; }
  // A step of the ladder was taken: acceptance is looked at anew.
  void moved();
  // The canary's acceptance was as ever: the text is hard. Quiet until the acceptance of clients has recovered once.
  void acquit();

  const WatchLimits& limits() const { return limits_; }

 private:
  void acceptance(const EngineSnapshot& s);
  void speed(double now, const EngineSnapshot& s, std::vector<Finding>* found);

  struct Mode {
    int64_t rounds = 0, accepted = 0;  // counters of the last call
    double expected = 0;
    int64_t old_rounds = 0, old_accepted = 0;        // what has left the window
    int64_t window_rounds = 0, window_accepted = 0;  // the window's sums
    std::deque<std::pair<int64_t, int64_t>> window;  // (rounds, accepted) by call
  };

  const WatchLimits limits_;
  EngineSnapshot last_;
  bool seen_ = false;
  double still_since_ = -1;
  bool stuck_told_ = false, was_stuck_ = false;
  std::array<Mode, 4> modes_{};
  std::string suspicion_;
  bool acquitted_ = false;
  struct Timed {
    double at;
    int64_t passes;
    double ms, promised;
  };
  std::deque<Timed> timed_;
};

// What an answer was judged to be after its tail had been scored.
struct TailVerdict {
  bool fault = false;
  std::string reason;  // in words, with the figures
};
// `score` without an error. suspicion: what the detector said.
TailVerdict judge_tail(const Score& score, const WatchLimits& limits, const std::string& suspicion);

// One canary: a known greedy request, answered once at the start and compared with that from then on.
struct CanaryAnswer {
  std::vector<int32_t> ids;
  std::string text, error;  // error: empty where it was answered
  RequestStats stats;
};
struct CanaryVerdict {
  bool passed = false;
  bool acceptance_lost = false;  // the text is right, the drafts no longer fit
  std::string reason;            // empty where it passed
  double tokens_per_second = 0;
};
// first: of the same mode. Texts are equal up to the first near-tie of either.
CanaryVerdict judge_canary(const CanaryAnswer& first, const CanaryAnswer& now, const WatchLimits& limits);

}  // namespace ddtree
