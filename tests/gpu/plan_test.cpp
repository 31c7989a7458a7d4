// What the driver says is gone from the card is what the memory plan said would go.
#include "engine/plan.h"

#include <catch2/catch_test_macros.hpp>
#include <cstdlib>

#include "nn/cuda_executor.h"
#include "support/tiny.h"

using namespace ddtree;
using namespace ddtree::testing;

namespace {

constexpr int64_t kUnexplained = 256 * kMiB;

CardMemory card() {
  const auto memory = card_memory(0);
  if (!memory.ok() && memory.status().code() == Code::kUnavailable) SKIP(memory.status().message());
  INFO(memory.status().message());
  REQUIRE(memory.ok());
  return *memory;
}

}  // namespace

TEST_CASE("device memory beside the plan's rows is at most 256 MiB") {
  const CardMemory first = card();
  // The largest published pair that leaves room for pages.
  const char* config = first.free > (int64_t{90} << 30) ? "qwen3.6-27b" : "qwen3.5-4b";
  const auto embedded = std::getenv("DDTREE_TINY_PAIR");
  const std::string text = embedded ? std::string(embedded) + "/target" : std::string(kEmbeddedPair);
  struct Case {
    SpeculationMode mode;
    const char* draft;
    int32_t budget, batch;
  };
  for (const Case& c :
       {Case{SpeculationMode::kNone, "none", 0, 1}, Case{SpeculationMode::kNone, "none", 0, 16}, Case{SpeculationMode::kDflash, "", 0, 1},
        Case{SpeculationMode::kDflash, "", 0, 16}, Case{SpeculationMode::kDdtree, "", 63, 1}, Case{SpeculationMode::kDdtree, "", 63, 16}}) {
    INFO(config << ", " << mode_name(c.mode) << ", batch " << c.batch);
    const auto pair = load_dummy_pair(config, c.draft, text);
    INFO(pair.status().message());
    REQUIRE(pair.ok());
    const CardMemory before = card();
    MemoryRequest request;
    request.engine.mode = c.mode, request.engine.budget = c.budget, request.engine.max_running = c.batch;
    request.engine.context_length = 8192;
    request.engine.prefill_chunk = 512, request.engine.lone_chunk = 1024;  // as serve has them on a card
    request.memory = before.total;
    request.taken = before.total - before.free;
    const auto footprint = PairFootprint::of(*pair, ops::DeviceKind::kCuda);
    REQUIRE(footprint.ok());
    const auto plan = plan_memory(*footprint, request);
    REQUIRE(plan.ok());
    INFO(refusal(*plan).message());
    REQUIRE(plan->fits);
    ExecutorOptions options = plan->executor;
    options.real_vocab = tiny_tokenizer().id_count();
    auto executor = make_cuda_executor(*pair, options);
    INFO(executor.status().message());
    REQUIRE(executor.ok());
    int64_t runtime = 0;
    for (const PlanRow& row : plan->rows)
      if (row.name == "runtime") runtime = row.bytes;
    const int64_t rows = plan->need - request.taken - runtime;  // of the plan, without its reserve
    {
      // The passes that are measured at start load every kernel that serving needs.
      EngineOptions engine = plan->request.engine;
      const auto started = Engine::start(**executor, tiny_tokenizer(), engine);
      INFO(started.status().message());
      REQUIRE(started.ok());
      const int64_t took = before.free - card().free;
      INFO("planned " << rows / kMiB << " MiB, took " << took / kMiB);
      CHECK(took >= rows);
      CHECK(took - rows <= kUnexplained);
    }
  }
}
