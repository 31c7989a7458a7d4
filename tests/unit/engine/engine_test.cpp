// The engine over a model that is a hash of the prefix: scheduling, memory, faults, and that speculation changes nothing.
#include "engine/engine.h"

#include <algorithm>
#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <chrono>
#include <numeric>
#include <random>
#include <thread>
#include <tuple>

#include "engine/sampler.h"
#include "spec/acceptance.h"
#include "support/collect.h"
#include "support/fake_executor.h"
#include "support/tiny.h"

using namespace ddtree;
using namespace ddtree::testing;
using Catch::Matchers::ContainsSubstring;

namespace {

ExecutorOptions room(int32_t pages = 400, int32_t slots = 8, int32_t max_rows = 512) {
  ExecutorOptions o;
  o.page_size = 8;
  o.pages = pages;
  o.slots = slots;
  o.max_rows = max_rows;
  return o;
}

EngineOptions quick(SpeculationMode mode = SpeculationMode::kNone) {
  EngineOptions o;
  o.mode = mode;
  o.measure_costs = false;
  return o;
}

std::unique_ptr<Engine> start(FakeExecutor& executor, EngineOptions options) {
  auto e = Engine::start(executor, tiny_tokenizer(), std::move(options));
  if (!e) FAIL(e.status().message());
  return std::move(*e);
}

Request greedy(std::vector<int32_t> prompt, int32_t max_tokens) {
  Request r;
  r.prompt = std::move(prompt);
  r.max_tokens = max_tokens;
  r.sampling.temperature = 0;
  return r;
}

// The greedy text by definition.
std::vector<int32_t> reference(std::vector<int32_t> prefix, int32_t count, int32_t vocab = 64) {
  std::vector<int32_t> out;
  for (int32_t i = 0; i < count; ++i) {
    const auto l = FakeExecutor::logits_of(prefix, vocab);
    out.push_back(static_cast<int32_t>(std::max_element(l.begin(), l.end()) - l.begin()));
    prefix.push_back(out.back());
  }
  return out;
}

void check_idle(const Engine& engine) {
  const EngineSnapshot s = engine.snapshot();
  CHECK(s.running == 0);
  CHECK(s.waiting == 0);
  CHECK(s.pages_used == 0);
  CHECK(s.slots_used == 0);
}

void check_identities(const RequestStats& s) {
  int64_t sum = 0, weighted = 0;
  for (size_t j = 0; j < s.histogram.size(); ++j) sum += s.histogram[j], weighted += static_cast<int64_t>(j) * s.histogram[j];
  CHECK(sum == s.rounds);
  CHECK(weighted == s.accepted);
  CHECK(std::accumulate(s.accepted_at.begin(), s.accepted_at.end(), int64_t{0}) == s.accepted);
  CHECK(static_cast<int32_t>(s.emitted.size()) == s.rounds);
  const int64_t emitted = std::accumulate(s.emitted.begin(), s.emitted.end(), int64_t{0});
  CHECK(emitted + 1 == s.completion_tokens);
  const int64_t uncut = s.accepted + s.rounds + 1;
  CHECK((s.completion_tokens == uncut || s.completion_tokens == uncut - 1));
}

constexpr SpeculationMode kModes[] = {SpeculationMode::kNone, SpeculationMode::kDflash, SpeculationMode::kDdtree, SpeculationMode::kNextn};

}  // namespace

TEST_CASE("every mode and budget gives the model's greedy text, and speculation needs fewer passes") {
  for (SpeculationMode mode : kModes)
    for (int32_t budget : {0, 1, 8, 40, 256}) {
      if (mode != SpeculationMode::kDdtree && budget != 0) continue;
      FakeExecutor executor(room());
      auto engine = start(executor, quick(mode));
      for (int32_t length : {1, 2, 3, 17, 60}) {
        Request r = greedy({3, 1, 4, 1, 5}, length);
        r.budget = budget;
        const auto got = run_request(*engine, r);
        CHECK(got->ids == reference(r.prompt, length));
        CHECK(got->last.finish == FinishReason::kLength);
        CHECK(got->last.stats.completion_tokens == length);
        CHECK(got->text == tiny_tokenizer().decode(got->ids, true));
        check_identities(got->last.stats);
        if (mode == SpeculationMode::kDflash && length == 60) CHECK(got->last.stats.rounds < 30);
        if (mode == SpeculationMode::kNone) CHECK(got->last.stats.rounds == length - 1);
      }
      check_idle(*engine);
    }
}

