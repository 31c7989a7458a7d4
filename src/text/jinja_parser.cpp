#include <algorithm>
#include <initializer_list>

#include "text/jinja_ast.h"

namespace ddtree::jinja {
namespace {

using T = Token::Type;
using E = Expr::Type;
constexpr int kMaxNesting = 300;
constexpr int kMaxChain = 700;  // a + b + c ...: a left-deep tree, walked by recursion

[[noreturn]] void fail(std::string message, int line) { throw Error(Failure::Kind::kSyntax, std::move(message), line); }

std::string describe(const Token& token) {
  switch (token.type) {
    case T::kData: return "template data / text";
    case T::kVariableBegin: return "begin of print statement";
    case T::kVariableEnd: return "end of print statement";
    case T::kBlockBegin: return "begin of statement block";
    case T::kBlockEnd: return "end of statement block";
    case T::kEnd: return "end of template";
    default: return "'" + token.text + "'";
  }
}

class Parser {
 public:
  Parser(std::vector<Token> tokens, Program& program) : tokens_(std::move(tokens)), program_(program) {}

  Body document() {
    Body out = statements({});
    if (now().type != T::kEnd) fail("unexpected " + describe(now()), now().line);
    return out;
  }
  ExprPtr lone_expression() {
    ExprPtr e = tuple(false, true, {}, false);
    if (now().type != T::kEnd) fail("unexpected " + describe(now()), now().line);
    return e;
  }

 private:
  using Words = std::initializer_list<std::string_view>;
  struct Nesting {  // guards the C++ stack
    explicit Nesting(Parser& p) : parser(p) {
      if (++parser.depth_ > kMaxNesting) fail("nested more than 300 levels deep", parser.now().line);
    }
    ~Nesting() { --parser.depth_; }
    Parser& parser;
  };

  static void check_chain(int& length, int line) {
    if (++length > kMaxChain) fail("more than 700 operators, filters or calls in one chain", line);
  }

  const Token& now() const { return tokens_[at_]; }
  const Token& look() const { return tokens_[std::min(at_ + 1, tokens_.size() - 1)]; }
  Token take() {
    Token t = now();
    if (at_ + 1 < tokens_.size()) ++at_;
    return t;
  }
  bool is_op(std::string_view op) const { return now().type == T::kOperator && now().text == op; }
  bool is_word(std::string_view word) const { return now().type == T::kName && now().text == word; }
  bool is_any(Words words) const {
    return std::any_of(words.begin(), words.end(), [&](auto w) { return is_word(w); });
  }
  bool skip_op(std::string_view op) { return is_op(op) && (take(), true); }
  bool skip_word(std::string_view word) { return is_word(word) && (take(), true); }
  void expect_op(std::string_view op) {
    if (!skip_op(op)) fail("expected token '" + std::string(op) + "', got " + describe(now()), now().line);
  }
  void expect_word(std::string_view word) {
    if (!skip_word(word)) fail("expected token '" + std::string(word) + "', got " + describe(now()), now().line);
  }
  Token expect(T type, const char* what) {
    if (now().type != type) fail(std::string("expected ") + what + ", got " + describe(now()), now().line);
    return take();
  }
  std::string expect_name() { return expect(T::kName, "a name").text; }

  ExprPtr make(E type, int line) { return std::make_unique<Expr>(type, line); }
  ExprPtr constant(Value value, int line) {
    ExprPtr e = make(E::kConst, line);
    e->constant = std::move(value);
    return e;
  }
  template <class... Parts>
  ExprPtr node(E type, int line, Parts... parts) {
    ExprPtr e = make(type, line);
    (e->args.push_back(std::move(parts)), ...);
    return e;
  }
  ExprPtr name_expr(const std::string& name, int line) {
    ExprPtr e = make(E::kName, line);
    e->text = name;
    e->name = program_.intern(name);
    return e;
  }

