// The executor on one CUDA card: BF16 weights and activations, float32 residual stream, state and accumulation.
#pragma once

#include <memory>

#include "base/status.h"
#include "model/pair.h"
#include "nn/executor.h"
#include "ops/backend.h"

namespace ddtree {

// As make_cpu_executor. kUnavailable: this build has no CUDA engine, or the machine no usable driver or card (the message says which and
// what is needed); kTemporary: a driver that does not answer properly yet. portable: never the kernels that need Hopper (for tests).
Result<std::unique_ptr<Executor>> make_cuda_executor(const LoadedPair& pair, ExecutorOptions options, int device = 0,
                                                     bool portable = false);

// Whether that would find its card, before any file is opened. The same errors; takes nothing of the card but a context.
Status check_cuda_device(int device);

// A card's backend by itself, for measurements below an executor. The same errors.
Result<std::unique_ptr<ops::Backend>> make_cuda_backend(int device);

}  // namespace ddtree
