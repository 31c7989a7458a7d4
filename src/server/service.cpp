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
#include <mutex>
#include <thread>

#include "base/log.h"
#include "health/phases.h"
#include "health/smoke.h"
#include "server/history_keeper.h"
#include "server/json.h"
#include "server/metrics.h"
#include "server/recorder.h"
#include "server/serving_loader.h"
#include "server/smoke_subject.h"
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

constexpr double kStuckSeconds = 60;  // requests run and no pass for so long: the engine is stuck

}  // namespace

struct Service::Impl {
  explicit Impl(ServiceOptions o) : options(std::move(o)) {}

  ServiceOptions options;
  PhaseMachine phases;
  HistoryKeeper history;
  const double started = static_cast<double>(now_ms()) / 1000;
  HttpCounters counters;
  std::atomic<bool> draining{false}, ever_ready{false}, cancel_smoke{false};

  mutable std::mutex mutex;  // of what follows
  std::shared_ptr<const Serving> serving;
  std::optional<Ladder> ladder;
  std::vector<LiveRequest> live;                            // oldest first
  std::deque<std::shared_ptr<const RecentRequest>> recent;  // newest first
  MinuteRecorder minutes;

  std::mutex smoke_mutex;  // held while a suite runs
  std::mutex tick_mutex;
  std::condition_variable tick;
  bool stop_ticking = false;
  std::thread ticker;
  std::atomic<int64_t> last_passes{-1}, last_progress_ms{now_ms()};

  void run_ticker(const Service& service);
  SmokeReport smoke(const std::string& trigger);
};

Service::Service(ServiceOptions options) : impl_(std::make_unique<Impl>(std::move(options))) {
  impl_->ticker = std::thread([this] { impl_->run_ticker(*this); });
}

Service::~Service() {
  {
    std::lock_guard lock(impl_->tick_mutex);
    impl_->stop_ticking = true;
  }
  impl_->tick.notify_all();
  impl_->ticker.join();
  close(0, "asked to stop");
}

