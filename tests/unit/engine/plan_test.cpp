// The memory plan: right to the byte for one pair, and without a dead zone on any card.
#include "engine/plan.h"

#include <fmt/core.h>

#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>

#include "engine/pools.h"

using namespace ddtree;
using Catch::Matchers::ContainsSubstring;

namespace {

PairFootprint footprint_of(const std::string& config, ops::DeviceKind kind = ops::DeviceKind::kCuda) {
  const auto specs = read_pair_specs(config);
  INFO(specs.status().message());
  REQUIRE(specs.ok());
  auto footprint = PairFootprint::of(*specs, kind, 2);
  INFO(footprint.status().message());
  REQUIRE(footprint.ok());
  return std::move(*footprint);
}

MemoryRequest request_of(int64_t mib) {
  MemoryRequest r;
  r.memory = mib * kMiB;
  return r;
}

MemoryPlan planned(const PairFootprint& footprint, const MemoryRequest& request) {
  auto plan = plan_memory(footprint, request);
  INFO(plan.status().message());
  REQUIRE(plan.ok());
  return std::move(*plan);
}

int64_t row(const MemoryPlan& plan, const std::string& name) {
  for (const PlanRow& r : plan.rows)
    if (r.name == name) return r.bytes;
  return 0;
}

// Bytes of one row of Qwen3.6-27B between its ops: residual stream in float32; h, delta, packed projection, q, o, gate|up and their product
// in BF16.
constexpr int64_t stack(int64_t packed, int64_t q, int64_t o) { return 5120 * (4 + 2 + 2) + (packed + q + o + 3 * 17408) * 2; }
// The target (with the convolution's output, the last norm's and the drafter's features), the MTP head, and the drafter's context.
constexpr int64_t kRowActivations = stack(10240 + 6144 + 96, 6144, 6144) + (10240 + 5120 + 5 * 5120) * 2 +  //
                                    stack(2 * 6144 + 2048, 6144, 6144) + 5120 * (2 + 4 + 4 + 2 + 2) +       //
                                    (5 * 5120 + 2 * 5120 + 10240) * 2;
// The delta rule's, a tentative row of a pass, any row of it, and a chunk of 64 prompt rows.
constexpr int64_t kTentativeFactors = 48LL * (2048 * 4 + 6144 * 4 + 48 * 8 + 10240 * 2);
constexpr int64_t kRowFactors = 2 * 2048 * 4 + 16LL * 320 * 2 * 4 + 16 * 4 * 4;
constexpr int64_t kChunkFactors = 48 * 82944;
constexpr int64_t kBlockRowActivations = stack(4096 + 2048, 4096, 4096) + 5120 * 2;

// What every plan that fits must hold.
void check_sound(const MemoryPlan& plan) {
  int64_t sum = 0;
  for (const PlanRow& r : plan.rows) {
    CHECK(r.bytes > 0);
    sum += r.bytes;
  }
  CHECK(sum == plan.need);
  CHECK(plan.need <= plan.limit);
  CHECK(plan.limit <= plan.request.memory);
  const EngineOptions& e = plan.request.engine;
  CHECK(plan.executor.pages >= pages_needed(e.context_length, 0, e.nextn_steps, plan.executor.page_size));
  CHECK(plan.executor.slots == e.max_running + 1);
  CHECK(plan.cures.empty());
}

// A plan, or a refusal whose every cure plans as it stands.
MemoryPlan check_no_dead_zone(const PairFootprint& footprint, const PairFootprint& drafterless, const MemoryRequest& request) {
  MemoryPlan plan = planned(footprint, request);
  if (plan.fits) {
    check_sound(plan);
    CHECK(refusal(plan).ok());
    return plan;
  }
  const Status why = refusal(plan);
  CHECK(why.code() == Code::kDoesNotFit);
  CHECK(exit_code(why.code()) == 71);
  CHECK_THAT(why.message(),
             ContainsSubstring(with_commas(plan.limit / kMiB)) && ContainsSubstring(with_commas((plan.need + kMiB - 1) / kMiB)));
  REQUIRE(!plan.cures.empty());
  CHECK_THAT(why.message(), ContainsSubstring(plan.cures.front().text + " fits"));
  for (const MemoryCure& cure : plan.cures) {
    INFO(cure.text);
    CHECK_THAT(cure.text, !ContainsSubstring("tp-size") && !ContainsSubstring("quant"));
    const MemoryPlan cured = planned(cure.without_drafter ? drafterless : footprint, cure.request);
    CHECK(cured.fits);
    check_sound(cured);
    // Never advice in the wrong direction.
    CHECK(cure.request.fraction >= plan.request.fraction);
    CHECK(cure.request.engine.max_running <= plan.request.engine.max_running);
    CHECK(cure.request.engine.context_length <= plan.request.engine.context_length);
    CHECK(cure.request.memory >= plan.request.memory);
  }
  return plan;
}

}  // namespace

