// `auto` over an executor that says what its passes cost: no stopwatch, so what it chooses can be tested.
#include <fmt/core.h>

#include <algorithm>
#include <catch2/catch_test_macros.hpp>
#include <cmath>
#include <functional>
#include <future>
#include <map>

#include "base/log.h"
#include "engine/sampler.h"
#include "nn/buckets.h"
#include "support/collect.h"
#include "support/fake_executor.h"
#include "support/tiny.h"

using namespace ddtree;
using namespace ddtree::testing;

namespace {

// A machine: what passes of so many rows, a draft and a committed row cost.
struct Machine {
  const char* name;
  std::function<double(int32_t)> forward;
  double draft, commit_row, feed_row;  // of a query, of a row
  double draft_call = 0;
  int32_t most_streams = 8;
  std::function<int32_t(int32_t)> padded = [](int32_t rows) { return rows; };
  double sequence_ms = 0;
};

// A Qwen3.6-27B on an H200, as measured (docs/performance.md): passes are padded to buckets of rows, linear above them.
int32_t h200_rows(int32_t rows) {
  const int32_t bucket = nn::row_bucket(rows, 128);
  return bucket > 0 ? bucket : rows;
}
double h200(int32_t unpadded) {
  const int32_t rows = h200_rows(unpadded);
  constexpr std::pair<double, double> kPoints[] = {{1, 12.4}, {4, 12.7}, {16, 13.15}, {64, 15.8}, {128, 19.4}, {256, 26.8}, {1200, 73.0}};
  for (size_t i = 1; i < std::size(kPoints); ++i)
    if (const auto [b, high] = kPoints[i]; rows <= b) {
      const auto [a, low] = kPoints[i - 1];
      return low + (high - low) * (rows - a) / (b - a);
    }
  return kPoints[std::size(kPoints) - 1].second;
}

const Machine kMachines[] = {
    // Rows hide behind reading the weights up to three of them, then each costs its arithmetic.
    {"processor", [](int32_t rows) { return std::max(0.9, 0.1 + 0.22 * rows); }, 0.8, 0.03, 0.004},
    {"quick processor", [](int32_t rows) { return std::max(0.7, 0.3 + 0.08 * rows); }, 0.4, 0.01, 0.002},
    // Nearly flat with edges at tiles of 64.
    {"GPU", [](int32_t rows) { return 13.3 + 0.9 * ((rows + 63) / 64 - 1) + 0.003 * rows; }, 0.25, 0.002, 0.001},
    {"H200", h200, 0.12, 0.004, 0.002, 1.44, 16, h200_rows, 0.15},
};

struct Load {
  SpeculationMode mode;
  int32_t budget;
};

struct Outcome {
  double tokens_per_ms = 0;
  int64_t drafts = 0;
};

// `streams` at a time until `requests` are done; virtual time.
Outcome run(const Machine& machine, const Load& load, int32_t streams, int32_t requests, int hit_percent, int32_t length) {
  ExecutorOptions room;
  room.page_size = 16;
  room.pages = 800;
  room.slots = 16;
  room.max_rows = 1200;
  FakeExecutor executor(room);
  executor.lenient_context = true;
  executor.draft_hit_percent = hit_percent;
  executor.forward_ms = machine.forward;
  executor.padded = machine.padded;
  executor.sequence_ms = machine.sequence_ms;
  executor.draft_call_ms = machine.draft_call;
  executor.draft_ms = machine.draft;
  executor.commit_row_ms = machine.commit_row;
  executor.feed_row_ms = machine.feed_row;
  EngineOptions options;
  options.max_running = streams;
  EngineSeams seams;
  seams.now = [&executor] { return executor.time; };
  auto engine = start_engine(executor, tiny_tokenizer(), options, std::move(seams));
  REQUIRE(engine.ok());
  const double begin = executor.elapsed_ms();
  // Nothing runs until all are submitted: who shares a pass must not depend on how threads are scheduled.
  std::promise<void> submitted;
  executor.before_forward = [gate = submitted.get_future().share()](const Forest&, PassOutput*) {
    gate.wait();
    return Status();
  };
  std::vector<std::shared_ptr<Collected>> all;
  for (int32_t i = 0; i < requests; ++i) {
    Request r;
    r.prompt = {i % 60, i / 60, 5, 6};
    r.max_tokens = length;
    r.sampling.temperature = 0;
    r.mode = load.mode;
    r.budget = load.budget;
    all.push_back(std::make_shared<Collected>());
    REQUIRE((*engine)->submit(r, sink_of(all.back())).ok());
  }
  submitted.set_value();
  double tokens = 0;
  for (auto& c : all) {
    c->wait();
    CHECK(c->last.finish == FinishReason::kLength);
    tokens += static_cast<double>(c->ids.size());
  }
  (*engine)->drain(10);
  return {tokens / (executor.elapsed_ms() - begin), executor.drafts};
}

}  // namespace