// Once a second: has the engine moved (for /livez), and what this minute looks like.
void Service::Impl::run_ticker(const Service& service) {
  std::unique_lock lock(tick_mutex);
  while (!tick.wait_for(lock, std::chrono::seconds(1), [&] { return stop_ticking; })) {
    const EngineSnapshot s = service.snapshot();
    if (s.passes != last_passes || s.running + s.waiting == 0) {
      last_passes = s.passes;
      last_progress_ms = now_ms();
    }
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
  m.history.write([at = now_ms()](Store& store) { store.add_phase({0, 0, at, phase_name(Phase::kStarting), "", 0}); });
  m.phases.add_listener([&m](const PhaseState&, const PhaseState& to) {
    log::info("{}", to.sentence());
    m.history.write([to](Store& store) { store.add_phase({0, 0, to.since_ms, phase_name(to.phase), to.reason, 0}); });
  });
  return {};
}

Status Service::load() {
  Impl& m = *impl_;
  const auto fail = [&](Status status) {
    if (m.draining) return Status(Code::kCancelled, "asked to stop while loading");  // phases no longer go forward: not a fault
    (void)m.phases.enter(Phase::kFailed, status.message());
    return status;
  };
  auto loaded = load_serving(m.options, m.phases);
  if (!loaded) return fail(loaded.status());
  m.options.engine = (*loaded)->engine->options();
  {
    std::lock_guard lock(m.mutex);
    m.serving = *loaded;
    m.ladder.emplace(m.options.engine.mode, Ladder::Limits(), 0, now_ms());
  }
  const std::string devices = dump_json(Json{{"backend", (*loaded)->info.backend}, {"cores", std::thread::hardware_concurrency()}});
  const EngineSnapshot s = (*loaded)->engine->snapshot();
  const std::string plan = dump_json(Json{{"context_length", (*loaded)->info.context_length},
                                          {"kv_pages", s.pages_total},
                                          {"page_size", m.options.page_size},
                                          {"state_slots", s.slots_total}});
  m.history.write([&m, devices, plan, mode = mode_name(m.options.engine.mode), drafter = (*loaded)->info.drafter](Store& store) {
    store.set_run_details(m.history.writing_run(), devices, plan, mode, drafter);
  });
  if (m.draining) return {Code::kCancelled, "asked to stop while loading"};
  if (m.options.skip_smoke) {
    m.phases.set_smoke(SmokeState::kSkipped);
    m.history.write([row = smoke_record(skipped_smoke("start"))](Store& store) { store.add_smoke_run(row); });
  } else {
    DDTREE_RETURN_IF_ERROR(m.phases.enter(Phase::kSmoke, "generating known text with and without speculation"));
    m.phases.set_smoke(SmokeState::kRunning);
    SmokeReport report;
    {
      std::lock_guard lock(m.smoke_mutex);
      report = m.smoke("start");
    }
    m.phases.set_smoke(report.verdict == SmokeVerdict::kPass   ? SmokeState::kPassed
                       : report.verdict == SmokeVerdict::kSkip ? SmokeState::kNotRun
                                                               : SmokeState::kFailed);
    if (m.draining) return {Code::kCancelled, "asked to stop during the smoke test"};
    if (report.verdict != SmokeVerdict::kPass)
      return fail(
          {Code::kEngineFault, (report.verdict == SmokeVerdict::kSkip ? "the smoke test was not completed: " : "the smoke test failed: ") +
                                   report.message + " (--skip-smoke serves the model all the same)"});
  }
  DDTREE_RETURN_IF_ERROR(m.phases.enter(Phase::kReady));
  m.ever_ready = true;
  m.history.write([&m, at = now_ms(), smoke = m.options.skip_smoke ? "skipped" : "pass"](Store& store) {
    store.set_run_ready(m.history.writing_run(), at, smoke);
  });
  return {};
}

SmokeReport Service::Impl::smoke(const std::string& trigger) {
  const std::shared_ptr<const Serving> s = [&] {
    std::lock_guard lock(mutex);
    return serving;
  }();
  const SmokeSubject subject = smoke_subject(s);
  SmokeOptions smoke_options;
  smoke_options.trigger = trigger;
  smoke_options.cancel = &cancel_smoke;
  smoke_options.progress = [this](const SmokeCheckResult& check, int done, int total) {
    phases.progress(Phase::kSmoke, total > 0 ? static_cast<double>(done) / total : -1, check.name);
  };
  SmokeReport report = run_smoke(subject, smoke_options);
  for (const SmokeCheckResult& c : report.checks)
    if (c.verdict == SmokeVerdict::kFail) log::warn("smoke test: {} {}: {}", c.name, c.mode, c.message);
  history.write([row = smoke_row(report, *s)](Store& store) { store.add_smoke_run(row); });
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
    if (m.phases.state().phase == Phase::kDegraded && !m.draining) (void)m.phases.enter(Phase::kReady);
    return {};
  }
  if (m.draining) return {Code::kCancelled, "the service stops"};
  if (report.verdict == SmokeVerdict::kSkip) return {Code::kTemporary, report.message};
  (void)m.phases.enter(Phase::kDegraded, "the smoke test failed: " + report.message);
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

std::shared_ptr<const Serving> Service::serving() const {
  std::lock_guard lock(impl_->mutex);
  return impl_->serving;
}

LadderState Service::ladder() const {
  std::lock_guard lock(impl_->mutex);
  if (impl_->ladder) return impl_->ladder->state();
  LadderState none;
  none.step = mode_name(impl_->options.engine.mode);
  none.most = impl_->options.engine.mode;
  return none;
}

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

bool Service::alive() const {
  const PhaseState s = impl_->phases.state();
  if (s.phase == Phase::kFailed) return false;
  return static_cast<double>(now_ms() - impl_->last_progress_ms) / 1000 < kStuckSeconds;
}

EngineSnapshot Service::snapshot() const {
  const auto s = serving();
  return s ? s->engine->snapshot() : EngineSnapshot{};
}

void Service::request_started(const LiveRequest& request) {
  std::lock_guard lock(impl_->mutex);
  impl_->live.push_back(request);
}

void Service::request_progress(const std::string& id, int32_t completion_tokens) {
  std::lock_guard lock(impl_->mutex);
  for (LiveRequest& r : impl_->live)
    if (r.id == id) r.completion_tokens = completion_tokens;
}

void Service::request_finished(RecentRequest finished) {
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
  m.history.write([row = request_record(finished, 0, loaded ? loaded->info.name : ""), trees = round_trees(finished.stats)](Store& store) {
    store.add_request(row, trees);
  });
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