TEST_CASE("Qwen3.6-27B on 1, 2, 4 and 8 ranks: every row of one rank, by hand") {
  const auto specs = read_pair_specs("qwen3.6-27b");
  REQUIRE(specs.ok());
  MemoryRequest r = request_of(143771);
  r.engine.context_length = 32768;
  r.engine.max_running = 3;
  const MemoryPlan one = planned(footprint_of("qwen3.6-27b"), r);
  CHECK(one.ranks == 1);
  CHECK(row(one, "collectives") == 0);
  const auto near = [](int64_t a, int64_t b) { return std::abs(a - b) < kMiB; };  // 256-byte steps of many small allocations
  for (const int32_t ranks : {2, 4, 8}) {
    INFO(ranks << " ranks");
    auto footprint = PairFootprint::of(*specs, ops::DeviceKind::kCuda, 2, ranks);
    REQUIRE(footprint.ok());
    const MemoryPlan plan = planned(*footprint, r);
    CHECK(plan.ranks == ranks);
    CHECK(plan.fits);
    CHECK(near(row(plan, "embedding_weights"), row(one, "embedding_weights") / ranks));
    CHECK(near(row(plan, "head_weights"), row(one, "head_weights") / ranks));
    CHECK(row(plan, "drafter_weights") == row(one, "drafter_weights"));
    // A gated-delta layer: q, k and v (10,240 rows), z (6,144), a and b (48 each), the output projection, gate, up and down; a full one: q
    // with its gates (12,288), k and v (1,024 each, of which eight ranks have a whole head of 256 each), the output projection, the MLP.
    const int64_t mlp = 3LL * 17408 / ranks * 5120, kv = std::max<int64_t>(4 / ranks, 1) * 256;
    const int64_t delta = (10240 + 6144 + 96 + 6144) / ranks * 5120LL + mlp, full = ((12288 + 6144) / ranks + 2 * kv) * 5120LL + mlp;
    const int64_t small = 48LL * (10240 / ranks * 4 * 4 + 2 * 48 / ranks * 4 + 128 * 4) + 64LL * 2 * 5120 * 4 + 16 * 2 * 256 * 4 + 5120 * 4;
    CHECK(near(row(plan, "target_weights"), (48 * delta + 16 * full) * 2 + small));
    CHECK(near(row(plan, "mtp_weights"), (full + 2LL * 5120 * 5120 / ranks) * 2 + 5 * 5120 * 4));
    // K/V of a token: 16 layers, K and V, this rank's heads of 256, BF16.
    CHECK(row(plan, "target_kv") == plan.kv_tokens() * 16 * 2 * kv * 2);
    CHECK(near(row(plan, "states"), row(one, "states") / ranks));
    CHECK(row(plan, "collectives") > 0);
    CHECK(plan.kv_tokens() == one.kv_tokens());
  }
  CHECK(PairFootprint::of(*specs, ops::DeviceKind::kCuda, 2, 3).status().code() == Code::kUsage);
  // BF16 on 48 GB cards: what users run with two of them fits, and does not on one.
  MemoryRequest small = request_of(49140);
  small.engine.context_length = 16384, small.engine.max_running = 2;
  CHECK_FALSE(planned(footprint_of("qwen3.6-27b"), small).fits);
  auto two = PairFootprint::of(*specs, ops::DeviceKind::kCuda, 2, 2);
  REQUIRE(two.ok());
  CHECK(planned(*two, small).fits);
}

