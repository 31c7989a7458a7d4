// Arithmetic, concatenation and slices with Python's meaning.
#include <cmath>

#include "text/jinja_builtins.h"
#include "text/jinja_render.h"
#include "text/jinja_strings.h"

namespace ddtree::jinja {
namespace {

using E = Expr::Type;

const char* symbol(E op) {
  switch (op) {
    case E::kAdd: return "+";
    case E::kSubtract: return "-";
    case E::kMultiply: return "*";
    case E::kDivide: return "/";
    case E::kFloorDivide: return "//";
    case E::kModulo: return "%";
    default: return "** or pow()";
  }
}

[[noreturn]] void unsupported(E op, const Value& a, const Value& b) {
  throw TypeError(std::string("unsupported operand type(s) for ") + symbol(op) + ": '" + type_name(a) + "' and '" + type_name(b) + "'");
}

[[noreturn]] void overflow() { throw Error("an integer grew beyond 127 bits, which this engine's integers have"); }

Int floor_divide(Int a, Int b) {
  const Int q = a / b;
  return (a % b != 0 && (a < 0) != (b < 0)) ? q - 1 : q;
}

// Python's float % and //.
double float_mod(double a, double b) {
  double m = std::fmod(a, b);
  if (m != 0) {
    if ((b < 0) != (m < 0)) m += b;
  } else {
    m = std::copysign(0.0, b);
  }
  return m;
}
double float_floor_divide(double a, double b) {
  const double m = std::fmod(a, b);
  double div = (a - m) / b;
  if (m != 0 && (b < 0) != (m < 0)) div -= 1.0;
  if (div == 0) return std::copysign(0.0, a / b);
  double floor = std::floor(div);
  if (div - floor > 0.5) floor += 1.0;
  return floor;
}

Value power(const Value& a, const Value& b) {
  if (a.is_integral() && b.is_integral() && b.as_int() >= 0) {
    Int base = a.as_int(), exponent = b.as_int(), out = 1;
    if (base == 0 || base == 1) return Value::integer(exponent == 0 ? Int{1} : base);
    if (base == -1) return Value::integer(exponent % 2 ? -1 : 1);
    if (exponent > 127) overflow();
    while (exponent > 0) {
      if ((exponent & 1) && __builtin_mul_overflow(out, base, &out)) overflow();
      exponent >>= 1;
      if (exponent && __builtin_mul_overflow(base, base, &base)) overflow();
    }
    return Value::integer(out);
  }
  if (a.as_real() == 0 && b.as_real() < 0) throw Error("0.0 cannot be raised to a negative power");
  if (a.as_real() < 0 && std::floor(b.as_real()) != b.as_real()) throw Error("complex numbers are not supported");
  const double r = std::pow(a.as_real(), b.as_real());
  if (std::isinf(r) && !std::isinf(a.as_real()) && !std::isinf(b.as_real())) throw Error("(34, 'Numerical result out of range')");
  return Value::real(r);
}

Value numeric(E op, const Value& a, const Value& b) {
  if (op == E::kPower) return power(a, b);
  if (op == E::kDivide) {
    if (b.as_real() == 0) throw Error(a.is_integral() && b.is_integral() ? "division by zero" : "float division by zero");
    return Value::real(a.as_real() / b.as_real());
  }
  if (a.is_integral() && b.is_integral()) {
    const Int x = a.as_int(), y = b.as_int();
    Int out = 0;
    switch (op) {
      case E::kAdd:
        if (__builtin_add_overflow(x, y, &out)) overflow();
        break;
      case E::kSubtract:
        if (__builtin_sub_overflow(x, y, &out)) overflow();
        break;
      case E::kMultiply:
        if (__builtin_mul_overflow(x, y, &out)) overflow();
        break;
      default:
        if (y == 0) throw Error("integer division or modulo by zero");
        if (y == -1) return op == E::kModulo ? Value::integer(0) : numeric(E::kSubtract, Value::integer(0), Value::integer(x));
        out = floor_divide(x, y);
        if (op == E::kModulo) out = x - out * y;
    }
    return Value::integer(out);
  }
  const double x = a.as_real(), y = b.as_real();
  switch (op) {
    case E::kAdd: return Value::real(x + y);
    case E::kSubtract: return Value::real(x - y);
    case E::kMultiply: return Value::real(x * y);
    default:
      if (y == 0) throw Error(op == E::kModulo ? "float modulo" : "float floor division by zero");
      return Value::real(op == E::kModulo ? float_mod(x, y) : float_floor_divide(x, y));
  }
}

Value repeat(Interpreter& in, const Value& sequence, Int times) {
  if (times < 0) times = 0;
  const auto guard = [&](size_t size) {
    if (size && times > static_cast<Int>(in.limits().output_bytes / size)) in.check_size(SIZE_MAX);
  };
  if (sequence.is_string()) {
    const std::string& text = sequence.text();
    guard(text.size());
    std::string out;
    if (!text.empty())
      for (Int i = 0; i < times; ++i) out += text;
    return Value::string(std::move(out), sequence.markup());
  }
  const List& items = sequence.items();
  guard(items.size() * sizeof(Value));
  List out;
  if (!items.empty())
    for (Int i = 0; i < times; ++i) out.insert(out.end(), items.begin(), items.end());
  in.step(out.size());
  return sequence.is(Kind::kList) ? Value::list(std::move(out)) : Value::tuple(std::move(out));
}

Value add(Interpreter& in, const Value& a, const Value& b) {
  if (a.is_string() && b.is_string()) {
    const bool markup = a.markup() || b.markup();
    std::string out = markup && !a.markup() ? escape_html(a.text()) : a.text();
    in.check_size(out.size() + b.text().size());
    out += markup && !b.markup() ? escape_html(b.text()) : b.text();
    return Value::string(std::move(out), markup);
  }
  if (a.kind() == b.kind() && (a.is(Kind::kList) || a.is(Kind::kTuple))) {
    List out = a.items();
    in.check_size((out.size() + b.items().size()) * sizeof(Value));
    in.step(out.size() + b.items().size());
    out.insert(out.end(), b.items().begin(), b.items().end());
    return a.is(Kind::kList) ? Value::list(std::move(out)) : Value::tuple(std::move(out));
  }
  if (a.is_string()) throw TypeError(std::string("can only concatenate str (not \"") + type_name(b) + "\") to str");
  if (a.is(Kind::kList) || a.is(Kind::kTuple))
    throw TypeError(std::string("can only concatenate ") + type_name(a) + " (not \"" + type_name(b) + "\") to " + type_name(a));
  unsupported(E::kAdd, a, b);
}

}  // namespace

Value binary(Interpreter& in, E op, const Value& a, const Value& b) {
  if (op == E::kModulo && a.is_string()) return format_percent(in, a, b);
  if (a.is_undefined()) fail_undefined(a);
  if (b.is_undefined()) fail_undefined(b);
  if (a.is_number() && b.is_number()) return numeric(op, a, b);
  if (op == E::kAdd) return add(in, a, b);
  if (op == E::kMultiply) {
    const auto sequence = [](const Value& v) { return v.is_string() || v.is(Kind::kList) || v.is(Kind::kTuple); };
    if (sequence(a) && b.is_integral()) return repeat(in, a, b.as_int());
    if (sequence(b) && a.is_integral()) return repeat(in, b, a.as_int());
  }
  unsupported(op, a, b);
}

Value negate(const Value& a) {
  if (a.is_undefined()) fail_undefined(a);
  if (a.is_integral()) return Value::integer(-a.as_int());
  if (a.is(Kind::kFloat)) return Value::real(-a.as_real());
  throw TypeError(std::string("bad operand type for unary -: '") + type_name(a) + "'");
}

Value positive(const Value& a) {
  if (a.is_undefined()) fail_undefined(a);
  if (a.is_integral()) return Value::integer(a.as_int());
  if (a.is(Kind::kFloat)) return a;
  throw TypeError(std::string("bad operand type for unary +: '") + type_name(a) + "'");
}

Value slice(Interpreter& in, const Value& object, const Value& start, const Value& stop, const Value& step) {
  if (object.is_undefined()) fail_undefined(object);
  const bool text = object.is_string();
  if (!text && !object.is(Kind::kList) && !object.is(Kind::kTuple) && !object.is(Kind::kRange))
    throw TypeError(object.is(Kind::kDict) ? std::string("unhashable type: 'slice'")
                                           : std::string("'") + type_name(object) + "' object is not subscriptable");
  const auto index = [](const Value& v) {
    if (!v.is_integral()) throw TypeError("slice indices must be integers or None or have an __index__ method");
    return v.as_int();
  };
  const Int by = step.is(Kind::kNone) ? Int{1} : index(step);
  if (by == 0) throw ValueError("slice step cannot be zero");
  const CodePoints points = text ? decode(object.text()) : CodePoints();
  const Int size = text ? static_cast<Int>(points.size()) : length(object);
  const auto bound = [&](const Value& v, Int otherwise) {
    if (v.is(Kind::kNone)) return otherwise;
    Int i = index(v);
    const Int low = by < 0 ? -1 : 0, high = by < 0 ? size - 1 : size;
    if (i < 0) i = i + size < 0 ? low : i + size;
    return i > high ? high : i;
  };
  const Int from = bound(start, by < 0 ? size - 1 : 0), to = bound(stop, by < 0 ? -1 : size);
  if (object.is(Kind::kRange)) {
    const auto& r = object.data<RangeData>();
    return Value::range({r.start + from * r.step, r.start + to * r.step, r.step * by});
  }
  if (text) {
    std::string out;
    for (Int i = from; by > 0 ? i < to : i > to; i += by) append_utf8(out, points[static_cast<size_t>(i)]);
    return Value::string(std::move(out), object.markup());
  }
  List out;
  for (Int i = from; by > 0 ? i < to : i > to; i += by) {
    in.step();
    out.push_back(object.items()[static_cast<size_t>(i)]);
  }
  return object.is(Kind::kList) ? Value::list(std::move(out)) : Value::tuple(std::move(out));
}

}  // namespace ddtree::jinja
