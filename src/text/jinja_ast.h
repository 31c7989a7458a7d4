// Tokens and the syntax tree of the Jinja engine.
#pragma once

#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "text/jinja_value.h"

namespace ddtree::jinja {

struct Token {
  enum class Type { kData, kVariableBegin, kVariableEnd, kBlockBegin, kBlockEnd, kName, kString, kInteger, kFloat, kOperator, kEnd };
  Type type = Type::kEnd;
  int line = 1;
  std::string text;  // data, name, decoded string or operator
  Int integer = 0;
  double real = 0;
};

// Throws Error(kSyntax).
std::vector<Token> tokenize(std::string_view source);
// An expression alone, outside of {{ }}.
std::vector<Token> tokenize_expression(std::string_view source);

struct Expr;
using ExprPtr = std::unique_ptr<Expr>;

struct Arguments {
  std::vector<ExprPtr> positional;
  std::vector<std::pair<std::string, ExprPtr>> named;
  ExprPtr star, double_star;
};

struct Expr {
  enum class Type {
    kConst,
    kName,
    kList,
    kTuple,
    kDict,       // kDict: key, value, key, value ...
    kAttribute,  // args[0].text
    kItem,       // args[0][args[1]]
    kSlice,      // args: start, stop, step (null where absent)
    kCall,
    kFilter,
    kTest,  // args[0] (null: the filter block's text), text, call
    kNot,
    kNegative,
    kPositive,
    kAnd,
    kOr,
    kAdd,
    kSubtract,
    kMultiply,
    kDivide,
    kFloorDivide,
    kModulo,
    kPower,
    kConcat,
    kCompare,          // args[0] ops[0] args[1] ops[1] ...
    kCondition,        // args: test, then, else (null where absent)
    kNamespaceTarget,  // name.text, as a target only
  };
  Expr(Type t, int l) : type(t), line(l) {}
  Type type;
  int line;
  int name = -1;  // kName, kNamespaceTarget: index into Program::names
  std::string text;
  Value constant;
  std::vector<ExprPtr> args;
  std::vector<std::string> ops;
  Arguments call;
};

struct Stmt;
using Body = std::vector<std::unique_ptr<Stmt>>;

// Names that count as undefined at the start of a scope even if the variables have them: Jinja2 decides at compile time that a name whose
// first use in a scope is an assignment is local to it.
using Missing = std::vector<int>;

struct Stmt {
  enum class Type {
    kText,
    kOutput,
    kIf,
    kFor,
    kSet,
    kSetBlock,
    kMacro,
    kCallBlock,
    kFilterBlock,
    kWith,
    kScope,  // generation, block, autoescape: a scope that prints its body
    kBreak,
    kContinue,
  };
  Stmt(Type t, int l) : type(t), line(l) {}
  Type type;
  int line;
  std::string text;        // kText; kMacro: its name
  ExprPtr target;          // kFor, kSet, kSetBlock
  ExprPtr value;           // kOutput, kIf's test, kFor's iterable, kSet, kCallBlock's call, the filters of kSetBlock and kFilterBlock
  ExprPtr test;            // kFor's filter
  bool recursive = false;  // kFor; kIf: it is an elif
  bool uses_loop = false;  // kFor: the body names `loop`
  Body body;
  Body otherwise;                                                       // kIf, kFor
  int name = -1;                                                        // kMacro
  std::vector<int> parameters;                                          // kMacro, kCallBlock
  std::vector<ExprPtr> defaults;                                        // of the last parameters
  bool uses_varargs = false, uses_kwargs = false, uses_caller = false;  // kMacro, kCallBlock
  std::vector<std::pair<ExprPtr, ExprPtr>> bindings;                    // kWith
  Missing missing, missing_else;
};

struct Program {
  Body body;
  Missing missing;
  std::vector<std::string> names;
  std::unordered_map<std::string, int> name_ids;

  int intern(const std::string& name) {
    const auto [at, fresh] = name_ids.emplace(name, static_cast<int>(names.size()));
    if (fresh) names.push_back(name);
    return at->second;
  }
  int loop_name = -1, caller_name = -1, varargs_name = -1, kwargs_name = -1;
};

// Throws Error(kSyntax).
std::shared_ptr<const Program> parse_program(std::string_view source);
// A lone expression, all of `source`.
ExprPtr parse_lone_expression(std::string_view source, Program& names);
// Fills in the `missing` lists and checks that filters and tests exist where Jinja2 checks it at compile time (jinja_symbols.cpp).
void analyze(Program& program);

}  // namespace ddtree::jinja
