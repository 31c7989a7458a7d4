// What a request may say, and what it is told where it says it wrongly.
#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>

#include "server/api_request.h"
#include "server/json.h"

using namespace ddtree;
using Catch::Matchers::ContainsSubstring;

namespace {

Json chat(const char* extra) {
  Json body = Json::parse(R"({"messages": [{"role": "user", "content": "hi"}]})");
  body.update(Json::parse(extra));
  return body;
}

FieldLimits limits() {
  FieldLimits l;
  l.id_count = 4096;
  l.defaults.do_sample = true;
  l.defaults.temperature = 0.6f;
  l.defaults.top_k = 20;
  l.defaults.top_p = 0.95f;
  return l;
}

std::optional<ApiError> check(const char* extra) {
  ChatFields f;
  return parse_chat(chat(extra), limits(), &f);
}

ChatFields read(const char* extra) {
  ChatFields f;
  const auto e = parse_chat(chat(extra), limits(), &f);
  INFO(extra << ": " << (e ? e->message : ""));
  REQUIRE_FALSE(e);
  return f;
}

}  // namespace

TEST_CASE("a request that says nothing gets the checkpoint's defaults") {
  const ChatFields f = read("{}");
  CHECK(f.engine.sampling.temperature == 0.6f);
  CHECK(f.engine.sampling.top_k == 20);
  CHECK(f.engine.sampling.top_p == 0.95f);
  CHECK(f.max_tokens == 0);
  CHECK_FALSE(f.stream);
  CHECK(f.engine.skip_special_tokens);
  // Two requests without a seed do not share one.
  CHECK(f.engine.sampling.seed != read("{}").engine.sampling.seed);
}

TEST_CASE("every field reaches the engine") {
  const ChatFields f = read(R"({"temperature": 0, "top_p": 0.5, "top_k": 7, "min_p": 0.1, "presence_penalty": 1, "frequency_penalty": -1,
    "repetition_penalty": 1.5, "seed": 18446744073709551615, "max_tokens": 5, "max_completion_tokens": 9, "min_tokens": 3, "stop": ["a", "b"],
    "stop_token_ids": [1, 4095], "ignore_eos": true, "include_stop_str_in_output": true, "skip_special_tokens": false, "stream": true,
    "stream_options": {"include_usage": true, "continuous_usage_stats": true}, "return_token_ids": true, "speculative_algorithm": "dflash",
    "speculative_budget": 64})");
  const Request& r = f.engine;
  CHECK(r.sampling.temperature == 0);
  CHECK(r.sampling.top_p == 0.5f);
  CHECK(r.sampling.top_k == 7);
  CHECK(r.sampling.min_p == 0.1f);
  CHECK(r.sampling.presence_penalty == 1);
  CHECK(r.sampling.frequency_penalty == -1);
  CHECK(r.sampling.repetition_penalty == 1.5f);
  CHECK(r.sampling.seed == 18446744073709551615ull);
  CHECK(f.max_tokens == 9);  // the newer name wins
  CHECK(r.min_tokens == 3);
  CHECK(r.stop_strings == std::vector<std::string>{"a", "b"});
  CHECK(r.stop_ids == std::vector<int32_t>{1, 4095});
  CHECK(r.ignore_eos);
  CHECK(r.include_stop_string);
  CHECK_FALSE(r.skip_special_tokens);
  CHECK(f.stream);
  CHECK(f.include_usage);
  CHECK(f.continuous_usage);
  CHECK(f.return_token_ids);
  CHECK(r.mode == SpeculationMode::kDflash);
  CHECK(r.budget == 64);
  CHECK(read(R"({"seed": -1})").engine.sampling.seed == UINT64_MAX);
  // 0 is a seed like any other; the engine draws one of its own only where none is said to be given.
  const SamplingParams zero = read(R"({"seed": 0})").engine.sampling;
  CHECK(zero.seed == 0);
  CHECK(zero.seed_given);
  CHECK(read(R"({"top_k": -1})").engine.sampling.top_k == 0);
  CHECK(read(R"({"stop": "one"})").engine.stop_strings == std::vector<std::string>{"one"});
  CHECK(read(R"({"speculative_budget": "auto"})").engine.budget == 0);
}

TEST_CASE("null is the same as absent") {
  const ChatFields f =
      read(R"({"temperature": null, "top_p": null, "stop": null, "seed": null, "max_tokens": null, "stream": null, "stream_options": null,
    "tools": null, "tool_choice": null, "response_format": null, "logprobs": null, "top_logprobs": null, "n": null, "logit_bias": null, "model": null})");
  CHECK(f.engine.sampling.temperature == 0.6f);
  CHECK(f.ignored.empty());
}

