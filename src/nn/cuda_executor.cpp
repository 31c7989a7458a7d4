#include "nn/cuda_executor.h"

#ifdef DDTREE_HAS_CUDA
#include <fmt/core.h>

#include "nn/footprint.h"
#include "nn/pair_executor.h"
#include "ops/cuda/cuda_backend.h"
#endif

namespace ddtree {

#ifdef DDTREE_HAS_CUDA
Result<std::unique_ptr<Executor>> make_cuda_executor(const LoadedPair& pair, ExecutorOptions options, int device, bool portable) {
  if (options.tp_size != 1)
    return Status(
        Code::kUnavailable,
        fmt::format("{} ranks on CUDA cards: this build has no collectives between cards; one card works, and ranks on the CPU do",
                    options.tp_size));
  ops::cuda::CudaOptions cuda{.device = device, .portable_kernels = portable, .graphs = options.graphs};
  if (!options.single_allocations) {
    auto footprint = PairFootprint::of(pair, ops::DeviceKind::kCuda);
    if (!footprint.ok()) return footprint.status();
    auto planned = footprint->with(options);
    if (!planned.ok()) return planned.status();
    cuda.arena_bytes = planned->total();
  }
  auto backend = ops::cuda::CudaBackend::create(cuda);
  if (!backend.ok()) return backend.status();
  auto executor = nn::PairExecutor::create(std::move(*backend), pair, options);
  if (!executor.ok()) return executor.status();
  return std::unique_ptr<Executor>(std::move(*executor));
}

Result<std::unique_ptr<ops::Backend>> make_cuda_backend(int device) {
  auto backend = ops::cuda::CudaBackend::create({.device = device});
  if (!backend.ok()) return backend.status();
  return std::unique_ptr<ops::Backend>(std::move(*backend));
}

Result<CardMemory> card_memory(int device) {
  const auto found = ops::cuda::find_device(device);
  if (!found.ok()) return found.status();
  return CardMemory{found->name, found->memory_bytes, found->free_bytes};
}
#else
namespace {
Status no_engine() {
  return Status(Code::kUnavailable, "this build has no CUDA engine: nvcc was not found when it was made (DDTREE_CUDA=on insists on it)");
}
}  // namespace
Result<std::unique_ptr<ops::Backend>> make_cuda_backend(int) { return no_engine(); }
Result<std::unique_ptr<Executor>> make_cuda_executor(const LoadedPair&, ExecutorOptions, int, bool) { return no_engine(); }
Result<CardMemory> card_memory(int) { return no_engine(); }
#endif

}  // namespace ddtree
