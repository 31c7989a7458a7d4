// A pair whose target agrees with its drafter as often as asked, for measuring speed with weights that mean nothing: every pass runs as
// ever and takes its time, then what was drafted gets made-up probabilities and the target's choices are drawn from them.
//
// At each position the target's token is the drafter's candidate of rank k with probability q for k = 0 and (1 - q)/4 · (3/4)^(k-1) behind
// it, independently; q is such that a chain of a whole block emits `mean` tokens a round: mean = Σ q^i, i = 0 … positions. A tree finds the
// more of the rest the larger it is, and the log-probs that the tree is grown from are the true ones of this draw, so the cost model is
// right about what it should expect. Draws depend on the seed, the prompt's first token and the position alone: modes that are compared on
// the same prompts meet the same luck, in whatever chunks these come. A text may end anywhere: requests ignore the end.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "nn/executor.h"

namespace ddtree {

class SyntheticExecutor final : public Executor {
 public:
  // Bounds of `mean` for this pair: 1 to block size (without a drafter: to 4, three of the MTP head's drafts and one).
  static double most(const Executor& inner);
  // mean within (1, most(inner)).
  SyntheticExecutor(std::unique_ptr<Executor> inner, double mean, uint64_t seed = 1);

  double first_rank() const { return q_; }  // q

  const ModelSpec& target() const override { return inner_->target(); }
  const DrafterSpec* drafter() const override { return inner_->drafter(); }
  bool has_mtp() const override { return inner_->has_mtp(); }
  const ExecutorOptions& options() const override { return inner_->options(); }
  int32_t real_vocab() const override { return inner_->real_vocab(); }
  float near_tie() const override { return inner_->near_tie(); }
  Status lost() const override { return inner_->lost(); }
  int32_t padded_rows(int32_t rows) const override { return inner_->padded_rows(rows); }
  void reset_slot(int32_t slot) override;
  Status forward(const Forest& forest, PassOutput* output) override;
  // kInvalidArgument: there are choices here, no logits. Nothing can be scored.
  Result<const float*> row_logits(const PassOutput& output, int32_t logits_row) override;
  Status commit(const Forest& forest, std::span<const Accepted> accepted) override { return inner_->commit(forest, accepted); }
  Status draft(std::span<const DraftQuery> queries, int32_t top_k, DraftOutput* output) override;
  Status draft_nextn(std::span<const DraftQuery> queries, int32_t steps, DraftOutput* output) override;
  void time_ops(bool on) override { inner_->time_ops(on); }
  std::vector<ops::OpTime> op_times() override { return inner_->op_times(); }
  void time_device(bool on) override { inner_->time_device(on); }
  double device_ms() override { return inner_->device_ms(); }
  int32_t warm_up_runs() const override { return inner_->warm_up_runs(); }
  Result<ops::DeviceRates> measure_rates() override { return inner_->measure_rates(); }

 private:
  struct Drafted {        // of a slot, since its last draft
    uint64_t prompt = 0;  // the first token that the slot got since it was emptied; more of them would depend on how a pass is shared
    int32_t context = -1, positions = 0, top_k = 0;
    std::vector<int32_t> token;  // [positions, top_k]
  };
  void remember(std::span<const DraftQuery> queries, DraftOutput* output);
  int32_t choice(int32_t slot, int32_t position) const;  // the target's token at a position

  std::unique_ptr<Executor> inner_;
  uint64_t seed_;
  double q_ = 0;
  std::vector<Drafted> drafted_;  // [slots]
};

}  // namespace ddtree