TEST_CASE("each row of Qwen3.6-27B's plan, by hand") {
  // Hidden 5120, intermediate 17408, 48 gated-delta and 16 full layers; 24 and 4 heads of 256; 16 key and 48 value heads of 128. Drafter: 5
  // layers, 32 and 8 heads of 128, intermediate 17408, 5 taps, block 16.
  MemoryRequest r = request_of(143771);
  r.engine.context_length = 32768;
  r.engine.max_running = 1;
  r.taken = 700 * kMiB;
  const MemoryPlan plan = planned(footprint_of("qwen3.6-27b"), r);
  REQUIRE(plan.fits);
  const int64_t tokens = 1025 * 32;  // the context and three drafts, in pages of 32
  CHECK(plan.executor.pages == 1025);
  CHECK(plan.executor.slots == 2);
  CHECK(plan.executor.max_rows == 512);
  CHECK(row(plan, "taken") == 700 * kMiB);
  CHECK(row(plan, "embedding_weights") == 248320LL * 5120 * 2);
  CHECK(row(plan, "head_weights") == 248320LL * 5120 * 2);
  const int64_t channels = 10240, mlp = 3LL * 17408 * 5120 * 2;
  const int64_t norms = 2 * 5120 * 4;
  // conv taps and norms are float32; allocations of less than 256 bytes take 256: A_log and dt_bias (48 each).
  const int64_t delta = (channels + 6144 + 48 + 48) * 5120 * 2 + 5120LL * 6144 * 2 + channels * 4 * 4 + 2 * 256 + 128 * 4;
  const int64_t attention = (2LL * 24 * 256 + 2 * 4 * 256) * 5120 * 2 + 5120LL * 24 * 256 * 2 + 2 * 256 * 4;
  CHECK(row(plan, "target_weights") == 48 * (delta + mlp + norms) + 16 * (attention + mlp + norms) + 5120 * 4);
  CHECK(row(plan, "mtp_weights") == 5120LL * 2 * 5120 * 2 + attention + mlp + 5 * 5120 * 4);
  const int64_t draft_layer = (32LL * 128 + 2 * 8 * 128) * 5120 * 2 + 5120LL * 32 * 128 * 2 + 2 * 128 * 4 + mlp + norms;
  const int64_t context_kv = 5LL * 2 * 8 * 128 * 5120 * 2 + 5 * 128 * 4;  // every layer's K and V projections again, for one call
  CHECK(row(plan, "drafter_weights") == 5120LL * 5 * 5120 * 2 + 2 * 5120 * 4 + 5 * draft_layer + context_kv);
  CHECK(row(plan, "target_kv") == tokens * 65536);  // 16 layers × 2 × 4 heads × 256 × 2 B = 64 KiB
  CHECK(row(plan, "mtp_kv") == tokens * 4096);
  CHECK(row(plan, "drafter_kv") == tokens * 20480);  // 5 layers × 2 × 8 heads × 128 × 2 B
  // 144 MiB of state and 2.8 MiB of convolution window a slot.
  CHECK(row(plan, "states") == 2 * (48LL * 48 * 128 * 128 * 4 + 48LL * 3 * channels * 2));
  // Of a tentative row, 48 layers: k̂ 16 × 128 and u 48 × 128 in float32, gates in float64, convolution inputs in BF16; of any row, one
  // layer: q, k and products with up to 320 rows of a tree, four turns a key head, and 82,944 bytes a value head for each of at most 16
  // chunks of 64 rows.
  CHECK(plan.executor.max_tentative_rows == 512);
  CHECK(row(plan, "factors") == 512 * (kTentativeFactors + kRowFactors) + 8 * kChunkFactors);
  CHECK(row(plan, "kv_scratch") == 512LL * (65536 + 4096) + 32LL * 2 * 8 * 128 * 2);  // target and MTP head; two blocks, one layer
  // Hidden states of the slots; squares of up to 128 rows in 128 parts, for target, MTP head and (two blocks) drafter.
  CHECK(row(plan, "activations") == 512 * kRowActivations + 2 * 5120 * 2 + 32 * kBlockRowActivations + (2 * 128 + 32) * 128LL * 4);
  CHECK(row(plan, "logits") == (512 + 30) * (248320LL * 4 + 5120 * 2));
  // Positions: the pages' and 64 that drafts may reach; rotary dimensions 64 and 128.
  CHECK(row(plan, "tables") == (tokens + 64) * (64 + 128) * 4);
  CHECK(row(plan, "workspace") >= 32 * kMiB);
  CHECK(row(plan, "runtime") >= 256 * kMiB);
  CHECK(row(plan, "runtime") < 258 * kMiB);
  int64_t sum = 0;
  for (const PlanRow& each : plan.rows) sum += each.bytes;
  CHECK(sum == plan.need);
  CHECK((plan.need - row(plan, "taken")) % (2 * kMiB) == 0);
}

