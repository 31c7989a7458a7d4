// Synthetic acceptance: a chain emits what was asked for, a tree more, plain decoding one, whatever the temperature.
#include <catch2/catch_test_macros.hpp>
#include <cmath>
#include <map>

#include "nn/synthetic_executor.h"
#include "support/collect.h"
#include "support/tiny.h"

namespace ddtree::testing {
namespace {

const int32_t kTokens = scaled(150, 40);

Request request(int32_t n, SpeculationMode mode, int32_t budget) {
  Request r;
  r.prompt = {100 + n, 200, 300};
  r.max_tokens = kTokens;
  r.sampling.temperature = 0;
  r.ignore_eos = true;  // a drawn token may be an end
  r.mode = mode, r.budget = budget;
  return r;
}

// Mean tokens a round over `count` requests, four at a time.
double tokens_a_round(Engine& engine, SpeculationMode mode, int32_t budget, int32_t count) {
  int64_t rounds = 0, tokens = 0;
  for (int32_t first = 0; first < count; first += 4) {
    std::vector<std::shared_ptr<Collected>> open;
    for (int32_t i = first; i < first + 4; ++i) {
      open.push_back(std::make_shared<Collected>());
      REQUIRE(engine.submit(request(i, mode, budget), sink_of(open.back())).ok());
    }
    for (const auto& c : open) {
      c->wait();
      REQUIRE(c->last.finish == FinishReason::kLength);
      CHECK(static_cast<int32_t>(c->ids.size()) == kTokens);
      rounds += c->last.stats.rounds, tokens += static_cast<int64_t>(c->ids.size()) - 1;
    }
  }
  return static_cast<double>(tokens) / static_cast<double>(rounds);
}

TEST_CASE("synthetic acceptance: a chain emits the mean, a tree more, plain decoding one token a round") {
  for (const double mean : {1.5, 4.0}) {
    SyntheticExecutor executor(tiny_executor(), mean);
    EngineOptions options;
    options.max_running = 4, options.budget = 64;
    const auto engine = tiny_engine(executor, options);
    INFO("mean " << mean << ", q " << executor.first_rank());
    // Five standard errors of runs of hits, each a hit with probability q.
    const double q = executor.first_rank(), rounds = 8 * kTokens / mean, spread = std::sqrt(q) / (1 - q) / std::sqrt(rounds);
    const double chain = tokens_a_round(*engine, SpeculationMode::kDflash, 0, 8);
    CHECK(std::abs(chain - mean) < 5 * spread);
    CHECK(tokens_a_round(*engine, SpeculationMode::kDdtree, 32, 8) > chain);  // with the chain's luck
    CHECK(tokens_a_round(*engine, SpeculationMode::kNone, 0, 4) == 1);
    Request sampled = request(0, SpeculationMode::kDdtree, 16);
    sampled.sampling.temperature = 1;
    const auto drawn = run_request(*engine, std::move(sampled));  // a sampled request costs what it costs; its choices are drawn too
    CHECK(drawn->last.finish == FinishReason::kLength);
    CHECK(static_cast<int32_t>(drawn->ids.size()) == kTokens);
  }
}

// Modes are compared on few requests: by luck of their own each would differ by several percent.
TEST_CASE("synthetic acceptance: a prompt has the same luck whatever ran before, in whatever slot and chunks") {
  SyntheticExecutor executor(tiny_executor(), 4.0);
  EngineOptions options;
  options.max_running = 4, options.budget = 64;
  const auto engine = tiny_engine(executor, options);
  std::map<int32_t, std::vector<int32_t>> emitted;
  for (const bool backwards : {false, true}) {
    std::vector<std::shared_ptr<Collected>> open;
    for (int32_t i = 0; i < 4; ++i) {
      open.push_back(std::make_shared<Collected>());
      REQUIRE(engine->submit(request(backwards ? 3 - i : i, SpeculationMode::kDflash, 0), sink_of(open.back())).ok());
    }
    for (int32_t i = 0; i < 4; ++i) {
      open[static_cast<size_t>(i)]->wait();
      const auto& got = open[static_cast<size_t>(i)]->last.stats.emitted;
      if (backwards) CHECK(std::vector<int32_t>(got.begin(), got.end()) == emitted[3 - i]);
      else emitted[i].assign(got.begin(), got.end());
    }
    if (!backwards) run_request(*engine, request(9, SpeculationMode::kDdtree, 8));
  }
  CHECK(emitted[0] != emitted[1]);
}

TEST_CASE("synthetic acceptance: how passes cut a prompt changes nothing of its luck") {
  const auto emitted = [](int32_t chunk) {
    SyntheticExecutor executor(tiny_executor(), 4.0);
    EngineOptions options;
    options.max_running = 1, options.prefill_chunk = chunk;
    const auto engine = tiny_engine(executor, options);
    Request r = request(0, SpeculationMode::kDflash, 0);
    for (int32_t id = 400; id < 440; ++id) r.prompt.push_back(id);
    return run_request(*engine, std::move(r))->last.stats.emitted;
  };
  const auto whole = emitted(256);
  for (const int32_t chunk : {1, 7, 42}) CHECK(emitted(chunk) == whole);
}

}  // namespace
}  // namespace ddtree::testing
