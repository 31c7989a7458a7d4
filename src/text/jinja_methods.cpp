// Methods of strings.
#include <algorithm>
#include <unordered_map>

#include "text/jinja_builtins.h"
#include "text/jinja_render.h"
#include "text/jinja_strings.h"

namespace ddtree::jinja {
namespace {

using Method = Value (*)(Interpreter&, const Value&, Args&);

Value same(const Value& self, std::string text) { return Value::string(std::move(text), self.markup()); }

template <std::string (*Convert)(std::string_view)>
Value convert(Interpreter&, const Value& self, Args& args) {
  const Bound b("string method", args, {});
  return same(self, Convert(self.text()));
}

template <int Sides>
Value strip_method(Interpreter&, const Value& self, Args& args) {
  if (!args.named.empty()) throw TypeError("strip() takes no keyword arguments");
  const Bound b("strip", args, {"chars"});
  if (!b.has(0) || b[0].is(Kind::kNone)) return same(self, std::string(strip(self.text(), nullptr, Sides)));
  const std::string chars = b.text(0, "");
  return same(self, std::string(strip(self.text(), &chars, Sides)));
}

template <bool FromRight>
Value split_method(Interpreter& in, const Value& self, Args& args) {
  const Bound b(FromRight ? "rsplit" : "split", args, {"sep", "maxsplit"});
  const auto max = static_cast<int64_t>(b.integer(1, -1));
  std::vector<std::string> parts;
  if (!b.has(0) || b[0].is(Kind::kNone)) {
    parts = FromRight ? rsplit(self.text(), nullptr, max) : split(self.text(), nullptr, max);
  } else {
    const std::string separator = b.text(0, "");
    if (separator.empty()) throw ValueError("empty separator");
    parts = FromRight ? rsplit(self.text(), &separator, max) : split(self.text(), &separator, max);
  }
  in.step(parts.size());
  List out;
  for (std::string& p : parts) out.push_back(same(self, std::move(p)));
  return Value::list(std::move(out));
}

template <bool FromRight>
Value partition(Interpreter&, const Value& self, Args& args) {
  const Bound b("partition", args, {"sep"}, 1);
  const std::string separator = b.text(0, "");
  if (separator.empty()) throw ValueError("empty separator");
  const std::string& text = self.text();
  const size_t at = FromRight ? text.rfind(separator) : text.find(separator);
  const auto s = [&](std::string t) { return same(self, std::move(t)); };
  if (at == std::string::npos) return FromRight ? Value::tuple({s(""), s(""), s(text)}) : Value::tuple({s(text), s(""), s("")});
  return Value::tuple({s(text.substr(0, at)), s(separator), s(text.substr(at + separator.size()))});
}

// The part of the text that start and stop leave, by code points, as byte offsets; false where start is beyond the end.
bool window(const std::string& text, const Bound& b, size_t first, size_t& from, size_t& to) {
  const auto size = static_cast<Int>(count_points(text));
  Int start = b.integer(first, 0), stop = b.integer(first + 1, size);
  if (start < 0) start = std::max<Int>(start + size, 0);
  if (stop < 0) stop = std::max<Int>(stop + size, 0);
  stop = std::min(stop, size);
  if (start > size || start > stop) return false;
  const auto offset = [&](Int n) {
    size_t i = 0;
    for (; n > 0; --n) do
        ++i;
      while (i < text.size() && (static_cast<unsigned char>(text[i]) & 0xC0) == 0x80);
    return i;
  };
  from = offset(start);
  to = offset(stop);
  return true;
}

template <bool AtEnd>
Value affix(Interpreter&, const Value& self, Args& args) {
  if (!args.named.empty()) throw TypeError("startswith() and endswith() take no keyword arguments");
  const Bound b(AtEnd ? "endswith" : "startswith", args, {"prefix", "start", "end"}, 1);
  size_t from, to;
  const bool inside = window(self.text(), b, 1, from, to);
  const std::string_view part = inside ? std::string_view(self.text()).substr(from, to - from) : std::string_view();
  const auto test = [&](const Value& v) {
    if (!v.is_string()) {
      if (v.is_undefined()) fail_undefined(v);
      throw TypeError(std::string(AtEnd ? "endswith" : "startswith") + " first arg must be str or a tuple of str, not " + type_name(v));
    }
    return inside && (AtEnd ? part.ends_with(v.text()) : part.starts_with(v.text()));
  };
  if (b[0].is(Kind::kTuple)) {
    bool any = false;
    for (const Value& v : b[0].items()) any = any || test(v);
    return Value::boolean(any);
  }
  return Value::boolean(test(b[0]));
}

enum class Search { kFind, kRfind, kIndex, kRindex, kCount };
template <Search How>
Value search(Interpreter&, const Value& self, Args& args) {
  if (!args.named.empty()) throw TypeError("find(), index() and count() take no keyword arguments");
  const Bound b("find", args, {"sub", "start", "end"}, 1);
  const std::string wanted = b.text(0, "");
  const std::string& text = self.text();
  size_t from, to, at = std::string::npos;
  Int count = 0;
  if (window(text, b, 1, from, to)) {
    const std::string_view part = std::string_view(text).substr(from, to - from);
    if constexpr (How == Search::kCount) {
      if (wanted.empty()) return Value::integer(static_cast<Int>(count_points(part)) + 1);
      for (size_t i = part.find(wanted); i != std::string_view::npos; i = part.find(wanted, i + wanted.size())) ++count;
    } else {
      at = How == Search::kRfind || How == Search::kRindex ? part.rfind(wanted) : part.find(wanted);
      if (at != std::string_view::npos) at += from;
    }
  }
  if constexpr (How == Search::kCount) return Value::integer(count);
  if (at != std::string::npos) return Value::integer(static_cast<Int>(count_points(std::string_view(text).substr(0, at))));
  if constexpr (How == Search::kIndex || How == Search::kRindex) throw ValueError("substring not found");
  return Value::integer(-1);
}

Value join(Interpreter& in, const Value& self, Args& args) {
  const Bound b("join", args, {"iterable"}, 1);
  std::string out;
  const List items = in.iterate_counted(b[0]);
  for (size_t i = 0; i < items.size(); ++i) {
    if (!items[i].is_string())
      throw TypeError("sequence item " + std::to_string(i) + ": expected str instance, " + type_name(items[i]) + " found");
    if (i) out += self.text();
    out += items[i].text();
    in.check_size(out.size());
  }
  return same(self, std::move(out));
}

Value replace_method(Interpreter& in, const Value& self, Args& args) {
  if (!args.named.empty()) throw TypeError("replace() takes no keyword arguments");
  const Bound b("replace", args, {"old", "new", "count"}, 2);
  const std::string from = b.text(0, ""), to = b.text(1, "");
  in.check_size((self.text().size() / std::max<size_t>(from.size(), 1) + 1) * to.size());
  return same(self, replace(self.text(), from, to, static_cast<int64_t>(checked_int(b.get(2, Value::integer(-1)), "replace()'s count"))));
}

Value split_lines_method(Interpreter& in, const Value& self, Args& args) {
  const Bound b("splitlines", args, {"keepends"});
  List out;
  for (std::string& line : split_lines(self.text(), b.flag(0, false))) out.push_back(same(self, std::move(line)));
  in.step(out.size());
  return Value::list(std::move(out));
}

template <bool AtEnd>
Value remove_affix(Interpreter&, const Value& self, Args& args) {
  const Bound b("removeprefix", args, {"prefix"}, 1);
  const std::string affix_text = b.text(0, "");
  std::string_view text = self.text();
  if (AtEnd && !affix_text.empty() && text.ends_with(affix_text)) text.remove_suffix(affix_text.size());
  if (!AtEnd && text.starts_with(affix_text)) text.remove_prefix(affix_text.size());
  return same(self, std::string(text));
}

template <int Where>  // -1 ljust, 0 center, 1 rjust
Value justify(Interpreter& in, const Value& self, Args& args) {
  const Bound b("center", args, {"width", "fillchar"}, 1);
  const Int width = checked_int(b[0], "the width"), size = static_cast<Int>(count_points(self.text()));
  const std::string fill = b.text(1, " ");
  if (count_points(fill) != 1) throw TypeError("The fill character must be exactly one character long");
  if (width <= size) return self;
  in.check_size(static_cast<size_t>(std::min<Int>(width, static_cast<Int>(1) << 40)));
  const Int pad = width - size;
  const Int left = Where < 0 ? 0 : Where > 0 ? pad : pad / 2 + (pad & width & 1);
  std::string out;
  for (Int i = 0; i < left; ++i) out += fill;
  out += self.text();
  for (Int i = left; i < pad; ++i) out += fill;
  return same(self, std::move(out));
}

Value zfill(Interpreter& in, const Value& self, Args& args) {
  const Bound b("zfill", args, {"width"}, 1);
  const Int pad = checked_int(b[0], "the width") - static_cast<Int>(count_points(self.text()));
  if (pad <= 0) return self;
  in.check_size(static_cast<size_t>(std::min<Int>(pad, static_cast<Int>(1) << 40)));
  std::string out = self.text();
  out.insert(!out.empty() && (out[0] == '+' || out[0] == '-') ? 1 : 0, static_cast<size_t>(pad), '0');
  return same(self, std::move(out));
}

Value expand_tabs(Interpreter& in, const Value& self, Args& args) {
  const Bound b("expandtabs", args, {"tabsize"});
  const Int size = b.integer(0, 8);
  std::string out;
  Int column = 0;
  for (const char32_t c : decode(self.text())) {
    if (c == '\t') {
      if (size > 0) {
        const Int n = size - column % size;
        in.check_size(out.size() + static_cast<size_t>(n));
        out.append(static_cast<size_t>(n), ' ');
        column += n;
      }
    } else {
      column = c == '\n' || c == '\r' ? 0 : column + 1;
      append_utf8(out, c);
    }
  }
  return same(self, std::move(out));
}

template <bool (*Test)(char32_t)>
Value all_points(Interpreter&, const Value& self, Args& args) {
  const Bound b("string method", args, {});
  const CodePoints points = decode(self.text());
  return Value::boolean(!points.empty() && std::all_of(points.begin(), points.end(), Test));
}

Value is_title_cased(Interpreter&, const Value& self, Args&) {
  bool cased = false, previous = false;
  for (const char32_t c : decode(self.text())) {
    if (is_upper(c) || is_title(c)) {
      if (previous) return Value::boolean(false);
      previous = cased = true;
    } else if (is_lower(c)) {
      if (!previous) return Value::boolean(false);
      cased = true;
    } else {
      previous = false;
    }
  }
  return Value::boolean(cased);
}

template <bool Upper>
Value is_case(Interpreter&, const Value& self, Args&) {
  bool cased = false;
  for (const char32_t c : decode(self.text())) {
    if (is_title(c) || (Upper ? is_lower(c) : is_upper(c))) return Value::boolean(false);
    cased = cased || (Upper ? is_upper(c) : is_lower(c));
  }
  return Value::boolean(cased);
}

Value is_printable_text(Interpreter&, const Value& self, Args&) {
  const CodePoints points = decode(self.text());
  return Value::boolean(std::all_of(points.begin(), points.end(), is_printable));
}

Value is_identifier(Interpreter&, const Value& self, Args&) {
  const CodePoints points = decode(self.text());
  return Value::boolean(!points.empty() && !is_decimal(points[0]) && std::all_of(points.begin(), points.end(), is_word));
}

Value format_method(Interpreter& in, const Value& self, Args& args) { return format_braces(in, self.text(), args, self.markup()); }

Value format_map(Interpreter& in, const Value& self, Args& args) {
  const Bound b("format_map", args, {"mapping"}, 1);
  if (!b[0].is(Kind::kDict)) throw TypeError("format_map() needs a mapping");
  Args named;
  for (const auto& [key, value] : b[0].dict().entries())
    if (key.is_string()) named.named.emplace_back(key.text(), value);
  return format_braces(in, self.text(), named, self.markup());
}

bool ascii_point(char32_t c) { return c < 0x80; }

const std::unordered_map<std::string_view, Method>& methods() {
  static const std::unordered_map<std::string_view, Method> all = {
      {"upper", convert<upper>},
      {"lower", convert<lower>},
      {"title", convert<title>},
      {"capitalize", convert<capitalize>},
      {"swapcase", convert<swapcase>},
      {"casefold", convert<casefold>},
      {"strip", strip_method<3>},
      {"lstrip", strip_method<1>},
      {"rstrip", strip_method<2>},
      {"split", split_method<false>},
      {"rsplit", split_method<true>},
      {"partition", partition<false>},
      {"rpartition", partition<true>},
      {"splitlines", split_lines_method},
      {"startswith", affix<false>},
      {"endswith", affix<true>},
      {"find", search<Search::kFind>},
      {"rfind", search<Search::kRfind>},
      {"index", search<Search::kIndex>},
      {"rindex", search<Search::kRindex>},
      {"count", search<Search::kCount>},
      {"join", join},
      {"replace", replace_method},
      {"removeprefix", remove_affix<false>},
      {"removesuffix", remove_affix<true>},
      {"ljust", justify<-1>},
      {"center", justify<0>},
      {"rjust", justify<1>},
      {"zfill", zfill},
      {"expandtabs", expand_tabs},
      {"format", format_method},
      {"format_map", format_map},
      {"isalpha", all_points<is_alpha>},
      {"isalnum", all_points<is_alnum>},
      {"isdigit", all_points<is_digit>},
      {"isdecimal", all_points<is_decimal>},
      {"isnumeric", all_points<is_numeric>},
      {"isspace", all_points<is_space>},
      {"isupper", is_case<true>},
      {"islower", is_case<false>},
      {"istitle", is_title_cased},
      {"isidentifier", is_identifier},
      {"isprintable", is_printable_text},
      {"isascii",
       [](Interpreter&, const Value& self, Args&) {
         const CodePoints points = decode(self.text());
         return Value::boolean(std::all_of(points.begin(), points.end(), ascii_point));
       }},
  };
  return all;
}

}  // namespace

Value string_method(const Value& self, std::string_view name) {
  const auto at = methods().find(name);
  if (at == methods().end()) return Value();
  return Value::function(std::string(name), [self, method = at->second](Interpreter& in, Args& args) { return method(in, self, args); });
}

}  // namespace ddtree::jinja
