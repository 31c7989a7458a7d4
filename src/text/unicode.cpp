#include "text/unicode.h"

#include <utf8proc.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "text/unicode_tables.h"

namespace ddtree {
namespace {

constexpr std::string_view kReplacement = "\xEF\xBF\xBD";

// The length of the well-formed sequence at p, or 0. *broken gets, where it is 0, the bytes of the maximal prefix of a well-formed
// sequence (at least 1), and *open whether that prefix reaches `end`, so that more bytes could still complete it.
int sequence_length(const unsigned char* p, const unsigned char* end, int* broken, bool* open) {
  *broken = 1;
  *open = false;
  const unsigned char lead = *p;
  if (lead < 0x80) return 1;
  if (lead < 0xC2 || lead > 0xF4) return 0;
  const int length = lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
  // The second byte's range excludes overlong forms, surrogates and what lies past U+10FFFF.
  const unsigned char low = lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80;
  const unsigned char high = lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;
  for (int i = 1; i < length; ++i) {
    *broken = i;
    if (p + i == end) {
      *open = true;
      return 0;
    }
    if (p[i] < (i == 1 ? low : 0x80) || p[i] > (i == 1 ? high : 0xBF)) return 0;
  }
  return length;
}

size_t ascii_prefix(const char* p, size_t n) {
  size_t i = 0;
  for (; i + 8 <= n; i += 8) {
    uint64_t word;
    std::memcpy(&word, p + i, 8);
    if (word & 0x8080808080808080ull) break;
  }
  while (i < n && static_cast<unsigned char>(p[i]) < 0x80) ++i;
  return i;
}

int combining_class(char32_t c) {
  if (c < 0x300 || is_unknown_to_nfc(c)) return 0;
  return utf8proc_get_property(static_cast<utf8proc_int32_t>(c))->combining_class;
}

constexpr int32_t kHangulFirst = 0xAC00, kHangulLast = 0xD7A3;

constexpr auto kDecompose = static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_DECOMPOSE);
constexpr auto kCompose = static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_COMPOSE);

// Inert: normalisation leaves it alone whatever stands beside it (class 0, unchanged by itself, never the second half of a
// composition). A bitmap over the planes that hold anything else.
class InertMap {
 public:
  static const InertMap& of(NormalForm form) {
    if (form == NormalForm::kNfd) {
      static const InertMap nfd(NormalForm::kNfd);  // each is built (a few ms) when first needed
      return nfd;
    }
    static const InertMap nfc(NormalForm::kNfc);
    return nfc;
  }
  bool inert(char32_t c) const { return c >= kSize || !active_[c]; }

 private:
  static constexpr char32_t kSize = 0x30000;

  explicit InertMap(NormalForm form) : active_(kSize) {
    const bool composes = form == NormalForm::kNfc;
    int32_t parts[64];
    for (char32_t c = 0xA0; c < kSize; ++c) {
      if ((c >= 0xD800 && c < 0xE000) || is_unknown_to_nfc(c)) continue;
      const auto point = static_cast<int32_t>(c);
      const utf8proc_property_t* property = utf8proc_get_property(point);
      if (property->combining_class != 0) active_[c] = true;
      if (point >= kHangulFirst && point <= kHangulLast) {
        if (!composes) active_[c] = true;
        continue;
      }
      int boundary = UTF8PROC_BOUNDCLASS_START;
      const auto n = utf8proc_decompose_char(point, parts, 64, kDecompose, &boundary);
      if (n == 1 && parts[0] == point) continue;
      if (!composes) {
        active_[c] = true;
        continue;
      }
      for (utf8proc_ssize_t i = 1; i < n; ++i) active_[static_cast<char32_t>(parts[i])] = true;
      const auto composed = utf8proc_normalize_utf32(parts, n, kCompose);
      if (composed != 1 || parts[0] != point) active_[c] = true;
    }
    for (char32_t c = 0x1161; composes && c <= 0x11C2; ++c) active_[c] = true;  // Hangul vowels and finals join what precedes them
  }

  std::vector<bool> active_;
};