  // --- expressions, loosest first ---------------------------------------------------------------------------------------------
  ExprPtr expression(bool with_condition = true) {
    const Nesting guard(*this);
    if (!with_condition) return either();
    int line = now().line;
    ExprPtr value = either();
    int chain = 0;
    while (skip_word("if")) {
      check_chain(chain, line);
      ExprPtr test = either();
      ExprPtr otherwise = skip_word("else") ? expression() : nullptr;
      value = node(E::kCondition, line, std::move(test), std::move(value), std::move(otherwise));
      line = now().line;
    }
    return value;
  }
  ExprPtr either() {
    const int line = now().line;
    ExprPtr left = both();
    int chain = 0;
    while (skip_word("or")) check_chain(chain, line), left = node(E::kOr, line, std::move(left), both());
    return left;
  }
  ExprPtr both() {
    const int line = now().line;
    ExprPtr left = negation();
    int chain = 0;
    while (skip_word("and")) check_chain(chain, line), left = node(E::kAnd, line, std::move(left), negation());
    return left;
  }
  ExprPtr negation() {
    if (!is_word("not")) return comparison();
    const Nesting guard(*this);
    const int line = take().line;
    return node(E::kNot, line, negation());
  }
  ExprPtr comparison() {
    ExprPtr first = sum();
    ExprPtr out;
    const auto add = [&](std::string op) {
      if (!out) {
        out = make(E::kCompare, first->line);
        out->args.push_back(std::move(first));
      }
      out->ops.push_back(std::move(op));
      out->args.push_back(sum());
    };
    for (;;) {
      if (now().type == T::kOperator && (now().text == "==" || now().text == "!=" || now().text == "<" || now().text == "<=" ||
                                         now().text == ">" || now().text == ">=")) {
        add(take().text);
      } else if (skip_word("in")) {
        add("in");
      } else if (is_word("not") && look().type == T::kName && look().text == "in") {
        take();
        take();
        add("not in");
      } else {
        return out ? std::move(out) : std::move(first);
      }
    }
  }
  ExprPtr sum() {
    ExprPtr left = concat();
    int chain = 0;
    while (is_op("+") || is_op("-")) {
      const Token op = take();
      check_chain(chain, op.line);
      left = node(op.text == "+" ? E::kAdd : E::kSubtract, op.line, std::move(left), concat());
    }
    return left;
  }
  ExprPtr concat() {
    ExprPtr first = product();
    if (!is_op("~")) return first;
    ExprPtr out = make(E::kConcat, first->line);
    out->args.push_back(std::move(first));
    while (skip_op("~")) out->args.push_back(product());
    return out;
  }
  ExprPtr product() {
    ExprPtr left = power();
    for (int chain = 0;; check_chain(chain, now().line)) {
      const E type = is_op("*")    ? E::kMultiply
                     : is_op("/")  ? E::kDivide
                     : is_op("//") ? E::kFloorDivide
                     : is_op("%")  ? E::kModulo
                                   : E::kConst;
      if (type == E::kConst) return left;
      const int line = take().line;
      left = node(type, line, std::move(left), power());
    }
  }
  // Jinja2's ** binds to the left, unlike Python's.
  ExprPtr power() {
    ExprPtr left = unary(true);
    int chain = 0;
    while (is_op("**")) {
      const int line = take().line;
      check_chain(chain, line);
      left = node(E::kPower, line, std::move(left), unary(true));
    }
    return left;
  }
  ExprPtr unary(bool with_filter) {
    const Nesting guard(*this);
    ExprPtr e;
    if (is_op("-") || is_op("+")) {
      const Token op = take();
      e = node(op.text == "-" ? E::kNegative : E::kPositive, op.line, unary(false));
    } else {
      e = primary(false);
    }
    e = postfix(std::move(e));
    return with_filter ? filters(std::move(e)) : std::move(e);
  }
  ExprPtr primary(bool with_namespace) {
    const Nesting guard(*this);
    const Token token = now();
    const int line = token.line;
    switch (token.type) {
      case T::kName:
        take();
        if (token.text == "true" || token.text == "True") return constant(Value::boolean(true), line);
        if (token.text == "false" || token.text == "False") return constant(Value::boolean(false), line);
        if (token.text == "none" || token.text == "None") return constant(Value::none(), line);
        if (with_namespace && skip_op(".")) {
          ExprPtr e = name_expr(token.text, line);
          e->type = E::kNamespaceTarget;
          e->text = expect_name();
          return e;
        }
        return name_expr(token.text, line);
      case T::kString: {
        std::string text;
        while (now().type == T::kString) text += take().text;
        return constant(Value::string(std::move(text)), line);
      }
      case T::kInteger: take(); return constant(Value::integer(token.integer), line);
      case T::kFloat: take(); return constant(Value::real(token.real), line);
      case T::kOperator:
        if (skip_op("(")) {
          ExprPtr e = tuple(false, true, {}, true);
          expect_op(")");
          return e;
        }
        if (skip_op("[")) {
          ExprPtr e = make(E::kList, line);
          while (!is_op("]")) {
            if (!e->args.empty()) expect_op(",");
            if (is_op("]")) break;
            e->args.push_back(expression());
          }
          expect_op("]");
          return e;
        }
        if (skip_op("{")) {
          ExprPtr e = make(E::kDict, line);
          while (!is_op("}")) {
            if (!e->args.empty()) expect_op(",");
            if (is_op("}")) break;
            e->args.push_back(expression());
            expect_op(":");
            e->args.push_back(expression());
          }
          expect_op("}");
          return e;
        }
        [[fallthrough]];
      default: fail("unexpected " + describe(token), line);
    }
  }