TEST_CASE("auto keeps up with the best fixed mode on every machine, with good and poor drafts, at 1, 4 and 8 or 16 streams") {
  log::set_level(log::Level::kWarn);
  for (const Machine& machine : kMachines)
    for (int hit : {97, 75, 10})
      for (int32_t streams : {1, 4, machine.most_streams}) {
        double best = 0;
        std::string name;
        for (const Load& load :
             {Load{SpeculationMode::kNone, 0}, Load{SpeculationMode::kDflash, 0}, Load{SpeculationMode::kDdtree, 8},
              Load{SpeculationMode::kDdtree, 15}, Load{SpeculationMode::kDdtree, 32}, Load{SpeculationMode::kDdtree, 64}})
          if (const double rate = run(machine, load, streams, 15 * streams, hit, 120).tokens_per_ms; rate > best)
            best = rate, name = fmt::format("{} {}", mode_name(load.mode), load.budget);
        const Outcome chosen = run(machine, {SpeculationMode::kDdtree, 0}, streams, 15 * streams, hit, 120);
        INFO(fmt::format("{}, drafts right {} %, {} streams: auto {:.3f} tokens/ms with {} drafts, best {} {:.3f}", machine.name, hit,
                         streams, chosen.tokens_per_ms, chosen.drafts, name, best));
        CHECK(chosen.tokens_per_ms >= 0.97 * best);
      }
}

// Rows that a bucket holds anyway cost nothing: a tree that leaves them out wins less for the same time.
TEST_CASE("where passes are padded, auto's trees fill their bucket") {
  const Machine& h200_machine = kMachines[3];
  FakeExecutor executor(ExecutorOptions{.page_size = 16, .pages = 200, .slots = 4, .max_rows = 256});
  executor.lenient_context = true;
  executor.draft_hit_percent = 75;
  executor.forward_ms = h200_machine.forward;
  executor.padded = h200_machine.padded;
  executor.draft_call_ms = h200_machine.draft_call;
  std::map<int32_t, int> passes;  // rows of drafting rounds
  executor.before_forward = [&](const Forest& f, PassOutput*) {
    if (f.segments.size() == 1 && !f.segments[0].certain) ++passes[f.segments[0].row_count];
    return Status();
  };
  EngineOptions options;
  EngineSeams seams;
  seams.now = [&executor] { return executor.time; };
  auto engine = start_engine(executor, tiny_tokenizer(), options, std::move(seams));
  REQUIRE(engine.ok());
  passes.clear();  // those of the measurement
  Request r;
  r.prompt = {5, 6, 7};
  r.max_tokens = 300;
  r.sampling.temperature = 0;
  r.mode = SpeculationMode::kDdtree;
  r.budget = 0;
  const auto c = run_request(**engine, std::move(r));
  int all = 0, full = 0;
  for (const auto& [rows, count] : passes) all += count, full += h200_rows(rows) == rows ? count : 0;
  INFO(full << " of " << all << " trees fill their bucket");
  REQUIRE(all > 20);
  CHECK(full * 10 >= all * 9);  // the last rounds are cut to what is left of the answer
}

