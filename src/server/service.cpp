#include "server/service.h"

#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <ctime>
#include <deque>
#include <fstream>
#include <map>
#include <mutex>
#include <thread>

#include "base/log.h"
#include "engine/validate.h"
#include "health/phases.h"
#include "health/smoke.h"
#include "server/history_keeper.h"
#include "server/json.h"
#include "server/metrics.h"
#include "server/recorder.h"
#include "server/serving_loader.h"
#include "server/serving_plan.h"
#include "server/serving_smoke.h"
#include "server/smoke_prompts.h"
#include "server/watcher.h"
#include "store/store.h"
#include "text/detokenizer.h"
#include "text/tokenizer.h"

namespace ddtree {

namespace {

int64_t now_ms() {
  return std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::system_clock::now().time_since_epoch()).count();
}

std::string host_name() {
  char name[256] = "";
  gethostname(name, sizeof name - 1);
  return name;
}

constexpr auto kTick = std::chrono::milliseconds(200);
constexpr int kRestartSeconds = 60;  // for what still holds on to the old engine

}  // namespace

struct Service::Impl {
  Impl(ServiceOptions o, Service& service);

  ServiceOptions options;
  PhaseMachine phases;
  HistoryKeeper history;
  const double started = static_cast<double>(now_ms()) / 1000;
  HttpCounters counters;
  std::atomic<bool> draining{false}, ever_ready{false}, cancel_smoke{false};
  std::map<std::string, Condition> conditions;  // under condition_mutex
  std::mutex condition_mutex;
  std::function<void(const Status&)> give_up;
  Service& self;
  Watcher watcher;  // outlives the engine, whose last words it hears
  std::thread restarter;

  mutable std::mutex mutex;  // of what follows
  std::shared_ptr<const Serving> serving;
  std::vector<LiveRequest> live;                            // oldest first
  std::deque<std::shared_ptr<const RecentRequest>> recent;  // newest first
  MinuteRecorder minutes;

  std::mutex smoke_mutex;  // held while a suite runs
  std::mutex tick_mutex;
  std::condition_variable tick;
  bool stop_ticking = false;
  std::thread ticker;

  void run_ticker(Service& service);
  Status load_engine(const std::string& trigger);
  void restart(const std::string& reason);
  void show_conditions();
  SmokeReport smoke(const std::string& trigger);

  std::vector<SmokePrompt> smoke_prompts;     // --smoke-prompts
  std::optional<EngineSnapshot> start_costs;  // as measured at the start: running averages would follow a slow machine
};

Service::Impl::Impl(ServiceOptions o, Service& service)
    : options(std::move(o)),
      self(service),
      watcher(options, {.tell = [this](Event e) { history.add_event(std::move(e)); },
                        .condition = [&service](const std::string& name, Condition c) { service.set_condition(name, std::move(c)); },
                        .restart =
                            [this](const std::string& reason) {
                              if (restarter.joinable()) restarter.join();  // of an earlier time, long over
                              restarter = std::thread([this, reason] { restart(reason); });
                            },
                        .give_up =
                            [this](const Status& why) {
                              (void)phases.enter(Phase::kFailed, why.message());
                              if (give_up) give_up(why);
                            }}) {}

Service::Service(ServiceOptions options) : impl_(std::make_unique<Impl>(std::move(options), *this)) {
  impl_->ticker = std::thread([this] { impl_->run_ticker(*this); });
}

Service::~Service() {
  {
    std::lock_guard lock(impl_->tick_mutex);
    impl_->stop_ticking = true;
  }
  impl_->tick.notify_all();
  impl_->ticker.join();
  if (impl_->restarter.joinable()) impl_->restarter.join();
  impl_->watcher.end();
  close(0, "asked to stop");
}

// The watch a few times a second, and once a second what this minute looks like.
void Service::Impl::run_ticker(Service& service) {
  std::unique_lock lock(tick_mutex);
  for (int n = 0; !tick.wait_for(lock, kTick, [&] { return stop_ticking; }); ++n) {
    watcher.tick(phases.state().serving() && !draining, !service.live_requests().empty());
    if (n % 5 != 0) continue;
    const EngineSnapshot s = service.snapshot();
    // Answers do not depend on the history, so it makes nothing degraded; the words are for whoever looks.
    const StoreHealth written = history.health();
    service.set_condition("history",
                          !history.wanted() || written.writable
                              ? Condition()
                              : Condition{false, "the history cannot be written (answers are not affected): " + written.message});
    std::optional<MetricMinute> minute;
    {
      std::lock_guard state(mutex);
      minute = minutes.tick(now_ms(), s);
    }
    if (minute) history.write([row = *minute](Store& store) { store.put_metric_minute(row); });
  }
}

