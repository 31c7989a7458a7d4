#include "server/metrics.h"

#include <fmt/core.h>

#include <algorithm>

#include "health/phases.h"
#include "server/history_keeper.h"
#include "server/routes.h"
#include "server/watcher.h"
#include "store/store.h"

namespace ddtree {

namespace {

std::string label(const std::string& text) {
  std::string out;
  for (const char c : text) {
    if (c == '\\' || c == '"') out += '\\';
    if (c == '\n') out += "\\n";
    else out += c;
  }
  return out;
}

class Text {
 public:
  void metric(const char* name, const char* type, const char* help) {
    out += fmt::format("# HELP ddtree:{} {}\n# TYPE ddtree:{} {}\n", name, help, name, type);
  }
  template <class T>
  void value(const char* name, T v) {
    out += fmt::format("ddtree:{} {}\n", name, v);
  }
  template <class T>
  void value(const char* name, const std::string& labels, T v) {
    out += fmt::format("ddtree:{}{{{}}} {}\n", name, labels, v);
  }
  template <class T>
  void gauge(const char* name, T v, const char* help) {
    metric(name, "gauge", help);
    value(name, v);
  }
  void counter(const char* name, int64_t v, const char* help) {
    metric(name, "counter", help);
    value(name, v);
  }
  std::string out;
};

}  // namespace

Histogram::Histogram(std::vector<double> bounds) : bounds_(std::move(bounds)), counts_(bounds_.size() + 1, 0) {}

void Histogram::observe(double value) {
  std::lock_guard lock(mutex_);
  const size_t i = static_cast<size_t>(std::lower_bound(bounds_.begin(), bounds_.end(), value) - bounds_.begin());
  ++counts_[i];
  sum_ += value;
}

void Histogram::write(std::string* out, const std::string& name, const char* help) const {
  std::lock_guard lock(mutex_);
  *out += fmt::format("# HELP ddtree:{} {}\n# TYPE ddtree:{} histogram\n", name, help, name);
  int64_t total = 0;
  for (size_t i = 0; i < bounds_.size(); ++i) {
    total += counts_[i];
    *out += fmt::format("ddtree:{}_bucket{{le=\"{}\"}} {}\n", name, bounds_[i], total);
  }
  total += counts_.back();
  *out += fmt::format("ddtree:{}_bucket{{le=\"+Inf\"}} {}\nddtree:{}_sum {}\nddtree:{}_count {}\n", name, total, name, sum_, name, total);
}

std::string metrics_text(Service& service) {
  Text t;
  const EngineSnapshot s = service.snapshot();
  const PhaseState phase = service.phases().state();
  const auto serving = service.serving();
  t.metric("build_info", "gauge", "Version of this executable.");
  t.value("build_info", fmt::format("version=\"{}\"", DDTREE_VERSION), 1);
  t.metric("model_info", "gauge", "The model that is served.");
  if (serving)
    t.value("model_info",
            fmt::format("model_name=\"{}\",mode=\"{}\",max_model_len=\"{}\"", label(serving->info.name),
                        mode_name(service.options().engine.mode), serving->info.context_length),
            1);
  t.metric("phase", "gauge", "1 for the phase the service is in.");
  for (int p = 0; p <= static_cast<int>(Phase::kFailed); ++p)
    t.value("phase", fmt::format("phase=\"{}\"", phase_name(static_cast<Phase>(p))), phase.phase == static_cast<Phase>(p) ? 1 : 0);
  t.gauge("ready", service.ready() && !service.draining() ? 1 : 0, "1 while requests are taken.");
  t.gauge("smoke_ok", phase.smoke == SmokeState::kPassed ? 1 : 0, "1 where the last smoke test passed; 0 also where it was skipped.");
  t.gauge("phase_progress", phase.progress >= 0 ? phase.progress : 0.0, "How far the phase is, 0 to 1, where it can be measured.");
  t.gauge("alive", service.alive() ? 1 : 0, "What /livez says.");
  t.gauge("seconds_without_a_pass", service.watcher().still_seconds(), "While requests run; 0 when idle.");
  const LadderState ladder = service.ladder();
  t.metric("ladder_step", "gauge", "1 for the step of the fault ladder on which the service stands.");
  for (const std::string& step : ladder.steps) t.value("ladder_step", fmt::format("step=\"{}\"", step), step == ladder.step ? 1 : 0);
  t.metric("faults_total", "counter", "Faults that the watch found, by kind.");
  for (const auto& [kind, n] : service.watcher().fault_counts()) t.value("faults_total", fmt::format("kind=\"{}\"", kind), n);
  t.counter("nan_logits_total", s.nan_faults, "Sequences that logits which are not finite ended.");
  const CanaryState canary = service.watcher().canary();
  t.gauge("canary_ok", canary.ran && canary.passed ? 1 : 0, "1 where the last canary passed; 0 also where none has run yet.");
  t.gauge("canary_tokens_per_second", canary.tokens_per_second, "Decoding speed of the last canary.");
  t.gauge("start_time_seconds", service.started_at(), "When this service started, Unix time.");

  t.gauge("num_requests_running", s.running, "Requests in the running batch.");
  t.gauge("num_requests_waiting", s.waiting, "Requests that wait for a slot or pages.");
  t.gauge("num_requests_live", service.live_requests().size(), "Requests whose reply is not finished.");
  t.gauge("kv_pages_used", s.pages_used, "KV pages that hold tokens.");
  t.gauge("kv_pages", s.pages_total, "KV pages there are.");
  t.gauge("kv_cache_usage_perc", s.pages_total > 0 ? static_cast<double>(s.pages_used) / s.pages_total : 0.0,
          "Used share of the KV pages, 0 to 1.");
  t.gauge("state_slots_used", s.slots_used, "Recurrent-state slots in use.");
  t.gauge("state_slots", s.slots_total, "Recurrent-state slots there are.");
  t.gauge("prefill_tokens_per_second", s.prefill_tps_1m, "Prompt tokens a second over the last minute; 0 when idle.");
  t.gauge("decode_tokens_per_second", s.decode_tps_1m, "Generated tokens a second over the last minute; 0 when idle.");
  t.gauge("tokens_per_round", s.acceptance_1m, "Tokens a verify pass and sequence over the last minute; 0 when idle.");

  t.counter("prompt_tokens_total", s.prompt_tokens, "Prompt tokens taken in.");
  t.counter("generation_tokens_total", s.completion_tokens, "Tokens generated.");
  t.counter("requests_finished_total", s.requests_finished, "Requests that ended by a stop or their length.");
  t.counter("requests_cancelled_total", s.requests_cancelled, "Requests whose client went away.");
  t.counter("requests_failed_total", s.requests_failed, "Requests that an engine fault ended.");
  t.counter("own_requests_total", s.own_requests, "Requests of the service itself (smoke test, canary); no other counter has them.");
  t.counter("passes_total", s.passes, "Forest passes of the target.");
  t.counter("spec_decode_num_drafts_total", s.rounds, "Verify rounds of sequences.");
  t.counter("spec_decode_num_draft_tokens_total", s.drafted, "Draft tokens verified (nodes of trees).");
  t.counter("spec_decode_num_accepted_tokens_total", s.accepted, "Draft tokens accepted.");
  t.metric("spec_decode_num_accepted_tokens_per_pos_total", "counter", "Rounds that accepted at least position + 1 draft tokens.");
  for (size_t i = 0; i < s.accepted_at.size(); ++i)
    t.value("spec_decode_num_accepted_tokens_per_pos_total", fmt::format("position=\"{}\"", i), s.accepted_at[i]);
  t.counter("tree_nodes_verified_total", s.drafted, "Nodes of draft trees that a target pass covered.");
  t.counter("speculation_fallbacks_total", s.fallbacks, "Sequences that went back to plain decoding because drafts did not pay.");

  HttpCounters& c = service.counters();
  c.request_seconds.write(&t.out, "e2e_request_latency_seconds", "From receiving a request to its last token.");
  c.first_token_seconds.write(&t.out, "time_to_first_token_seconds", "From receiving a request to its first token.");
  c.token_seconds.write(&t.out, "time_per_output_token_seconds", "Mean time of a token after the first, by request.");
  c.queue_seconds.write(&t.out, "request_queue_time_seconds", "Time a request waited for a slot.");
  {
    std::lock_guard lock(c.mutex);
    t.metric("request_success_total", "counter", "Finished requests by finish reason.");
    for (const auto& [reason, n] : c.finished) t.value("request_success_total", fmt::format("finished_reason=\"{}\"", label(reason)), n);
    t.metric("http_requests_total", "counter", "Generation requests by endpoint and status.");
    for (const auto& [key, n] : c.replies)
      t.value("http_requests_total", fmt::format("endpoint=\"{}\",status=\"{}\"", label(key.first), key.second), n);
  }
  if (service.history().wanted()) {
    const StoreHealth h = service.history().health();
    t.gauge("store_writable", h.writable ? 1 : 0, "1 while the history can be written.");
    t.gauge("store_queued_rows", h.queued, "Rows that wait for their commit.");
    t.counter("store_dropped_rows_total", h.dropped_rows + h.dropped_trees, "Rows that were not kept.");
  }
  return t.out;
}

void register_metrics_route(HttpServer& server, Service& service) {
  server.route("GET", "/metrics", Access::kKey, [&service](const HttpRequest&, HttpResponse& response) {
    response.content_type = "text/plain; version=0.0.4; charset=utf-8";
    response.body = metrics_text(service);
  });
}

}  // namespace ddtree
