// The tiny pair on a card: the golden prompts through the whole engine. BF16 activations, so ids may part at near-ties, and only there.
#include <fmt/core.h>

#include <catch2/catch_test_macros.hpp>
#include <cmath>
#include <numeric>

#include "gpu/card.h"
#include "support/collect.h"
#include "support/tiny.h"

using namespace ddtree;
using namespace ddtree::testing;

namespace {

std::vector<std::shared_ptr<Collected>> run_all(Engine& engine, SpeculationMode mode, int32_t budget) {
  std::vector<std::shared_ptr<Collected>> out;
  for (const Golden& g : golden_prompts()) {
    Request r;
    r.prompt = g.prompt_ids;
    r.max_tokens = 160;
    r.sampling.temperature = 0;
    r.mode = mode;
    r.budget = budget;
    out.push_back(std::make_shared<Collected>());
    const auto id = engine.submit(r, sink_of(out.back()));
    INFO(id.status().message());
    REQUIRE(id.ok());
  }
  for (auto& c : out) c->wait();
  return out;
}

void golden(bool portable) {
  auto executor = tiny_card_executor(portable, 256, 8, 8 * 257 + 64);
  EngineOptions options;
  options.measure_costs = false;
  auto engine = tiny_engine(*executor, options);
  const auto plain = run_all(*engine, SpeculationMode::kNone, 0);
  size_t equal = 0;
  for (size_t i = 0; i < plain.size(); ++i) {
    const Golden& g = golden_prompts()[i];
    INFO("prompt: " << g.prompt << "\nerror: " << plain[i]->last.error);
    REQUIRE(plain[i]->last.finish != FinishReason::kError);
    if (plain[i]->ids == g.greedy_ids) {
      ++equal;
    } else {
      CHECK(g.smallest_gap < 0.05);
      WARN(fmt::format("differs, recorded gap {}: {}", g.smallest_gap, g.prompt));
    }
  }
  WARN(fmt::format("{} of {} prompts give the recorded ids", equal, plain.size()));
  CHECK(static_cast<double>(equal) >= 0.95 * static_cast<double>(plain.size()) - 1e-9);

  for (int32_t budget : {-1, 0, 8, 15, 16, 32, 64, 128, 256}) {
    const auto mode = budget < 0 ? SpeculationMode::kNextn : budget == 0 ? SpeculationMode::kDflash : SpeculationMode::kDdtree;
    const auto got = run_all(*engine, mode, std::max(budget, 0));
    double tokens = 0, rounds = 0, want_tokens = 0, want_rounds = 0;
    for (size_t i = 0; i < got.size(); ++i) {
      const Golden& g = golden_prompts()[i];
      INFO(mode_name(mode) << " " << budget << ", prompt: " << g.prompt << "\nerror: " << got[i]->last.error);
      CHECK((got[i]->ids == plain[i]->ids || g.smallest_gap < 0.05));
      const auto& emitted = got[i]->last.stats.emitted;
      tokens += std::accumulate(emitted.begin(), emitted.end(), 0), rounds += static_cast<double>(emitted.size());
      if (budget >= 0)
        for (int n : g.emitted[std::to_string(budget)].get<std::vector<int>>()) want_tokens += n, want_rounds += 1;
    }
    const double mean = tokens / rounds, want = budget < 0 ? 2.7024 : want_tokens / want_rounds;
    WARN(fmt::format("{} {}: {:.3f} tokens a round, recorded {:.3f}", mode_name(mode), budget, mean, want));
    CHECK(std::fabs(mean / want - 1) < 0.02);
  }
}

}  // namespace

TEST_CASE("gpu: the golden prompts on the card's best kernels") { golden(false); }
TEST_CASE("gpu: the golden prompts on the portable kernels") { golden(true); }