// Puts each run of combining marks into order of their classes. A stable sort, because utf8proc's own ordering is quadratic.
void order_marks(std::vector<int32_t>* points) {
  auto& p = *points;
  const auto cls = [](int32_t c) { return combining_class(static_cast<char32_t>(c)); };
  for (size_t i = 0; i < p.size();) {
    if (cls(p[i]) == 0) {
      ++i;
      continue;
    }
    size_t j = i;
    while (j < p.size() && cls(p[j]) != 0) ++j;
    if (j - i > 1)
      std::stable_sort(p.begin() + static_cast<ptrdiff_t>(i), p.begin() + static_cast<ptrdiff_t>(j),
                       [&](int32_t a, int32_t b) { return cls(a) < cls(b); });
    i = j;
  }
}

void append_normalized(std::string_view text, NormalForm form, std::vector<int32_t>* points, std::string* out) {
  const bool composes = form == NormalForm::kNfc;
  points->clear();
  const auto flush = [&] {
    order_marks(points);
    auto n = static_cast<utf8proc_ssize_t>(points->size());
    if (composes) n = utf8proc_normalize_utf32(points->data(), n, kCompose);
    for (utf8proc_ssize_t i = 0; i < n; ++i) append_utf8(static_cast<char32_t>((*points)[static_cast<size_t>(i)]), out);
    points->clear();
  };
  int32_t parts[64];
  int length = 0;
  for (const char *p = text.data(), *end = p + text.size(); p < end; p += length) {
    const char32_t c = decode_utf8(p, &length);
    if (is_unknown_to_nfc(c)) {
      flush();
      append_utf8(c, out);
      continue;
    }
    int boundary = UTF8PROC_BOUNDCLASS_START;
    const auto n = utf8proc_decompose_char(static_cast<int32_t>(c), parts, 64, kDecompose, &boundary);
    points->insert(points->end(), parts, parts + std::max<utf8proc_ssize_t>(n, 0));
  }
  flush();
}

}  // namespace

char32_t decode_utf8(const char* text, int* length) {
  const auto* p = reinterpret_cast<const unsigned char*>(text);
  if (p[0] < 0x80) return *length = 1, p[0];
  if (p[0] < 0xE0) return *length = 2, static_cast<char32_t>((p[0] & 0x1F) << 6 | (p[1] & 0x3F));
  if (p[0] < 0xF0) return *length = 3, static_cast<char32_t>((p[0] & 0x0F) << 12 | (p[1] & 0x3F) << 6 | (p[2] & 0x3F));
  return *length = 4, static_cast<char32_t>((p[0] & 0x07) << 18 | (p[1] & 0x3F) << 12 | (p[2] & 0x3F) << 6 | (p[3] & 0x3F));
}

char32_t decode_utf8_before(const char* begin, const char* end) {
  const char* p = end - 1;
  while (p > begin && (static_cast<unsigned char>(*p) & 0xC0) == 0x80) --p;
  int length = 0;
  return decode_utf8(p, &length);
}

void append_utf8(char32_t c, std::string* out) {
  if (c < 0x80) {
    out->push_back(static_cast<char>(c));
  } else if (c < 0x800) {
    out->push_back(static_cast<char>(0xC0 | c >> 6));
    out->push_back(static_cast<char>(0x80 | (c & 0x3F)));
  } else if (c < 0x10000) {
    out->push_back(static_cast<char>(0xE0 | c >> 12));
    out->push_back(static_cast<char>(0x80 | (c >> 6 & 0x3F)));
    out->push_back(static_cast<char>(0x80 | (c & 0x3F)));
  } else {
    out->push_back(static_cast<char>(0xF0 | c >> 18));
    out->push_back(static_cast<char>(0x80 | (c >> 12 & 0x3F)));
    out->push_back(static_cast<char>(0x80 | (c >> 6 & 0x3F)));
    out->push_back(static_cast<char>(0x80 | (c & 0x3F)));
  }
}

bool is_valid_utf8(std::string_view bytes) {
  const auto* p = reinterpret_cast<const unsigned char*>(bytes.data());
  const unsigned char* end = p + bytes.size();
  int broken = 0;
  bool open = false;
  while (p < end) {
    p += ascii_prefix(reinterpret_cast<const char*>(p), static_cast<size_t>(end - p));
    if (p == end) break;
    const int length = sequence_length(p, end, &broken, &open);
    if (length == 0) return false;
    p += length;
  }
  return true;
}

