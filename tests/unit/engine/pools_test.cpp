#include "engine/pools.h"

#include <catch2/catch_test_macros.hpp>
#include <numeric>
#include <random>
#include <set>

using namespace ddtree;

TEST_CASE("pages: none is handed out twice, all come back, and a request that does not fit takes none") {
  IndexPool pool(50);
  std::mt19937 rng(1);
  std::vector<std::vector<int32_t>> held;
  for (int round = 0; round < 5000; ++round) {
    if (rng() % 2 == 0 || held.empty()) {
      std::vector<int32_t> take;
      const int32_t want = static_cast<int32_t>(rng() % 20), free = pool.free();
      const bool got = pool.take(want, &take);
      REQUIRE(got == (want <= free));
      REQUIRE(take.size() == (got ? static_cast<size_t>(want) : 0));
      held.push_back(take);
    } else {
      std::swap(held.back(), held[rng() % held.size()]);
      pool.give_back(&held.back());
      held.pop_back();
    }
    std::set<int32_t> all;
    size_t count = 0;
    for (const auto& h : held) all.insert(h.begin(), h.end()), count += h.size();
    REQUIRE(all.size() == count);
    REQUIRE(pool.used() == static_cast<int32_t>(count));
  }
  for (auto& h : held) pool.give_back(&h);
  CHECK(pool.used() == 0);
}

TEST_CASE("pages for a whole life are rounded up") {
  CHECK(pages_needed(1, 31, 0, 32) == 1);
  CHECK(pages_needed(1, 32, 0, 32) == 2);
  CHECK(pages_needed(1, 31, 3, 32) == 2);
  CHECK(pages_needed(2000000000, 2000000000, 0, 32) == 125000000);
}

TEST_CASE("prompt rows are shared equally; what one does not need goes to the others") {
  CHECK(share_rows({100, 100, 100, 100}, 64) == std::vector<int32_t>{16, 16, 16, 16});
  CHECK(share_rows({3, 100, 0, 100}, 64) == std::vector<int32_t>{3, 31, 0, 30});
  CHECK(share_rows({3, 4}, 64) == std::vector<int32_t>{3, 4});
  CHECK(share_rows({9, 9, 9}, 2) == std::vector<int32_t>{1, 1, 0});
  CHECK(share_rows({}, 5).empty());
  std::mt19937 rng(2);
  for (int round = 0; round < 500; ++round) {
    std::vector<int32_t> left(rng() % 9);
    for (auto& l : left) l = static_cast<int32_t>(rng() % 50);
    const int32_t rows = static_cast<int32_t>(rng() % 200), total = std::accumulate(left.begin(), left.end(), 0);
    const auto share = share_rows(left, rows);
    REQUIRE(std::accumulate(share.begin(), share.end(), 0) == std::min(rows, total));
    for (size_t i = 0; i < left.size(); ++i)
      for (size_t j = 0; j < left.size(); ++j) {
        REQUIRE(share[i] <= left[i]);
        if (share[i] < left[i]) REQUIRE(share[i] + 1 >= std::min(share[j], left[j]));  // nobody gets more while another wants
      }
  }
}
