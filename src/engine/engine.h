// The engine: sequences, scheduler, rounds and the one commit point, on a thread of its own.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>

#include "base/status.h"
#include "engine/request.h"
#include "nn/executor.h"

namespace ddtree {

class Tokenizer;

struct EngineOptions {
  SpeculationMode mode = SpeculationMode::kNone;
  int32_t budget = 0;          // DDTREE nodes without the root; 0: auto (measured cost, Φ over the batch)
  bool shadow_linear = false;  // DDTREE: verify chain ∪ tree, commit what the chain alone would, record the tree's gain
  bool seed_chain = false;     // DDTREE: the whole greedy chain goes in before best-first growth
  int32_t nextn_steps = 3;
  int32_t block_size = 0;        // DFLASH: 0 = the drafter's own
  int32_t context_length = 0;    // 0: the model's max_positions
  int32_t max_running = 8;       // sequences in one forest
  int32_t max_queue = 256;       // waiting requests; one more is kTemporary
  int32_t prefill_chunk = 256;   // prompt rows a pass, all sequences together
  int32_t lone_chunk = 0;        // the same while nobody decodes, who would wait for it; at most prefill_chunk's: that
  int32_t top_k = 32;            // candidates a position (16 lose a node of a golden tree of 32; 32 lose none up to 256)
  std::vector<int32_t> eos_ids;  // stop ids of every request without ignore_eos
  bool measure_costs = true;     // at start, for `auto` (about a second); off: rough guesses that running averages correct
};

// Milliseconds by size, as measured so far; linear between the points.
struct CostPoints {
  std::vector<double> size, ms;
};

struct EngineSnapshot {  // for /metrics and the dashboard. Counters and rates are of clients' requests, not of Request::own ones
  int32_t running = 0, waiting = 0;
  int32_t pages_used = 0, pages_total = 0, slots_used = 0, slots_total = 0;
  int64_t requests_finished = 0, requests_cancelled = 0, requests_failed = 0;
  int64_t prompt_tokens = 0, completion_tokens = 0;
  int64_t rounds = 0, drafted = 0, accepted = 0;  // since start
  std::vector<int64_t> accepted_at;               // [depth]
  int64_t fallbacks = 0;                          // sequences that fell back to NONE because drafting did not pay
  int64_t own_requests = 0;                       // ended ones with Request::own
  int64_t scored = 0;                             // ended score()s
  int64_t passes = 0;                             // forest passes so far, of all requests: moves while work is done
  double prefill_tps_1m = 0, decode_tps_1m = 0;   // last minute; 0 when idle
  double acceptance_1m = 0;                       // mean tokens a round, last minute; 0 when idle
  // What goes wrong, for the watch (health/watch.h). Of all requests, also the service's own.
  int64_t nan_faults = 0;      // sequences that logits which are not finite ended
  int64_t lost_passes = 0;     // passes (or their commits) of which nothing could be kept
  int64_t failed_drafts = 0;   // drafter passes that failed
  Code lost_code = Code::kOk;  // of the last lost pass
  std::string nan_message, lost_message;
  std::string gone;                                         // why no pass can succeed any more (Executor::lost); empty: none knows
  std::array<int64_t, 4> draft_rounds{}, draft_accepted{};  // [SpeculationMode] rounds that drafted, and what they accepted; clients' only
  // Drafting and verifying in passes without prompt rows: what they took, and what the costs measured at start promised. 0: not measured.
  double pass_ms = 0, promised_ms = 0;
  int64_t timed_passes = 0;
  SpeculationMode most = SpeculationMode::kDdtree;  // limit_mode()
  CostPoints verify_ms, draft_ms, host_ms;  // what `auto` reckons with: by rows of a pass of one sequence; by sequences; by sequences
  double sequence_ms = 0;                   // what each further sequence adds to a pass
};

class Engine {
 public:
  // The executor and tokenizer must outlive the engine. Measures costs for `auto` (a few passes) before it returns.
  static Result<std::unique_ptr<Engine>> start(Executor& executor, const Tokenizer& tokenizer, EngineOptions options);
  virtual ~Engine() = default;  // cancels what runs

  // Checks the request (kInvalidArgument names the field; too long: says both numbers; kTemporary: queue full or draining) and
  // queues it. The sink gets every Delta, the last with finished = true, exactly once, also after cancel(). A Request::ahead one takes
  // turns with score() for the slot beyond max_running, and is never refused for a full queue.
  virtual Result<uint64_t> submit(Request request, DeltaSink sink) = 0;

  // Ends a request before its next round. Unknown or finished ids are fine.
  virtual void cancel(uint64_t id) = 0;

  // No new requests; returns when the running ones ended or the deadline passed (then they are cancelled).
  virtual void drain(double seconds) = 0;

  // Requests get at most this mode from now on, whatever they ask for; running ones are brought down before their next round and stay
  // there. DFLASH: no trees; NONE: nothing is drafted; DDTREE and NEXTN: no limit.
  virtual void limit_mode(SpeculationMode most) = 0;

  // Forgets all that drafting has built up: running sequences are run once more for the drafter, and what was learnt of acceptance goes.
  virtual void reset_drafts() = 0;

  // Runs the target over a request's prompt and answer as plain certain rows, with a slot and pages of its own, and compares. Goes before
  // waiting requests; one at a time. Refuses what submit() would (not for a full queue), and an answer longer than the context. The sink is
  // called once, on the engine's thread, with an error where the engine stops or the pass failed.
  virtual Status score(ScoreRequest request, ScoreSink sink) = 0;

  virtual EngineSnapshot snapshot() const = 0;
  virtual const EngineOptions& options() const = 0;
};

}  // namespace ddtree
