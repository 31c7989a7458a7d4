// POST /v1/completions: plain text or ids in, text out, one choice a prompt.
#include <fmt/core.h>

#include <algorithm>

#include "server/api_request.h"
#include "server/generation.h"
#include "server/reply.h"
#include "server/routes.h"
#include "text/tokenizer.h"

namespace ddtree {

namespace {

struct Choice {
  std::vector<int32_t> prompt_ids, ids;
  std::string text;
  Delta last;
  int32_t completion_tokens = 0;
  bool finished = false;
};

struct CompletionReply {
  CompletionFields fields;
  std::shared_ptr<const Serving> serving;
  std::string id, model;
  int64_t created = 0;
  std::vector<Choice> choices;
  std::unique_ptr<Generation> generation;
  ReplyTotals totals;
  int32_t budget = 0, positions = 0;
  size_t unfinished = 0;

  // New text of the event's choice.
  std::string take(Generation::Event& event);
  Json head() const { return Json{{"id", id}, {"object", "text_completion"}, {"created", created}, {"model", model}}; }
  Json choice_json(size_t i, std::string text, bool end) const;
  void put_statistics(Json& body) const {
    body["metrics"] = metrics_json(totals, budget, positions);
    body["timings"] = timings_json(totals);
  }
  int32_t prompt_tokens() const;
  int32_t completion_tokens() const;
};

int32_t CompletionReply::prompt_tokens() const {
  size_t n = 0;
  for (const Choice& c : choices) n += c.prompt_ids.size();
  return static_cast<int32_t>(n);
}

int32_t CompletionReply::completion_tokens() const {
  int32_t n = 0;
  for (const Choice& c : choices) n += c.completion_tokens;
  return n;
}

std::string CompletionReply::take(Generation::Event& event) {
  Choice& c = choices[event.choice];
  Delta& d = event.delta;
  std::string text;
  for (const TextPiece& p : d.pieces)
    if (!p.special || !fields.engine.skip_special_tokens) text += p.text;
  c.completion_tokens += static_cast<int32_t>(d.ids.size());
  c.text += text;
  if (fields.return_token_ids) c.ids.insert(c.ids.end(), d.ids.begin(), d.ids.end());
  if (d.finished) {
    c.finished = true;
    --unfinished;
    totals.add(d.stats, 0);
    totals.branch_hits += event.branch_hits;
    c.last = std::move(d);
    generation->note(event.choice, finish_name(c.last.finish), 0, c.text);
  }
  return text;
}

Json CompletionReply::choice_json(size_t i, std::string text, bool end) const {
  const Choice& c = choices[i];
  Json out{{"index", i}, {"text", std::move(text)}, {"logprobs", nullptr}, {"finish_reason", nullptr}};
  if (!end) return out;
  out["finish_reason"] = finish_name(c.last.finish);
  const Json matched = stop_reason_json(c.last);
  const auto& own = fields.engine.stop_ids;
  out["stop_reason"] = matched.is_number() && std::find(own.begin(), own.end(), matched.get<int32_t>()) == own.end() ? Json() : matched;
  out["matched_stop"] = matched;
  return out;
}

void stream(CompletionReply& r, const BodyWriter& write, Generation::Event* first, bool have_first, double comment_seconds) {
  Generation::Event event;
  bool pending = have_first;
  if (pending) event = std::move(*first);
  std::vector<uint8_t> begun(r.choices.size(), 0);
  while (r.unfinished > 0) {
    if (!pending) {
      const auto wait = r.generation->next(&event, comment_seconds);
      if (wait == Generation::Wait::kGone || wait == Generation::Wait::kDone) return;
      if (wait == Generation::Wait::kTimeout) {
        if (!write(kSseComment)) return;
        continue;
      }
    }
    pending = false;
    const size_t i = event.choice;
    const std::vector<int32_t> ids = event.delta.ids;
    std::string text = r.take(event);
    const bool end = r.choices[i].finished;
    if (end && r.choices[i].last.finish == FinishReason::kError) {
      write(sse_event(stream_error_json(r.choices[i].last.error)));
      return;
    }
    if (end && r.choices[i].last.finish == FinishReason::kCancelled) {
      write(sse_event(Json::parse(interrupted(r.generation->stopping()).json())));
      return;
    }
    const bool show_ids = r.fields.return_token_ids && (!ids.empty() || !begun[i]);
    if (text.empty() && !end && !show_ids) continue;
    Json choice = r.choice_json(i, std::move(text), end);
    if (show_ids) choice["token_ids"] = ids;
    if (r.fields.return_token_ids && !begun[i]) choice["prompt_token_ids"] = r.choices[i].prompt_ids;
    begun[i] = 1;
    Json body = r.head();
    body["choices"] = Json::array({std::move(choice)});
    if (r.fields.include_usage)
      body["usage"] = r.fields.continuous_usage ? usage_json(r.prompt_tokens(), 0, r.completion_tokens(), 0) : Json();
    if (r.unfinished == 0) r.put_statistics(body);
    if (!write(sse_event(body))) return;
  }
  if (r.fields.include_usage) {
    Json body = r.head();
    body["choices"] = Json::array();
    body["usage"] = usage_json(r.totals);
    r.put_statistics(body);
    if (!write(sse_event(body))) return;
  }
  write(kSseDone);
}

void fault(HttpResponse& response, const std::string& message) {
  response.status = 500;
  response.body = dump_json(stream_error_json(message));
}

void completion(Service& service, const HttpRequest& request, HttpResponse& response) {
  ApiError error;
  auto serving = serving_or_error(service, &error);
  if (!serving) return send_error(response, error);
  std::string trouble;
  const Json body = parse_json_object(request.body, &trouble);
  if (!trouble.empty()) {
    error.code = "invalid_json";
    error.message = trouble;
    return send_error(response, error);
  }
  auto reply = std::make_shared<CompletionReply>();
  CompletionReply& r = *reply;
  FieldLimits limits;
  limits.id_count = serving->tokenizer->id_count();
  limits.defaults = serving->defaults;
  if (auto e = parse_completion(body, limits, &r.fields)) return send_error(response, *e);
  if (auto e = check_model(*serving, r.fields.model)) return send_error(response, *e);
  if (auto e = check_speculation(*serving, r.fields.engine)) return send_error(response, *e);
  if (serving->always_include_usage && r.fields.stream) r.fields.include_usage = true;
  r.serving = serving;
  r.id = new_request_id("cmpl-");
  r.model = r.fields.model.empty() ? serving->info.name : r.fields.model;
  r.created = unix_now();
  r.budget = r.fields.engine.budget.value_or(serving->engine->options().budget);
  r.positions = serving->info.block_size > 0 ? static_cast<int32_t>(serving->info.block_size) - 1 : serving->engine->options().nextn_steps;

  std::vector<Generation::Part> parts;
  std::vector<std::string> texts;
  for (size_t i = 0; i < r.fields.prompts.size(); ++i) {
    Choice c;
    const auto* text = std::get_if<std::string>(&r.fields.prompts[i]);
    c.prompt_ids = text ? serving->tokenizer->encode(*text) : std::get<std::vector<int32_t>>(r.fields.prompts[i]);
    if (c.prompt_ids.empty()) return send_error(response, invalid_value("prompt", "prompt has no tokens: at least one is needed"));
    for (const int32_t id : c.prompt_ids)
      if (!serving->tokenizer->has_token(id))
        return send_error(response, invalid_value("prompt", fmt::format("prompt holds {}, which is no token of this model", id)));
    Generation::Part part;
    part.request = r.fields.engine;
    part.request.prompt = c.prompt_ids;
    part.request.sampling.choice = static_cast<int32_t>(i);
    part.request.record_trees = service.options().recent_trees > 0;
    if (auto e = fit_context(*serving, "prompt", r.fields.max_tokens, &part.request)) return send_error(response, *e);
    part.info.id = i == 0 ? r.id : fmt::format("{}-{}", r.id, i);
    part.info.endpoint = "completions";
    part.info.client = request.remote;
    part.info.stream = r.fields.stream;
    part.info.prompt_tokens = static_cast<int32_t>(c.prompt_ids.size());
    part.info.max_tokens = part.request.max_tokens;
    part.info.mode = part.request.mode.value_or(serving->engine->options().mode);
    parts.push_back(std::move(part));
    texts.push_back(text ? *text : serving->tokenizer->decode(c.prompt_ids, false));
    r.choices.push_back(std::move(c));
  }
  r.unfinished = r.choices.size();
  auto started = Generation::start(service, serving, std::move(parts), *request.peer);
  if (!started) return send_error(response, submit_error(service, started.status()));
  r.generation = std::move(*started);
  for (size_t i = 0; i < texts.size(); ++i) r.generation->note_prompt(i, std::move(texts[i]));
  set_reply_headers(response, r.id, r.fields.ignored);

  Generation::Event event;
  auto wait = r.generation->next(&event, 0.5);
  if (wait == Generation::Wait::kEvent && event.delta.finished && event.delta.finish == FinishReason::kError)
    return fault(response, event.delta.error);
  if (wait == Generation::Wait::kGone) return send_error(response, client_gone());
  if (r.fields.stream) {
    response.content_type = "text/event-stream";
    response.set_header("Cache-Control", "no-cache");
    response.set_header("X-Accel-Buffering", "no");
    auto first = std::make_shared<Generation::Event>(std::move(event));
    const bool have = wait == Generation::Wait::kEvent;
    response.stream = [reply, first, have, seconds = service.options().comment_seconds](const BodyWriter& write) {
      stream(*reply, write, first.get(), have, seconds);
      reply->generation.reset();
    };
    return;
  }
  for (;;) {
    if (wait == Generation::Wait::kGone) {
      return send_error(response, client_gone());
    }
    if (wait == Generation::Wait::kEvent) {
      r.take(event);
      const Choice& c = r.choices[event.choice];
      if (c.finished && c.last.finish == FinishReason::kError) return fault(response, c.last.error);
      if (c.finished && c.last.finish == FinishReason::kCancelled) return send_error(response, interrupted(r.generation->stopping()));
    }
    if (r.unfinished == 0) break;
    wait = r.generation->next(&event, 3600);
  }
  Json choices = Json::array();
  for (size_t i = 0; i < r.choices.size(); ++i) {
    Json c = r.choice_json(i, r.choices[i].text, true);
    if (r.fields.return_token_ids) {
      c["token_ids"] = r.choices[i].ids;
      c["prompt_token_ids"] = r.choices[i].prompt_ids;
    }
    choices.push_back(std::move(c));
  }
  Json out = r.head();
  out["choices"] = std::move(choices);
  out["usage"] = usage_json(r.totals);
  r.put_statistics(out);
  response.body = dump_json(out);
}

}  // namespace

void register_completion_routes(HttpServer& server, Service& service) {
  server.route("POST", "/v1/completions", Access::kKey, [&service](const HttpRequest& q, HttpResponse& r) { completion(service, q, r); });
}

}  // namespace ddtree
