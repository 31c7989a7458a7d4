// "%s" % values and "{}".format(values).
#include <algorithm>
#include <cmath>

#include "text/jinja_builtins.h"
#include "text/jinja_render.h"
#include "text/jinja_strings.h"

namespace ddtree::jinja {
namespace {

constexpr Int kMaxWidth = 1 << 20;

std::string printf_real(double value, char type, int precision, bool alternate) {
  const char format[] = {'%', alternate ? '#' : '.', alternate ? '.' : '*', alternate ? '*' : type, alternate ? type : '\0', '\0'};
  const int n = std::snprintf(nullptr, 0, format, precision, value);
  std::string out(static_cast<size_t>(n) + 1, '\0');
  std::snprintf(out.data(), out.size(), format, precision, value);
  out.resize(static_cast<size_t>(n));
  return out;
}

std::string digits_of(Int value, int base, bool upper_case) {
  auto rest = value < 0 ? -static_cast<unsigned __int128>(value) : static_cast<unsigned __int128>(value);
  std::string out;
  do {
    out += (upper_case ? "0123456789ABCDEF" : "0123456789abcdef")[static_cast<size_t>(rest % static_cast<unsigned>(base))];
    rest /= static_cast<unsigned>(base);
  } while (rest);
  std::reverse(out.begin(), out.end());
  return out;
}

std::string ascii_repr(const Value& v) {
  std::string out;
  char buffer[16];
  for (const char32_t c : decode(repr(v))) {
    if (c < 0x80) {
      out += static_cast<char>(c);
      continue;
    }
    std::snprintf(buffer, sizeof buffer, c < 0x100 ? "\\x%02x" : c < 0x10000 ? "\\u%04x" : "\\U%08x", static_cast<unsigned>(c));
    out += buffer;
  }
  return out;
}

std::string cut(const std::string& text, Int points) {
  if (points < 0 || static_cast<Int>(count_points(text)) <= points) return text;
  return encode(std::u32string_view(decode(text)).substr(0, static_cast<size_t>(points)));
}

}  // namespace

Value format_percent(Interpreter& in, const Value& format, const Value& args) {
  const std::string& f = format.text();
  const bool markup = format.markup();
  const List values = args.is(Kind::kTuple) ? args.items() : List{args};
  size_t used = 0;
  bool mapping_used = false;
  const auto next = [&]() -> Value {
    if (used >= values.size()) throw TypeError("not enough arguments for format string");
    return values[used++];
  };
  std::string out;
  for (size_t i = 0; i < f.size(); ++i) {
    if (f[i] != '%') {
      out += f[i];
      continue;
    }
    if (++i >= f.size()) throw ValueError("incomplete format");
    Value value;
    bool have = false;
    if (f[i] == '(') {
      const size_t close = f.find(')', i);
      if (close == std::string::npos) throw ValueError("incomplete format key");
      if (!args.is(Kind::kDict)) throw TypeError("format requires a mapping");
      const Value* hit = args.dict().find(std::string_view(f).substr(i + 1, close - i - 1));
      if (!hit) throw Error(repr_string(f.substr(i + 1, close - i - 1)));
      value = *hit;
      have = mapping_used = true;
      i = close + 1;
    }
    bool left = false, zero = false, plus = false, space = false, alternate = false;
    for (; i < f.size(); ++i) {
      if (f[i] == '-') left = true;
      else if (f[i] == '0') zero = true;
      else if (f[i] == '+') plus = true;
      else if (f[i] == ' ') space = true;
      else if (f[i] == '#') alternate = true;
      else break;
    }
    const auto number = [&](Int& to) {
      if (i < f.size() && f[i] == '*') {
        to = checked_int(next(), "* in a format");
        ++i;
      } else {
        for (; i < f.size() && f[i] >= '0' && f[i] <= '9'; ++i) to = std::min<Int>(to * 10 + (f[i] - '0'), kMaxWidth + 1);
      }
      if (to > kMaxWidth || to < -kMaxWidth) throw ValueError("width or precision too big");
    };
    Int width = 0, precision = -1;
    number(width);
    if (width < 0) {
      left = true;
      width = -width;
    }
    if (i < f.size() && f[i] == '.') {
      ++i;
      precision = 0;
      number(precision);
    }
    while (i < f.size() && (f[i] == 'l' || f[i] == 'h' || f[i] == 'L')) ++i;
    if (i >= f.size()) throw ValueError("incomplete format");
    const char type = f[i];
    if (type == '%') {
      out += '%';
      continue;
    }
    if (!have) value = next();
    std::string sign, body;
    bool numeric = false;
    switch (type) {
      case 's': body = cut(str(value), precision); break;
      case 'r': body = cut(repr(value), precision); break;
      case 'a': body = cut(ascii_repr(value), precision); break;
      case 'c':
        if (value.is_integral()) {
          if (value.as_int() < 0 || value.as_int() > 0x10FFFF) throw Error("%c arg not in range(0x110000)");
          append_utf8(body, static_cast<char32_t>(value.as_int()));
        } else if (value.is_string() && count_points(value.text()) == 1) {
          body = value.text();
        } else {
          throw TypeError("%c requires int or char");
        }
        break;
      case 'd':
      case 'i':
      case 'u':
      case 'x':
      case 'X':
      case 'o': {
        const bool decimal = type == 'd' || type == 'i' || type == 'u';
        if (!value.is_number() || (!decimal && !value.is_integral()))
          throw TypeError(std::string("%") + type + " format: a real number is required, not " + type_name(value));
        if (value.is(Kind::kFloat) && !std::isfinite(value.as_real())) throw ValueError("cannot convert float infinity or NaN to integer");
        const Int n = value.is(Kind::kFloat) ? static_cast<Int>(value.as_real()) : value.as_int();
        body = digits_of(n, decimal ? 10 : type == 'o' ? 8 : 16, type == 'X');
        if (static_cast<Int>(body.size()) < precision) body.insert(0, static_cast<size_t>(precision) - body.size(), '0');
        sign = n < 0 ? "-" : plus ? "+" : space ? " " : "";
        if (alternate && !decimal) sign += type == 'o' ? "0o" : type == 'x' ? "0x" : "0X";
        numeric = true;
        break;
      }
      case 'e':
      case 'E':
      case 'f':
      case 'F':
      case 'g':
      case 'G': {
        if (!value.is_number()) {
          if (value.is_undefined()) fail_undefined(value);
          throw TypeError(std::string("must be real number, not ") + type_name(value));
        }
        const double d = value.as_real();
        body = printf_real(std::fabs(d), type, precision < 0 ? 6 : static_cast<int>(precision), alternate);
        sign = std::signbit(d) && !std::isnan(d) ? "-" : plus ? "+" : space ? " " : "";
        numeric = true;
        break;
      }
      default: throw ValueError(std::string("unsupported format character '") + type + "'");
    }
    if (markup && !numeric && !value.markup()) body = escape_html(body);
    const auto pad = width - static_cast<Int>(count_points(sign) + count_points(body));
    const std::string fill(pad > 0 ? static_cast<size_t>(pad) : 0, zero && numeric && !left ? '0' : ' ');
    if (left) out += sign + body + fill;
    else if (zero && numeric) out += sign + fill + body;
    else out += fill + sign + body;
    in.check_size(out.size());
  }
  // Whatever can be subscribed could be a mapping, which nobody has to use.
  const bool subscribed = args.is(Kind::kDict) || args.is(Kind::kList) || args.is(Kind::kRange) || args.is_undefined();
  if (!mapping_used && used < values.size() && !subscribed) throw TypeError("not all arguments converted during string formatting");
  return Value::string(std::move(out), markup);
}

namespace {

// [[fill]align][sign][z][#][0][width][grouping][.precision][type]
std::string format_spec(const Value& value, const std::string& spec) {
  if (spec.empty()) return str(value);
  if (!value.is_string() && !value.is_number())
    throw TypeError(std::string("unsupported format string passed to ") + type_name(value) + ".__format__");
  const CodePoints s = decode(spec);
  size_t i = 0;
  char32_t fill = ' ', align = 0;
  const auto is_align = [](char32_t c) { return c == '<' || c == '>' || c == '^' || c == '='; };
  if (s.size() > 1 && is_align(s[1])) {
    fill = s[0];
    align = s[1];
    i = 2;
  } else if (!s.empty() && is_align(s[0])) {
    align = s[0];
    i = 1;
  }
  const auto take = [&](std::u32string_view any) -> char32_t {
    return i < s.size() && any.find(s[i]) != std::u32string_view::npos ? s[i++] : U'\0';
  };
  const char32_t sign_mode = take(U"+- ");
  const bool alternate = take(U"#");
  if (take(U"0")) {
    if (!align) {
      fill = '0';
      align = value.is_string() ? '<' : '=';
    }
  }
  const auto number = [&] {
    Int n = 0;
    for (; i < s.size() && s[i] >= '0' && s[i] <= '9'; ++i) n = std::min<Int>(n * 10 + static_cast<Int>(s[i] - '0'), kMaxWidth + 1);
    if (n > kMaxWidth) throw ValueError("width or precision too big");
    return n;
  };
  const Int width = number();
  const char32_t grouping = take(U",_");
  Int precision = -1;
  if (i < s.size() && s[i] == '.') {
    ++i;
    if (i >= s.size() || s[i] < '0' || s[i] > '9') throw ValueError("Format specifier missing precision");
    precision = number();
  }
  char32_t type = i < s.size() ? s[i++] : U'\0';
  if (i != s.size()) throw ValueError("Invalid format specifier");
  std::string sign, body;
  const auto unknown = [&] {
    throw ValueError(std::string("Unknown format code '") + encode(CodePoints(1, type)) + "' for object of type '" + type_name(value) +
                     "'");
  };
  const auto set_sign = [&](bool negative) { sign = negative ? "-" : sign_mode == '+' ? "+" : sign_mode == ' ' ? " " : ""; };
  const auto group = [&](std::string& text, size_t by, char with) {
    size_t end = 0;
    while (end < text.size() && std::isalnum(static_cast<unsigned char>(text[end]))) ++end;
    if (text.find('e') < end) end = text.find('e');
    for (size_t at = end; at > by;) {
      at -= by;
      text.insert(at, 1, with);
    }
  };
  if (value.is_string()) {
    if (type && type != 's') unknown();
    if (sign_mode) throw ValueError("Sign not allowed in string format specifier");
    if (align == '=') throw ValueError("'=' alignment not allowed in string format specifier");
    if (grouping) throw ValueError("Cannot specify ',' with 's'.");
    body = cut(value.text(), precision);
    if (!align) align = '<';
  } else if (value.is_integral() &&
             (type == 0 || type == 'd' || type == 'n' || type == 'x' || type == 'X' || type == 'o' || type == 'b' || type == 'c')) {
    if (value.is(Kind::kBool) && type == 0 && !grouping && precision < 0) {
      body = str(Value::integer(value.as_int()));
    } else if (type == 'c') {
      append_utf8(body, static_cast<char32_t>(value.as_int()));
    } else {
      if (precision >= 0) throw ValueError("Precision not allowed in integer format specifier");
      const int base = type == 'x' || type == 'X' ? 16 : type == 'o' ? 8 : type == 'b' ? 2 : 10;
      body = digits_of(value.as_int(), base, type == 'X');
      set_sign(value.as_int() < 0);
      if (grouping) group(body, base == 10 ? 3 : 4, static_cast<char>(grouping));
      if (alternate && base != 10) sign += std::string("0") + static_cast<char>(type);
    }
  } else {
    const double d = value.as_real();
    if (type == 0 && precision < 0) {
      body = repr_real(std::fabs(d));
    } else if (type == 0) {
      // Like 'g', with at least one digit after the point.
      body = printf_real(std::fabs(d), 'g', std::max(1, static_cast<int>(precision)), false);
      if (body.find_first_of(".enai") == std::string::npos) body += ".0";
    } else if (type == '%') {
      body = printf_real(std::fabs(d) * 100, 'f', precision < 0 ? 6 : static_cast<int>(precision), alternate) + "%";
    } else if (type == 'e' || type == 'E' || type == 'f' || type == 'F' || type == 'g' || type == 'G' || type == 'n') {
      body = printf_real(std::fabs(d), type == 'n' ? 'g' : static_cast<char>(type), precision < 0 ? 6 : static_cast<int>(precision),
                         alternate);
    } else {
      unknown();
    }
    set_sign(std::signbit(d) && !std::isnan(d));
    if (grouping) group(body, 3, static_cast<char>(grouping));
  }
  if (!align) align = '>';
  const Int pad = width - static_cast<Int>(count_points(sign) + count_points(body));
  if (pad <= 0) return sign + body;
  const auto filled = [&](Int n) {
    std::string out;
    for (Int k = 0; k < n; ++k) append_utf8(out, fill);
    return out;
  };
  if (align == '<') return sign + body + filled(pad);
  if (align == '=') return sign + filled(pad) + body;
  if (align == '^') return filled(pad / 2) + sign + body + filled(pad - pad / 2);
  return filled(pad) + sign + body;
}

struct BraceFormatter {
  Interpreter& in;
  Args& args;
  bool markup;
  size_t automatic = 0;
  bool manual = false;

