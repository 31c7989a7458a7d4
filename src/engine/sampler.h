// Where the engine's tokens are chosen: a seam for tests, which put a biased sampler in to see that they would notice one.
#pragma once

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

// Engine::start with a sampler of one's own.
Result<std::unique_ptr<Engine>> start_engine(Executor& executor, const Tokenizer& tokenizer, EngineOptions options,
                                             std::unique_ptr<Sampler> sampler);

}  // namespace ddtree