Status Service::open_store() {
  Impl& m = *impl_;
  std::string path = m.options.db_path;
  if (path.empty()) {
    auto standard = default_store_path();
    if (!standard) return standard.status();
    path = *standard;
  }
  StoreOptions options;
  options.store_text = m.options.store_text;
  options.retain_days = m.options.retain_days;
  options.retain_bytes = m.options.retain_bytes;
  options.before_commit = m.options.before_store_commit;
  ServiceRun run;
  run.version = DDTREE_VERSION;
  run.host = host_name();
  run.model = m.options.model_path.empty() ? "tiny" : m.options.model_path;
  run.drafter = m.options.draft_path;
  run.mode = mode_name(m.options.engine.mode);
  Json flags = Json::object();
  for (const auto& [name, value] : m.options.flags) flags[name] = name == "--api-key" ? "(set)" : value;
  run.flags = dump_json(flags);
  run.pid = getpid();
  run.started_ms = static_cast<int64_t>(m.started * 1000);
  if (Status status = m.history.open(path, options, std::move(run)); !status.ok()) return status;
  m.history.write([at = static_cast<int64_t>(m.started * 1000)](Store& store) {
    store.add_phase({0, 0, at, phase_name(Phase::kStarting), "", 0});
  });
  m.phases.add_listener([&m](const PhaseState&, const PhaseState& to) {
    if (to.phase == Phase::kFailed) log::error("{}", to.sentence());
    else if (to.phase == Phase::kDegraded) log::warn("{}", to.sentence());
    else log::info("{}", to.sentence());
    m.history.write([to](Store& store) { store.add_phase({0, 0, to.since_ms, phase_name(to.phase), to.reason, 0}); });
  });
  return {};
}

Status Service::load() { return impl_->load_engine("start"); }

Status Service::Impl::load_engine(const std::string& trigger) {
  Impl& m = *this;
  const auto fail = [&](Status status) {
    if (m.draining) return Status(Code::kCancelled, "asked to stop while loading");  // phases no longer go forward: not a fault
    (void)m.phases.enter(Phase::kFailed, status.message());
    return status;
  };
  if (!m.options.smoke_prompts_path.empty()) {
    auto prompts = read_smoke_prompts(m.options.smoke_prompts_path);
    if (!prompts) return fail({prompts.status().code(), "--smoke-prompts: " + prompts.status().message()});
    m.smoke_prompts = std::move(*prompts);
  }
  auto loaded = load_serving(m.options, m.phases);
  if (!loaded) return fail(loaded.status());
  m.options.engine = (*loaded)->engine->options();
  {
    std::lock_guard lock(m.mutex);
    m.serving = *loaded;
  }
  const std::string devices = dump_json(Json{{"backend", (*loaded)->info.backend}, {"cores", std::thread::hardware_concurrency()}});
  const std::string plan = plan_json(*(*loaded)->plan);
  m.history.write([&m, devices, plan, mode = mode_name(m.options.engine.mode), drafter = (*loaded)->info.drafter](Store& store) {
    store.set_run_details(m.history.writing_run(), devices, plan, mode, drafter);
  });
  if (m.draining) return {Code::kCancelled, "asked to stop while loading"};
  std::string regression;
  if (m.options.skip_smoke) {
    m.phases.set_smoke(SmokeState::kSkipped);
    m.history.write([row = smoke_record(skipped_smoke(trigger))](Store& store) { store.add_smoke_run(row); });
  } else {
    DDTREE_RETURN_IF_ERROR(m.phases.enter(Phase::kSmoke, "generating known text with and without speculation"));
    m.phases.set_smoke(SmokeState::kRunning);
    SmokeReport report;
    {
      std::lock_guard lock(m.smoke_mutex);
      report = m.smoke(trigger);
    }
    m.phases.set_smoke(report.verdict == SmokeVerdict::kPass   ? SmokeState::kPassed
                       : report.verdict == SmokeVerdict::kSkip ? SmokeState::kNotRun
                                                               : SmokeState::kFailed);
    if (m.draining) return {Code::kCancelled, "asked to stop during the smoke test"};
    if (report.verdict != SmokeVerdict::kPass)
      return fail(
          {Code::kEngineFault, (report.verdict == SmokeVerdict::kSkip ? "the smoke test was not completed: " : "the smoke test failed: ") +
                                   report.message + " (--skip-smoke serves the model all the same)"});
    regression = report.warning;
  }
  m.self.set_condition("smoke", regression.empty() ? Condition{} : Condition{true, "the smoke test passed, but " + regression});
  m.watcher.begin(*loaded);
  if (m.draining) return {Code::kCancelled, "asked to stop while loading"};
  DDTREE_RETURN_IF_ERROR(m.phases.enter(Phase::kReady));
  m.show_conditions();
  if (!m.ever_ready.exchange(true))
    m.history.write([&m, at = now_ms(), smoke = m.options.skip_smoke ? "skipped" : "pass"](Store& store) {
      store.set_run_ready(m.history.writing_run(), at, smoke);
    });
  return {};
}