TEST_CASE("262,144 tokens of Qwen3.6-27B take 16 GiB and 144 MiB a sequence") {
  MemoryRequest r = request_of(143771);
  r.engine.max_running = 1;
  r.engine.nextn_steps = 1;
  const MemoryPlan plan = planned(footprint_of("qwen3.6-27b"), r);
  REQUIRE(plan.fits);
  CHECK(std::abs(row(plan, "target_kv") - (16LL << 30)) <= 4 * kMiB);
}

TEST_CASE("the drafter is in the plan: weights, context and features") {
  const PairFootprint with = footprint_of("qwen3.6-27b"), without = with.without_drafter();
  MemoryRequest r = request_of(143771);
  r.pages = 8193;
  const MemoryPlan a = planned(with, r), b = planned(without, r);
  CHECK(row(b, "drafter_weights") == 0);
  CHECK(row(b, "drafter_kv") == 0);
  CHECK(a.need - b.need >= row(a, "drafter_weights") + row(a, "drafter_kv"));
  CHECK(a.need - b.need < (row(a, "drafter_weights") + row(a, "drafter_kv")) * 105 / 100);  // features, its rotary table, its logits
}

TEST_CASE("a tree costs its rows' factors, inputs, scratch, activations and logits") {
  const PairFootprint footprint = footprint_of("qwen3.6-27b");
  MemoryRequest r = request_of(143771);
  r.engine.max_running = 32;
  r.pages = 8193;
  const MemoryPlan chain = planned(footprint, r);
  r.engine.budget = 63;
  const MemoryPlan tree = planned(footprint, r);
  const int64_t rows = tree.executor.max_rows - chain.executor.max_rows;
  REQUIRE(tree.executor.max_rows == 256 + 32 * 64);
  const auto factors = [](const ExecutorOptions& e) {
    return e.max_tentative_rows * kTentativeFactors + e.max_rows * kRowFactors +
           std::min<int64_t>((e.max_rows + 63) / 64, 16) * kChunkFactors;
  };
  CHECK(chain.executor.max_tentative_rows == 512);
  CHECK(tree.executor.max_tentative_rows == 32 * 64);
  CHECK(row(chain, "factors") == factors(chain.executor));
  CHECK(row(tree, "factors") == factors(tree.executor));
  CHECK(row(tree, "activations") - row(chain, "activations") == rows * kRowActivations);
  CHECK(row(tree, "kv_scratch") - row(chain, "kv_scratch") == rows * (65536 + 4096));
  CHECK(row(tree, "logits") - row(chain, "logits") == (32 * 64 - 512) * (248320LL * 4 + 5120 * 2));
  CHECK(row(tree, "target_kv") == row(chain, "target_kv"));
}

