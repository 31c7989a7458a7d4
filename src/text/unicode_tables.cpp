// Where the Unicode versions of our libraries and of Hugging Face's tokenizers part (see unicode.h). tests/clients/
// tokenizer-oracle.mjs compares every code point, so that a library's update which makes these tables wrong is seen.
#include "text/unicode_tables.h"

#include <algorithm>
#include <array>

namespace ddtree {
namespace {

struct Range {
  char32_t first, last;
};

// Code points newer than Unicode 9 whose combining class is not 0 or that take part in a composition. Normalisation passes over
// them, as that of Unicode 9 would.
constexpr Range kUnknownToNfc[] = {
    {0x7fd, 0x7fd},     {0x897, 0x89f},     {0x8ca, 0x8d3},     {0x9fe, 0x9fe},     {0xc3c, 0xc3c},     {0xd3b, 0xd3c},
    {0xeba, 0xeba},     {0x1715, 0x1715},   {0x1abf, 0x1add},   {0x1ae0, 0x1aeb},   {0x1df6, 0x1dfa},   {0xa82c, 0xa82c},
    {0x105c9, 0x105c9}, {0x105d2, 0x105d2}, {0x105da, 0x105da}, {0x105e4, 0x105e4}, {0x10d24, 0x10d27}, {0x10d69, 0x10d6d},
    {0x10eab, 0x10eac}, {0x10efa, 0x10efb}, {0x10efd, 0x10eff}, {0x10f46, 0x10f50}, {0x10f82, 0x10f85}, {0x11070, 0x11070},
    {0x1133b, 0x1133b}, {0x11382, 0x11385}, {0x1138b, 0x1138b}, {0x1138e, 0x1138e}, {0x11390, 0x11391}, {0x113b8, 0x113b8},
    {0x113bb, 0x113bb}, {0x113c2, 0x113c2}, {0x113c5, 0x113c5}, {0x113c7, 0x113c9}, {0x113ce, 0x113d0}, {0x1145e, 0x1145e},
    {0x11839, 0x1183a}, {0x11930, 0x11930}, {0x11935, 0x11935}, {0x11938, 0x11938}, {0x1193d, 0x1193e}, {0x11943, 0x11943},
    {0x119e0, 0x119e0}, {0x11a34, 0x11a34}, {0x11a47, 0x11a47}, {0x11a99, 0x11a99}, {0x11d42, 0x11d42}, {0x11d44, 0x11d45},
    {0x11d97, 0x11d97}, {0x11f41, 0x11f42}, {0x1611e, 0x16129}, {0x1612f, 0x1612f}, {0x16d63, 0x16d63}, {0x16d67, 0x16d6a},
    {0x16ff0, 0x16ff1}, {0x1e08f, 0x1e08f}, {0x1e130, 0x1e136}, {0x1e2ae, 0x1e2ae}, {0x1e2ec, 0x1e2ef}, {0x1e4ec, 0x1e4ef},
    {0x1e5ee, 0x1e5ef}, {0x1e6e3, 0x1e6e3}, {0x1e6e6, 0x1e6e6}, {0x1e6ee, 0x1e6ef}, {0x1e6f5, 0x1e6f5},
};

enum class Category : unsigned char { kLu, kLl, kLm, kLo, kHan, kMn, kMc, kNd, kNo, kCf };

struct ClassRange {
  char32_t first, last;
  Category category;
};

// Code points that PCRE2 10.42 (Unicode 14) does not know and Oniguruma (Unicode 16) does; and U+180E, which PCRE2 takes for a space.
constexpr ClassRange kMisclassified[] = {
    {0x897, 0x897, Category::kMn},      {0xcf3, 0xcf3, Category::kMc},      {0xece, 0xece, Category::kMn},
    {0x180e, 0x180e, Category::kCf},    {0x1c89, 0x1c89, Category::kLu},    {0x1c8a, 0x1c8a, Category::kLl},
    {0xa7cb, 0xa7cc, Category::kLu},    {0xa7cd, 0xa7cd, Category::kLl},    {0xa7da, 0xa7da, Category::kLu},
    {0xa7db, 0xa7db, Category::kLl},    {0xa7dc, 0xa7dc, Category::kLu},    {0x105c0, 0x105f3, Category::kLo},
    {0x10d40, 0x10d49, Category::kNd},  {0x10d4a, 0x10d4d, Category::kLo},  {0x10d4e, 0x10d4e, Category::kLm},
    {0x10d4f, 0x10d4f, Category::kLo},  {0x10d50, 0x10d65, Category::kLu},  {0x10d69, 0x10d6d, Category::kMn},
    {0x10d6f, 0x10d6f, Category::kLm},  {0x10d70, 0x10d85, Category::kLl},  {0x10ec2, 0x10ec4, Category::kLo},
    {0x10efc, 0x10eff, Category::kMn},  {0x1123f, 0x11240, Category::kLo},  {0x11241, 0x11241, Category::kMn},
    {0x11380, 0x11389, Category::kLo},  {0x1138b, 0x1138b, Category::kLo},  {0x1138e, 0x1138e, Category::kLo},
    {0x11390, 0x113b5, Category::kLo},  {0x113b7, 0x113b7, Category::kLo},  {0x113b8, 0x113ba, Category::kMc},
    {0x113bb, 0x113c0, Category::kMn},  {0x113c2, 0x113c2, Category::kMc},  {0x113c5, 0x113c5, Category::kMc},
    {0x113c7, 0x113ca, Category::kMc},  {0x113cc, 0x113cd, Category::kMc},  {0x113ce, 0x113ce, Category::kMn},
    {0x113cf, 0x113cf, Category::kMc},  {0x113d0, 0x113d0, Category::kMn},  {0x113d1, 0x113d1, Category::kLo},
    {0x113d2, 0x113d2, Category::kMn},  {0x113d3, 0x113d3, Category::kLo},  {0x113e1, 0x113e2, Category::kMn},
    {0x116d0, 0x116e3, Category::kNd},  {0x11bc0, 0x11be0, Category::kLo},  {0x11bf0, 0x11bf9, Category::kNd},
    {0x11f00, 0x11f01, Category::kMn},  {0x11f02, 0x11f02, Category::kLo},  {0x11f03, 0x11f03, Category::kMc},
    {0x11f04, 0x11f10, Category::kLo},  {0x11f12, 0x11f33, Category::kLo},  {0x11f34, 0x11f35, Category::kMc},
    {0x11f36, 0x11f3a, Category::kMn},  {0x11f3e, 0x11f3f, Category::kMc},  {0x11f40, 0x11f40, Category::kMn},
    {0x11f41, 0x11f41, Category::kMc},  {0x11f42, 0x11f42, Category::kMn},  {0x11f50, 0x11f59, Category::kNd},
    {0x11f5a, 0x11f5a, Category::kMn},  {0x1342f, 0x1342f, Category::kLo},  {0x13440, 0x13440, Category::kMn},
    {0x13441, 0x13446, Category::kLo},  {0x13447, 0x13455, Category::kMn},  {0x13460, 0x143fa, Category::kLo},
    {0x16100, 0x1611d, Category::kLo},  {0x1611e, 0x16129, Category::kMn},  {0x1612a, 0x1612c, Category::kMc},
    {0x1612d, 0x1612f, Category::kMn},  {0x16130, 0x16139, Category::kNd},  {0x16d40, 0x16d42, Category::kLm},
    {0x16d43, 0x16d6a, Category::kLo},  {0x16d6b, 0x16d6c, Category::kLm},  {0x16d70, 0x16d79, Category::kNd},
    {0x18cff, 0x18cff, Category::kLo},  {0x1b132, 0x1b132, Category::kLo},  {0x1b155, 0x1b155, Category::kLo},
    {0x1ccf0, 0x1ccf9, Category::kNd},  {0x1d2c0, 0x1d2d3, Category::kNo},  {0x1df25, 0x1df2a, Category::kLl},
    {0x1e030, 0x1e06d, Category::kLm},  {0x1e08f, 0x1e08f, Category::kMn},  {0x1e4d0, 0x1e4ea, Category::kLo},
    {0x1e4eb, 0x1e4eb, Category::kLm},  {0x1e4ec, 0x1e4ef, Category::kMn},  {0x1e4f0, 0x1e4f9, Category::kNd},
    {0x1e5d0, 0x1e5ed, Category::kLo},  {0x1e5ee, 0x1e5ef, Category::kMn},  {0x1e5f0, 0x1e5f0, Category::kLo},
    {0x1e5f1, 0x1e5fa, Category::kNd},  {0x2b739, 0x2b739, Category::kHan}, {0x2ebf0, 0x2ee5d, Category::kHan},
    {0x31350, 0x323af, Category::kHan},
};

// A character of that category which every version knows, with 3 and with 4 bytes of UTF-8. Han stands apart because
// patterns name it (\p{Han}).
constexpr char32_t kStandIn3[] = {0x1e00, 0x1e01, 0xa717, 0x1401, 0x4e00, 0x1dc4, 0x903, 0x966, 0x2070, 0x200b};
constexpr char32_t kStandIn4[] = {0x10400, 0x10428, 0x16b40, 0x10450, 0x20000, 0x1d167, 0x11002, 0x104a0, 0x10107, 0xe0001};

// Which blocks of 256 code points hold an entry: a quick no for nearly all text.
template <class Table>
constexpr auto blocks_of(const Table& table) {
  std::array<bool, 0x400> blocks{};
  for (const auto& r : table)
    for (char32_t b = r.first >> 8; b <= r.last >> 8; ++b) blocks[b] = true;
  return blocks;
}
constexpr auto kNfcBlocks = blocks_of(kUnknownToNfc);
constexpr auto kClassBlocks = blocks_of(kMisclassified);

template <class Entry, size_t N>
const Entry* find_range(const Entry (&table)[N], char32_t c) {
  const Entry* e = std::upper_bound(std::begin(table), std::end(table), c, [](char32_t v, const Entry& r) { return v < r.first; });
  if (e == std::begin(table)) return nullptr;
  --e;
  return c <= e->last ? e : nullptr;
}

}  // namespace

bool is_unknown_to_nfc(char32_t c) { return (c >> 8) < kNfcBlocks.size() && kNfcBlocks[c >> 8] && find_range(kUnknownToNfc, c) != nullptr; }

char32_t regex_stand_in(char32_t c) {
  if ((c >> 8) >= kClassBlocks.size() || !kClassBlocks[c >> 8]) return c;
  const ClassRange* r = find_range(kMisclassified, c);
  if (r == nullptr) return c;
  const auto category = static_cast<size_t>(r->category);
  return c < 0x10000 ? kStandIn3[category] : kStandIn4[category];
}

}  // namespace ddtree
