// The tiny pair, loaded once, and the golden outputs.
#pragma once

#include <cstdlib>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "engine/sampler.h"
#include "model/pair.h"
#include "nn/cpu_executor.h"
#include "text/tokenizer.h"

namespace ddtree::testing {

inline const LoadedPair& tiny_pair() {
  static const LoadedPair pair = [] {
    // A build without the embedded pair (small enough to carry to a machine with a card) names the folder.
    const char* folder = std::getenv("DDTREE_TINY_PAIR");
    auto r = folder ? load_pair(std::string(folder) + "/target", std::string(folder) + "/draft") : load_pair("tiny");
    if (!r) throw std::runtime_error(r.status().message());
    return std::move(*r);
  }();
  return pair;
}

inline const Tokenizer& tiny_tokenizer() {
  static const Tokenizer t = [] {
    auto r = Tokenizer::from_json(tiny_pair().tokenizer_json, tiny_pair().tokenizer_config_json, "tokenizer.json");
    if (!r) throw std::runtime_error(r.status().message());
    return std::move(*r);
  }();
  return t;
}

inline std::unique_ptr<Executor> tiny_executor(int32_t pages = 256, int32_t slots = 8, int32_t max_rows = 512) {
  ExecutorOptions o;
  o.pages = pages;
  o.slots = slots;
  o.max_rows = max_rows;
  auto r = make_cpu_executor(tiny_pair(), o);
  if (!r) throw std::runtime_error(r.status().message());
  return std::move(*r);
}

// No time passes: what `auto` does depends on no stopwatch, and it drafts wherever it can.
inline std::chrono::steady_clock::time_point frozen_clock() { return {}; }

inline std::unique_ptr<Engine> tiny_engine(Executor& executor, EngineOptions options) {
  options.eos_ids = tiny_pair().defaults.eos_ids;
  EngineSeams seams;
  seams.now = frozen_clock;
  auto r = start_engine(executor, tiny_tokenizer(), std::move(options), std::move(seams));
  if (!r) throw std::runtime_error(r.status().message());
  return std::move(*r);
}

struct Golden {
  std::string kind, prompt, text;
  std::vector<int32_t> prompt_ids, greedy_ids;
  double smallest_gap = 0;
  nlohmann::json emitted;
};

inline const std::vector<Golden>& golden_prompts() {
  static const std::vector<Golden> all = [] {
    std::vector<Golden> out;
    std::ifstream file(std::string(DDTREE_SOURCE_DIR) + "/tests/data/golden/golden.jsonl");
    for (std::string line; std::getline(file, line);) {
      const auto j = nlohmann::json::parse(line);
      out.push_back({j["kind"], j["prompt"], j["text"], j["prompt_ids"], j["greedy_ids"], j["smallest_gap"], j["emitted"]});
    }
    if (out.empty()) throw std::runtime_error("tests/data/golden/golden.jsonl is missing or empty");
    return out;
  }();
  return all;
}

// How much of the heavy tests to run: DDTREE_TEST_SCALE, 1 by default; less under sanitizers unless it is set.
inline double test_scale() {
  if (const char* text = std::getenv("DDTREE_TEST_SCALE")) return std::max(std::atof(text), 0.001);
#ifdef DDTREE_SANITIZED
  return 0.1;
#else
  return 1;
#endif
}

inline int scaled(int full, int least) { return std::max(static_cast<int>(full * test_scale()), least); }

}  // namespace ddtree::testing
