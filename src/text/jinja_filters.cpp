// Filters over sequences, mappings and numbers.
#include "text/jinja_filters.h"

#include <algorithm>
#include <cmath>
#include <functional>

#include "text/jinja_strings.h"

namespace ddtree::jinja {
namespace {

// `attribute` of sort, map, groupby ...: "a.b.0" follows attributes and indices, an integer is an index, absent means the item itself.
class Getter {
 public:
  Getter(Interpreter& in, const Value& path, bool fold_case = false, Value otherwise = Value::none())
      : in_(&in), fold_case_(fold_case), otherwise_(std::move(otherwise)) {
    if (path.is_undefined() || path.is(Kind::kNone)) return;
    if (path.is_integral()) {
      keys_.push_back(path);
      return;
    }
    if (!path.is_string()) throw TypeError(std::string("an attribute's name must be a string or integer, not '") + type_name(path) + "'");
    const std::string dot = ".";
    for (const std::string& part : split(path.text(), &dot, -1)) {
      const bool number = !part.empty() && std::all_of(part.begin(), part.end(), [](char c) { return c >= '0' && c <= '9'; });
      keys_.push_back(number ? Value::integer(static_cast<Int>(std::strtoull(part.c_str(), nullptr, 10))) : Value::string(part));
    }
  }
  Value operator()(const Value& from) const {
    Value v = from;
    for (const Value& key : keys_) {
      v = item(*in_, v, key);
      if (v.is_undefined() && !otherwise_.is(Kind::kNone)) v = otherwise_;
    }
    if (fold_case_ && v.is_string()) v = Value::string(lower(v.text()));
    return v;
  }

