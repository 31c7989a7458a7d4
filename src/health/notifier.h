// What systemd is told and when: STATUS= in words, READY=1 once clients are served and never before, EXTEND_TIMEOUT_USEC while loading
// gets on, WATCHDOG=1 while the service is idle or progressing and never while a round is stuck. Pure: given the time, it says what to
// send.
#pragma once

#include <cstdint>
#include <string>

#include "health/phases.h"

namespace ddtree {

class Notifier {
 public:
  struct Options {
    double watchdog_seconds = 0;  // WATCHDOG_USEC; 0: systemd does not ask for pings
    double extend_every = 5;      // between two extensions of the start-up or stop timeout
    double extend_by = 30;        // what each asks for, from then on
    double still_after = 15;      // without work while loading: nothing is extended any more
    double longest_phase = 3600;  // a phase that works so long without getting further is not extended for ever
    double drain_seconds = 30;    // what a stop may take
  };
  struct Input {
    PhaseState phase;
    bool alive = true;  // as /livez
    int64_t work = 0;   // anything that grows while the process works: CPU time, bytes read, page faults
  };
  explicit Notifier(Options options) : options_(options) {}
  // WATCHDOG_USEC of the environment in seconds, where WATCHDOG_PID is this process or not set; else 0.
  static double watchdog_of_environment();
  // Of this process.
  static int64_t work_so_far();

  // Lines for one datagram; empty: nothing now. Call a few times a second, and whenever a phase was entered.
  std::string tick(double now, const Input& input);

 private:
  const Options options_;
  bool begun_ = false, ready_ = false, stopping_ = false;
  std::string told_;
  uint64_t sequence_ = 0;
  double progress_ = -2;
  int64_t work_ = 0;
  double worked_at_ = 0, moved_at_ = 0, extended_at_ = -1e9, pinged_at_ = -1e9;
};

}  // namespace ddtree
