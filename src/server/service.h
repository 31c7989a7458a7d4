// One running service: the loaded pair, its engine, text side, store and phases; what every route asks.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"
#include "engine/engine.h"
#include "health/degeneracy.h"
#include "health/ladder.h"
#include "health/smoke_history.h"
#include "health/watch.h"
#include "model/spec.h"

namespace ddtree {

class ChatTemplate;
class Executor;
struct MemoryPlan;    // engine/plan.h
class HistoryKeeper;  // server/history_keeper.h
class PhaseMachine;   // health/phases.h
class Store;          // store/store.h
class Tokenizer;
class Watcher;  // server/watcher.h

inline constexpr int32_t kMostRanks = 64;

struct ServiceOptions {
  std::string model_path;                  // empty: the embedded pair
  std::string draft_path;                  // empty: none (the embedded pair brings its own)
  std::string model_config, draft_config;  // --load-format dummy: a pair of these shapes without its files
  std::vector<std::string> served_names;   // the first is what replies say; all are accepted. Empty: model_path, or "tiny"
  EngineOptions engine;
  bool mode_given = false;  // --speculative-algorithm was on the command line
  int32_t page_size = 32;
  int32_t pages = 0;                  // 0: as many as fit, at most max_running × context length
  double mem_fraction = 0;            // of the device's memory that all this server takes may come to; 0: kDefaultFraction
  int threads = 0;                    // 0: all cores
  int cuda_device = -1;               // -1: the CPU engine
  int32_t tp_size = 1;                // ranks that share the target; more than 1 on the CPU only, in this process
  bool no_graphs = false;             // passes are launched kernel by kernel, not recorded as CUDA graphs
  std::string reasoning_parser;       // "": by the template; "none": off
  std::string tool_parser;            // "": qwen3_coder; "none": off
  bool always_include_usage = false;  // streams end with a usage chunk even where the request did not ask for one
  bool skip_smoke = false;
  std::string smoke_prompts_path;           // the user's own prompts beside the built-in ones; empty: none
  SmokeThresholds smoke_thresholds;         // how much worse than earlier runs is worth a warning
  bool store_text = false;                  // keep prompt and answer text in the store
  double comment_seconds = 10;              // a stream without news writes `: keep-alive` this often
  int32_t recent_trees = 64;                // finished requests whose draft trees are kept for the dashboard
  std::string db_path;                      // empty: the user's state folder
  int32_t retain_days = 90;                 // history older than this goes; 0: never
  int64_t retain_bytes = int64_t{1} << 30;  // oldest requests go while the history is larger; 0: no limit
  std::string chat_template_path;           // empty: the checkpoint's own
  double drain_seconds = 30;
  WatchLimits watch;
  Ladder::Limits ladder;
  DegeneracyDetector::Limits degeneracy;  // run 0: texts are not watched
  // What stands between engine and executor, and before the history's commits: faults on demand in the tests' executable. Null: nothing.
  std::function<std::unique_ptr<Executor>(std::unique_ptr<Executor>)> wrap_executor;
  std::function<Status()> before_store_commit;
  std::vector<std::pair<std::string, std::string>> flags;  // as given, for the service's history
};

// What the loaded model is, for /v1/models, /version and the dashboard.
struct ModelInfo {
  std::string name;  // first served name
  std::vector<std::string> names;
  std::string path;  // "embedded:tiny" for the embedded pair
  std::string architecture;
  int64_t created = 0;  // Unix seconds, when this service loaded it
  int32_t context_length = 0;
  int64_t vocab_size = 0, hidden_size = 0, layers = 0, parameters = 0;
  bool has_drafter = false, has_mtp = false;
  int64_t block_size = 0;  // 0: no drafter
  std::string drafter;     // where the drafter was found; empty: none
  std::string backend = "cpu";
};

// A request that is waiting or running now.
struct LiveRequest {
  std::string id;        // "chatcmpl-…" or "cmpl-…", also the store's
  std::string endpoint;  // "chat" or "completions"
  std::string client;    // address
  bool stream = false;
  bool own = false;    // the service's own (the smoke test's): in no list and no row
  double started = 0;  // Unix seconds
  int32_t prompt_tokens = 0, completion_tokens = 0, max_tokens = 0;
  SpeculationMode mode = SpeculationMode::kNone;
};

// A finished request with every round's draft tree, newest `recent_trees` of them. Token texts are for display: a token that is no
// whole character by itself is shown with U+FFFD.
struct RecentRequest {
  LiveRequest request;
  double finished = 0;  // Unix seconds
  std::string finish;   // finish_name(), or "error"
  std::string error;
  int http_status = 200;  // 499: the client went away
  int thinking = -1;      // 1 on, 0 off, -1 not known
  float temperature = 0;
  int32_t budget = 0, reasoning_tokens = 0;
  std::string prompt_text, answer_text;  // with --store-text only
  RequestStats stats;                    // trees included
};

// Something that is not as it should be (or was not): words for /health, the phase and STATUS=. Empty words: nothing.
struct Condition {
  bool degraded = false;  // the phase is degraded because of it
  std::string words;
};

// The parts that answer requests once they are loaded. Immutable while alive; routes hold it for the length of a request.
struct Serving {
  ModelInfo info;
  GenerationDefaults defaults;
  Engine* engine = nullptr;
  const Tokenizer* tokenizer = nullptr;
  const ChatTemplate* chat_template = nullptr;  // null: the checkpoint has none, chat is a 400
  std::string reasoning_parser, tool_parser;    // as resolved; "none": off
  bool always_include_usage = false;
  int64_t feature_width = 0, fc_input_width = 0;  // taps × hidden, and what the drafter takes; 0: no drafter
  std::shared_ptr<const MemoryPlan> plan;         // that the engine was made by; null in tests that adopt() their own parts
  std::shared_ptr<void> owned;                    // what the pointers above point into
};

// Counters that /metrics shows beside the engine's own.
struct HttpCounters;

class Service {
 public:
  explicit Service(ServiceOptions options);
  ~Service();
  Service(const Service&) = delete;
  Service& operator=(const Service&) = delete;

