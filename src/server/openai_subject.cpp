#include "server/openai_subject.h"

#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>

#include "server/json.h"
#include "server/sse_reader.h"

namespace ddtree {
namespace {

using Clock = std::chrono::steady_clock;
double milliseconds_since(Clock::time_point begin) { return std::chrono::duration<double, std::milli>(Clock::now() - begin).count(); }

constexpr size_t kMostBody = 8u << 20;  // an answer of a few thousand tokens is far less: a server that writes without end is cut here

// The members of foreign JSON may have any type.
const Json& member(const Json& object, const char* name) {
  static const Json* const none = new Json();
  if (!object.is_object()) return *none;
  const auto it = object.find(name);
  return it == object.end() ? *none : *it;
}
std::string text_of(const Json& object, const char* name) {
  const Json& value = member(object, name);
  return value.is_string() ? value.get<std::string>() : std::string();
}
int32_t count_of(const Json& object, const char* name, int32_t otherwise = -1) {
  const Json& value = member(object, name);
  return value.is_number() ? static_cast<int32_t>(std::clamp(value.get<double>(), -1.0, 2e9)) : otherwise;
}
double number_of(const Json& object, const char* name) {
  const Json& value = member(object, name);
  return value.is_number() ? value.get<double>() : 0;
}

// OpenAI's {"error": {"message"}}, the flat forms, or the text itself.
std::string error_text(const std::string& body) {
  const Json json = Json::parse(body, nullptr, false);
  std::string message = text_of(member(json, "error"), "message");
  if (message.empty()) message = text_of(json, "error");
  if (message.empty()) message = text_of(json, "message");
  if (message.empty()) message = text_of(json, "detail");
  if (message.empty() && is_utf8(body)) message = body.substr(0, 200);
  for (char& c : message)
    if (c == '\n' || c == '\r') c = ' ';
  return message.empty() ? "(no message)" : message;
}

std::string shown(const std::string& text) { return text.size() > 80 ? text.substr(0, 80) + "…" : text; }

}  // namespace

// One answer as it comes in.
struct OpenAiSubject::Reading {
  SmokeAnswer& answer;
  Clock::time_point begin = Clock::now();
  double last_ms = 0;
  int events = 0, pieces = 0;
  bool done = false, finished = false;
  std::string error;

  void breach(std::string what) {
    if (answer.framing.empty()) answer.framing = std::move(what);
  }
  void said(std::string& into, const std::string& piece) {
    if (piece.empty()) return;
    if (pieces++ == 0) answer.first_ms = milliseconds_since(begin);
    last_ms = milliseconds_since(begin);
    if (finished) breach("text came after finish_reason");
    if (piece.find("\xEF\xBF\xBD") != std::string::npos) breach(fmt::format("a character was split: U+FFFD in '{}'", shown(piece)));
    into += piece;
  }

  void scores(const Json& logprobs) {
    const auto number = [&](const Json& entry) {
      const Json& value = member(entry, "logprob");
      answer.scores.push_back(value.is_number() ? value.get<double>() : std::numeric_limits<double>::quiet_NaN());
    };
    for (const Json& token : member(logprobs, "content")) {
      if (!token.is_object()) continue;
      number(token);
      for (const Json& other : member(token, "top_logprobs")) number(other);
    }
  }

  void message(const Json& m) {
    said(answer.text, text_of(m, "content"));
    // Both names are in use, mostly one of them, by some servers both.
    std::string thought = text_of(m, "reasoning_content");
    if (thought.empty()) thought = text_of(m, "reasoning");
    said(answer.reasoning, thought);
    const Json& calls = member(m, "tool_calls");
    if (!calls.is_array()) return;
    for (size_t i = 0; i < calls.size(); ++i) {
      const auto index = static_cast<size_t>(std::clamp(count_of(calls[i], "index", static_cast<int32_t>(i)), 0, 63));
      if (answer.calls.size() <= index) answer.calls.resize(index + 1);
      const Json& function = member(calls[i], "function");
      std::string none;
      said(none, text_of(function, "name") + text_of(function, "arguments"));
      answer.calls[index].first += text_of(function, "name");
      if (!member(function, "arguments").is_null() && !member(function, "arguments").is_string())
        breach("a tool call's arguments are no string");
      answer.calls[index].second += text_of(function, "arguments");
    }
  }

