// Which names a scope makes its own. Jinja2 settles this before rendering, by the order of uses in the text: a name that a scope assigns
// before it reads it starts out undefined there, whatever the variables hold; assigned in some branches of an if only, it starts with the
// outer value. Rendering looks names up dynamically, so only the former need to be written down (Stmt::missing).
#include <algorithm>
#include <map>
#include <set>

#include "text/jinja_ast.h"
#include "text/jinja_builtins.h"

namespace ddtree::jinja {
namespace {

using E = Expr::Type;
using S = Stmt::Type;

struct Symbols {
  const Symbols* parent = nullptr;
  // How a name known to this scope starts: kUndefined is what we are after.
  enum class Load { kUndefined, kOther };
  std::map<int, Load> refs;
  std::set<int> stores;

  bool known(int name) const { return refs.count(name) || (parent && parent->known(name)); }
  void store(int name) {
    stores.insert(name);
    if (refs.count(name)) return;
    refs[name] = parent && parent->known(name) ? Load::kOther : Load::kUndefined;
  }
  void parameter(int name) {
    stores.insert(name);
    refs[name] = Load::kOther;
  }
  void load(int name) {
    if (!known(name)) refs[name] = Load::kOther;
  }
  Missing missing() const {
    Missing out;
    for (const auto& [name, load] : refs)
      if (load == Load::kUndefined) out.push_back(name);
    return out;
  }
  void merge(const std::vector<Symbols>& branches) {
    std::map<int, size_t> counts;
    for (const auto& branch : branches)
      for (const int name : branch.stores)
        if (!stores.count(name)) ++counts[name];
    for (const auto& branch : branches) {
      for (const auto& [name, load] : branch.refs) refs[name] = load;
      stores.insert(branch.stores.begin(), branch.stores.end());
    }
    for (const auto& [name, count] : counts)
      if (count != branches.size()) refs[name] = Load::kOther;
  }
};

// Every name that occurs in an expression.
template <class Visit>
void each_name(const Expr* e, const Visit& visit) {
  if (!e) return;
  if (e->type == E::kName || e->type == E::kNamespaceTarget) visit(*e);
  for (const auto& arg : e->args) each_name(arg.get(), visit);
  for (const auto& arg : e->call.positional) each_name(arg.get(), visit);
  for (const auto& arg : e->call.named) each_name(arg.second.get(), visit);
  each_name(e->call.star.get(), visit);
  each_name(e->call.double_star.get(), visit);
}

void read(Symbols& s, const Expr* e) {
  each_name(e, [&](const Expr& name) { s.load(name.name); });
}

void write(Symbols& s, const Expr* e, bool parameter) {
  each_name(e, [&](const Expr& name) {
    if (name.type == E::kNamespaceTarget) s.load(name.name);
    else if (parameter) s.parameter(name.name);
    else s.store(name.name);
  });
}

void visit(Symbols& s, const Body& body);

// One statement as its surrounding scope sees it: scopes inside are not entered.
void visit(Symbols& s, const Stmt& stmt) {
  switch (stmt.type) {
    case S::kOutput: read(s, stmt.value.get()); break;
    case S::kSet:
      read(s, stmt.value.get());
      write(s, stmt.target.get(), false);
      break;
    case S::kSetBlock: write(s, stmt.target.get(), false); break;
    case S::kIf: {
      // elif parts are one branch of their own in Jinja2's tree; here they are nested in `otherwise`.
      read(s, stmt.value.get());
      Symbols then = s, elifs = s, last = s;
      visit(then, stmt.body);
      const Body* otherwise = &stmt.otherwise;
      while (otherwise->size() == 1 && (*otherwise)[0]->type == S::kIf && (*otherwise)[0]->recursive) {
        const Stmt& elif = *(*otherwise)[0];
        // Each elif is an If without its own else: it merges its body and two empty branches.
        read(elifs, elif.value.get());
        Symbols body = elifs, none1 = elifs, none2 = elifs;
        visit(body, elif.body);
        elifs.merge({body, none1, none2});
        otherwise = &elif.otherwise;
      }
      visit(last, *otherwise);
      s.merge({then, elifs, last});
      break;
    }
    case S::kFor: read(s, stmt.value.get()); break;
    case S::kMacro: s.store(stmt.name); break;
    case S::kCallBlock:
    case S::kFilterBlock: read(s, stmt.value.get()); break;
    case S::kWith:
      for (const auto& binding : stmt.bindings) read(s, binding.second.get());
      break;
    default: break;
  }
}

void visit(Symbols& s, const Body& body) {
  for (const auto& stmt : body) visit(s, *stmt);
}

// Calls `found` for every name in a body, scopes inside included.
template <class Found>
void each_name_deep(const Body& body, const Found& found) {
  for (const auto& stmt : body) {
    each_name(stmt->value.get(), found);
    each_name(stmt->test.get(), found);
    each_name(stmt->target.get(), found);
    for (const auto& d : stmt->defaults) each_name(d.get(), found);
    for (const auto& b : stmt->bindings) {
      each_name(b.first.get(), found);
      each_name(b.second.get(), found);
    }
    each_name_deep(stmt->body, found);
    each_name_deep(stmt->otherwise, found);
  }
}

bool mentions(const Body& body, int name) {
  bool hit = false;
  each_name_deep(body, [&](const Expr& e) { hit |= e.name == name; });
  return hit;
}

// Jinja2 refuses an unknown filter or test when it compiles, except inside if statements and conditional expressions, where it
// refuses only when it gets there.
void check_names(const Expr* e, bool soft) {
  if (!e) return;
  if (e->type == E::kFilter && !soft && !is_filter(e->text)) throw Error(Failure::Kind::kSyntax, missing_filter_message(e->text), e->line);
  if (e->type == E::kTest && !soft && !is_test(e->text)) throw Error(Failure::Kind::kSyntax, "No test named '" + e->text + "'.", e->line);
  if (e->type == E::kCondition) soft = true;
  for (const auto& arg : e->args) check_names(arg.get(), soft);
  for (const auto& arg : e->call.positional) check_names(arg.get(), soft);
  for (const auto& arg : e->call.named) check_names(arg.second.get(), soft);
  check_names(e->call.star.get(), soft);
  check_names(e->call.double_star.get(), soft);
}

class Analyzer {
 public:
  explicit Analyzer(Program& program) : program_(program) {}