  bool tuple_end(Words extra) const {
    return now().type == T::kVariableEnd || now().type == T::kBlockEnd || now().type == T::kEnd || is_op(")") || is_any(extra);
  }

  ExprPtr tuple(bool targets, bool with_condition, Words extra_end, bool parentheses, bool with_namespace = false) {
    const Nesting guard(*this);
    const int line = now().line;
    ExprPtr out = make(E::kTuple, line);
    bool commas = false;
    for (;;) {
      if (!out->args.empty()) expect_op(",");
      if (tuple_end(extra_end)) break;
      out->args.push_back(targets ? primary(with_namespace) : expression(with_condition));
      if (!is_op(",")) break;
      commas = true;
    }
    if (commas) return out;
    if (!out->args.empty()) return std::move(out->args[0]);
    if (!parentheses) fail("Expected an expression, got " + describe(now()), now().line);
    return out;
  }

  ExprPtr postfix(ExprPtr e) {
    for (int chain = 0;; check_chain(chain, now().line)) {
      if (is_op(".") || is_op("[")) e = subscript(std::move(e));
      else if (is_op("(")) e = call(std::move(e));
      else return e;
    }
  }
  ExprPtr filters(ExprPtr e) {
    for (int chain = 0;; check_chain(chain, now().line)) {
      if (is_op("|")) e = filter(std::move(e), false);
      else if (is_word("is")) e = test(std::move(e));
      else if (is_op("(")) e = call(std::move(e));
      else return e;
    }
  }

  ExprPtr subscript(ExprPtr object) {
    const Token open = take();
    if (open.text == ".") {
      const Token attribute = take();
      if (attribute.type == T::kName) {
        ExprPtr e = node(E::kAttribute, open.line, std::move(object));
        e->text = attribute.text;
        return e;
      }
      if (attribute.type != T::kInteger) fail("expected name or number", attribute.line);
      return node(E::kItem, open.line, std::move(object), constant(Value::integer(attribute.integer), open.line));
    }
    ExprPtr keys = make(E::kTuple, open.line);
    while (!is_op("]")) {
      if (!keys->args.empty()) expect_op(",");
      keys->args.push_back(subscribed());
    }
    expect_op("]");
    if (keys->args.size() == 1) return node(E::kItem, open.line, std::move(object), std::move(keys->args[0]));
    return node(E::kItem, open.line, std::move(object), std::move(keys));
  }
  ExprPtr subscribed() {
    const int line = now().line;
    ExprPtr start, stop, step;
    if (!is_op(":")) {
      start = expression();
      if (!is_op(":")) return start;
    }
    expect_op(":");
    if (!is_op(":") && !is_op("]") && !is_op(",")) stop = expression();
    if (skip_op(":") && !is_op("]") && !is_op(",")) step = expression();
    return node(E::kSlice, line, std::move(start), std::move(stop), std::move(step));
  }

