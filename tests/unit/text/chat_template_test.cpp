#include "text/chat_template.h"

#include <catch2/catch_test_macros.hpp>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string>

using namespace ddtree;
using Json = nlohmann::ordered_json;

namespace {

ChatTemplate qwen() {
  std::ifstream in(std::string(DDTREE_SOURCE_DIR) + "/tests/data/templates/qwen3.6.jinja");
  auto result = ChatTemplate::parse({std::istreambuf_iterator<char>(in), {}});
  REQUIRE(result.ok());
  return *result;
}

std::string refusal(const Json& request) {
  const auto out = chat_variables(request);
  REQUIRE_FALSE(out.ok());
  CHECK(out.status().code() == Code::kInvalidArgument);
  return out.status().message();
}

}  // namespace

TEST_CASE("messages are prepared as clients mean them", "[chat_template]") {
  const Json request = Json::parse(R"({
    "model": "m", "temperature": 1,
    "messages": [
      {"role": "developer", "content": "be brief"},
      {"role": "user", "content": null},
      {"role": "assistant", "reasoning": "hm", "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{\"z\": 1.0, \"a\": [true, null]}"}},
        {"id": "2", "type": "function", "function": {"name": "g", "arguments": " "}},
        {"id": "3", "type": "function", "function": {"name": "h", "arguments": {"k": 1}}}]},
      {"role": "assistant", "content": "x", "reasoning": "a", "reasoning_content": "b", "tool_calls": null}],
    "tools": [{"type": "function", "function": {"parameters": {}, "name": "f", "strict": true}}],
    "chat_template_kwargs": {"enable_thinking": false, "add_generation_prompt": false}, "reasoning_effort": "low"})");
  const auto result = chat_variables(request);
  REQUIRE(result.ok());
  const Json& out = *result;
  CHECK(out["messages"][0]["role"] == "system");
  CHECK(out["messages"][1]["content"] == "");
  CHECK(out["messages"][2]["content"] == "");
  CHECK(out["messages"][2]["reasoning_content"] == "hm");
  CHECK_FALSE(out["messages"][2].contains("reasoning"));
  CHECK(out["messages"][2]["tool_calls"][0]["function"]["arguments"].dump() == R"({"z":1.0,"a":[true,null]})");
  CHECK(out["messages"][2]["tool_calls"][1]["function"]["arguments"].dump() == "{}");
  CHECK(out["messages"][2]["tool_calls"][2]["function"]["arguments"]["k"] == 1);
  CHECK(out["messages"][3]["reasoning_content"] == "b");
  CHECK_FALSE(out["messages"][3].contains("tool_calls"));
  CHECK(out["tools"].dump() == request["tools"].dump());
  CHECK(out["enable_thinking"] == false);
  CHECK(out["add_generation_prompt"] == false);
  CHECK(out["reasoning_effort"] == "low");
  CHECK_FALSE(out.contains("temperature"));
  CHECK((*chat_variables({{"messages", Json::array()}, {"tools", Json::array()}}))["tools"].is_null());
}

TEST_CASE("what is wrong in a request is named", "[chat_template]") {
  CHECK(refusal(Json::object()).find("messages is missing") != std::string::npos);
  CHECK(refusal({{"messages", "hi"}}).find("messages is a string") != std::string::npos);
  CHECK(refusal({{"messages", {"hi"}}}).find("messages[0] is a string") != std::string::npos);
  CHECK(refusal({{"messages", {{{"content", "x"}}}}}).find("messages[0].role") != std::string::npos);
  CHECK(refusal({{"messages", {{{"role", "user"}, {"content", 5}}}}}).find("messages[0].content is a number") != std::string::npos);
  const auto with_call = [](const Json& arguments) {
    return Json{{"messages",
                 {{{"role", "user"}, {"content", "x"}},
                  {{"role", "assistant"}, {"tool_calls", {{{"function", {{"name", "f"}, {"arguments", arguments}}}}}}}}}};
  };
  CHECK(refusal(with_call("{oops")).find("messages[1].tool_calls[0].function.arguments is not valid JSON (line 1, column 2: ") !=
        std::string::npos);
  CHECK(refusal(with_call("[1]")).find("messages[1].tool_calls[0].function.arguments holds a JSON array") != std::string::npos);
  CHECK(refusal({{"messages", Json::array()}, {"tools", 1}}).find("tools is a number") != std::string::npos);
  CHECK(refusal({{"messages", Json::array()}, {"chat_template_kwargs", 1}}).find("chat_template_kwargs") != std::string::npos);
  CHECK(refusal({{"messages", Json::array()}, {"chat_template_kwargs", {{"messages", 1}}}}).find("chat_template_kwargs.messages") !=
        std::string::npos);
}

