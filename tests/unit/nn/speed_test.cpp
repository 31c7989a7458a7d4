// Times of the tiny pair's passes on this machine, for whoever tunes them: test_nn "[.speed]". Hidden: a time never decides whether a test
// passes.
#include <algorithm>
#include <catch2/catch_test_macros.hpp>
#include <chrono>
#include <cstdio>
#include <functional>
#include <numeric>
#include <random>

#include "model/pair.h"
#include "nn/cpu_executor.h"

namespace ddtree {
namespace {

// Median and best of `count` runs, in milliseconds: a machine that others use too shows its speed in the best.
void report(const char* what, int count, const std::function<void()>& body, double per = 1.0, const char* unit = "ms") {
  std::vector<double> times;
  for (int i = 0; i < count; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    body();
    times.push_back(std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count());
  }
  std::sort(times.begin(), times.end());
  if (per > 1.0) {
    std::printf("%-44s best %8.0f %s\n", what, per / times[0] * 1000, unit);
  } else {
    std::printf("%-44s best %8.3f %s, median %8.3f\n", what, times[0], unit, times[times.size() / 2]);
  }
}

TEST_CASE("speed of the tiny pair's passes", "[.speed]") {
  auto pair = load_pair("tiny");
  REQUIRE(pair.ok());
  for (const int threads : {1, 2}) {
    ExecutorOptions options;
    options.pages = 256;
    options.slots = 8;
    options.threads = threads;
    auto executor = make_cpu_executor(*pair, options);
    REQUIRE(executor.ok());
    std::printf("--- %d thread(s)\n", threads);
    std::mt19937 random(3);
    std::vector<int32_t> pages(32);
    std::iota(pages.begin(), pages.end(), 0);
    PassOutput out;
    const auto pass = [&](int32_t rows, int32_t context, char kind, bool all_logits) {
      Forest forest;
      forest.segments.push_back({0, rows, kind == 'c', 0, pages, context});
      for (int32_t i = 0; i < rows; ++i) {
        const int32_t parent = i == 0 ? -1 : kind == 't' ? std::max<int32_t>(i - 1 - static_cast<int32_t>(random() % 8), 0) : i - 1;
        forest.token.push_back(static_cast<int32_t>(random() % 4000));
        forest.parent.push_back(parent);
        forest.position.push_back(parent < 0 ? context : forest.position[parent] + 1);
        forest.wants_logits.push_back(all_logits || i + 1 == rows);
      }
      REQUIRE((*executor)->forward(forest, &out).ok());
      return forest;
    };
    const auto commit = [&](const Forest& forest, int32_t rows, bool drafter, bool mtp) {
      Accepted a;
      for (int32_t i = 0; i < rows; ++i) a.rows.push_back(i);
      a.next.assign(rows, 5);
      a.feed_drafter = drafter;
      a.feed_mtp = mtp;
      REQUIRE((*executor)->commit(forest, std::vector{a}).ok());
    };
    for (const int32_t rows : {64, 256, 512}) {
      char name[64];
      std::snprintf(name, sizeof name, "prefill, chunks of %d, drafter fed", rows);
      report(
          name, 8, [&] { commit(pass(rows, 0, 'c', false), rows, true, false); }, rows, "tok/s");
    }
    report(
        "prefill, chunks of 512, drafter and MTP fed", 8, [&] { commit(pass(512, 0, 'c', false), 512, true, true); }, 512, "tok/s");
    for (const int32_t context : {200, 900}) {
      std::printf("context %d\n", context);
      report("one certain row, no drafter fed", 60, [&] { commit(pass(1, context, 'c', true), 1, false, false); });
      for (const int32_t rows : {4, 9, 16, 17, 32, 33, 64, 65, 128, 256}) {
        char name[64];
        std::snprintf(name, sizeof name, "tree of %d rows", rows);
        report(name, rows < 100 ? 40 : 15, [&] { pass(rows, context, rows <= 16 ? 'l' : 't', true); });
      }
      const Forest forest = pass(16, context, 'l', true);
      bool first = true;
      report("commit of 12 rows, drafter fed (with its pass)", 30, [&] {
        commit(first ? forest : pass(16, context, 'l', true), 12, true, false);
        first = false;
      });
      DraftOutput draft;
      const DraftQuery query{.slot = 0, .pages = pages, .context = context, .anchor = 7};
      report("draft, one block, top 16", 60, [&] { REQUIRE((*executor)->draft(std::vector{query}, 16, &draft).ok()); });
      commit(pass(1, context - 1, 'c', true), 1, false, true);
      report("draft_nextn, 3 steps", 60, [&] { REQUIRE((*executor)->draft_nextn(std::vector{query}, 3, &draft).ok()); });
    }
  }
}

}  // namespace
}  // namespace ddtree
