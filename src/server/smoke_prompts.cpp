#define PCRE2_CODE_UNIT_WIDTH 8
#include "server/smoke_prompts.h"

#include <fmt/core.h>
#include <pcre2.h>

#include <algorithm>
#include <fstream>
#include <memory>
#include <set>

#include "server/json.h"

namespace ddtree {
namespace {

struct FreeCode {
  void operator()(pcre2_code* p) const { pcre2_code_free(p); }
};

// nullptr and *error where the pattern is none.
std::function<std::string(const std::string&)> matcher(const std::string& pattern, std::string* error) {
  int code = 0;
  PCRE2_SIZE at = 0;
  std::shared_ptr<pcre2_code> compiled(pcre2_compile(reinterpret_cast<PCRE2_SPTR>(pattern.data()), pattern.size(),
                                                     PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE, &code, &at, nullptr),
                                       FreeCode{});
  if (!compiled) {
    PCRE2_UCHAR text[256];
    pcre2_get_error_message(code, text, sizeof text);
    *error = fmt::format("{} at character {}", reinterpret_cast<const char*>(text), at);
    return nullptr;
  }
  return [compiled, pattern](const std::string& answer) -> std::string {
    std::unique_ptr<pcre2_match_data, void (*)(pcre2_match_data*)> data(pcre2_match_data_create_from_pattern(compiled.get(), nullptr),
                                                                        pcre2_match_data_free);
    std::unique_ptr<pcre2_match_context, void (*)(pcre2_match_context*)> context(pcre2_match_context_create(nullptr),
                                                                                 pcre2_match_context_free);
    pcre2_set_match_limit(context.get(), 1'000'000);  // a pattern that backtracks without end is an answer, too
    const int found =
        pcre2_match(compiled.get(), reinterpret_cast<PCRE2_SPTR>(answer.data()), answer.size(), 0, 0, data.get(), context.get());
    if (found >= 0) return {};
    return found == PCRE2_ERROR_NOMATCH ? fmt::format("the answer does not match {} (expect_regex)", pattern)
                                        : fmt::format("{} could not be tried (expect_regex: error {})", pattern, found);
  };
}

// One line. `wrong` says file and line.
struct LineReader {
  std::string where;  // "prompts.jsonl:3"
  Status wrong(const std::string& field, const std::string& what) const {
    return {Code::kUsage, fmt::format("{}: {}{}{}", where, field, field.empty() ? "" : ": ", what)};
  }

  Result<std::vector<std::string>> texts(const Json& value, const char* field) const {
    std::vector<std::string> out;
    if (value.is_string()) out.push_back(value.get<std::string>());
    else if (value.is_array())
      for (const Json& each : value) {
        if (!each.is_string()) return wrong(field, "must be a string or an array of strings");
        out.push_back(each.get<std::string>());
      }
    else return wrong(field, "must be a string or an array of strings");
    if (out.empty()) return wrong(field, "is empty; leave it out");
    for (const std::string& part : out)
      if (part.empty()) return wrong(field, "has an empty string, which is in every answer");
    return out;
  }