TEST_CASE("a wrong type or range is a 400 that names the field and what would be right") {
  struct Case {
    const char* extra;
    const char* param;
    const char* says;
  };
  const Case cases[] = {
      {R"({"temperature": "hot"})", "temperature", "number from 0 to 2"},
      {R"({"temperature": 2.1})", "temperature", "number from 0 to 2"},
      {R"({"temperature": true})", "temperature", "found true"},
      {R"({"top_p": 0})", "top_p", "above 0"},
      {R"({"top_p": 1.01})", "top_p", "0 to 1"},
      {R"({"top_k": 1.5})", "top_k", "integer"},
      {R"({"top_k": -2})", "top_k", "at least -1"},
      {R"({"min_p": -0.1})", "min_p", "0 to 1"},
      {R"({"presence_penalty": 3})", "presence_penalty", "-2 to 2"},
      {R"({"frequency_penalty": []})", "frequency_penalty", "-2 to 2"},
      {R"({"repetition_penalty": 0})", "repetition_penalty", "0.001 to 10"},
      {R"({"repetition_penalty": 1e-38})", "repetition_penalty", "0.001 to 10"},  // a logit over this is infinite
      {R"({"seed": "x"})", "seed", "integer"},
      {R"({"seed": 1.5})", "seed", "integer"},
      {R"({"max_tokens": 0})", "max_tokens", "at least 1"},
      {R"({"max_tokens": -5})", "max_tokens", "at least 1"},
      {R"({"max_tokens": 99999999999999999999})", "max_tokens", "from 1 to 2147483647"},
      {R"({"top_k": 2147483648})", "top_k", "from -1 to 2147483647"},
      {R"({"max_completion_tokens": "12"})", "max_completion_tokens", "integer"},
      {R"({"min_tokens": 5, "max_tokens": 4})", "min_tokens", "not be above"},
      {R"({"stop": 5})", "stop", "string or a list"},
      {R"({"stop": [""]})", "stop", "stop[0]"},
      {R"({"stop": ["a", 1]})", "stop", "stop[1]"},
      {R"({"stop_token_ids": [4096]})", "stop_token_ids", "0 to 4095"},
      {R"({"stop_token_ids": [-1]})", "stop_token_ids", "0 to 4095"},
      {R"({"stream": 1})", "stream", "true or false"},
      {R"({"stream_options": {"include_usage": "yes"}})", "stream_options.include_usage", "true or false"},
      {R"({"stream_options": []})", "stream_options", "object"},
      {R"({"chat_template_kwargs": "x"})", "chat_template_kwargs", "object"},
      {R"({"messages": []})", "messages", "empty"},
      {R"({"messages": "hi"})", "messages", "list"},
      {R"({"messages": ["hi"]})", "messages[0]", "object"},
      {R"({"messages": [{"content": "hi"}]})", "messages[0].role", "role"},
      {R"({"messages": [{"role": "user", "content": 5}]})", "messages[0].content", "string or a list"},
      {R"({"messages": [{"role": "user", "content": [5]}]})", "messages[0].content[0]", "type"},
      {R"({"messages": [{"role": "user", "content": [{"type": "text"}]}]})", "messages[0].content[0].text", "string"},
      {R"({"messages": [{"role": "assistant", "tool_calls": [{"id": "x"}]}]})", "messages[0].tool_calls[0]", "function.name"},
      {R"({"tools": {}})", "tools", "list"},
      {R"({"tools": [{"type": "function"}]})", "tools[0].function", "name"},
      {R"({"tools": [{"type": "code"}]})", "tools[0].type", "function"},
      {R"({"tool_choice": "sometimes"})", "tool_choice", "auto"},
      {R"({"speculative_algorithm": "EAGLE"})", "speculative_algorithm", "DDTREE"},
      {R"({"speculative_budget": 257})", "speculative_budget", "1 to 256"},
      {R"({"continue_final_message": true})", "continue_final_message", "assistant"},
      {R"({"model": 5})", "model", "string"},
  };
  for (const Case& c : cases) {
    INFO(c.extra);
    const auto e = check(c.extra);
    REQUIRE(e);
    CHECK(e->status == 400);
    CHECK(e->type == "invalid_request_error");
    CHECK(e->code == "invalid_value");
    CHECK(e->param == c.param);
    CHECK_THAT(e->message, ContainsSubstring(c.says));
  }
}

TEST_CASE("what is not built is refused by name, and its neutral values are not") {
  for (const char* extra :
       {R"({"n": 2})", R"({"logprobs": true})", R"({"top_logprobs": 5})", R"({"logit_bias": {"5": 1}})",
        R"({"response_format": {"type": "json_object"}})", R"({"response_format": {"type": "json_schema", "json_schema": {}}})",
        R"({"structured_outputs": {"json": {}}})", R"({"guided_json": {}})", R"({"tool_choice": "required"})",
        R"({"tool_choice": {"type": "function", "function": {"name": "x"}}})", R"({"functions": [{"name": "x"}]})",
        R"({"bad_words": ["x"]})", R"({"thinking_token_budget": 100})", R"({"prompt_logprobs": 1})", R"({"best_of": 3})",
        R"({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]})"}) {
    INFO(extra);
    const auto e = check(extra);
    REQUIRE(e);
    CHECK(e->status == 400);
    CHECK(e->code == "unsupported_parameter");
    CHECK(!e->param.empty());
  }
  const ChatFields f = read(
      R"({"n": 1, "logprobs": false, "top_logprobs": 0, "logit_bias": {}, "response_format": {"type": "text"}, "structured_outputs": {},
    "tool_choice": "auto", "functions": [], "modalities": ["text"], "best_of": 1, "user": "me", "metadata": {"a": "b"}, "parallel_tool_calls": true})");
  CHECK(f.ignored.empty());
}

