// The running service under watch: engine counters, streams' text, canaries; what is found goes down the ladder and is told in the history.
// The rules are health/watch.h and health/ladder.h; this is their hands.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "health/ladder.h"
#include "health/watch.h"
#include "server/service.h"
#include "store/records.h"

namespace ddtree {

// The last canary.
struct CanaryState {
  bool ran = false, passed = false, running = false;
  bool busy = false;  // canary_now() alone: not answered yet, and the engine gets on with others' requests
  int64_t at_ms = 0;  // when it ended
  SpeculationMode mode{};
  double tokens_per_second = 0, tokens_per_round = 0;
  std::string text, reason;
};

class Watcher {
 public:
  struct Hands {
    std::function<void(Event)> tell;                                    // into the history
    std::function<void(const std::string& name, Condition)> condition;  // what /health and the phase say
    std::function<void(const std::string& reason)> restart;             // the engine, on a thread of its own
    std::function<void(const Status& why)> give_up;                     // exit 70
  };
  Watcher(const ServiceOptions& options, Hands hands);
  ~Watcher();

  // The engine has passed the smoke test: learns the canary's first answers (one a mode; blocks for as long as they take) and begins.
  void begin(std::shared_ptr<const Serving> serving);
  // The service drains: no canary any more, and none that runs or waits goes on (an engine that takes no new requests would keep it
  // waiting).
  void hush();
  // The engine goes: nothing of it is used any more when this returns.
  void end();

  // A few times a second. serving: whether the phase is one in which clients are served.
  void tick(bool serving, bool busy);

  // Runs a canary now (one that runs already, or ended within a second, is shared) and waits for at most `seconds`. From busy_seconds on
  // it is enough that passes end: `busy` then, unless the last canary failed.
  CanaryState canary_now(double seconds, double busy_seconds);
  CanaryState canary() const;

  // A stream's text is suspicious: scores its tail in a plain pass, tells the history, and calls back (on any thread) with what to tell the
  // client, empty where the text is the model's own or could not be judged.
  void judge(const std::shared_ptr<const Serving>& serving, ScoreRequest request, const std::string& request_id,
             const std::string& suspicion, std::function<void(const std::string& error)> verdict);

  LadderState ladder() const;
  double still_seconds() const;  // requests run and no pass has ended for so long
  bool stuck() const;
  std::vector<std::pair<std::string, int64_t>> fault_counts() const;  // by kind, since the start

 private:
  struct Canary {
    std::vector<int32_t> prompt;
    std::vector<std::pair<SpeculationMode, CanaryAnswer>> first;
  };
  void take(const Finding& finding, double now);
  void apply(const LadderMove& move);
  void start_canary(double now);
  void finish_canary(const CanaryAnswer& answer, SpeculationMode mode, double started);
  static CanaryAnswer ask(const Serving& serving, const std::vector<int32_t>& prompt, SpeculationMode mode, double limit_seconds,
                          const std::function<bool()>& stopping);

  const ServiceOptions& options_;
  const SpeculationMode asked_;  // of the options, which loading settles while others look
  const Hands hands_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::shared_ptr<const Serving> serving_;  // null: nothing is watched
  Watch watch_;
  std::optional<Ladder> ladder_;
  Canary known_;
  CanaryState canary_;
  double canary_ended_ = 0, idle_since_ = -1;  // steady seconds
  bool stopping_ = false;
  std::thread canary_thread_;
  std::vector<Finding> queued_;  // found elsewhere than in the counters
  double told_at_[16] = {};      // by kind: when its last event was written
  int64_t faults_[16] = {};
  std::vector<LadderMove> todo_;  // moves to carry out without the lock
  std::vector<Event> events_;
  bool stuck_ = false;
};

}  // namespace ddtree
