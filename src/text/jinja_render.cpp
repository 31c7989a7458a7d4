#include "text/jinja_render.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "text/jinja_builtins.h"

namespace ddtree::jinja {

using E = Expr::Type;
using S = Stmt::Type;

class Interpreter::Depth {
 public:
  explicit Depth(Interpreter& in, int weight = 1) : in_(in), weight_(weight) {
    if ((in_.depth_ += weight_) > in_.limits_.depth * kPerCall) {
      in_.depth_ -= weight_;
      throw Error(Failure::Kind::kLimit,
                  "calls or expressions are nested too deeply (more than " + std::to_string(in_.limits_.depth) + " calls)");
    }
  }
  ~Depth() { in_.depth_ -= weight_; }
  static constexpr int kPerCall = 5;  // a macro call costs as much stack as about five nested expressions

 private:
  Interpreter& in_;
  int weight_;
};

class Interpreter::Enter {
 public:
  Enter(Interpreter& in, std::shared_ptr<Scope> scope) : in_(in), before_(std::exchange(in.scope_, std::move(scope))) {}
  ~Enter() { in_.scope_ = std::move(before_); }
  Enter(const Enter&) = delete;
  Enter& operator=(const Enter&) = delete;

 private:
  Interpreter& in_;
  std::shared_ptr<Scope> before_;
};

bool LoopData::peek() {
  if (after) return true;
  if (ended) return false;
  Value v;
  if (next(v)) {
    after = std::move(v);
    return true;
  }
  ended = true;
  return false;
}

bool LoopData::advance() {
  if (!peek()) return false;
  ++index0;
  before = std::move(current);
  current = std::move(*after);
  after.reset();
  return true;
}

Int LoopData::length() {
  if (!sized) {
    List rest;
    Value v;
    while (!ended && next(v)) rest.push_back(v);
    sized = static_cast<Int>(rest.size()) + index0 + 1 + (after ? 1 : 0);
    next = [list = std::move(rest), at = size_t{0}](Value& out) mutable {
      if (at == list.size()) return false;
      out = list[at++];
      return true;
    };
  }
  return *sized;
}

Interpreter::Interpreter(const Program& program, const Limits& limits, const DictData& variables, const DictData& globals)
    : program_(program), limits_(limits), variables_(variables), globals_(globals) {}

Interpreter::~Interpreter() {
  // Macros hold the scope that holds them, namespaces may hold themselves.
  for (const auto& scope : captured_scopes_) scope->names.clear();
  for (const auto& ns : namespaces_) ns->members = DictData();
}

void Interpreter::too_many_steps() const {
  throw Error(Failure::Kind::kLimit, "the template ran for more than " + std::to_string(limits_.steps) + " steps");
}

void Interpreter::check_size(size_t bytes) const {
  if (bytes > limits_.output_bytes)
    throw Error(Failure::Kind::kLimit, "a text or list grew beyond " + std::to_string(limits_.output_bytes) + " bytes");
}

void Interpreter::emit(std::string_view text) {
  check_size(captured_ + out_->size() + text.size());
  out_->append(text);
}

void Interpreter::emit_text(const Value& value) {
  if (!value.is_string())
    throw TypeError(std::string("a filter or call block has to make a text, not a value of type '") + type_name(value) + "'");
  emit(value.text());
}

template <class Run>
std::string Interpreter::capture(const Run& run) {
  std::string buffer;
  std::string* const before = std::exchange(out_, &buffer);
  captured_ += before->size();
  const auto restore = [&] {
    out_ = before;
    captured_ -= before->size();
  };
  try {
    run();
  } catch (...) {
    restore();
    throw;
  }
  restore();
  return buffer;
}

List Interpreter::iterate_counted(const Value& value) {
  if (value.is(Kind::kRange)) check_size(static_cast<size_t>(value.data<RangeData>().size()) * sizeof(Value));
  List out;
  if (value.is(Kind::kIterator)) {
    Value v;
    while (value.data<IteratorData>().next(v)) {
      step();
      out.push_back(v);
    }
    return out;
  }
  if (value.is(Kind::kLoop)) {  // a loop can be iterated itself: pairs of item and loop
    auto& loop = value.data<LoopData>();
    while (loop.advance()) {
      step();
      out.push_back(Value::tuple({loop.current, value}));
    }
    return out;
  }
  out = iterate(value);
  step(out.size());
  return out;
}

std::shared_ptr<Scope> Interpreter::child_of(std::shared_ptr<Scope> parent, const Missing& missing) {
  auto scope = std::make_shared<Scope>();
  scope->parent = std::move(parent);
  for (const int name : missing) scope->names.emplace_back(name, undefined_name(name));
  return scope;
}

Value Interpreter::undefined_name(int name) const {
  return Value::undefined("'" + program_.names[static_cast<size_t>(name)] + "' is undefined");
}

Value Interpreter::lookup(int name) {
  for (Scope* s = scope_.get(); s; s = s->parent.get())
    if (const Value* v = s->find(name)) return *v;
  const std::string& text = program_.names[static_cast<size_t>(name)];
  if (const Value* v = variables_.find(std::string_view(text))) return *v;
  if (const Value* v = globals_.find(std::string_view(text))) return *v;
  if (const Value* v = builtin_functions().find(std::string_view(text))) return *v;
  return undefined_name(name);
}

void Interpreter::assign(const Expr& target, const Value& value) {
  if (target.type == E::kName) {
    scope_->set(target.name, value);
  } else if (target.type == E::kNamespaceTarget) {
    const Value ns = lookup(target.name);
    if (!ns.is(Kind::kNamespace)) throw Error("cannot assign attribute on non-namespace object");
    ns.data<NamespaceData>().members.set(target.text, value);
  } else {
    if (value.is_number() || value.is(Kind::kNone))
      throw TypeError(std::string("cannot unpack non-iterable ") + type_name(value) + " object");
    const List items = iterate_counted(value);
    const size_t want = target.args.size();
    if (items.size() < want)
      throw ValueError("not enough values to unpack (expected " + std::to_string(want) + ", got " + std::to_string(items.size()) + ")");
    if (items.size() > want) throw ValueError("too many values to unpack (expected " + std::to_string(want) + ")");
    for (size_t i = 0; i < want; ++i) assign(*target.args[i], items[i]);
  }
}

std::string Interpreter::run() {
  std::string output;
  out_ = &output;
  root_ = scope_ = child_of(nullptr, program_.missing);
  execute(program_.body);
  return output;
}

Value Interpreter::new_namespace(DictData members) {
  auto data = std::make_shared<NamespaceData>(NamespaceData{std::move(members)});
  namespaces_.push_back(data);
  return Value::object(Kind::kNamespace, std::move(data));
}

// --- statements -------------------------------------------------------------------------------------------------------------------

Interpreter::Flow Interpreter::execute(const Body& body) {
  for (const auto& stmt : body) {
    step();
    try {
      if (const Flow flow = execute(*stmt); flow != Flow::kNext) return flow;
    } catch (Error& e) {
      if (e.line == 0) e.line = stmt->line;
      throw;
    }
  }
  return Flow::kNext;
}

Interpreter::Flow Interpreter::scoped(const Body& body, const Missing& missing) {
  const Enter enter(*this, child_of(scope_, missing));
  return execute(body);
}

Interpreter::Flow Interpreter::execute(const Stmt& stmt) {
  switch (stmt.type) {
    case S::kText: emit(stmt.text); break;
    case S::kOutput: {
      const Value v = evaluate(*stmt.value);
      if (v.is_string()) emit(v.text());
      else emit(str(v));
      break;
    }
    case S::kIf: {
      const Depth depth(*this);
      return execute(truth(evaluate(*stmt.value)) ? stmt.body : stmt.otherwise);
    }
    case S::kFor: {
      const Depth depth(*this);
      return for_loop(stmt, evaluate(*stmt.value), 0);
    }
    case S::kSet: assign(*stmt.target, evaluate(*stmt.value)); break;
    case S::kSetBlock: {
      Value text = Value::string(capture([&] { scoped(stmt.body, stmt.missing); }));
      if (stmt.value) text = filtered(*stmt.value, &text);
      assign(*stmt.target, text);
      break;
    }
    case S::kMacro: {
      captured_scopes_.push_back(scope_);
      scope_->set(stmt.name, Value::object(Kind::kMacro, std::make_shared<MacroData>(MacroData{&stmt, stmt.text, scope_})));
      break;
    }
    case S::kCallBlock: call_block(stmt); break;
    case S::kFilterBlock: {
      const Value text = Value::string(capture([&] { scoped(stmt.body, stmt.missing); }));
      emit_text(filtered(*stmt.value, &text));
      break;
    }
    case S::kWith: {
      const auto scope = child_of(scope_, stmt.missing);
      std::vector<Value> values;
      for (const auto& binding : stmt.bindings) values.push_back(evaluate(*binding.second));  // all of them see the outer names only
      const Enter enter(*this, scope);
      for (size_t i = 0; i < values.size(); ++i) assign(*stmt.bindings[i].first, values[i]);
      return execute(stmt.body);
    }
    case S::kScope: return scoped(stmt.body, stmt.missing);
    case S::kBreak: return Flow::kBreak;
    case S::kContinue: return Flow::kContinue;
  }
  return Flow::kNext;
}

Interpreter::Flow Interpreter::for_loop(const Stmt& stmt, const Value& iterable, Int depth0) {
  auto data = std::make_shared<LoopData>();
  LoopData& loop = *data;
  loop.depth0 = depth0;
  std::function<bool(Value&)> source;
  if (iterable.is(Kind::kIterator)) {
    source = [iterable](Value& out) { return iterable.data<IteratorData>().next(out); };
  } else {
    List items = iterate_counted(iterable);
    if (!stmt.test) loop.sized = static_cast<Int>(items.size());
    source = [list = std::move(items), at = size_t{0}](Value& out) mutable {
      if (at == list.size()) return false;
      out = list[at++];
      return true;
    };
  }
  const auto outer = scope_;
  if (stmt.test) {
    loop.next = [this, &stmt, outer, source = std::move(source)](Value& out) mutable {
      while (source(out)) {
        step();
        const Enter enter(*this, child_of(outer, {}));
        assign(*stmt.target, out);
        if (truth(evaluate(*stmt.test))) return true;
      }
      return false;
    };
  } else {
    loop.next = std::move(source);
  }
  const bool named = stmt.uses_loop || stmt.recursive;
  Value loop_value;
  if (named) {
    loop_value = Value::object(Kind::kLoop, data);
    if (stmt.recursive) {
      loop.statement = &stmt;
      loop.scope = outer;
    }
  }
  bool completed = false;  // Jinja2 runs `else` unless some round came to its end: a loop left by break in its first has one
  while (loop.advance()) {
    step();
    const auto scope = child_of(outer, stmt.missing);
    if (named) scope->names.emplace_back(program_.loop_name, loop_value);
    const Enter enter(*this, scope);
    assign(*stmt.target, loop.current);
    const Flow flow = execute(stmt.body);
    if (flow == Flow::kBreak) break;
    completed = completed || flow == Flow::kNext;
  }
  loop.scope.reset();
  if (!completed && !stmt.otherwise.empty()) return scoped(stmt.otherwise, stmt.missing_else);
  return Flow::kNext;
}

Value Interpreter::loop_recurse(LoopData& loop, const Value& iterable) {
  if (!loop.statement) throw TypeError("The loop must have the 'recursive' marker to be called recursively.");
  if (!loop.scope) throw Error("a recursive loop is called after its end");
  const Depth depth(*this, Depth::kPerCall);
  const Stmt& stmt = *loop.statement;
  const Enter enter(*this, loop.scope);
  return Value::string(capture([&] { for_loop(stmt, iterable, loop.depth0 + 1); }));
}

void Interpreter::call_block(const Stmt& stmt) {
  captured_scopes_.push_back(scope_);
  const Value caller = Value::object(Kind::kMacro, std::make_shared<MacroData>(MacroData{&stmt, "", scope_}));
  const Expr& e = *stmt.value;
  const Value function = evaluate(*e.args[0]);
  Args args = arguments(e.call);
  for (const auto& [key, value] : args.named)
    if (key == "caller") throw TypeError("got multiple values for keyword argument 'caller'");
  args.named.emplace_back("caller", caller);
  emit_text(call(function, args));
}

Value Interpreter::call_macro(const MacroData& macro, Args& args) {
  const Depth depth(*this, Depth::kPerCall);
  const Stmt& stmt = *macro.definition;
  const auto scope = child_of(macro.scope, {});
  const size_t count = stmt.parameters.size();
  std::vector<bool> given(count, false);
  bool caller_given = false;
  for (size_t i = 0; i < count; ++i) {
    const int name = stmt.parameters[i];
    std::optional<Value> value;
    if (i < args.positional.size()) {
      value = args.positional[i];
    } else {
      const auto at = std::find_if(args.named.begin(), args.named.end(),
                                   [&](const auto& n) { return n.first == program_.names[static_cast<size_t>(name)]; });
      if (at != args.named.end()) {
        value = at->second;
        args.named.erase(at);
      }
    }
    if (name == program_.caller_name) caller_given = true;
    if (value) {
      scope->names.emplace_back(name, *value);
      given[i] = true;
    }
  }
  if (stmt.uses_caller && !caller_given) {
    const auto at = std::find_if(args.named.begin(), args.named.end(), [](const auto& n) { return n.first == "caller"; });
    Value caller = Value::undefined("No caller defined");
    if (at != args.named.end()) {
      caller = at->second;
      args.named.erase(at);
    }
    scope->names.emplace_back(program_.caller_name, caller);
  }
  if (stmt.uses_kwargs) {
    auto rest = std::make_shared<DictData>();
    for (auto& [key, value] : args.named) rest->set(key, value);
    scope->names.emplace_back(program_.kwargs_name, Value::dict(rest));
  } else if (!args.named.empty()) {
    for (const auto& named : args.named)
      if (named.first == "caller")
        throw TypeError("macro '" + macro.name +
                        "' was invoked with two values for the special caller argument. This is most likely a bug.");
    throw TypeError("macro '" + macro.name + "' takes no keyword argument '" + args.named[0].first + "'");
  }
  if (stmt.uses_varargs) {
    List rest;
    for (size_t i = count; i < args.positional.size(); ++i) rest.push_back(args.positional[i]);
    scope->names.emplace_back(program_.varargs_name, Value::tuple(std::move(rest)));
  } else if (args.positional.size() > count) {
    throw TypeError("macro '" + macro.name + "' takes not more than " + std::to_string(count) + " argument(s)");
  }
  const Enter enter(*this, scope);
  const size_t required = count - stmt.defaults.size();
  for (size_t i = 0; i < count; ++i) {
    if (given[i]) continue;
    const int name = stmt.parameters[i];
    scope->set(name, i >= required ? evaluate(*stmt.defaults[i - required])
                                   : Value::undefined("parameter '" + program_.names[static_cast<size_t>(name)] + "' was not provided"));
  }
  for (const int name : stmt.missing)
    if (!scope->find(name)) scope->names.emplace_back(name, undefined_name(name));
  return Value::string(capture([&] { execute(stmt.body); }));
}

// --- expressions -------------------------------------------------------------------------------------------------------------------

Args Interpreter::arguments(const Arguments& from) {
  Args out;
  for (const auto& e : from.positional) out.positional.push_back(evaluate(*e));
  for (const auto& [key, e] : from.named) out.named.emplace_back(key, evaluate(*e));
  if (from.star)
    for (Value& v : iterate_counted(evaluate(*from.star))) out.positional.push_back(std::move(v));
  if (from.double_star) {
    const Value more = evaluate(*from.double_star);
    if (!more.is(Kind::kDict)) throw TypeError(std::string("argument after ** must be a mapping, not ") + type_name(more));
    for (const auto& [key, value] : more.dict().entries()) {
      if (!key.is_string()) throw TypeError("keywords must be strings");
      for (const auto& named : out.named)
        if (named.first == key.text()) throw TypeError("got multiple values for keyword argument '" + key.text() + "'");
      out.named.emplace_back(key.text(), value);
    }
  }
  return out;
}

Value Interpreter::call(const Value& function, Args& args) {
  step();
  switch (function.kind()) {
    case Kind::kUndefined: fail_undefined(function);
    case Kind::kFunction: return function.data<FunctionData>().call(*this, args);
    case Kind::kMacro: return call_macro(function.data<MacroData>(), args);
    case Kind::kLoop: {
      const Bound bound("loop", args, {"iterable"}, 1);
      return loop_recurse(function.data<LoopData>(), bound[0]);
    }
    case Kind::kJoiner: {
      auto& joiner = function.data<JoinerData>();
      return Value::string(std::exchange(joiner.used, true) ? joiner.separator : "");
    }
    default: throw TypeError(std::string("'") + type_name(function) + "' object is not callable");
  }
}

Value Interpreter::call_expression(const Expr& e) {
  const Value function = evaluate(*e.args[0]);
  Args args = arguments(e.call);
  return call(function, args);
}

Value Interpreter::filtered(const Expr& e, const Value* text) {
  const Value value = e.args[0] ? e.args[0]->type == E::kFilter && text ? filtered(*e.args[0], text) : evaluate(*e.args[0]) : *text;
  Args args = arguments(e.call);
  return call_filter(*this, e.text, value, args);
}

bool Interpreter::compare_once(const std::string& op, const Value& a, const Value& b) {
  if (op == "==") return equal(a, b);
  if (op == "!=") return !equal(a, b);
  if (op == "in") return contains(b, a);
  if (op == "not in") return !contains(b, a);
  const int c = compare(a, b, op.c_str());
  if (c == 2) return false;
  return op == "<" ? c < 0 : op == "<=" ? c <= 0 : op == ">" ? c > 0 : c >= 0;
}

Value Interpreter::evaluate(const Expr& e) {
  step();
  const Depth depth(*this);
  switch (e.type) {
    case E::kConst: return e.constant;
    case E::kName: return lookup(e.name);
    case E::kList:
    case E::kTuple: {
      List items;
      items.reserve(e.args.size());
      for (const auto& arg : e.args) items.push_back(evaluate(*arg));
      return e.type == E::kList ? Value::list(std::move(items)) : Value::tuple(std::move(items));
    }
    case E::kDict: {
      auto data = std::make_shared<DictData>();
      for (size_t i = 0; i < e.args.size(); i += 2) {
        const Value key = evaluate(*e.args[i]);
        data->set(key, evaluate(*e.args[i + 1]));
      }
      return Value::dict(std::move(data));
    }
    case E::kAttribute: return attribute(*this, evaluate(*e.args[0]), e.text);
    case E::kItem: {
      const Value object = evaluate(*e.args[0]);
      const Expr& key = *e.args[1];
      if (key.type != E::kSlice) return item(*this, object, evaluate(key));
      const Value start = evaluate_or_none(key.args[0]), stop = evaluate_or_none(key.args[1]), step_by = evaluate_or_none(key.args[2]);
      return slice(*this, object, start, stop, step_by);
    }
    case E::kSlice: throw TypeError("slices inside a tuple of keys are not supported");
    case E::kCall: return call_expression(e);
    case E::kFilter: return filtered(e, nullptr);
    case E::kTest: {
      const Value value = evaluate(*e.args[0]);
      Args args = arguments(e.call);
      return Value::boolean(call_test(*this, e.text, value, args));
    }
    case E::kNot: return Value::boolean(!truth(evaluate(*e.args[0])));
    case E::kNegative: return negate(evaluate(*e.args[0]));
    case E::kPositive: return positive(evaluate(*e.args[0]));
    case E::kAnd: {
      Value left = evaluate(*e.args[0]);
      return truth(left) ? evaluate(*e.args[1]) : left;
    }
    case E::kOr: {
      Value left = evaluate(*e.args[0]);
      return truth(left) ? left : evaluate(*e.args[1]);
    }
    case E::kConcat: {
      std::string out;
      for (const auto& arg : e.args) {
        const Value v = evaluate(*arg);
        out += v.is_string() ? v.text() : str(v);
        check_size(out.size());
      }
      return Value::string(std::move(out));
    }
    case E::kCompare: {
      Value left = evaluate(*e.args[0]);
      for (size_t i = 0; i < e.ops.size(); ++i) {
        Value right = evaluate(*e.args[i + 1]);
        if (!compare_once(e.ops[i], left, right)) return Value::boolean(false);
        left = std::move(right);
      }
      return Value::boolean(true);
    }
    case E::kCondition:
      if (truth(evaluate(*e.args[0]))) return evaluate(*e.args[1]);
      if (e.args[2]) return evaluate(*e.args[2]);
      return Value::undefined("the inline if-expression on line " + std::to_string(e.line) +
                              " evaluated to false and no else section was defined.");
    case E::kNamespaceTarget: break;
    default: {
      const Value left = evaluate(*e.args[0]);
      return binary(*this, e.type, left, evaluate(*e.args[1]));
    }
  }
  throw Error("an assignment target is no value");
}

// --- the public face ---------------------------------------------------------------------------------------------------------------

std::variant<Template, Failure> Template::parse(std::string_view source, const nlohmann::ordered_json& globals, Limits limits) {
  try {
    Template out;
    out.program_ = parse_program(source);
    out.globals_ = std::make_shared<const nlohmann::ordered_json>(globals);
    out.limits_ = limits;
    return out;
  } catch (const Error& e) {
    return Failure{e.kind == Failure::Kind::kRuntime ? Failure::Kind::kSyntax : e.kind, e.line, e.what()};
  }
}

std::variant<std::string, Failure> Template::render(const nlohmann::ordered_json& variables) const {
  try {
    const auto members = [](const nlohmann::ordered_json& json) {
      DictData out;
      if (json.is_object())
        for (const auto& [key, value] : json.items()) out.set(key, Value::from_json(value));
      return out;
    };
    const DictData values = members(variables), globals = members(*globals_);
    return Interpreter(*program_, limits_, values, globals).run();
  } catch (const Error& e) {
    return Failure{e.kind, e.line, e.what()};
  } catch (const std::bad_alloc&) {
    return Failure{Failure::Kind::kLimit, 0, "out of memory"};
  }
}

namespace {

Value literal(const Expr& e) {
  const auto all = [&] {
    List out;
    for (const auto& arg : e.args) out.push_back(literal(*arg));
    return out;
  };
  switch (e.type) {
    case E::kConst: return e.constant;
    case E::kList: return Value::list(all());
    case E::kTuple: return Value::tuple(all());
    case E::kDict: {
      auto data = std::make_shared<DictData>();
      for (size_t i = 0; i < e.args.size(); i += 2) data->set(literal(*e.args[i]), literal(*e.args[i + 1]));
      return Value::dict(std::move(data));
    }
    case E::kNegative:
    case E::kPositive: {
      const Value v = literal(*e.args[0]);
      if (v.is(Kind::kBool)) throw TypeError("not a literal");
      return e.type == E::kNegative ? negate(v) : positive(v);
    }
    default: throw TypeError("not a literal");
  }
}

}  // namespace

bool parse_python_literal(std::string_view text, nlohmann::ordered_json& out) {
  try {
    Program names;
    out = to_json(literal(*parse_lone_expression(text, names)));
    return true;
  } catch (const Error&) {
    return false;
  }
}

}  // namespace ddtree::jinja
