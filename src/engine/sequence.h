// One request inside the engine.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "engine/commit.h"
#include "engine/request.h"
#include "ops/sample.h"
#include "spec/acceptance.h"
#include "spec/budget.h"

namespace ddtree {

using Clock = std::chrono::steady_clock;
inline double milliseconds_between(Clock::time_point a, Clock::time_point b) {
  return std::chrono::duration<double, std::milli>(b - a).count();
}

// A sequence that is no request but an answer under judgement: its prompt is the text up to the last token but one.
struct Scoring {
  ScoreSink sink;
  std::vector<int32_t> generated;                          // the answer
  int32_t prompt = 0;                                      // tokens before it
  int32_t from = 0;                                        // first judged, in `generated`
  int32_t first_row() const { return prompt + from - 1; }  // whose logits chose it
  Score score;
};

struct Sequence {
  Sequence(uint64_t number, Request r, DeltaSink s, std::span<const int32_t> eos_ids, const Tokenizer& tokenizer)
      : id(number), request(std::move(r)), sink(std::move(s)), commit(request, eos_ids, tokenizer) {}

  uint64_t id;
  Request request;
  DeltaSink sink;
  SpeculationMode mode = SpeculationMode::kNone;
  int32_t budget = 0;  // DDTREE: nodes without the root, 0 = auto
  bool shadow = false;
  int32_t pages_needed = 0;
  ops::SampleParams sampling;

  // Storage; empty while it waits.
  std::vector<int32_t> pages;
  int32_t slot = -1;

  // Where it stands. Invariant between passes: the executor holds exactly `context` committed rows; of the prompt while context < prompt
  // size, then the prompt and all generated ids but the last, which is the anchor.
  int32_t context = 0;
  int32_t anchor = -1;
  std::vector<int32_t> generated;  // ids committed so far
  bool decoding() const { return anchor >= 0 && !replaying; }
  // Tokens that the executor must hold before the sequence decodes (again): the prompt; when replaying, the answer but its anchor too.
  int32_t known() const { return static_cast<int32_t>(request.prompt.size() + (replaying ? generated.size() - 1 : 0)); }
  int32_t known_token(int32_t i) const {
    const size_t k = static_cast<size_t>(i), n = request.prompt.size();
    return k < n ? request.prompt[k] : generated[k - n];
  }
  int32_t known_left() const { return known() - context; }

  // `auto` alone. Feeding the drafter costs, so where drafting cannot pay the drafter is left behind; if it can again, everything known is
  // run once more.
  Outlook outlook;
  bool behind = false, replaying = false;
  int32_t rounds_without_draft = 0, hopeless_rounds = 0, promising_rounds = 0;

  std::unique_ptr<Scoring> scoring;  // null: an ordinary request

  CommitPoint commit;
  ops::TokenHistory history;  // filled only if penalties are set
  size_t history_count = 0;   // scoring: tokens of the answer in it
  AcceptanceStats acceptance;
  FallbackPolicy fallback;
  std::deque<int32_t> foretold;  // shadow: what the tree said that comes next, not yet committed

  RequestStats stats;  // times, near-ties, trees; the rest is filled at the end
  Clock::time_point submitted, admitted, first_token;

  // This pass.
  Delta delta;
  bool finished = false;
};

}  // namespace ddtree
