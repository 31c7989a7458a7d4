#include "base/thread_pool.h"

#include <atomic>
#include <catch2/catch_test_macros.hpp>
#include <vector>

TEST_CASE("parallel_for visits every index once, whatever the sizes") {
  for (int threads : {1, 2, 5}) {
    ddtree::ThreadPool pool(threads);
    for (int64_t count : {0, 1, 2, 7, 100, 1001})
      for (int64_t grain : {1, 3, 64}) {
        std::vector<std::atomic<int>> seen(static_cast<size_t>(count));
        pool.parallel_for(count, grain, [&](int64_t begin, int64_t end) {
          for (int64_t i = begin; i < end; ++i) ++seen[static_cast<size_t>(i)];
        });
        for (auto& s : seen) REQUIRE(s == 1);
      }
  }
}

TEST_CASE("thousands of short loops in a row neither hang nor mix") {
  ddtree::ThreadPool pool(4);
  std::vector<int> x(64);
  for (int round = 0; round < 20000; ++round)
    pool.parallel_for(64, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) ++x[static_cast<size_t>(i)];
    });
  for (int v : x) REQUIRE(v == 20000);
}
