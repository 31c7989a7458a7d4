#include "server/reply.h"

#include <algorithm>
#include <chrono>

#include "server/errors.h"
#include "server/http_server.h"

namespace ddtree {

void ReplyTotals::add(const RequestStats& c, int32_t choice_reasoning_tokens) {
  stats.mode = c.mode;
  stats.prompt_tokens += c.prompt_tokens;
  stats.completion_tokens += c.completion_tokens;
  stats.cached_tokens += c.cached_tokens;
  stats.rounds += c.rounds;
  stats.drafted += c.drafted;
  stats.accepted += c.accepted;
  const auto sum = [](std::vector<int32_t>& into, const std::vector<int32_t>& from) {
    if (into.size() < from.size()) into.resize(from.size());
    for (size_t i = 0; i < from.size(); ++i) into[i] += from[i];
  };
  sum(stats.histogram, c.histogram);
  sum(stats.accepted_at, c.accepted_at);
  stats.tree_gain += c.tree_gain;
  stats.shadow_disagreements += c.shadow_disagreements;
  stats.near_ties += c.near_ties;
  stats.queue_ms = std::max(stats.queue_ms, c.queue_ms);
  stats.prefill_ms = std::max(stats.prefill_ms, c.prefill_ms);
  stats.decode_ms = std::max(stats.decode_ms, c.decode_ms);
  stats.first_token_ms = std::max(stats.first_token_ms, c.first_token_ms);
  stats.total_ms = std::max(stats.total_ms, c.total_ms);
  reasoning_tokens += choice_reasoning_tokens;
}

Json usage_json(int32_t prompt_tokens, int32_t cached_tokens, int32_t completion_tokens, int32_t reasoning_tokens) {
  // accepted_prediction_tokens belongs to OpenAI's Predicted Outputs and stays 0: drafts are under metrics.
  return Json{{"prompt_tokens", prompt_tokens},
              {"completion_tokens", completion_tokens},
              {"total_tokens", prompt_tokens + completion_tokens},
              {"prompt_tokens_details", Json{{"cached_tokens", cached_tokens}}},
              {"completion_tokens_details", Json{{"reasoning_tokens", std::min(reasoning_tokens, completion_tokens)},
                                                 {"accepted_prediction_tokens", 0},
                                                 {"rejected_prediction_tokens", 0}}}};
}

Json usage_json(const ReplyTotals& t) {
  return usage_json(t.stats.prompt_tokens, t.stats.cached_tokens, t.stats.completion_tokens, t.reasoning_tokens);
}

Json metrics_json(const ReplyTotals& t, int32_t budget, int32_t positions) {
  const RequestStats& s = t.stats;
  const double rounds = s.rounds;
  Json by_position = Json::array();
  for (const int32_t n : s.accepted_at) by_position.push_back(rounds > 0 ? n / rounds : 0.0);
  Json out{{"mode", mode_name(s.mode)},
           {"num_spec_steps", s.rounds},
           {"mean_acceptance_length", rounds > 0 ? 1 + static_cast<double>(s.accepted) / rounds : 0.0},
           {"num_accepted_draft_tokens", s.accepted},
           {"num_draft_tokens", s.drafted},
           {"num_spec_tokens", s.mode == SpeculationMode::kNone ? 0 : positions},
           {"draft_acceptance_rate", s.drafted > 0 ? static_cast<double>(s.accepted) / static_cast<double>(s.drafted) : 0.0},
           {"acceptance_rate_per_position", std::move(by_position)},
           {"acceptance_histogram", s.histogram},
           {"near_ties", s.near_ties}};
  if (s.mode == SpeculationMode::kDdtree) {
    out["tree"] = Json{{"nodes_verified", s.drafted},
                       {"budget", budget > 0 ? Json(budget) : Json("auto")},
                       {"mean_depth", rounds > 0 ? static_cast<double>(s.accepted) / rounds : 0.0},
                       {"branch_hits", t.branch_hits},
                       {"shadow_gain", s.tree_gain},
                       {"shadow_disagreements", s.shadow_disagreements}};
  }
  return Json{{"speculative_decoding", std::move(out)}};
}

Json timings_json(const ReplyTotals& t) {
  const RequestStats& s = t.stats;
  // The first token comes out of the prefill pass; decode_ms covers the ones after it.
  const double decoded = std::max(0, s.completion_tokens - 1);
  const int32_t prompt = s.prompt_tokens - s.cached_tokens;
  const auto rate = [](double n, double ms) { return ms > 0 ? n * 1000 / ms : 0.0; };
  return Json{{"cache_n", s.cached_tokens},
              {"prompt_n", prompt},
              {"prompt_ms", s.prefill_ms},
              {"prompt_per_token_ms", prompt > 0 ? s.prefill_ms / prompt : 0.0},
              {"prompt_per_second", rate(prompt, s.prefill_ms)},
              {"predicted_n", s.completion_tokens},
              {"predicted_ms", s.decode_ms},
              {"predicted_per_token_ms", decoded > 0 ? s.decode_ms / decoded : 0.0},
              {"predicted_per_second", rate(decoded, s.decode_ms)},
              {"draft_n", s.drafted},
              {"draft_n_accepted", s.accepted},
              {"queue_ms", s.queue_ms},
              {"first_token_ms", s.first_token_ms},
              {"total_ms", s.total_ms}};
}

std::string sse_event(const Json& value) { return "data: " + dump_json(value) + "\n\n"; }

void set_reply_headers(HttpResponse& response, const std::string& id, const std::vector<std::string>& ignored) {
  response.set_header("x-request-id", id);
  if (ignored.empty()) return;
  std::string list;
  for (const std::string& name : ignored) {
    std::string clean;
    for (const char c : name.substr(0, 64))
      clean += c > 0x20 && c < 0x7f && c != ',' ? c : '?';  // a header is no place for a client's line breaks
    if (list.size() + clean.size() > 2000) break;
    list += (list.empty() ? "" : ", ") + clean;
  }
  response.set_header("x-ignored-fields", list);
}

Json stream_error_json(const std::string& message) {
  ApiError e;
  e.status = 500;
  e.type = "server_error";
  e.code = "engine_fault";
  e.message = message.empty() ? "the engine failed on this request" : message;
  return Json::parse(e.json());
}

Json stop_reason_json(const Delta& last) {
  if (!last.stop_string.empty()) return last.stop_string;
  if (last.finish == FinishReason::kStop && last.stop_id >= 0) return last.stop_id;
  return {};
}

int64_t unix_now() { return std::chrono::duration_cast<std::chrono::seconds>(std::chrono::system_clock::now().time_since_epoch()).count(); }

}  // namespace ddtree