// The engine and all that belongs to it goes and is loaded anew, while the phase says so. On a thread of its own.
void Service::Impl::restart(const std::string& reason) {
  {
    std::lock_guard lock(condition_mutex);  // not between show_conditions()'s look and its step: ready would follow devices
    if (!phases.enter(Phase::kDevices, "restarting the engine: " + reason).ok()) return;  // draining, failed
    phases.set_smoke(SmokeState::kNotRun);
  }
  std::shared_ptr<const Serving> old;
  {
    std::lock_guard lock(mutex);
    old = std::move(serving);
  }
  const auto failed = [&](const std::string& why) {
    if (draining) return;
    (void)phases.enter(Phase::kFailed, why);
    if (give_up) give_up({Code::kEngineFault, why});
  };
  watcher.end();
  // Running requests end with a 503 or an error event, which says why. Only an engine that stands still does not let them.
  if (old) {
    const auto drained = std::make_shared<std::atomic<bool>>(false);
    std::thread([old, drained] {
      old->engine->drain(0);
      *drained = true;
    }).detach();
    for (int i = 0; i < kRestartSeconds * 20 && !*drained; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(50));
    if (!*drained) return failed(fmt::format("the engine could not be restarted: a round is stuck for {} s; {}", kRestartSeconds, reason));
  }
  const std::weak_ptr<const Serving> left = old;
  old.reset();
  for (int i = 0; i < kRestartSeconds * 10 && !left.expired(); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(100));
  if (!left.expired())
    return failed(fmt::format("the engine could not be restarted: it is still in use after {} s; {}", kRestartSeconds, reason));
  if (const Status s = load_engine("restart"); !s.ok() && s.code() != Code::kCancelled)
    failed(fmt::format("the engine could not be restarted ({}), after: {}", s.message(), reason));
}

void Service::set_condition(const std::string& name, Condition condition) {
  Impl& m = *impl_;
  {
    std::lock_guard lock(m.condition_mutex);
    Condition& c = m.conditions[name];
    if (c.degraded == condition.degraded && c.words == condition.words) return;
    c = std::move(condition);
  }
  m.show_conditions();
}

// Ready or degraded, and the words, by what holds now.
void Service::Impl::show_conditions() {
  std::lock_guard lock(condition_mutex);
  bool degraded = false;
  std::string words;
  for (const auto& [name, c] : conditions) {
    if (c.words.empty()) continue;
    degraded |= c.degraded;
    words += (words.empty() ? "" : "; ") + c.words;
  }
  if (phases.state().serving() && !draining) (void)phases.enter(degraded ? Phase::kDegraded : Phase::kReady, words);
}

SmokeReport Service::Impl::smoke(const std::string& trigger) {
  const std::shared_ptr<const Serving> s = [&] {
    std::lock_guard lock(mutex);
    return serving;
  }();
  // Modes that the ladder has taken away would run as lower ones, which says nothing: serving_smoke() leaves them out.
  ServingSmoke bench = serving_smoke(self, s);
  if (!start_costs) start_costs = bench.setup.costs;
  bench.setup.costs = start_costs;
  bench.setup.prompts = smoke_prompts;
  SmokeOptions smoke_options;
  smoke_options.thresholds = options.smoke_thresholds;
  SmokePast past = smoke_past(history.store(), *s, trigger, smoke_options.thresholds);
  bench.setup.before = std::move(past.before);
  smoke_options.trigger = past.trigger;
  smoke_options.cancel = &cancel_smoke;
  smoke_options.progress = [this](const SmokeCheckResult& check, int done, int total) {
    phases.progress(Phase::kSmoke, total > 0 ? static_cast<double>(done) / total : -1, check.name);
  };
  if (past.trigger == "upgrade")
    log::info("smoke test: first start of version {}; the one before was {}", DDTREE_VERSION, bench.setup.before.previous_version);
  SmokeReport report = run_smoke(bench.setup, smoke_options);
  for (const SmokeCheckResult& c : report.checks)
    if (c.verdict == SmokeVerdict::kFail || c.verdict == SmokeVerdict::kWarn)
      log::warn("smoke test: {} {} {}: {}", c.name, c.mode, c.input_id, c.message);
  history.write([row = smoke_row(report, *s)](Store& store) { store.add_smoke_run(row); });
  if (!report.warning.empty()) history.add_event({.severity = Severity::kWarning, .kind = "smoke.regression", .message = report.warning});
  return report;
}

