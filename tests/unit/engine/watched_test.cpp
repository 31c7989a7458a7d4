// What the watch asks of the engine: a limit on modes, forgotten drafts, scored answers, and counts of what went wrong.
#include <algorithm>
#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <cmath>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "engine/engine.h"
#include "support/collect.h"
#include "support/fake_executor.h"
#include "support/tiny.h"

using namespace ddtree;
using namespace ddtree::testing;
using Catch::Matchers::ContainsSubstring;

namespace {

ExecutorOptions room(int32_t slots = 3) {
  ExecutorOptions o;
  o.page_size = 8;
  o.pages = 400;
  o.slots = slots;
  o.max_rows = 512;
  return o;
}

std::unique_ptr<Engine> start(FakeExecutor& executor, SpeculationMode mode, int32_t max_running = 2) {
  EngineOptions o;
  o.mode = mode;
  o.measure_costs = false;
  o.budget = 16;
  o.max_running = max_running;
  auto e = Engine::start(executor, tiny_tokenizer(), o);
  if (!e) FAIL(e.status().message());
  return std::move(*e);
}

Request asked(std::vector<int32_t> prompt, int32_t max_tokens, float temperature = 0) {
  Request r;
  r.prompt = std::move(prompt);
  r.max_tokens = max_tokens;
  r.sampling.temperature = temperature;
  r.sampling.seed = 11;
  r.sampling.seed_given = true;
  return r;
}

Score score(Engine& engine, ScoreRequest request) {
  std::mutex mutex;
  std::condition_variable done;
  std::optional<Score> result;
  const Status s = engine.score(std::move(request), [&](Score&& scored) {
    std::lock_guard lock(mutex);
    result = std::move(scored);
    done.notify_all();
  });
  if (!s.ok()) throw std::runtime_error("refused: " + s.message());
  std::unique_lock lock(mutex);
  done.wait(lock, [&] { return result.has_value(); });
  return std::move(*result);
}

int disagreements(const Score& s) {
  return static_cast<int>(std::count_if(s.tokens.begin(), s.tokens.end(), [](const ScoredToken& t) { return !t.agrees(0.01F); }));
}

}  // namespace

TEST_CASE("the limit on modes holds for running, waiting and new requests, and changes no text") {
  FakeExecutor executor(room());
  auto engine = start(executor, SpeculationMode::kDdtree);
  const auto free = run_request(*engine, asked({1, 2, 3}, 120));
  CHECK(free->last.stats.mode == SpeculationMode::kDdtree);

  engine->limit_mode(SpeculationMode::kDflash);
  CHECK(engine->snapshot().most == SpeculationMode::kDflash);
  const auto chain = run_request(*engine, asked({1, 2, 3}, 120));
  CHECK(chain->ids == free->ids);
  CHECK(chain->last.stats.mode == SpeculationMode::kDflash);
  CHECK(chain->last.stats.accepted > 0);
  Request nextn = asked({1, 2, 3}, 120);
  nextn.mode = SpeculationMode::kNextn;
  CHECK(run_request(*engine, nextn)->last.stats.mode == SpeculationMode::kNextn);

  engine->limit_mode(SpeculationMode::kNone);
  const int64_t drafts = executor.drafts;
  Request own = asked({1, 2, 3}, 120);
  own.mode = SpeculationMode::kDdtree;
  const auto plain = run_request(*engine, own);
  CHECK(plain->ids == free->ids);
  CHECK(plain->last.stats.mode == SpeculationMode::kNone);
  CHECK(executor.drafts == drafts);

  engine->limit_mode(SpeculationMode::kDdtree);
  CHECK(run_request(*engine, asked({1, 2, 3}, 120))->last.stats.mode == SpeculationMode::kDdtree);
}

TEST_CASE("a running request is brought down in the middle of its answer") {
  for (const SpeculationMode most : {SpeculationMode::kDflash, SpeculationMode::kNone}) {
    FakeExecutor executor(room());
    auto engine = start(executor, SpeculationMode::kDdtree);
    const auto whole = run_request(*engine, asked({4, 4, 1}, 200));
    auto got = std::make_shared<Collected>();
    const auto sink = sink_of(got);
    bool told = false;
    int64_t drafts = 0;
    // From a round of its own: the engine's thread takes the limit before the next one.
    executor.before_forward = [&](const Forest& f, PassOutput*) {
      if (!told && f.segments[0].context > 60) told = true, engine->limit_mode(most), drafts = executor.drafts;
      return Status();
    };
    REQUIRE(engine->submit(asked({4, 4, 1}, 200), sink).ok());
    got->wait();
    CHECK(told);
    CHECK(got->ids == whole->ids);
    CHECK(got->last.stats.mode == most);
    if (most == SpeculationMode::kNone) CHECK(executor.drafts == drafts);
    else CHECK(executor.drafts > drafts);
  }
}