  Arguments arguments() {
    const int line = now().line;
    expect_op("(");
    Arguments out;
    const auto ensure = [&](bool right) {
      if (!right) fail("invalid syntax for function call expression", line);
    };
    for (bool comma = false; !is_op(")"); comma = true) {
      if (comma) {
        expect_op(",");
        if (is_op(")")) break;
      }
      if (skip_op("*")) {
        ensure(!out.star && !out.double_star);
        out.star = expression();
      } else if (skip_op("**")) {
        ensure(!out.double_star);
        out.double_star = expression();
      } else if (now().type == T::kName && look().type == T::kOperator && look().text == "=") {
        ensure(!out.double_star);
        std::string key = take().text;
        take();
        for (const auto& known : out.named)
          if (known.first == key) fail("keyword argument repeated: " + key, line);
        out.named.emplace_back(std::move(key), expression());
      } else {
        ensure(!out.star && !out.double_star && out.named.empty());
        out.positional.push_back(expression());
      }
    }
    expect_op(")");
    return out;
  }
  ExprPtr call(ExprPtr function) {
    ExprPtr e = node(E::kCall, now().line, std::move(function));
    e->call = arguments();
    return e;
  }
  std::string dotted_name() {
    std::string name = expect_name();
    while (skip_op(".")) name += "." + expect_name();
    return name;
  }
  ExprPtr filter(ExprPtr value, bool start_inline) {
    int chain = 0;
    while (is_op("|") || start_inline) {
      check_chain(chain, now().line);
      if (!start_inline) take();
      start_inline = false;
      const int line = now().line;
      ExprPtr e = node(E::kFilter, line, std::move(value));
      e->text = dotted_name();
      if (is_op("(")) e->call = arguments();
      value = std::move(e);
    }
    return value;
  }
  ExprPtr test(ExprPtr value) {
    const int line = take().line;
    const bool negated = skip_word("not");
    ExprPtr e = node(E::kTest, line, std::move(value));
    e->text = dotted_name();
    if (is_op("(")) {
      e->call = arguments();
    } else if ((now().type == T::kName || now().type == T::kString || now().type == T::kInteger || now().type == T::kFloat || is_op("[") ||
                is_op("{")) &&
               !is_any({"else", "or", "and"})) {
      if (is_word("is")) fail("You cannot chain multiple tests with is", now().line);
      e->call.positional.push_back(postfix(primary(false)));
    }
    return negated ? node(E::kNot, line, std::move(e)) : std::move(e);
  }

  // --- statements -----------------------------------------------------------------------------------------------------------------
  // Up to a tag named in `ends` (now() is its name), or the end of the template where there is none.
  Body statements(Words ends) {
    const Nesting guard(*this);
    Body out;
    while (now().type != T::kEnd) {
      const int line = now().line;
      if (now().type == T::kData) {
        out.push_back(std::make_unique<Stmt>(Stmt::Type::kText, line));
        out.back()->text = take().text;
      } else if (now().type == T::kVariableBegin) {
        take();
        out.push_back(std::make_unique<Stmt>(Stmt::Type::kOutput, line));
        out.back()->value = tuple(false, true, {}, false);
        expect(T::kVariableEnd, "end of print statement");
      } else {
        expect(T::kBlockBegin, "begin of statement block");
        if (is_any(ends)) return out;
        out.push_back(statement());
        expect(T::kBlockEnd, "end of statement block");
      }
    }
    if (ends.size() != 0) {
      std::string names;
      for (const auto end : ends) names += (names.empty() ? "'" : " or '") + std::string(end) + "'";
      const auto& [tag, line] = open_tags_.back();
      fail("Unexpected end of template. Jinja was looking for the following tags: " + names +
               ". The innermost block that needs to be closed is '" + tag + "' (line " + std::to_string(line) + ").",
           now().line);
    }
    return out;
  }
  Body block(Words ends, bool drop_end) {
    skip_op(":");
    expect(T::kBlockEnd, "end of statement block");
    Body out = statements(ends);
    if (drop_end) take();
    return out;
  }

