// ddtree tokenize, ddtree detokenize: JSON strings <-> lists of token ids, one a line.
#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <cstdint>
#include <cstdio>
#include <iostream>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "base/embedded.h"
#include "base/json_error.h"
#include "cli/command.h"
#include "text/detokenizer.h"
#include "text/tokenizer.h"
#include "text/unicode.h"

namespace ddtree::cli {
namespace {

using Json = nlohmann::json;

constexpr int kUsageExit = 64;

Result<Tokenizer> load_tokenizer(const std::string& path) {
  if (!path.empty()) return Tokenizer::load(path);
  const std::string folder = "models/tiny/target/";
  const auto json = embedded_file(folder + "tokenizer.json");
  if (!json) return Status(Code::kUsage, "this build has no embedded model: name one with --tokenizer FILE");
  return Tokenizer::from_json(*json, embedded_file(folder + "tokenizer_config.json").value_or(""), "embedded " + folder + "tokenizer.json");
}

int fail(const char* command, const Status& status) {
  fmt::print(stderr, "ddtree {}: {}\n", command, status.message());
  return exit_code(status.code());
}

// Calls convert(parsed line) for each line of standard input and prints what it returns, flushed, so that a caller may wait for each
// answer. convert's error, or a line that is not JSON, ends it with the line's number.
template <class Convert>
int each_line(const char* command, Convert convert) {
  std::ios::sync_with_stdio(false);
  std::string line, valid;
  for (size_t number = 1; std::getline(std::cin, line); ++number) {
    if (!is_valid_utf8(line)) {  // broken bytes are read as U+FFFD, as everywhere
      valid.clear();
      append_lossy_utf8(line, true, &valid);
      line.swap(valid);
    }
    std::string error;
    Json value;
    try {
      value = Json::parse(line);
    } catch (const Json::exception& e) {
      error = "not valid JSON: " + json_error_text(e.what());
    }
    std::string answer;
    if (error.empty()) error = convert(value, &answer);
    if (!error.empty()) {
      std::cout.flush();
      fmt::print(stderr, "ddtree {}: line {}: {}\n", command, number, error);
      return kUsageExit;
    }
    answer += '\n';
    std::cout.write(answer.data(), static_cast<std::streamsize>(answer.size())).flush();
    if (!std::cout) {
      fmt::print(stderr, "ddtree {}: standard output was closed\n", command);
      return exit_code(Code::kUnavailable);
    }
  }
  return 0;
}

int parse_options(CLI::App* app, int argc, char** argv, std::optional<int>* exit) {
  try {
    app->parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    *exit = app->exit(e) == 0 ? 0 : kUsageExit;
  }
  return exit->value_or(0);
}

int run_tokenize(int argc, char** argv) {
  CLI::App app("Reads JSON strings, one a line, and prints the token ids of each as a JSON list.", "ddtree tokenize");
  std::string path;
  bool literal = false;
  app.add_option("--tokenizer", path, "tokenizer.json, or the folder that holds it (default: that of the embedded model)");
  app.add_flag("--literal", literal, "do not look for added tokens: <|im_end|> is text like any other");
  std::optional<int> exit;
  if (parse_options(&app, argc, argv, &exit); exit) return *exit;
  Result<Tokenizer> tokenizer = load_tokenizer(path);
  if (!tokenizer.ok()) return fail("tokenize", tokenizer.status());
  return each_line("tokenize", [&](const Json& value, std::string* answer) -> std::string {
    if (!value.is_string()) return fmt::format("found {}, expected a JSON string", value.type_name());
    *answer = "[";
    for (int32_t id : tokenizer->encode(value.get_ref<const std::string&>(), !literal)) {
      if (answer->size() > 1) *answer += ',';
      *answer += std::to_string(id);
    }
    *answer += ']';
    return {};
  });
}

int run_detokenize(int argc, char** argv) {
  CLI::App app("Reads JSON lists of token ids, one a line, and prints the text of each as a JSON string.", "ddtree detokenize");
  std::string path;
  bool skip_special = false, pieces = false;
  app.add_option("--tokenizer", path, "tokenizer.json, or the folder that holds it (default: that of the embedded model)");
  app.add_flag("--skip-special-tokens", skip_special, "leave special tokens such as <|im_end|> out of the text");
  app.add_flag("--pieces", pieces, "print the pieces of text that a stream would get token by token, as a JSON list of strings");
  std::optional<int> exit;
  if (parse_options(&app, argc, argv, &exit); exit) return *exit;
  Result<Tokenizer> tokenizer = load_tokenizer(path);
  if (!tokenizer.ok()) return fail("detokenize", tokenizer.status());
  std::vector<int32_t> ids;
  return each_line("detokenize", [&](const Json& value, std::string* answer) -> std::string {
    if (!value.is_array()) return fmt::format("found {}, expected a JSON list of token ids", value.type_name());
    ids.clear();
    for (const Json& id : value) {
      const bool valid = id.is_number_integer() && id >= 0 && id < tokenizer->id_count();
      if (!valid) return fmt::format("item {} is {}, expected an id from 0 to {}", ids.size(), id.dump(), tokenizer->id_count() - 1);
      ids.push_back(id.get<int32_t>());
    }
    if (!pieces) {
      *answer = Json(tokenizer->decode(ids, skip_special)).dump();
      return {};
    }
    Detokenizer stream(*tokenizer, skip_special);
    std::vector<TextPiece> out;
    for (int32_t id : ids) stream.push(id, &out);
    stream.flush(&out);
    Json list = Json::array();
    for (TextPiece& piece : out) list.push_back(std::move(piece.text));
    *answer = list.dump();
    return {};
  });
}

DDTREE_COMMAND("tokenize", "text to token ids: JSON strings in, JSON lists out, one a line", run_tokenize);
DDTREE_COMMAND("detokenize", "token ids to text: JSON lists in, JSON strings out, one a line", run_detokenize);

}  // namespace
}  // namespace ddtree::cli
