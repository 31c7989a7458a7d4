// What utf8proc does not know of Python's str methods (Unicode 14): full case mappings and numeric types. All sorted.
#pragma once

#include <array>

namespace ddtree::jinja {

struct Range {
  char32_t first, last;
};
struct Expansion {
  char32_t from;
  const char32_t* to;
};

extern const std::array<Expansion, 102> kUpperExpansions;
extern const std::array<Expansion, 48> kTitleExpansions;
extern const std::array<Range, 20> kOtherDigits;
extern const std::array<Range, 72> kNumericLetters;
extern const std::array<Range, 24> kOtherLower;
extern const std::array<Range, 5> kOtherUpper;

}  // namespace ddtree::jinja
