// The tests of `value is name(...)`.
#include <functional>
#include <unordered_map>

#include "text/jinja_builtins.h"
#include "text/jinja_render.h"

namespace ddtree::jinja {
namespace {

using Test = std::function<bool(Interpreter&, const Value&, Args&)>;

// A test without arguments.
Test plain(bool (*check)(const Value&)) {
  return [check](Interpreter&, const Value& value, Args& args) {
    const Bound b("test", args, {});
    return check(value);
  };
}

template <int Remainder>
bool parity(Interpreter& in, const Value& value, Args& args) {
  const Bound b("test", args, {});
  return equal(binary(in, Expr::Type::kModulo, value, Value::integer(2)), Value::integer(Remainder));
}

enum class Order { kLess, kLessEqual, kGreater, kGreaterEqual };
template <Order How>
bool ordered(Interpreter&, const Value& value, Args& args) {
  const Bound b("test", args, {"other"}, 1);
  const char* ops[] = {"<", "<=", ">", ">="};
  const int c = compare(value, b[0], ops[static_cast<int>(How)]);
  if (c == 2) return false;
  switch (How) {
    case Order::kLess: return c < 0;
    case Order::kLessEqual: return c <= 0;
    case Order::kGreater: return c > 0;
    default: return c >= 0;
  }
}

template <bool Same>
bool equality(Interpreter&, const Value& value, Args& args) {
  const Bound b("test", args, {"other"}, 1);
  return equal(value, b[0]) == Same;
}

template <bool Upper>
bool letter_case(Interpreter& in, const Value& value, Args& args) {
  const Bound b("test", args, {});
  Args none;
  return truth(in.call(string_method(Value::string(str(value)), Upper ? "isupper" : "islower"), none));
}

bool iterable(const Value& v) {
  switch (v.kind()) {
    case Kind::kUndefined:
    case Kind::kString:
    case Kind::kList:
    case Kind::kTuple:
    case Kind::kDict:
    case Kind::kRange:
    case Kind::kView:
    case Kind::kIterator:
    case Kind::kLoop: return true;
    default: return false;
  }
}

bool callable(const Value& v) {
  switch (v.kind()) {
    case Kind::kUndefined:
    case Kind::kFunction:
    case Kind::kMacro:
    case Kind::kLoop:
    case Kind::kJoiner: return true;
    default: return false;
  }
}

bool sequence(const Value& v) {
  switch (v.kind()) {
    case Kind::kUndefined:
    case Kind::kString:
    case Kind::kList:
    case Kind::kTuple:
    case Kind::kDict:
    case Kind::kRange: return true;
    default: return false;
  }
}

bool same_as(Interpreter&, const Value& value, Args& args) {
  const Bound b("sameas", args, {"other"}, 1);
  if (value.kind() != b[0].kind()) return false;
  if (value.identity()) return value.identity() == b[0].identity() || (value.is_string() && value.text() == b[0].text());
  return equal(value, b[0]);
}

const std::unordered_map<std::string_view, Test>& tests() {
  static const std::unordered_map<std::string_view, Test> all = {
      {"odd", parity<1>},
      {"even", parity<0>},
      {"divisibleby",
       [](Interpreter& in, const Value& value, Args& args) {
         const Bound b("divisibleby", args, {"num"}, 1);
         return equal(binary(in, Expr::Type::kModulo, value, b[0]), Value::integer(0));
       }},
      {"defined", plain([](const Value& v) { return !v.is_undefined(); })},
      {"undefined", plain([](const Value& v) { return v.is_undefined(); })},
      {"filter", plain([](const Value& v) { return v.is_string() && is_filter(v.text()); })},
      {"test", plain([](const Value& v) { return v.is_string() && is_test(v.text()); })},
      {"none", plain([](const Value& v) { return v.is(Kind::kNone); })},
      {"boolean", plain([](const Value& v) { return v.is(Kind::kBool); })},
      {"false", plain([](const Value& v) { return v.is(Kind::kBool) && !v.as_bool(); })},
      {"true", plain([](const Value& v) { return v.is(Kind::kBool) && v.as_bool(); })},
      {"integer", plain([](const Value& v) { return v.is(Kind::kInt); })},
      {"float", plain([](const Value& v) { return v.is(Kind::kFloat); })},
      {"lower", letter_case<false>},
      {"upper", letter_case<true>},
      {"string", plain([](const Value& v) { return v.is_string(); })},
      {"mapping", plain([](const Value& v) { return v.is(Kind::kDict); })},
      {"number", plain([](const Value& v) { return v.is_number(); })},
      {"sequence", plain(sequence)},
      {"iterable", plain(iterable)},
      {"callable", plain(callable)},
      {"sameas", same_as},
      {"escaped", plain([](const Value& v) { return v.markup(); })},
      {"in",
       [](Interpreter&, const Value& value, Args& args) {
         const Bound b("in", args, {"seq"}, 1);
         return contains(b[0], value);
       }},
      {"==", equality<true>},
      {"eq", equality<true>},
      {"equalto", equality<true>},
      {"!=", equality<false>},
      {"ne", equality<false>},
      {">", ordered<Order::kGreater>},
      {"gt", ordered<Order::kGreater>},
      {"greaterthan", ordered<Order::kGreater>},
      {"ge", ordered<Order::kGreaterEqual>},
      {">=", ordered<Order::kGreaterEqual>},
      {"<", ordered<Order::kLess>},
      {"lt", ordered<Order::kLess>},
      {"lessthan", ordered<Order::kLess>},
      {"<=", ordered<Order::kLessEqual>},
      {"le", ordered<Order::kLessEqual>},
  };
  return all;
}

}  // namespace

bool is_test(std::string_view name) { return tests().count(name) != 0; }

bool call_test(Interpreter& in, std::string_view name, const Value& value, Args& args) {
  in.step();
  const auto at = tests().find(name);
  if (at == tests().end()) throw Error("No test named '" + std::string(name) + "'.");
  return at->second(in, value, args);
}

}  // namespace ddtree::jinja