TEST_CASE("the template's own refusal is the message, other failures say where", "[chat_template]") {
  const auto own = qwen().render_chat({{"messages", Json::array()}});
  REQUIRE_FALSE(own.ok());
  CHECK(own.status().code() == Code::kInvalidArgument);
  CHECK(own.status().message() == "No messages provided.");
  const auto other = ChatTemplate::parse("a\n{{ x.y.z }}", Json(), "t.jinja");
  REQUIRE(other.ok());
  CHECK(other->render({{"x", Json::object()}}).status().message() == "t.jinja:2: 'dict object' has no attribute 'y'");
  const auto broken = ChatTemplate::parse("{% if %}", Json(), "t.jinja");
  REQUIRE_FALSE(broken.ok());
  CHECK(broken.status().code() == Code::kBadModel);
  CHECK(broken.status().message().starts_with("t.jinja:1: "));
}

TEST_CASE("globals are seen and can be overridden", "[chat_template]") {
  const auto t = ChatTemplate::parse("{{ bos_token }}{{ eos_token }}", {{"bos_token", "<s>"}, {"eos_token", "</s>"}});
  REQUIRE(t.ok());
  CHECK(*t->render(Json::object()) == "<s></s>");
  CHECK(*t->render({{"eos_token", "E"}}) == "<s>E");
}

TEST_CASE("where the answer begins", "[chat_template]") {
  const Json messages = {{{"role", "user"}, {"content", "what does <think> mean? <think>"}}};
  const auto on = qwen().render_chat({{"messages", messages}});
  REQUIRE(on.ok());
  CHECK(on->opens_reasoning);
  CHECK(on->prompt.ends_with("assistant\n<think>\n"));
  const auto off = qwen().render_chat({{"messages", messages}, {"chat_template_kwargs", {{"enable_thinking", false}}}});
  REQUIRE(off.ok());
  CHECK_FALSE(off->opens_reasoning);
  CHECK(off->prompt.ends_with("<think>\n\n</think>\n\n"));
  CHECK(opens_reasoning("x<think>"));
  CHECK_FALSE(opens_reasoning("x<think>\nso"));
}

TEST_CASE("the last assistant message can be continued", "[chat_template]") {
  const auto with = [](const Json& last, const Json& more = Json::object()) {
    Json request = {{"messages", {{{"role", "user"}, {"content", "q"}}, last}}, {"continue_final_message", true}};
    request.update(more);
    return qwen().render_chat(request);
  };
  const Json off = {{"chat_template_kwargs", {{"enable_thinking", false}}}};
  CHECK(with({{"role", "assistant"}, {"content", "The ans"}}, off)->prompt.ends_with("</think>\n\nThe ans"));
  const auto content = with({{"role", "assistant"}, {"content", "The ans"}});
  CHECK(content->prompt.ends_with("assistant\n<think>\n\n</think>\n\nThe ans"));
  CHECK_FALSE(content->opens_reasoning);
  const auto thinking = with({{"role", "assistant"}, {"content", ""}, {"reasoning", "I was"}});
  CHECK(thinking->prompt.ends_with("assistant\n<think>\nI was"));
  CHECK(thinking->opens_reasoning);
  CHECK(with({{"role", "user"}, {"content", "x"}}).status().message().find("continue_final_message") != std::string::npos);
  CHECK(with({{"role", "assistant"}, {"content", "x"}}, {{"add_generation_prompt", true}}).status().message().find("exclude") !=
        std::string::npos);
}