TEST_CASE("sampled text with a seed is the same in every mode, budget and company") {
  std::vector<std::vector<int32_t>> expected;
  for (SpeculationMode mode : kModes) {
    FakeExecutor executor(room());
    EngineOptions options = quick(mode);
    options.seed_chain = true;
    options.budget = 24;
    auto engine = start(executor, options);
    std::vector<std::shared_ptr<Collected>> all;
    for (uint64_t i = 0; i < 12; ++i) {
      Request r = greedy({static_cast<int32_t>(i % 3), 7, 9}, 30);
      r.sampling.temperature = 0.9F;
      r.sampling.top_p = i % 2 ? 0.9F : 1.0F;
      r.sampling.frequency_penalty = i % 3 == 0 ? 0.7F : 0;
      r.sampling.repetition_penalty = i % 4 == 0 ? 1.3F : 1;
      r.sampling.seed = 1000 + i / 2;
      r.sampling.choice = static_cast<int32_t>(i % 2);
      all.push_back(std::make_shared<Collected>());
      REQUIRE(engine->submit(r, sink_of(all.back())).ok());
    }
    for (size_t i = 0; i < all.size(); ++i) {
      all[i]->wait();
      if (expected.size() <= i) expected.push_back(all[i]->ids);
      CHECK(all[i]->ids == expected[i]);
    }
    check_idle(*engine);
  }
  CHECK(expected[0] != expected[6]);
}

TEST_CASE("sequences of all modes and budgets share forests") {
  FakeExecutor executor(room());
  auto engine = start(executor, quick());
  std::vector<std::shared_ptr<Collected>> all;
  std::vector<Request> requests;
  for (int i = 0; i < 32; ++i) {
    Request r = greedy({i % 5, 2, i % 7}, 20 + i);
    r.mode = kModes[i % 4];
    r.budget = i % 3 == 0 ? 0 : 1 + i * 3;
    requests.push_back(r);
    all.push_back(std::make_shared<Collected>());
    REQUIRE(engine->submit(r, sink_of(all.back())).ok());
  }
  for (size_t i = 0; i < all.size(); ++i) {
    all[i]->wait();
    CHECK(all[i]->ids == reference(requests[i].prompt, requests[i].max_tokens));
    CHECK(all[i]->finished == 1);
    CHECK(all[i]->last.stats.mode == *requests[i].mode);
  }
  CHECK(executor.max_segments == 8);
}

TEST_CASE("eight streams progress together, also while a long prompt comes in by chunks") {
  FakeExecutor executor(room(1000, 9));
  executor.keep_log = true;
  EngineOptions options = quick(SpeculationMode::kDflash);
  options.max_running = 9;
  options.prefill_chunk = 16;
  auto engine = start(executor, options);
  std::vector<std::shared_ptr<Collected>> all;
  executor.slow_ms = 1;  // so that all are there before the first is done
  for (int i = 0; i < 8; ++i) {
    all.push_back(std::make_shared<Collected>());
    REQUIRE(engine->submit(greedy({i, 1, 2, 3}, 200), sink_of(all.back())).ok());
  }
  std::vector<int32_t> long_prompt(300);
  for (size_t i = 0; i < long_prompt.size(); ++i) long_prompt[i] = static_cast<int32_t>(i % 60);
  all.push_back(std::make_shared<Collected>());
  REQUIRE(engine->submit(greedy(long_prompt, 5), sink_of(all.back())).ok());
  for (auto& c : all) c->wait();
  CHECK(all.back()->ids == reference(long_prompt, 5));
  int chunks = 0;
  for (const Forest& f : executor.log) {
    int prompt_rows = 0, decoding = 0;
    for (const Segment& s : f.segments) {
      if (s.certain && s.row_count > 1) prompt_rows += s.row_count;
      else ++decoding;
    }
    CHECK(prompt_rows <= 16);
    if (prompt_rows == 16 && decoding > 0) ++chunks;
  }
  CHECK(chunks >= 10);  // the prompt's chunks ran beside decoding sequences
  // Every stream was in every pass while it ran: none got all its tokens in one go.
  for (int i = 0; i < 8; ++i) CHECK(all[static_cast<size_t>(i)]->delta_sizes.size() >= 200 / 16);
}

