// ddtree template: a chat template, rendered by hand.
#include <fmt/core.h>

#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <string>

#include "base/json_error.h"
#include "cli/command.h"
#include "text/chat_template.h"
#include "text/jinja.h"

namespace ddtree::cli {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kHelp =
    R"(usage: ddtree template FILE.jinja [--chat]  < request.json
       ddtree template --lines                 < requests.jsonl

Renders a chat template with the variables of one JSON object read from standard input (messages, tools, add_generation_prompt and any
other) and writes the text to standard output, nothing added.

  --chat     prepare the request as the server does: content null is "", tool call arguments given as text are decoded, the role
             developer becomes system, chat_template_kwargs become variables, add_generation_prompt is true unless given
  --lines    many renderings: each line of standard input is {"template": TEXT, "variables": OBJECT}, each line of the output
             {"ok": true, "text": TEXT} or {"ok": false, "kind": KIND, "line": N, "error": MESSAGE},
             KIND being syntax, runtime, raised or limit
  --help     this text

Exit codes: 0 rendered; 64 wrong usage, input that is no JSON object, or a request that the template refuses (its message, file and line
go to standard error); 65 the template cannot be read or does not parse.
)";

const char* kind_name(jinja::Failure::Kind kind) {
  switch (kind) {
    case jinja::Failure::Kind::kSyntax: return "syntax";
    case jinja::Failure::Kind::kRuntime: return "runtime";
    case jinja::Failure::Kind::kRaised: return "raised";
    case jinja::Failure::Kind::kLimit: return "limit";
  }
  return "";
}

Json answer(const std::variant<std::string, jinja::Failure>& result) {
  if (const auto* text = std::get_if<std::string>(&result)) return {{"ok", true}, {"text", *text}};
  const auto& failure = std::get<jinja::Failure>(result);
  return {{"ok", false}, {"kind", kind_name(failure.kind)}, {"line", failure.line}, {"error", failure.message}};
}

int run_lines() {
  std::map<std::string, std::variant<jinja::Template, jinja::Failure>> parsed;
  std::string line;
  for (int number = 1; std::getline(std::cin, line); ++number) {
    if (line.empty()) continue;
    const Json request = Json::parse(line, nullptr, false);
    if (!request.is_object() || !request.contains("template") || !request["template"].is_string() || !request.contains("variables") ||
        !request["variables"].is_object()) {
      fmt::print(stderr, "ddtree template: line {}: an object with \"template\" (a string) and \"variables\" (an object) is needed\n",
                 number);
      return 64;
    }
    const auto& source = request["template"].get_ref<const std::string&>();
    auto at = parsed.find(source);
    if (at == parsed.end()) {
      if (parsed.size() > 256) parsed.clear();
      at = parsed.emplace(source, jinja::Template::parse(source, Json())).first;
    }
    const auto* good = std::get_if<jinja::Template>(&at->second);
    const Json out = good ? answer(good->render(request["variables"])) : answer(std::get<jinja::Failure>(at->second));
    std::cout << out.dump(-1, ' ', false, Json::error_handler_t::replace) << '\n';
  }
  return 0;
}

int run(int argc, char** argv) {
  std::string file;
  bool chat = false, lines = false;
  for (int i = 1; i < argc; ++i) {
    const std::string arg = argv[i];
    if (arg == "--help" || arg == "-h") return std::fputs(kHelp, stdout), 0;
    if (arg == "--chat") {
      chat = true;
    } else if (arg == "--lines") {
      lines = true;
    } else if (arg.size() > 1 && arg[0] == '-') {
      fmt::print(stderr, "ddtree template: unknown option {}; --help lists them\n", arg);
      return 64;
    } else if (!file.empty()) {
      fmt::print(stderr, "ddtree template: one template at a time; got {} and {}\n", file, arg);
      return 64;
    } else {
      file = arg;
    }
  }
  if (lines) {
    if (file.empty() && !chat) return run_lines();
    fmt::print(stderr, "ddtree template: --lines takes its templates from standard input and no other argument\n");
    return 64;
  }
  if (file.empty()) {
    std::fputs(kHelp, stderr);
    return 64;
  }
  std::error_code none;
  if (std::filesystem::is_directory(file, none)) {
    fmt::print(stderr, "ddtree template: {} is a folder; give the template's file\n", file);
    return 65;
  }
  std::ifstream in(file, std::ios::binary);
  const std::string source((std::istreambuf_iterator<char>(in)), {});
  if (!in.is_open() || in.bad()) {
    fmt::print(stderr, "ddtree template: cannot read {}: {}\n", file, std::strerror(errno));
    return 65;
  }
  const auto parsed = jinja::Template::parse(source, Json());
  if (const auto* failure = std::get_if<jinja::Failure>(&parsed)) {
    fmt::print(stderr, "ddtree template: {}:{}: {}\n", file, failure->line, failure->message);
    return 65;
  }
  Json variables;
  try {
    variables = Json::parse(std::string((std::istreambuf_iterator<char>(std::cin)), {}));
  } catch (const Json::exception& e) {
    fmt::print(stderr, "ddtree template: standard input is not valid JSON: {}\n", json_error_text(e.what()));
    return 64;
  }
  if (!variables.is_object()) {
    fmt::print(stderr, "ddtree template: standard input holds a JSON {}; an object of variables is needed\n", variables.type_name());
    return 64;
  }
  if (chat) {
    auto prepared = chat_variables(variables);
    if (!prepared.ok()) {
      fmt::print(stderr, "ddtree template: standard input: {}\n", prepared.status().message());
      return 64;
    }
    variables = std::move(*prepared);
  }
  const auto rendered = std::get<jinja::Template>(parsed).render(variables);
  if (const auto* failure = std::get_if<jinja::Failure>(&rendered)) {
    fmt::print(stderr, "ddtree template: {}:{}: {}\n", file, failure->line, failure->message);
    return 64;
  }
  const auto& text = std::get<std::string>(rendered);
  std::fwrite(text.data(), 1, text.size(), stdout);
  return 0;
}

DDTREE_COMMAND("template", "render a chat template with JSON from standard input", run);

}  // namespace
}  // namespace ddtree::cli
