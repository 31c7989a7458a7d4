// Chat and completions over a scripted engine: frames, usage, splits, errors.
#include <catch2/catch_test_macros.hpp>
#include <cstdlib>
#include <cstring>
#include <sstream>

#include "harness.h"

using namespace ddtree;
using namespace ddtree::test;

namespace {

constexpr const char* kThinking = "I greet her.\n</think>\n\nHello, Carol! Grüße 日本 🙂";
constexpr const char* kCall =
    "</think>\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\nRabat\n</parameter>\n</function>\n</tool_call>";

Json weather_tools() {
  return Json::parse(
      R"([{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}])");
}

// A stream put together again.
struct Joined {
  std::string content, reasoning, reasoning_alias, finish, call_name, call_id, call_arguments;
  std::vector<int32_t> ids;
  int chunks = 0, usage_chunks = 0;
  bool done = false, role_first = false, usage_last = false, usage_null = true;
  Json usage, last, error;
};

Joined join(const std::string& text) {
  Joined j;
  const auto events = sse_data(text);
  for (size_t i = 0; i < events.size(); ++i) {
    if (events[i].empty() || events[i][0] == ':') continue;
    if (events[i] == "[DONE]") {
      j.done = i + 1 == events.size() || events[i + 1].empty();
      continue;
    }
    CHECK_FALSE(j.done);
    const Json e = Json::parse(events[i]);
    if (e.contains("error")) {
      j.error = e;
      continue;
    }
    if (e["choices"].empty()) {
      ++j.usage_chunks;
      j.usage = e["usage"];
      j.usage_last = i + 1 < events.size() && events[i + 1] == "[DONE]";
      continue;
    }
    const Json& c = e["choices"][0];
    const Json& d = c["delta"];
    if (j.chunks++ == 0) j.role_first = d.value("role", "") == "assistant";
    if (e.contains("usage") && !e["usage"].is_null()) j.usage_null = false;
    if (d.contains("content")) j.content += d["content"].get<std::string>();
    if (d.contains("reasoning_content")) j.reasoning += d["reasoning_content"].get<std::string>();
    if (d.contains("reasoning")) j.reasoning_alias += d["reasoning"].get<std::string>();
    if (d.contains("tool_calls"))
      for (const Json& call : d["tool_calls"]) {
        CHECK(call["index"].is_number());
        if (call.contains("id")) {
          j.call_id = call["id"];
          CHECK(call["type"] == "function");
          j.call_name = call["function"]["name"];
        }
        j.call_arguments += call["function"]["arguments"].get<std::string>();
      }
    if (c.contains("token_ids")) j.ids.insert(j.ids.end(), c["token_ids"].begin(), c["token_ids"].end());
    if (!c["finish_reason"].is_null()) {
      j.finish = c["finish_reason"];
      j.last = e;
    }
  }
  return j;
}

}  // namespace

TEST_CASE("a chat reply: text, split reasoning, usage, statistics") {
  Harness h;
  h.engine.answer = [](const Request&) { return kThinking; };
  const auto r = h.post("/v1/chat/completions", chat_body());
  REQUIRE(r.status == 200);
  CHECK(r.body["object"] == "chat.completion");
  CHECK(r.body["model"] == "tiny");
  CHECK(r.body["id"].get<std::string>().rfind("chatcmpl-", 0) == 0);
  const Json& m = r.body["choices"][0]["message"];
  CHECK(m["role"] == "assistant");
  CHECK(m["content"] == "Hello, Carol! Grüße 日本 🙂");
  CHECK(m["reasoning_content"] == "I greet her.");
  CHECK(m["reasoning"] == m["reasoning_content"]);
  CHECK(r.body["choices"][0]["finish_reason"] == "stop");
  CHECK(r.body["choices"][0]["stop_reason"].is_null());
  CHECK(r.body["choices"][0]["matched_stop"] == h.engine.settings.eos_ids[0]);
  const Json& u = r.body["usage"];
  CHECK(u["total_tokens"] == u["prompt_tokens"].get<int>() + u["completion_tokens"].get<int>());
  const int reasoning = u["completion_tokens_details"]["reasoning_tokens"];
  CHECK(reasoning == static_cast<int>(tiny_tokenizer().encode("I greet her.\n</think>").size()));
  CHECK(reasoning < u["completion_tokens"].get<int>());
  // Identities between the figures (I3).
  const Json& s = r.body["metrics"]["speculative_decoding"];
  int steps = 0, accepted = 0;
  for (size_t i = 0; i < s["acceptance_histogram"].size(); ++i) {
    steps += s["acceptance_histogram"][i].get<int>();
    accepted += static_cast<int>(i) * s["acceptance_histogram"][i].get<int>();
  }
  CHECK(steps == s["num_spec_steps"]);
  CHECK(accepted == s["num_accepted_draft_tokens"]);
  CHECK(accepted + steps + 1 == u["completion_tokens"]);
  CHECK(s["mean_acceptance_length"].get<double>() == 1 + static_cast<double>(accepted) / steps);
  CHECK(s["mode"] == "DDTREE");
  CHECK(r.body["timings"]["predicted_n"] == u["completion_tokens"]);
  CHECK(r.body["timings"]["draft_n_accepted"] == accepted);
}