Status Service::run_smoke_now() {
  Impl& m = *impl_;
  if (!ready() || draining()) return {Code::kTemporary, "the service is not ready: " + m.phases.state().sentence()};
  std::unique_lock lock(m.smoke_mutex, std::try_to_lock);
  if (!lock) return {Code::kTemporary, "a smoke test runs already; wait for its result"};
  const SmokeReport report = m.smoke("dashboard");
  if (report.verdict == SmokeVerdict::kPass) {
    m.phases.set_smoke(SmokeState::kPassed);
    // Worse than before is served all the same: a hot card is no reason for an outage.
    set_condition("smoke", report.warning.empty() ? Condition{} : Condition{true, "the smoke test passed, but " + report.warning});
    return {};
  }
  if (m.draining) return {Code::kCancelled, "the service stops"};
  if (report.verdict == SmokeVerdict::kSkip) return {Code::kTemporary, report.message};
  set_condition("smoke", {true, "the smoke test failed: " + report.message});
  m.phases.set_smoke(SmokeState::kFailed);
  return {Code::kEngineFault, report.message};
}

void Service::adopt(std::shared_ptr<const Serving> serving) {
  Impl& m = *impl_;
  {
    std::lock_guard lock(m.mutex);
    m.serving = std::move(serving);
  }
  m.phases.set_smoke(SmokeState::kPassed);
  (void)m.phases.enter(Phase::kReady);
  m.ever_ready = true;
}

void Service::drain(double seconds) {
  Impl& m = *impl_;
  m.draining = true;
  m.cancel_smoke = true;
  m.watcher.hush();
  (void)m.phases.enter(Phase::kDraining, fmt::format("asked to stop; running requests may finish within {:.0f} s", seconds));
  if (const auto s = serving()) s->engine->drain(seconds);
  // The engine is done with them; the connections still write their last bytes and close the books.
  for (int i = 0; i < 500 && !live_requests().empty(); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(10));
}

void Service::close(int exit_code, const std::string& reason) {
  Impl& m = *impl_;
  if (!m.history.wanted()) return;
  std::lock_guard smoke(m.smoke_mutex);  // a suite asked for by the dashboard writes its result first: the drain has cancelled it
  if (!m.phases.state().over()) (void)m.phases.enter(Phase::kDraining);
  if (m.phases.state().phase != Phase::kFailed) (void)m.phases.enter(Phase::kStopped, reason);
  m.history.close(reason, exit_code);
}

void Service::abandon(int exit_code, const std::string& reason) {
  Impl& m = *impl_;
  if (!m.phases.state().over()) (void)m.phases.enter(Phase::kDraining);
  if (m.phases.state().phase != Phase::kFailed) (void)m.phases.enter(Phase::kStopped, reason);
  for (const LiveRequest& r : live_requests()) {
    RecentRequest f;
    f.request = r;
    f.finished = static_cast<double>(now_ms()) / 1000;
    f.finish = "error";
    f.error = reason;
    f.http_status = 500;
    f.stats.mode = r.mode;
    f.stats.prompt_tokens = r.prompt_tokens;
    f.stats.completion_tokens = r.completion_tokens;
    request_finished(std::move(f));
  }
  // Not closed: connections may still be reading from it.
  if (Store* store = m.history.store()) store->end_run(m.history.run_id(), reason, exit_code);
}

void Service::on_give_up(std::function<void(const Status&)> give_up) { impl_->give_up = std::move(give_up); }

Watcher& Service::watcher() { return impl_->watcher; }

std::shared_ptr<const Serving> Service::serving() const {
  std::lock_guard lock(impl_->mutex);
  return impl_->serving;
}

