// The first tokens over many seeds fit the exact processed probabilities, in every mode; the same test fails a sampler that is a little
// biased. Exact means: the target's own logits by plain passes over the prompt, processed by definition in float64.
#include <fmt/core.h>

#include <algorithm>
#include <catch2/catch_test_macros.hpp>
#include <cmath>
#include <map>
#include <set>

#include "engine/sampler.h"
#include "support/collect.h"
#include "support/tiny.h"

using namespace ddtree;
using namespace ddtree::testing;

namespace {

constexpr float kTemperature = 1.0F, kTopP = 0.98F, kPresence = 0.6F;
constexpr int32_t kTopK = 30;
constexpr int32_t kTokens = 3;  // looked at in each completion: one from the prompt's pass, the others from rounds

// The prompt: short, so that thousands of them take seconds, and in the middle of a story, where many words can follow.
std::vector<int32_t> prompt() { return tiny_tokenizer().encode("<|im_start|>assistant\nOnce upon a time there was a"); }

// Logits of the token after `ids`, by one plain pass.
std::vector<float> plain_logits(Executor& executor, const std::vector<int32_t>& ids) {
  executor.reset_slot(0);
  std::vector<int32_t> pages(4);
  for (size_t i = 0; i < pages.size(); ++i) pages[i] = static_cast<int32_t>(i);
  Forest f;
  for (size_t i = 0; i < ids.size(); ++i) {
    f.token.push_back(ids[i]);
    f.position.push_back(static_cast<int32_t>(i));
    f.parent.push_back(static_cast<int32_t>(i) - 1);
    f.wants_logits.push_back(i + 1 == ids.size());
  }
  f.segments.push_back({0, static_cast<int32_t>(ids.size()), true, 0, pages, 0});
  PassOutput out;
  REQUIRE(executor.forward(f, &out).ok());
  return {out.logits, out.logits + executor.target().vocab_size};
}

// presence penalty over `generated`, temperature, top_k, top_p.
std::map<int32_t, double> exact(std::vector<float> logits, const std::vector<int32_t>& generated) {
  for (int32_t id : std::set<int32_t>(generated.begin(), generated.end())) logits[static_cast<size_t>(id)] -= kPresence;
  std::vector<int32_t> order;
  for (size_t i = 0; i < logits.size(); ++i) order.push_back(static_cast<int32_t>(i));
  std::stable_sort(order.begin(), order.end(),
                   [&](int32_t a, int32_t b) { return logits[static_cast<size_t>(a)] > logits[static_cast<size_t>(b)]; });
  order.resize(kTopK);
  std::vector<double> w;
  double total = 0, before = 0, kept = 0;
  for (int32_t id : order)
    w.push_back(std::exp(static_cast<double>(logits[static_cast<size_t>(id)] - logits[static_cast<size_t>(order[0])]) /
                         static_cast<double>(kTemperature)));
  for (double x : w) total += x;
  std::map<int32_t, double> out;
  for (size_t i = 0; i < w.size() && before < static_cast<double>(kTopP) * total; ++i) out[order[i]] = w[i], kept += w[i], before += w[i];
  for (auto& [id, x] : out) x /= kept;
  return out;
}

// The upper tail of chi-square by Wilson and Hilferty: standard normal deviate of x with n degrees.
double deviate(double x, double n) { return (std::cbrt(x / n) - (1 - 2 / (9 * n))) / std::sqrt(2 / (9 * n)); }

struct Fit {
  double chi = 0;
  int degrees = 0;
  int impossible = 0;  // tokens drawn that the filters exclude
  double sigma() const { return degrees > 0 ? deviate(chi, degrees) : 0; }
};

// Compares draws with probabilities; cells under 5 expected are joined.
void add_fit(const std::map<int32_t, int>& counts, const std::map<int32_t, double>& expected, Fit* fit) {
  int draws = 0;
  for (const auto& [id, n] : counts) {
    draws += n;
    if (!expected.contains(id)) fit->impossible += n;
  }
  double small_expected = 0, small_seen = 0;
  int cells = 0;
  const auto cell = [&](double e, double seen) { fit->chi += (seen - e) * (seen - e) / e, ++cells; };
  for (const auto& [id, p] : expected) {
    const auto it = counts.find(id);
    const double seen = it == counts.end() ? 0 : it->second;
    if (p * draws < 5) small_expected += p * draws, small_seen += seen;
    else cell(p * draws, seen);
  }
  if (small_expected >= 5) cell(small_expected, small_seen);
  fit->degrees += std::max(cells - 1, 0);
}

struct Mode {
  SpeculationMode mode;
  int32_t budget;
};
constexpr Mode kModes[] = {{SpeculationMode::kNone, 0},
                           {SpeculationMode::kDflash, 0},
                           {SpeculationMode::kDdtree, 0},
                           {SpeculationMode::kDdtree, 48},
                           {SpeculationMode::kNextn, 0}};

std::vector<std::vector<int32_t>> draw(Executor& executor, const Mode& mode, int seeds, std::unique_ptr<Sampler> sampler,
                                       int64_t* accepted) {
  EngineOptions o;
  o.measure_costs = false;
  o.eos_ids = tiny_pair().defaults.eos_ids;
  EngineSeams seams;
  seams.sampler = std::move(sampler);
  seams.now = frozen_clock;
  auto engine = start_engine(executor, tiny_tokenizer(), o, std::move(seams));
  REQUIRE(engine.ok());
  std::vector<std::vector<int32_t>> out;
  std::vector<std::shared_ptr<Collected>> waiting;
  for (int i = 0; i < seeds; ++i) {
    Request r;
    r.prompt = prompt();
    r.max_tokens = kTokens;
    r.ignore_eos = true;
    r.mode = mode.mode;
    r.budget = mode.budget;
    r.sampling.temperature = kTemperature;
    r.sampling.top_p = kTopP;
    r.sampling.top_k = kTopK;
    r.sampling.presence_penalty = kPresence;
    r.sampling.seed = static_cast<uint64_t>(i) + 1;
    waiting.push_back(std::make_shared<Collected>());
    REQUIRE((*engine)->submit(r, sink_of(waiting.back())).ok());
    if (waiting.size() == 200 || i + 1 == seeds) {
      for (auto& c : waiting) {
        c->wait();
        REQUIRE(c->ids.size() == kTokens);
        out.push_back(c->ids);
      }
      waiting.clear();
    }
  }
  *accepted = (*engine)->snapshot().accepted;
  return out;
}

// Token t given the tokens before it, for the prefixes that came often enough.
Fit fit_of(Executor& executor, const std::vector<std::vector<int32_t>>& draws) {
  static std::map<std::vector<int32_t>, std::map<int32_t, double>> known;  // the same for every mode
  Fit fit;
  for (int32_t t = 0; t < kTokens; ++t) {
    std::map<std::vector<int32_t>, std::map<int32_t, int>> by_prefix;
    for (const auto& d : draws) ++by_prefix[{d.begin(), d.begin() + t}][d[static_cast<size_t>(t)]];
    for (const auto& [prefix, counts] : by_prefix) {
      int n = 0;
      for (const auto& [id, c] : counts) n += c;
      if (n < static_cast<int>(draws.size()) / 20) continue;
      auto [it, fresh] = known.try_emplace(prefix);
      if (fresh) {
        std::vector<int32_t> ids = prompt();
        ids.insert(ids.end(), prefix.begin(), prefix.end());
        it->second = exact(plain_logits(executor, ids), prefix);
      }
      add_fit(counts, it->second, &fit);
    }
  }
  return fit;
}

// Most of a logit more for one in four ids: a bias of the kind that a wrong key or a reused random number makes.
class BiasedSampler final : public Sampler {
 public:
  ops::Sampled choose(std::span<const float> l, const ops::SampleParams& p, const ops::TokenHistory* h, std::span<const int32_t> path,
                      std::span<const int32_t> b, int64_t position) override {
    std::vector<float> x(l.begin(), l.end());
    for (size_t i = 0; i < x.size(); i += 4) x[i] += 0.9F;
    return Sampler::choose(x, p, h, path, b, position);
  }
};

}  // namespace