size_t append_lossy_utf8(std::string_view bytes, bool final, std::string* out) {
  const auto* begin = reinterpret_cast<const unsigned char*>(bytes.data());
  const unsigned char* end = begin + bytes.size();
  const unsigned char* p = begin;
  const unsigned char* good = begin;  // [good, p) is valid and not yet appended
  const auto append_good = [&] { out->append(reinterpret_cast<const char*>(good), static_cast<size_t>(p - good)); };
  int broken = 0;
  bool open = false;
  while (p < end) {
    p += ascii_prefix(reinterpret_cast<const char*>(p), static_cast<size_t>(end - p));
    if (p == end) break;
    const int length = sequence_length(p, end, &broken, &open);
    if (length > 0) {
      p += length;
      continue;
    }
    append_good();
    if (open && !final) return static_cast<size_t>(p - begin);
    out->append(kReplacement);
    p += broken;
    good = p;
  }
  append_good();
  return bytes.size();
}

bool normalize_utf8(std::string_view text, NormalForm form, std::string* out) {
  const InertMap& map = InertMap::of(form);
  const bool composes = form == NormalForm::kNfc;
  const unsigned char quick = form == NormalForm::kNfc ? 0xCC : 0xC2;  // leads below are inert: U+0300, or U+0080 for NFD
  const char* const begin = text.data();
  const char* const end = begin + text.size();
  const char* copied = begin;    // everything before is in *out (once changed)
  const char* previous = begin;  // start of the character before p, if that is inert
  bool changed = false;
  std::string result;
  std::vector<int32_t> points;
  int length = 0;
  for (const char* p = begin; p < end;) {
    if (static_cast<unsigned char>(*p) < quick) {
      previous = p;
      p += static_cast<unsigned char>(*p) < 0x80 ? 1 : 2;
      continue;
    }
    if (map.inert(decode_utf8(p, &length))) {
      previous = p;
      p += length;
      continue;
    }
    // A span that may change: the inert character before it (which it may join) up to the next inert one.
    const char* from = composes ? std::max(previous, copied) : p;
    const char* to = p;
    while (to < end && !map.inert(decode_utf8(to, &length))) to += length;
    result.append(copied, from);
    const size_t start = result.size();
    const std::string_view span(from, static_cast<size_t>(to - from));
    append_normalized(span, form, &points, &result);
    changed = changed || std::string_view(result).substr(start) != span;
    copied = previous = p = to;
  }
  if (!changed) return false;
  result.append(copied, end);
  *out = std::move(result);
  return true;
}

bool is_white_space(char32_t c) {
  if (c < 0x80) return c == ' ' || (c >= 9 && c <= 13);
  return c == 0x85 || c == 0xA0 || c == 0x1680 || (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F ||
         c == 0x205F || c == 0x3000;
}

bool is_word_character(char32_t c) {
  switch (utf8proc_category(static_cast<int32_t>(regex_stand_in(c)))) {
    case UTF8PROC_CATEGORY_LU:
    case UTF8PROC_CATEGORY_LL:
    case UTF8PROC_CATEGORY_LT:
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_LO:
    case UTF8PROC_CATEGORY_MN:
    case UTF8PROC_CATEGORY_MC:
    case UTF8PROC_CATEGORY_ME:
    case UTF8PROC_CATEGORY_ND:
    case UTF8PROC_CATEGORY_NL:
    case UTF8PROC_CATEGORY_PC: return true;
    default: break;
  }
  // Other_Alphabetic outside those categories (circled and squared letters), and the two joiners.
  return c == 0x200C || c == 0x200D || (c >= 0x24B6 && c <= 0x24E9) || (c >= 0x1F130 && c <= 0x1F149) || (c >= 0x1F150 && c <= 0x1F169) ||
         (c >= 0x1F170 && c <= 0x1F189);
}

bool replace_misclassified(std::string_view text, std::string* out) {
  const char* const begin = text.data();
  const char* const end = begin + text.size();
  const char* copied = begin;
  std::string result;
  int length = 0;
  for (const char* p = begin; p < end;) {
    const auto lead = static_cast<unsigned char>(*p);
    if (lead < 0xE0) {  // the tables begin at U+0800
      ++p;
      continue;
    }
    const char32_t c = decode_utf8(p, &length);
    if (const char32_t other = regex_stand_in(c); other != c) {
      result.append(copied, p);
      append_utf8(other, &result);
      copied = p + length;
    }
    p += length;
  }
  if (copied == begin) return false;
  result.append(copied, end);
  *out = std::move(result);
  return true;
}

}  // namespace ddtree
