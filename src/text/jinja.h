// Jinja templates as Hugging Face renders chat templates: Jinja2's grammar and scoping in an immutable sandbox, trim_blocks and
// lstrip_blocks on, keep_trailing_newline off, loop controls, {% generation %}, tojson = json.dumps(ensure_ascii=False).
// Not there: include, import, extends, and the filters random, urlize and lipsum; a template that uses them is refused.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <variant>

namespace ddtree::jinja {

struct Failure {
  enum class Kind {
    kSyntax,   // the template does not parse
    kRuntime,  // it stumbled over its variables, as Jinja2 would
    kRaised,   // raise_exception(message): `message` is the template's own
    kLimit,    // too deep, too long or too many iterations
  };
  Kind kind = Kind::kRuntime;
  int line = 0;  // 1-based line of the template, 0 if unknown
  std::string message;
};

// Bounds of one rendering. Reaching one is a Failure of kind kLimit, never a crash or a hang.
struct Limits {
  size_t output_bytes = size_t{64} << 20;  // also of any string or list built on the way
  size_t steps = size_t{50} << 20;         // nodes evaluated and items handled by filters
  int depth = 150;                         // macro calls and recursive loops; nested expressions count a fifth
};

struct Program;  // the parsed template (jinja_ast.h)

class Template {
 public:
  // `globals`: an object whose members are visible unless overridden; null for none.
  static std::variant<Template, Failure> parse(std::string_view source, const nlohmann::ordered_json& globals, Limits limits = {});

  // Thread-safe. `variables`: an object.
  std::variant<std::string, Failure> render(const nlohmann::ordered_json& variables) const;

 private:
  std::shared_ptr<const Program> program_;
  std::shared_ptr<const nlohmann::ordered_json> globals_;
  Limits limits_;
};

// `text` read as a Python literal (None, True, numbers, strings, lists, tuples, dicts) into `out`; false if it is anything else.
bool parse_python_literal(std::string_view text, nlohmann::ordered_json& out);

}  // namespace ddtree::jinja
