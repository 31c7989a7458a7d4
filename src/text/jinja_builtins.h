// Filters, tests, methods and functions of the Jinja engine.
#pragma once

#include <initializer_list>
#include <string>
#include <string_view>

#include "text/jinja_value.h"

namespace ddtree::jinja {

bool is_filter(std::string_view name);
bool is_test(std::string_view name);
std::string missing_filter_message(std::string_view name);  // says why for those left out on purpose
Value call_filter(Interpreter& in, std::string_view name, const Value& value, Args& args);
bool call_test(Interpreter& in, std::string_view name, const Value& value, Args& args);

// object.name: methods and attributes first, then the dict's own key; undefined otherwise. What would change a list or dict, or begins
// with an underscore, is an undefined that says so when it is used.
Value attribute(Interpreter& in, const Value& object, const std::string& name);
// object[key]: the other way round.
Value item(Interpreter& in, const Value& object, const Value& key);

Value string_method(const Value& self, std::string_view name);  // undefined if there is none
Value format_percent(Interpreter& in, const Value& format, const Value& args);
Value format_braces(Interpreter& in, const std::string& format, Args& args, bool markup);

// range, dict, namespace, cycler, joiner, lipsum, raise_exception, strftime_now
const DictData& builtin_functions();

// The arguments of a built-in by its parameters' names: positional ones in order, then by name.
class Bound {
 public:
  // Throws TypeError for too many, unknown, repeated or (before `required`) missing ones.
  Bound(std::string_view function, Args& args, std::initializer_list<std::string_view> names, size_t required = 0);
  bool has(size_t i) const { return given_[i]; }
  const Value& operator[](size_t i) const { return values_[i]; }
  Value get(size_t i, Value otherwise) const { return given_[i] ? values_[i] : std::move(otherwise); }
  bool flag(size_t i, bool otherwise) const { return given_[i] ? truth(values_[i]) : otherwise; }
  Int integer(size_t i, Int otherwise) const;               // also for None: `otherwise`
  std::string text(size_t i, std::string otherwise) const;  // TypeError unless a string

 private:
  std::string function_;
  std::vector<Value> values_;
  std::vector<bool> given_;
};

}  // namespace ddtree::jinja
