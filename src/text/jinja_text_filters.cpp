// Filters over text.
#include <algorithm>
#include <cmath>

#include "text/jinja_filters.h"
#include "text/jinja_strings.h"

namespace ddtree::jinja {
namespace {

// soft_str(): the text of anything, markup kept.
Value soft(const Value& value) { return value.is_string() ? value : Value::string(str(value)); }

const std::string& need_text(const Value& value, const char* filter) {
  if (value.is_undefined()) fail_undefined(value);
  if (!value.is_string()) throw TypeError(std::string(filter) + ": expected a string, not '" + type_name(value) + "'");
  return value.text();
}

template <std::string (*Convert)(std::string_view)>
Value convert(Interpreter&, const Value& value, Args& args) {
  const Bound b("filter", args, {});
  const Value s = soft(value);
  return Value::string(Convert(s.text()), s.markup());
}

// |title differs from str.title(): a word begins after white space, '-', '(', '{', '[' or '<' only.
std::string title_words(std::string_view text) {
  std::string out;
  CodePoints word;
  const auto close = [&] {
    if (word.empty()) return;
    out += upper(encode(CodePoints(1, word[0])));
    out += lower(encode(std::u32string_view(word).substr(1)));
    word.clear();
  };
  for (const char32_t c : decode(text)) {
    if (is_space(c) || c == '-' || c == '(' || c == '{' || c == '[' || c == '<') {
      close();
      append_utf8(out, c);
    } else {
      word += c;
    }
  }
  close();
  return out;
}

Value trim(Interpreter&, const Value& value, Args& args) {
  const Bound b("trim", args, {"chars"});
  const Value s = soft(value);
  if (!b.has(0) || b[0].is(Kind::kNone)) return Value::string(std::string(strip(s.text())), s.markup());
  const std::string chars = b.text(0, "");
  return Value::string(std::string(strip(s.text(), &chars)), s.markup());
}

Value string_of(Interpreter&, const Value& value, Args& args) {
  const Bound b("string", args, {});
  return soft(value);
}

Value join(Interpreter& in, const Value& value, Args& args) {
  const Bound b("join", args, {"d", "attribute"});
  const std::string separator = b.has(0) ? str(b[0]) : "";
  const Value path = b.get(1, Value::none());
  Value items = value;
  if (!path.is(Kind::kNone)) {
    Args by;
    by.named.emplace_back("attribute", path);
    items = call_filter(in, "map", Value::list(in.iterate_counted(value)), by);
  }
  std::string out;
  bool first = true;
  for (const Value& v : in.iterate_counted(items)) {
    if (!first) out += separator;
    first = false;
    out += v.is_string() ? v.text() : str(v);
    in.check_size(out.size());
  }
  return Value::string(std::move(out));
}

Value replace_all(Interpreter& in, const Value& value, Args& args) {
  const Bound b("replace", args, {"old", "new", "count"}, 2);
  const std::string text = str(value), from = str(b[0]), to = str(b[1]);
  in.check_size((text.size() / std::max<size_t>(from.size(), 1) + 1) * to.size());
  return Value::string(replace(text, from, to, static_cast<int64_t>(b.integer(2, -1))));
}

Value indent(Interpreter& in, const Value& value, Args& args) {
  const Bound b("indent", args, {"width", "first", "blank"});
  const std::string& text = need_text(value, "indent");
  std::string by = "    ";
  if (b.has(0)) {
    if (b[0].is_string()) {
      by = b[0].text();
    } else {
      const Int n = std::max<Int>(checked_int(b[0], "indent()'s width"), 0);
      in.check_size(static_cast<size_t>(std::min<Int>(n, static_cast<Int>(1) << 40)));
      by = std::string(static_cast<size_t>(n), ' ');
    }
  }
  const bool blank = b.flag(2, false);
  const auto lines = split_lines(text + "\n");
  std::string out = b.flag(1, false) ? by : "";
  for (size_t i = 0; i < lines.size(); ++i) {
    if (i) out += "\n";
    if (i && (blank || !lines[i].empty())) out += by;
    out += lines[i];
    in.check_size(out.size());
  }
  return Value::string(std::move(out), value.markup());
}

Value center(Interpreter& in, const Value& value, Args& args) {
  const Bound b("center", args, {"width"});
  Args width;
  width.positional.push_back(b.get(0, Value::integer(80)));
  return in.call(string_method(soft(value), "center"), width);
}

Value truncate(Interpreter&, const Value& value, Args& args) {
  const Bound b("truncate", args, {"length", "killwords", "end", "leeway"});
  const Int length = b.integer(0, 255), leeway = b.integer(3, 5);
  const std::string end = b.text(2, "...");
  const Int end_length = static_cast<Int>(count_points(end));
  if (length < end_length) throw Error("expected length >= " + int_text(end_length) + ", got " + int_text(length));
  if (leeway < 0) throw Error("expected leeway >= 0, got " + int_text(leeway));
  if (jinja::length(value) <= length + leeway) return value;  // a list, too
  const CodePoints points = decode(need_text(value, "truncate"));
  std::string head = encode(std::u32string_view(points).substr(0, static_cast<size_t>(length - end_length)));
  if (!b.flag(1, false)) {
    const size_t space = head.rfind(' ');
    if (space != std::string::npos) head.resize(space);
  }
  return Value::string(head + end, value.markup());
}

// The chunks that textwrap may break between: runs of white space, words, and parts of words after a hyphen between letters.
std::vector<CodePoints> wrap_chunks(const CodePoints& line, bool on_hyphens) {
  std::vector<CodePoints> out;
  const auto space = [](char32_t c) { return c == ' ' || (c >= 9 && c <= 13); };
  for (size_t i = 0; i < line.size();) {
    size_t end = i + 1;
    if (space(line[i])) {
      while (end < line.size() && space(line[end])) ++end;
    } else {
      const auto letter = [&](size_t k) { return k < line.size() && is_word(line[k]) && !is_decimal(line[k]); };
      for (; end < line.size() && !space(line[end]); ++end)
        if (on_hyphens && line[end - 1] == '-' && end >= 3 && end - 2 > i && letter(end - 2) && letter(end - 3) && letter(end) &&
            letter(end + 1))
          break;
    }
    out.push_back(line.substr(i, end - i));
    i = end;
  }
  return out;
}

Value wordwrap(Interpreter& in, const Value& value, Args& args) {
  const Bound b("wordwrap", args, {"width", "break_long_words", "wrapstring", "break_on_hyphens"});
  const Int width = b.integer(0, 79);
  if (width <= 0) throw ValueError("invalid width " + int_text(width) + " (must be > 0)");
  const bool break_long = b.flag(1, true), on_hyphens = b.flag(3, true);
  const std::string glue = b.has(2) && !b[2].is(Kind::kNone) ? b.text(2, "\n") : "\n";
  const auto is_blank = [](const CodePoints& chunk) { return strip(encode(chunk)).empty(); };
  std::string out;
  const auto paragraphs = split_lines(need_text(value, "wordwrap"));
  for (size_t p = 0; p < paragraphs.size(); ++p) {
    if (p) out += glue;
    std::vector<CodePoints> chunks = wrap_chunks(decode(paragraphs[p]), on_hyphens);
    std::reverse(chunks.begin(), chunks.end());
    bool first = true;
    while (!chunks.empty()) {
      in.step();
      std::vector<CodePoints> line;
      Int used = 0;
      if (!first && is_blank(chunks.back())) chunks.pop_back();
      while (!chunks.empty() && used + static_cast<Int>(chunks.back().size()) <= width) {
        used += static_cast<Int>(chunks.back().size());
        line.push_back(std::move(chunks.back()));
        chunks.pop_back();
      }
      if (!chunks.empty() && static_cast<Int>(chunks.back().size()) > width) {
        if (break_long) {
          auto room = static_cast<size_t>(width - used);  // may be none: an empty part, and the white space before it stays, as in textwrap
          if (on_hyphens && room > 0 && chunks.back().size() > room) {
            const size_t hyphen = chunks.back().rfind(U'-', room - 1);
            if (hyphen != CodePoints::npos && hyphen > 0 && chunks.back().find_first_not_of(U'-') < hyphen) room = hyphen + 1;
          }
          line.push_back(chunks.back().substr(0, room));
          chunks.back().erase(0, room);
          if (chunks.back().empty()) chunks.pop_back();
        } else if (line.empty()) {
          line.push_back(std::move(chunks.back()));
          chunks.pop_back();
        }
      }
      if (!line.empty() && is_blank(line.back())) line.pop_back();
      if (line.empty()) continue;
      if (!first) out += glue;
      first = false;
      for (const CodePoints& chunk : line) out += encode(chunk);
      in.check_size(out.size());
    }
  }
  return Value::string(std::move(out), value.markup());
}

Value wordcount(Interpreter&, const Value& value, Args& args) {
  const Bound b("wordcount", args, {});
  Int n = 0;
  bool inside = false;
  for (const char32_t c : decode(str(value))) {
    const bool word = is_word(c);
    n += word && !inside;
    inside = word;
  }
  return Value::integer(n);
}

Value format(Interpreter& in, const Value& value, Args& args) {
  if (!args.positional.empty() && !args.named.empty()) throw Error("can't handle positional and keyword arguments at the same time");
  if (args.named.empty()) return format_percent(in, soft(value), Value::tuple(args.positional));
  auto named = std::make_shared<DictData>();
  for (const auto& [key, v] : args.named) named->set(key, v);
  return format_percent(in, soft(value), Value::dict(named));
}

Value filesizeformat(Interpreter& in, const Value& value, Args& args) {
  const Bound b("filesizeformat", args, {"binary"});
  Args or_none;
  or_none.positional.push_back(Value::none());
  const Value size = call_filter(in, "float", value, or_none);
  if (size.is(Kind::kNone)) throw TypeError("filesizeformat: a number is required, not " + repr(value));
  const double bytes = size.as_real();
  const double base = b.flag(0, false) ? 1024 : 1000;
  if (bytes == 1) return Value::string("1 Byte");
  if (bytes < base) return Value::string(int_text(static_cast<Int>(bytes)) + " Bytes");
  double unit = base;
  for (const char* prefix : {"k", "M", "G", "T", "P", "E", "Z", "Y"}) {
    unit *= base;
    if (bytes < unit || *prefix == 'Y') {
      char buffer[400];
      std::snprintf(buffer, sizeof buffer, "%.1f ", base * bytes / unit);
      return Value::string(std::string(buffer) +
                           (base == 1024 ? std::string(*prefix == 'k' ? "K" : prefix) + "iB" : std::string(prefix) + "B"));
    }
  }
  return Value::none();
}

std::string pretty(const Value& value, size_t indent_by, size_t allowance, int depth) {
  if (depth > 100) throw Error(Failure::Kind::kLimit, "pprint: nested too deeply");
  Value shown = value;
  if (value.is(Kind::kDict)) {
    auto entries = value.dict().entries();
    std::stable_sort(entries.begin(), entries.end(), [](const auto& a, const auto& b) {
      try {
        return compare(a.first, b.first) == -1;
      } catch (const TypeError&) {
        return std::string_view(type_name(a.first)) < type_name(b.first);
      }
    });
    auto sorted = std::make_shared<DictData>();
    for (auto& [k, v] : entries) sorted->set(k, v);
    shown = Value::dict(sorted);
  }
  // Inner dicts are sorted too.
  const auto flat = [&](const auto& self, const Value& v) -> std::string {
    if (v.is(Kind::kDict)) {
      std::string out = "{";
      bool first = true;
      auto entries = v.dict().entries();
      std::stable_sort(entries.begin(), entries.end(), [](const auto& a, const auto& b) {
        return a.first.is_string() && b.first.is_string() && a.first.text() < b.first.text();
      });
      for (const auto& [k, item] : entries) {
        out += (first ? "" : ", ") + repr(k) + ": " + self(self, item);
        first = false;
      }
      return out + "}";
    }
    if (v.is(Kind::kList) || v.is(Kind::kTuple)) {
      std::string out = v.is(Kind::kList) ? "[" : "(";
      for (size_t i = 0; i < v.items().size(); ++i) out += (i ? ", " : "") + self(self, v.items()[i]);
      return out + (v.is(Kind::kList) ? "]" : v.items().size() == 1 ? ",)" : ")");
    }
    return repr(v);
  };
  const std::string one_line = flat(flat, shown);
  if (count_points(one_line) + indent_by + allowance <= 80) return one_line;
  const std::string pad = ",\n" + std::string(indent_by + 1, ' ');
  std::string out;
  if (shown.is(Kind::kDict)) {
    const auto& entries = shown.dict().entries();
    for (size_t i = 0; i < entries.size(); ++i) {
      const std::string key = repr(entries[i].first) + ": ";
      out += (i ? pad : "{") + key +
             pretty(entries[i].second, indent_by + 1 + count_points(key), i + 1 < entries.size() ? 1 : allowance + 1, depth + 1);
    }
    return out + "}";
  }
  if (shown.is(Kind::kList) || shown.is(Kind::kTuple)) {
    const List& items = shown.items();
    const bool list = shown.is(Kind::kList);
    for (size_t i = 0; i < items.size(); ++i)
      out += (i ? pad : list ? "[" : "(") + pretty(items[i], indent_by + 1, i + 1 < items.size() ? 1 : allowance + 1, depth + 1);
    return out + (list ? "]" : items.size() == 1 ? ",)" : ")");
  }
  return one_line;
}

Value pprint(Interpreter&, const Value& value, Args& args) {
  const Bound b("pprint", args, {});
  return Value::string(pretty(value, 0, 0, 0));
}

Value escape(Interpreter&, const Value& value, Args& args) {
  const Bound b("escape", args, {});
  return value.markup() ? value : Value::string(escape_html(str(value)), true);
}
Value force_escape(Interpreter&, const Value& value, Args& args) {
  const Bound b("forceescape", args, {});
  return Value::string(escape_html(str(value)), true);
}
Value safe(Interpreter&, const Value& value, Args& args) {
  const Bound b("safe", args, {});
  return Value::string(str(value), true);
}

std::string percent_encode(const Value& value, bool query) {
  std::string out;
  char buffer[8];
  for (const char c : str(value)) {
    if (std::isalnum(static_cast<unsigned char>(c)) || c == '_' || c == '.' || c == '-' || c == '~' || (c == '/' && !query)) {
      out += c;
    } else if (c == ' ' && query) {
      out += '+';
    } else {
      std::snprintf(buffer, sizeof buffer, "%%%02X", static_cast<unsigned>(static_cast<unsigned char>(c)));
      out += buffer;
    }
  }
  return out;
}

Value urlencode(Interpreter& in, const Value& value, Args& args) {
  const Bound b("urlencode", args, {});
  if (value.is_string() || value.is_number() || value.is(Kind::kNone)) return Value::string(percent_encode(value, false));
  std::string out;
  const auto add = [&](const Value& k, const Value& v) {
    out += (out.empty() ? "" : "&") + percent_encode(k, true) + "=" + percent_encode(v, true);
  };
  if (value.is(Kind::kDict)) {
    for (const auto& [k, v] : value.dict().entries()) add(k, v);
  } else {
    for (const Value& pair : in.iterate_counted(value)) {
      const List two = iterate(pair);
      if (two.size() != 2) throw ValueError("urlencode: pairs are needed");
      add(two[0], two[1]);
    }
  }
  return Value::string(std::move(out));
}

Value xmlattr(Interpreter&, const Value& value, Args& args) {
  const Bound b("xmlattr", args, {"autospace"});
  if (value.is_undefined()) fail_undefined(value);
  if (!value.is(Kind::kDict)) throw TypeError(std::string("'") + type_name(value) + "' object has no attribute 'items'");
  std::string out;
  for (const auto& [key, v] : value.dict().entries()) {
    if (v.is(Kind::kNone) || v.is_undefined()) continue;
    if (!key.is_string()) throw TypeError("xmlattr: attribute names are strings");
    if (key.text().find_first_of(" \t\n\r\f\v/>=") != std::string::npos)
      throw ValueError("Invalid character in attribute name: " + repr(key));
    out += (out.empty() ? "" : " ") + escape_html(key.text()) + "=\"" + (v.markup() ? v.text() : escape_html(str(v))) + "\"";
  }
  if (b.flag(0, true) && !out.empty()) out.insert(0, " ");
  return Value::string(std::move(out));
}

// Comments and tags out, white space to single spaces, the five entities back.
Value striptags(Interpreter&, const Value& value, Args& args) {
  const Bound b("striptags", args, {});
  std::string text = str(value);
  const auto drop = [&](std::string_view open, std::string_view close) {
    size_t at = 0;
    while ((at = text.find(open, at)) != std::string::npos) {
      const size_t end = text.find(close, at);
      if (end == std::string::npos) break;
      text.erase(at, end + close.size() - at);
    }
  };
  drop("<!--", "-->");
  drop("<", ">");
  std::string out;
  for (const std::string& word : split(text, nullptr, -1)) out += (out.empty() ? "" : " ") + word;
  for (const auto& [from, to] : {std::pair{"&lt;", "<"}, {"&gt;", ">"}, {"&#34;", "\""}, {"&quot;", "\""}, {"&#39;", "'"}, {"&amp;", "&"}})
    out = replace(out, from, to, -1);
  return Value::string(std::move(out));
}

}  // namespace

const FilterTable& text_filters() {
  static const FilterTable all = {
      {"upper", convert<upper>},
      {"lower", convert<lower>},
      {"title", convert<title_words>},
      {"capitalize", convert<capitalize>},
      {"trim", trim},
      {"string", string_of},
      {"join", join},
      {"replace", replace_all},
      {"indent", indent},
      {"center", center},
      {"truncate", truncate},
      {"wordwrap", wordwrap},
      {"wordcount", wordcount},
      {"format", format},
      {"filesizeformat", filesizeformat},
      {"pprint", pprint},
      {"escape", escape},
      {"e", escape},
      {"forceescape", force_escape},
      {"safe", safe},
      {"urlencode", urlencode},
      {"xmlattr", xmlattr},
      {"striptags", striptags},
  };
  return all;
}

}  // namespace ddtree::jinja
