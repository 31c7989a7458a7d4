#include "text/jinja_value.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <nlohmann/json.hpp>

#include "text/jinja_render.h"
#include "text/jinja_strings.h"

namespace ddtree::jinja {

Value Value::undefined(std::string message) {
  Value v(Kind::kUndefined);
  v.data_ = std::make_shared<UndefinedData>(UndefinedData{std::move(message)});
  return v;
}
Value Value::boolean(bool b) {
  Value v(Kind::kBool);
  v.integer_ = b ? 1 : 0;
  return v;
}
Value Value::integer(Int i) {
  Value v(Kind::kInt);
  v.integer_ = i;
  return v;
}
Value Value::real(double d) {
  Value v(Kind::kFloat);
  v.real_ = d;
  return v;
}
Value Value::object(Kind kind, std::shared_ptr<void> data) {
  Value v(kind);
  v.data_ = std::move(data);
  return v;
}
Value Value::string(std::string text, bool markup) {
  return object(Kind::kString, std::make_shared<StringData>(StringData{std::move(text), markup}));
}
Value Value::list(List items) { return object(Kind::kList, std::make_shared<ListData>(ListData{std::move(items)})); }
Value Value::tuple(List items) { return object(Kind::kTuple, std::make_shared<ListData>(ListData{std::move(items)})); }
Value Value::dict(std::shared_ptr<DictData> data) { return object(Kind::kDict, std::move(data)); }
Value Value::range(RangeData data) { return object(Kind::kRange, std::make_shared<RangeData>(data)); }
Value Value::view(const char* type, List items) {
  return object(Kind::kView, std::make_shared<ViewData>(ViewData{type, std::move(items)}));
}
Value Value::iterator(std::function<bool(Value&)> next) {
  return object(Kind::kIterator, std::make_shared<IteratorData>(IteratorData{std::move(next)}));
}
Value Value::iterator(List items) {
  return iterator([list = std::move(items), at = size_t{0}](Value& out) mutable {
    if (at == list.size()) return false;
    out = list[at++];
    return true;
  });
}
Value Value::function(std::string name, std::function<Value(Interpreter&, Args&)> call) {
  return object(Kind::kFunction, std::make_shared<FunctionData>(FunctionData{std::move(name), std::move(call)}));
}

Value Value::from_json(const nlohmann::ordered_json& json, int depth) {
  using T = nlohmann::ordered_json::value_t;
  if (depth > 400) throw Error(Failure::Kind::kLimit, "the variables are nested more than 400 levels deep");
  switch (json.type()) {
    case T::boolean: return boolean(json.get<bool>());
    case T::number_integer: return integer(json.get<int64_t>());
    case T::number_unsigned: return integer(json.get<uint64_t>());
    case T::number_float: return real(json.get<double>());
    case T::string: return string(json.get_ref<const std::string&>());
    case T::array: {
      List items;
      items.reserve(json.size());
      for (const auto& item : json) items.push_back(from_json(item, depth + 1));
      return list(std::move(items));
    }
    case T::object: {
      auto data = std::make_shared<DictData>();
      for (const auto& [key, item] : json.items()) data->set(key, from_json(item, depth + 1));
      return dict(std::move(data));
    }
    default: return none();
  }
}

const std::string& Value::undefined_message() const {
  static const std::string plain = "value is undefined";
  return data_ ? data<UndefinedData>().message : plain;
}

int64_t DictData::position(size_t h, const Value* key, std::string_view text) const {
  const auto same = [&](const Value& k) { return key ? equal(k, *key) : k.is_string() && k.text() == text; };
  const auto [from, to] = index_.equal_range(h);
  for (auto it = from; it != to; ++it)
    if (same(entries_[it->second].first)) return static_cast<int64_t>(it->second);
  return -1;
}

const Value* DictData::find(const Value& key) const {
  const int64_t at = position(hash(key), &key, {});
  return at < 0 ? nullptr : &entries_[static_cast<size_t>(at)].second;
}
const Value* DictData::find(std::string_view key) const {
  const int64_t at = position(std::hash<std::string_view>()(key), nullptr, key);
  return at < 0 ? nullptr : &entries_[static_cast<size_t>(at)].second;
}
void DictData::set(const Value& key, Value value) {
  const size_t h = hash(key);
  const int64_t at = position(h, &key, {});
  if (at >= 0) {
    entries_[static_cast<size_t>(at)].second = std::move(value);
  } else {
    index_.emplace(h, entries_.size());
    entries_.emplace_back(key, std::move(value));
  }
}

const char* type_name(const Value& value) {
  switch (value.kind()) {
    case Kind::kUndefined: return "Undefined";
    case Kind::kNone: return "NoneType";
    case Kind::kBool: return "bool";
    case Kind::kInt: return "int";
    case Kind::kFloat: return "float";
    case Kind::kString: return value.markup() ? "Markup" : "str";
    case Kind::kList: return "list";
    case Kind::kTuple: return "tuple";
    case Kind::kDict: return "dict";
    case Kind::kRange: return "range";
    case Kind::kView: return value.data<ViewData>().type;
    case Kind::kIterator: return "generator";
    case Kind::kFunction: return "function";
    case Kind::kMacro: return "Macro";
    case Kind::kNamespace: return "Namespace";
    case Kind::kLoop: return "LoopContext";
    case Kind::kCycler: return "Cycler";
    case Kind::kJoiner: return "Joiner";
  }
  return "object";
}

void fail_undefined(const Value& value) { throw Error(value.undefined_message()); }

bool truth(const Value& value) {
  switch (value.kind()) {
    case Kind::kUndefined:
    case Kind::kNone: return false;
    case Kind::kBool:
    case Kind::kInt: return value.as_int() != 0;
    case Kind::kFloat: return value.as_real() != 0;
    case Kind::kString: return !value.text().empty();
    case Kind::kList:
    case Kind::kTuple: return !value.items().empty();
    case Kind::kDict: return value.dict().size() != 0;
    case Kind::kRange: return value.data<RangeData>().size() != 0;
    case Kind::kView: return !value.data<ViewData>().items.empty();
    default: return true;
  }
}

namespace {

// Exact comparison of an integer with a double, as Python does it (no rounding of the integer).
int compare_int_real(Int i, double d) {
  if (std::isnan(d)) return 2;
  if (d >= 0x1p126) return -1;
  if (d <= -0x1p126) return 1;
  const double floor = std::floor(d);
  const Int whole = static_cast<Int>(floor);
  if (i != whole) return i < whole ? -1 : 1;
  return d > floor ? -1 : 0;
}

int compare_numbers(const Value& a, const Value& b) {
  if (a.is_integral() && b.is_integral()) return a.as_int() < b.as_int() ? -1 : a.as_int() > b.as_int() ? 1 : 0;
  if (a.is_integral()) return compare_int_real(a.as_int(), b.as_real());
  if (b.is_integral()) {
    const int c = compare_int_real(b.as_int(), a.as_real());
    return c == 2 ? 2 : -c;
  }
  if (std::isnan(a.as_real()) || std::isnan(b.as_real())) return 2;
  return a.as_real() < b.as_real() ? -1 : a.as_real() > b.as_real() ? 1 : 0;
}

}  // namespace

bool equal(const Value& a, const Value& b) {
  if (a.is_number() && b.is_number()) return compare_numbers(a, b) == 0;
  if (a.kind() != b.kind()) return false;
  switch (a.kind()) {
    case Kind::kUndefined:
    case Kind::kNone: return true;
    case Kind::kString: return a.text() == b.text();
    case Kind::kList:
    case Kind::kTuple: {
      const List &x = a.items(), &y = b.items();
      if (a.identity() == b.identity()) return true;
      return x.size() == y.size() && std::equal(x.begin(), x.end(), y.begin(), equal);
    }
    case Kind::kDict: {
      if (a.dict().size() != b.dict().size()) return false;
      for (const auto& [key, item] : a.dict().entries()) {
        const Value* other = b.dict().find(key);
        if (!other || !equal(item, *other)) return false;
      }
      return true;
    }
    case Kind::kRange: {
      const auto &x = a.data<RangeData>(), &y = b.data<RangeData>();
      if (x.size() != y.size()) return false;
      return x.size() == 0 || (x.start == y.start && (x.size() == 1 || x.step == y.step));
    }
    case Kind::kView: {
      const auto &x = a.data<ViewData>(), &y = b.data<ViewData>();
      if (std::string_view(x.type) == "dict_values" || std::string_view(x.type) != y.type) return a.identity() == b.identity();
      if (x.items.size() != y.items.size()) return false;
      return std::all_of(x.items.begin(), x.items.end(), [&](const Value& v) {
        return std::any_of(y.items.begin(), y.items.end(), [&](const Value& w) { return equal(v, w); });
      });
    }
    default: return a.identity() == b.identity();
  }
}

int compare(const Value& a, const Value& b, const char* op) {
  if (a.is_undefined()) fail_undefined(a);
  if (b.is_undefined()) fail_undefined(b);
  if (a.is_number() && b.is_number()) return compare_numbers(a, b);
  if (a.kind() == b.kind()) {
    if (a.is_string()) {
      const int c = a.text().compare(b.text());  // UTF-8 sorts like code points
      return c < 0 ? -1 : c > 0 ? 1 : 0;
    }
    if (a.is(Kind::kList) || a.is(Kind::kTuple)) {
      const List &x = a.items(), &y = b.items();
      for (size_t i = 0; i < std::min(x.size(), y.size()); ++i)
        if (!equal(x[i], y[i])) return compare(x[i], y[i], op);
      return x.size() < y.size() ? -1 : x.size() > y.size() ? 1 : 0;
    }
  }
  throw TypeError(std::string("'") + op + "' not supported between instances of '" + type_name(a) + "' and '" + type_name(b) + "'");
}

bool contains(const Value& container, const Value& item) {
  if (container.is_string()) {
    if (item.is_undefined()) throw TypeError("'in <string>' requires string as left operand, not Undefined");
    if (!item.is_string()) throw TypeError(std::string("'in <string>' requires string as left operand, not ") + type_name(item));
    return container.text().find(item.text()) != std::string::npos;
  }
  if (container.is(Kind::kDict)) return container.dict().find(item) != nullptr;
  if (container.is(Kind::kIterator)) {  // stops at the hit, as Python does
    Value v;
    while (container.data<IteratorData>().next(v))
      if (equal(v, item)) return true;
    return false;
  }
  switch (container.kind()) {
    case Kind::kUndefined:
    case Kind::kList:
    case Kind::kTuple:
    case Kind::kRange:
    case Kind::kView: break;
    default: throw TypeError(std::string("argument of type '") + type_name(container) + "' is not iterable");
  }
  const List items = iterate(container);
  return std::any_of(items.begin(), items.end(),
                     [&](const Value& v) { return (v.identity() && v.identity() == item.identity()) || equal(v, item); });
}

size_t hash(const Value& value) {
  switch (value.kind()) {
    case Kind::kBool:
    case Kind::kInt: return std::hash<int64_t>()(static_cast<int64_t>(value.as_int()));
    case Kind::kFloat: {
      const double d = value.as_real();
      if (std::floor(d) == d && std::fabs(d) < 0x1p62) return std::hash<int64_t>()(static_cast<int64_t>(d));
      return std::hash<double>()(d);
    }
    case Kind::kString: return std::hash<std::string_view>()(value.text());
    case Kind::kTuple: {
      size_t h = 0x345678;
      for (const Value& v : value.items()) h = h * 1000003 ^ hash(v);
      return h;
    }
    case Kind::kList:
    case Kind::kDict:
    case Kind::kView:
      if (value.is(Kind::kView) && std::string_view(value.data<ViewData>().type) == "dict_values")
        return std::hash<const void*>()(value.identity());
      throw TypeError(std::string("unhashable type: '") + type_name(value) + "'");
    case Kind::kUndefined:
    case Kind::kNone: return static_cast<size_t>(value.kind()) + 77;
    default: return std::hash<const void*>()(value.identity());
  }
}

std::string int_text(Int value) {
  if (value == 0) return "0";
  const bool negative = value < 0;
  auto rest = negative ? -static_cast<unsigned __int128>(value) : static_cast<unsigned __int128>(value);
  std::string out;
  for (; rest; rest /= 10) out += static_cast<char>('0' + static_cast<int>(rest % 10));
  if (negative) out += '-';
  std::reverse(out.begin(), out.end());
  return out;
}

std::string repr_real(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value < 0 ? "-inf" : "inf";
  char buffer[64];
  const auto end =
      std::to_chars(buffer, buffer + sizeof buffer, value, std::chars_format::scientific).ptr;  // shortest digits that read back
  std::string_view text(buffer, static_cast<size_t>(end - buffer));
  std::string out;
  if (text[0] == '-') {
    out = "-";
    text.remove_prefix(1);
  }
  const size_t e = text.find('e');
  std::string digits;
  for (const char c : text.substr(0, e))
    if (c != '.') digits += c;
  const int exponent = std::atoi(std::string(text.substr(e + 1)).c_str());
  if (exponent < -4 || exponent >= 16) {
    out += digits[0];
    if (digits.size() > 1) out += "." + digits.substr(1);
    out += exponent < 0 ? "e-" : "e+";
    const int magnitude = std::abs(exponent);
    if (magnitude < 10) out += '0';
    return out + std::to_string(magnitude);
  }
  if (exponent < 0) return out + "0." + std::string(static_cast<size_t>(-exponent - 1), '0') + digits;
  const auto whole = static_cast<size_t>(exponent) + 1;
  if (digits.size() <= whole) return out + digits + std::string(whole - digits.size(), '0') + ".0";
  return out + digits.substr(0, whole) + "." + digits.substr(whole);
}

std::string repr_string(std::string_view text) {
  const char quote = text.find('\'') != std::string_view::npos && text.find('"') == std::string_view::npos ? '"' : '\'';
  std::string out(1, quote);
  char buffer[16];
  for (const char32_t c : decode(text)) {
    if (c == static_cast<char32_t>(quote) || c == '\\') {
      out += '\\';
      out += static_cast<char>(c);
    } else if (c == '\n') {
      out += "\\n";
    } else if (c == '\r') {
      out += "\\r";
    } else if (c == '\t') {
      out += "\\t";
    } else if (!is_printable(c)) {
      std::snprintf(buffer, sizeof buffer, c < 0x100 ? "\\x%02x" : c < 0x10000 ? "\\u%04x" : "\\U%08x", static_cast<unsigned>(c));
      out += buffer;
    } else {
      append_utf8(out, c);
    }
  }
  return out + quote;
}

namespace {

constexpr int kMaxNesting = 400;  // of values that are printed

void append_repr(std::string& out, const Value& value, int depth) {
  if (depth > kMaxNesting) throw Error(Failure::Kind::kLimit, "a value is nested too deeply to be printed");
  if (out.size() > Limits().output_bytes) throw Error(Failure::Kind::kLimit, "a value is too large to be printed");
  const auto all = [&](const List& items) {
    for (size_t i = 0; i < items.size(); ++i) {
      if (i) out += ", ";
      append_repr(out, items[i], depth + 1);
    }
  };
  switch (value.kind()) {
    case Kind::kUndefined: out += "Undefined"; break;
    case Kind::kNone: out += "None"; break;
    case Kind::kBool: out += value.as_bool() ? "True" : "False"; break;
    case Kind::kInt: out += int_text(value.as_int()); break;
    case Kind::kFloat: out += repr_real(value.as_real()); break;
    case Kind::kString: out += value.markup() ? "Markup(" + repr_string(value.text()) + ")" : repr_string(value.text()); break;
    case Kind::kList:
      out += '[';
      all(value.items());
      out += ']';
      break;
    case Kind::kTuple:
      out += '(';
      all(value.items());
      out += value.items().size() == 1 ? ",)" : ")";
      break;
    case Kind::kNamespace:
    case Kind::kDict: {
      const bool ns = value.is(Kind::kNamespace);
      if (ns) out += "<Namespace ";
      out += '{';
      bool first = true;
      for (const auto& [key, item] : (ns ? value.data<NamespaceData>().members : value.dict()).entries()) {
        if (!first) out += ", ";
        first = false;
        append_repr(out, key, depth + 1);
        out += ": ";
        append_repr(out, item, depth + 1);
      }
      out += ns ? "}>" : "}";
      break;
    }
    case Kind::kRange: {
      const auto& r = value.data<RangeData>();
      out += "range(" + int_text(r.start) + ", " + int_text(r.stop) + (r.step == 1 ? "" : ", " + int_text(r.step)) + ")";
      break;
    }
    case Kind::kView:
      out += value.data<ViewData>().type;
      out += "([";
      all(value.data<ViewData>().items);
      out += "])";
      break;
    case Kind::kLoop: {
      auto& loop = value.data<LoopData>();
      out += "<LoopContext " + int_text(loop.index0 + 1) + "/" + int_text(loop.length()) + ">";
      break;
    }
    case Kind::kMacro: {
      const std::string& name = value.data<MacroData>().name;
      out += "<Macro " + (name.empty() ? "anonymous" : repr_string(name)) + ">";
      break;
    }
    default: out += std::string("<") + type_name(value) + " object>"; break;
  }
}

}  // namespace

std::string repr(const Value& value) {
  std::string out;
  append_repr(out, value, 0);
  return out;
}

std::string str(const Value& value) {
  if (value.is_string()) return value.text();
  if (value.is_undefined()) return {};
  return repr(value);
}

List iterate(const Value& value) {
  switch (value.kind()) {
    case Kind::kUndefined: return {};
    case Kind::kList:
    case Kind::kTuple: return value.items();
    case Kind::kString: {
      List out;
      for (const char32_t c : decode(value.text())) {
        std::string one;
        append_utf8(one, c);
        out.push_back(Value::string(std::move(one)));  // plain, as Markup's own iterator gives them
      }
      return out;
    }
    case Kind::kDict: {
      List out;
      for (const auto& entry : value.dict().entries()) out.push_back(entry.first);
      return out;
    }
    case Kind::kRange: {
      const auto& r = value.data<RangeData>();
      List out;
      for (Int i = 0; i < r.size(); ++i) out.push_back(Value::integer(r.start + i * r.step));
      return out;
    }
    case Kind::kView: return value.data<ViewData>().items;
    case Kind::kIterator: {
      List out;
      Value v;
      while (value.data<IteratorData>().next(v)) out.push_back(v);
      return out;
    }
    default: throw TypeError(std::string("'") + type_name(value) + "' object is not iterable");
  }
}

Int length(const Value& value) {
  switch (value.kind()) {
    case Kind::kUndefined: return 0;
    case Kind::kString: return static_cast<Int>(count_points(value.text()));
    case Kind::kList:
    case Kind::kTuple: return static_cast<Int>(value.items().size());
    case Kind::kDict: return static_cast<Int>(value.dict().size());
    case Kind::kRange: return value.data<RangeData>().size();
    case Kind::kView: return static_cast<Int>(value.data<ViewData>().items.size());
    default: throw TypeError(std::string("object of type '") + type_name(value) + "' has no len()");
  }
}

Int checked_int(const Value& value, const char* what) {
  if (value.is_undefined()) fail_undefined(value);
  if (!value.is_integral()) throw TypeError(std::string(what) + " must be an integer, not '" + type_name(value) + "'");
  return value.as_int();
}

namespace {

void append_json_string(std::string& out, std::string_view text, bool ascii) {
  out += '"';
  char buffer[16];
  const auto escape = [&](char32_t c) {
    std::snprintf(buffer, sizeof buffer, "\\u%04x", static_cast<unsigned>(c));
    out += buffer;
  };
  const auto plain = [&](char32_t c) {
    switch (c) {
      case '"': out += "\\\""; return true;
      case '\\': out += "\\\\"; return true;
      case '\n': out += "\\n"; return true;
      case '\r': out += "\\r"; return true;
      case '\t': out += "\\t"; return true;
      case '\f': out += "\\f"; return true;
      case '\b': out += "\\b"; return true;
      default: return false;
    }
  };
  if (!ascii) {
    for (const char c : text) {
      const auto byte = static_cast<unsigned char>(c);
      if (plain(byte)) continue;
      if (byte < 0x20) escape(byte);
      else out += c;
    }
  } else {
    for (const char32_t c : decode(text)) {
      if (plain(c)) continue;
      if (c < 0x20 || (c > 0x7E && c < 0x10000)) {
        escape(c);
      } else if (c >= 0x10000) {
        escape(0xD800 + ((c - 0x10000) >> 10));
        escape(0xDC00 + ((c - 0x10000) & 0x3FF));
      } else {
        out += static_cast<char>(c);
      }
    }
  }
  out += '"';
}

std::string json_real(double d) {
  if (std::isnan(d)) return "NaN";
  if (std::isinf(d)) return d < 0 ? "-Infinity" : "Infinity";
  return repr_real(d);
}

struct JsonWriter {
  const JsonStyle& style;
  size_t limit;
  std::string out;

