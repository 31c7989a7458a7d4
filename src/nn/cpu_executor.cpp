#include "nn/cpu_executor.h"

#include <algorithm>

#include "base/thread_pool.h"
#include "nn/pair_executor.h"
#include "nn/rank_executor.h"
#include "ops/cpu/cpu_backend.h"

namespace ddtree {

int threads_of_rank(int threads, int32_t ranks) { return std::max((threads > 0 ? threads : usable_cores()) / std::max(ranks, 1), 1); }

Result<std::unique_ptr<Executor>> make_cpu_executor(const LoadedPair& pair, ExecutorOptions options) {
  ops::cpu::CpuOptions cpu{.threads = options.threads,
                           .bfloat16_boundaries = options.precision == Precision::kBfloat16Boundaries,
                           .bfloat16_residual = options.bfloat16_residual};
  if (options.tp_size != 1) {
    cpu.threads = threads_of_rank(options.threads, options.tp_size);
    auto ranks = nn::RankExecutor::create(pair, options, [cpu](int32_t) -> Result<std::unique_ptr<ops::Backend>> {
      return std::unique_ptr<ops::Backend>(std::make_unique<ops::cpu::CpuBackend>(cpu));
    });
    if (!ranks.ok()) return ranks.status();
    return std::unique_ptr<Executor>(std::move(*ranks));
  }
  auto executor = nn::PairExecutor::create(std::make_unique<ops::cpu::CpuBackend>(cpu), pair, options);
  if (!executor.ok()) return executor.status();
  return std::unique_ptr<Executor>(std::move(*executor));
}

}  // namespace ddtree
