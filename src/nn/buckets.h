// Sizes that passes are rounded up to where a backend records what it runs (Backend::fixed_shapes): few enough that most passes meet one
// that was recorded before, close enough that padding costs little.
#pragma once

#include <algorithm>
#include <cstdint>

namespace ddtree::nn {

// Rows of a pass: 1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128. The smallest of them that holds n and is at most `most`; 0: none is, the pass
// runs as it is (prompts, and what goes to the library for many rows).
inline int32_t row_bucket(int32_t n, int32_t most) {
  for (const int32_t b : {1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128})
    if (n <= b) return b <= most ? b : 0;
  return 0;
}

// Rows that a commit keeps or feeds: 8, 16, 32, 64, 128, as the products for few rows have them; 0 as above, and for no rows.
inline int32_t kept_bucket(int32_t n, int32_t most) {
  if (n == 0) return 0;
  for (const int32_t b : {8, 16, 32, 64, 128})
    if (n <= b) return b <= most ? b : 0;
  return 0;
}

// Sequences: powers of two, or `most`, which holds any.
inline int32_t count_bucket(int32_t n, int32_t most) {
  int32_t b = 1;
  while (b < n) b *= 2;
  return std::min(b, most);
}

// The largest position: 511, 1,023, 2,047, …: what attention splits its context by.
inline int32_t position_bucket(int32_t position) {
  int64_t b = 512;
  while (b <= position) b *= 2;
  return static_cast<int32_t>(std::min<int64_t>(b - 1, INT32_MAX));
}

}  // namespace ddtree::nn
