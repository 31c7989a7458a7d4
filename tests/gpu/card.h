// The tiny pair on a card, for tests of the whole engine.
#pragma once

#include <catch2/catch_test_macros.hpp>
#include <memory>

#include "nn/cuda_executor.h"
#include "support/tiny.h"

namespace ddtree::testing {

// Skips the test where there is no card. Every buffer is an allocation of its own, so that compute-sanitizer sees a step past one's end.
inline std::unique_ptr<Executor> tiny_card_executor(bool portable, int32_t pages, int32_t slots, int32_t max_rows) {
  ExecutorOptions o;
  o.pages = pages;
  o.slots = slots;
  o.max_rows = max_rows;
  o.single_allocations = true;
  auto r = make_cuda_executor(tiny_pair(), o, 0, portable);
  if (!r.ok() && r.status().code() == Code::kUnavailable) SKIP(r.status().message());
  INFO(r.status().message());
  REQUIRE(r.ok());
  return std::move(*r);
}

}  // namespace ddtree::testing
