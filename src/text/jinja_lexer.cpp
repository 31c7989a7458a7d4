#include <charconv>
#include <cmath>
#include <cstring>

#include "text/jinja_ast.h"
#include "text/jinja_strings.h"

namespace ddtree::jinja {
namespace {

[[noreturn]] void fail(std::string message, int line) { throw Error(Failure::Kind::kSyntax, std::move(message), line); }

std::string normalize_newlines(std::string_view source) {
  std::string out;
  out.reserve(source.size());
  for (size_t i = 0; i < source.size(); ++i) {
    if (source[i] == '\r') {
      out += '\n';
      if (i + 1 < source.size() && source[i + 1] == '\n') ++i;
    } else {
      out += source[i];
    }
  }
  return out;
}

class Lexer {
 public:
  explicit Lexer(std::string source) : source_(std::move(source)) {}

  std::vector<Token> run() {
    if (!source_.empty() && source_.back() == '\n') source_.pop_back();  // keep_trailing_newline is off
    while (at_ < source_.size()) data();
    add(Token::Type::kEnd, "");
    return std::move(tokens_);
  }

  std::vector<Token> run_expression() {
    while (skip_space(), at_ < source_.size()) expression_token();
    add(Token::Type::kEnd, "");
    return std::move(tokens_);
  }

 private:
  bool next_is(std::string_view text) const { return std::string_view(source_).substr(at_, text.size()) == text; }
  void add(Token::Type type, std::string text) {
    Token t;
    t.type = type;
    t.line = line_;
    t.text = std::move(text);
    tokens_.push_back(std::move(t));
  }
  // Moves on by n bytes, counting lines.
  void skip(size_t n) {
    for (size_t i = 0; i < n; ++i) line_ += source_[at_ + i] == '\n';
    if (n) line_starting_ = source_[at_ + n - 1] == '\n';
    at_ += n;
  }
  void skip_space() {
    while (at_ < source_.size()) {
      const auto rest = std::string_view(source_).substr(at_);
      const size_t n = rest.size() - strip(rest, nullptr, 1).size();
      if (n == 0) return;
      skip(n);
    }
  }
  void skip_newline() {
    if (at_ < source_.size() && source_[at_] == '\n') skip(1);
  }

  // Text up to the next tag, which opens with '-' (strips the text's end), '+' (keeps it) or neither (lstrip_blocks, not for variables).
  void add_text(size_t end, char sign, bool variable) {
    std::string_view text = std::string_view(source_).substr(at_, end - at_);
    std::string_view kept = text;
    if (sign == '-') {
      kept = strip(text, nullptr, 2);
    } else if (sign != '+' && !variable) {
      const size_t newline = text.rfind('\n');
      const size_t line_start = newline == std::string_view::npos ? 0 : newline + 1;
      const auto indent = text.substr(line_start);
      if ((line_start > 0 || line_starting_) && !indent.empty() && strip(indent, nullptr, 1).empty()) kept = text.substr(0, line_start);
    }
    if (!kept.empty()) add(Token::Type::kData, std::string(kept));
    skip(text.size());
  }

  void data() {
    size_t open = at_;
    for (;; ++open) {
      open = source_.find('{', open);
      if (open == std::string::npos || open + 1 >= source_.size()) {
        add(Token::Type::kData, source_.substr(at_));
        at_ = source_.size();
        return;
      }
      const char c = source_[open + 1];
      if (c == '%' || c == '{' || c == '#') break;
    }
    const char what = source_[open + 1];
    char sign = open + 2 < source_.size() ? source_[open + 2] : '\0';
    if (sign != '-' && sign != '+') sign = '\0';
    add_text(open, sign, what == '{');
    const int line = line_;
    const size_t begin = 2 + (sign ? 1 : 0);
    if (what == '#') return comment(begin, line);
    if (what == '%' && raw(begin, line)) return;
    add(what == '{' ? Token::Type::kVariableBegin : Token::Type::kBlockBegin, "");
    skip(begin);
    balance_.clear();
    while (!tag_end(what == '{')) {
      skip_space();
      if (at_ >= source_.size()) fail(std::string("unexpected end of template, expected '") + (what == '{' ? "}}" : "%}") + "'", line);
      if (tag_end(what == '{')) break;
      expression_token();
    }
  }

  void comment(size_t begin, int line) {
    const size_t end = source_.find("#}", at_ + begin);
    if (end == std::string::npos) fail("Missing end of comment tag", line);
    const char sign = end > at_ + begin ? source_[end - 1] : '\0';
    skip(end + 2 - at_);
    if (sign == '-') skip_space();
    else if (sign != '+') skip_newline();
  }

