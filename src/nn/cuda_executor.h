// The executor on one CUDA card: BF16 weights and activations, float32 residual stream, state and accumulation.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "base/status.h"
#include "model/pair.h"
#include "nn/executor.h"
#include "ops/backend.h"

namespace ddtree {

// As make_cpu_executor. kUnavailable: this build has no CUDA engine, or the machine no usable driver or card (the message says which and
// what is needed); kTemporary: a driver that does not answer properly yet. portable: never the kernels that need Hopper (for tests).
Result<std::unique_ptr<Executor>> make_cuda_executor(const LoadedPair& pair, ExecutorOptions options, int device = 0,
                                                     bool portable = false);

// A card's backend by itself, for measurements below an executor. The same errors.
Result<std::unique_ptr<ops::Backend>> make_cuda_backend(int device);

// What a card's driver says of its memory, before anything is loaded. Errors as above.
struct CardMemory {
  std::string name;
  int64_t total = 0, free = 0;  // bytes
};
Result<CardMemory> card_memory(int device);

}  // namespace ddtree