  // Opens the store and starts this run's record. First call; kUnavailable where the database cannot be used. A full or read-only disk is
  // no failure: the service then runs without its history until there is room, and says so.
  Status open_store();

  // Loads and proves the pair, phase by phase, then is ready (or says why not). Blocks; the HTTP server answers 503 meanwhile.
  Status load();

  // Serve these parts instead of load(), as if the smoke suite had passed: for tests, and for `ddtree smoke`, which runs it itself.
  void adopt(std::shared_ptr<const Serving> serving);

  // No new requests (503 draining); returns when the running ones ended or `seconds` passed. Idempotent.
  void drain(double seconds);
  // Ends this run's record. Nothing is running any more.
  void close(int exit_code, const std::string& reason);

  // The process is about to end with requests inside (a stuck engine, a second signal): each of them gets its row with that error, and the
  // run its end. The engine may still be running; the caller leaves by _exit().
  void abandon(int exit_code, const std::string& reason);
  // Called once, on any thread, when the ladder has come to its end: the caller leaves with that status's exit code.
  void on_give_up(std::function<void(const Status&)> give_up);

  // Null until the model may be used. Ready says whether the outside may use it (the smoke gate uses it earlier).
  std::shared_ptr<const Serving> serving() const;
  bool ready() const;
  bool draining() const;
  int retry_after() const;  // seconds
  bool smoke_skipped() const;
  bool alive() const;    // /livez: false where requests run and no pass ends any more, and where the service has failed
  bool started() const;  // /startupz: has been ready once

  const ServiceOptions& options() const;
  // By name; the last one given of each holds. Degraded ones make the phase degraded while it would be ready.
  void set_condition(const std::string& name, Condition condition);
  Watcher& watcher();
  PhaseMachine& phases();
  const PhaseMachine& phases() const;
  HistoryKeeper& history();         // where this run's rows and events are written
  Store* store() const;             // to read from; null in tests without one, and while the disk does not let it open
  int64_t run_id() const;           // this run's service_run row, 0 without a store
  double started_at() const;        // Unix seconds
  EngineSnapshot snapshot() const;  // zeros before the engine is there
  HttpCounters& counters();

  // Runs the smoke suite now, beside the traffic; one at a time (kTemporary while one runs). Stores and returns nothing: the result is the
  // store's newest smoke run. kEngineFault where a check failed (the service is degraded then).
  Status run_smoke_now();

  // Where the fault ladder stands. At the top, and without steps, until the engine is there.
  LadderState ladder() const;

  // Bookkeeping of requests, called by generation.cpp.
  void request_started(const LiveRequest& request);
  void request_progress(const std::string& id, int32_t completion_tokens);
  void request_finished(RecentRequest finished);
  std::vector<LiveRequest> live_requests() const;                                    // oldest first
  std::vector<std::shared_ptr<const RecentRequest>> recent_requests() const;         // newest first
  std::shared_ptr<const RecentRequest> recent_request(const std::string& id) const;  // null: too old or unknown
  // The text of single tokens, for tree pictures. Empty before the tokenizer is there.
  std::vector<std::string> token_texts(const std::vector<int32_t>& ids) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ddtree
