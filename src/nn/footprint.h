// What an executor takes of its device, without making one: its own set-up code, run over a backend that only counts.
#pragma once

#include <memory>

#include "base/status.h"
#include "model/pair.h"
#include "nn/executor.h"
#include "ops/counting_backend.h"
#include "ops/memory.h"

namespace ddtree {

class PairFootprint {
 public:
  // Of a pair whose files are open: weights as wide as the checkpoint has them. `pair` is not kept. threads: ExecutorOptions::threads.
  // ranks: of each rank of so many, none of which takes more (kUsage: they cannot share it); threads are then a rank's.
  static Result<PairFootprint> of(const LoadedPair& pair, ops::DeviceKind kind, int threads = 0, int32_t ranks = 1);
  // Of shapes alone, weights in BF16.
  static Result<PairFootprint> of(const PairSpecs& specs, ops::DeviceKind kind, int threads = 0, int32_t ranks = 1);

  // Everything that an executor with these options books, weights included. kInvalidArgument as the executor would say it. Takes
  // microseconds.
  Result<ops::MemoryLedger> with(const ExecutorOptions& options) const;

  const ModelSpec& target() const { return target_; }
  const DrafterSpec* drafter() const { return drafter_ ? &*drafter_ : nullptr; }
  bool has_mtp() const { return mtp_; }
  int32_t ranks() const { return ranks_; }
  ops::DeviceKind kind() const { return kind_; }
  // The same pair without its drafter: what a plan would be without it.
  PairFootprint without_drafter() const;

 private:
  PairFootprint() = default;

  ModelSpec target_;
  std::optional<DrafterSpec> drafter_;
  bool mtp_ = false;
  ops::DeviceKind kind_ = ops::DeviceKind::kCpu;
  int threads_ = 0;
  int32_t ranks_ = 1;
  ops::MemoryLedger weights_;  // MemoryUse::kWeights only
};

}  // namespace ddtree