  void object(const Json& json) {
    if (!member(json, "error").is_null()) {
      error = text_of(member(json, "error"), "message");
      if (error.empty()) error = dump_json(member(json, "error")).substr(0, 200);
      return;
    }
    const Json& choices = member(json, "choices");
    if (!choices.is_array()) breach("an event has no choices");
    const Json& usage = member(json, "usage");
    if (usage.is_object()) {
      answer.prompt_tokens = count_of(usage, "prompt_tokens"), answer.completion_tokens = count_of(usage, "completion_tokens");
      const int32_t total = count_of(usage, "total_tokens");
      if (total >= 0 && answer.prompt_tokens >= 0 && total != answer.prompt_tokens + answer.completion_tokens)
        breach(fmt::format("the usage says {} + {} = {} tokens", answer.prompt_tokens, answer.completion_tokens, total));
    }
    const Json& statistics = member(member(json, "metrics"), "speculative_decoding");
    if (statistics.is_object()) {
      RequestStats stats;
      stats.rounds = count_of(statistics, "num_spec_steps", 0), stats.accepted = count_of(statistics, "num_accepted_draft_tokens", 0);
      stats.drafted = count_of(statistics, "num_draft_tokens", 0), stats.near_ties = count_of(statistics, "near_ties", 0);
      answer.stats = stats;
    }
    if (const double ms = number_of(member(json, "timings"), "predicted_ms"); ms > 0) answer.decode_ms = ms;
    if (!choices.is_array() || choices.empty()) return;
    const Json& choice = choices.front();
    if (member(choice, "delta").is_object()) message(member(choice, "delta"));
    if (member(choice, "message").is_object()) message(member(choice, "message"));
    said(answer.text, text_of(choice, "text"));
    scores(member(choice, "logprobs"));
    const Json& ids = member(choice, "token_ids");
    if (ids.is_array())
      for (const Json& id : ids)
        if (id.is_number_integer()) answer.ids.push_back(id.get<int32_t>());
    if (const std::string finish = text_of(choice, "finish_reason"); !finish.empty()) answer.finish = finish, finished = true;
    const Json& stop = member(choice, "stop_reason");
    if (stop.is_string()) answer.stop_string = stop.get<std::string>();
  }