TEST_CASE("distribution: the first tokens of 2,000 seeds fit the exact probabilities in every mode; a biased sampler does not") {
  auto executor = tiny_executor(64, 8, 512);
  const int seeds = scaled(2000, 400);
  std::vector<std::vector<int32_t>> plain;
  for (const Mode& mode : kModes) {
    int64_t accepted = 0;
    const auto draws = draw(*executor, mode, seeds, std::make_unique<Sampler>(), &accepted);
    const Fit fit = fit_of(*executor, draws);
    INFO(fmt::format("{} budget {}: chi-square {:.1f} of {} degrees, {:.2f} sigma, {} draft tokens accepted", mode_name(mode.mode),
                     mode.budget, fit.chi, fit.degrees, fit.sigma(), accepted));
    CHECK(fit.degrees >= (seeds < 2000 ? 20 : 80));  // enough tokens of enough weight: one degree would fit anything
    CHECK(fit.impossible == 0);
    CHECK(std::abs(fit.sigma()) < 4);
    // Otherwise the tree's rows were never used. (auto drafts little here: what follows is not easily guessed.)
    const bool automatic = mode.mode == SpeculationMode::kDdtree && mode.budget == 0;
    if (mode.mode != SpeculationMode::kNone) CHECK(accepted > (automatic ? 0 : seeds / 20));
    if (plain.empty()) plain = draws;
    // And seed by seed the same text, but for near-ties.
    int different = 0;
    for (size_t i = 0; i < draws.size(); ++i) different += draws[i] != plain[i] ? 1 : 0;
    CHECK(different <= seeds / 100);
  }
  int64_t accepted = 0;
  const Fit biased = fit_of(*executor, draw(*executor, kModes[3], seeds, std::make_unique<BiasedSampler>(), &accepted));
  INFO("biased: " << biased.sigma() << " sigma");
  CHECK(biased.sigma() > 4);
}
