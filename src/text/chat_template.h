// A checkpoint's chat template, and what happens to an OpenAI request before it is rendered.
#pragma once

#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

#include "base/status.h"

namespace ddtree {

namespace jinja {
class Template;
}

// A prompt as the model will read it.
struct RenderedChat {
  std::string prompt;
  bool opens_reasoning = false;  // the answer starts inside <think>: the reasoning parser starts there
};

// Parsed once, rendered from any number of threads at once. Rendering is bounded: deep recursion, endless loops and outputs without
// end come back as errors.
class ChatTemplate {
 public:
  // `source`: text of chat_template.jinja (or of tokenizer_config.json's "chat_template"). `globals`: an object whose members every
  // rendering sees unless the variables override them (bos_token, eos_token, ...); null for none. `name`: file named in messages.
  // Errors: kBadModel naming file, line and what was found.
  static Result<ChatTemplate> parse(std::string source, const nlohmann::ordered_json& globals, std::string name = "chat_template.jinja");
  static Result<ChatTemplate> parse(std::string source);

  // Renders with exactly these variables (an object). Errors: kInvalidArgument; the template's own raise_exception(message) gives the
  // message alone, any other failure "file:line: what".
  Result<std::string> render(const nlohmann::ordered_json& variables) const;

  // Renders the body of an OpenAI chat request: chat_variables() below, then render(), then `continue_final_message`, which leaves the
  // last assistant message open so that the model goes on with it.
  Result<RenderedChat> render_chat(const nlohmann::ordered_json& request) const;

 private:
  explicit ChatTemplate(std::shared_ptr<const jinja::Template> parsed) : parsed_(std::move(parsed)) {}
  std::shared_ptr<const jinja::Template> parsed_;
  std::string name_;
};

// The variables that a template expects, from a chat request's body. Members read: messages, tools, documents, chat_template_kwargs (its
// members become variables), reasoning_effort, add_generation_prompt (default true; false where the last message is continued).
//   content null or absent -> ""; role developer -> system; `reasoning` -> `reasoning_content` where that is absent;
//   tool_calls[].function.arguments given as a JSON text -> decoded ("" -> {}); tools: unchanged, in the client's key order, [] -> null.
// Errors: kInvalidArgument naming the field, as in "messages[2].tool_calls[0].function.arguments is not valid JSON: ...".
Result<nlohmann::ordered_json> chat_variables(const nlohmann::ordered_json& request);

// Whether the answer to this prompt starts inside a reasoning block: it ends with "<think>" and at most white space.
bool opens_reasoning(std::string_view rendered_prompt);

}  // namespace ddtree
