// POST /v1/chat/completions.
#include <fmt/core.h>

#include <algorithm>

#include "server/api_request.h"
#include "server/generation.h"
#include "server/reply.h"
#include "server/routes.h"
#include "text/chat_template.h"
#include "text/tokenizer.h"
#include "text/tool_parser.h"

namespace ddtree {

namespace {

constexpr double kFirstWait = 0.5;  // seconds in which an engine fault is still a plain 500, before a stream's headers go out

int32_t added_id(const Tokenizer& tokenizer, std::string_view text) {
  const auto id = tokenizer.id_of(text);
  return id && tokenizer.added(*id) ? *id : -1;
}

// Counts the ids of the reasoning block, its closing tag included, over runs of any length.
class ReasoningCounter {
 public:
  ReasoningCounter(bool inside, int32_t open, int32_t close) : inside_(inside), open_(open), close_(close) {}
  void add(const std::vector<int32_t>& ids, bool parser_inside_before) {
    if (close_ < 0 && !parser_inside_before) inside_ = false;  // tags without ids: the parser knows, a run at a time
    for (const int32_t id : ids) {
      if (first_ && id == open_ && open_ >= 0) inside_ = true;
      first_ = false;
      if (!inside_) continue;
      ++count_;
      if (id == close_) inside_ = false;
    }
  }
  void leave() { inside_ = false; }
  int32_t count() const { return count_; }

 private:
  bool inside_, first_ = true;
  int32_t open_, close_;
  int32_t count_ = 0;
};

struct ChatReply {
  std::shared_ptr<const Serving> serving;
  ChatFields fields;
  std::string id, model;
  int64_t created = 0;
  std::vector<int32_t> prompt_ids, ids;
  std::unique_ptr<AnswerParser> parser;
  std::unique_ptr<ReasoningCounter> reasoning;
  std::unique_ptr<Generation> generation;
  ReplyTotals totals;
  Delta last;
  std::string content, reasoning_text;
  std::vector<ToolCallDelta> calls;  // joined by index
  int unfinished_call = -1;
  int32_t budget = 0, positions = 0;
  int32_t completion_tokens = 0;  // so far

