// The few shapes that passes are rounded up to, and the padding that fills them.
#include <catch2/catch_test_macros.hpp>

#include "nn/buckets.h"
#include "nn/forest_builder.h"
#include "ops/cpu/cpu_backend.h"

using namespace ddtree;
using namespace ddtree::nn;

TEST_CASE("buckets hold what they are asked for, and none is larger than may be") {
  for (const int32_t most : {1, 7, 64, 128, 4096})
    for (int32_t n = 1; n <= 200; ++n) {
      INFO(n << " of at most " << most);
      for (const int32_t b : {row_bucket(n, most), kept_bucket(n, most)}) {
        if (b == 0) continue;
        CHECK(b >= n);
        CHECK(b <= most);
      }
      if (n <= 128 && most >= 128) CHECK((row_bucket(n, most) > 0 && kept_bucket(n, most) > 0));
      if (n <= most) CHECK(count_bucket(n, most) >= n);
      CHECK(count_bucket(n, most) <= most);
    }
  CHECK(row_bucket(129, 4096) == 0);
  CHECK(row_bucket(100, 100) == 0);  // 128 rows of buffers are not there
  CHECK(kept_bucket(0, 4096) == 0);
  for (const int32_t position : {0, 511, 512, 1023, 1024, 262143, INT32_MAX}) {
    CHECK(position_bucket(position) >= position);
    CHECK((position < 512 || position_bucket(position) < 2 * int64_t{position}));
  }
}

TEST_CASE("padding: rows and segments that are none, places first, page tables last") {
  ops::cpu::CpuBackend backend(ops::cpu::CpuOptions{.threads = 1});
  ops::BackendLimits limits;
  limits.max_rows = 16, limits.max_positions = 256, limits.max_linear_inputs = 16, limits.staged_bytes = 4096;
  REQUIRE(backend.set_limits(limits).ok());
  const std::vector<int32_t> a{3, 5}, b{7};
  const auto stage = [&](const std::vector<int32_t>& first, const std::vector<int32_t>& second, ops::Forest* view) {
    ForestArrays arrays;
    arrays.add_segment(false, 1, first, 17);
    arrays.add_row(11, 17, -1, 16);
    arrays.add_row(12, 18, 0, 16);
    arrays.add_segment(true, 0, second, 4);
    arrays.add_row(13, 4, -1, 16);
    ForestShape to = arrays.shape();
    CHECK((to.rows == 3 && to.segments == 2 && to.max_position == 18 && to.max_segment_rows == 2 && to.max_tree_rows == 2));
    CHECK((to.any_certain && to.max_certain_rows == 1));
    to.rows = 8, to.segments = 4, to.max_position = 511, to.max_segment_rows = 4;
    arrays.pad(to);
    backend.stage_begin(ops::Lane::kPass);
    REQUIRE(arrays.stage(&backend, ops::Lane::kPass, view).ok());
  };
  ops::Forest f;
  stage(a, b, &f);
  CHECK((f.rows == 8 && f.segments == 4 && f.max_position == 511 && f.max_segment_rows == 4 && f.max_tree_rows == 2 && f.any_certain));
  CHECK((f.place[0] == 5 * 16 + 1 && f.place[1] == 5 * 16 + 2 && f.place[2] == 7 * 16 + 4));
  CHECK((f.segment_of[0] == 0 && f.segment_of[2] == 1 && f.token[2] == 13 && f.parent[1] == 0));
  for (int32_t r = 3; r < 8; ++r) {
    INFO("row " << r);
    CHECK((f.segment_of[r] == -1 && f.parent[r] == -1 && f.place[r] == -1 && f.token[r] == 0 && f.position[r] == 0));
  }
  for (int32_t s = 2; s < 4; ++s) CHECK((f.segment[s].row_count == 0 && f.segment[s].slot == -1 && f.segment[s].certain == 0));
  CHECK((f.pages[0] == 3 && f.pages[1] == 5 && f.pages[2] == 7));
  // Longer page tables move nothing: what was recorded for the shape still points to the right arrays.
  ops::Forest g;
  stage({3, 5, 9, 2}, {7, 1, 0}, &g);
  CHECK((g.place == f.place && g.segment == f.segment && g.segment_of == f.segment_of && g.token == f.token && g.position == f.position &&
         g.parent == f.parent && g.pages == f.pages));
}