  std::unique_ptr<Stmt> statement() {
    const Token tag = now();
    if (tag.type != T::kName) fail("tag name expected", tag.line);
    take();
    open_tags_.emplace_back(tag.text, tag.line);
    auto out = statement_of(tag.text, tag.line);
    open_tags_.pop_back();
    return out;
  }

  std::unique_ptr<Stmt> statement_of(const std::string& tag, int line) {
    using S = Stmt::Type;
    const auto make_stmt = [&](S type) { return std::make_unique<Stmt>(type, line); };
    if (tag == "if") return if_statement(line);
    if (tag == "for") return for_statement(line);
    if (tag == "set") {
      auto out = make_stmt(S::kSet);
      out->target = target({}, true);
      if (skip_op("=")) {
        out->value = tuple(false, true, {}, false);
      } else {
        out->type = S::kSetBlock;
        out->value = filter(nullptr, false);
        out->body = block({"endset"}, true);
      }
      return out;
    }
    if (tag == "macro") {
      auto out = make_stmt(S::kMacro);
      out->text = expect_name();
      check_assignable(out->text, line);
      out->name = program_.intern(out->text);
      signature(*out);
      out->body = block({"endmacro"}, true);
      return out;
    }
    if (tag == "call") {
      auto out = make_stmt(S::kCallBlock);
      if (is_op("(")) signature(*out);
      out->value = expression();
      if (out->value->type != E::kCall) fail("expected call", line);
      out->body = block({"endcall"}, true);
      return out;
    }
    if (tag == "filter") {
      auto out = make_stmt(S::kFilterBlock);
      out->value = filter(nullptr, true);
      out->body = block({"endfilter"}, true);
      return out;
    }
    if (tag == "with") {
      auto out = make_stmt(S::kWith);
      while (now().type != T::kBlockEnd) {
        if (!out->bindings.empty()) expect_op(",");
        ExprPtr to = target({}, false);
        expect_op("=");
        out->bindings.emplace_back(std::move(to), expression());
      }
      out->body = block({"endwith"}, true);
      return out;
    }
    if (tag == "generation") {
      auto out = make_stmt(S::kScope);
      out->body = block({"endgeneration"}, true);
      return out;
    }
    if (tag == "autoescape") {
      auto out = make_stmt(S::kScope);
      expression();
      out->body = block({"endautoescape"}, true);
      return out;
    }
    if (tag == "block") {
      auto out = make_stmt(S::kScope);
      const std::string name = expect_name();
      skip_word("scoped");
      skip_word("required");
      if (is_op("-"))
        fail("Block names in Jinja have to be valid Python identifiers and may not contain hyphens, use an underscore instead.", line);
      out->body = block({"endblock"}, true);
      skip_word(name);
      return out;
    }
    if (tag == "break" || tag == "continue") {
      if (loops_ == 0) fail("'" + tag + "' outside loop", line);
      return make_stmt(tag == "break" ? S::kBreak : S::kContinue);
    }
    if (tag == "include" || tag == "import" || tag == "from" || tag == "extends")
      fail("'" + tag + "' needs another template; a chat template stands alone, put its text in here", line);
    if (tag == "trans" || tag == "do" || tag == "debug")
      fail("Encountered unknown tag '" + tag + "': that Jinja2 extension is not part of the chat template environment", line);
    std::string message = "Encountered unknown tag '" + tag + "'.";
    if (open_tags_.size() > 1)
      message += " The innermost block that needs to be closed is '" + open_tags_[open_tags_.size() - 2].first + "'.";
    fail(message, line);
  }