TEST_CASE("a stream carries the same text however wide the runs are") {
  Harness h;
  h.engine.answer = [](const Request&) { return kThinking; };
  Json body = chat_body();
  const auto whole = h.post("/v1/chat/completions", body);
  body["stream"] = true;
  for (const int run : {1, 2, 3, 7, 100}) {
    INFO(run);
    h.engine.run = run;
    const auto r = h.post("/v1/chat/completions", body);
    CHECK(r.headers.find("Content-Type")->second == "text/event-stream");
    CHECK(r.headers.find("X-Accel-Buffering")->second == "no");
    const Joined j = join(r.text);
    CHECK(j.content == whole.body["choices"][0]["message"]["content"]);
    CHECK(j.reasoning == whole.body["choices"][0]["message"]["reasoning_content"]);
    CHECK(j.reasoning_alias == j.reasoning);
    CHECK(j.finish == "stop");
    CHECK(j.role_first);
    CHECK(j.done);
    CHECK(j.usage_chunks == 0);  // not asked for: every chunk has one choice
    CHECK(j.last.contains("metrics"));
    CHECK(j.last.contains("timings"));
    CHECK_FALSE(j.last.contains("usage"));
  }
}

TEST_CASE("usage in a stream: last, without choices, and only when asked for") {
  Harness h;
  Json body = chat_body();
  body["stream"] = true;
  body["stream_options"] = Json{{"include_usage", true}};
  Joined j = join(h.post("/v1/chat/completions", body).text);
  CHECK(j.usage_chunks == 1);
  CHECK(j.usage_last);
  CHECK(j.usage_null);
  CHECK(j.usage["completion_tokens"].get<int>() > 0);
  CHECK(j.done);
  body["stream_options"]["continuous_usage_stats"] = true;
  j = join(h.post("/v1/chat/completions", body).text);
  CHECK(j.usage_chunks == 1);
  CHECK_FALSE(j.usage_null);
}

TEST_CASE("token ids come back on request and are the text's") {
  Harness h;
  h.engine.answer = [](const Request&) { return kThinking; };
  Json body = chat_body();
  body["return_token_ids"] = true;
  const auto r = h.post("/v1/chat/completions", body);
  std::vector<int32_t> expected = tiny_tokenizer().encode(kThinking);
  expected.push_back(h.engine.settings.eos_ids[0]);
  CHECK(r.body["choices"][0]["token_ids"].get<std::vector<int32_t>>() == expected);
  CHECK(r.body["prompt_token_ids"].size() == r.body["usage"]["prompt_tokens"].get<size_t>());
  body["stream"] = true;
  CHECK(join(h.post("/v1/chat/completions", body).text).ids == expected);
}

