// Requests of every kind, for tests that run a crowd of them.
#pragma once

#include <algorithm>
#include <random>

#include "support/tiny.h"

namespace ddtree::testing {

inline constexpr SpeculationMode kModes[] = {SpeculationMode::kNone, SpeculationMode::kDflash, SpeculationMode::kDdtree,
                                             SpeculationMode::kNextn};

// Greedy or sampled with its own seed, penalties, filters, stops, lengths up to most_tokens; on a golden prompt or a few of its tokens.
inline Request random_request(std::mt19937& rng, int32_t most_tokens = 60) {
  const auto& prompts = golden_prompts();
  Request r;
  r.prompt = prompts[rng() % prompts.size()].prompt_ids;
  if (rng() % 8 == 0) r.prompt.resize(1 + rng() % 5);
  r.max_tokens = 1 + static_cast<int32_t>(rng() % static_cast<unsigned>(most_tokens));
  SamplingParams& p = r.sampling;
  p.temperature = rng() % 2 ? 0.0F : 0.4F + static_cast<float>(rng() % 12) / 10;
  if (rng() % 2) p.top_k = 1 + static_cast<int32_t>(rng() % 40);
  if (rng() % 2) p.top_p = 0.5F + static_cast<float>(rng() % 50) / 100;
  if (rng() % 4 == 0) p.min_p = static_cast<float>(rng() % 20) / 100;
  if (rng() % 3 == 0) p.presence_penalty = static_cast<float>(rng() % 20) / 10;
  if (rng() % 3 == 0) p.frequency_penalty = static_cast<float>(rng() % 10) / 10 - 0.2F;
  if (rng() % 3 == 0) p.repetition_penalty = 1 + static_cast<float>(rng() % 5) / 10;
  p.seed = rng();
  p.seed_given = true;
  p.choice = static_cast<int32_t>(rng() % 3);
  r.ignore_eos = rng() % 3 == 0;
  r.min_tokens = rng() % 4 == 0 ? static_cast<int32_t>(rng() % static_cast<unsigned>(r.max_tokens)) : 0;
  if (rng() % 4 == 0) r.stop_strings = {rng() % 2 ? "\n\n" : "is", ". "};
  if (rng() % 6 == 0) r.stop_ids = {static_cast<int32_t>(rng() % 400)};
  r.include_stop_string = rng() % 2;
  return r;
}

}  // namespace ddtree::testing
