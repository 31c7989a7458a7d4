#include "store/writer.h"

#include <fmt/core.h>
#include <sys/stat.h>

#include <algorithm>
#include <chrono>

#include "base/log.h"
#include "store/columns.h"

namespace ddtree::store {
namespace {

constexpr size_t kBatchJobs = 2048;  // of one transaction
constexpr int kRetryMs = 1000;       // after a failed commit
constexpr size_t kRecentEvents = 64;
constexpr size_t kUntoldEvents = 16;   // a disk that comes and goes must not fill the memory
constexpr int64_t kReportMs = 10'000;  // between two "store.dropped" events

}  // namespace

Writer::Writer(std::string path, std::unique_ptr<Database> database, StoreOptions options, std::atomic<int64_t>* event_ids)
    : path_(std::move(path)), options_(std::move(options)), database_(std::move(database)), event_ids_(event_ids) {
  thread_ = std::thread([this] { loop(); });
}

Writer::~Writer() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  work_.notify_all();
  room_.notify_all();
  thread_.join();
}

bool Writer::add(Weight weight, int rows, Apply apply) {
  std::unique_lock lock(mutex_);
  const auto fits = [&] { return queued_rows_ + rows <= options_.queue_rows || queue_.empty(); };
  bool keep = weight == Weight::kAnchor;
  if (weight == Weight::kTrees) keep = queued_rows_ + rows <= int64_t{options_.queue_rows} * 3 / 4;
  if (weight == Weight::kRow) {
    // Waiting helps only while the disk takes rows; a request must never wait for a broken one.
    keep = fits() || (health_.writable && room_.wait_for(lock, std::chrono::milliseconds(options_.full_wait_ms), [&] {
             return fits() || !health_.writable || stop_;
           }) && fits());
  }
  if (stop_) keep = false;
  if (!keep) {
    (weight == Weight::kTrees ? health_.dropped_trees : health_.dropped_rows) += rows;
    return false;
  }
  if (queue_.empty()) oldest_ms_ = now_ms();
  queue_.push_back({weight, rows, std::move(apply)});
  queued_rows_ += rows;
  ++added_;
  work_.notify_one();
  return true;
}

Status Writer::flush(double seconds) {
  std::unique_lock lock(mutex_);
  const uint64_t target = added_;
  ++flushing_;
  work_.notify_one();
  const bool done = done_.wait_for(lock, std::chrono::duration<double>(seconds), [&] { return finished_ >= target; });
  --flushing_;
  if (done) return {};
  return Status(Code::kTemporary,
                fmt::format("the history was not written within {} s{}{}", seconds, health_.message.empty() ? "" : ": ", health_.message));
}

void Writer::set_run(int64_t run_id) {
  std::lock_guard lock(mutex_);
  run_id_ = run_id;
}

void Writer::remember(const Event& event) {
  std::lock_guard lock(mutex_);
  recent_.push_front(event);
  if (recent_.size() > kRecentEvents) recent_.pop_back();
}

std::vector<Event> Writer::recent_events() const {
  std::lock_guard lock(mutex_);
  return {recent_.begin(), recent_.end()};
}

void Writer::tell(Severity severity, const char* kind, std::string message) {
  Event event;
  event.id = event_ids_->fetch_add(1);
  event.run_id = run_id_, event.at_ms = now_ms(), event.severity = severity, event.kind = kind, event.message = std::move(message);
  recent_.push_front(event);
  if (recent_.size() > kRecentEvents) recent_.pop_back();
  if (untold_.size() < kUntoldEvents) untold_.push_back(std::move(event));
}

StoreHealth Writer::health() const {
  StoreHealth health;
  {
    std::lock_guard lock(mutex_);
    health = health_;
    health.queued = queued_rows_;
  }
  for (const char* suffix : {"", "-wal"}) {
    struct stat info {};
    if (stat((path_ + suffix).c_str(), &info) == 0) health.file_bytes += info.st_size;
  }
  return health;
}

bool Writer::report_drops_due() const {
  return health_.dropped_rows + health_.dropped_trees > reported_drops_ && (stop_ || now_ms() - last_report_ms_ >= kReportMs);
}