// 16 rows of one sequence and of sixteen stood at the same place of the curve: plain decoding of a batch then looked as cheap as one tree.
TEST_CASE("what a pass costs is measured by its rows and by its sequences") {
  FakeExecutor executor(ExecutorOptions{.page_size = 16, .pages = 400, .slots = 16, .max_rows = 1200});
  executor.lenient_context = true;
  executor.forward_ms = [](int32_t rows) { return 10 + 0.1 * rows; };
  executor.sequence_ms = 0.25;
  EngineOptions options;
  options.max_running = 16;
  EngineSeams seams;
  seams.now = [&executor] { return executor.time; };
  auto engine = start_engine(executor, tiny_tokenizer(), options, std::move(seams));
  REQUIRE(engine.ok());
  Request r;
  r.prompt = {5, 6, 7};
  r.max_tokens = 3;
  r.sampling.temperature = 0;
  run_request(**engine, std::move(r));  // a snapshot is of the last pass
  const EngineSnapshot costs = (*engine)->snapshot();
  CHECK(std::abs(costs.sequence_ms - 0.25) < 0.01);
  for (size_t i = 0; i < costs.verify_ms.size.size() && costs.verify_ms.size[i] <= 512; ++i) {
    INFO(costs.verify_ms.size[i] << " rows");
    CHECK(std::abs(costs.verify_ms.ms[i] - 10 - 0.1 * costs.verify_ms.size[i]) < 0.2);
  }
}

TEST_CASE("auto leaves the drafter behind under load and catches up when the load is gone, and no token changes") {
  ExecutorOptions room;
  room.page_size = 16;
  room.pages = 800;
  room.slots = 8;
  FakeExecutor executor(room), plain(room);
  executor.lenient_context = true;
  executor.draft_hit_percent = 97;
  executor.forward_ms = kMachines[0].forward;
  executor.draft_ms = kMachines[0].draft;
  EngineOptions options;
  EngineSeams seams;
  seams.now = [&executor] { return executor.time; };
  auto engine = start_engine(executor, tiny_tokenizer(), options, std::move(seams));
  REQUIRE(engine.ok());
  std::promise<void> submitted;
  executor.before_forward = [gate = submitted.get_future().share()](const Forest&, PassOutput*) {
    gate.wait();
    return Status();
  };
  const int64_t before = executor.drafts;
  int64_t drafts_under_load = -1;
  std::vector<std::shared_ptr<Collected>> all;
  for (int32_t i = 0; i < 8; ++i) {
    Request r;
    r.prompt = {i, 3, 4};
    r.max_tokens = i == 7 ? 900 : 60;  // seven go early, one stays
    r.sampling.temperature = 0;
    r.mode = SpeculationMode::kDdtree;
    r.budget = 0;
    auto c = std::make_shared<Collected>();
    all.push_back(c);
    auto inner = sink_of(c);
    REQUIRE((*engine)
                ->submit(r,
                         [inner, i, &executor, &drafts_under_load](Delta&& d) {
                           if (d.finished && i == 0) drafts_under_load = executor.drafts;
                           inner(std::move(d));
                         })
                .ok());
  }
  submitted.set_value();
  for (int32_t i = 0; i < 8; ++i) {
    const auto& c = all[static_cast<size_t>(i)];
    c->wait();
    std::vector<int32_t> prefix = {i, 3, 4};
    for (int32_t id : c->ids) {
      const auto l = FakeExecutor::logits_of(prefix, 64);
      REQUIRE(id == static_cast<int32_t>(std::max_element(l.begin(), l.end()) - l.begin()));
      prefix.push_back(id);
    }
  }
  CHECK(drafts_under_load - before <= 10);
  CHECK(executor.drafts - drafts_under_load > 20);
  const auto& stats = all[7]->last.stats;
  CHECK(stats.completion_tokens == 900);
  CHECK(stats.rounds < 700);                         // 60 plain ones and some more, then trees
  CHECK((*engine)->snapshot().prompt_tokens == 24);  // what was run again is not counted twice
}
