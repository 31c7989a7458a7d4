#include "server/history_keeper.h"

#include <fmt/core.h>

#include <chrono>

#include "base/log.h"

namespace ddtree {

namespace {

constexpr size_t kWaiting = 4096, kEvents = 64;
constexpr auto kRetry = std::chrono::seconds(5);

int64_t now_ms() {
  return std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::system_clock::now().time_since_epoch()).count();
}

}  // namespace

HistoryKeeper::~HistoryKeeper() { close("asked to stop", 0); }

Status HistoryKeeper::open(const std::string& path, const StoreOptions& options, ServiceRun run) {
  std::unique_lock lock(mutex_);
  path_ = path;
  options_ = options;
  run_ = std::move(run);
  auto opened = Store::open(path, options);
  const Status status = opened.status();
  if (!status.ok() && status.code() != Code::kStorage) return status;
  wanted_ = true;
  if (status.ok()) return take(std::move(*opened)), Status();
  log::error("history: it cannot be opened; the service runs without one and tries again: {}", status.message());
  without_.writable = false;
  without_.message = status.message();
  without_.failing_since_ms = now_ms();
  thread_ = std::thread([this] { retry(); });
  lock.unlock();
  add_event({.severity = Severity::kError,
             .kind = "store.unwritable",
             .message = "the history cannot be opened, rows wait in memory: " + status.message()});
  return {};
}

void HistoryKeeper::take(std::unique_ptr<Store> opened) {
  store_ = std::move(opened);
  run_id_ = store_->begin_run(run_);
  for (const auto& what : waiting_) what(*store_);
  waiting_.clear();
  published_.store(store_.get(), std::memory_order_release);
}

void HistoryKeeper::retry() {
  std::unique_lock lock(mutex_);
  while (!wake_.wait_for(lock, kRetry, [&] { return closed_; })) {
    // Without the lock: opening a large file takes seconds, and requests that end meanwhile must not wait for it.
    const std::string path = path_;
    const StoreOptions options = options_;
    lock.unlock();
    auto opened = Store::open(path, options);
    lock.lock();
    if (!opened) {
      without_.message = opened.status().message();
      continue;
    }
    const double seconds = static_cast<double>(now_ms() - without_.failing_since_ms) / 1000;
    log::info("history: opened after {:.0f} s", seconds);
    take(std::move(*opened));
    store_->add_event({.kind = "store.writable", .message = fmt::format("the history was opened, after {:.0f} s", seconds)});
    if (without_.dropped_rows > 0)
      store_->add_event({.severity = Severity::kWarning,
                         .kind = "store.dropped",
                         .message = fmt::format("{} rows of history were dropped before it could be opened", without_.dropped_rows)});
    return;
  }
}

void HistoryKeeper::write(std::function<void(Store&)> what) {
  if (!wanted_) return;
  if (Store* open = store()) return what(*open);
  std::unique_lock lock(mutex_);
  if (closed_) return;
  if (Store* open = store()) {
    lock.unlock();
    return what(*open);
  }
  waiting_.push_back(std::move(what));
  if (waiting_.size() > kWaiting) waiting_.pop_front(), ++without_.dropped_rows;
}

void HistoryKeeper::add_event(Event event) {
  if (event.at_ms == 0) event.at_ms = now_ms();
  {
    const std::lock_guard lock(mutex_);
    if (!store_) {
      // Its own numbering, below all of the store's: these are only shown until the history opens.
      Event shown = event;
      shown.id = -static_cast<int64_t>(events_.size()) - 1;
      events_.push_front(std::move(shown));
      if (events_.size() > kEvents) events_.pop_back();
    }
  }
  write([event = std::move(event)](Store& store) { store.add_event(event); });
}

void HistoryKeeper::add_request(RequestRecord request, std::vector<RoundTree> trees) {
  if (Store* open = store()) {
    open->add_request(std::move(request), std::move(trees));
    return;
  }
  request.prompt_text.clear(), request.answer_text.clear();
  write([request = std::move(request)](Store& store) { store.add_request(request); });
}

StoreHealth HistoryKeeper::health() const {
  if (const Store* open = store()) return open->health();
  const std::lock_guard lock(mutex_);
  StoreHealth health = without_;
  health.queued = static_cast<int64_t>(waiting_.size());
  return health;
}

std::string HistoryKeeper::path() const {
  const std::lock_guard lock(mutex_);
  return path_;
}

std::vector<Event> HistoryKeeper::recent_events() const {
  if (const Store* open = store()) return open->recent_events();
  const std::lock_guard lock(mutex_);
  return {events_.begin(), events_.end()};
}

void HistoryKeeper::close(const std::string& reason, int exit_code) {
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
  }
  wake_.notify_all();
  if (thread_.joinable()) thread_.join();
  const std::lock_guard lock(mutex_);
  if (!store_ && wanted_ && run_id_ == 0) {
    // A short life on a disk that has room by now should leave its record.
    if (auto opened = Store::open(path_, options_)) take(std::move(*opened));
  }
  if (!store_) return;
  store_->end_run(run_id_, reason, exit_code);
  published_.store(nullptr, std::memory_order_release);
  store_.reset();
}

}  // namespace ddtree