  AnswerDelta take(Generation::Event& event);
  std::string finish_reason() const;
};

AnswerDelta ChatReply::take(Generation::Event& event) {
  Delta& d = event.delta;
  const bool inside_before = parser->in_reasoning();
  AnswerDelta out = parser->feed(d.pieces);
  reasoning->add(d.ids, inside_before);
  if (!parser->in_reasoning() && parser->calls() > 0) reasoning->leave();
  completion_tokens += static_cast<int32_t>(d.ids.size());
  if (fields.return_token_ids) ids.insert(ids.end(), d.ids.begin(), d.ids.end());
  if (d.finished) {
    AnswerDelta tail = parser->flush();
    out.reasoning += tail.reasoning;
    out.content += tail.content;
    for (auto& c : tail.calls) out.calls.push_back(std::move(c));
    out.unfinished = std::move(tail.unfinished);
    totals.add(d.stats, reasoning->count());
    totals.branch_hits += event.branch_hits;
    last = std::move(d);
  }
  if (!fields.include_reasoning) out.reasoning.clear();
  if (!fields.parallel_tool_calls) std::erase_if(out.calls, [](const ToolCallDelta& c) { return c.index > 0; });
  content += out.content;
  reasoning_text += out.reasoning;
  for (const ToolCallDelta& c : out.calls) {
    const size_t i = static_cast<size_t>(c.index);
    if (calls.size() <= i) calls.resize(i + 1);
    calls[i].index = c.index;
    if (!c.id.empty()) calls[i].id = c.id;
    if (!c.name.empty()) calls[i].name = c.name;
    calls[i].arguments += c.arguments;
  }
  if (out.unfinished) unfinished_call = out.unfinished->index;
  return out;
}

std::string ChatReply::finish_reason() const {
  const int begun = static_cast<int>(calls.size());
  const int complete = begun - (unfinished_call >= 0 && unfinished_call < begun ? 1 : 0);
  return complete > 0 && last.finish == FinishReason::kStop ? "tool_calls" : finish_name(last.finish);
}

Json call_json(const ToolCallDelta& c, bool with_index) {
  Json out = Json::object();
  if (with_index) out["index"] = c.index;
  if (!c.id.empty()) {
    out["id"] = c.id;
    out["type"] = "function";
  }
  Json function = Json::object();
  if (!c.name.empty()) function["name"] = c.name;
  function["arguments"] = c.arguments;  // always a string
  out["function"] = std::move(function);
  return out;
}

// finish_reason and what ended the choice. vLLM's stop_reason is null where the model's own end token did; SGLang's matched_stop names it.
void put_end(Json& choice, const ChatReply& r) {
  choice["finish_reason"] = r.finish_reason();
  const Json matched = stop_reason_json(r.last);
  const bool own = matched.is_number() && std::find(r.fields.engine.stop_ids.begin(), r.fields.engine.stop_ids.end(),
                                                    matched.get<int32_t>()) == r.fields.engine.stop_ids.end();
  choice["stop_reason"] = own ? Json() : matched;
  choice["matched_stop"] = matched;
}

Json whole_reply(ChatReply& r) {
  Json message{{"role", "assistant"}};
  Json calls = Json::array();
  for (const ToolCallDelta& c : r.calls)
    if (c.index != r.unfinished_call) calls.push_back(call_json(c, false));
  const bool nothing = r.content.empty() && (!calls.empty() || !r.reasoning_text.empty());
  message["content"] = nothing ? Json() : Json(r.content);
  if (!r.reasoning_text.empty()) {
    message["reasoning_content"] = r.reasoning_text;  // both names: clients are split between them
    message["reasoning"] = r.reasoning_text;
  }
  if (!calls.empty()) message["tool_calls"] = std::move(calls);
  Json choice{{"index", 0}, {"message", std::move(message)}, {"logprobs", nullptr}};
  put_end(choice, r);
  if (r.fields.return_token_ids) choice["token_ids"] = r.ids;
  Json body{{"id", r.id},
            {"object", "chat.completion"},
            {"created", r.created},
            {"model", r.model},
            {"choices", Json::array({std::move(choice)})},
            {"usage", usage_json(r.totals)}};
  body["metrics"] = metrics_json(r.totals, r.budget, r.positions);
  body["timings"] = timings_json(r.totals);
  if (r.fields.return_token_ids) body["prompt_token_ids"] = r.prompt_ids;
  return body;
}

class ChatStream {
 public:
  ChatStream(std::shared_ptr<ChatReply> reply, const BodyWriter& write) : r_(*reply), write_(write) {}

  void run(Generation::Event* first, bool have_first, double comment_seconds) {
    if (!chunk(Json{{"role", "assistant"}, {"content", ""}}, nullptr, nullptr, r_.fields.return_token_ids)) return;
    Generation::Event event;
    bool pending = have_first;
    if (pending) event = std::move(*first);
    for (;;) {
      if (!pending) {
        const auto wait = r_.generation->next(&event, comment_seconds);
        if (wait == Generation::Wait::kGone || wait == Generation::Wait::kDone) return;
        if (wait == Generation::Wait::kTimeout) {
          if (!write_(kSseComment)) return;
          continue;
        }
      }
      pending = false;
      if (!take(event)) return;
      if (event_finished_) return;
    }
  }

 private:
  bool take(Generation::Event& event) {
    const bool finished = event.delta.finished;
    const std::string error = event.delta.error;
    const std::vector<int32_t> ids = event.delta.ids;
    const AnswerDelta d = r_.take(event);
    const Json token_ids = r_.fields.return_token_ids && !ids.empty() ? Json(ids) : Json();
    Json delta = Json::object();
    if (!d.reasoning.empty()) {
      delta["reasoning_content"] = d.reasoning;
      delta["reasoning"] = d.reasoning;
    }
    if (!d.content.empty()) delta["content"] = d.content;
    if (!d.calls.empty()) {
      delta["tool_calls"] = Json::array();
      for (const ToolCallDelta& c : d.calls) delta["tool_calls"].push_back(call_json(c, true));
    }
    if ((!delta.empty() || !token_ids.is_null()) && !chunk(std::move(delta), nullptr, token_ids, false)) return false;
    if (!finished) return true;
    event_finished_ = true;
    if (r_.last.finish == FinishReason::kError) return write_(sse_event(stream_error_json(error))), false;
    if (r_.last.finish == FinishReason::kCancelled)
      return write_(sse_event(Json::parse(interrupted(r_.generation->stopping()).json()))), false;
    Json end = Json::object();
    put_end(end, r_);
    if (!chunk(Json::object(), &end, nullptr, false)) return false;
    if (r_.fields.include_usage) {
      Json body = head();
      body["choices"] = Json::array();
      body["usage"] = usage_json(r_.totals);
      put_statistics(body);
      if (!write_(sse_event(body))) return false;
    }
    return write_(kSseDone);
  }