  void scopes(Body& body, const Symbols& s, bool soft) {
    for (auto& stmt : body) scope(*stmt, s, soft);
  }

 private:
  void scope(Stmt& stmt, const Symbols& s, bool soft) {
    check_names(stmt.value.get(), soft || stmt.type == S::kIf);
    check_names(stmt.test.get(), soft);
    for (const auto& d : stmt.defaults) check_names(d.get(), false);
    for (const auto& b : stmt.bindings) check_names(b.second.get(), soft);
    Symbols inner;
    inner.parent = &s;
    switch (stmt.type) {
      case S::kIf:
        scopes(stmt.body, s, true);
        scopes(stmt.otherwise, s, true);
        return;
      case S::kFor: {
        stmt.uses_loop = mentions(stmt.body, program_.loop_name);
        Symbols otherwise;
        otherwise.parent = &s;
        if (stmt.uses_loop || stmt.recursive) inner.parameter(program_.loop_name);
        write(inner, stmt.target.get(), true);
        visit(inner, stmt.body);
        stmt.missing = inner.missing();
        scopes(stmt.body, inner, false);
        visit(otherwise, stmt.otherwise);
        stmt.missing_else = otherwise.missing();
        scopes(stmt.otherwise, otherwise, false);
        return;
      }
      case S::kMacro:
      case S::kCallBlock: {
        for (const auto& d : stmt.defaults) read(inner, d.get());
        for (const int p : stmt.parameters) inner.parameter(p);
        visit(inner, stmt.body);
        const auto uses = [&](int name) {
          return std::find(stmt.parameters.begin(), stmt.parameters.end(), name) == stmt.parameters.end() && mentions(stmt.body, name);
        };
        stmt.uses_caller = uses(program_.caller_name);
        stmt.uses_varargs = uses(program_.varargs_name);
        stmt.uses_kwargs = uses(program_.kwargs_name);
        inner.parameter(program_.caller_name);
        inner.parameter(program_.varargs_name);
        inner.parameter(program_.kwargs_name);
        break;
      }
      case S::kWith:
        for (const auto& binding : stmt.bindings) write(inner, binding.first.get(), true);
        visit(inner, stmt.body);
        break;
      case S::kSetBlock:
      case S::kFilterBlock:
      case S::kScope: visit(inner, stmt.body); break;
      default: return;
    }
    stmt.missing = inner.missing();
    scopes(stmt.body, inner, false);
  }

  Program& program_;
};

}  // namespace

void analyze(Program& program) {
  Symbols root;
  visit(root, program.body);
  program.missing = root.missing();
  Analyzer(program).scopes(program.body, root, false);
}

}  // namespace ddtree::jinja
