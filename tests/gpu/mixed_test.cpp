// A crowd on a card: requests of every mode and kind come and go in one engine, and each gets what it gets alone.
#include <fmt/core.h>

#include <algorithm>
#include <catch2/catch_test_macros.hpp>
#include <random>

#include "gpu/card.h"
#include "gpu/support.h"
#include "support/collect.h"
#include "support/random_request.h"

using namespace ddtree;
using namespace ddtree::testing;

namespace {

constexpr int kRequests = 64;

std::unique_ptr<Executor> crowd_executor(bool portable, int32_t slots) { return tiny_card_executor(portable, 512, slots, 600); }

EngineOptions options(int32_t running, int32_t chunk) {
  EngineOptions o;
  o.measure_costs = false;
  o.mode = SpeculationMode::kDdtree;
  o.max_running = running;
  o.prefill_chunk = chunk;
  return o;
}

std::vector<Request> crowd_requests() {
  std::mt19937 rng(static_cast<std::mt19937::result_type>(ops::gpu_test::seed()));
  std::vector<Request> requests;
  for (int i = 0; i < kRequests; ++i) {
    requests.push_back(random_request(rng, scaled(48, 2)));
    requests.back().mode = kModes[rng() % 4];
    requests.back().budget = rng() % 4 == 0 ? 0 : 1 + static_cast<int32_t>(rng() % 255);  // 0: auto
  }
  return requests;
}

// All at once; returns when every one has got its last delta.
std::vector<std::shared_ptr<Collected>> together(Engine& engine, const std::vector<Request>& requests) {
  std::vector<std::shared_ptr<Collected>> got;
  for (const Request& r : requests) {
    got.push_back(std::make_shared<Collected>());
    const auto id = engine.submit(r, sink_of(got.back()));
    INFO(id.status().message());
    REQUIRE(id.ok());
  }
  for (const auto& c : got) c->wait();
  CHECK(engine.snapshot().pages_used == 0);
  CHECK(engine.snapshot().slots_used == 0);
  return got;
}

void crowd(bool portable) {
  INFO(ops::gpu_test::seed_text());
  const std::vector<Request> requests = crowd_requests();
  std::vector<std::shared_ptr<Collected>> alone;
  {
    auto executor = crowd_executor(portable, 1);
    auto engine = tiny_engine(*executor, options(1, 256));
    for (const Request& r : requests) alone.push_back(run_request(*engine, r));
  }
  int ties = 0;
  for (const auto& [running, chunk] : {std::pair{8, 256}, {3, 17}}) {
    auto executor = crowd_executor(portable, running);
    auto engine = tiny_engine(*executor, options(running, chunk));
    const auto got = together(*engine, requests);
    for (int i = 0; i < kRequests; ++i) {
      const Collected &a = *alone[static_cast<size_t>(i)], &b = *got[static_cast<size_t>(i)];
      const Request& r = requests[static_cast<size_t>(i)];
      INFO(fmt::format("request {}, {} budget {}, T {}, {} at once, chunks of {}", i, mode_name(*r.mode), *r.budget, r.sampling.temperature,
                       running, chunk));
      INFO(a.last.error << b.last.error);
      REQUIRE(a.last.finish != FinishReason::kError);
      REQUIRE(b.last.finish != FinishReason::kError);
      const auto n = std::mismatch(a.ids.begin(), a.ids.end(), b.ids.begin(), b.ids.end()).first - a.ids.begin();
      if (static_cast<size_t>(n) == a.ids.size() && a.ids.size() == b.ids.size()) {
        CHECK(a.text == b.text);
        CHECK(a.last.finish == b.last.finish);
        continue;
      }
      ++ties;
      // Two roundings stand either side of the threshold at worst: one of the two runs has recorded the tie at or before the difference.
      const auto tied = [&](const Collected& c) {
        return c.last.stats.first_near_tie >= 0 && c.last.stats.first_near_tie <= static_cast<int32_t>(n);
      };
      INFO("first difference at " << n << ", smallest gaps " << a.last.stats.smallest_gap << " and " << b.last.stats.smallest_gap);
      CHECK((tied(a) || tied(b)));
    }
  }
  WARN(fmt::format("{} of {} differ after a recorded near-tie", ties, 2 * kRequests));
  CHECK(ties * 4 <= 2 * kRequests);  // a rule that explained everything would prove nothing
}

}  // namespace

TEST_CASE("gpu: 64 requests in a crowd get what each gets alone", "[gpu][mixed]") { crowd(false); }
TEST_CASE("gpu: 64 requests in a crowd on the portable kernels", "[gpu][mixed]") { crowd(true); }

// What compute-sanitizer runs over (memcheck, racecheck): every kernel of a round, mixed as a server mixes them, and nothing twice, for
// racecheck takes a thousand times as long. DDTREE_TEST_SCALE shortens the answers.
TEST_CASE("gpu: a crowd of 64 requests comes and goes", "[gpu][crowd]") {
  INFO(ops::gpu_test::seed_text());
  auto executor = crowd_executor(false, 16);
  auto engine = tiny_engine(*executor, options(16, 256));
  for (const auto& c : together(*engine, crowd_requests())) {
    INFO(c->last.error);
    CHECK(c->last.finish != FinishReason::kError);
    CHECK(!c->ids.empty());
  }
}
