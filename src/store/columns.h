// Which member of a record is which column, said once: inserts, selects and reads are made from these lists.
#pragma once

#include <string>
#include <type_traits>
#include <vector>

#include "store/database.h"
#include "store/records.h"

namespace ddtree::store {

// Each columns(record, f) calls f(name, member) for every stored column except id.
template <class F>
void columns(ServiceRun& r, F&& f) {
  f("version", r.version), f("host", r.host), f("model", r.model), f("drafter", r.drafter), f("mode", r.mode), f("devices", r.devices);
  f("flags", r.flags), f("plan", r.plan), f("pid", r.pid), f("started_ms", r.started_ms), f("ready_ms", r.ready_ms);
  f("heartbeat_ms", r.heartbeat_ms), f("ended_ms", r.ended_ms), f("end_reason", r.end_reason), f("exit_code", r.exit_code),
      f("smoke", r.smoke);
}
template <class F>
void columns(ServicePhase& r, F&& f) {
  f("run_id", r.run_id), f("at_ms", r.at_ms), f("phase", r.phase), f("reason", r.reason);
}
template <class F>
void columns(RequestRecord& r, F&& f) {
  f("run_id", r.run_id), f("request_id", r.request_id), f("endpoint", r.endpoint), f("client", r.client), f("model", r.model);
  f("received_ms", r.received_ms), f("finished_ms", r.finished_ms), f("stream", r.stream), f("thinking", r.thinking);
  f("http_status", r.http_status), f("finish", r.finish), f("error", r.error), f("mode", r.mode), f("budget", r.budget);
  f("temperature", r.temperature), f("prompt_tokens", r.prompt_tokens), f("completion_tokens", r.completion_tokens);
  f("cached_tokens", r.cached_tokens), f("reasoning_tokens", r.reasoning_tokens), f("rounds", r.rounds), f("drafted", r.drafted);
  f("accepted", r.accepted), f("nodes_verified", r.nodes_verified), f("accepted_at", r.accepted_at), f("histogram", r.histogram);
  f("tree_gain", r.tree_gain), f("shadow_disagreements", r.shadow_disagreements), f("near_ties", r.near_ties);
  f("smallest_gap", r.smallest_gap), f("queue_ms", r.queue_ms), f("prefill_ms", r.prefill_ms), f("decode_ms", r.decode_ms);
  f("first_token_ms", r.first_token_ms), f("total_ms", r.total_ms), f("tokens_per_second", r.tokens_per_second);
  f("prompt_text", r.prompt_text), f("answer_text", r.answer_text), f("trees", r.trees);
}
template <class F>
void columns(SmokeRun& r, F&& f) {
  f("run_id", r.run_id), f("started_ms", r.started_ms), f("finished_ms", r.finished_ms), f("started_by", r.trigger),
      f("verdict", r.verdict);
  f("version", r.version), f("model", r.model), f("drafter", r.drafter), f("message", r.message);
  f("tokens_per_second", r.tokens_per_second), f("acceptance", r.acceptance);
  f("subject", r.subject), f("mode", r.mode), f("warning", r.warning), f("previous_version", r.previous_version);
  f("before_runs", r.before_runs), f("before_tokens_per_second", r.before_tokens_per_second);
  f("before_acceptance", r.before_acceptance);
}
template <class F>
void columns(SmokeCheck& r, F&& f) {
  f("smoke_id", r.smoke_id), f("position", r.position), f("name", r.name), f("mode", r.mode), f("verdict", r.verdict);
  f("input_id", r.input_id), f("output", r.output), f("figure", r.figure), f("unit", r.unit), f("ms", r.ms), f("message", r.message);
}
template <class F>
void columns(Event& r, F&& f) {
  f("run_id", r.run_id), f("at_ms", r.at_ms), f("severity", r.severity), f("kind", r.kind), f("message", r.message),
      f("request", r.request);
  f("detail", r.detail);
}
template <class F>
void columns(Calibration& r, F&& f) {
  f("run_id", r.run_id), f("at_ms", r.at_ms), f("machine", r.machine), f("name", r.name), f("value", r.value);
}
template <class F>
void columns(MetricMinute& r, F&& f) {
  f("minute_ms", r.minute_ms), f("run_id", r.run_id), f("requests", r.requests), f("errors", r.errors), f("prompt_tokens", r.prompt_tokens);
  f("completion_tokens", r.completion_tokens), f("cached_tokens", r.cached_tokens), f("rounds", r.rounds), f("drafted", r.drafted);
  f("accepted", r.accepted), f("prefill_tps", r.prefill_tps), f("decode_tps", r.decode_tps);
  f("first_token_ms_p50", r.first_token_ms_p50), f("first_token_ms_p95", r.first_token_ms_p95), f("running_max", r.running_max);
  f("waiting_max", r.waiting_max), f("pages_used_max", r.pages_used_max), f("pages_total", r.pages_total);
  f("slots_used_max", r.slots_used_max), f("slots_total", r.slots_total), f("rss_mib", r.rss_mib);
}

template <class T>
std::string array_text(const std::vector<T>& values) {
  std::string text = "[";
  for (size_t i = 0; i < values.size(); ++i) text += (i > 0 ? "," : "") + std::to_string(values[i]);
  return text + "]";
}
std::vector<int64_t> parse_array(const std::string& text);  // of array_text; reads up to the first thing that is no integer

template <class T>
Value to_value(const T& member) {
  if constexpr (std::is_same_v<T, std::string>) return member;
  else if constexpr (std::is_floating_point_v<T>) return static_cast<double>(member);
  else if constexpr (std::is_same_v<T, std::vector<int32_t>>) return array_text(member);
  else return static_cast<int64_t>(member);
}

template <class T>
void from_row(const Row& row, int column, T* member) {
  if constexpr (std::is_same_v<T, std::string>) *member = row.text(column);
  else if constexpr (std::is_floating_point_v<T>) *member = static_cast<T>(row.real(column));
  else if constexpr (std::is_same_v<T, std::vector<int32_t>>) {
    member->clear();
    for (const int64_t value : parse_array(row.text(column))) member->push_back(static_cast<int32_t>(value));
  } else *member = static_cast<T>(row.integer(column));
}

// "a, b, c" of a record type, each with the prefix ("r.").
template <class R>
std::string column_names(const std::string& prefix = "") {
  R record;
  std::string names;
  columns(record, [&](const char* name, auto&) { names += (names.empty() ? "" : ", ") + prefix + name; });
  return names;
}

// Writes a record; with an id where the table has one (id != 0).
template <class R>
Status insert(Database& database, const std::string& table, R record, int64_t id, const char* verb = "INSERT") {
  std::string marks;
  std::vector<Value> values;
  if (id != 0) values.push_back(id), marks = "?";
  columns(record, [&](const char*, auto& member) { values.push_back(to_value(member)), marks += marks.empty() ? "?" : ",?"; });
  return database.run(
      std::string(verb) + " INTO " + table + " (" + (id != 0 ? "id, " : "") + column_names<R>() + ") VALUES (" + marks + ")", values);
}

// Reads the columns of column_names<R>(), beginning at `first`. Returns the column after them.
template <class R>
int read(const Row& row, int first, R* record) {
  columns(*record, [&](const char*, auto& member) { from_row(row, first++, &member); });
  return first;
}

}  // namespace ddtree::store
