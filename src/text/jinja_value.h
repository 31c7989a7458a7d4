// Values of the Jinja engine: Python's types as far as templates can see them.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <stdexcept>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "text/jinja.h"

namespace ddtree::jinja {

// Wide enough for JSON's unsigned 64-bit numbers and products of sizes; Python's integers have no bound, overflow here is an error.
using Int = __int128;

// Thrown inside the engine only; Template turns it into a Failure. Line 0: filled in by the statement that was running.
struct Error : std::runtime_error {
  Error(Failure::Kind k, std::string text, int at = 0) : std::runtime_error(std::move(text)), kind(k), line(at) {}
  explicit Error(std::string text) : Error(Failure::Kind::kRuntime, std::move(text)) {}
  Failure::Kind kind;
  int line;
};
// Jinja2's filters catch these two of Python's exceptions at places (default values of int, float, ...).
struct TypeError : Error {
  using Error::Error;
};
struct ValueError : Error {
  using Error::Error;
};

enum class Kind : uint8_t {
  kUndefined,
  kNone,
  kBool,
  kInt,
  kFloat,
  kString,
  kList,
  kTuple,
  kDict,
  kRange,     // range(): start, stop, step
  kView,      // dict.keys(), .values(), .items(): a sized snapshot that cannot be indexed
  kIterator,  // what map, select, items ... return: can be read once, always true, has no length
  kFunction,  // methods and global functions
  kMacro,
  kNamespace,
  kLoop,
  kCycler,
  kJoiner,
};

class Value;
class Interpreter;
struct Scope;
using List = std::vector<Value>;

// Arguments of a call, in order; keyword arguments keep theirs.
struct Args {
  std::vector<Value> positional;
  std::vector<std::pair<std::string, Value>> named;
};

struct StringData {
  std::string text;
  bool markup = false;  // marked by |safe or |escape: `+` and `%` then escape what is put next to it
};
struct UndefinedData {
  std::string message;  // what using it says
};
struct RangeData {
  Int start, stop, step;
  Int size() const {
    return step > 0 ? (stop > start ? (stop - start + step - 1) / step : 0) : (start > stop ? (start - stop - step - 1) / -step : 0);
  }
};
struct ListData {
  List items;
  bool grouped = false;  // a pair of |groupby: has .grouper and .list
};
struct ViewData {
  const char* type;  // "dict_items" ...
  List items;
};
struct IteratorData {
  std::function<bool(Value&)> next;  // false at the end
};
struct FunctionData {
  std::string name;
  std::function<Value(Interpreter&, Args&)> call;
};
class DictData;
struct NamespaceData;

class Value {
 public:
  Value() : kind_(Kind::kUndefined) {}
  static Value undefined(std::string message);
  static Value none() { return Value(Kind::kNone); }
  static Value boolean(bool b);
  static Value integer(Int i);
  static Value real(double d);
  static Value string(std::string text, bool markup = false);
  static Value list(List items);
  static Value tuple(List items);
  static Value dict(std::shared_ptr<DictData> data);
  static Value range(RangeData data);
  static Value view(const char* type, List items);
  static Value iterator(std::function<bool(Value&)> next);
  static Value iterator(List items);
  static Value function(std::string name, std::function<Value(Interpreter&, Args&)> call);
  static Value object(Kind kind, std::shared_ptr<void> data);
  static Value from_json(const nlohmann::ordered_json& json, int depth = 0);

  Kind kind() const { return kind_; }
  bool is(Kind k) const { return kind_ == k; }
  bool is_undefined() const { return kind_ == Kind::kUndefined; }
  bool is_string() const { return kind_ == Kind::kString; }
  bool is_number() const { return kind_ == Kind::kInt || kind_ == Kind::kFloat || kind_ == Kind::kBool; }
  bool is_integral() const { return kind_ == Kind::kInt || kind_ == Kind::kBool; }

  // Callers check kind() first.
  bool as_bool() const { return integer_ != 0; }
  Int as_int() const { return integer_; }  // of kInt and kBool
  double as_real() const { return kind_ == Kind::kFloat ? real_ : static_cast<double>(integer_); }
  const std::string& text() const { return data<StringData>().text; }
  bool markup() const { return kind_ == Kind::kString && data<StringData>().markup; }
  const List& items() const { return data<ListData>().items; }  // of kList and kTuple
  const DictData& dict() const { return data<DictData>(); }
  template <class T>
  T& data() const {
    return *static_cast<T*>(data_.get());
  }
  const void* identity() const { return data_.get(); }
  const std::string& undefined_message() const;

 private:
  explicit Value(Kind kind) : kind_(kind) {}
  Kind kind_;
  union {
    Int integer_ = 0;
    double real_;
  };
  std::shared_ptr<void> data_;
};

// A dict keeps the order of insertion. Keys compare as in Python (1 == 1.0 == True).
class DictData {
 public:
  const std::vector<std::pair<Value, Value>>& entries() const { return entries_; }
  size_t size() const { return entries_.size(); }
  const Value* find(const Value& key) const;  // nullptr if absent; TypeError for an unhashable key
  const Value* find(std::string_view key) const;
  void set(const Value& key, Value value);
  void set(std::string_view key, Value value) { set(Value::string(std::string(key)), std::move(value)); }

 private:
  int64_t position(size_t hash, const Value* key, std::string_view text) const;
  std::vector<std::pair<Value, Value>> entries_;
  std::unordered_multimap<size_t, size_t> index_;  // hash -> position
};

struct NamespaceData {
  DictData members;
};

const char* type_name(const Value& value);  // Python's, for messages
bool truth(const Value& value);
bool equal(const Value& a, const Value& b);
// -1, 0, 1; TypeError (naming `op`, as in "'<' not supported between ...") where Python has no order; 2 where NaN is in play.
int compare(const Value& a, const Value& b, const char* op = "<");
bool contains(const Value& container, const Value& item);
size_t hash(const Value& value);
std::string str(const Value& value);   // Python's str()
std::string repr(const Value& value);  // Python's repr()
std::string repr_string(std::string_view text);
std::string repr_real(double value);
std::string int_text(Int value);
// Everything that iter() yields; iterators are used up. TypeError "'int' object is not iterable".
List iterate(const Value& value);
Int length(const Value& value);                         // len(); TypeError where there is none
Int checked_int(const Value& value, const char* what);  // int or bool; TypeError otherwise
[[noreturn]] void fail_undefined(const Value& value);

// json.dumps(): indent < 0 means none and `indent_text` is used otherwise.
struct JsonStyle {
  bool ascii = false;
  bool pretty = false;
  std::string indent_text;
  std::string item_separator = ", ";
  std::string key_separator = ": ";
  bool sort_keys = false;
};
std::string to_json_text(const Value& value, const JsonStyle& style, size_t limit);
nlohmann::ordered_json to_json(const Value& value);  // plain data only; throws TypeError otherwise

}  // namespace ddtree::jinja
