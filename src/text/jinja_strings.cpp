#include "text/jinja_strings.h"

#include <utf8proc.h>

#include <algorithm>

#include "text/jinja_unicode_tables.h"

namespace ddtree::jinja {
namespace {

template <class Table>
bool in_ranges(const Table& table, char32_t c) {
  const auto after = std::upper_bound(table.begin(), table.end(), c, [](char32_t x, const Range& r) { return x < r.first; });
  return after != table.begin() && c <= std::prev(after)->last;
}

template <class Table>
const char32_t* expansion(const Table& table, char32_t c) {
  const auto at = std::lower_bound(table.begin(), table.end(), c, [](const Expansion& e, char32_t x) { return e.from < x; });
  return at != table.end() && at->from == c ? at->to : nullptr;
}

utf8proc_category_t category(char32_t c) { return utf8proc_category(static_cast<utf8proc_int32_t>(c)); }

void append_upper(CodePoints& out, char32_t c) {
  if (const char32_t* many = c < 0x80 ? nullptr : expansion(kUpperExpansions, c)) out += many;
  else out += static_cast<char32_t>(utf8proc_toupper(static_cast<utf8proc_int32_t>(c)));
}

void append_title(CodePoints& out, char32_t c) {
  if (const char32_t* many = c < 0x80 ? nullptr : expansion(kTitleExpansions, c)) out += many;
  else out += static_cast<char32_t>(utf8proc_totitle(static_cast<utf8proc_int32_t>(c)));
}

bool case_ignorable(char32_t c) {
  switch (category(c)) {
    case UTF8PROC_CATEGORY_MN:
    case UTF8PROC_CATEGORY_ME:
    case UTF8PROC_CATEGORY_CF:
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_SK: return true;
    default:
      return c == '\'' || c == '.' || c == ':' || c == 0xB7 || c == 0x2018 || c == 0x2019 || c == 0x2024 || c == 0x2027 || c == 0xFE13 ||
             c == 0xFE52 || c == 0xFE55 || c == 0xFF07 || c == 0xFF0E || c == 0xFF1A;
  }
}

// A capital sigma at a word's end becomes the final form.
bool final_sigma(const CodePoints& text, size_t at) {
  size_t before = at;
  while (before > 0 && case_ignorable(text[before - 1])) --before;
  if (before == 0 || !is_cased(text[before - 1])) return false;
  size_t after = at + 1;
  while (after < text.size() && case_ignorable(text[after])) ++after;
  return after == text.size() || !is_cased(text[after]);
}

void append_lower(CodePoints& out, const CodePoints& text, size_t at) {
  const char32_t c = text[at];
  if (c == 0x3A3) out += final_sigma(text, at) ? U'\x3C2' : U'\x3C3';
  else if (c == 0x130) out += U"i\x307";
  else out += static_cast<char32_t>(utf8proc_tolower(static_cast<utf8proc_int32_t>(c)));
}

}  // namespace

CodePoints decode(std::string_view text) {
  CodePoints out;
  out.reserve(text.size());
  const auto* bytes = reinterpret_cast<const utf8proc_uint8_t*>(text.data());
  for (size_t i = 0; i < text.size();) {
    if (bytes[i] < 0x80) {
      out += static_cast<char32_t>(bytes[i++]);
      continue;
    }
    utf8proc_int32_t c;
    const auto n = utf8proc_iterate(bytes + i, static_cast<utf8proc_ssize_t>(text.size() - i), &c);
    if (n <= 0) {
      out += U'\xFFFD';
      ++i;
    } else {
      out += static_cast<char32_t>(c);
      i += static_cast<size_t>(n);
    }
  }
  return out;
}

void append_utf8(std::string& out, char32_t c) {
  if (c < 0x80) {
    out += static_cast<char>(c);
  } else if (c < 0x800) {
    out += static_cast<char>(0xC0 | (c >> 6));
    out += static_cast<char>(0x80 | (c & 0x3F));
  } else if (c < 0x10000) {
    out += static_cast<char>(0xE0 | (c >> 12));
    out += static_cast<char>(0x80 | ((c >> 6) & 0x3F));
    out += static_cast<char>(0x80 | (c & 0x3F));
  } else {
    out += static_cast<char>(0xF0 | (c >> 18));
    out += static_cast<char>(0x80 | ((c >> 12) & 0x3F));
    out += static_cast<char>(0x80 | ((c >> 6) & 0x3F));
    out += static_cast<char>(0x80 | (c & 0x3F));
  }
}

std::string encode(std::u32string_view points) {
  std::string out;
  out.reserve(points.size());
  for (const char32_t c : points) append_utf8(out, c);
  return out;
}
std::string encode(const CodePoints& points) { return encode(std::u32string_view(points)); }

bool is_ascii(std::string_view text) {
  return std::all_of(text.begin(), text.end(), [](char c) { return static_cast<unsigned char>(c) < 0x80; });
}

size_t count_points(std::string_view text) {
  return static_cast<size_t>(
      std::count_if(text.begin(), text.end(), [](char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; }));
}

bool is_space(char32_t c) {
  if (c < 0x80) return c == ' ' || (c >= 9 && c <= 13) || (c >= 28 && c <= 31);
  return c == 0x85 || c == 0xA0 || c == 0x1680 || (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F ||
         c == 0x205F || c == 0x3000;
}
bool is_line_break(char32_t c) { return (c >= 10 && c <= 13) || (c >= 28 && c <= 30) || c == 0x85 || c == 0x2028 || c == 0x2029; }
bool is_alpha(char32_t c) {
  const auto k = category(c);
  return k == UTF8PROC_CATEGORY_LU || k == UTF8PROC_CATEGORY_LL || k == UTF8PROC_CATEGORY_LT || k == UTF8PROC_CATEGORY_LM ||
         k == UTF8PROC_CATEGORY_LO;
}
bool is_decimal(char32_t c) { return category(c) == UTF8PROC_CATEGORY_ND; }
bool is_digit(char32_t c) { return is_decimal(c) || in_ranges(kOtherDigits, c); }
bool is_numeric(char32_t c) {
  const auto k = category(c);
  return k == UTF8PROC_CATEGORY_ND || k == UTF8PROC_CATEGORY_NL || k == UTF8PROC_CATEGORY_NO || in_ranges(kNumericLetters, c);
}
bool is_alnum(char32_t c) { return is_alpha(c) || is_numeric(c); }
bool is_word(char32_t c) { return c == '_' || is_alnum(c); }
bool is_lower(char32_t c) { return category(c) == UTF8PROC_CATEGORY_LL || in_ranges(kOtherLower, c); }
bool is_upper(char32_t c) { return category(c) == UTF8PROC_CATEGORY_LU || in_ranges(kOtherUpper, c); }
bool is_title(char32_t c) { return category(c) == UTF8PROC_CATEGORY_LT; }
bool is_cased(char32_t c) { return is_lower(c) || is_upper(c) || is_title(c); }
bool is_printable(char32_t c) {
  switch (category(c)) {
    case UTF8PROC_CATEGORY_CC:
    case UTF8PROC_CATEGORY_CF:
    case UTF8PROC_CATEGORY_CS:
    case UTF8PROC_CATEGORY_CO:
    case UTF8PROC_CATEGORY_CN:
    case UTF8PROC_CATEGORY_ZL:
    case UTF8PROC_CATEGORY_ZP: return false;
    case UTF8PROC_CATEGORY_ZS: return c == ' ';
    default: return true;
  }
}

int decimal_value(char32_t c) {
  if (c < 0x80) return c >= '0' && c <= '9' ? static_cast<int>(c - '0') : -1;
  if (!is_decimal(c)) return -1;
  // Decimal digits come in runs of ten, in order; several runs may touch, all of them starting at a multiple from the run's first.
  char32_t first = c;
  while (first > 0 && is_decimal(first - 1)) --first;
  return static_cast<int>((c - first) % 10);
}

std::string upper(std::string_view text) {
  CodePoints out;
  for (const char32_t c : decode(text)) append_upper(out, c);
  return encode(out);
}

std::string lower(std::string_view text) {
  const CodePoints in = decode(text);
  CodePoints out;
  for (size_t i = 0; i < in.size(); ++i) append_lower(out, in, i);
  return encode(out);
}

std::string casefold(std::string_view text) {
  utf8proc_uint8_t* folded = nullptr;
  const auto n = utf8proc_map(reinterpret_cast<const utf8proc_uint8_t*>(text.data()), static_cast<utf8proc_ssize_t>(text.size()), &folded,
                              UTF8PROC_CASEFOLD);
  if (n < 0) return lower(text);
  std::string out(reinterpret_cast<char*>(folded), static_cast<size_t>(n));
  free(folded);
  return out;
}

std::string title(std::string_view text) {
  const CodePoints in = decode(text);
  CodePoints out;
  bool inside = false;
  for (size_t i = 0; i < in.size(); ++i) {
    if (inside) append_lower(out, in, i);
    else append_title(out, in[i]);
    inside = is_cased(in[i]);
  }
  return encode(out);
}

std::string capitalize(std::string_view text) {
  const CodePoints in = decode(text);
  CodePoints out;
  for (size_t i = 0; i < in.size(); ++i) {
    if (i) append_lower(out, in, i);
    else append_title(out, in[i]);
  }
  return encode(out);
}

std::string swapcase(std::string_view text) {
  const CodePoints in = decode(text);
  CodePoints out;
  for (size_t i = 0; i < in.size(); ++i) {
    if (is_upper(in[i])) append_lower(out, in, i);
    else if (is_lower(in[i])) append_upper(out, in[i]);
    else out += in[i];
  }
  return encode(out);
}

std::string_view strip(std::string_view text, const std::string* chars, int sides) {
  const CodePoints set = chars ? decode(*chars) : CodePoints();
  const auto drop = [&](char32_t c) { return chars ? set.find(c) != CodePoints::npos : is_space(c); };
  const auto* bytes = reinterpret_cast<const utf8proc_uint8_t*>(text.data());
  size_t begin = 0, end = text.size();
  while ((sides & 1) && begin < end) {
    utf8proc_int32_t c;
    const auto n = utf8proc_iterate(bytes + begin, static_cast<utf8proc_ssize_t>(end - begin), &c);
    if (n <= 0 || !drop(static_cast<char32_t>(c))) break;
    begin += static_cast<size_t>(n);
  }
  while ((sides & 2) && begin < end) {
    size_t at = end - 1;
    while (at > begin && (bytes[at] & 0xC0) == 0x80) --at;
    utf8proc_int32_t c;
    if (utf8proc_iterate(bytes + at, static_cast<utf8proc_ssize_t>(end - at), &c) <= 0 || !drop(static_cast<char32_t>(c))) break;
    end = at;
  }
  return text.substr(begin, end - begin);
}

std::vector<std::string> split_lines(std::string_view text, bool keep_ends) {
  std::vector<std::string> out;
  const CodePoints in = decode(text);
  size_t from = 0;
  for (size_t i = 0; i < in.size(); ++i) {
    if (!is_line_break(in[i])) continue;
    const size_t end = i;
    if (in[i] == '\r' && i + 1 < in.size() && in[i + 1] == '\n') ++i;
    out.push_back(encode(std::u32string_view(in).substr(from, (keep_ends ? i + 1 : end) - from)));
    from = i + 1;
  }
  if (from < in.size()) out.push_back(encode(std::u32string_view(in).substr(from)));
  return out;
}

std::vector<std::string> split(std::string_view text, const std::string* separator, int64_t max) {
  std::vector<std::string> out;
  if (separator) {
    size_t from = 0;
    for (int64_t n = 0; max < 0 || n < max; ++n) {
      const size_t at = text.find(*separator, from);
      if (at == std::string_view::npos) break;
      out.emplace_back(text.substr(from, at - from));
      from = at + separator->size();
    }
    out.emplace_back(text.substr(from));
    return out;
  }
  const CodePoints in = decode(text);
  const std::u32string_view view(in);
  size_t i = 0;
  for (int64_t n = 0;; ++n) {
    while (i < in.size() && is_space(in[i])) ++i;
    if (i == in.size()) return out;
    if (max >= 0 && n >= max) {
      out.push_back(encode(view.substr(i)));  // the rest, its trailing white space too
      return out;
    }
    const size_t from = i;
    while (i < in.size() && !is_space(in[i])) ++i;
    out.push_back(encode(view.substr(from, i - from)));
  }
}

std::vector<std::string> rsplit(std::string_view text, const std::string* separator, int64_t max) {
  std::vector<std::string> out;
  if (separator) {
    size_t end = text.size();
    for (int64_t n = 0; max < 0 || n < max; ++n) {
      if (end < separator->size()) break;
      const size_t at = text.rfind(*separator, end - separator->size());
      if (at == std::string_view::npos) break;
      out.emplace_back(text.substr(at + separator->size(), end - at - separator->size()));
      end = at;
    }
    out.emplace_back(text.substr(0, end));
  } else {
    const CodePoints in = decode(text);
    const std::u32string_view view(in);
    size_t end = in.size();
    for (int64_t n = 0;; ++n) {
      while (end > 0 && is_space(in[end - 1])) --end;
      if (end == 0) break;
      if (max >= 0 && n >= max) {
        out.push_back(encode(view.substr(0, end)));
        break;
      }
      size_t from = end;
      while (from > 0 && !is_space(in[from - 1])) --from;
      out.push_back(encode(view.substr(from, end - from)));
      end = from;
    }
  }
  std::reverse(out.begin(), out.end());
  return out;
}

std::string replace(std::string_view text, std::string_view from, std::string_view to, int64_t max) {
  std::string out;
  if (from.empty()) {  // before every character and at the end
    int64_t n = 0;
    for (const char32_t c : decode(text)) {
      if (max < 0 || n < max) out += to;
      ++n;
      append_utf8(out, c);
    }
    if (max < 0 || n < max) out += to;
    return out;
  }
  size_t at = 0;
  for (int64_t n = 0; max < 0 || n < max; ++n) {
    const size_t hit = text.find(from, at);
    if (hit == std::string_view::npos) break;
    out.append(text, at, hit - at);
    out += to;
    at = hit + from.size();
  }
  out.append(text, at);
  return out;
}

std::string escape_html(std::string_view text) {
  std::string out;
  for (const char c : text) {
    switch (c) {
      case '&': out += "&amp;"; break;
      case '<': out += "&lt;"; break;
      case '>': out += "&gt;"; break;
      case '"': out += "&#34;"; break;
      case '\'': out += "&#39;"; break;
      default: out += c;
    }
  }
  return out;
}

}  // namespace ddtree::jinja