TEST_CASE("unknown fields are listed, in the client's order") {
  CHECK(read(R"({"zeta": 1, "alpha": {"x": 1}, "temperature": 1})").ignored == std::vector<std::string>{"zeta", "alpha"});
}

TEST_CASE("tool_choice none shows the model no tools") {
  const char* tools = R"("tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}])";
  CHECK(read(("{" + std::string(tools) + "}").c_str()).tools.size() == 1);
  const ChatFields f = read(("{" + std::string(tools) + R"(, "tool_choice": "none"})").c_str());
  CHECK(f.tools.is_null());
  CHECK_FALSE(f.body.contains("tools"));
}

TEST_CASE("reasoning_effort none turns thinking off unless the request says otherwise") {
  CHECK(read(R"({"reasoning_effort": "none"})").body["chat_template_kwargs"]["enable_thinking"] == false);
  CHECK(read(R"({"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": true}})")
            .body["chat_template_kwargs"]["enable_thinking"] == true);
  CHECK_FALSE(read(R"({"reasoning_effort": "high"})").body.contains("chat_template_kwargs"));
}

TEST_CASE("prompts of completions: text, ids, lists of either") {
  const auto prompts = [](const char* prompt) {
    CompletionFields f;
    const auto e = parse_completion(Json{{"prompt", Json::parse(prompt)}}, limits(), &f);
    REQUIRE_FALSE(e);
    return f.prompts;
  };
  CHECK(std::get<std::string>(prompts(R"("a")").at(0)) == "a");
  CHECK(std::get<std::vector<int32_t>>(prompts("[1, 2, 3]").at(0)) == std::vector<int32_t>{1, 2, 3});
  const auto mixed = prompts(R"([[1, 2], "b", [3]])");
  REQUIRE(mixed.size() == 3);
  CHECK(std::get<std::string>(mixed[1]) == "b");
  CHECK(std::get<std::vector<int32_t>>(mixed[2]) == std::vector<int32_t>{3});
  for (const char* bad :
       {"5", "{}", "[]", R"("")", "[4096]", "[1, \"a\"]", "[[]]", "[[1.5]]", "[null]", "true", "[-1]", "[99999999999999999999]"}) {
    INFO(bad);
    CompletionFields f;
    const auto e = parse_completion(Json{{"prompt", Json::parse(bad)}}, limits(), &f);
    REQUIRE(e);
    CHECK(e->status == 400);
    CHECK(e->param == "prompt");
  }
  for (const char* extra : {R"({"echo": true})", R"({"suffix": "x"})", R"({"logprobs": 1})", R"({"logprobs": 0})", R"({"best_of": 2})"}) {
    INFO(extra);
    Json body{{"prompt", "x"}};
    body.update(Json::parse(extra));
    CompletionFields f;
    const auto e = parse_completion(body, limits(), &f);
    REQUIRE(e);
    CHECK(e->code == "unsupported_parameter");
  }
}

TEST_CASE("bodies that are no JSON object say so and do not crash") {
  std::string error;
  for (const std::string& bad :
       {std::string(), std::string("   "), std::string("{"), std::string("[1]"), std::string("5"), std::string("{\"a\": 1e999}"),
        std::string("{\"a\": \"\xff\xfe\"}"), std::string("{\"a\": \"\xed\xa0\x80\"}"), std::string("nul"), std::string("{\"a\": 01}"),
        std::string(1'000'000, '['), std::string(500, '{'), "{\"a\":" + std::string(200, '[') + std::string(200, ']') + "}",
        std::string("{\"a\": 1}\0x", 10)}) {
    parse_json_object(bad, &error);
    INFO(bad.substr(0, 40));
    CHECK(!error.empty());
  }
  CHECK(parse_json_object("{\"a\": \"[[[[\"}", &error)["a"] == "[[[[");
  CHECK(error.empty());
  // Errors leave as valid UTF-8 whatever a message holds.
  ApiError e = invalid_value("x", "broken \xff here");
  const Json back = Json::parse(e.json());
  CHECK(back["error"]["code"] == "invalid_value");
  CHECK(back["error"]["param"] == "x");
  CHECK(back["error"]["type"] == "invalid_request_error");
  CHECK(back["error"]["message"] == "broken \uFFFD here");
}
