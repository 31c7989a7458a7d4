// Choices that come with the pass, as on a device: the same answers as choosing along the walk, in every mode, for every kind of request.
#include <fmt/core.h>

#include <catch2/catch_test_macros.hpp>
#include <random>

#include "nn/pair_executor.h"
#include "ops/cpu/cpu_backend.h"
#include "support/collect.h"
#include "support/random_request.h"
#include "support/tiny.h"

using namespace ddtree;
using namespace ddtree::testing;

namespace {

std::unique_ptr<Executor> choosing_executor(int32_t pages, int32_t slots, int32_t max_rows) {
  ExecutorOptions o;
  o.pages = pages, o.slots = slots, o.max_rows = max_rows;
  auto r =
      nn::PairExecutor::create(std::make_unique<ops::cpu::CpuBackend>(ops::cpu::CpuOptions{}), tiny_pair(), o, {.choose_in_pass = true});
  INFO(r.status().message());
  REQUIRE(r.ok());
  return std::move(*r);
}

// Passes that choose, seen from outside; fetches are counted.
class Watched final : public Executor {
 public:
  explicit Watched(std::unique_ptr<Executor> inner) : inner_(std::move(inner)) {}
  const ModelSpec& target() const override { return inner_->target(); }
  const DrafterSpec* drafter() const override { return inner_->drafter(); }
  bool has_mtp() const override { return inner_->has_mtp(); }
  const ExecutorOptions& options() const override { return inner_->options(); }
  int32_t real_vocab() const override { return inner_->real_vocab(); }
  void reset_slot(int32_t slot) override { inner_->reset_slot(slot); }
  Status forward(const Forest& f, PassOutput* out) override {
    const Status s = inner_->forward(f, out);
    with_logits += out->logits != nullptr;
    if (leave_out)
      for (int32_t& token : out->chosen) token = -1;
    return s;
  }
  Result<const float*> row_logits(const PassOutput& out, int32_t row) override { return ++fetched, inner_->row_logits(out, row); }
  Status commit(const Forest& f, std::span<const Accepted> a) override { return inner_->commit(f, a); }
  Status draft(std::span<const DraftQuery> q, int32_t k, DraftOutput* out) override { return inner_->draft(q, k, out); }
  Status draft_nextn(std::span<const DraftQuery> q, int32_t n, DraftOutput* out) override { return inner_->draft_nextn(q, n, out); }

  int fetched = 0, with_logits = 0;
  bool leave_out = false;  // as if every row were beyond the backend's bounds

 private:
  std::unique_ptr<Executor> inner_;
};

EngineOptions options(bool shadow) {
  EngineOptions o;
  o.measure_costs = false;
  o.mode = SpeculationMode::kDdtree;
  o.max_running = 4;
  o.prefill_chunk = 40;
  o.shadow_linear = shadow;
  return o;
}

std::vector<std::shared_ptr<Collected>> answers(Executor& executor, const std::vector<Request>& requests, bool shadow) {
  auto engine = tiny_engine(executor, options(shadow));
  std::vector<std::shared_ptr<Collected>> got;
  for (const Request& r : requests) {
    got.push_back(std::make_shared<Collected>());
    REQUIRE(engine->submit(r, sink_of(got.back())).ok());
  }
  for (const auto& c : got) c->wait();
  return got;
}

}  // namespace

TEST_CASE("choices of the pass: the ids of choosing along the walk, and no row is fetched", "[choose]") {
  for (const bool shadow : {false, true}) {
    std::mt19937 rng(5);
    std::vector<Request> requests;
    int sampled = 0, penalised = 0;
    for (int i = 0; i < scaled(24, 8); ++i) {
      Request r = random_request(rng, 30);
      r.mode = kModes[rng() % 4];
      r.budget = rng() % 3 == 0 ? 0 : 1 + static_cast<int32_t>(rng() % 40);
      sampled += r.sampling.temperature > 0;
      penalised += r.sampling.presence_penalty != 0 || r.sampling.repetition_penalty != 1;
      requests.push_back(std::move(r));
    }
    CHECK((sampled > 2 && penalised > 2));
    auto walking = tiny_executor(256, 4, 300);
    Watched choosing(choosing_executor(256, 4, 300));
    const auto want = answers(*walking, requests, shadow), got = answers(choosing, requests, shadow);
    CHECK((choosing.fetched == 0 && choosing.with_logits == 0));
    for (size_t i = 0; i < requests.size(); ++i) {
      INFO(fmt::format("request {}, {} T {}, shadow {}", i, mode_name(*requests[i].mode), requests[i].sampling.temperature, shadow));
      CHECK(got[i]->last.error.empty());
      CHECK(got[i]->ids == want[i]->ids);
      CHECK(got[i]->text == want[i]->text);
      CHECK(got[i]->last.stats.near_ties == want[i]->last.stats.near_ties);
      CHECK(got[i]->last.stats.smallest_gap == want[i]->last.stats.smallest_gap);
    }
  }
}

TEST_CASE("choices of the pass: what it leaves out is fetched and chosen by the host", "[choose]") {
  Watched choosing(choosing_executor(256, 4, 300));
  auto walking = tiny_executor(256, 4, 300);
  std::vector<Request> requests;
  for (int i = 0; i < 4; ++i) {
    Request r;
    r.prompt = golden_prompts()[static_cast<size_t>(2 + i)].prompt_ids;
    r.max_tokens = 12, r.mode = kModes[i], r.budget = 12;
    r.sampling.temperature = 0.8F, r.sampling.top_p = 0.9F, r.sampling.seed = 3;
    requests.push_back(std::move(r));
  }
  choosing.leave_out = true;
  const auto want = answers(*walking, requests, false), got = answers(choosing, requests, false);
  CHECK(choosing.fetched > 12);
  for (size_t i = 0; i < requests.size(); ++i) CHECK(got[i]->ids == want[i]->ids);
}

TEST_CASE("choices of the pass: a history beyond the staged lists leaves its rows, and no others, to the host", "[choose]") {
  auto executor = choosing_executor(16, 2, 32);
  ops::TokenHistory small, large;
  small.generated = {{5, 2}, {9, 1}};
  for (int32_t i = 0; i < 20000; ++i) large.generated[i] = 1;  // ids past the vocabulary count as little as any that never comes
  ops::SampleParams params{.temperature = 0.7F, .presence_penalty = 1, .seed = 9};
  const std::vector<int32_t> pages{0, 1}, more{2, 3};
  Forest f;
  f.token = {7, 8, 7, 8}, f.position = {0, 1, 0, 1}, f.parent = {-1, 0, -1, 2}, f.wants_logits = {1, 1, 1, 1};
  f.segments = {{0, 2, false, 0, pages, 0, {.params = params, .history = &large, .history_end = 1}},
                {2, 2, false, 1, more, 0, {.params = params, .history = &small, .history_end = 1}}};
  PassOutput out;
  const Status s = executor->forward(f, &out);
  INFO(s.message());
  REQUIRE(s.ok());
  REQUIRE(out.chosen.size() == 4);
  CHECK((out.chosen[0] == -1 && out.chosen[1] == -1 && out.chosen[2] >= 0 && out.chosen[3] >= 0));
  const auto logits = executor->row_logits(out, 1);
  REQUIRE(logits.ok());
  ops::SampleScratch scratch;
  const std::vector<int32_t> path{8};
  const std::span<const float> row(*logits, static_cast<size_t>(executor->target().vocab_size));
  // The same logits as the second segment's: with its history the same choice.
  CHECK(ops::sample(row, params, &small, path, {}, 2, scratch).token == out.chosen[3]);
}
