// A store opened for a test.
#pragma once

#include <catch2/catch_test_macros.hpp>
#include <memory>
#include <string>
#include <utility>

#include "store/store.h"

namespace ddtree::test {

// No row ages. Rows of the tests carry times of their own choosing, and the 90 days of the program's default would let retention
// remove them between two reads, whenever its thread comes round to it.
inline StoreOptions ageless() {
  StoreOptions options;
  options.retain_days = 0;
  return options;
}

inline std::unique_ptr<Store> open_at(const std::string& path, StoreOptions options = ageless()) {
  auto opened = Store::open(path, std::move(options));
  INFO(opened.status().message());
  REQUIRE(opened.ok());
  return std::move(*opened);
}

}  // namespace ddtree::test
