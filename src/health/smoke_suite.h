// One run of the smoke suite: the state that its checks share. Inside health/ only.
#pragma once

#include <chrono>
#include <string>
#include <utility>
#include <vector>

#include "health/smoke.h"

namespace ddtree::smoke {

using Clock = std::chrono::steady_clock;
double milliseconds_since(Clock::time_point begin);

SmokeCheckResult named(const char* name, SmokeVerdict verdict, std::string message = {});

struct Suite {
  Suite(const SmokeSetup& s, const SmokeOptions& o, SmokeReport& r) : setup(s), options(o), report(r) {}

  const SmokeSetup& setup;
  const SmokeOptions& options;
  SmokeReport& report;
  Clock::time_point begin = Clock::now();
  int total = 0;
  std::vector<SmokeAnswer> plain;       // [inputs.coherent] greedy, NONE where modes can be asked for
  std::vector<std::string> not_finite;  // errors about logits that came up
  double smallest_gap = 1000;
  int asked = 0;
  // Checks done when the suite got no room beside other requests; -1: it had. What comes after says nothing.
  int no_room_after = -1;
  // Checks done when somebody stopped the suite; -1: nobody did. A check cut short is nobody's fault.
  int stopped_after = -1;
  std::string given_up;  // an answer did not end in time, or the server went away: nothing more is asked

  SmokeSubject& subject() const { return *setup.subject; }
  bool can_modes() const { return setup.subject->abilities().no_modes.empty(); }
  std::string configured() const { return setup.configured ? mode_name(*setup.configured) : ""; }
  double seconds_left() const { return options.total_seconds - milliseconds_since(begin) / 1000; }
  bool cancelled() const { return options.cancel != nullptr && options.cancel->load(); }

  SmokeQuestion question(const SmokeInput& input, std::optional<SpeculationMode> mode) const;
  SmokeAnswer ask(SmokeSubject& who, const SmokeQuestion& question, double seconds = 0);
  // Fills in what the answer tells. The verdict is a failure where the answer has trouble, else a pass.
  SmokeCheckResult check_of(const char* name, const std::string& mode, const SmokeQuestion& question, const SmokeAnswer& answer) const;
  void add(SmokeCheckResult check);
  // Why nothing more is asked; empty: it is.
  std::string silent() const { return given_up; }

  void feature_width();
  void coherent();
  void counting();
  void finite_logits();
  void equals_plain(SpeculationMode mode);
  void accounting();
  void streaming();
  void stop_string();
  void tool_call();
  void needle();
  void full_context();
  void own_prompts();
  void speed();
  void earlier_runs();

 private:
  std::string compare(size_t input, const SmokeAnswer& other, int32_t most, int* ties);
  struct Measured {
    double tokens_per_second = 0, acceptance = 0, rows = 0, milliseconds = 0;
    bool beside = false;  // other requests ran meanwhile
    std::string error;
  };
  Measured measure();
  void find_needle(const char* name, double depth, int64_t tokens, double seconds);
  int32_t plain_tokens() const;  // compared in equals-plain: few on a slow machine
  Measured speed_;
};

}  // namespace ddtree::smoke