TEST_CASE("tool calls: whole and streamed, arguments always a string") {
  Harness h;
  h.engine.answer = [](const Request&) { return kCall; };
  Json body = chat_body("What is the weather in Rabat?");
  body["tools"] = weather_tools();
  const auto r = h.post("/v1/chat/completions", body);
  const Json& c = r.body["choices"][0];
  CHECK(c["finish_reason"] == "tool_calls");
  CHECK(c["message"]["content"].is_null());
  REQUIRE(c["message"]["tool_calls"].size() == 1);
  const Json& call = c["message"]["tool_calls"][0];
  CHECK(call["type"] == "function");
  CHECK(call["function"]["name"] == "get_weather");
  CHECK(Json::parse(call["function"]["arguments"].get<std::string>()) == Json{{"city", "Rabat"}});
  CHECK(call["id"].get<std::string>().rfind("call_", 0) == 0);
  body["stream"] = true;
  for (const int run : {1, 2, 5, 50}) {
    h.engine.run = run;
    const Joined j = join(h.post("/v1/chat/completions", body).text);
    CHECK(j.finish == "tool_calls");
    CHECK(j.call_name == "get_weather");
    CHECK(j.call_id.rfind("call_", 0) == 0);
    CHECK(Json::parse(j.call_arguments) == Json{{"city", "Rabat"}});
  }
  // Without tools in the request the tags are text.
  body.erase("tools");
  body["stream"] = false;
  CHECK(h.post("/v1/chat/completions", body).body["choices"][0]["message"]["content"].get<std::string>().find("<tool_call>") !=
        std::string::npos);
}

TEST_CASE("an answer cut inside its reasoning has no content and ends with length") {
  Harness h;
  h.engine.answer = [](const Request&) { return kThinking; };
  Json body = chat_body();
  body["max_tokens"] = 3;
  const auto r = h.post("/v1/chat/completions", body);
  CHECK(r.body["choices"][0]["finish_reason"] == "length");
  CHECK(r.body["choices"][0]["message"]["content"].is_null());
  CHECK(!r.body["choices"][0]["message"]["reasoning"].get<std::string>().empty());
  CHECK(r.body["usage"]["completion_tokens"] == 3);
  CHECK(r.body["usage"]["completion_tokens_details"]["reasoning_tokens"] == 3);
}

