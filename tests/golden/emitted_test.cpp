// The 40 golden prompts through the engine: greedy ids, and the tokens that each round emits, mode by mode and budget by budget. The
// outputs come from Hugging Face's model code in float32 and a tree builder in Python (tools/tiny/oracle.py).
#include <fmt/core.h>

#include <catch2/catch_test_macros.hpp>
#include <fstream>

#include "support/collect.h"
#include "support/tiny.h"

using namespace ddtree;
using namespace ddtree::testing;

namespace {

constexpr double kTie = 0.01;

EngineOptions golden_options() {
  EngineOptions o;
  o.measure_costs = false;

  return o;
}

// Runs all prompts together, so that they also share forests.
std::vector<std::shared_ptr<Collected>> run_all(Engine& engine, SpeculationMode mode, int32_t budget, size_t step) {
  std::vector<std::shared_ptr<Collected>> out;
  for (size_t i = 0; i < golden_prompts().size(); i += step) {
    Request r;
    r.prompt = golden_prompts()[i].prompt_ids;
    r.max_tokens = 160;
    r.sampling.temperature = 0;
    r.mode = mode;
    r.budget = budget;
    out.push_back(std::make_shared<Collected>());
    const auto id = engine.submit(r, sink_of(out.back()));
    REQUIRE(id.ok());
  }
  for (auto& c : out) c->wait();
  return out;
}

// Ids must be equal; where they are not, only from a step on whose two best logits were closer than kTie. Returns the length of the
// common part, or -1 if all is equal.
int32_t check_ids(const Golden& g, const Collected& c, const std::string& what) {
  INFO(what << ", prompt: " << g.prompt);
  const auto& s = c.last.stats;
  size_t n = 0;
  while (n < g.greedy_ids.size() && n < c.ids.size() && g.greedy_ids[n] == c.ids[n]) ++n;
  if (n == g.greedy_ids.size() && n == c.ids.size()) {
    CHECK(c.last.finish == FinishReason::kStop);
    return -1;
  }
  CHECK(g.smallest_gap < kTie);
  CHECK(s.first_near_tie >= 0);
  CHECK(s.first_near_tie <= static_cast<int32_t>(n));
  WARN(fmt::format("{}: differs from token {} on, after a near-tie at {} (recorded gap {})", what, n, s.first_near_tie, g.smallest_gap));
  return static_cast<int32_t>(n);
}

void check_emitted(const std::vector<int32_t>& expected, const Collected& c, int32_t common, const std::string& what, const Golden& g) {
  INFO(what << ", prompt: " << g.prompt);
  const auto& got = c.last.stats.emitted;
  if (common < 0) {
    CHECK(got == expected);
    return;
  }
  // After a tie only the rounds that lie wholly before it are comparable.
  int32_t produced = 1;
  for (size_t i = 0; i < expected.size() && i < got.size(); ++i) {
    produced += expected[i];
    if (produced > common) break;
    CHECK(got[i] == expected[i]);
  }
}

}  // namespace

TEST_CASE("golden: plain decoding gives the recorded greedy ids and text") {
  auto executor = tiny_executor();
  auto engine = tiny_engine(*executor, golden_options());
  const auto got = run_all(*engine, SpeculationMode::kNone, 0, 1);
  for (size_t i = 0; i < got.size(); ++i) {
    const Golden& g = golden_prompts()[i];
    if (check_ids(g, *got[i], "NONE") < 0) {
      CHECK(got[i]->text == tiny_tokenizer().decode(g.greedy_ids, true));
      CHECK(static_cast<size_t>(got[i]->last.stats.rounds) == g.greedy_ids.size() - 1);
      CHECK(std::abs(static_cast<double>(got[i]->last.stats.smallest_gap) - g.smallest_gap) < 2e-3);
    }
  }
}

TEST_CASE("golden: DFLASH and DDTREE emit exactly the recorded rounds for every budget") {
  auto executor = tiny_executor(256, 8, 8 * 257 + 512);  // no tree is cut for want of rows
  auto engine = tiny_engine(*executor, golden_options());
  const size_t step = test_scale() < 0.5 ? 4 : 1;
  for (int32_t budget : {0, 8, 15, 16, 32, 64, 128, 256}) {
    const auto got = run_all(*engine, budget == 0 ? SpeculationMode::kDflash : SpeculationMode::kDdtree, budget, step);
    const std::string what = budget == 0 ? "DFLASH" : fmt::format("DDTREE {}", budget);
    for (size_t i = 0; i < got.size(); ++i) {
      const Golden& g = golden_prompts()[i * step];
      check_emitted(g.emitted[std::to_string(budget)].get<std::vector<int32_t>>(), *got[i], check_ids(g, *got[i], what), what, g);
    }
  }
}

TEST_CASE("golden: NEXTN with three drafts emits exactly the recorded rounds") {
  std::ifstream file(std::string(DDTREE_SOURCE_DIR) + "/tests/data/golden/parts.json");
  const auto parts = nlohmann::json::parse(file);
  auto executor = tiny_executor();
  auto engine = tiny_engine(*executor, golden_options());
  const size_t step = test_scale() < 0.5 ? 4 : 1;
  const auto got = run_all(*engine, SpeculationMode::kNextn, 0, step);
  for (size_t i = 0; i < got.size(); ++i) {
    const Golden& g = golden_prompts()[i * step];
    check_emitted(parts["nextn"][i * step].get<std::vector<int32_t>>(), *got[i], check_ids(g, *got[i], "NEXTN"), "NEXTN", g);
  }
}