  Value field(const std::string& name) {
    size_t end = name.find_first_of(".[");
    if (end == std::string::npos) end = name.size();
    const std::string first = name.substr(0, end);
    Value v;
    if (first.empty() || std::all_of(first.begin(), first.end(), [](char c) { return c >= '0' && c <= '9'; })) {
      if (first.empty() ? manual : automatic > 0)
        throw ValueError("cannot switch between manual field specification and automatic field numbering");
      manual = !first.empty();
      const size_t index = first.empty() ? automatic++ : std::strtoull(first.c_str(), nullptr, 10);
      if (index >= args.positional.size())
        throw Error("Replacement index " + std::to_string(index) + " out of range for positional args tuple");
      v = args.positional[index];
    } else {
      const auto at = std::find_if(args.named.begin(), args.named.end(), [&](const auto& n) { return n.first == first; });
      if (at == args.named.end()) throw Error(repr_string(first));
      v = at->second;
    }
    while (end < name.size()) {
      if (name[end] == '.') {
        size_t stop = name.find_first_of(".[", end + 1);
        if (stop == std::string::npos) stop = name.size();
        if (stop == end + 1) throw ValueError("Empty attribute in format string");
        v = attribute(in, v, name.substr(end + 1, stop - end - 1));
        end = stop;
      } else {
        const size_t close = name.find(']', end);
        if (close == std::string::npos) throw ValueError("Missing ']' in format string");
        const std::string key = name.substr(end + 1, close - end - 1);
        if (key.empty()) throw ValueError("Empty attribute in format string");
        const bool number = std::all_of(key.begin(), key.end(), [](char c) { return c >= '0' && c <= '9'; });
        v = item(in, v, number ? Value::integer(static_cast<Int>(std::strtoull(key.c_str(), nullptr, 10))) : Value::string(key));
        end = close + 1;
        if (end < name.size() && name[end] != '.' && name[end] != '[')
          throw ValueError("Only '.' or '[' may follow ']' in format field specifier");
      }
    }
    return v;
  }

