// Tensor parallel: one executor a rank, each on a thread and a backend of its own, that all follow the same forests. The engine sees rank
// 0's results; the others' are the same bits (ops/collectives.h). The drafter is whole on every rank.
//
// A rank that fails, does not come or disagrees ends it for good: lost() says which and why, every later call returns that, and the process
// has to end, since a thread inside a pass cannot be joined. An error that all ranks give alike (a forest that is wrong, logits that are
// not finite) is the call's, as on one rank.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "base/status.h"
#include "model/pair.h"
#include "nn/executor.h"
#include "ops/backend.h"

namespace ddtree::nn {

class PairExecutor;

struct RankLimits {
  double seconds = 20;         // a rank waits so long for another in a collective, and so do ranks that have finished a call
  int32_t digest_rounds = 16;  // commits between two comparisons of what the ranks have committed
};

// What goes wrong on demand, for tests: on the rank's thread before each call of a kind ("forward", "commit", "draft", …), and what it says
// its digest is. Null: nothing.
struct RankHooks {
  std::function<Status(int32_t rank, const char* call)> before;
  std::function<uint64_t(int32_t rank, uint64_t digest)> digest;
};

class RankExecutor final : public Executor {
 public:
  // Called on the rank's thread.
  using MakeBackend = std::function<Result<std::unique_ptr<ops::Backend>>(int32_t rank)>;

  // options.tp_size ranks, which load at once; progress is that of all together. kUsage: they cannot share the model (model/shard.h); else
  // the first rank's error, with its name.
  static Result<std::unique_ptr<RankExecutor>> create(const LoadedPair& pair, const ExecutorOptions& options,
                                                      const MakeBackend& make_backend, const RankLimits& limits = {}, RankHooks hooks = {});
  ~RankExecutor() override;

  const ModelSpec& target() const override;
  const DrafterSpec* drafter() const override;
  bool has_mtp() const override;
  const ExecutorOptions& options() const override { return options_; }
  int32_t real_vocab() const override;
  Status lost() const override { return lost_; }
  float near_tie() const override;
  int32_t padded_rows(int32_t rows) const override;

  void reset_slot(int32_t slot) override;
  Status forward(const Forest& forest, PassOutput* output) override;
  Result<const float*> row_logits(const PassOutput& output, int32_t logits_row) override;
  Status commit(const Forest& forest, std::span<const Accepted> accepted) override;
  Status draft(std::span<const DraftQuery> queries, int32_t top_k, DraftOutput* output) override;
  Status draft_nextn(std::span<const DraftQuery> queries, int32_t steps, DraftOutput* output) override;
  void time_ops(bool on) override;
  std::vector<ops::OpTime> op_times() override;
  void time_device(bool on) override;
  double device_ms() override;
  int32_t warm_up_runs() const override;
  Result<ops::DeviceRates> measure_rates() override;

  PairExecutor& rank(int32_t index) const;  // for tests, between calls

 private:
  struct Rank;
  struct Crew;
  using Job = std::function<Status(Rank&)>;

  RankExecutor() = default;
  Status load(const LoadedPair& pair, const MakeBackend& make_backend);
  // The same job on every rank; returns when all have done it, or the crew is lost. What the job reads must be its own: a rank that hangs
  // is left behind.
  Status run(const char* call, Job job);
  Status lose(std::string message);
  Status compare_digests();

  ExecutorOptions options_;
  RankLimits limits_;
  std::shared_ptr<Crew> crew_;
  int64_t commits_ = 0;
  Status lost_;
};

}  // namespace ddtree::nn
