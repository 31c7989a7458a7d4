#include "text/chat_template.h"

#include <fmt/core.h>

#include <nlohmann/json.hpp>

#include "base/json_error.h"
#include "text/jinja.h"
#include "text/jinja_strings.h"

namespace ddtree {

using Json = nlohmann::ordered_json;

namespace {

Status invalid(std::string message) { return Status(Code::kInvalidArgument, std::move(message)); }

// Members of `request` as they are, or null where absent.
const Json& member(const Json& request, const char* name) {
  static const Json null;
  const auto at = request.find(name);
  return at == request.end() ? null : *at;
}

const char* type_of(const Json& json) { return json.type_name(); }

Status prepare_calls(Json& message, size_t index) {
  const auto calls = message.find("tool_calls");
  if (calls == message.end()) return {};
  if (calls->is_null()) {
    message.erase("tool_calls");
    return {};
  }
  if (!calls->is_array())
    return invalid(fmt::format("messages[{}].tool_calls is a {}; an array of calls is needed", index, type_of(*calls)));
  for (size_t j = 0; j < calls->size(); ++j) {
    const std::string where = fmt::format("messages[{}].tool_calls[{}]", index, j);
    Json& call = (*calls)[j];
    if (!call.is_object()) return invalid(fmt::format("{} is a {}; an object is needed", where, type_of(call)));
    const bool wrapped = call.contains("function");
    Json& function = wrapped ? call["function"] : call;
    if (!function.is_object()) return invalid(fmt::format("{}.function is a {}; an object is needed", where, type_of(function)));
    const auto arguments = function.find("arguments");
    if (arguments == function.end() || !arguments->is_string()) continue;
    const std::string field = where + (wrapped ? ".function.arguments" : ".arguments");
    const std::string text = arguments->get<std::string>();
    if (jinja::strip(text).empty()) {
      *arguments = Json::object();
      continue;
    }
    Json decoded;
    try {
      decoded = Json::parse(text);
    } catch (const Json::exception& e) {
      return invalid(fmt::format("{} is not valid JSON ({}); a JSON object as text is needed", field, json_error_text(e.what())));
    }
    if (!decoded.is_object()) return invalid(fmt::format("{} holds a JSON {}; an object is needed", field, type_of(decoded)));
    *arguments = std::move(decoded);
  }
  return {};
}

Status prepare_message(Json& message, size_t index) {
  if (!message.is_object())
    return invalid(fmt::format("messages[{}] is a {}; an object with role and content is needed", index, type_of(message)));
  const auto role = message.find("role");
  if (role == message.end() || !role->is_string()) return invalid(fmt::format("messages[{}].role is missing or not a string", index));
  if (*role == "developer") *role = "system";
  const auto content = message.find("content");
  if (content == message.end()) message["content"] = "";
  else if (content->is_null()) *content = "";
  else if (!content->is_string() && !content->is_array())
    return invalid(fmt::format("messages[{}].content is a {}; a string or an array of parts is needed", index, type_of(*content)));
  const auto reasoning = message.find("reasoning");
  if (reasoning != message.end()) {
    const auto same = message.find("reasoning_content");
    if ((same == message.end() || same->is_null()) && reasoning->is_string()) {
      const Json moved = *reasoning;  // the insertion may move what `reasoning` points to
      message["reasoning_content"] = moved;
    }
    message.erase("reasoning");
  }
  return prepare_calls(message, index);
}

// The text that a message which is to be continued ends with: strings, and the text parts of a list.
std::string text_of(const Json& content) {
  if (content.is_string()) return content.get<std::string>();
  std::string out;
  if (content.is_array())
    for (const auto& part : content)
      if (part.is_object() && part.contains("text") && part["text"].is_string()) out += part["text"].get<std::string>();
  return out;
}

}  // namespace

Result<ChatTemplate> ChatTemplate::parse(std::string source, const Json& globals, std::string name) {
  auto parsed = jinja::Template::parse(source, globals);
  if (const auto* failure = std::get_if<jinja::Failure>(&parsed))
    return Status(Code::kBadModel, fmt::format("{}:{}: {}", name, failure->line, failure->message));
  ChatTemplate out(std::make_shared<const jinja::Template>(std::get<jinja::Template>(std::move(parsed))));
  out.name_ = std::move(name);
  return out;
}

Result<ChatTemplate> ChatTemplate::parse(std::string source) { return parse(std::move(source), Json()); }

Result<std::string> ChatTemplate::render(const Json& variables) const {
  auto rendered = parsed_->render(variables);
  if (auto* text = std::get_if<std::string>(&rendered)) return std::move(*text);
  const auto& failure = std::get<jinja::Failure>(rendered);
  if (failure.kind == jinja::Failure::Kind::kRaised) return invalid(failure.message);
  return invalid(fmt::format("{}:{}: {}", name_, failure.line, failure.message));
}

Result<RenderedChat> ChatTemplate::render_chat(const Json& request) const {
  auto variables = chat_variables(request);
  if (!variables.ok()) return variables.status();
  const Json& flag = member(request, "continue_final_message");
  if (!flag.is_null() && !flag.is_boolean())
    return invalid(fmt::format("continue_final_message is a {}; true or false is needed", type_of(flag)));
  Json last;
  if (flag == true) {
    Json& messages = (*variables)["messages"];
    if (messages.empty() || messages.back()["role"] != "assistant")
      return invalid("continue_final_message: the last of messages has to be the assistant's");
    const Json& prompt = member(request, "add_generation_prompt");
    if (prompt == true)
      return invalid("continue_final_message and add_generation_prompt exclude each other: the continued message is the prompt's end");
    last = messages.back();
    messages.erase(messages.size() - 1);
    (*variables)["add_generation_prompt"] = true;
  }
  auto text = render(*variables);
  if (!text.ok()) return text.status();
  RenderedChat out{std::move(*text), false};
  out.opens_reasoning = opens_reasoning(out.prompt);
  if (flag == true) {
    const std::string content = text_of(last["content"]);
    const Json& given = member(last, "reasoning_content");
    const std::string reasoning = given.is_string() ? given.get<std::string>() : "";
    if (out.opens_reasoning) {
      out.prompt += reasoning;
      if (!content.empty()) {  // the content comes after the block
        out.prompt += "\n</think>\n\n";
        out.opens_reasoning = false;
      }
    }
    out.prompt += content;
  }
  return out;
}

Result<Json> chat_variables(const Json& request) {
  if (!request.is_object()) return invalid(fmt::format("the request is a {}; an object is needed", type_of(request)));
  Json out = Json::object();
  const Json& messages = member(request, "messages");
  if (!messages.is_array())
    return invalid(fmt::format("messages is {}; an array of messages is needed",
                               messages.is_null() ? "missing" : fmt::format("a {}", type_of(messages))));
  out["messages"] = messages;
  for (size_t i = 0; i < messages.size(); ++i) DDTREE_RETURN_IF_ERROR(prepare_message(out["messages"][i], i));

  const Json& tools = member(request, "tools");
  if (!tools.is_null() && !tools.is_array()) return invalid(fmt::format("tools is a {}; an array is needed", type_of(tools)));
  for (size_t i = 0; i < tools.size(); ++i)
    if (!tools[i].is_object()) return invalid(fmt::format("tools[{}] is a {}; an object is needed", i, type_of(tools[i])));
  out["tools"] = tools.empty() ? Json() : tools;  // templates ask `if tools` or `tools is not none`
  const Json& documents = member(request, "documents");
  out["documents"] = documents;

  const Json& effort = member(request, "reasoning_effort");
  if (!effort.is_null()) out["reasoning_effort"] = effort;
  const Json& kwargs = member(request, "chat_template_kwargs");
  if (!kwargs.is_null() && !kwargs.is_object())
    return invalid(fmt::format("chat_template_kwargs is a {}; an object is needed", type_of(kwargs)));
  const Json& prompt = member(request, "add_generation_prompt");
  if (!prompt.is_null() && !prompt.is_boolean())
    return invalid(fmt::format("add_generation_prompt is a {}; true or false is needed", type_of(prompt)));
  out["add_generation_prompt"] = prompt.is_null() ? true : prompt.get<bool>();
  for (const auto& [key, value] : kwargs.items()) {
    if (key == "messages" || key == "tools")
      return invalid(fmt::format("chat_template_kwargs.{0}: give {0} at the request's top level", key));
    out[key] = value;
  }
  return out;
}

bool opens_reasoning(std::string_view rendered_prompt) { return jinja::strip(rendered_prompt, nullptr, 2).ends_with("<think>"); }

}  // namespace ddtree
