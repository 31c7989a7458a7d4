// What a caller asks of the engine, and what it gets back. No JSON, no HTTP here.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "text/piece.h"

namespace ddtree {

enum class SpeculationMode : uint8_t { kNone, kDflash, kDdtree, kNextn };
const char* mode_name(SpeculationMode mode);  // "NONE", "DFLASH", "DDTREE", "NEXTN"

inline constexpr float kLeastRepetitionPenalty = 1e-3f;

struct SamplingParams {
  float temperature = 1.0f;  // 0: greedy
  float top_p = 1.0f, min_p = 0.0f;
  int32_t top_k = 0;                                        // 0: off
  float presence_penalty = 0.0f, frequency_penalty = 0.0f;  // over generated tokens
  float repetition_penalty = 1.0f;                          // over prompt and generated tokens; at least kLeastRepetitionPenalty
  uint64_t seed = 0;                                        // 0 without seed_given: drawn by the engine
  bool seed_given = false;                                  // tells a client's own seed 0 from none
  int32_t choice = 0;                                       // choice index, keys the RNG beside the seed
};

struct Request {
  std::string id;               // for logs and the store
  std::vector<int32_t> prompt;  // never empty
  SamplingParams sampling;
  int32_t max_tokens = 0;  // > 0; prompt + max_tokens <= context length is checked by submit()
  int32_t min_tokens = 0;
  bool ignore_eos = false;
  std::vector<int32_t> stop_ids;  // beside the model's eos ids
  std::vector<std::string> stop_strings;
  bool include_stop_string = false;
  bool skip_special_tokens = true;
  // The engine's configured mode and budget unless set. A mode that the loaded pair cannot run is refused by submit().
  std::optional<SpeculationMode> mode;
  std::optional<int32_t> budget;  // nodes without the root; 0 with kDdtree means auto
  bool record_trees = false;      // keep every round's tree for RequestStats::rounds
  bool own = false;               // the service's own (smoke test, canary): no client's request, so in no counter of theirs
  bool ahead = false;             // goes before waiting requests, beside max_running ones, whatever the queue holds: one at a time (canary)
};

enum class FinishReason : uint8_t { kNone, kStop, kLength, kCancelled, kError };
const char* finish_name(FinishReason reason);  // "stop", "length", "cancelled", "error"

// One round of one request, for the dashboard.
struct RoundRecord {
  int32_t start = 0;                   // absolute position of the root (anchor)
  std::vector<int32_t> token, parent;  // [1 + nodes] root first, parent -1 for the root; parents before children
  std::vector<float> log_prob;         // [1 + nodes] path log-prob by the drafter (root 0)
  std::vector<uint8_t> accepted;       // [1 + nodes]
  int32_t next = -1;                   // token that the target chose after the accepted path: the new anchor
  float draft_ms = 0, verify_ms = 0, total_ms = 0;
};

// Identities that tests hold: sum(histogram) == rounds; sum(j * histogram[j]) == accepted; accepted + rounds + 1 == completion ids
// for requests that generate through rounds only (the first token comes from prefill) and were not cut in their last round;
// rounds cut by a stop or the length count only what was kept.
struct RequestStats {
  SpeculationMode mode = SpeculationMode::kNone;
  int32_t prompt_tokens = 0, completion_tokens = 0, cached_tokens = 0;
  int32_t rounds = 0;                // verify passes (NONE: decode steps)
  int64_t drafted = 0;               // nodes verified, roots not counted
  int64_t accepted = 0;              // draft tokens committed
  std::vector<int32_t> histogram;    // [max depth + 1] rounds by accepted count
  std::vector<int32_t> accepted_at;  // [max depth] rounds that accepted at least i + 1 draft tokens
  std::vector<int32_t> emitted;      // tokens committed by each round (golden.jsonl's `emitted`)
  int64_t tree_gain = 0;             // shadow: tokens that the tree would have committed beyond the chain (negative: fewer)
  int32_t shadow_disagreements = 0;  // tokens that the tree foretold and later rounds did not commit
  // Committed steps that another rounding could have decided otherwise: the two best processed logits (sampled: scores × temperature, or a
  // token that a filter kept in or out by a hair) were closer than Executor::near_tie(). From the first of them on, another mode or
  // batch may differ.
  int32_t near_ties = 0;
  int32_t first_near_tie = -1;  // index in the completion, -1: none
  float smallest_gap = 1000;    // over all committed steps; 1000: nothing else could be chosen
  double queue_ms = 0, prefill_ms = 0, decode_ms = 0, first_token_ms = 0, total_ms = 0;
  std::vector<RoundRecord> trees;  // with record_trees
};

// What one engine step adds to a request. ids and pieces always describe the same, already cut, committed tokens; pieces may lag
// behind ids while a character or a possible stop string is incomplete, and never run ahead.
struct Delta {
  std::vector<int32_t> ids;
  std::vector<TextPiece> pieces;
  bool finished = false;  // the last one: the fields below are set
  FinishReason finish = FinishReason::kNone;
  std::string stop_string;  // the stop string that matched
  int32_t stop_id = -1;     // the stop id that matched
  std::string error;        // kError: what happened, for the client
  RequestStats stats;       // final
};

// An answer to be judged: would the target alone, run over it from the first token on, have chosen these tokens under the request's own
// sampling?
struct ScoreRequest {
  Request request;                 // as it was submitted; sampled ones with their seed (seed_given)
  std::vector<int32_t> generated;  // its answer so far
  int32_t from = 0;                // index in `generated` of the first token that is judged
};
struct ScoredToken {
  int32_t token = -1;   // of the answer
  int32_t choice = -1;  // what the target chooses there
  float log_prob = 0;   // of `token`, by the target's own logits, unprocessed
  float margin = 0;     // ops::Sampled::margin of the choice
  // Another rounding may choose otherwise where the margin is tiny; that is no disagreement.
  bool agrees(float tolerance) const { return token == choice || margin <= tolerance; }
};
struct Score {
  std::string error;                // empty: tokens is complete
  std::vector<ScoredToken> tokens;  // [generated - from]
};
using ScoreSink = std::function<void(Score&&)>;

// Called on the engine's thread, in order; must not block and must not call back into the engine except cancel().
using DeltaSink = std::function<void(Delta&&)>;

}  // namespace ddtree
