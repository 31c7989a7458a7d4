// The smoke suite: does this engine, with this model, write sensible text, and is speculation's text the plain one's? Runs before the
// server is ready, on demand from the dashboard (beside live requests), and as `ddtree smoke`.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "base/status.h"
#include "engine/engine.h"
#include "store/records.h"

namespace ddtree {

enum class SmokeVerdict : uint8_t { kPass, kFail, kSkip };
const char* smoke_verdict_name(SmokeVerdict verdict);  // "pass", "fail", "skip"

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
      SmokeVerdict::kFail;  // kSkip: the suite did not run (--skip-smoke), or not to its end (stopped, no room); message says so
  std::string message;      // one sentence; the first failure
  std::string trigger;      // "start", "dashboard", "command"
  int64_t started_ms = 0, finished_ms = 0;  // since 1970 UTC
  double tokens_per_second = 0;             // decoding, configured mode
  double acceptance = 0;                    // mean tokens a round, configured mode
  std::vector<SmokeCheckResult> checks;
};

struct SmokeInput {
  std::string id;      // stable over versions: histories are compared by it
  std::string user;    // the user's message
  std::string expect;  // must be in the answer; empty: plain coherence rules only
  int32_t max_tokens = 64;
};
// For any chat model; and, for the embedded pair, prompts whose answers are known.
std::vector<SmokeInput> generic_smoke_inputs();
std::vector<SmokeInput> embedded_smoke_inputs();

// What is tested. References outlive the run.
struct SmokeSubject {
  Engine* engine = nullptr;
  // The user's message through the chat template (thinking off where the template can) and the tokenizer.
  std::function<Result<std::vector<int32_t>>(const std::string& user)> encode;
  std::vector<SpeculationMode> modes;  // that the loaded pair can run, beside NONE; smoke_modes() says which
  std::vector<SmokeInput> inputs;
  // Width of the features that the target hands to the drafter (taps × hidden), and of the drafter's fc input. 0: no drafter.
  int64_t feature_width = 0, fc_input_width = 0;
};

struct SmokeOptions {
  std::string trigger = "start";
  double answer_seconds = 120;                // time limit of one generation
  double total_seconds = 600;                 // of the suite; checks past it fail with that reason
  const std::atomic<bool>* cancel = nullptr;  // set from elsewhere (SIGTERM): the suite is a skip that says so
  std::function<void(const SmokeCheckResult&, int done, int total)> progress;  // after each check
};

// DFLASH and DDTREE with a drafter, NEXTN with an MTP head.
std::vector<SpeculationMode> smoke_modes(bool has_drafter, bool has_mtp);

// Never throws, always returns a report. Takes one request at a time through Engine::submit(); while the queue is full it waits, and a
// suite that gets no room within answer_seconds is a skip, not a failure.
SmokeReport run_smoke(const SmokeSubject& subject, const SmokeOptions& options = {});
// The report of a suite that was not run.
SmokeReport skipped_smoke(const std::string& trigger, const std::string& why = "smoke test skipped (--skip-smoke)");

// Name and one line of each check, in order.
struct SmokeCheckInfo {
  const char* name;
  const char* what;
};
std::vector<SmokeCheckInfo> smoke_check_list();

// The report as a row of the store with its checks; the caller sets model, drafter and run_id.
SmokeRun smoke_record(const SmokeReport& report);

}  // namespace ddtree