  // {% raw %} ... {% endraw %}
  bool raw(size_t begin, int line) {
    const std::string_view all(source_);
    const auto word = [&](size_t from, std::string_view name, size_t& end, char& sign) {  // "  name  -%}"
      auto rest = strip(all.substr(from), nullptr, 1);
      if (rest.substr(0, name.size()) != name) return false;
      rest = strip(rest.substr(name.size()), nullptr, 1);
      sign = '\0';
      if (!rest.empty() && (rest[0] == '-' || rest[0] == '+')) {
        sign = rest[0];
        rest.remove_prefix(1);
      }
      if (rest.substr(0, 2) != "%}") return false;
      end = static_cast<size_t>(rest.data() - all.data()) + 2;
      return true;
    };
    size_t end;
    char sign;
    if (!word(at_ + begin, "raw", end, sign) || sign == '+') return false;
    skip(end - at_);
    if (sign == '-') skip_space();
    for (size_t tag = at_;; ++tag) {
      tag = source_.find("{%", tag);
      if (tag == std::string::npos) fail("Missing end of raw directive", line);
      const char open_sign = tag + 2 < source_.size() ? source_[tag + 2] : '\0';
      const bool signed_tag = open_sign == '-' || open_sign == '+';
      if (!word(tag + 2 + (signed_tag ? 1 : 0), "endraw", end, sign)) continue;
      add_text(tag, signed_tag ? open_sign : '\0', false);
      skip(end - at_);
      if (sign == '-') skip_space();
      else if (sign != '+') skip_newline();
      return true;
    }
  }

  bool tag_end(bool variable) {
    if (!balance_.empty()) return false;
    if (variable) {
      if (next_is("-}}")) {
        add(Token::Type::kVariableEnd, "");
        skip(3);
        skip_space();
        return true;
      }
      if (next_is("}}")) {
        add(Token::Type::kVariableEnd, "");
        skip(2);
        return true;
      }
      return false;
    }
    if (next_is("-%}") || next_is("+%}")) {
      const bool minus = source_[at_] == '-';
      add(Token::Type::kBlockEnd, "");
      skip(3);
      if (minus) skip_space();
      return true;
    }
    if (next_is("%}")) {
      add(Token::Type::kBlockEnd, "");
      skip(2);
      skip_newline();  // trim_blocks
      return true;
    }
    return false;
  }

  static bool digit(char c) { return c >= '0' && c <= '9'; }

  // A run of digits with single underscores between them, from `i`; returns its end.
  size_t digits(size_t i) const {
    if (i >= source_.size() || !digit(source_[i])) return i;
    while (i < source_.size() && (digit(source_[i]) || (source_[i] == '_' && i + 1 < source_.size() && digit(source_[i + 1])))) ++i;
    return i;
  }

  void number() {
    const size_t from = at_;
    size_t end = digits(from);
    bool real = false;
    const bool after_dot = from > 0 && source_[from - 1] == '.';  // a.0.1: indices, not a float
    if (!after_dot) {
      size_t fraction = end;
      if (fraction + 1 < source_.size() && source_[fraction] == '.' && digit(source_[fraction + 1])) {
        fraction = digits(fraction + 1);
        real = true;
      }
      size_t exponent = fraction;
      if (exponent < source_.size() && (source_[exponent] == 'e' || source_[exponent] == 'E')) {
        ++exponent;
        if (exponent < source_.size() && (source_[exponent] == '+' || source_[exponent] == '-')) ++exponent;
        const size_t after = digits(exponent);
        if (after > exponent) {
          real = true;
          fraction = after;
        }
      }
      if (real) end = fraction;
    }
    if (real) {
      std::string text;
      for (size_t i = from; i < end; ++i)
        if (source_[i] != '_') text += source_[i];
      add(Token::Type::kFloat, text);
      tokens_.back().real = std::strtod(text.c_str(), nullptr);
      skip(end - from);
      return;
    }
    int base = 10;
    size_t i = from;
    if (source_[from] == '0' && from + 1 < source_.size()) {
      const char c = static_cast<char>(source_[from + 1] | 0x20);
      base = c == 'x' ? 16 : c == 'o' ? 8 : c == 'b' ? 2 : 10;
      if (base != 10) i += 2;
    }
    const size_t first = i;
    Int value = 0;
    for (; i < source_.size(); ++i) {
      const char c = source_[i];
      if (c == '_' && (i > first || base != 10) && i + 1 < source_.size() && std::isalnum(static_cast<unsigned char>(source_[i + 1])))
        continue;
      const int d = digit(c) ? c - '0' : std::isalpha(static_cast<unsigned char>(c)) ? (c | 0x20) - 'a' + 10 : 99;
      if (d >= base) break;
      // Decimal literals other than zero do not start with one.
      if (base == 10 && i > first && source_[first] == '0' && d != 0) fail("an integer does not start with 0", line_);
      if (value > (static_cast<Int>(1) << 120)) fail("the integer is too large", line_);
      value = value * base + d;
    }
    if (i == first) fail("a number has no digits", line_);
    add(Token::Type::kInteger, source_.substr(from, i - from));
    tokens_.back().integer = value;
    skip(i - from);
  }