LadderState Service::ladder() const { return impl_->watcher.ladder(); }

bool Service::ready() const { return impl_->phases.state().serving(); }
bool Service::draining() const { return impl_->draining; }
bool Service::started() const { return impl_->ever_ready; }
bool Service::smoke_skipped() const { return impl_->phases.state().smoke == SmokeState::kSkipped; }
const ServiceOptions& Service::options() const { return impl_->options; }
PhaseMachine& Service::phases() { return impl_->phases; }
const PhaseMachine& Service::phases() const { return impl_->phases; }
HistoryKeeper& Service::history() { return impl_->history; }
Store* Service::store() const { return impl_->history.store(); }
int64_t Service::run_id() const { return impl_->history.run_id(); }
double Service::started_at() const { return impl_->started; }
HttpCounters& Service::counters() { return impl_->counters; }

int Service::retry_after() const {
  // Draining: another server should be asked, or this one after its restart.
  return draining() ? 10 : 2;
}

bool Service::alive() const { return impl_->phases.state().phase != Phase::kFailed && !impl_->watcher.stuck(); }

EngineSnapshot Service::snapshot() const {
  const auto s = serving();
  return s ? s->engine->snapshot() : EngineSnapshot{};
}

void Service::request_started(const LiveRequest& request) {
  if (request.own) return;
  std::lock_guard lock(impl_->mutex);
  impl_->live.push_back(request);
}

void Service::request_progress(const std::string& id, int32_t completion_tokens) {
  std::lock_guard lock(impl_->mutex);
  for (LiveRequest& r : impl_->live)
    if (r.id == id) r.completion_tokens = completion_tokens;
}

void Service::request_finished(RecentRequest finished) {
  if (finished.request.own) return;
  Impl& m = *impl_;
  HttpCounters& c = m.counters;
  const RequestStats& s = finished.stats;
  const double seconds = finished.finished - finished.request.started;
  c.request_seconds.observe(seconds);
  if (s.completion_tokens > 0) {
    c.first_token_seconds.observe(s.first_token_ms / 1000);
    c.queue_seconds.observe(s.queue_ms / 1000);
  }
  if (s.completion_tokens > 1) c.token_seconds.observe(s.decode_ms / 1000 / (s.completion_tokens - 1));
  {
    std::lock_guard lock(c.mutex);
    ++c.finished[finished.finish];
    ++c.replies[{finished.request.endpoint, finished.http_status}];
  }
  log::debug("{} {} {}: {} + {} tokens, {:.2f} s, {} rounds", finished.request.id, finished.request.endpoint, finished.finish,
             s.prompt_tokens, s.completion_tokens, seconds, s.rounds);
  const std::shared_ptr<const Serving> loaded = serving();
  // Not under the lock: a queue that is full may let a row wait for a moment.
  m.history.add_request(request_record(finished, 0, loaded ? loaded->info.name : ""), round_trees(finished.stats));
  std::lock_guard lock(m.mutex);
  std::erase_if(m.live, [&](const LiveRequest& r) { return r.id == finished.request.id; });
  m.minutes.request(finished);
  // What was refused at the door has nothing to show, and must not push out what has.
  const bool refused = finished.http_status == 400 || finished.http_status == 429;
  if (m.options.recent_trees > 0 && !refused) {
    m.recent.push_front(std::make_shared<const RecentRequest>(std::move(finished)));
    while (m.recent.size() > static_cast<size_t>(m.options.recent_trees)) m.recent.pop_back();
  }
}

std::vector<LiveRequest> Service::live_requests() const {
  std::lock_guard lock(impl_->mutex);
  return impl_->live;
}

std::vector<std::shared_ptr<const RecentRequest>> Service::recent_requests() const {
  std::lock_guard lock(impl_->mutex);
  return {impl_->recent.begin(), impl_->recent.end()};
}

std::shared_ptr<const RecentRequest> Service::recent_request(const std::string& id) const {
  std::lock_guard lock(impl_->mutex);
  for (const auto& r : impl_->recent)
    if (r->request.id == id) return r;
  return nullptr;
}

std::vector<std::string> Service::token_texts(const std::vector<int32_t>& ids) const {
  const auto s = serving();
  if (!s || !s->tokenizer) return {};
  std::vector<std::string> out;
  out.reserve(ids.size());
  for (const int32_t id : ids) out.push_back(s->tokenizer->decode(std::vector<int32_t>{id}, false));
  return out;
}

}  // namespace ddtree