void Writer::loop() {
  std::unique_lock lock(mutex_);
  for (;;) {
    // Sleep until a batch is due, at most until the next heartbeat or pruning.
    while (!stop_ && (queue_.empty() || (flushing_ == 0 && queue_.size() < kBatchJobs && queued_rows_ < options_.queue_rows / 2))) {
      const int64_t now = now_ms();
      int64_t wait = 1000;
      if (!queue_.empty()) wait = oldest_ms_ + options_.commit_ms - now;
      // The clock may be set back: never sleep longer than one period.
      wait = std::min<int64_t>(wait, queue_.empty() ? 1000 : options_.commit_ms);
      if (wait <= 0 || prune_more_ || report_drops_due() || !untold_.empty()) break;
      if (run_id_ != 0 && now - last_heartbeat_ms_ >= options_.heartbeat_ms) break;
      if (now - last_prune_ms_ >= int64_t{options_.prune_seconds} * 1000) break;
      work_.wait_for(lock, std::chrono::milliseconds(wait));
    }
    std::vector<Job> batch;
    while (!queue_.empty() && batch.size() < kBatchJobs) batch.push_back(std::move(queue_.front())), queue_.pop_front();
    oldest_ms_ = now_ms();
    const bool heartbeat = run_id_ != 0 && now_ms() - last_heartbeat_ms_ >= options_.heartbeat_ms;
    const bool leaving = stop_ && queue_.empty() && batch.empty() && !report_drops_due() && untold_.empty();
    if (leaving) return;

    if (!batch.empty() || heartbeat || report_drops_due() || !untold_.empty()) {
      lock.unlock();
      bool written = commit(batch);
      while (!written) {
        lock.lock();
        if (stop_) break;
        work_.wait_for(lock, std::chrono::milliseconds(kRetryMs), [&] { return stop_; });
        lock.unlock();
        written = commit(batch);
      }
      if (!lock.owns_lock()) lock.lock();
      if (!written) {  // stopping, and the disk still refuses
        int64_t lost = 0;
        for (const Job& job : batch) lost += job.rows;
        for (const Job& job : queue_) lost += job.rows;
        log::error("history: {} rows are lost: {}", lost, health_.message);
        health_.dropped_rows += lost;
        finished_ = added_;
        queue_.clear();
        queued_rows_ = 0;
        done_.notify_all();
        return;
      }
      for (const Job& job : batch) queued_rows_ -= job.rows;
      finished_ += batch.size();
      room_.notify_all();
      done_.notify_all();
    }
    if (!stop_ && (prune_more_ || now_ms() - last_prune_ms_ >= int64_t{options_.prune_seconds} * 1000)) {
      lock.unlock();
      prune();
      lock.lock();
    }
  }
}

Status Writer::write(const std::vector<Job>& batch, int64_t* written, int64_t* left_out, int64_t* left_out_trees) {
  int64_t run_id = 0, drops = 0;
  std::vector<Event> untold;
  {
    std::lock_guard lock(mutex_);
    run_id = run_id_;
    untold = untold_;
    if (report_drops_due()) drops = health_.dropped_rows + health_.dropped_trees - reported_drops_;
  }
  if (options_.before_commit) DDTREE_RETURN_IF_ERROR(options_.before_commit());
  DDTREE_RETURN_IF_ERROR(database_->script("BEGIN IMMEDIATE"));
  bool trees = false;
  for (const Job& job : batch) {
    Status status = job.apply(*database_);
    if (status.ok()) {
      *written += job.rows;
      trees = trees || job.weight == Weight::kTrees;
      continue;
    }
    if (database_->failure() != Failure::kRow || !database_->in_transaction()) return status;
    // One row that cannot be stored must not hold up the others.
    log::error("history: a row was left out: {}", status.message());
    *(job.weight == Weight::kTrees ? left_out_trees : left_out) += job.rows;
  }
  for (const Event& event : untold) DDTREE_RETURN_IF_ERROR(insert(*database_, "event", event, event.id));
  if (trees) DDTREE_RETURN_IF_ERROR(prune_trees(*database_, options_));
  const int64_t now = now_ms();
  if (drops > 0) {
    Event event;
    event.run_id = run_id, event.at_ms = now, event.severity = Severity::kWarning, event.kind = "store.dropped";
    event.message = fmt::format("{} rows of history were dropped because the disk could not keep up or refused them", drops);
    DDTREE_RETURN_IF_ERROR(insert(*database_, "event", event, event_ids_->fetch_add(1)));
  }
  if (run_id != 0)
    DDTREE_RETURN_IF_ERROR(database_->run("UPDATE service_run SET heartbeat_ms = ? WHERE id = ? AND ended_ms = 0", {now, run_id}));
  DDTREE_RETURN_IF_ERROR(database_->script("COMMIT"));
  last_heartbeat_ms_ = now;
  std::lock_guard lock(mutex_);
  untold_.erase(untold_.begin(), untold_.begin() + static_cast<std::ptrdiff_t>(untold.size()));
  if (drops > 0) reported_drops_ += drops, last_report_ms_ = now;
  return {};
}

bool Writer::commit(const std::vector<Job>& batch) {
  int64_t written = 0, left_out = 0, left_out_trees = 0;
  const Status status = write(batch, &written, &left_out, &left_out_trees);
  if (!status.ok() && database_->in_transaction()) (void)database_->script("ROLLBACK");
  std::lock_guard lock(mutex_);
  if (!status.ok()) {
    if (health_.writable) {
      log::error("history: cannot be written, rows wait: {}", status.message());
      health_.failing_since_ms = now_ms();
      tell(Severity::kError, "store.unwritable", "the history cannot be written, rows wait in memory: " + status.message());
    }
    health_.writable = false;
    health_.message = status.message();
    room_.notify_all();
    return false;
  }
  if (!health_.writable) {
    const double seconds = static_cast<double>(now_ms() - health_.failing_since_ms) / 1000;
    log::info("history: writing works again after {:.0f} s", seconds);
    tell(Severity::kInfo, "store.writable", fmt::format("the history can be written again, after {:.0f} s", seconds));
  }
  health_.writable = true;
  health_.failing_since_ms = 0;
  health_.message.clear();
  health_.written += written;
  health_.dropped_rows += left_out;
  health_.dropped_trees += left_out_trees;
  health_.last_commit_ms = now_ms();
  return true;
}

void Writer::prune() {
  last_prune_ms_ = now_ms();
  auto more = prune_step(*database_, options_, last_prune_ms_);
  if (!more.ok()) {
    if (database_->in_transaction()) (void)database_->script("ROLLBACK");
    log::warn("history: old rows could not be removed: {}", more.status().message());
  }
  prune_more_ = more.ok() && *more;
}

}  // namespace ddtree::store
