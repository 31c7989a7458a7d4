// What is happening now: status, the chart of the last hours, events.
#include <algorithm>
#include <cmath>

#include "health/phases.h"
#include "server/admin_parts.h"
#include "server/history_keeper.h"
#include "server/serving_plan.h"

namespace ddtree::admin {

namespace {

constexpr int kSampleSeconds = 5;
constexpr size_t kSamplesKept = 3600 / kSampleSeconds;

Json model_json(const ModelInfo& info) {
  return Json{{"name", info.name},
              {"path", info.path},
              {"architecture", info.architecture},
              {"backend", info.backend},
              {"parameters", info.parameters},
              {"layers", info.layers},
              {"hidden_size", info.hidden_size},
              {"vocab_size", info.vocab_size},
              {"context_length", info.context_length},
              {"block_size", info.block_size},
              {"has_drafter", info.has_drafter},
              {"has_mtp", info.has_mtp}};
}

Json engine_json(const EngineSnapshot& e, const EngineOptions& o) {
  return Json{{"mode", mode_name(o.mode)},
              {"budget", o.budget},
              {"shadow_linear", o.shadow_linear},
              {"seed_chain", o.seed_chain},
              {"nextn_steps", o.nextn_steps},
              {"max_running", o.max_running},
              {"max_queue", o.max_queue},
              {"running", e.running},
              {"waiting", e.waiting},
              {"pages_used", e.pages_used},
              {"pages_total", e.pages_total},
              {"slots_used", e.slots_used},
              {"slots_total", e.slots_total},
              {"finished", e.requests_finished},
              {"cancelled", e.requests_cancelled},
              {"failed", e.requests_failed},
              {"prompt_tokens", e.prompt_tokens},
              {"completion_tokens", e.completion_tokens},
              {"rounds", e.rounds},
              {"drafted", e.drafted},
              {"accepted", e.accepted},
              {"accepted_at", e.accepted_at},
              {"fallbacks", e.fallbacks},
              {"prefill_tps_1m", e.prefill_tps_1m},
              {"decode_tps_1m", e.decode_tps_1m},
              {"tokens_per_round_1m", e.acceptance_1m}};
}

int64_t to_ms(double unix_seconds) { return std::llround(unix_seconds * 1000); }

Json live_json(const LiveRequest& r) {
  return Json{{"id", r.id},
              {"endpoint", r.endpoint},
              {"client", r.client},
              {"stream", r.stream},
              {"started", to_ms(r.started)},
              {"prompt_tokens", r.prompt_tokens},
              {"completion_tokens", r.completion_tokens},
              {"max_tokens", r.max_tokens},
              {"mode", mode_name(r.mode)}};
}

Json ladder_json(const LadderState& ladder) {
  return Json{{"step", ladder.step},
              {"mode", mode_name(ladder.most)},
              {"since_ms", ladder.since_ms ? Json(ladder.since_ms) : Json()},
              {"reason", ladder.reason},
              {"steps", ladder.steps}};
}

Json store_json(Service& service) {
  const HistoryKeeper& history = service.history();
  if (!history.wanted()) return Json();
  const StoreHealth health = history.health();
  return Json{{"path", history.path()},
              {"open", history.store() != nullptr},
              {"writable", health.writable},
              {"message", health.message},
              {"failing_since", health.failing_since_ms ? Json(health.failing_since_ms) : Json()},
              {"queued_rows", health.queued},
              {"file_bytes", health.file_bytes},
              {"dropped_rows", health.dropped_rows},
              {"dropped_trees", health.dropped_trees},
              {"store_text", service.options().store_text}};
}

Json status_json(Admin& admin) {
  Service& service = admin.service;
  const PhaseState phase = service.phases().state();
  const auto serving = service.serving();
  // The engine's own options once it is there: it may have settled what the command line left open.
  const EngineOptions& options = serving && serving->engine ? serving->engine->options() : service.options().engine;
  Json live = Json::array();
  for (const LiveRequest& r : service.live_requests()) live.push_back(live_json(r));
  Json smoke;
  Store* store = service.store();
  if (store) {
    if (const auto runs = store->smoke_runs({.limit = 1}); runs.ok() && !runs->rows.empty()) smoke = smoke_json(runs->rows.front());
  }
  return Json{{"now", now_ms()},
              {"version", DDTREE_VERSION},
              {"run_id", service.run_id()},
              {"started", to_ms(service.started_at())},
              {"ready", service.ready() && !service.draining()},
              {"ready_since", phase.ready_since_ms ? Json(phase.ready_since_ms) : Json()},
              {"smoke_skipped", service.smoke_skipped()},
              {"phase", Json{{"word", phase_name(phase.phase)},
                             {"sentence", phase.sentence()},
                             {"since", phase.since_ms ? Json(phase.since_ms) : Json()},
                             {"progress", phase.progress >= 0 ? Json(phase.progress) : Json()}}},
              {"model", serving ? model_json(serving->info) : Json()},
              {"plan", serving && serving->plan ? Json::parse(plan_json(*serving->plan)) : Json()},
              {"engine", engine_json(service.snapshot(), options)},
              {"ladder", ladder_json(service.ladder())},
              {"live", std::move(live)},
              {"smoke", std::move(smoke)},
              {"smoke_running", smoke_running_json(admin)},
              {"store", store_json(service)}};
}

// Points of the chart: this run's samples of five seconds, and before the first of them (or further back than they reach) the store's
// minutes. A minute without a row was idle or without a server: zero.
Json series_json(Admin& admin, int64_t minutes) {
  const int64_t to = now_ms(), from = to - minutes * 60'000;
  Json time = Json::array(), decode = Json::array(), prefill = Json::array(), per_round = Json::array(), running = Json::array();
  const auto add = [&](int64_t at, double d, double p, int64_t rounds, int64_t accepted, int32_t r) {
    time.push_back(at);
    decode.push_back(d);
    prefill.push_back(p);
    per_round.push_back(rounds > 0 ? Json(1.0 + static_cast<double>(accepted) / static_cast<double>(rounds)) : Json());
    running.push_back(r);
  };
  const std::vector<Sampler::Sample> samples = admin.sampler.samples();
  const int64_t fine_from = samples.empty() ? to : samples.front().at_ms - kSampleSeconds * 1000;
  if (Store* store = admin.service.store()) {
    if (const auto rows = store->metric_minutes(from, fine_from); rows.ok() && !rows->empty()) {
      int64_t at = rows->front().minute_ms;
      for (const MetricMinute& m : *rows) {
        for (; at < m.minute_ms; at += 60'000) add(at + 30'000, 0, 0, 0, 0, 0);
        if (m.minute_ms + 30'000 < fine_from) add(m.minute_ms + 30'000, m.decode_tps, m.prefill_tps, m.rounds, m.accepted, m.running_max);
        at = m.minute_ms + 60'000;
      }
      for (; at + 60'000 < fine_from; at += 60'000) add(at + 30'000, 0, 0, 0, 0, 0);
    }
  }
  for (const Sampler::Sample& s : samples)
    if (s.at_ms >= from) add(s.at_ms, s.decode_tps, s.prefill_tps, s.rounds, s.accepted, s.running);
  return Json{{"from", from},
              {"to", to},
              {"time", std::move(time)},
              {"decode_tps", std::move(decode)},
              {"prefill_tps", std::move(prefill)},
              {"tokens_per_round", std::move(per_round)},
              {"running", std::move(running)}};
}

bool matches(const EventFilter& filter, const Event& e) {
  const bool kind = filter.kind.empty() || (filter.kind.back() == '.' ? e.kind.starts_with(filter.kind) : e.kind == filter.kind);
  return kind && (filter.run_id == 0 || e.run_id == filter.run_id) && (!filter.at_least || e.severity >= *filter.at_least);
}

}  // namespace

Result<Page<Event>> read_events(Service& service, const EventFilter& filter, Paging paging) {
  Page<Event> page;
  bool readable = false;
  if (Store* store = service.store()) {
    auto read = store->events(filter, paging);
    // A disk that refuses even to be read must not hide why.
    if (!read && service.history().health().writable) return read.status();
    readable = read.ok();
    if (read) page = std::move(*read);
  }
  const StoreHealth health = service.history().health();
  if (paging.offset > 0 || (health.writable && readable)) return page;
  std::vector<Event> waiting;
  for (const Event& e : service.history().recent_events()) {
    const bool written = std::any_of(page.rows.begin(), page.rows.end(), [&](const Event& row) { return row.id == e.id; });
    if (!written && matches(filter, e)) waiting.push_back(e);
  }
  page.total += static_cast<int64_t>(waiting.size());
  page.rows.insert(page.rows.begin(), waiting.begin(), waiting.end());
  std::stable_sort(page.rows.begin(), page.rows.end(), [](const Event& a, const Event& b) { return a.at_ms > b.at_ms; });
  if (page.rows.size() > static_cast<size_t>(paging.limit)) page.rows.resize(static_cast<size_t>(paging.limit));
  return page;
}

Sampler::Sampler(Service& service) : service_(service), thread_([this] { run(); }) {}

Sampler::~Sampler() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  stop_signal_.notify_all();
  thread_.join();
}

std::vector<Sampler::Sample> Sampler::samples() const {
  const std::lock_guard lock(mutex_);
  return {samples_.begin(), samples_.end()};
}

void Sampler::run() {
  using Clock = std::chrono::steady_clock;
  EngineSnapshot before = service_.snapshot();
  auto at = Clock::now();
  std::unique_lock lock(mutex_);
  while (!stop_signal_.wait_for(lock, std::chrono::seconds(kSampleSeconds), [this] { return stop_; })) {
    lock.unlock();
    const EngineSnapshot now = service_.snapshot();
    const auto then = Clock::now();
    const double seconds = std::chrono::duration<double>(then - at).count();
    lock.lock();
    // A counter that went back belongs to another engine (none before, or one that was loaded again).
    if (now.completion_tokens >= before.completion_tokens && now.rounds >= before.rounds && seconds > 0)
      samples_.push_back({now_ms(), static_cast<double>(now.completion_tokens - before.completion_tokens) / seconds,
                          static_cast<double>(now.prompt_tokens - before.prompt_tokens) / seconds, now.rounds - before.rounds,
                          now.accepted - before.accepted, now.running});
    while (samples_.size() > kSamplesKept) samples_.pop_front();
    before = now;
    at = then;
  }
}

void register_live_routes(HttpServer& server, const std::shared_ptr<Admin>& admin) {
  route(server, "GET", "/admin/api/status", {},
        [admin](const HttpRequest&, HttpResponse& response) { send_json(response, status_json(*admin)); });

  route(server, "GET", "/admin/api/series", {"minutes"}, [admin](const HttpRequest& request, HttpResponse& response) {
    int64_t minutes = 0;
    ApiError error;
    if (!read_int(request, "minutes", 1, 10'080, 60, &minutes, &error)) return send_error(response, error);
    send_json(response, series_json(*admin, minutes));
  });

  route(
      server, "GET", "/admin/api/events", kPaging + Parameters{"run", "kind", "severity"},
      [admin](const HttpRequest& request, HttpResponse& response) {
        Paging paging;
        EventFilter filter;
        ApiError error;
        if (!read_paging(request, 50, &paging, &error) || !read_int(request, "run", 0, int64_t{1} << 60, 0, &filter.run_id, &error))
          return send_error(response, error);
        filter.kind = request.query_value("kind");
        const std::string least = request.query_value("severity");
        if (least == "warning" || least == "error") filter.at_least = least == "error" ? Severity::kError : Severity::kWarning;
        else if (!least.empty() && least != "info")
          return send_error(response, invalid_value("severity", "severity is \"" + least + "\", but must be info, warning or error"));
        const auto page = read_events(admin->service, filter, paging);
        if (!page.ok()) return send_error(response, from_status(page.status()));
        Json list = Json::array();
        for (const Event& e : page->rows) list.push_back(event_json(e));
        send_json(response, Json{{"total", page->total}, {"offset", paging.offset}, {"limit", paging.limit}, {"events", std::move(list)}});
      });
}

}  // namespace ddtree::admin