  void string_literal() {
    const int line = line_;
    const char quote = source_[at_];
    size_t i = at_ + 1;
    std::string out;
    const auto hex = [&](size_t n) {
      unsigned value = 0;
      for (size_t k = 0; k < n; ++k) {
        const char c = ++i < source_.size() ? source_[i] : '\0';
        if (!std::isxdigit(static_cast<unsigned char>(c))) fail("a string's \\x, \\u or \\U escape has too few hexadecimal digits", line);
        value = value * 16 + static_cast<unsigned>(digit(c) ? c - '0' : (c | 0x20) - 'a' + 10);
      }
      return value;
    };
    for (;; ++i) {
      if (i >= source_.size()) fail("a string is not closed", line);
      const char c = source_[i];
      if (c == quote) break;
      if (c != '\\') {
        out += c;
        continue;
      }
      if (++i >= source_.size()) fail("a string is not closed", line);
      switch (source_[i]) {
        case '\n': break;
        case '\\': out += '\\'; break;
        case '\'': out += '\''; break;
        case '"': out += '"'; break;
        case 'a': out += '\a'; break;
        case 'b': out += '\b'; break;
        case 'f': out += '\f'; break;
        case 'n': out += '\n'; break;
        case 'r': out += '\r'; break;
        case 't': out += '\t'; break;
        case 'v': out += '\v'; break;
        case 'x': append_utf8(out, hex(2)); break;
        case 'u':
        case 'U': {
          char32_t point = hex(source_[i] == 'u' ? 4 : 8);
          if (point >= 0xD800 && point < 0xDC00 && source_.compare(i + 1, 2, "\\u") == 0) {  // a pair written as two escapes
            i += 2;
            const char32_t low = hex(4);
            if (low >= 0xDC00 && low < 0xE000) point = 0x10000 + ((point - 0xD800) << 10) + (low - 0xDC00);
            else point = 0xFFFD;
          }
          if (point > 0x10FFFF) fail("a string's \\U escape is beyond Unicode", line);
          if (point >= 0xD800 && point < 0xE000) point = 0xFFFD;
          append_utf8(out, point);
          break;
        }
        case 'N': fail("named characters (\\N{...}) are not known", line);
        case '0':
        case '1':
        case '2':
        case '3':
        case '4':
        case '5':
        case '6':
        case '7': {
          unsigned value = 0;
          size_t k = 0;
          for (; k < 3 && i + k < source_.size() && source_[i + k] >= '0' && source_[i + k] <= '7'; ++k)
            value = value * 8 + static_cast<unsigned>(source_[i + k] - '0');
          i += k - 1;
          append_utf8(out, value);
          break;
        }
        default:
          out += '\\';
          --i;  // the character itself is taken in the next round
          if (static_cast<unsigned char>(source_[i + 1]) < 0x80) out += source_[++i];
      }
    }
    add(Token::Type::kString, std::move(out));
    skip(i + 1 - at_);
  }

  void expression_token() {
    const char c = source_[at_];
    if (c == '"' || c == '\'') return string_literal();
    if (digit(c)) return number();
    size_t end = at_;
    for (const auto* bytes = source_.data(); end < source_.size();) {
      if (static_cast<unsigned char>(bytes[end]) < 0x80) {
        if (!std::isalnum(static_cast<unsigned char>(bytes[end])) && bytes[end] != '_') break;
        ++end;
      } else {
        size_t n = 1;
        while (end + n < source_.size() && (static_cast<unsigned char>(bytes[end + n]) & 0xC0) == 0x80) ++n;
        if (!is_word(decode(std::string_view(source_).substr(end, n))[0])) break;
        end += n;
      }
    }
    if (end > at_) {
      add(Token::Type::kName, source_.substr(at_, end - at_));
      skip(end - at_);
      return;
    }
    static constexpr std::string_view kTwo[] = {"//", "**", "==", "!=", ">=", "<="};
    for (const auto op : kTwo)
      if (next_is(op)) {
        add(Token::Type::kOperator, std::string(op));
        return skip(2);
      }
    if (!std::strchr("+-/*%~[](){}><=.:|,;", c)) {
      size_t n = 1;
      while (at_ + n < source_.size() && (static_cast<unsigned char>(source_[at_ + n]) & 0xC0) == 0x80) ++n;
      fail("unexpected char " + repr_string(source_.substr(at_, n)), line_);
    }
    if (c == '(' || c == '[' || c == '{') balance_ += c == '(' ? ')' : c == '[' ? ']' : '}';
    if (c == ')' || c == ']' || c == '}') {
      if (balance_.empty()) fail(std::string("unexpected '") + c + "'", line_);
      if (balance_.back() != c) fail(std::string("unexpected '") + c + "', expected '" + balance_.back() + "'", line_);
      balance_.pop_back();
    }
    add(Token::Type::kOperator, std::string(1, c));
    skip(1);
  }

  std::string source_;
  size_t at_ = 0;
  int line_ = 1;
  bool line_starting_ = true;
  std::string balance_;  // closing brackets that are due
  std::vector<Token> tokens_;
};

}  // namespace

std::vector<Token> tokenize(std::string_view source) { return Lexer(normalize_newlines(source)).run(); }
std::vector<Token> tokenize_expression(std::string_view source) { return Lexer(normalize_newlines(source)).run_expression(); }

}  // namespace ddtree::jinja