  void newline(int depth) {
    if (!style.pretty) return;
    out += '\n';
    for (int i = 0; i < depth; ++i) out += style.indent_text;
  }
  std::string key_text(const Value& key) {
    switch (key.kind()) {
      case Kind::kString: return key.text();
      case Kind::kNone: return "null";
      case Kind::kBool: return key.as_bool() ? "true" : "false";
      case Kind::kInt: return int_text(key.as_int());
      case Kind::kFloat: return json_real(key.as_real());
      default: throw TypeError(std::string("keys must be str, int, float, bool or None, not ") + type_name(key));
    }
  }
  void write(const Value& value, int depth) {
    if (depth > kMaxNesting) throw Error(Failure::Kind::kLimit, "a value is nested too deeply for tojson");
    if (out.size() > limit) throw Error(Failure::Kind::kLimit, "tojson: the text is too long");
    switch (value.kind()) {
      case Kind::kNone: out += "null"; return;
      case Kind::kBool: out += value.as_bool() ? "true" : "false"; return;
      case Kind::kInt: out += int_text(value.as_int()); return;
      case Kind::kFloat: out += json_real(value.as_real()); return;
      case Kind::kString: append_json_string(out, value.text(), style.ascii); return;
      case Kind::kList:
      case Kind::kTuple: {
        const List& items = value.items();
        out += '[';
        for (size_t i = 0; i < items.size(); ++i) {
          if (i) out += style.item_separator;
          newline(depth + 1);
          write(items[i], depth + 1);
        }
        if (!items.empty()) newline(depth);
        out += ']';
        return;
      }
      case Kind::kDict: {
        auto entries = value.dict().entries();
        if (style.sort_keys)
          std::stable_sort(entries.begin(), entries.end(), [](const auto& a, const auto& b) { return compare(a.first, b.first) < 0; });
        out += '{';
        bool first = true;
        for (const auto& [key, item] : entries) {
          if (!first) out += style.item_separator;
          first = false;
          newline(depth + 1);
          append_json_string(out, key_text(key), style.ascii);
          out += style.key_separator;
          write(item, depth + 1);
        }
        if (!entries.empty()) newline(depth);
        out += '}';
        return;
      }
      default: throw TypeError(std::string("Object of type ") + type_name(value) + " is not JSON serializable");
    }
  }
};

}  // namespace

std::string to_json_text(const Value& value, const JsonStyle& style, size_t limit) {
  JsonWriter writer{style, limit, {}};
  writer.write(value, 0);
  return std::move(writer.out);
}

nlohmann::ordered_json to_json(const Value& value) {
  switch (value.kind()) {
    case Kind::kNone: return nullptr;
    case Kind::kBool: return value.as_bool();
    case Kind::kInt:
      if (value.as_int() >= INT64_MIN && value.as_int() <= INT64_MAX) return static_cast<int64_t>(value.as_int());
      if (value.as_int() > 0 && value.as_int() <= static_cast<Int>(UINT64_MAX)) return static_cast<uint64_t>(value.as_int());
      return value.as_real();
    case Kind::kFloat: return value.as_real();
    case Kind::kString: return value.text();
    case Kind::kList:
    case Kind::kTuple: {
      auto out = nlohmann::ordered_json::array();
      for (const Value& v : value.items()) out.push_back(to_json(v));
      return out;
    }
    case Kind::kDict: {
      auto out = nlohmann::ordered_json::object();
      for (const auto& [key, item] : value.dict().entries()) out[key.is_string() ? key.text() : repr(key)] = to_json(item);
      return out;
    }
    default: throw TypeError(std::string("Object of type ") + type_name(value) + " is not JSON serializable");
  }
}

}  // namespace ddtree::jinja
