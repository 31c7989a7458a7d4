// The Executor over any op backend: checks and stages forests, runs target, MTP head and drafter, keeps what a commit needs.
// Internal to nn/ (and its tests, which look inside through features(), hidden() and the like).
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "base/status.h"
#include "model/pair.h"
#include "model/shard.h"
#include "nn/drafter.h"
#include "nn/executor.h"
#include "nn/forest_builder.h"
#include "nn/mtp.h"
#include "nn/target.h"
#include "ops/backend.h"

namespace ddtree::nn {

// What tests may ask for beyond an executor's work.
struct Probe {
  std::vector<int32_t> captures;  // further layers whose output is kept in features(), behind the drafter's taps; -1: the embedding
  bool all_mtp_rows = false;      // commit() finishes the MTP layer for every row it feeds, not only the last
  bool choose_in_pass = false;    // passes choose, as on a device, where logits lie in the host's memory too
};

// What an executor is made of. Without tensors it has no weights and computes nothing: for plans (nn/footprint.h).
struct PairParts {
  const ModelSpec* target = nullptr;
  const TargetTensors* tensors = nullptr;
  bool mtp = false;
  const DrafterSpec* drafter = nullptr;  // null: none
  const DrafterTensors* drafter_tensors = nullptr;
  // One rank of several: spec and tensors are the whole target's all the same, and of them the rank's share (model/shard.h) is loaded. The
  // backend has joined the ranks' group. Every rank gets the same calls.
  int32_t rank = 0, ranks = 1;
};
PairParts parts_of(const LoadedPair& pair);

class PairExecutor final : public Executor {
 public:
  static Result<std::unique_ptr<PairExecutor>> create(std::unique_ptr<ops::Backend> backend, const LoadedPair& pair,
                                                      ExecutorOptions options, const Probe& probe = {});
  static Result<std::unique_ptr<PairExecutor>> create(std::unique_ptr<ops::Backend> backend, const PairParts& parts,
                                                      ExecutorOptions options, const Probe& probe = {});

  const ModelSpec& target() const override { return spec_; }
  const DrafterSpec* drafter() const override { return drafter_ ? &drafter_->spec() : nullptr; }
  bool has_mtp() const override { return mtp_ != nullptr; }
  const ExecutorOptions& options() const override { return options_; }
  int32_t real_vocab() const override { return options_.real_vocab; }
  float near_tie() const override;
  int32_t padded_rows(int32_t rows) const override;

  void reset_slot(int32_t slot) override;
  Status forward(const Forest& forest, PassOutput* output) override;
  Result<const float*> row_logits(const PassOutput& output, int32_t logits_row) override;
  Status commit(const Forest& forest, std::span<const Accepted> accepted) override;
  Status draft(std::span<const DraftQuery> queries, int32_t top_k, DraftOutput* output) override;
  Status draft_nextn(std::span<const DraftQuery> queries, int32_t steps, DraftOutput* output) override;
  void time_ops(bool on) override { backend_->time_ops(on); }
  std::vector<ops::OpTime> op_times() override { return backend_->op_times(); }
  void time_device(bool on) override { backend_->time_segments(on); }
  double device_ms() override { return backend_->segment_ms(); }
  int32_t warm_up_runs() const override { return options_.graphs && backend_->fixed_shapes() ? 2 : 0; }
  Result<ops::DeviceRates> measure_rates() override { return backend_->measure_rates(); }