TEST_CASE("with thinking off the answer is content (H7)") {
  Harness h;
  Json body = chat_body();
  body["chat_template_kwargs"] = Json{{"enable_thinking", false}};
  const auto r = h.post("/v1/chat/completions", body);
  CHECK(r.body["choices"][0]["message"]["content"] == "Hello, Carol!");
  CHECK_FALSE(r.body["choices"][0]["message"].contains("reasoning"));
  CHECK(r.body["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0);
}

TEST_CASE("completions: one choice a prompt, in order, whole and streamed") {
  Harness h;
  h.engine.answer = [](const Request& r) { return r.prompt.size() > 2 ? "long" : "short"; };
  const Json body{{"prompt", {"Hi", Json::array({1, 2, 3, 4, 5})}}, {"max_tokens", 50}};
  const auto r = h.post("/v1/completions", body);
  REQUIRE(r.status == 200);
  CHECK(r.body["object"] == "text_completion");
  REQUIRE(r.body["choices"].size() == 2);
  CHECK(r.body["choices"][0]["text"] == "short");
  CHECK(r.body["choices"][1]["text"] == "long");
  CHECK(r.body["choices"][1]["index"] == 1);
  {
    std::lock_guard lock(h.engine.mutex());
    CHECK(h.engine.seen[0].sampling.choice == 0);
    CHECK(h.engine.seen[1].sampling.choice == 1);
    CHECK(h.engine.seen[1].prompt == std::vector<int32_t>{1, 2, 3, 4, 5});
  }
  Json streaming = body;
  streaming["stream"] = true;
  streaming["stream_options"] = Json{{"include_usage", true}};
  std::map<int, std::string> texts, finishes;
  Json usage;
  const auto events = sse_data(h.post("/v1/completions", streaming).text);
  for (const auto& e : events) {
    if (e.empty() || e == "[DONE]") continue;
    const Json j = Json::parse(e);
    if (j["choices"].empty()) usage = j["usage"];
    for (const Json& c : j["choices"]) {
      texts[c["index"].get<int>()] += c["text"].get<std::string>();
      if (!c["finish_reason"].is_null()) finishes[c["index"].get<int>()] = c["finish_reason"].get<std::string>();
    }
  }
  CHECK(texts == std::map<int, std::string>{{0, "short"}, {1, "long"}});
  CHECK(finishes.size() == 2);
  CHECK(usage == r.body["usage"]);
}

TEST_CASE("a prompt that does not fit says both numbers, streaming or not") {
  Harness h;
  std::string text;
  for (int i = 0; i < 2000; ++i) text += "word " + std::to_string(i) + " ";
  for (const bool stream : {false, true}) {
    Json body = chat_body(text);
    body["stream"] = stream;
    auto r = h.post("/v1/chat/completions", body);
    CHECK(r.status == 400);
    CHECK(r.body["error"]["code"] == "context_length_exceeded");
    CHECK(r.body["error"]["param"] == "messages");
    CHECK(r.body["error"]["n_ctx"] == 512);
    CHECK(r.body["error"]["n_prompt_tokens"].get<int>() > 2000);
    r = h.post("/v1/completions", Json{{"prompt", text}, {"stream", stream}});
    CHECK(r.status == 400);
    CHECK(r.body["error"]["param"] == "prompt");
  }
  // max_tokens beyond the room is cut to it, silence about it fills the room.
  Json body = chat_body();
  body["max_tokens"] = 100000;
  CHECK(h.post("/v1/chat/completions", body).status == 200);
  std::lock_guard lock(h.engine.mutex());
  const Request& r = h.engine.seen.back();
  CHECK(r.max_tokens + static_cast<int>(r.prompt.size()) == 512);
}

TEST_CASE("a speculation mode that the pair cannot run is refused by its field") {
  Harness h;  // says that it has neither drafter nor MTP head
  for (const char* mode : {"DDTREE", "DFLASH", "NEXTN"}) {
    Json body = chat_body();
    body["speculative_algorithm"] = mode;
    const auto r = h.post("/v1/chat/completions", body);
    CHECK(r.status == 400);
    CHECK(r.body["error"]["param"] == "speculative_algorithm");
    CHECK(r.body["error"]["message"].get<std::string>().find("NONE") != std::string::npos);
  }
  Json body = chat_body();
  body["speculative_algorithm"] = "NONE";
  CHECK(h.post("/v1/chat/completions", body).status == 200);
}

TEST_CASE("model names: served ones, none, and others") {
  Harness h;
  Json body = chat_body();
  body["model"] = "org/alias";
  CHECK(h.post("/v1/chat/completions", body).body["model"] == "org/alias");
  body.erase("model");
  CHECK(h.post("/v1/chat/completions", body).body["model"] == "tiny");
  body["model"] = "gpt-4";
  const auto r = h.post("/v1/chat/completions", body);
  CHECK(r.status == 404);
  CHECK(r.body["error"]["code"] == "model_not_found");
  CHECK(r.body["error"]["message"].get<std::string>().find("\"tiny\"") != std::string::npos);
  CHECK(h.get("/v1/models").body["data"].size() == 2);
  CHECK(h.get("/v1/models?client_version=1").status == 200);
  CHECK(h.get("/v1/models/org/alias").body["id"] == "org/alias");
  CHECK(h.get("/v1/models/other").status == 404);
}

TEST_CASE("errors of bodies, templates and fields are the client's 400, never a 500") {
  Harness h;
  for (const std::string& bad : {std::string("{"), std::string("[]"), std::string(), std::string("{\"messages\": \"\xff\"}"),
                                 std::string(100000, '['), std::string("{\"messages\": 1e999}")}) {
    const auto r = h.post_text("/v1/chat/completions", bad);
    CHECK(r.status == 400);
    CHECK(r.body["error"]["code"] == "invalid_json");
  }
  // The template's own complaint, word for word.
  auto r =
      h.post("/v1/chat/completions", Json{{"messages", {{{"role", "user"}, {"content", "a"}}, {{"role", "system"}, {"content", "late"}}}}});
  CHECK(r.status == 400);
  CHECK(r.body["error"]["message"].get<std::string>().find("a system message must be the first message") != std::string::npos);
  r = h.post("/v1/chat/completions", Json::parse(R"({"messages": [{"role": "user", "content": "a"}], "logprobs": true})"));
  CHECK(r.body["error"]["code"] == "unsupported_parameter");
  CHECK(r.body["error"]["param"] == "logprobs");
  Json body = chat_body();
  body["shoe_size"] = 43;
  body["evil\r\nx-injected"] = 1;
  r = h.post("/v1/chat/completions", body);
  CHECK(r.status == 200);
  CHECK(r.headers.find("x-ignored-fields")->second == "shoe_size, evil??x-injected");
}

TEST_CASE("an engine fault is a 500 before the first byte and an event after it") {
  Harness h;
  h.engine.fault = "logits are not finite in row 3";
  auto r = h.post("/v1/chat/completions", chat_body());
  CHECK(r.status == 500);
  CHECK(r.body["error"]["code"] == "engine_fault");
  CHECK(r.body["error"]["type"] == "server_error");
  Json body = chat_body();
  body["stream"] = true;
  CHECK(h.post("/v1/chat/completions", body).status == 500);
  CHECK(h.post("/v1/completions", Json{{"prompt", "x"}, {"stream", true}}).status == 500);
  h.engine.fault_after = 2;
  h.engine.pause = std::chrono::milliseconds(1);
  r = h.post("/v1/chat/completions", body);
  CHECK(r.status == 200);
  const Joined j = join(r.text);
  CHECK(j.error["error"]["code"] == "engine_fault");
  CHECK(j.error["error"]["message"] == "logits are not finite in row 3");
  CHECK_FALSE(j.done);
}

TEST_CASE("a long wait in a stream is bridged by comments") {
  ServiceOptions o;
  o.comment_seconds = 0.05;
  Harness h(std::move(o));
  h.engine.hold = true;
  std::thread release([&] {
    Harness::eventually([&] { return h.engine.running() == 1; });
    std::this_thread::sleep_for(std::chrono::milliseconds(800));
    h.engine.hold = false;
  });
  Json body = chat_body();
  body["stream"] = true;
  const auto r = h.post("/v1/chat/completions", body);
  release.join();
  CHECK(r.text.find("\n\n: keep-alive\n\n") != std::string::npos);
  CHECK(join(r.text).done);
}

TEST_CASE("a full queue is a 429 with Retry-After, and nothing of it stays") {
  Harness h;
  h.engine.settings.max_running = 1;
  h.engine.settings.max_queue = 1;
  h.engine.hold = true;
  std::vector<std::thread> clients;
  std::atomic<int> ok{0};
  for (int i = 0; i < 2; ++i) clients.emplace_back([&] { ok += h.post("/v1/chat/completions", chat_body()).status == 200; });
  CHECK(Harness::eventually([&] { return h.engine.running() == 2; }));
  auto r = h.post("/v1/chat/completions", chat_body());
  CHECK(r.status == 429);
  CHECK(r.body["error"]["code"] == "server_overloaded");
  CHECK(r.body["error"]["type"] == "rate_limit_error");
  CHECK(r.headers.count("Retry-After") == 1);
  Json body = chat_body();
  body["stream"] = true;
  CHECK(h.post("/v1/chat/completions", body).status == 429);
  h.engine.hold = false;
  for (auto& t : clients) t.join();
  CHECK(ok == 2);
  CHECK(h.service.live_requests().empty());
  // A list of prompts of which only some find room is refused as a whole.
  h.engine.hold = true;
  r = h.post("/v1/completions", Json{{"prompt", {"a", "b", "c", "d"}}});
  CHECK(r.status == 429);
  CHECK(Harness::eventually([&] { return h.engine.running() == 0; }));
  h.engine.hold = false;
}

TEST_CASE("not ready and draining are 503s with the phase") {
  Harness h({}, {}, false);
  for (const char* path : {"/v1/models", "/readyz", "/health", "/startupz"}) {
    INFO(path);
    const auto r = h.get(path);
    CHECK(r.status == 503);
    CHECK(r.headers.count("Retry-After") == 1);
    CHECK(r.text.find("\"phase\":\"starting\"") != std::string::npos);
  }
  CHECK(h.get("/livez").status == 200);
  CHECK(h.get("/metrics").status == 200);
  auto r = h.post("/v1/chat/completions", chat_body());
  CHECK(r.status == 503);
  CHECK(r.body["error"]["code"] == "loading");
  CHECK(r.body["error"]["phase"] == "starting");
  h.make_ready();
  for (const char* path : {"/v1/models", "/readyz", "/health", "/startupz"}) CHECK(h.get(path).status == 200);

  // Draining: new ones are sent away, running ones finish.
  h.engine.hold = true;
  int status = 0;
  std::thread running([&] { status = h.post("/v1/chat/completions", chat_body()).status; });
  CHECK(Harness::eventually([&] { return h.engine.running() == 1; }));
  std::thread drain([&] { h.service.drain(10); });
  CHECK(Harness::eventually([&] { return h.service.draining(); }));
  r = h.post("/v1/chat/completions", chat_body());
  CHECK(r.status == 503);
  CHECK(r.body["error"]["code"] == "draining");
  CHECK(r.headers.count("Retry-After") == 1);
  CHECK(h.get("/readyz").status == 503);
  h.engine.hold = false;
  running.join();
  drain.join();
  CHECK(status == 200);
}

TEST_CASE("tokenize and detokenize are each other's inverse") {
  Harness h;
  const std::string text = "Grüße, <|im_end|> 日本 🙂\n";
  auto r = h.post("/tokenize", Json{{"prompt", text}});
  REQUIRE(r.status == 200);
  CHECK(r.body["count"] == r.body["tokens"].size());
  CHECK(r.body["max_model_len"] == 512);
  CHECK(h.post("/detokenize", Json{{"tokens", r.body["tokens"]}}).body["prompt"] == text);
  CHECK(h.post("/tokenize", Json{{"content", text}}).body["tokens"] == r.body["tokens"]);
  r = h.post("/tokenize", Json{{"messages", {{{"role", "user"}, {"content", "Hi"}}}}, {"return_token_strs", true}});
  CHECK(r.status == 200);
  CHECK(r.body["token_strs"][0] == "<|im_start|>");
  CHECK(h.post("/tokenize", Json::object()).status == 400);
  CHECK(h.post("/tokenize", Json{{"prompt", 5}}).body["error"]["param"] == "prompt");
  CHECK(h.post("/detokenize", Json{{"tokens", {-1}}}).body["error"]["param"] == "tokens");
  CHECK(h.post("/detokenize", Json{{"tokens", "x"}}).status == 400);
  // Half a character leaves as a replacement character, not as a broken byte.
  const auto bytes = tiny_tokenizer().encode("🙂");
  if (bytes.size() > 1) CHECK(h.post("/detokenize", Json{{"tokens", {bytes[0]}}}).body["prompt"] == "\uFFFD");
}

TEST_CASE("/metrics is Prometheus's text format and counts what happened") {
  Harness h;
  h.post("/v1/chat/completions", chat_body());
  const auto r = h.get("/metrics");
  CHECK(r.headers.find("Content-Type")->second.rfind("text/plain; version=0.0.4", 0) == 0);
  std::istringstream in(r.text);
  std::map<std::string, std::string> types;
  for (std::string line; std::getline(in, line);) {
    INFO(line);
    if (line.rfind("# TYPE ", 0) == 0) {
      const auto space = line.find(' ', 7);
      CHECK(types.emplace(line.substr(7, space - 7), line.substr(space + 1)).second);  // once
      continue;
    }
    if (line.rfind("# HELP ", 0) == 0) continue;
    std::string name = line.substr(0, line.find_first_of("{ "));
    CHECK(name.rfind("ddtree:", 0) == 0);
    for (const char* suffix : {"_bucket", "_sum", "_count"})
      if (name.ends_with(suffix) && types.count(name.substr(0, name.size() - std::strlen(suffix))))
        name.resize(name.size() - std::strlen(suffix));
    CHECK(types.count(name) == 1);  // announced before its first sample
    char* end = nullptr;
    std::strtod(line.c_str() + line.rfind(' ') + 1, &end);
    CHECK(*end == 0);
  }
  CHECK(r.text.find("ddtree:request_success_total{finished_reason=\"stop\"} 1\n") != std::string::npos);
  CHECK(r.text.find("ddtree:phase{phase=\"ready\"} 1\n") != std::string::npos);
  CHECK(r.text.find("ddtree:spec_decode_num_drafts_total ") != std::string::npos);
  CHECK(r.text.find("ddtree:e2e_request_latency_seconds_count 1\n") != std::string::npos);
}