  Json head() const { return Json{{"id", r_.id}, {"object", "chat.completion.chunk"}, {"created", r_.created}, {"model", r_.model}}; }

  void put_statistics(Json& body) const {
    body["metrics"] = metrics_json(r_.totals, r_.budget, r_.positions);
    body["timings"] = timings_json(r_.totals);
  }

  bool chunk(Json delta, const Json* end, const Json& token_ids, bool prompt_ids) {
    Json choice{{"index", 0}, {"delta", std::move(delta)}, {"logprobs", nullptr}, {"finish_reason", nullptr}};
    if (end) choice.update(*end);
    if (!token_ids.is_null()) choice["token_ids"] = token_ids;
    Json body = head();
    body["choices"] = Json::array({std::move(choice)});
    if (prompt_ids) body["prompt_token_ids"] = r_.prompt_ids;
    if (r_.fields.include_usage)
      body["usage"] = r_.fields.continuous_usage
                          ? usage_json(static_cast<int32_t>(r_.prompt_ids.size()), 0, r_.completion_tokens, r_.reasoning->count())
                          : Json();
    if (end) put_statistics(body);
    return write_(sse_event(body));
  }

  ChatReply& r_;
  const BodyWriter& write_;
  bool event_finished_ = false;
};

void engine_fault(HttpResponse& response, const std::string& message) {
  response.status = 500;
  response.body = dump_json(stream_error_json(message));
}

void note(ChatReply& r) {
  r.generation->note(0, r.last.finish == FinishReason::kError ? "error" : r.finish_reason(), r.reasoning->count(),
                     r.reasoning_text.empty() ? r.content : r.reasoning_text + "\n" + r.content);
}

std::unique_ptr<AnswerParser> make_parser(const Serving& serving, const ChatFields& fields, bool opens, TagTokens* tags) {
  const Tokenizer& tokenizer = *serving.tokenizer;
  AnswerOptions o;
  tags->think_open = added_id(tokenizer, "<think>");
  tags->think_close = added_id(tokenizer, "</think>");
  tags->call_open = added_id(tokenizer, "<tool_call>");
  tags->call_close = added_id(tokenizer, "</tool_call>");
  o.tools.tags = *tags;
  o.reasoning.tags = *tags;
  auto format = reasoning_format(serving.reasoning_parser);
  o.reasoning.format = fields.separate_reasoning && format ? *format : ReasoningFormat::kNone;
  o.reasoning.starts_inside = opens;
  auto tools = tool_format(serving.tool_parser);
  o.tools.format = !fields.tools.is_null() && tools ? *tools : ToolFormat::kNone;
  o.keep_special = !fields.engine.skip_special_tokens;
  return std::make_unique<AnswerParser>(std::move(o), fields.tools);
}

void chat(Service& service, const HttpRequest& request, HttpResponse& response) {
  ApiError error;
  auto serving = request.own ? service.serving() : serving_or_error(service, &error);
  if (!serving) return send_error(response, error);
  std::string trouble;
  Json body = parse_json_object(request.body, &trouble);
  if (!trouble.empty()) {
    error.code = "invalid_json";
    error.message = trouble;
    return send_error(response, error);
  }
  auto reply = std::make_shared<ChatReply>();
  ChatReply& r = *reply;
  FieldLimits limits;
  limits.id_count = serving->tokenizer->id_count();
  limits.defaults = serving->defaults;
  if (auto e = parse_chat(std::move(body), limits, &r.fields)) return send_error(response, *e);
  if (auto e = check_model(*serving, r.fields.model)) return send_error(response, *e);
  if (auto e = check_speculation(*serving, r.fields.engine)) return send_error(response, *e);
  if (serving->always_include_usage && r.fields.stream) r.fields.include_usage = true;
  if (!serving->chat_template)
    return send_error(
        response, unsupported("messages",
                              "this checkpoint has no chat template: use /v1/completions, or start the server with --chat-template FILE"));
  auto rendered = serving->chat_template->render_chat(r.fields.body);
  if (!rendered) {
    ApiError e = from_status(rendered.status());
    if (e.param.empty()) e.param = "messages";
    return send_error(response, e);
  }
  r.serving = serving;
  r.prompt_ids = serving->tokenizer->encode(rendered->prompt);
  if (r.prompt_ids.empty())
    return send_error(response, invalid_value("messages", "the chat template made an empty prompt of these messages"));
  r.fields.engine.prompt = r.prompt_ids;
  if (auto e = fit_context(*serving, "messages", r.fields.max_tokens, &r.fields.engine)) return send_error(response, *e);
  TagTokens tags;
  r.parser = make_parser(*serving, r.fields, rendered->opens_reasoning, &tags);
  const bool reasons = r.parser->in_reasoning() || (r.fields.separate_reasoning && serving->reasoning_parser != "none");
  r.reasoning = std::make_unique<ReasoningCounter>(r.parser->in_reasoning(), reasons ? tags.think_open : -1, tags.think_close);
  r.id = new_request_id("chatcmpl-");
  r.model = r.fields.model.empty() ? serving->info.name : r.fields.model;
  r.created = unix_now();
  r.budget = r.fields.engine.budget.value_or(serving->engine->options().budget);
  r.positions = serving->info.block_size > 0 ? static_cast<int32_t>(serving->info.block_size) - 1 : serving->engine->options().nextn_steps;

  Generation::Part part;
  part.request = r.fields.engine;
  part.request.record_trees = service.options().recent_trees > 0 && !request.own;
  part.request.own = request.own;
  part.info.own = request.own;
  part.info.id = r.id;
  part.info.endpoint = "chat";
  part.info.client = request.remote;
  part.info.stream = r.fields.stream;
  part.info.prompt_tokens = static_cast<int32_t>(r.prompt_ids.size());
  part.info.max_tokens = part.request.max_tokens;
  part.info.mode = part.request.mode.value_or(serving->engine->options().mode);
  std::vector<Generation::Part> parts;
  parts.push_back(std::move(part));
  auto started = Generation::start(service, serving, std::move(parts), *request.peer);
  if (!started) return send_error(response, submit_error(service, started.status()));
  r.generation = std::move(*started);
  r.generation->note_thinking(rendered->opens_reasoning ? 1 : 0);
  r.generation->note_prompt(0, rendered->prompt);
  set_reply_headers(response, r.id, r.fields.ignored);

  Generation::Event event;
  auto wait = r.generation->next(&event, kFirstWait);
  if (wait == Generation::Wait::kEvent && event.delta.finished && event.delta.finish == FinishReason::kError) {
    r.take(event);
    note(r);
    return engine_fault(response, r.last.error);
  }
  if (wait == Generation::Wait::kGone) return send_error(response, client_gone());
  if (r.fields.stream) {
    response.content_type = "text/event-stream";
    response.set_header("Cache-Control", "no-cache");
    response.set_header("X-Accel-Buffering", "no");
    auto first = std::make_shared<Generation::Event>(std::move(event));
    const bool have = wait == Generation::Wait::kEvent;
    response.stream = [reply, first, have, seconds = service.options().comment_seconds](const BodyWriter& write) {
      ChatStream(reply, write).run(first.get(), have, seconds);
      if (reply->last.finished) note(*reply);
      reply->generation.reset();  // books closed before the connection takes its next request
    };
    return;
  }
  for (;;) {
    if (wait == Generation::Wait::kGone || wait == Generation::Wait::kDone) {
      return send_error(response, client_gone());
    }
    if (wait == Generation::Wait::kEvent) {
      const AnswerDelta d = r.take(event);
      if (d.unfinished) r.content += d.unfinished->raw;
      if (r.last.finished) break;
    }
    wait = r.generation->next(&event, 3600);
  }
  note(r);
  if (r.last.finish == FinishReason::kError) return engine_fault(response, r.last.error);
  if (r.last.finish == FinishReason::kCancelled) return send_error(response, interrupted(r.generation->stopping()));
  response.body = dump_json(whole_reply(r));
}

}  // namespace

void answer_chat(Service& service, const HttpRequest& request, HttpResponse& response) { chat(service, request, response); }

void register_chat_routes(HttpServer& server, Service& service) {
  server.route("POST", "/v1/chat/completions", Access::kKey, [&service](const HttpRequest& q, HttpResponse& r) { chat(service, q, r); });
}

}  // namespace ddtree