TEST_CASE("a prompt comes in by larger chunks while nobody decodes, and trees stand before its rows") {
  ExecutorOptions bounded = room(1000, 9);
  bounded.max_tentative_rows = 100;
  FakeExecutor executor(bounded);
  executor.keep_log = true;
  EngineOptions options = quick(SpeculationMode::kDdtree);
  options.prefill_chunk = 16, options.lone_chunk = 64, options.budget = 20;
  auto engine = start(executor, options);
  std::vector<int32_t> prompt(300);
  for (size_t i = 0; i < prompt.size(); ++i) prompt[i] = static_cast<int32_t>(i % 60);
  executor.slow_ms = 1;  // so that the second prompt comes while the first request decodes
  auto first = std::make_shared<Collected>(), second = std::make_shared<Collected>();
  REQUIRE(engine->submit(greedy(prompt, 400), sink_of(first)).ok());
  while (engine->snapshot().completion_tokens == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  REQUIRE(engine->submit(greedy(prompt, 5), sink_of(second)).ok());
  first->wait(), second->wait();
  CHECK(first->ids == reference(prompt, 400));
  CHECK(second->ids == reference(prompt, 5));
  int alone = 0, beside = 0;
  for (const Forest& f : executor.log) {
    int prompt_rows = 0, decoding = 0;
    for (const Segment& s : f.segments) (s.certain && s.row_count > 1 ? prompt_rows : decoding) += s.certain ? s.row_count : 1;
    CHECK(prompt_rows <= (decoding > 0 ? 16 : 64));
    alone += prompt_rows == 64, beside += prompt_rows == 16 && decoding > 0;
  }
  CHECK(alone == 4);
  CHECK(beside >= 10);
}

TEST_CASE("prompt rows are shared, so a short prompt answers before a long one beside it") {
  FakeExecutor executor(room(1000));
  EngineOptions options = quick();
  options.prefill_chunk = 8;
  executor.slow_ms = 1;
  auto engine = start(executor, options);
  auto slow = std::make_shared<Collected>(), fast = std::make_shared<Collected>();
  REQUIRE(engine->submit(greedy(std::vector<int32_t>(400, 5), 1), sink_of(slow)).ok());
  REQUIRE(engine->submit(greedy({1, 2, 3, 4, 5, 6}, 3), sink_of(fast)).ok());
  fast->wait();
  {
    std::lock_guard lock(slow->mutex);
    CHECK(slow->finished == 0);
  }
  slow->wait();
}

TEST_CASE("requests wait where pages or slots are short, and never fail half-way") {
  // 12 pages of 8 tokens; each request needs 5: two run, the others wait.
  FakeExecutor executor(room(12, 8));
  auto engine = start(executor, quick(SpeculationMode::kDdtree));
  std::vector<std::shared_ptr<Collected>> all;
  for (int i = 0; i < 20; ++i) {
    all.push_back(std::make_shared<Collected>());
    REQUIRE(engine->submit(greedy({i, 2, 3}, 34), sink_of(all.back())).ok());
  }
  for (int i = 0; i < 20; ++i) {
    all[static_cast<size_t>(i)]->wait();
    CHECK(all[static_cast<size_t>(i)]->ids == reference({i, 2, 3}, 34));
  }
  CHECK(executor.max_segments == 2);
  check_idle(*engine);
  const auto refused = engine->submit(greedy({1}, 100), sink_of(std::make_shared<Collected>()));
  REQUIRE_FALSE(refused.ok());
  CHECK(refused.status().code() == Code::kDoesNotFit);
  CHECK_THAT(refused.status().message(), ContainsSubstring("need 13 KV pages of 8 tokens; the pool has 12"));

  FakeExecutor few(room(400, 3));
  auto second = start(few, quick(SpeculationMode::kNextn));
  std::vector<std::shared_ptr<Collected>> more;
  for (int i = 0; i < 9; ++i) {
    more.push_back(std::make_shared<Collected>());
    REQUIRE(second->submit(greedy({i}, 20), sink_of(more.back())).ok());
  }
  for (auto& c : more) c->wait();
  CHECK(few.max_segments == 3);
}

TEST_CASE("trees are cut to the rows of a forest, and still nothing changes") {
  FakeExecutor executor(room(400, 8, 20));
  EngineOptions options = quick(SpeculationMode::kDdtree);
  options.budget = 19;
  auto engine = start(executor, options);
  std::vector<std::shared_ptr<Collected>> all;
  for (int i = 0; i < 8; ++i) {
    Request r = greedy({i, 8, 8, 2, 1}, 40);
    r.mode = i % 2 ? SpeculationMode::kDdtree : SpeculationMode::kDflash;
    if (i % 4 == 1) r.budget = 0;
    all.push_back(std::make_shared<Collected>());
    REQUIRE(engine->submit(r, sink_of(all.back())).ok());
  }
  for (int i = 0; i < 8; ++i) {
    all[static_cast<size_t>(i)]->wait();
    CHECK(all[static_cast<size_t>(i)]->ids == reference({i, 8, 8, 2, 1}, 40));
  }
  CHECK(executor.max_rows_seen <= 20);
}

TEST_CASE("shadow commits what the chain alone would, and counts what the tree would have won") {
  FakeExecutor executor(room());
  executor.draft_hit_percent = 60;
  auto plain = start(executor, quick(SpeculationMode::kDflash));
  const auto chain = run_request(*plain, greedy({4, 4, 2}, 120));
  plain.reset();
  for (int32_t budget : {0, 4, 64}) {
    FakeExecutor other(room());
    other.draft_hit_percent = 60;
    EngineOptions options = quick(SpeculationMode::kDdtree);
    options.shadow_linear = true;
    options.budget = budget;
    auto engine = start(other, options);
    const auto shadow = run_request(*engine, greedy({4, 4, 2}, 120));
    CHECK(shadow->ids == chain->ids);
    CHECK(shadow->last.stats.emitted == chain->last.stats.emitted);
    CHECK(shadow->last.stats.shadow_disagreements == 0);
    if (budget == 64) CHECK(shadow->last.stats.tree_gain > 20);
    if (budget == 4) CHECK(shadow->last.stats.tree_gain < 0);  // a small tree is shallower than the chain
  }
}

namespace {

// Lies about rows off the chain, as a faulty tree kernel would.
class BranchLiar final : public Sampler {
 public:
  ops::Sampled choose(std::span<const float> l, const ops::SampleParams& p, const ops::TokenHistory* h, std::span<const int32_t> path,
                      std::span<const int32_t> b, int64_t position) override {
    auto s = Sampler::choose(l, p, h, path, b, position);
    if (!path.empty() && position % 3 == 0 && calls_++ % 4 == 0) s.token = (s.token + 1) % 64;
    return s;
  }

 private:
  int calls_ = 0;
};

}  // namespace

TEST_CASE("shadow notices a tree that foretells what does not come") {
  FakeExecutor executor(room());
  executor.draft_hit_percent = 60;
  EngineOptions options = quick(SpeculationMode::kDdtree);
  options.shadow_linear = true;
  options.budget = 64;
  EngineSeams seams;
  seams.sampler = std::make_unique<BranchLiar>();
  auto engine = start_engine(executor, tiny_tokenizer(), options, std::move(seams));
  REQUIRE(engine.ok());
  CHECK(run_request(**engine, greedy({4, 4, 2}, 200))->last.stats.shadow_disagreements > 0);
}

TEST_CASE("rounds are recorded when asked: rows, log-probs, what was accepted and what came instead") {
  FakeExecutor executor(room());
  auto engine = start(executor, quick(SpeculationMode::kDdtree));
  Request r = greedy({9, 9}, 50);
  r.budget = 20;
  r.record_trees = true;
  const auto got = run_request(*engine, r);
  const RequestStats& s = got->last.stats;
  REQUIRE(static_cast<int32_t>(s.trees.size()) == s.rounds);
  size_t index = 1;  // the first id came from the prompt's pass
  for (size_t i = 0; i < s.trees.size(); ++i) {
    const RoundRecord& t = s.trees[i];
    CHECK(t.start == static_cast<int32_t>(r.prompt.size() + index) - 1);
    CHECK(t.token[0] == got->ids[index - 1]);
    CHECK(t.parent[0] == -1);
    for (size_t n = 1; n < t.token.size(); ++n)
      if (t.accepted[n]) {
        CHECK(t.accepted[static_cast<size_t>(t.parent[n])]);
        CHECK(t.token[n] == got->ids[index++]);
        CHECK(t.log_prob[n] < 0);
      }
    if (t.next >= 0) CHECK(t.next == got->ids[index++]);
  }
  CHECK(index == got->ids.size());
  CHECK(run_request(*engine, greedy({9, 9}, 5))->last.stats.trees.empty());
}

TEST_CASE("stop ids, min_tokens and the end of the text") {
  FakeExecutor executor(room());
  const auto text = reference({2, 7}, 60);
  for (SpeculationMode mode : kModes) {
    EngineOptions options = quick(mode);
    options.eos_ids = {text[20]};
    auto engine = start(executor, options);
    Request r = greedy({2, 7}, 60);
    auto got = run_request(*engine, r);
    const size_t first = static_cast<size_t>(std::find(text.begin(), text.end(), text[20]) - text.begin());
    CHECK(got->ids == std::vector<int32_t>(text.begin(), text.begin() + static_cast<std::ptrdiff_t>(first) + 1));
    CHECK(got->last.finish == FinishReason::kStop);
    CHECK(got->last.stop_id == text[20]);
    check_identities(got->last.stats);
    r.ignore_eos = true;
    CHECK(run_request(*engine, r)->ids == text);
    r.ignore_eos = false;
    r.min_tokens = static_cast<int32_t>(first) + 1;
    got = run_request(*engine, r);
    REQUIRE(got->ids.size() > first + 1);
    CHECK(std::equal(text.begin(), text.begin() + static_cast<std::ptrdiff_t>(first), got->ids.begin()));
    CHECK(got->ids[first] != text[20]);
  }
}

TEST_CASE("cancel ends a request before its next round and frees everything") {
  FakeExecutor executor(room());
  executor.slow_ms = 2;
  auto engine = start(executor, quick(SpeculationMode::kDflash));
  std::vector<std::shared_ptr<Collected>> all;
  std::vector<uint64_t> ids;
  for (int i = 0; i < 12; ++i) {  // eight run, four wait
    all.push_back(std::make_shared<Collected>());
    const auto id = engine->submit(greedy({i, i}, 280), sink_of(all.back()));
    REQUIRE(id.ok());
    ids.push_back(*id);
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  for (uint64_t id : ids) engine->cancel(id);
  engine->cancel(424242);
  for (auto& c : all) {
    c->wait();
    CHECK(c->last.finish == FinishReason::kCancelled);
    CHECK(c->ids.size() < 280);
    CHECK(c->last.stats.completion_tokens == static_cast<int32_t>(c->ids.size()));
    CHECK(c->text == tiny_tokenizer().decode(c->ids, true));
  }
  check_idle(*engine);
  CHECK(engine->snapshot().requests_cancelled == 12);
  engine->cancel(ids[0]);
  CHECK(run_request(*engine, greedy({5}, 9))->ids == reference({5}, 9));
  for (auto& c : all) CHECK(c->finished + c->late == 1);
}

TEST_CASE("thousands of random submits and cancels leave nothing behind") {
  FakeExecutor executor(room(60, 5, 64));
  EngineOptions options = quick(SpeculationMode::kDdtree);
  options.max_queue = 40;
  auto engine = start(executor, options);
  std::mt19937 rng(11);
  struct Live {
    uint64_t id;
    Request request;
    std::shared_ptr<Collected> got;
  };
  std::vector<Live> live;
  int refused = 0, cancelled = 0, complete = 0;
  const auto settle = [&](Live& l) {
    l.got->wait();
    REQUIRE(l.got->finished == 1);
    const auto expected = reference(l.request.prompt, l.request.max_tokens);
    REQUIRE(l.got->ids.size() <= expected.size());
    REQUIRE(std::equal(l.got->ids.begin(), l.got->ids.end(), expected.begin()));
    const bool whole = l.got->last.finish == FinishReason::kLength;
    if (whole) REQUIRE(l.got->ids.size() == expected.size());
    ++(whole ? complete : cancelled);
  };
  for (int i = 0; i < 3000; ++i) {
    Request r = greedy({static_cast<int32_t>(rng() % 60), static_cast<int32_t>(rng() % 60)}, 1 + static_cast<int32_t>(rng() % 60));
    r.mode = kModes[rng() % 4];
    r.budget = static_cast<int32_t>(rng() % 50);
    auto c = std::make_shared<Collected>();
    const auto id = engine->submit(r, sink_of(c));
    if (!id.ok()) {
      REQUIRE(id.status().code() == Code::kTemporary);
      ++refused;
      if (!live.empty()) settle(live.front()), live.erase(live.begin());
      continue;
    }
    live.push_back({*id, r, c});
    if (rng() % 2) engine->cancel(live[rng() % live.size()].id);
  }
  for (Live& l : live) settle(l);
  CHECK(refused > 0);
  CHECK(cancelled > 100);
  CHECK(complete > 100);
  check_idle(*engine);
  const EngineSnapshot s = engine->snapshot();
  CHECK(s.requests_failed == 0);
  CHECK(s.requests_finished + s.requests_cancelled == 3000 - refused);
}

TEST_CASE("the queue has an end, and draining takes nothing new") {
  FakeExecutor executor(room());
  executor.slow_ms = 1;
  EngineOptions options = quick();
  options.max_running = 2;
  options.max_queue = 3;
  auto engine = start(executor, options);
  std::vector<std::shared_ptr<Collected>> all;
  int accepted = 0;
  for (int i = 0; i < 20; ++i) {
    auto c = std::make_shared<Collected>();
    const auto id = engine->submit(greedy({i}, 150), sink_of(c));
    if (id.ok()) ++accepted, all.push_back(c);
    else CHECK(id.status().code() == Code::kTemporary);
  }
  CHECK(accepted == 5);
  engine->drain(0.05);
  for (auto& c : all) {
    CHECK(c->finished == 1);
    CHECK(c->last.finish == FinishReason::kCancelled);
  }
  const auto late = engine->submit(greedy({1}, 1), sink_of(std::make_shared<Collected>()));
  REQUIRE_FALSE(late.ok());
  CHECK(late.status().code() == Code::kTemporary);
  check_idle(*engine);

  FakeExecutor second(room());
  auto calm = start(second, quick());
  auto c = std::make_shared<Collected>();
  REQUIRE(calm->submit(greedy({1, 2}, 30), sink_of(c)).ok());
  calm->drain(60);
  CHECK(c->last.finish == FinishReason::kLength);
}

TEST_CASE("an engine that goes away ends every request") {
  FakeExecutor executor(room());
  executor.slow_ms = 1;
  std::vector<std::shared_ptr<Collected>> all;
  {
    auto engine = start(executor, quick());
    for (int i = 0; i < 12; ++i) {
      all.push_back(std::make_shared<Collected>());
      REQUIRE(engine->submit(greedy({i}, 200), sink_of(all.back())).ok());
    }
  }
  for (auto& c : all) {
    CHECK(c->finished == 1);
    CHECK(c->last.finish == FinishReason::kCancelled);
  }
}

TEST_CASE("the service's own requests are in no counter of the clients'") {
  const auto counters = [](const EngineSnapshot& s) {
    return std::tuple(s.requests_finished, s.requests_cancelled, s.requests_failed, s.prompt_tokens, s.completion_tokens, s.rounds,
                      s.drafted, s.accepted, s.accepted_at, s.fallbacks);
  };
  for (SpeculationMode mode : kModes) {
    FakeExecutor executor(room());
    auto engine = start(executor, quick(mode));
    const auto ask = [&](bool own, std::shared_ptr<Collected>* into) {
      Request request = greedy({1, 2, 3}, 40);
      request.own = own;
      *into = std::make_shared<Collected>();
      REQUIRE(engine->submit(std::move(request), sink_of(*into)).ok());
    };
    std::shared_ptr<Collected> own, client, beside;
    ask(true, &own);
    own->wait();
    const EngineSnapshot after_own = engine->snapshot();
    CHECK(counters(after_own) == counters(EngineSnapshot{}));
    CHECK((after_own.own_requests == 1 && after_own.passes > 0 && after_own.decode_tps_1m == 0 && after_own.acceptance_1m == 0));
    CHECK(own->last.stats.completion_tokens == 40);  // its own figures are whole
    // A client's figures are the same beside one as they would be alone.
    ask(false, &client);
    ask(true, &beside);
    client->wait(), beside->wait();
    const EngineSnapshot both = engine->snapshot();
    const RequestStats& t = client->last.stats;
    CHECK((both.requests_finished == 1 && both.own_requests == 2 && both.prompt_tokens == 3 && both.completion_tokens == 40));
    CHECK((both.rounds == t.rounds && both.drafted == t.drafted && both.accepted == t.accepted));
    int64_t at_positions = 0, of_client = 0;
    for (const int64_t n : both.accepted_at) at_positions += n;
    for (const int32_t n : t.accepted_at) of_client += n;
    CHECK(at_positions == of_client);
  }
}

TEST_CASE("a sink may cancel its own request") {
  FakeExecutor executor(room());
  auto engine = start(executor, quick());
  auto c = std::make_shared<Collected>();
  std::atomic<uint64_t> id{0};
  auto inner = sink_of(c);
  executor.slow_ms = 1;
  const auto got = engine->submit(greedy({1}, 300), [&](Delta&& d) {
    if (!d.finished && id != 0) engine->cancel(id);
    inner(std::move(d));
  });
  REQUIRE(got.ok());
  id = *got;
  c->wait();
  CHECK(c->last.finish == FinishReason::kCancelled);
}

TEST_CASE("faults end the requests they concern and no others") {
  const auto run_two = [](FakeExecutor& executor, Engine& engine, std::shared_ptr<Collected>* a, std::shared_ptr<Collected>* b) {
    *a = std::make_shared<Collected>(), *b = std::make_shared<Collected>();
    REQUIRE(engine.submit(greedy({1, 2, 3}, 60), sink_of(*a)).ok());
    REQUIRE(engine.submit(greedy({4, 5, 6, 7}, 60), sink_of(*b)).ok());
    (*a)->wait(), (*b)->wait();
    executor.before_forward = nullptr;
  };
  std::shared_ptr<Collected> a, b;
  for (SpeculationMode mode : kModes) {
    FakeExecutor executor(room());
    auto engine = start(executor, quick(mode));
    // Rows that are not finite: their sequence fails, the other one goes on as if nothing had been.
    executor.before_forward = [](const Forest& f, PassOutput* out) {
      for (const Segment& s : f.segments)
        if (s.context > 12 && s.slot == 0) out->faulty_rows = {s.first_row};
      return out->faulty_rows.empty() ? Status() : Status(Code::kEngineFault, "row not finite");
    };
    run_two(executor, *engine, &a, &b);
    const auto &broken = a->last.finish == FinishReason::kError ? a : b, &whole = a->last.finish == FinishReason::kError ? b : a;
    CHECK(broken->last.finish == FinishReason::kError);
    CHECK_THAT(broken->last.error, ContainsSubstring("not finite"));
    CHECK(whole->last.finish == FinishReason::kLength);
    CHECK(whole->ids == reference(whole->ids.empty() ? std::vector<int32_t>{}
                                                     : (whole == a ? std::vector<int32_t>{1, 2, 3} : std::vector<int32_t>{4, 5, 6, 7}),
                                  60));
    check_idle(*engine);
    // A lost pass: all in it fail; the engine serves the next ones.
    executor.before_forward = [&](const Forest&, PassOutput*) {
      return executor.forwards % 7 == 0 ? Status(Code::kEngineFault, "device lost") : Status();
    };
    run_two(executor, *engine, &a, &b);
    CHECK(a->last.finish == FinishReason::kError);
    CHECK(a->last.error == "device lost");
    check_idle(*engine);
    CHECK(run_request(*engine, greedy({8}, 20))->ids == reference({8}, 20));
    CHECK(engine->snapshot().requests_failed >= 2);
    int commits = 0;
    executor.before_commit = [&] { return ++commits == 4 ? Status(Code::kEngineFault, "commit broke") : Status(); };
    CHECK(run_request(*engine, greedy({1, 2, 3}, 90))->last.finish == FinishReason::kError);
    CHECK(run_request(*engine, greedy({8}, 20))->ids == reference({8}, 20));
  }
}

TEST_CASE("a broken drafter costs speed, not answers") {
  FakeExecutor executor(room());
  executor.before_draft = [] { return Status(Code::kEngineFault, "drafter gave NaN"); };
  auto engine = start(executor, quick(SpeculationMode::kDdtree));
  CHECK(run_request(*engine, greedy({3, 3}, 50))->ids == reference({3, 3}, 50));
  CHECK(engine->snapshot().fallbacks >= 1);
}

TEST_CASE("a sequence whose drafts fail falls back to plain decoding by itself and tries again later") {
  FakeExecutor executor(room());
  executor.draft_hit_percent = 0;  // the chain's first token is never right
  auto engine = start(executor, quick(SpeculationMode::kDflash));
  const auto got = run_request(*engine, greedy({3, 3}, 300));
  CHECK(got->ids == reference({3, 3}, 300));
  CHECK(got->last.stats.accepted == 0);
  CHECK(engine->snapshot().fallbacks >= 2);
  CHECK(executor.drafts < 60);
  CHECK(executor.drafts > FallbackPolicy::kWindow);
}

TEST_CASE("requests that cannot work are refused by name") {
  FakeExecutor executor(room());
  executor.with_mtp = false;
  auto engine = start(executor, quick());
  const auto refusal = [&](auto&& change) {
    Request r = greedy({1, 2}, 10);
    change(r);
    const auto id = engine->submit(r, sink_of(std::make_shared<Collected>()));
    REQUIRE_FALSE(id.ok());
    CHECK(id.status().code() == Code::kInvalidArgument);
    return id.status().message();
  };
  CHECK_THAT(refusal([](Request& r) { r.prompt.clear(); }), ContainsSubstring("prompt is empty"));
  CHECK_THAT(refusal([](Request& r) { r.prompt[1] = 64; }), ContainsSubstring("prompt[1] is token 64; the vocabulary ends at 63"));
  CHECK_THAT(refusal([](Request& r) { r.max_tokens = 0; }), ContainsSubstring("max_tokens is 0"));
  CHECK_THAT(refusal([](Request& r) { r.max_tokens = 5000; }), ContainsSubstring("5002 positions; the context length is 4096"));
  CHECK_THAT(refusal([](Request& r) { r.mode = SpeculationMode::kNextn; }), ContainsSubstring("MTP head"));
  CHECK_THAT(refusal([](Request& r) { r.sampling.top_p = 0; }), ContainsSubstring("top_p"));
  CHECK_THAT(refusal([](Request& r) { r.sampling.temperature = -1; }), ContainsSubstring("temperature"));
  CHECK_THAT(refusal([](Request& r) { r.sampling.min_p = 2; }), ContainsSubstring("min_p"));
  CHECK_THAT(refusal([](Request& r) { r.sampling.presence_penalty = 3; }), ContainsSubstring("presence_penalty"));
  CHECK_THAT(refusal([](Request& r) { r.sampling.repetition_penalty = 0; }), ContainsSubstring("repetition_penalty"));
  CHECK_THAT(refusal([](Request& r) { r.sampling.repetition_penalty = 1e-38F; }), ContainsSubstring("it must be from 0.001 to 100"));
  CHECK_THAT(refusal([](Request& r) { r.budget = 512; }), ContainsSubstring("budget is 512; it must be 0 (auto) to 511"));
  CHECK_THAT(refusal([](Request& r) { r.min_tokens = 11; }), ContainsSubstring("min_tokens"));
  CHECK_THAT(refusal([](Request& r) { r.stop_strings = {"a", ""}; }), ContainsSubstring("stop[1]"));
  CHECK_THAT(refusal([](Request& r) { r.stop_ids = {-5}; }), ContainsSubstring("stop_token_ids[0]"));
  const auto stop_from = [](int32_t first) {
    return [first](Request& r) {
      r.min_tokens = 1;
      for (int32_t id = first; id < 64; ++id) r.stop_ids.push_back(id);
    };
  };
  CHECK_THAT(refusal(stop_from(0)), ContainsSubstring("all 64 tokens of the vocabulary are stop ids"));
  Request one_left = greedy({1, 2}, 1);
  stop_from(1)(one_left);
  CHECK(run_request(*engine, one_left)->ids == std::vector<int32_t>{0});
  executor.with_drafter = false;
  CHECK_THAT(refusal([](Request& r) { r.mode = SpeculationMode::kDdtree; }), ContainsSubstring("needs a DFlash drafter"));
  EngineOptions bad = quick(SpeculationMode::kDflash);
  CHECK_FALSE(Engine::start(executor, tiny_tokenizer(), bad).ok());
  bad = quick();
  bad.max_running = 1000;
  CHECK_FALSE(Engine::start(executor, tiny_tokenizer(), bad).ok());
}

TEST_CASE("measuring costs leaves nothing behind and the snapshot counts what was done") {
  FakeExecutor executor(room());
  EngineOptions options = quick(SpeculationMode::kDdtree);
  options.measure_costs = true;
  options.budget = 16;
  executor.lenient_context = true;
  auto engine = start(executor, options);
  check_idle(*engine);
  const auto got = run_request(*engine, greedy({1, 2, 3}, 40));
  CHECK(got->ids == reference({1, 2, 3}, 40));
  const EngineSnapshot s = engine->snapshot();
  CHECK(s.requests_finished == 1);
  CHECK(s.prompt_tokens == 3);
  CHECK(s.completion_tokens == 40);
  CHECK(s.rounds == got->last.stats.rounds);
  CHECK(s.accepted == got->last.stats.accepted);
  CHECK(s.drafted == got->last.stats.drafted);
  CHECK(s.passes == s.rounds + 1);
  CHECK(s.decode_tps_1m > 0);
  CHECK(s.acceptance_1m > 1);
  CHECK(std::accumulate(s.accepted_at.begin(), s.accepted_at.end(), int64_t{0}) == s.accepted);
}