  void event(const std::string& data) {
    if (done) breach("something came after [DONE]");
    if (data == "[DONE]") {
      done = true;
      return;
    }
    ++events;
    if (!is_utf8(data)) return breach("an event is no UTF-8: a character was split");
    const Json json = Json::parse(data, nullptr, false);
    if (!json.is_object()) return breach(fmt::format("an event is no JSON object: '{}'", shown(data)));
    object(json);
  }
};

OpenAiSubject::OpenAiSubject(std::unique_ptr<SmokeTransport> transport, OpenAiOptions options)
    : transport_(std::move(transport)), options_(std::move(options)) {
  abilities_.streams_bytes = true;
  abilities_.no_modes = "the API has no field for it: only ddtree can be asked for each mode";
  abilities_.context = options_.context_length;
}

Status OpenAiSubject::connect(const SmokeLimit& limit) {
  std::string body;
  SmokeLimit quick = limit;
  quick.seconds = std::min(limit.seconds, 10.0);
  const TransportReply reply = transport_->get("/models", quick, [&](std::string_view bytes) {
    if (body.size() < kMostBody) body += bytes;
  });
  if (reply.unreachable) return {Code::kTemporary, reply.error};
  if (reply.status == 0) {
    const std::string what = reply.timed_out ? fmt::format("no answer within {:.0f} s", quick.seconds) : reply.error;
    return {Code::kTemporary, "GET /v1/models: " + (what.empty() ? "no answer" : what)};
  }
  if (reply.status == 503) return {Code::kTemporary, fmt::format("GET /v1/models: 503, not ready yet: {}", error_text(body))};
  // A server that is busy, and a proxy before one that still loads.
  for (const int later : {408, 429, 500, 502, 504})
    if (reply.status == later) return {Code::kTemporary, fmt::format("GET /v1/models: {}: {}", reply.status, error_text(body))};
  if (reply.status == 401 || reply.status == 403) {
    return {Code::kUsage, fmt::format("GET /v1/models: {}: {}; give the server's key with --api-key KEY", reply.status, error_text(body))};
  }
  const Json list = Json::parse(body, nullptr, false);
  const Json& models = member(list, "data");
  if (reply.status != 200 || !models.is_array() || models.empty()) {
    if (!options_.model.empty()) return {};  // some gateways have no list
    return {Code::kUsage, fmt::format("GET /v1/models: {} and no list of models (is this the API's address?); with --model NAME it is not "
                                      "needed",
                                      reply.status)};
  }
  std::string known;
  const Json* found = nullptr;
  for (const Json& model : models) {
    const std::string id = text_of(model, "id");
    known += (known.empty() ? "\"" : ", \"") + id + "\"";
    if (!found && (options_.model.empty() || id == options_.model)) found = &model;
  }
  if (!found) return {Code::kUsage, fmt::format("--model {}: the server has {}", options_.model, known)};
  options_.model = text_of(*found, "id");
  const Json& meta = member(*found, "meta");
  if (abilities_.context <= 0) {
    for (const int32_t n :
         {count_of(*found, "max_model_len"), count_of(*found, "context_length"), count_of(meta, "n_ctx"), count_of(meta, "n_ctx_train")})
      if (abilities_.context <= 0 && n > 0) abilities_.context = n;
  }
  if (text_of(*found, "owned_by") == "ddtree") {
    ddtree_ = true;
    embedded_ = text_of(*found, "root").starts_with("embedded:");
    abilities_.no_modes.clear();
    abilities_.modes.clear();
    if (member(meta, "drafter") == true) abilities_.modes = {SpeculationMode::kDflash, SpeculationMode::kDdtree};
    if (member(meta, "mtp") == true) abilities_.modes.push_back(SpeculationMode::kNextn);
  }
  return {};
}

std::string OpenAiSubject::body_of(const SmokeQuestion& q) const {
  Json body = Json::object();
  if (!options_.model.empty()) body["model"] = options_.model;
  if (q.messages.empty()) {
    body["prompt"] = q.text;
  } else {
    body["messages"] = Json::array();
    for (const SmokeMessage& m : q.messages) body["messages"].push_back(Json{{"role", m.role}, {"content", m.content}});
    if (extras_) body["chat_template_kwargs"] = Json{{"enable_thinking", false}};
  }
  body["temperature"] = 0;
  body[completion_tokens_ ? "max_completion_tokens" : "max_tokens"] = q.max_tokens;
  body["stream"] = true;
  body["stream_options"] = Json{{"include_usage", true}};
  if (!q.stop.empty()) body["stop"] = q.stop;
  if (!q.tools.empty()) {
    body["tools"] = Json::array();
    for (const SmokeTool& tool : q.tools) {
      Json properties = Json::object(), required = Json::array();
      for (const auto& p : tool.parameters) {
        properties[p.name] = Json{{"type", p.type}, {"description", p.description}};
        required.push_back(p.name);
      }
      body["tools"].push_back(
          Json{{"type", "function"},
               {"function",
                Json{{"name", tool.name},
                     {"description", tool.description},
                     {"parameters", Json{{"type", "object"}, {"properties", std::move(properties)}, {"required", std::move(required)}}}}}});
    }
  }
  if (q.log_probs) body["logprobs"] = true, body["top_logprobs"] = 2;
  if (ddtree_) {
    body["return_token_ids"] = true;
    if (q.mode) body["speculative_algorithm"] = mode_name(*q.mode);
    if (q.budget) body["speculative_budget"] = *q.budget > 0 ? Json(*q.budget) : Json("auto");
  }
  return dump_json(body);
}

SmokeAnswer OpenAiSubject::once(const SmokeQuestion& q, const SmokeLimit& limit, TransportReply* out) {
  SmokeAnswer answer;
  Reading reading{answer};
  SseReader sse;
  std::string body;  // of what is no event stream
  const std::string path = q.messages.empty() ? "/completions" : "/chat/completions";
  // The head of a body says whether it is a stream before the content type is known to this function; both are kept.
  bool looks_like_events = false, first = true;
  const TransportReply reply = transport_->post(path, body_of(q), limit, [&](std::string_view bytes) {
    if (body.size() < kMostBody) body += bytes;
    if (first && !bytes.empty()) looks_like_events = bytes.front() == 'd' || bytes.front() == ':' || bytes.front() == 'e', first = false;
    if (!looks_like_events) return;
    const std::vector<std::string> events = sse.feed(bytes);
    if (!sse.breach().empty()) reading.breach(sse.breach());  // the cause before what it leads to
    for (const std::string& data : events) reading.event(data);
  });
  *out = reply;
  answer.milliseconds = milliseconds_since(reading.begin);
  const auto trouble = [&](SmokeTrouble kind, std::string why) {
    answer.trouble = kind, answer.error = std::move(why);
    return answer;
  };
  if (looks_like_events && !reply.timed_out && reply.error.empty())
    for (const std::string& data : sse.finish()) reading.event(data);
  if (!sse.breach().empty()) reading.breach(sse.breach());
  if (reply.cancelled) return trouble(SmokeTrouble::kStopped, "stopped");
  if (reply.unreachable) return trouble(SmokeTrouble::kUnreachable, reply.error);
  if (reply.timed_out) {
    return trouble(SmokeTrouble::kTimeLimit,
                   reply.status == 0 ? fmt::format("no answer at all within {:.1f} s", limit.seconds)
                                     : fmt::format("no end within {:.1f} s: {} pieces of text came", limit.seconds, reading.pieces));
  }
  if (reply.status == 0) return trouble(SmokeTrouble::kFault, "no reply: " + reply.error);
  if (reply.status != 200) {
    const std::string what = fmt::format("HTTP {}: {}", reply.status, error_text(body));
    if (reply.status == 401 || reply.status == 403) misuse_ = Status(Code::kUsage, what + "; give the server's key with --api-key KEY");
    if (reply.status == 404) misuse_ = Status(Code::kUsage, what + "; --model NAME and --url URL say what is asked");
    if (reply.status == 503) return trouble(SmokeTrouble::kUnreachable, what);
    if (reply.status == 429) return trouble(SmokeTrouble::kNoRoom, what);
    return trouble(reply.status >= 500 ? SmokeTrouble::kFault : SmokeTrouble::kRefused, what);
  }
  if (reply.content_type != "text/event-stream") {
    reading.breach(
        fmt::format("Content-Type is \"{}\" where stream: true was asked for; it must be text/event-stream", reply.content_type));
    if (!looks_like_events) {
      const Json json = Json::parse(body, nullptr, false);
      if (!json.is_object())
        return trouble(SmokeTrouble::kFault, fmt::format("{}, and the body is no JSON: '{}'", answer.framing, shown(error_text(body))));
      reading.object(json);
      reading.done = true;
    }
  } else if (!looks_like_events && !body.empty()) {
    reading.breach(fmt::format("the stream does not begin with an event: '{}'", shown(error_text(body))));
  }
  if (!reading.error.empty()) return trouble(SmokeTrouble::kFault, "the stream ended with an error event: " + reading.error);
  const std::string& so_far = answer.text.empty() ? answer.reasoning : answer.text;
  if (!reply.error.empty() || (!reading.done && !reading.finished)) {
    return trouble(SmokeTrouble::kFault, fmt::format("the answer broke off in the middle, after {} events{}{}: {}", reading.events,
                                                     so_far.empty() ? "" : " and ", so_far.empty() ? "" : "'" + shown(so_far) + "'",
                                                     reply.error.empty() ? "neither finish_reason nor [DONE] came" : reply.error));
  }
  if (!reading.done) reading.breach("the stream ended without data: [DONE]");
  if (answer.decode_ms <= 0 && reading.pieces > 1) answer.decode_ms = reading.last_ms - answer.first_ms;
  for (const auto& [name, arguments] : answer.calls)
    if (!Json::parse(arguments, nullptr, false).is_object()) reading.breach(fmt::format("the arguments of {} are no JSON object", name));
  // A server without a reasoning parser leaves the tags in the text.
  if (const size_t start = answer.text.find_first_not_of(" \n");
      start != std::string::npos && answer.text.compare(start, 7, "<think>") == 0) {
    const size_t end = answer.text.find("</think>");
    answer.reasoning = answer.text.substr(start + 7, end == std::string::npos ? end : end - start - 7);
    answer.text = end == std::string::npos ? "" : answer.text.substr(end + 8);
    answer.text.erase(0, std::min(answer.text.find_first_not_of(" \n"), answer.text.size()));
  }
  answer.longest_run = answer.text;
  return answer;
}

SmokeAnswer OpenAiSubject::ask(const SmokeQuestion& q, const SmokeLimit& limit) {
  TransportReply reply;
  SmokeAnswer answer = once(q, limit, &reply);
  // OpenAI's own API and strict servers refuse fields that others need; each is given up once.
  for (int again = 0; again < 2 && reply.status >= 400 && reply.status < 500 && (reply.status == 400 || reply.status == 422); ++again) {
    if (!completion_tokens_ && answer.error.find("max_completion_tokens") != std::string::npos) completion_tokens_ = true;
    else if (extras_ && !q.messages.empty()) extras_ = false;
    else break;
    answer = once(q, limit, &reply);
    if ((reply.status == 400 || reply.status == 422) && !extras_) {
      extras_ = true;  // it was not that
      break;
    }
  }
  return answer;
}

}  // namespace ddtree
