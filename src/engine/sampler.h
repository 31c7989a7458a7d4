// Where the engine's tokens are chosen if the pass has not done it (PassOutput::chosen; on a device it has): a seam for tests, which put a
// biased sampler in to see that they would notice one.
#pragma once

#include <chrono>
#include <functional>
#include <memory>

#include "engine/engine.h"
#include "ops/sample.h"

namespace ddtree {

class Sampler {
 public:
  virtual ~Sampler() = default;
  // As ops::sample.
  virtual ops::Sampled choose(std::span<const float> logits, const ops::SampleParams& params, const ops::TokenHistory* history,
                              std::span<const int32_t> path, std::span<const int32_t> banned, int64_t position) {
    return ops::sample(logits, params, history, path, banned, position, scratch_);
  }

 private:
  ops::SampleScratch scratch_;
};

// What tests may put in the place of the real thing.
struct EngineSeams {
  std::unique_ptr<Sampler> sampler = std::make_unique<Sampler>();
  // The clock by which passes are measured: with an executor that says what its passes cost, `auto` can be tested without a stopwatch.
  std::function<std::chrono::steady_clock::time_point()> now = std::chrono::steady_clock::now;
};

// Engine::start with seams of one's own.
Result<std::unique_ptr<Engine>> start_engine(Executor& executor, const Tokenizer& tokenizer, EngineOptions options, EngineSeams seams);

}  // namespace ddtree