  Result<SmokePrompt> read(const std::string& text) const {
    std::string trouble;
    const Json json = parse_json_object(text, &trouble, "the line");
    if (!trouble.empty()) return wrong("", trouble);
    SmokePrompt prompt;
    static const std::set<std::string> known = {"id", "user", "system", "messages", "expect", "expect_regex", "reject", "max_tokens"};
    for (const auto& [name, value] : json.items())
      if (!known.count(name))
        return wrong(name, "is no field of a prompt; there are id, user, system, messages, expect, expect_regex, reject, max_tokens");
    if (!json.contains("id") || !json["id"].is_string() || json["id"].get<std::string>().empty())
      return wrong("id", "must be there and a string: histories are compared by it");
    prompt.id = json["id"].get<std::string>();
    if (prompt.id.size() > 64) return wrong("id", fmt::format("has {} bytes; at most 64", prompt.id.size()));
    if (json.contains("user") == json.contains("messages")) return wrong("user", "give either user or messages");
    if (json.contains("system")) {
      if (!json.contains("user")) return wrong("system", "goes with user; in messages it is one of them");
      if (!json["system"].is_string()) return wrong("system", "must be a string");
      prompt.messages.push_back({"system", json["system"].get<std::string>()});
    }
    if (json.contains("user")) {
      if (!json["user"].is_string() || json["user"].get<std::string>().empty()) return wrong("user", "must be a string that is not empty");
      prompt.messages.push_back({"user", json["user"].get<std::string>()});
    } else {
      const Json& messages = json["messages"];
      if (!messages.is_array() || messages.empty()) return wrong("messages", "must be an array that is not empty");
      for (size_t i = 0; i < messages.size(); ++i) {
        const std::string at = fmt::format("messages[{}]", i);
        const Json& m = messages[i];
        if (!m.is_object()) return wrong(at, "must be an object with role and content");
        for (const auto& [name, value] : m.items())
          if (name != "role" && name != "content") return wrong(at + "." + name, "is not known; a message has role and content");
        if (!m.contains("role") || !m["role"].is_string()) return wrong(at + ".role", "must be a string");
        const std::string role = m["role"].get<std::string>();
        if (role != "system" && role != "developer" && role != "user" && role != "assistant")
          return wrong(at + ".role", fmt::format("is \"{}\"; must be system, developer, user or assistant", role));
        if (!m.contains("content") || !m["content"].is_string()) return wrong(at + ".content", "must be a string");
        prompt.messages.push_back({role, m["content"].get<std::string>()});
      }
    }
    if (json.contains("max_tokens")) {
      const Json& n = json["max_tokens"];
      if (!n.is_number_integer() || n.get<int64_t>() < 1 || n.get<int64_t>() > 1'000'000)
        return wrong("max_tokens", "must be a whole number from 1 to 1000000");
      prompt.max_tokens = n.get<int32_t>();
    }
    for (const auto& [field, into] : {std::pair{"expect", &prompt.expect}, std::pair{"reject", &prompt.reject}}) {
      if (!json.contains(field)) continue;
      auto list = texts(json[field], field);
      if (!list) return list.status();
      *into = std::move(*list);
    }
    if (json.contains("expect_regex")) {
      if (!json["expect_regex"].is_string() || json["expect_regex"].get<std::string>().empty())
        return wrong("expect_regex", "must be a string that is not empty");
      prompt.expect_regex = json["expect_regex"].get<std::string>();
      prompt.match = matcher(prompt.expect_regex, &trouble);
      if (!prompt.match) return wrong("expect_regex", trouble);
    }
    return prompt;
  }
};

}  // namespace

Result<std::vector<SmokePrompt>> read_smoke_prompts(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in) return {Code::kUsage, fmt::format("{}: the file cannot be read", path)};
  std::vector<SmokePrompt> prompts;
  std::string line;
  for (int number = 1; std::getline(in, line); ++number) {
    if (!line.empty() && line.back() == '\r') line.pop_back();
    if (line.find_first_not_of(" \t") == std::string::npos) continue;
    const LineReader reader{fmt::format("{}:{}", path, number)};
    auto prompt = reader.read(line);
    if (!prompt) return prompt.status();
    if (std::any_of(prompts.begin(), prompts.end(), [&](const SmokePrompt& p) { return p.id == prompt->id; }))
      return reader.wrong("id", fmt::format("\"{}\" is a line's above already", prompt->id));
    prompts.push_back(std::move(*prompt));
  }
  if (in.bad()) return {Code::kUsage, fmt::format("{}: the file cannot be read to its end", path)};
  if (prompts.empty()) return {Code::kUsage, fmt::format("{}: no prompt in it; each line is one, as JSON", path)};
  return prompts;
}

const char* smoke_prompts_help() {
  return "  {\"id\": \"refund\", \"user\": \"Say OK.\", \"expect\": \"OK\", \"max_tokens\": 32}\n"
         "  id            names the prompt in results and histories; must differ from line to line\n"
         "  user          the user's message (and system, if given); or\n"
         "  messages      [{\"role\": \"system|user|assistant\", \"content\": \"…\"}, …]\n"
         "  expect        text that must be in the answer; or a list, each of which must be\n"
         "  expect_regex  a Perl-compatible regular expression that must match somewhere in it\n"
         "  reject        text that must not be in the answer; or a list\n"
         "  max_tokens    default 256\n";
}

}  // namespace ddtree