TEST_CASE("forgotten drafts: what runs is run once more for the drafter, and goes on with the same text") {
  for (const SpeculationMode mode : {SpeculationMode::kDflash, SpeculationMode::kDdtree, SpeculationMode::kNextn}) {
    FakeExecutor executor(room());
    auto engine = start(executor, mode);
    const auto whole = run_request(*engine, asked({7, 1}, 150));
    int resets = 0;
    const int64_t before = engine->snapshot().prompt_tokens;
    executor.before_forward = [&](const Forest& f, PassOutput*) {
      if (resets == 0 && f.segments[0].context > 40) ++resets, engine->reset_drafts();
      return Status();
    };
    const auto got = run_request(*engine, asked({7, 1}, 150));
    CHECK(resets == 1);
    CHECK(got->ids == whole->ids);
    CHECK(got->last.stats.mode == mode);
    // The rows that were run again are nobody's prompt.
    CHECK(engine->snapshot().prompt_tokens - before == 2);
    CHECK(engine->snapshot().pages_used == 0);
  }
}

TEST_CASE("a scored answer is stood by token for token, however it was drawn") {
  for (const SpeculationMode mode : {SpeculationMode::kNone, SpeculationMode::kDdtree}) {
    for (const float temperature : {0.0F, 0.9F}) {
      for (const bool penalised : {false, true}) {
        FakeExecutor executor(room());
        auto engine = start(executor, mode);
        Request r = asked({5, 6, 7, 8}, 140, temperature);
        if (penalised) r.sampling.presence_penalty = 0.7F, r.sampling.frequency_penalty = 0.3F, r.sampling.repetition_penalty = 1.2F;
        r.min_tokens = 20;
        const auto got = run_request(*engine, r);
        REQUIRE(got->ids.size() > 20);
        const auto count = static_cast<int32_t>(got->ids.size());
        const Score all = score(*engine, {r, got->ids, 0});
        CHECK(all.error.empty());
        REQUIRE(all.tokens.size() == got->ids.size());
        CHECK(disagreements(all) == 0);
        for (size_t i = 0; i < all.tokens.size(); ++i) {
          CHECK(all.tokens[i].token == got->ids[i]);
          CHECK(all.tokens[i].log_prob <= 0);
          CHECK(all.tokens[i].log_prob > -20);
        }
        const Score tail = score(*engine, {r, got->ids, count - 7});
        REQUIRE(tail.tokens.size() == 7);
        for (size_t i = 0; i < 7; ++i) {
          CHECK(tail.tokens[i].choice == all.tokens[all.tokens.size() - 7 + i].choice);
          CHECK(tail.tokens[i].log_prob == all.tokens[all.tokens.size() - 7 + i].log_prob);
        }
        // A text that the target would not write is not stood by.
        std::vector<int32_t> broken = got->ids;
        for (size_t i = broken.size() - 9; i < broken.size(); ++i) broken[i] = (broken[i] + 13) % 64;
        CHECK(disagreements(score(*engine, {r, broken, count - 9})) >= 7);
        CHECK(engine->snapshot().scored == 3);
        CHECK(engine->snapshot().pages_used == 0);
        CHECK(engine->snapshot().requests_finished == 1);
      }
    }
  }
}

TEST_CASE("scoring runs beside requests that fill the batch, before those that wait, and leaves their text alone") {
  FakeExecutor executor(room(3));
  auto engine = start(executor, SpeculationMode::kDdtree, 2);
  const auto alone = run_request(*engine, asked({9, 9}, 300));
  executor.slow_ms = 1;
  std::vector<std::shared_ptr<Collected>> streams;
  for (int i = 0; i < 6; ++i) {
    streams.push_back(std::make_shared<Collected>());
    REQUIRE(engine->submit(asked({9, 9}, 300), sink_of(streams.back())).ok());
  }
  const Score s = score(*engine, {asked({9, 9}, 300), alone->ids, 0});
  CHECK(disagreements(s) == 0);
  CHECK(s.tokens.size() == 300);
  CHECK(engine->snapshot().requests_finished < 7);  // some of the six still ran or waited
  for (const auto& c : streams) {
    c->wait();
    CHECK(c->ids == alone->ids);
  }
  CHECK(executor.max_segments <= 3);
}

TEST_CASE("what cannot be scored is refused by name, and an engine that stops says so") {
  FakeExecutor executor(room());
  auto engine = start(executor, SpeculationMode::kNone);
  const auto refused = [&](ScoreRequest r) { return engine->score(std::move(r), [](Score&&) {}).message(); };
  CHECK_THAT(refused({asked({1}, 5), {}, 0}), ContainsSubstring("no answer"));
  CHECK_THAT(refused({asked({1}, 5), {2, 3}, 2}), ContainsSubstring("from 0 to 1"));
  CHECK_THAT(refused({asked({1}, 5), {2, 99, 3}, 0}), ContainsSubstring("vocabulary"));
  Request sampled = asked({1}, 5, 0.5F);
  sampled.sampling.seed = 0;
  sampled.sampling.seed_given = false;
  CHECK_THAT(refused({sampled, {2}, 0}), ContainsSubstring("seed"));
  executor.before_forward = [](const Forest&, PassOutput*) { return Status(Code::kUnavailable, "device gone"); };
  CHECK_THAT(score(*engine, {asked({1}, 5), {2, 3}, 0}).error, ContainsSubstring("device gone"));
  executor.before_forward = nullptr;
  engine->drain(0);
  CHECK_THAT(refused({asked({1}, 5), {2, 3}, 0}), ContainsSubstring("draining"));
}

