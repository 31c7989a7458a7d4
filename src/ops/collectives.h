// What the ranks of one model do together. A backend joins a group before set-up (Backend::join) and then runs all_reduce and the
// reductions over a vocabulary that is split (ops/logits.h) with it; alone, those ops are what they are on one rank.
//
// Every rank calls the same collectives with the same sizes in the same order: passes are shaped by host values that all ranks share.
// Results have the same bits on every rank, whatever came first: sums add in order of rank, choices fall to the better logit and of
// equal ones to the smaller id, log-sum-exps fold in order of rank. So a rank may go by its own result, and no result need be sent around.
//
// Over a vocabulary that is split, a rank gives candidates, never its logits:
//   best_two          best and second logit, best id, whether a logit was not finite       16 bytes a row
//   top_k_log_probs   its top_k logits with ids, its largest logit, Σ exp(l - largest)     8 · top_k + 16 bytes a row
//   a sampled choice  by Gumbel-max a rank's best noised logit and its runner-up decide like best_two; top-k and top-p first need the
//                     candidates and sums of top_k_log_probs
// Where a row is chosen from on the host, that row alone is gathered (Executor::row_logits).
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "base/status.h"
#include "ops/tensor.h"

namespace ddtree::ops {

// all_reduce: x[r, c] = Σ_ranks x[r, c], summed in float32 in order of rank. BF16 boundaries: rounded once, unless keep_float32 (the
// residual stream: there, exactly one rank's summand is not zero).
struct AllReduceArgs {
  Tensor x;  // [R, C], updated
  bool keep_float32 = false;
};

// One rank's end of a group. Used by the rank's thread alone, but for status().
class Collectives {
 public:
  virtual ~Collectives() = default;
  virtual int32_t rank() const = 0;
  virtual int32_t ranks() const = 0;
  // Of memory that the group's transport reads: float32 in the host's for in-process ranks.
  virtual void all_reduce(const Tensor& x) = 0;
  // Host memory: `bytes` of every rank, in order of rank, to `all` of every rank.
  virtual void all_gather(const void* mine, int64_t bytes, void* all) = 0;
  // Why the group is broken, with the rank's name; ok: it is not. A broken group stays so: its collectives return at once, and what they
  // should have written holds anything.
  virtual Status status() const = 0;
};

}  // namespace ddtree::ops
