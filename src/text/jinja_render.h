// The tree-walking interpreter of the Jinja engine, and what filters and methods may ask of it.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "text/jinja_ast.h"

namespace ddtree::jinja {

struct Scope {
  std::vector<std::pair<int, Value>> names;
  std::shared_ptr<Scope> parent;

  Value* find(int name) {
    for (auto& entry : names)
      if (entry.first == name) return &entry.second;
    return nullptr;
  }
  void set(int name, Value value) {
    if (Value* known = find(name)) *known = std::move(value);
    else names.emplace_back(name, std::move(value));
  }
};

struct MacroData {
  const Stmt* definition;
  std::string name;              // "" for a call block's body
  std::shared_ptr<Scope> scope;  // where it was defined; emptied when the rendering ends, which breaks the cycle
};

// `loop`: reads ahead of the iterable as little as Jinja2 does, since filters may depend on what the body changes.
struct LoopData {
  std::function<bool(Value&)> next;
  std::optional<Int> sized;    // length, where the iterable has one
  std::optional<Value> after;  // read ahead
  bool ended = false;
  Value before, current;
  Int index0 = -1;
  Int depth0 = 0;
  const Stmt* statement = nullptr;  // recursive loops
  std::shared_ptr<Scope> scope;
  std::optional<List> last_changed;

  bool advance();  // to the next item; false at the end
  bool peek();     // whether there is a next item
  Int length();
};

struct CyclerData {
  List items;
  size_t at = 0;
};
struct JoinerData {
  std::string separator;
  bool used = false;
};

class Interpreter {
 public:
  Interpreter(const Program& program, const Limits& limits, const DictData& variables, const DictData& globals);
  ~Interpreter();
  Interpreter(const Interpreter&) = delete;
  Interpreter& operator=(const Interpreter&) = delete;

  std::string run();

  Value call(const Value& function, Args& args);
  Value loop_recurse(LoopData& loop, const Value& iterable);
  Value new_namespace(DictData members);

  // Bounds; throw Error(kLimit).
  void step(size_t n = 1) {
    steps_ += n;
    if (steps_ > limits_.steps) too_many_steps();
  }
  void check_size(size_t bytes) const;
  const Limits& limits() const { return limits_; }

  // Lists handed to filters count as steps.
  List iterate_counted(const Value& value);

 private:
  enum class Flow { kNext, kBreak, kContinue };
  class Depth;
  class Enter;  // replaces scope_ for a while

  [[noreturn]] void too_many_steps() const;
  void emit(std::string_view text);
  void emit_text(const Value& value);  // of filter and call blocks: TypeError unless it is a string
  template <class Run>
  std::string capture(const Run& run);

  std::shared_ptr<Scope> child_of(std::shared_ptr<Scope> parent, const Missing& missing);
  Value undefined_name(int name) const;
  Value lookup(int name);
  void assign(const Expr& target, const Value& value);
  Args arguments(const Arguments& from);

  Flow execute(const Body& body);
  Flow execute(const Stmt& stmt);
  Flow scoped(const Body& body, const Missing& missing);
  Flow for_loop(const Stmt& stmt, const Value& iterable, Int depth0);
  Value call_macro(const MacroData& macro, Args& args);
  void call_block(const Stmt& stmt);

  Value evaluate(const Expr& e);
  Value evaluate_or_none(const ExprPtr& e) { return e ? evaluate(*e) : Value::none(); }
  bool compare_once(const std::string& op, const Value& a, const Value& b);
  Value filtered(const Expr& e, const Value* text);
  Value call_expression(const Expr& e);

  const Program& program_;
  const Limits& limits_;
  const DictData& variables_;
  const DictData& globals_;
  std::shared_ptr<Scope> root_, scope_;
  std::string* out_ = nullptr;
  size_t captured_ = 0;  // bytes in buffers below the current one
  size_t steps_ = 0;
  int depth_ = 0;
  std::vector<std::shared_ptr<Scope>> captured_scopes_;
  std::vector<std::shared_ptr<NamespaceData>> namespaces_;
};

// jinja_operators.cpp
Value binary(Interpreter& in, Expr::Type op, const Value& a, const Value& b);
Value negate(const Value& a);
Value positive(const Value& a);
Value slice(Interpreter& in, const Value& object, const Value& start, const Value& stop, const Value& step);

}  // namespace ddtree::jinja
