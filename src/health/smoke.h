// The smoke suite: does this engine, with this model, write sensible text, and is speculation's text the plain one's? Runs before the
// server is ready, on demand from the dashboard (beside live requests), as `ddtree smoke` on an engine of its own or on any
// OpenAI-compatible server (--url), and after an upgrade.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "health/smoke_history.h"
#include "health/smoke_inputs.h"
#include "health/subject.h"
#include "store/records.h"

namespace ddtree {

enum class SmokeVerdict : uint8_t {
  kPass,
  kFail,  // blocks readiness
  kSkip,  // does not apply, or was not asked; the message says why
  kWarn,  // worth knowing, no reason to refuse service
};
const char* smoke_verdict_name(SmokeVerdict verdict);  // "pass", "fail", "skip", "warn"

struct SmokeCheckResult {
  std::string name;  // "coherent", "equals-plain", …: smoke_check_list()
  std::string mode;  // "DDTREE"; empty where it does not apply
  SmokeVerdict verdict = SmokeVerdict::kFail;
  std::string input_id;  // SmokeInput::id
  std::string output;    // text that the model wrote, cut at 2,000 bytes
  double figure = 0;
  std::string unit;  // "tokens/s", "tokens a round", …; empty: no figure
  double milliseconds = 0;
  std::string message;
};

struct SmokeReport {
  SmokeVerdict verdict =
      SmokeVerdict::kFail;   // kSkip: the suite did not run (--skip-smoke), or not to its end (stopped, no room); message says so
  std::string message;       // one sentence; the first failure
  std::string warning;       // passed, but worse than this machine's earlier runs: with figures; the service is degraded then
  bool unreachable = false;  // nobody answered at the very first question: not there, or not ready yet
  std::string trigger;       // "start", "upgrade", "dashboard", "command"
  int64_t started_ms = 0, finished_ms = 0;  // since 1970 UTC
  double tokens_per_second = 0;             // decoding, configured mode; 0: not measured, or beside other requests
  double acceptance = 0;                    // mean tokens a round, configured mode; 0: not known
  std::string mode;                         // configured; "": not known
  SmokeBaseline before;                     // what it was compared with
  std::vector<SmokeCheckResult> checks;
};

// What is tested. References outlive the run.
struct SmokeSetup {
  SmokeSubject* subject = nullptr;
  SmokeSubject* api = nullptr;  // the same model through the API's routes: framing and tool calls; null: not there; may be `subject`
  SmokeInputs inputs;
  std::vector<SmokePrompt> prompts;           // the user's own
  std::optional<SpeculationMode> configured;  // unset: not known (another server)
  int32_t budget = 0;                         // configured: 0 = auto
  // Width of the features that the target hands to the drafter (taps × hidden), and of the drafter's fc input. 0: no drafter.
  int64_t feature_width = 0, fc_input_width = 0;
  std::string no_widths;                // why they cannot be seen; empty: they can
  std::string no_tools;                 // why no tool can be offered; empty: one can
  std::optional<EngineSnapshot> costs;  // of passes, as measured at the start; unset: not measured
  SmokeBaseline before;                 // earlier runs on this machine
};

struct SmokeOptions {
  std::string trigger = "start";
  double answer_seconds = 120;                // time limit of one generation
  double total_seconds = 600;                 // of the suite; checks past it fail with that reason
  bool fill_context = false;                  // --long
  double fill_seconds = 1800;                 // time limit of one answer to a full context
  double least_tokens_per_second = 1;         // where no measured costs promise more
  SmokeThresholds thresholds;                 // of the comparison with earlier runs
  const std::atomic<bool>* cancel = nullptr;  // set from elsewhere (SIGTERM): the suite is a skip that says so
  std::function<void(const SmokeCheckResult&, int done, int total)> progress;  // after each check
};

// Never throws, always returns a report. Takes one request at a time; a suite that gets no room beside other requests is a skip, not a
// failure.
SmokeReport run_smoke(const SmokeSetup& setup, const SmokeOptions& options = {});
// The report of a suite that was not run.
SmokeReport skipped_smoke(const std::string& trigger, const std::string& why = "smoke test skipped (--skip-smoke)");

// Name and one line of each check, in order.
struct SmokeCheckInfo {
  const char* name;
  const char* what;
};
std::vector<SmokeCheckInfo> smoke_check_list();

// What the measured costs promise one request alone, in tokens/s: rounds of `rows` rows that commit `tokens_per_round` each, drafted or
// not. 0: the costs are not known.
double promised_speed(const EngineSnapshot& costs, double tokens_per_round, double rows, bool drafted);

// The report as a row of the store with its checks; the caller sets model, drafter, subject and run_id.
SmokeRun smoke_record(const SmokeReport& report);

}  // namespace ddtree