TEST_CASE("prompts by larger chunks take no factors, and smaller ones are a cure") {
  const PairFootprint footprint = footprint_of("qwen3.6-27b");
  MemoryRequest r = request_of(143771);
  r.engine.prefill_chunk = 512;
  r.pages = 8193;
  const MemoryPlan small = planned(footprint, r);
  r.engine.lone_chunk = 1024;
  const MemoryPlan large = planned(footprint, r);
  CHECK(large.executor.max_rows == 1024);
  CHECK(large.executor.max_tentative_rows == small.executor.max_tentative_rows);
  CHECK(row(large, "factors") - row(small, "factors") == 512 * kRowFactors + 8 * kChunkFactors);
  CHECK(row(large, "activations") - row(small, "activations") == 512 * kRowActivations);
  CHECK(row(large, "logits") == row(small, "logits"));
  // On a card that the smaller chunk just fits.
  r.fraction = kLargestFraction;
  r.memory = static_cast<int64_t>(static_cast<double>(small.need) / r.fraction) + 64 * kMiB;
  const MemoryPlan refused = planned(footprint, r);
  REQUIRE_FALSE(refused.fits);
  CHECK(std::any_of(refused.cures.begin(), refused.cures.end(), [](const MemoryCure& c) {
    return c.text == "--chunked-prefill-size 512" && c.request.engine.prefill_chunk == 512 && c.request.engine.lone_chunk == 0;
  }));
}

TEST_CASE("every --mem-fraction-static is planned, or refused with cures that plan; more is never fewer pages") {
  constexpr int64_t kCards[] = {49140, 97887, 81559, 143771};  // A6000, RTX PRO 6000, H100, H200
  int fit = 0, refused = 0;
  for (const char* config : {"qwen3.6-27b", "qwen3.5-9b", "qwen3.5-4b", "qwen3.5-0.8b"}) {
    const PairFootprint both = footprint_of(config), alone = both.without_drafter();
    for (const bool drafts : {false, true}) {
      if (drafts && !both.drafter()) continue;
      const PairFootprint& footprint = drafts ? both : alone;
      for (const int32_t budget : drafts ? std::vector<int32_t>{0, 63} : std::vector<int32_t>{0})
        for (const int32_t batch : {1, 16, 64})
          for (const int64_t card : kCards) {
            int32_t pages = 0;
            bool fitted = false;
            for (int hundredths = 50; hundredths <= 99; ++hundredths) {
              INFO(config << ", drafter " << drafts << ", budget " << budget << ", batch " << batch << ", " << card << " MiB, 0."
                          << hundredths);
              MemoryRequest r = request_of(card);
              r.engine.mode = !drafts ? SpeculationMode::kNone : budget > 0 ? SpeculationMode::kDdtree : SpeculationMode::kDflash;
              r.engine.budget = budget;
              r.engine.max_running = batch;
              r.fraction = hundredths / 100.0;
              const MemoryPlan plan = check_no_dead_zone(footprint, alone, r);
              ++(plan.fits ? fit : refused);
              CHECK((plan.fits || !fitted));  // what fits, fits with more
              CHECK((!plan.fits || plan.executor.pages >= pages));
              if (plan.fits) fitted = true, pages = plan.executor.pages;
            }
          }
    }
  }
  CHECK(fit > 100);
  CHECK(refused > 100);
}

TEST_CASE("what a user asked for is never changed: pages that do not fit are refused, with the most that do") {
  const PairFootprint footprint = footprint_of("qwen3.6-27b");
  MemoryRequest r = request_of(143771);
  r.engine.context_length = 32768;
  r.pages = 40000;
  const MemoryPlan plan = check_no_dead_zone(footprint, footprint.without_drafter(), r);
  REQUIRE(!plan.fits);
  CHECK(plan.executor.pages == 40000);
  CHECK_THAT(plan.cures.front().text, ContainsSubstring("--max-total-tokens "));
  MemoryRequest more = plan.cures.front().request;
  ++more.pages;
  CHECK(!planned(footprint, more).fits);  // it was the most
  more.pages = 40;
  const auto short_of_one = plan_memory(footprint, more);
  REQUIRE(!short_of_one.ok());
  CHECK(short_of_one.status().code() == Code::kUsage);
  CHECK_THAT(short_of_one.status().message(), ContainsSubstring("--kv-pages 40") && ContainsSubstring("1025"));
}