 private:
  Interpreter* in_;
  std::vector<Value> keys_;
  bool fold_case_;
  Value otherwise_;
};

// A pull function over anything that can be iterated; iterators stay lazy.
std::function<bool(Value&)> source_of(Interpreter& in, const Value& value) {
  if (value.is(Kind::kIterator)) return [value](Value& out) { return value.data<IteratorData>().next(out); };
  return [list = in.iterate_counted(value), at = size_t{0}](Value& out) mutable {
    if (at == list.size()) return false;
    out = list[at++];
    return true;
  };
}

std::optional<Value> take_named(Args& args, std::string_view name) {
  for (auto at = args.named.begin(); at != args.named.end(); ++at)
    if (at->first == name) {
      Value v = at->second;
      args.named.erase(at);
      return v;
    }
  return std::nullopt;
}

Value map(Interpreter& in, const Value& value, Args& args) {
  if (!truth(value)) return Value::iterator(List{});
  std::function<Value(const Value&)> convert;
  if (args.positional.empty() && std::any_of(args.named.begin(), args.named.end(), [](const auto& n) { return n.first == "attribute"; })) {
    const Value path = *take_named(args, "attribute");
    const Value otherwise = take_named(args, "default").value_or(Value::none());
    if (!args.named.empty()) throw Error("Unexpected keyword argument '" + args.named[0].first + "'");
    convert = Getter(in, path, false, otherwise);
  } else {
    if (args.positional.empty()) throw Error("map requires a filter argument");
    const Value name = args.positional[0];
    Args rest = args;
    rest.positional.erase(rest.positional.begin());
    convert = [&in, name, rest](const Value& v) {
      Args copy = rest;
      return call_filter(in, str(name), v, copy);
    };
  }
  return Value::iterator([&in, next = source_of(in, value), convert](Value& out) {
    Value v;
    if (!next(v)) return false;
    in.step();
    out = convert(v);
    return true;
  });
}

template <bool Keep, bool ByAttribute>
Value select(Interpreter& in, const Value& value, Args& args) {
  if (!truth(value)) return Value::iterator(List{});
  Args rest = args;
  Getter get(in, Value::none());
  if (ByAttribute) {
    if (rest.positional.empty()) throw Error("Missing parameter for attribute name");
    get = Getter(in, rest.positional[0]);
    rest.positional.erase(rest.positional.begin());
  }
  std::function<bool(const Value&)> test = truth;
  if (!rest.positional.empty()) {
    const Value name = rest.positional[0];
    rest.positional.erase(rest.positional.begin());
    test = [&in, name, rest](const Value& v) {
      Args copy = rest;
      return call_test(in, str(name), v, copy);
    };
  }
  return Value::iterator([&in, next = source_of(in, value), get, test](Value& out) {
    Value v;
    while (next(v)) {
      in.step();
      if (test(get(v)) == Keep) {
        out = v;
        return true;
      }
    }
    return false;
  });
}

Value first(Interpreter& in, const Value& value, Args& args) {
  const Bound b("first", args, {});
  Value out;
  return source_of(in, value)(out) ? out : Value::undefined("No first item, sequence was empty.");
}

Value last(Interpreter& in, const Value& value, Args& args) {
  const Bound b("last", args, {});
  if (value.is(Kind::kIterator) || value.is(Kind::kLoop))
    throw TypeError(std::string("'") + type_name(value) + "' object is not reversible");
  const List items = in.iterate_counted(value);
  return items.empty() ? Value::undefined("No last item, sequence was empty.") : items.back();
}

Value length_of(Interpreter&, const Value& value, Args& args) {
  const Bound b("length", args, {});
  if (value.is(Kind::kLoop)) return Value::integer(value.data<LoopData>().length());
  return Value::integer(length(value));
}

Value list(Interpreter& in, const Value& value, Args& args) {
  const Bound b("list", args, {});
  return Value::list(in.iterate_counted(value));
}

Value items_of(Interpreter& in, const Value& value, Args& args) {
  const Bound b("items", args, {});
  if (value.is_undefined()) return Value::iterator(List{});
  if (!value.is(Kind::kDict)) throw TypeError("Can only get item pairs from a mapping.");
  List out;
  for (const auto& [key, v] : value.dict().entries()) out.push_back(Value::tuple({key, v}));
  in.step(out.size());
  return Value::iterator(std::move(out));
}

Value reverse(Interpreter& in, const Value& value, Args& args) {
  const Bound b("reverse", args, {});
  if (value.is_string()) {
    CodePoints points = decode(value.text());
    std::reverse(points.begin(), points.end());
    return Value::string(encode(points), value.markup());
  }
  List items = in.iterate_counted(value);
  std::reverse(items.begin(), items.end());
  return value.is(Kind::kIterator) ? Value::list(std::move(items)) : Value::iterator(std::move(items));
}

// Sorts by keys, which may be several; stable in both directions, as sorted() is.
// `as_lists`: keys are compared as lists are, where equal items (undefined ones, too) need no order.
List sorted_by(List items, const std::vector<Getter>& getters, bool as_lists, bool descending, Interpreter& in) {
  std::vector<std::pair<List, Value>> keyed;
  for (Value& v : items) {
    List keys;
    for (const Getter& get : getters) keys.push_back(get(v));
    keyed.emplace_back(std::move(keys), std::move(v));
  }
  const auto less = [&](const List& a, const List& b) {
    in.step();
    for (size_t i = 0; i < a.size(); ++i) {
      if (as_lists && equal(a[i], b[i])) continue;
      return compare(a[i], b[i]) == -1;
    }
    return false;
  };
  std::stable_sort(keyed.begin(), keyed.end(),
                   [&](const auto& a, const auto& b) { return descending ? less(b.first, a.first) : less(a.first, b.first); });
  items.clear();
  for (auto& entry : keyed) items.push_back(std::move(entry.second));
  return items;
}

Value sort(Interpreter& in, const Value& value, Args& args) {
  const Bound b("sort", args, {"reverse", "case_sensitive", "attribute"});
  const bool fold = !b.flag(1, false);
  std::vector<Getter> getters;
  const Value path = b.get(2, Value::none());
  if (path.is_string()) {
    const std::string comma = ",";
    for (const std::string& part : split(path.text(), &comma, -1)) getters.emplace_back(in, Value::string(part), fold);
  } else {
    getters.emplace_back(in, path, fold);
  }
  return Value::list(sorted_by(in.iterate_counted(value), getters, true, b.flag(0, false), in));
}

Value dictsort(Interpreter& in, const Value& value, Args& args) {
  const Bound b("dictsort", args, {"case_sensitive", "by", "reverse"});
  const std::string by = b.text(1, "key");
  if (by != "key" && by != "value") throw Error("You can only sort by either \"key\" or \"value\"");
  if (value.is_undefined()) fail_undefined(value);
  if (!value.is(Kind::kDict)) throw Error(std::string("'") + type_name(value) + "' object has no attribute 'items'");
  List pairs;
  for (const auto& [key, v] : value.dict().entries()) pairs.push_back(Value::tuple({key, v}));
  return Value::list(
      sorted_by(std::move(pairs), {Getter(in, Value::integer(by == "key" ? 0 : 1), !b.flag(0, false))}, false, b.flag(2, false), in));
}

Value unique(Interpreter& in, const Value& value, Args& args) {
  const Bound b("unique", args, {"case_sensitive", "attribute"});
  const Getter get(in, b.get(1, Value::none()), !b.flag(0, false));
  DictData seen;
  List out;
  for (const Value& v : in.iterate_counted(value)) {
    const Value key = get(v);
    if (seen.find(key)) continue;
    seen.set(key, Value::none());
    out.push_back(v);
  }
  return Value::iterator(std::move(out));
}

template <bool Max>
Value extreme(Interpreter& in, const Value& value, Args& args) {
  const Bound b(Max ? "max" : "min", args, {"case_sensitive", "attribute"});
  const Getter get(in, b.get(1, Value::none()), !b.flag(0, false));
  const List items = in.iterate_counted(value);
  if (items.empty()) return Value::undefined("No aggregated item, sequence was empty.");
  size_t best = 0;
  Value best_key = get(items[0]);
  for (size_t i = 1; i < items.size(); ++i) {
    const Value key = get(items[i]);
    if (compare(key, best_key, Max ? ">" : "<") == (Max ? 1 : -1)) {
      best = i;
      best_key = key;
    }
  }
  return items[best];
}

Value sum(Interpreter& in, const Value& value, Args& args) {
  const Bound b("sum", args, {"attribute", "start"});
  const Getter get(in, b.get(0, Value::none()));
  Value total = b.get(1, Value::integer(0));
  if (total.is_string()) throw TypeError("sum() can't sum strings [use ''.join(seq) instead]");
  for (const Value& v : in.iterate_counted(value)) total = binary(in, Expr::Type::kAdd, total, get(v));
  return total;
}

Value groupby(Interpreter& in, const Value& value, Args& args) {
  const Bound b("groupby", args, {"attribute", "default", "case_sensitive"}, 1);
  const Value otherwise = b.get(1, Value::none());
  const bool fold = !b.flag(2, false);
  const Getter key(in, b[0], fold, otherwise), shown(in, b[0], false, otherwise);
  List out;
  List group;
  Value now;
  const auto close = [&] {
    if (group.empty()) return;
    Value name = shown(group[0]);
    Value pair = Value::tuple({std::move(name), Value::list(std::move(group))});
    pair.data<ListData>().grouped = true;
    out.push_back(std::move(pair));
    group = {};
  };
  for (const Value& v : sorted_by(in.iterate_counted(value), {key}, false, false, in)) {
    const Value k = key(v);
    if (!group.empty() && !equal(k, now)) close();
    now = k;
    group.push_back(v);
  }
  close();
  return Value::list(std::move(out));
}

Value batch(Interpreter& in, const Value& value, Args& args) {
  const Bound b("batch", args, {"linecount", "fill_with"}, 1);
  const Int size = checked_int(b[0], "batch()'s linecount");
  const Value fill = b.get(1, Value::none());
  List out, row;
  for (const Value& v : in.iterate_counted(value)) {
    if (static_cast<Int>(row.size()) == size) {
      out.push_back(Value::list(std::move(row)));
      row = {};
    }
    row.push_back(v);
  }
  if (!row.empty()) {
    in.check_size(static_cast<size_t>(std::max<Int>(size, 0)) * sizeof(Value));
    while (!fill.is(Kind::kNone) && static_cast<Int>(row.size()) < size) row.push_back(fill);
    out.push_back(Value::list(std::move(row)));
  }
  return Value::iterator(std::move(out));
}

Value slices(Interpreter& in, const Value& value, Args& args) {
  const Bound b("slice", args, {"slices", "fill_with"}, 1);
  const Int count = checked_int(b[0], "slice()'s slices");
  const Value fill = b.get(1, Value::none());
  const List items = in.iterate_counted(value);
  if (count == 0) throw Error("integer division or modulo by zero");
  in.check_size(static_cast<size_t>(std::max<Int>(count, 0)) * sizeof(Value));
  const Int size = static_cast<Int>(items.size());
  List out;
  Int from = 0;
  for (Int i = 0; i < count; ++i) {
    in.step();
    const Int n = size / count + (i < size % count ? 1 : 0);
    List part(items.begin() + static_cast<ptrdiff_t>(from), items.begin() + static_cast<ptrdiff_t>(from + n));
    from += n;
    if (!fill.is(Kind::kNone) && i >= size % count) part.push_back(fill);
    out.push_back(Value::list(std::move(part)));
  }
  return Value::iterator(std::move(out));
}

Value default_value(Interpreter&, const Value& value, Args& args) {
  const Bound b("default", args, {"default_value", "boolean"});
  return value.is_undefined() || (b.flag(1, false) && !truth(value)) ? b.get(0, Value::string("")) : value;
}

Value attr(Interpreter& in, const Value& value, Args& args) {
  const Bound b("attr", args, {"name"}, 1);
  const std::string name = b.text(0, "");
  if (value.is(Kind::kDict)) {  // attributes only, never keys
    auto keyless = Value::dict(std::make_shared<DictData>());
    const Value own = attribute(in, keyless, name);
    if (own.is_undefined()) return own;
  }
  return attribute(in, value, name);
}

Value abs_of(Interpreter&, const Value& value, Args& args) {
  const Bound b("abs", args, {});
  if (value.is_undefined()) fail_undefined(value);
  if (value.is_integral()) return Value::integer(value.as_int() < 0 ? -value.as_int() : value.as_int());
  if (value.is(Kind::kFloat)) return Value::real(std::fabs(value.as_real()));
  throw TypeError(std::string("bad operand type for abs(): '") + type_name(value) + "'");
}

Value round_to(Interpreter& in, const Value& value, Args& args) {
  const Bound b("round", args, {"precision", "method"});
  const std::string method = b.text(1, "common");
  if (method != "common" && method != "ceil" && method != "floor") throw Error("method must be common, ceil or floor");
  const Int precision = b.integer(0, 0);
  if (value.is_undefined()) fail_undefined(value);
  if (!value.is_number()) throw TypeError(std::string("type ") + type_name(value) + " doesn't define __round__ method");
  if (precision > 400 || precision < -400) return value;
  if (method != "common") {
    const Value scale = binary(in, Expr::Type::kPower, Value::integer(10), Value::integer(precision));
    const double scaled = binary(in, Expr::Type::kMultiply, value, scale).as_real();
    if (!std::isfinite(scaled)) throw Error("cannot convert float infinity or NaN to integer");
    return Value::real((method == "ceil" ? std::ceil(scaled) : std::floor(scaled)) / scale.as_real());
  }
  if (value.is_integral()) {
    if (precision >= 0) return Value::integer(value.as_int());
    if (precision < -30) return Value::integer(0);
    Int unit = 1;
    for (Int i = 0; i < -precision; ++i) unit *= 10;
    Int rest = value.as_int() % unit;
    if (rest < 0) rest += unit;
    const Int low = value.as_int() - rest;
    const bool up = rest * 2 > unit || (rest * 2 == unit && (low / unit) % 2 != 0);
    return Value::integer(up ? low + unit : low);
  }
  const double d = value.as_real();
  if (!std::isfinite(d)) return value;
  if (precision >= 0) {  // the decimal expansion is exact, so this rounds the true value, half to even
    char buffer[800];
    std::snprintf(buffer, sizeof buffer, "%.*f", static_cast<int>(precision), d);
    return Value::real(std::strtod(buffer, nullptr));
  }
  const double unit = std::pow(10.0, static_cast<double>(-precision));
  return Value::real(std::nearbyint(d / unit) * unit);
}

// int() of a text; false if it is none.
bool parse_int(std::string_view text, Int base, Int& out) {
  const CodePoints points = decode(strip(text));
  size_t i = 0;
  bool negative = false;
  if (i < points.size() && (points[i] == '+' || points[i] == '-')) negative = points[i++] == '-';
  if (i + 1 < points.size() && points[i] == '0') {
    const char32_t c = points[i + 1] | 0x20;
    const Int prefix = c == 'x' ? 16 : c == 'o' ? 8 : c == 'b' ? 2 : 0;
    if (prefix && (base == 0 || base == prefix)) {
      base = prefix;
      i += 2;
      if (i < points.size() && points[i] == '_') ++i;
    }
  }
  if (base == 0) base = 10;
  bool digit_before = false;
  Int value = 0;
  if (i == points.size()) return false;
  for (; i < points.size(); ++i) {
    if (points[i] == '_') {
      if (!digit_before) return false;
      digit_before = false;
      continue;
    }
    int d = decimal_value(points[i]);
    if (d < 0 && points[i] < 0x80 && std::isalpha(static_cast<int>(points[i]))) d = static_cast<int>((points[i] | 0x20) - 'a') + 10;
    if (d < 0 || d >= base) return false;
    if (value > (static_cast<Int>(1) << 120)) throw Error("an integer grew beyond 127 bits, which this engine's integers have");
    value = value * base + d;
    digit_before = true;
  }
  if (!digit_before) return false;
  out = negative ? -value : value;
  return true;
}

bool parse_float(std::string_view text, double& out) {
  std::string plain;
  const CodePoints points = decode(strip(text));
  for (size_t i = 0; i < points.size(); ++i) {
    if (points[i] == '_') {
      if (i == 0 || i + 1 == points.size() || decimal_value(points[i - 1]) < 0 || decimal_value(points[i + 1]) < 0) return false;
      continue;
    }
    const int d = decimal_value(points[i]);
    if (d >= 0) plain += static_cast<char>('0' + d);
    else append_utf8(plain, points[i]);
  }
  if (plain.empty() || plain.find_first_of("xX(") != std::string::npos) return false;
  char* end;
  out = std::strtod(plain.c_str(), &end);
  return *end == '\0' && end != plain.c_str();
}

Value int_of(Interpreter&, const Value& value, Args& args) {
  const Bound b("int", args, {"default", "base"});
  if (value.is_undefined()) fail_undefined(value);
  const Value otherwise = b.get(0, Value::integer(0));
  const auto from_real = [&](double d) {
    if (!std::isfinite(d) || std::fabs(d) >= 0x1p126) return otherwise;
    return Value::integer(static_cast<Int>(d));
  };
  if (value.is_integral()) return Value::integer(value.as_int());
  if (value.is(Kind::kFloat)) return from_real(value.as_real());
  if (value.is_string()) {
    Int i;
    if (parse_int(value.text(), b.integer(1, 10), i)) return Value::integer(i);
    double d;
    if (parse_float(value.text(), d)) return from_real(d);
  }
  return otherwise;
}

Value float_of(Interpreter&, const Value& value, Args& args) {
  const Bound b("float", args, {"default"});
  if (value.is_undefined()) fail_undefined(value);
  if (value.is_number()) return Value::real(value.as_real());
  double d;
  if (value.is_string() && parse_float(value.text(), d)) return Value::real(d);
  return b.get(0, Value::real(0));
}

Value tojson(Interpreter& in, const Value& value, Args& args) {
  const Bound b("tojson", args, {"ensure_ascii", "indent", "separators", "sort_keys"});
  JsonStyle style;
  style.ascii = b.flag(0, false);
  style.sort_keys = b.flag(3, false);
  const Value indent = b.get(1, Value::none());
  if (!indent.is(Kind::kNone)) {
    style.pretty = true;
    style.item_separator = ",";
    if (indent.is_string()) style.indent_text = indent.text();
    else style.indent_text = std::string(static_cast<size_t>(std::clamp<Int>(checked_int(indent, "tojson()'s indent"), 0, 1000)), ' ');
  }
  const Value separators = b.get(2, Value::none());
  if (!separators.is(Kind::kNone)) {
    const List two = iterate(separators);
    if (two.size() != 2 || !two[0].is_string() || !two[1].is_string()) throw TypeError("tojson(): separators must be two strings");
    style.item_separator = two[0].text();
    style.key_separator = two[1].text();
  }
  return Value::string(to_json_text(value, style, in.limits().output_bytes));
}

}  // namespace

const FilterTable& sequence_filters() {
  static const FilterTable all = {
      {"map", map},
      {"select", select<true, false>},
      {"reject", select<false, false>},
      {"selectattr", select<true, true>},
      {"rejectattr", select<false, true>},
      {"first", first},
      {"last", last},
      {"length", length_of},
      {"count", length_of},
      {"list", list},
      {"items", items_of},
      {"reverse", reverse},
      {"sort", sort},
      {"dictsort", dictsort},
      {"unique", unique},
      {"min", extreme<false>},
      {"max", extreme<true>},
      {"sum", sum},
      {"groupby", groupby},
      {"batch", batch},
      {"slice", slices},
      {"default", default_value},
      {"d", default_value},
      {"attr", attr},
      {"abs", abs_of},
      {"round", round_to},
      {"int", int_of},
      {"float", float_of},
      {"tojson", tojson},
  };
  return all;
}

bool is_filter(std::string_view name) { return sequence_filters().count(name) || text_filters().count(name); }

std::string missing_filter_message(std::string_view name) {
  if (name == "random") return "the filter 'random' is not provided: a prompt must not depend on chance";
  if (name == "urlize") return "the filter 'urlize' makes HTML and is not provided for prompts";
  return "No filter named '" + std::string(name) + "'.";
}

Value call_filter(Interpreter& in, std::string_view name, const Value& value, Args& args) {
  in.step();
  auto at = sequence_filters().find(name);
  if (at == sequence_filters().end()) {
    at = text_filters().find(name);
    if (at == text_filters().end()) throw Error(missing_filter_message(name));
  }
  return at->second(in, value, args);
}

}  // namespace ddtree::jinja