  std::string run(const std::string& f, int depth) {
    if (depth > 2) throw ValueError("Max string recursion exceeded");
    std::string out;
    for (size_t i = 0; i < f.size(); ++i) {
      if (f[i] == '}') {
        if (i + 1 >= f.size() || f[i + 1] != '}') throw ValueError("Single '}' encountered in format string");
        out += f[i++];
        continue;
      }
      if (f[i] != '{') {
        out += f[i];
        continue;
      }
      if (i + 1 < f.size() && f[i + 1] == '{') {
        out += f[i++];
        continue;
      }
      size_t end = i + 1;
      for (int open = 1; end < f.size(); ++end) {
        if (f[end] == '{') ++open;
        if (f[end] == '}' && --open == 0) break;
      }
      if (end >= f.size())
        throw ValueError(i + 1 >= f.size() ? "Single '{' encountered in format string" : "expected '}' before end of string");
      const std::string inside = f.substr(i + 1, end - i - 1);
      size_t stop = 0;
      for (int bracket = 0; stop < inside.size(); ++stop) {
        if (inside[stop] == '[') ++bracket;
        if (inside[stop] == ']') --bracket;
        if (bracket <= 0 && (inside[stop] == '!' || inside[stop] == ':')) break;
      }
      Value v = field(inside.substr(0, stop));
      if (stop < inside.size() && inside[stop] == '!') {
        if (stop + 1 >= inside.size()) throw ValueError("end of string while looking for conversion specifier");
        const char how = inside[stop + 1];
        if (how == 'r') v = Value::string(repr(v));
        else if (how == 's') v = Value::string(str(v));
        else if (how == 'a') v = Value::string(ascii_repr(v));
        else throw ValueError(std::string("Unknown conversion specifier ") + how);
        stop += 2;
        if (stop < inside.size() && inside[stop] != ':') throw ValueError("expected ':' after conversion specifier");
      }
      const std::string spec = stop < inside.size() ? run(inside.substr(stop + 1), depth + 1) : "";
      const std::string text = format_spec(v, spec);
      out += markup && depth == 1 && !v.markup() ? escape_html(text) : text;
      in.check_size(out.size());
      i = end;
    }
    return out;
  }
};

}  // namespace

Value format_braces(Interpreter& in, const std::string& format, Args& args, bool markup) {
  BraceFormatter formatter{in, args, markup};
  return Value::string(formatter.run(format, 1), markup);
}

}  // namespace ddtree::jinja