TEST_CASE("weights larger than the card name the smallest card that holds them") {
  const PairFootprint footprint = footprint_of("qwen3.6-27b");
  const MemoryPlan plan = check_no_dead_zone(footprint, footprint.without_drafter(), request_of(49140));
  REQUIRE(plan.cures.size() == 1);
  CHECK_THAT(plan.cures[0].text, ContainsSubstring("a card with at least "));
  MemoryRequest less = plan.cures[0].request;
  less.memory -= kMiB;
  CHECK(!planned(footprint, less).fits);
}

TEST_CASE("ranks on the CPU share a machine: the smallest that is named holds all of them") {
  const auto specs = read_pair_specs("qwen3.6-27b");
  REQUIRE(specs.ok());
  const auto footprint = PairFootprint::of(*specs, ops::DeviceKind::kCpu, 1, 2);
  REQUIRE(footprint.ok());
  const MemoryPlan plan = planned(*footprint, request_of(8192));  // a rank's part of 16 GiB
  REQUIRE(plan.cures.size() == 1);
  CHECK(plan.cures[0].text == "a machine with at least " + with_commas(2 * (plan.cures[0].request.memory / kMiB)) + " MiB");
}

TEST_CASE("what other processes hold of a card is not given out twice") {
  const PairFootprint footprint = footprint_of("qwen3.5-4b");
  MemoryRequest r = request_of(49140);
  r.taken = 600 * kMiB;
  const MemoryPlan free = planned(footprint, r);
  r.taken = 20600 * kMiB;
  const MemoryPlan shared = check_no_dead_zone(footprint, footprint.without_drafter(), r);
  REQUIRE(free.fits);
  CHECK(row(shared, "taken") == 20600 * kMiB);
  CHECK((!shared.fits || shared.executor.pages <= free.executor.pages));
}

TEST_CASE("the CPU engine's plan gives every sequence its pages where there is room, and is deterministic") {
  const PairFootprint footprint = footprint_of("qwen3.5-0.8b", ops::DeviceKind::kCpu);
  MemoryRequest r = request_of(64 << 10);
  r.engine.context_length = 4096;
  const MemoryPlan plan = planned(footprint, r);
  REQUIRE(plan.fits);
  CHECK(plan.executor.pages == 8 * 129);
  CHECK(plan.pinned == 0);
  CHECK(row(plan, "taken") == 0);
  for (int i = 0; i < 10; ++i) {
    const MemoryPlan again = planned(footprint, r);
    CHECK(again.need == plan.need);
    CHECK(again.executor.pages == plan.executor.pages);
  }
  check_no_dead_zone(footprint, footprint.without_drafter(), request_of(2048));
}

TEST_CASE("the table shows each row, the sum and what is left") {
  const MemoryPlan plan = planned(footprint_of("qwen3.6-27b"), request_of(143771));
  std::string all;
  for (const std::string& line : plan_table(plan)) all += line + "\n";
  for (const PlanRow& r : plan.rows) CHECK_THAT(all, ContainsSubstring(r.label) && ContainsSubstring(mib_text(r.bytes)));
  CHECK_THAT(all, ContainsSubstring("left") && ContainsSubstring(mib_text(plan.left())));
  CHECK_THAT(plan_sentence(plan), ContainsSubstring("of 143,771 MiB planned"));
  CHECK(mib_text(1234 * kMiB + kMiB / 2) == "1,234.5");
  CHECK(mib_text(-kMiB) == "-1.0");
  CHECK(with_commas(-1234567) == "-1,234,567");
  CHECK(fraction_text(0.9) == "0.90");
  CHECK(fraction_text(0.0001) == "0.0001");
}