  // --- for tests -------------------------------------------------------------------------------------------------------------------------
  ops::Tensor features() const { return target_->features(); }       // [rows of the last pass, (taps + captures) · H]
  ops::Tensor hidden() const { return target_->hidden(); }           // [rows of the last pass, H]
  ops::Tensor drafter_hidden() const { return drafter_->hidden(); }  // [queries · block, H] of the last draft()
  ops::Tensor mtp_output() const { return mtp_->output(); }          // of the last commit() that fed the MTP head
  // Appends given features (float32, [rows, taps · H], row-major) as drafter context at positions first, first + 1, …
  Status feed_features(std::span<const int32_t> pages, int32_t first, std::span<const float> features);
  ops::Backend& backend() { return *backend_; }
  // Everything that lasts from pass to pass. Null: the pair has none.
  struct Storage {
    const ops::KvPool *target = nullptr, *mtp = nullptr, *drafter = nullptr;
    const ops::StatePool* states = nullptr;
    ops::Tensor mtp_slots;  // [slots, H]
  };
  Storage storage() const {
    Storage s{.target = target_->kv(), .states = target_->states()};
    if (mtp_) s.mtp = mtp_->kv(), s.mtp_slots = mtp_->slots();
    if (drafter_) s.drafter = drafter_->kv();
    return s;
  }

 private:
  PairExecutor() = default;
  Status load(const PairParts& parts, const Probe& probe);
  Status check_options(const PairParts& parts);
  // Whether a pass gives its logits; otherwise it chooses.
  bool logits_on_host() const { return backend_->in_host_memory() && share_.ranks == 1 && !choose_in_pass_; }
  Status check_accepted(std::span<const Accepted> accepted) const;
  // `of` rounded up, where the backend wants it and a bucket of at most `most_rows` holds it.
  std::optional<ForestShape> rounded(const ForestShape& of, int32_t most_rows) const;
  // Rules and their lists (appended to arrays_) of the segments that choose otherwise than greedily; false: none does. `left` out: segments
  // whose lists found no room.
  bool make_rules(const Forest& forest, std::vector<ops::SampleRule>* rules, std::vector<uint8_t>* left);
  // What a commit stages: root paths (ops::Paths); rows whose features the drafter gets; rows of the MTP head, whose forest is arrays_.
  struct Kept {
    std::vector<int32_t> offset{0}, row, slot, from, position, place, mtp_from, mtp_wanted, mtp_last, mtp_slot;
  };
  void keep_paths(std::span<const Accepted> accepted, Kept* kept) const;
  void keep_features(std::span<const Accepted> accepted, Kept* kept) const;
  void keep_mtp(std::span<const Accepted> accepted, Kept* kept);
  bool pad_kept(Kept* kept);
  Status check_queries(std::span<const DraftQuery> queries, bool needs_slot) const;
  Status draft_blocks(std::span<const DraftQuery> queries, int32_t top_k, int32_t* token, float* log_prob);
  Status draft_steps(std::span<const DraftQuery> queries, int32_t steps, DraftOutput* output, size_t first);

  std::unique_ptr<ops::Backend> backend_;
  ModelSpec spec_;  // the whole target's
  RankShare share_;
  int32_t own_real_vocab_ = 0;  // of the rank's columns of logits
  ExecutorOptions options_;
  ForestLimits limits_;
  std::unique_ptr<Target> target_;
  std::unique_ptr<Drafter> drafter_;
  std::unique_ptr<Mtp> mtp_;
  bool all_mtp_rows_ = false, choose_in_pass_ = false;
  int32_t blocks_ = 0;  // of one draft pass
  int64_t listed_ = 0;  // entries of a pass's lists of seen and banned tokens

  ops::Tensor wanted_;        // [max_logit_rows, H] hidden rows that want logits
  ops::Tensor logits_;        // [max_logit_rows, V], on a rank its own columns
  std::vector<float> row_;    // one row of it on the host
  ops::Tensor draft_wanted_;  // [draft rows, H]
  ops::Tensor draft_logits_;  // [draft rows, V]

  // Where ops leave their results: the same places in every pass, as a recorded segment needs them.
  std::vector<int32_t> chosen_, draft_token_;
  std::vector<float> margin_, draft_log_prob_;
  std::vector<uint8_t> bad_rows_;
  int32_t bad_row_ = -1;

  // The last pass, until its commit.
  Forest pass_;
  std::vector<int32_t> pass_pages_;  // what pass_'s segments point into
  ops::Forest staged_;
  bool committed_ = true;
  std::vector<int32_t> mtp_position_;  // [slots] position of the row whose MTP output the slot holds; -1: none
  ForestArrays arrays_;
};

}  // namespace ddtree::nn
