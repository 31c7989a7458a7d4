// The history: SQLite in WAL mode, one writer thread, read-only connections for queries. Everything here is thread-safe.
//
// Writing never waits for the disk: add functions give the row its id and queue it; the writer commits what is queued at least twice a
// second. Reads see committed rows only (flush() first where that matters). A process that dies loses the rows of the last second at
// most, and never the file.
//
// When the queue is full a caller waits up to StoreOptions::full_wait_ms, then its row is dropped; trees are dropped first and without
// waiting. While the disk refuses writes (full, read-only) rows wait in the queue and callers never wait. Drops are counted in health()
// and recorded as an event "store.dropped" once writing works. "store.unwritable" and "store.writable" tell when the disk refused rows and
// when it took them again; recent_events() has them, and all other events of this process, also while the disk refuses.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/status.h"
#include "store/records.h"

namespace ddtree {

struct Migration {
  std::string name;  // "0001_history.sql": the number is the schema version it leads to
  std::string sql;
};

struct StoreOptions {
  bool store_text = false;                  // keep prompts, answers and token ids
  int32_t retain_days = 90;                 // rows older than this go; 0: never
  int64_t retain_bytes = int64_t{1} << 30;  // oldest requests go while the file is larger; 0: no limit
  int32_t tree_requests = 200;              // trees are kept of this many last requests that have any
  int32_t tree_rounds = 1024;               // of one request; further rounds are not kept
  int32_t queue_rows = 8192;                // bound of the writer's queue
  int32_t commit_ms = 250;                  // longest wait of a queued row for its commit (disk time not counted)
  int32_t full_wait_ms = 50;
  int32_t heartbeat_ms = 2000;  // how often the open run's heartbeat is written
  int32_t prune_seconds = 600;
  std::function<Status()> before_commit;  // fault injection: an error stands for a disk that refuses. Called on the writer's thread
  std::vector<Migration> migrations;      // empty: the embedded ones (tests give others)
};

// Where the store is if --db does not say: $XDG_STATE_HOME/ddtree/ddtree.db; else $STATE_DIRECTORY/ddtree.db (systemd's StateDirectory=;
// set only where the unit asks for it); else $HOME/.local/state/ddtree/ddtree.db. kUsage if none of the three is set.
Result<std::string> default_store_path();

struct StoreHealth {
  bool writable = true;                         // false: the last commit failed; rows wait
  std::string message;                          // why not
  int64_t failing_since_ms = 0;                 // when the first refused commit was; 0 while writable
  int64_t queued = 0;                           // rows waiting
  int64_t written = 0;                          // rows committed since open
  int64_t dropped_rows = 0, dropped_trees = 0;  // since open
  int64_t last_commit_ms = 0;
  int64_t file_bytes = 0;
};

// limit is capped at 1000. total counts all rows that match, whatever the page.
struct Paging {
  int32_t limit = 50;
  int64_t offset = 0;
};
template <class T>
struct Page {
  std::vector<T> rows;
  int64_t total = 0;
};

enum class RequestSort : uint8_t { kNewest, kOldest, kSlowest, kFirstToken, kTokens, kAcceptance, kSpeed, kContext };
// Empty or 0 fields do not filter.
struct RequestFilter {
  int64_t run_id = 0;
  int64_t from_ms = 0, to_ms = 0;         // received_ms in [from, to)
  std::vector<std::string> finish, mode;  // any of
  std::optional<bool> error;              // with / without one
  std::optional<bool> stream, thinking;
  std::string client;      // substring
  std::string request_id;  // exact
  // Prompt and generated tokens together, in [from, to).
  int64_t context_from = 0, context_to = 0;
  RequestSort sort = RequestSort::kNewest;
  bool reversed = false;  // the order the other way round
};

// Sums over the requests that match, for the acceptance charts.
struct RequestTotals {
  int64_t requests = 0, errors = 0, prompt_tokens = 0, completion_tokens = 0, cached_tokens = 0;
  int64_t rounds = 0, drafted = 0, accepted = 0, nodes_verified = 0, tree_gain = 0;
  int64_t decoded_tokens = 0;  // generated after the first, which comes from the prompt's pass: ÷ decode_ms is the speed
  double decode_ms = 0;
  std::vector<int64_t> accepted_at, histogram;  // as in RequestRecord
};

// Nearest-rank percentiles: p90 is the smallest value that at least 90 % of the values do not exceed. Zeros where count is 0.
struct Percentiles {
  int64_t count = 0;
  double p50 = 0, p90 = 0, p95 = 0, p99 = 0;
};
// Over the requests that match. Each figure is taken over those that have it: a first token; a duration; more than one token; rounds of
// speculation (mode not NONE).
struct RequestSummary {
  RequestTotals totals;
  Percentiles first_token_ms, total_ms, tokens_per_second, tokens_per_round;
};

// Acceptance of the requests that match and made rounds. Everything but by_mode leaves out mode NONE, which has nothing to accept.
struct AcceptanceGroup {
  std::string name;  // by_mode: the mode; by_thinking: "on", "off", "unknown"; by_context: the bound below, as text
  RequestTotals totals;
};
struct AcceptanceBreakdown {
  RequestTotals speculative;
  // by_context: tokens of prompt and answer in buckets [2^k, 2^(k+1)) from 256 on, smaller ones together; name is the upper bound
  // (not included). Groups without requests are left out.
  std::vector<AcceptanceGroup> by_mode, by_thinking, by_context;
};

struct EventFilter {
  int64_t run_id = 0, request = 0;
  int64_t from_ms = 0, to_ms = 0;
  std::string kind;  // exact, or a prefix that ends in '.'
  std::optional<Severity> at_least;
};

class Store {
 public:
  // Opens, or creates with its folder (0700; the file 0600), brings the schema up to date and starts the writer. Refuses, with the file
  // untouched and a message that says what to do: a newer schema, a corrupt file, a file that is not ours, a folder that cannot be
  // written, a store that another ddtree has open (kTemporary; the others kUnavailable). Runs left open by a crash are marked ended.
  static Result<std::unique_ptr<Store>> open(const std::string& path, StoreOptions options = {});
  // A disk that is full, read-only or failing is kStorage: the same call may work later.
  // Read-only, beside a server that has it open: add functions drop and count. Refuses another schema version than this program's.
  static Result<std::unique_ptr<Store>> open_read_only(const std::string& path, StoreOptions options = {});
  virtual ~Store() = default;  // commits what is queued