TEST_CASE("the snapshot counts what went wrong, by kind") {
  FakeExecutor executor(room());
  auto engine = start(executor, SpeculationMode::kDdtree);
  executor.before_forward = [](const Forest& f, PassOutput* out) {
    out->faulty_rows = {f.segments[0].first_row};
    return Status(Code::kEngineFault, "row not finite");
  };
  CHECK(run_request(*engine, asked({1, 2}, 9))->last.finish == FinishReason::kError);
  executor.before_forward = [](const Forest&, PassOutput*) { return Status(Code::kUnavailable, "device gone"); };
  CHECK(run_request(*engine, asked({1, 2}, 9))->last.finish == FinishReason::kError);
  executor.before_forward = nullptr;
  executor.before_draft = [] { return Status(Code::kEngineFault, "drafter gave NaN"); };
  run_request(*engine, asked({1, 2}, 40));
  executor.before_draft = nullptr;
  run_request(*engine, asked({1, 2}, 40));
  const EngineSnapshot s = engine->snapshot();
  CHECK(s.nan_faults == 1);
  CHECK_THAT(s.nan_message, ContainsSubstring("not finite"));
  CHECK(s.lost_passes == 1);
  CHECK(s.lost_code == Code::kUnavailable);
  CHECK(s.lost_message == "device gone");
  CHECK(s.failed_drafts >= 1);
  CHECK(s.draft_rounds[static_cast<size_t>(SpeculationMode::kDdtree)] > 0);
  CHECK(s.draft_accepted[static_cast<size_t>(SpeculationMode::kDdtree)] == s.accepted);
  CHECK(s.timed_passes == 0);  // nothing was measured, so nothing was promised
}

TEST_CASE("a request that goes ahead is answered beside a full batch and a full queue, one at a time, and can be called back") {
  FakeExecutor executor(room(3));
  EngineOptions o;
  o.mode = SpeculationMode::kDdtree;
  o.measure_costs = false;
  o.budget = 16;
  o.max_running = 2;
  o.max_queue = 3;
  auto started = Engine::start(executor, tiny_tokenizer(), o);
  REQUIRE(started.ok());
  Engine& engine = **started;
  const auto alone = run_request(engine, asked({9, 9}, 60));
  executor.slow_ms = 1;
  std::vector<std::shared_ptr<Collected>> clients;
  for (int i = 0; i < 5; ++i) {
    clients.push_back(std::make_shared<Collected>());
    REQUIRE(engine.submit(asked({8, 8}, 1500), sink_of(clients.back())).ok());
    // Those that run must have left the queue, or it is too short for all five.
    while (i == 1 && engine.snapshot().running < 2) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  REQUIRE(engine.submit(asked({8, 8}, 5), sink_of(std::make_shared<Collected>())).status().code() == Code::kTemporary);
  Request canary = asked({9, 9}, 60);
  canary.own = canary.ahead = true;
  // Three at once: each has its turn, and one that waits for its turn can be cancelled.
  std::vector<std::shared_ptr<Collected>> answers;
  std::vector<uint64_t> ids;
  for (int i = 0; i < 3; ++i) {
    answers.push_back(std::make_shared<Collected>());
    const auto id = engine.submit(canary, sink_of(answers.back()));
    REQUIRE(id.ok());
    ids.push_back(*id);
  }
  engine.cancel(ids[2]);
  for (const auto& a : answers) a->wait();
  CHECK(answers[0]->ids == alone->ids);
  CHECK(answers[1]->ids == alone->ids);
  CHECK(answers[2]->last.finish == FinishReason::kCancelled);
  // None of the clients has ended yet, and none of those that waited was kept from its turn for good.
  CHECK(engine.snapshot().requests_finished == 1);
  CHECK(engine.snapshot().own_requests == 3);
  CHECK(executor.max_segments == 3);
  for (const auto& c : clients) c->wait();
  for (const auto& c : clients) CHECK(c->last.finish == FinishReason::kLength);
  CHECK(engine.snapshot().pages_used == 0);
  CHECK(engine.snapshot().slots_used == 0);
}

TEST_CASE("a limit on modes holds for a request that goes ahead, too") {
  FakeExecutor executor(room(2));
  auto engine = start(executor, SpeculationMode::kDdtree, 1);
  Request first = asked({1, 2}, 200), second = asked({1, 2, 3}, 40);
  first.ahead = second.ahead = true;
  const auto a = std::make_shared<Collected>(), b = std::make_shared<Collected>();
  bool told = false;
  executor.before_forward = [&](const Forest& f, PassOutput*) {
    if (!told && f.segments[0].context > 20) told = true, engine->limit_mode(SpeculationMode::kNone);
    return Status();
  };
  REQUIRE(engine->submit(first, sink_of(a)).ok());
  REQUIRE(engine->submit(second, sink_of(b)).ok());
  a->wait(), b->wait();
  CHECK(b->last.stats.mode == SpeculationMode::kNone);
}
