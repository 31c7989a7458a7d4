// Records of the store as JSON and CSV.
#include <fmt/core.h>

#include <cmath>

#include "server/admin_parts.h"

namespace ddtree::admin {

namespace {

Json time_or_null(int64_t ms) { return ms > 0 ? Json(ms) : Json(); }

// Columns that hold JSON go out as JSON; what is none goes out as the text it is.
Json recorded(const std::string& text) {
  if (text.empty()) return Json();
  Json value = Json::parse(text, nullptr, false);
  return value.is_discarded() ? Json(text) : value;
}

const char* run_state(const ServiceRun& run, int64_t current_run) {
  if (run.ended_ms == 0) return run.id == current_run ? "running" : "crashed";
  if (run.end_reason == kEndedWithoutNotice) return "crashed";
  return run.exit_code > 0 || run.end_reason.starts_with("failed") ? "failed" : "stopped";
}

// 1 + accepted / rounds, the mean acceptance length.
Json tokens_per_round(const RequestRecord& r) {
  return r.rounds > 0 ? Json(1.0 + static_cast<double>(r.accepted) / static_cast<double>(r.rounds)) : Json();
}

double rounded(double value, double step) { return std::isfinite(value) ? std::round(value / step) * step : 0; }

}  // namespace

Json run_json(const ServiceRun& run, int64_t current_run) {
  const std::string_view state = run_state(run, current_run);
  // A killed server wrote no end: its last sign of life is one.
  const int64_t ended = run.ended_ms == 0 && state == "crashed" ? run.heartbeat_ms : run.ended_ms;
  return Json{{"id", run.id},
              {"version", run.version},
              {"host", run.host},
              {"pid", run.pid},
              {"model", run.model},
              {"drafter", run.drafter},
              {"mode", run.mode},
              {"started", run.started_ms},
              {"ready", time_or_null(run.ready_ms)},
              {"heartbeat", time_or_null(run.heartbeat_ms)},
              {"ended", time_or_null(ended)},
              {"state", state},
              {"end_reason", run.end_reason},
              {"exit_code", run.exit_code >= 0 ? Json(run.exit_code) : Json()},
              {"smoke", run.smoke},
              {"requests", run.requests},
              {"errors", run.errors}};
}

Json phases_json(const std::vector<ServicePhase>& phases) {
  Json list = Json::array();
  for (const ServicePhase& p : phases)
    list.push_back(Json{{"phase", p.phase}, {"reason", p.reason}, {"at", p.at_ms}, {"lasted_ms", p.lasted_ms}});
  return list;
}

Json run_detail_json(const ServiceRun& run, const std::vector<ServicePhase>& phases, int64_t current_run) {
  Json out = run_json(run, current_run);
  out["phases"] = phases_json(phases);
  out["devices"] = recorded(run.devices);
  out["flags"] = recorded(run.flags);
  out["plan"] = recorded(run.plan);
  return out;
}

Json request_json(const RequestRecord& r, int32_t trees) {
  return Json{{"id", r.request_id},
              {"run_id", r.run_id},
              {"received", r.received_ms},
              {"finished", r.finished_ms},
              {"endpoint", r.endpoint},
              {"client", r.client},
              {"model", r.model},
              {"stream", r.stream},
              {"thinking", r.thinking < 0 ? Json() : Json(r.thinking == 1)},
              {"http_status", r.http_status},
              {"finish", r.finish},
              {"error", r.error},
              {"mode", r.mode},
              {"budget", r.budget},
              {"temperature", r.temperature},
              {"prompt_tokens", r.prompt_tokens},
              {"completion_tokens", r.completion_tokens},
              {"cached_tokens", r.cached_tokens},
              {"reasoning_tokens", r.reasoning_tokens},
              {"rounds", r.rounds},
              {"drafted", r.drafted},
              {"accepted", r.accepted},
              {"tokens_per_round", tokens_per_round(r)},
              {"queue_ms", r.queue_ms},
              {"prefill_ms", r.prefill_ms},
              {"decode_ms", r.decode_ms},
              {"ttft_ms", r.first_token_ms},
              {"total_ms", r.total_ms},
              {"tokens_per_second", r.tokens_per_second},
              {"trees", trees}};
}

Json request_detail_json(const RequestRecord& r, int32_t trees) {
  Json out = request_json(r, trees);
  out["accepted_at"] = r.accepted_at;
  out["histogram"] = r.histogram;
  out["tree_gain"] = r.tree_gain;
  out["shadow_disagreements"] = r.shadow_disagreements;
  out["near_ties"] = r.near_ties;
  out["smallest_gap"] = r.temperature == 0 && r.completion_tokens > 0 && std::isfinite(r.smallest_gap) ? Json(r.smallest_gap) : Json();
  out["prompt_text"] = r.prompt_text.empty() ? Json() : Json(r.prompt_text);
  out["answer_text"] = r.answer_text.empty() ? Json() : Json(r.answer_text);
  return out;
}

Json round_json(const RoundTree& tree, bool ids_kept) {
  // Four decimals of a log-prob are more than a drawing shows, and half the bytes.
  Json log_prob = Json::array();
  for (const float p : tree.log_prob) log_prob.push_back(rounded(p, 1e-4));
  return Json{{"round", tree.round},
              {"start", tree.start},
              {"token", ids_kept ? Json(tree.token) : Json()},
              {"parent", tree.parent},
              {"log_prob", std::move(log_prob)},
              {"accepted", tree.accepted},
              {"next", ids_kept ? Json(tree.next) : Json()},
              {"draft_ms", rounded(tree.draft_ms, 1e-3)},
              {"verify_ms", rounded(tree.verify_ms, 1e-3)},
              {"total_ms", rounded(tree.total_ms, 1e-3)}};
}

Json event_json(const Event& event) {
  return Json{{"id", event.id},
              {"run_id", event.run_id},
              {"time", event.at_ms},
              {"severity", severity_name(event.severity)},
              {"kind", event.kind},
              {"message", event.message},
              {"detail", recorded(event.detail)}};
}

namespace {

// RFC 4180. Text that a spreadsheet would take for a formula gets a quote before it: client names come from outside.
std::string csv_text(const std::string& text) {
  std::string out = "\"";
  if (!text.empty() && std::string_view("=+-@\t\r").find(text[0]) != std::string_view::npos) out += '\'';
  for (const char c : text) {
    if (c == '"') out += '"';
    out += c;
  }
  return out + '"';
}

std::string iso(int64_t ms) {
  if (ms <= 0) return "";
  const std::time_t seconds = ms / 1000;
  std::tm tm{};
  gmtime_r(&seconds, &tm);
  return fmt::format("{:04}-{:02}-{:02}T{:02}:{:02}:{:02}.{:03}Z", tm.tm_year + 1900, tm.tm_mon + 1, tm.tm_mday, tm.tm_hour, tm.tm_min,
                     tm.tm_sec, ms % 1000);
}

}  // namespace

std::string csv_head() {
  return "id,run_id,received,finished,endpoint,client,model,stream,thinking,http_status,finish,error,mode,budget,temperature,"
         "prompt_tokens,completion_tokens,cached_tokens,reasoning_tokens,rounds,drafted,accepted,tokens_per_round,queue_ms,prefill_ms,"
         "decode_ms,ttft_ms,total_ms,tokens_per_second\r\n";
}

std::string csv_row(const RequestRecord& r) {
  const Json mean = tokens_per_round(r);
  return fmt::format("{},{},{},{},{},{},{},{},{},{},{},{},{},{},{:g},{},{},{},{},{},{},{},{},{:.3f},{:.3f},{:.3f},{:.3f},{:.3f},{:.3f}\r\n",
                     csv_text(r.request_id), r.run_id, iso(r.received_ms), iso(r.finished_ms), csv_text(r.endpoint), csv_text(r.client),
                     csv_text(r.model), r.stream ? 1 : 0, r.thinking < 0 ? "" : std::to_string(r.thinking), r.http_status,
                     csv_text(r.finish), csv_text(r.error), csv_text(r.mode), r.budget, r.temperature, r.prompt_tokens, r.completion_tokens,
                     r.cached_tokens, r.reasoning_tokens, r.rounds, r.drafted, r.accepted,
                     mean.is_null() ? "" : fmt::format("{:.4f}", mean.get<double>()), r.queue_ms, r.prefill_ms, r.decode_ms,
                     r.first_token_ms, r.total_ms, r.tokens_per_second);
}

}  // namespace ddtree::admin