  std::unique_ptr<Stmt> if_statement(int line) {
    auto out = std::make_unique<Stmt>(Stmt::Type::kIf, line);
    out->value = tuple(false, false, {}, false);
    out->body = block({"elif", "else", "endif"}, false);
    const Token end = take();
    if (end.text == "elif") {
      const Nesting guard(*this);  // a chain is a nest here
      out->otherwise.push_back(if_statement(end.line));
      out->otherwise.back()->recursive = true;  // marks it as an elif
    } else if (end.text == "else") {
      out->otherwise = block({"endif"}, true);
    }
    return out;
  }

  std::unique_ptr<Stmt> for_statement(int line) {
    auto out = std::make_unique<Stmt>(Stmt::Type::kFor, line);
    out->target = target({"in"}, false);
    expect_word("in");
    out->value = tuple(false, false, {"recursive"}, false);
    if (skip_word("if")) out->test = expression();
    out->recursive = skip_word("recursive");
    ++loops_;
    out->body = block({"endfor", "else"}, false);
    --loops_;
    if (take().text == "else") out->otherwise = block({"endfor"}, true);
    return out;
  }

  void signature(Stmt& out) {
    expect_op("(");
    while (!is_op(")")) {
      if (!out.parameters.empty()) expect_op(",");
      const Token name = expect(T::kName, "a name");
      check_assignable(name.text, name.line);
      const int id = program_.intern(name.text);
      if (std::find(out.parameters.begin(), out.parameters.end(), id) != out.parameters.end())
        fail("duplicate argument '" + name.text + "'", name.line);
      out.parameters.push_back(id);
      if (skip_op("=")) out.defaults.push_back(expression());
      else if (!out.defaults.empty()) fail("non-default argument follows default argument", name.line);
    }
    expect_op(")");
  }

  void check_assignable(const std::string& name, int line) {
    for (const std::string_view word : {"true", "false", "none", "True", "False", "None"})
      if (name == word) fail("can't assign to '" + name + "'", line);
  }
  void check_target(const Expr& e) {
    if (e.type == E::kTuple) {
      for (const auto& part : e.args) check_target(*part);
    } else if (e.type == E::kName) {
      if (e.text == "loop" && loop_targets_forbidden_) fail("Can't assign to special loop variable in for-loop", e.line);
    } else if (e.type != E::kNamespaceTarget) {
      fail("can't assign to this expression", e.line);
    }
  }
  ExprPtr target(Words extra_end, bool with_namespace) {
    loop_targets_forbidden_ = loops_ > 0 || extra_end.size() != 0;
    ExprPtr e = tuple(true, true, extra_end, false, with_namespace);
    check_target(*e);
    return e;
  }

  std::vector<Token> tokens_;
  Program& program_;
  size_t at_ = 0;
  int depth_ = 0;
  int loops_ = 0;
  bool loop_targets_forbidden_ = false;
  std::vector<std::pair<std::string, int>> open_tags_;
};

}  // namespace

std::shared_ptr<const Program> parse_program(std::string_view source) {
  auto program = std::make_shared<Program>();
  program->loop_name = program->intern("loop");
  program->caller_name = program->intern("caller");
  program->varargs_name = program->intern("varargs");
  program->kwargs_name = program->intern("kwargs");
  program->body = Parser(tokenize(source), *program).document();
  analyze(*program);
  return program;
}

ExprPtr parse_lone_expression(std::string_view source, Program& names) {
  return Parser(tokenize_expression(source), names).lone_expression();
}

}  // namespace ddtree::jinja
