// The executor on the CPU: float32 activations (or BF16-rounded ones), weights as the checkpoint has them, own kernels.
#pragma once

#include <memory>

#include "base/status.h"
#include "model/pair.h"
#include "nn/executor.h"

namespace ddtree {

// Packs the pair's weights and allocates everything that later passes need: pages, slots, scratch. `pair` may go afterwards.
// kInvalidArgument: an option that cannot work, by name, with what would; kDoesNotFit: memory, with the size that was asked for;
// kBadModel: a shape that the CPU kernels cannot run (head dimensions must be multiples of 16). options.tp_size > 1: so many ranks in this
// process, which share its cores (nn/rank_executor.h): for tests of tensor parallelism, not for speed. kUsage: they cannot share the model.
Result<std::unique_ptr<Executor>> make_cpu_executor(const LoadedPair& pair, ExecutorOptions options);

// CPU threads that each of `ranks` has, of `threads` (0: all cores).
int threads_of_rank(int threads, int32_t ranks);

}  // namespace ddtree