  virtual const std::string& path() const = 0;
  virtual const StoreOptions& options() const = 0;
  virtual StoreHealth health() const = 0;
  // Commits what was queued before the call; kTemporary with the cause if that takes longer than the time given.
  virtual Status flush(double seconds = 5) = 0;

  // --- writing: all return the new row's id at once -----------------------------------------------------------------------------
  virtual int64_t begin_run(ServiceRun run) = 0;  // started_ms 0: now. Rows added with run_id 0 afterwards belong to this run
  virtual void set_run_ready(int64_t run_id, int64_t at_ms, const std::string& smoke) = 0;  // smoke: "pass", "skipped"
  // What only loading tells. Empty mode and drafter leave what begin_run() said.
  virtual void set_run_details(int64_t run_id, const std::string& devices, const std::string& plan, const std::string& mode = {},
                               const std::string& drafter = {}) = 0;
  virtual void end_run(int64_t run_id, const std::string& reason, int32_t exit_code) = 0;  // and flushes
  virtual int64_t add_phase(ServicePhase phase) = 0;
  virtual int64_t add_request(RequestRecord request, std::vector<RoundTree> trees = {}) = 0;
  virtual int64_t add_smoke_run(SmokeRun run) = 0;  // with its checks
  virtual int64_t add_event(Event event) = 0;
  // The last events (64) that this process added, newest first, written or not.
  virtual std::vector<Event> recent_events() const = 0;
  virtual int64_t add_calibration(Calibration calibration) = 0;
  virtual void put_metric_minute(MetricMinute minute) = 0;  // replaces the row of the same minute and run

  // --- reading ------------------------------------------------------------------------------------------------------------------
  virtual Result<Page<ServiceRun>> runs(Paging paging) = 0;  // newest first
  virtual Result<std::optional<ServiceRun>> run(int64_t run_id) = 0;
  virtual Result<std::vector<ServicePhase>> phases(int64_t run_id) = 0;  // in order
  virtual Result<Page<RequestRecord>> requests(const RequestFilter& filter, Paging paging) = 0;
  virtual Result<std::optional<RequestRecord>> request(int64_t id) = 0;
  // For exports, which pages would read again and again: all ids that match, in the filter's order, then the rows of up to 1,000 of them,
  // in the order given; those that retention has taken meanwhile are left out. No snapshot is held between the two.
  virtual Result<std::vector<int64_t>> request_ids(const RequestFilter& filter) = 0;
  virtual Result<std::vector<RequestRecord>> requests_of(const std::vector<int64_t>& ids) = 0;
  virtual Result<RequestTotals> request_totals(const RequestFilter& filter) = 0;
  virtual Result<RequestSummary> request_summary(const RequestFilter& filter) = 0;
  virtual Result<AcceptanceBreakdown> acceptance(const RequestFilter& filter) = 0;
  virtual Result<Page<RoundTree>> trees(int64_t request, Paging paging) = 0;  // by round
  // Newest first, with their checks. run_id 0: of all runs and of none.
  virtual Result<Page<SmokeRun>> smoke_runs(Paging paging, int64_t run_id = 0) = 0;
  virtual Result<std::optional<SmokeRun>> smoke_run(int64_t id) = 0;
  virtual Result<Page<Event>> events(const EventFilter& filter, Paging paging) = 0;  // newest first
  virtual Result<std::optional<Calibration>> latest_calibration(const std::string& machine, const std::string& name) = 0;
  virtual Result<std::vector<MetricMinute>> metric_minutes(int64_t from_ms, int64_t to_ms) = 0;  // by time, at most 10,080 (a week)
};

}  // namespace ddtree
