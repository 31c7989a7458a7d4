// The rows of the history, as plain structs. Times are milliseconds since 1970 UTC; 0 means "not yet" or "not known". Ids are given
// by Store's add functions; a struct that goes in has id 0. Columns of JSON hold the caller's text: the store does not read them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace ddtree {

// One life of the server process.
struct ServiceRun {
  int64_t id = 0;
  std::string version, host;
  std::string model, drafter;  // paths or names as given; drafter empty: none
  std::string mode;            // configured speculation: "NONE", "DFLASH", "DDTREE", "NEXTN"
  std::string devices;         // JSON: what it runs on
  std::string flags;           // JSON: the command line as understood
  std::string plan;            // JSON: the memory plan
  int64_t pid = 0;
  int64_t started_ms = 0;
  int64_t ready_ms = 0;              // first time ready
  int64_t heartbeat_ms = 0;          // last time the writer thread was seen alive; the store keeps it
  int64_t ended_ms = 0;              // 0: running (or not yet found dead)
  std::string end_reason;            // "asked to stop", "failed: …", or kEndedWithoutNotice
  int32_t exit_code = -1;            // -1: not known
  std::string smoke;                 // verdict of the start-up smoke run: "pass", "fail", "skipped", or "" before it ran
  int64_t requests = 0, errors = 0;  // filled by reads only: rows of this run; those with an error
};
// end_reason of a run whose process vanished (kill -9, power): found at the next open; ended_ms is then its last heartbeat.
inline constexpr const char* kEndedWithoutNotice = "ended without notice";

// A phase that a run entered. It lasts until the run's next phase.
struct ServicePhase {
  int64_t id = 0, run_id = 0;
  int64_t at_ms = 0;
  std::string phase;      // health/phases.h: "starting" … "failed"
  std::string reason;     // in words; may be empty
  int64_t lasted_ms = 0;  // filled by reads: until the next phase; for the last one until the run's end, or now
};

// One finished request. Counts are those of RequestStats (engine/request.h).
struct RequestRecord {
  int64_t id = 0, run_id = 0;
  std::string request_id;  // as in the reply ("chatcmpl-…")
  std::string endpoint;    // "/v1/chat/completions"
  std::string client;      // user agent or address, the server's choice
  std::string model;
  int64_t received_ms = 0, finished_ms = 0;
  bool stream = false;
  int32_t thinking = -1;  // 1 on, 0 off, -1 not known
  int32_t http_status = 200;
  std::string finish;  // "stop", "length", "tool_calls", "cancelled", "error"
  std::string error;   // message; empty: none
  std::string mode;    // mode that ran
  int32_t budget = 0;  // 0 with DDTREE: auto
  float temperature = 0;
  int32_t prompt_tokens = 0, completion_tokens = 0, cached_tokens = 0, reasoning_tokens = 0;
  int64_t rounds = 0, drafted = 0, accepted = 0;
  int64_t nodes_verified = 0;        // roots not counted
  std::vector<int32_t> accepted_at;  // [depth] rounds that accepted at least i + 1 draft tokens
  std::vector<int32_t> histogram;    // [depth + 1] rounds by accepted count
  int64_t tree_gain = 0;
  int32_t shadow_disagreements = 0, near_ties = 0;
  float smallest_gap = 0;
  double queue_ms = 0, prefill_ms = 0, decode_ms = 0, first_token_ms = 0, total_ms = 0;
  double tokens_per_second = 0;          // decode
  std::string prompt_text, answer_text;  // dropped on the way in unless StoreOptions::store_text
  int32_t trees = 0;                     // filled by reads: rounds of this request that are kept as RoundTree
};

// One round's draft tree. Without StoreOptions::store_text token ids are dropped on the way in, since they are the answer's text in
// another spelling: `token` is then empty and next is -1; shape, log-probs and what was accepted stay.
struct RoundTree {
  int32_t round = 0;              // from 0
  int32_t start = 0;              // absolute position of the root
  int32_t next = -1;              // the target's token after the accepted path
  std::vector<int32_t> token;     // [nodes + 1], or empty
  std::vector<int32_t> parent;    // [nodes + 1], -1 for the root, parents before children
  std::vector<float> log_prob;    // [nodes + 1] path log-prob
  std::vector<uint8_t> accepted;  // [nodes + 1]
  float draft_ms = 0, verify_ms = 0, total_ms = 0;
};

struct SmokeCheck {
  int64_t id = 0, smoke_id = 0;
  int32_t position = 0;    // order within the run
  std::string name, mode;  // mode empty where it does not apply
  std::string verdict;     // "pass", "fail", "skip", "warn" (worth knowing, no reason to refuse service)
  std::string input_id;    // which fixed prompt; empty: none
  std::string output;      // what the model wrote (to our own prompt: kept without store_text too)
  double figure = 0;
  std::string unit;  // of figure; empty: no figure
  double ms = 0;
  std::string message;
};

struct SmokeRun {
  int64_t id = 0, run_id = 0;  // run_id 0: not inside a server (`ddtree smoke`)
  int64_t started_ms = 0, finished_ms = 0;
  std::string trigger;  // "start", "upgrade" (a start, the first of another version), "dashboard", "command"
  std::string verdict;  // "pass", "fail", "skipped"
  std::string version, model, drafter;
  std::string subject;           // "": an engine in this program; else the URL of the server that was asked
  std::string mode;              // configured speculation; "" where it is not known
  std::string previous_version;  // trigger "upgrade": the version that ran before
  std::string message;           // one sentence: why it failed or was skipped
  double tokens_per_second = 0;  // decode, configured mode
  double acceptance = 0;         // mean tokens a round, configured mode
  std::string warning;           // verdict "pass" all the same: slower than before, or something lost that worked before
  // Medians of the earlier runs that it was compared with; 0 runs: there were none to compare with.
  int32_t before_runs = 0;
  double before_tokens_per_second = 0, before_acceptance = 0;
  std::vector<SmokeCheck> checks;
};

enum class Severity : uint8_t { kInfo, kWarning, kError };
const char* severity_name(Severity severity);  // "info", "warning", "error"

struct Event {
  int64_t id = 0, run_id = 0;
  int64_t at_ms = 0;  // 0 on the way in: now
  Severity severity = Severity::kInfo;
  std::string kind;     // a name of dots and dashes: "store.dropped", "speculation.fallback"
  std::string message;  // for people
  int64_t request = 0;  // RequestRecord::id, or 0
  std::string detail;   // JSON, or empty
};

// A measurement kept across starts, by machine and name (round costs, acceptance tables, normal speed).
struct Calibration {
  int64_t id = 0, run_id = 0, at_ms = 0;
  std::string machine;  // key: device and model
  std::string name;
  std::string value;  // JSON
};

// One minute of serving; sums unless said otherwise.
struct MetricMinute {
  int64_t minute_ms = 0;  // start of the minute; key together with run_id
  int64_t run_id = 0;
  int64_t requests = 0, errors = 0;  // finished in this minute
  int64_t prompt_tokens = 0, completion_tokens = 0, cached_tokens = 0;
  int64_t rounds = 0, drafted = 0, accepted = 0;
  double prefill_tps = 0, decode_tps = 0;  // mean while active; 0 when idle
  double first_token_ms_p50 = 0, first_token_ms_p95 = 0;
  int32_t running_max = 0, waiting_max = 0;
  int32_t pages_used_max = 0, pages_total = 0, slots_used_max = 0, slots_total = 0;
  double rss_mib = 0;  // at the end of the minute
};

}  // namespace ddtree
