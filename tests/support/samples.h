// Requests answered twice, and the comparison of both answers: the same ids, except from a near-tie on that both runs have recorded.
#pragma once

#include <catch2/catch_test_macros.hpp>
#include <memory>
#include <string>
#include <vector>

#include "support/collect.h"

namespace ddtree::testing {

struct Sample {
  Request request;
  std::shared_ptr<Collected> plain, got;
  std::string what;
};

// Submits all in the given mode choice and waits.
template <class Choose>
void run(Engine& engine, std::vector<Sample>& samples, bool plain, Choose&& choose) {
  for (Sample& s : samples) {
    Request r = s.request;
    choose(r, s);
    auto c = std::make_shared<Collected>();
    (plain ? s.plain : s.got) = c;
    const auto id = engine.submit(r, sink_of(c));
    REQUIRE(id.ok());
  }
  for (Sample& s : samples) (plain ? s.plain : s.got)->wait();
}

inline int ties = 0, compared = 0;

inline void compare(const Sample& s) {
  INFO(s.what);
  const Collected &a = *s.plain, &b = *s.got;
  ++compared;
  size_t n = 0;
  while (n < a.ids.size() && n < b.ids.size() && a.ids[n] == b.ids[n]) ++n;
  if (n == a.ids.size() && n == b.ids.size()) {
    CHECK(a.text == b.text);
    CHECK(a.last.finish == b.last.finish);
    CHECK(a.last.stop_string == b.last.stop_string);
    return;
  }
  ++ties;
  // Both runs must have recorded the tie, at or before the first difference.
  CHECK(a.last.stats.first_near_tie >= 0);
  CHECK(a.last.stats.first_near_tie <= static_cast<int32_t>(n));
  CHECK(b.last.stats.first_near_tie >= 0);
  CHECK(b.last.stats.first_near_tie <= static_cast<int32_t>(n));
}

}  // namespace ddtree::testing
