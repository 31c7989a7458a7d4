// The round: draft -> grow -> verify -> sample and follow -> commit, for all running sequences in one forest (design.md section 4).
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "engine/sampler.h"
#include "engine/sequence.h"
#include "nn/executor.h"
#include "spec/budget.h"
#include "spec/cost.h"
#include "spec/tree.h"

namespace ddtree {

// What one pass did, for the engine's counters.
struct PassReport {
  int32_t replayed_rows = 0;                      // of the clients' prompt rows: run once more for the drafter
  int32_t prompt_rows = 0, decoding = 0;          // sequences that decoded
  int32_t own_prompt_rows = 0, own_decoding = 0;  // of these, the service's own (Request::own); what follows leaves those out
  int32_t rounds = 0, emitted = 0;                // of sequences that drafted or decoded plainly: rounds, tokens
  int64_t drafted = 0, accepted = 0;
  std::vector<int32_t> accepted_counts;  // per drafting sequence
  int32_t fallbacks = 0;
  std::array<int32_t, 4> draft_rounds{}, draft_accepted{};  // [SpeculationMode] of clients' sequences that drafted
  int32_t nan_faults = 0, failed_drafts = 0;
  std::string nan_message;
  Status lost;         // the pass or its commit failed as a whole
  bool timed = false;  // without prompt rows, and the costs were measured at start
  double pass_ms = 0, promised_ms = 0;
  double milliseconds = 0;
  bool ran = false;  // a forest went through the target
};

class Rounds {
 public:
  Rounds(Executor& executor, const EngineOptions& options, EngineSeams seams);

  // Measures what passes cost, on empty slots and pages, for at most about a second; leaves nothing behind.
  Status measure();
  const CostModel& costs() const { return costs_; }

  // One pass over everything that runs. Fills each sequence's delta and `finished`; a fault of the executor finishes the sequences it
  // concerns with kError and is logged. Never fails as a whole.
  PassReport step(std::span<Sequence* const> running);

  // Forgets what drafts taught, as at the start.
  void forget_drafts();

 private:
  static bool automatic(const Sequence& s) { return s.mode == SpeculationMode::kDdtree && s.budget == 0 && !s.shadow; }

  // One sequence's part of the pass that is being built.
  struct Part {
    Sequence* sequence = nullptr;
    bool prefill = false;
    int32_t prefill_rows = 0;
    bool drafts = false;  // asked a drafter this round
    DraftTree tree;       // decoding: root alone for plain decoding
    DraftTree pool;       // auto: what `tree` was chosen from
    std::vector<uint8_t> pool_mask;
    std::vector<int32_t> pool_place;  // tree node -> pool node
    DraftTree chain;                  // shadow: nodes 0 … chain.nodes() of `tree` are these
    std::vector<uint8_t> in_tree;     // shadow: per node of `tree`
    int32_t first_row = 0, segment = 0;
    bool failed = false;
    Walk walk;                   // what was accepted (before the cut)
    std::vector<float> margins;  // [path + 1] of the steps of the walk
    int32_t kept = 0;            // ids committed after the cut
    Accepted accepted;
    double break_even = FallbackPolicy::kFixedBreakEven;
  };

  // What the target's pass costs: rows as they are run (Executor::padded_rows), which prompt rows among them forbid.
  double pass_ms(double rows, double row_context, int32_t sequences, bool prompts) const {
    return costs_.verify(prompts ? rows : executor_.padded_rows(static_cast<int32_t>(rows)), row_context, sequences);
  }

  // drafting.cpp
  void decide_drafting(std::vector<Part>& parts);
  // rounds.cpp
  void run_drafter(std::vector<Part>& parts, bool nextn, PassReport* report);
  void grow(Part& part, const Candidates& candidates, bool nextn, int32_t pool_nodes) const;
  void shape(std::vector<Part>& parts, int32_t node_limit, int32_t base_rows, double base_row_context, bool prompts);
  static Choice choice_of(const Sequence& sequence);
  Forest build(std::vector<Part>& parts) const;
  void commit(std::vector<Part>& parts, const Forest& forest, PassReport* report);
  int32_t known_rows(const Sequence& sequence, int32_t logit_rows) const;
  // verify.cpp
  void verify(Part& part, const Forest& forest, const PassOutput& output, PassReport* report);
  void judge(Part& part, const PassOutput& output);
  void settle(Part& part, std::span<const int32_t> run, PassReport* report) const;
  void follow_shadow(Part& part, const Walk& tree_walk) const;
  void learn(Part& part, PassReport* report);
  static void record(const Part& part, double draft_ms, double verify_ms, double total_ms);
  static void fail(Part& part, const std::string& message);

  Executor& executor_;
  const EngineOptions& options_;
  std::unique_ptr<Sampler> sampler_;
  std::function<Clock::time_point()> now_;
  CostModel costs_, start_costs_;  // running averages; as measured at start
  bool measured_ = false;
  Calibration calibration_;
  int32_t probes_ = 0;
  std::array<Outlook, 2> outlook_;  // of all sequences: greedy, sampled
  int32_t max_rows_, max_logit_rows_, max_tentative_rows_;
  double draft_ms_ = 0, commit_ms_ = 0;  // of this pass
  int32_t queries_ = 0;
};

}  // namespace ddtree
