#include "nn/cpu_executor.h"

#include "nn/pair_executor.h"
#include "ops/cpu/cpu_backend.h"

namespace ddtree {

Result<std::unique_ptr<Executor>> make_cpu_executor(const LoadedPair& pair, ExecutorOptions options) {
  const ops::cpu::CpuOptions cpu{.threads = options.threads,
                                 .bfloat16_boundaries = options.precision == Precision::kBfloat16Boundaries,
                                 .bfloat16_residual = options.bfloat16_residual};
  auto executor = nn::PairExecutor::create(std::make_unique<ops::cpu::CpuBackend>(cpu), pair, options);
  if (!executor.ok()) return executor.status();
  return std::unique_ptr<Executor>(std::move(*executor));
}

}  // namespace ddtree
