// This run's way into the store: opens it, tries again where the disk refuses, and keeps what is written meanwhile. Thread-safe.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/status.h"
#include "store/store.h"

namespace ddtree {

class HistoryKeeper {
 public:
  HistoryKeeper() = default;
  ~HistoryKeeper();  // close() with what it was given, if nobody called it
  HistoryKeeper(const HistoryKeeper&) = delete;
  HistoryKeeper& operator=(const HistoryKeeper&) = delete;

  // Opens the store and begins `run` in it. A disk that is full or read-only is no failure: the service answers without a history, says so
  // (health(), recent_events()) and opens it when there is room. Other causes are the caller's: the file is then untouched.
  Status open(const std::string& path, const StoreOptions& options, ServiceRun run);

  // Null until it is open. The pointer stays valid until close(); store and run id appear together.
  Store* store() const { return published_.load(std::memory_order_acquire); }
  int64_t run_id() const { return store() ? run_id_.load() : 0; }
  int64_t writing_run() const { return run_id_; }  // for what write() does

  // Does something with the store: now, or once it is open. Rows of this run leave run_id 0 and carry their times. Without an open store
  // the newest 4,096 wait; older ones are counted as dropped.
  void write(std::function<void(Store&)> what);
  void add_event(Event event);  // run_id 0, at_ms 0: this run, now
  // While it has to wait, the row alone is kept: trees and texts of thousands of requests are no load for a memory that serves.
  void add_request(RequestRecord request, std::vector<RoundTree> trees);

  bool wanted() const { return wanted_; }  // open() was called: there is, or should be, a history
  StoreHealth health() const;              // also before it is open: not writable, and why
  std::string path() const;
  std::vector<Event> recent_events() const;  // newest first, of this process, written or not

  void close(const std::string& reason, int exit_code);  // ends the run (one last try to open it); nobody may use the store any more

 private:
  void take(std::unique_ptr<Store> opened);  // mutex_ held: begins the run, writes what waited, shows the store to all
  void retry();                              // the thread's

  mutable std::mutex mutex_;  // of what follows
  std::condition_variable wake_;
  std::unique_ptr<Store> store_;
  std::string path_;
  StoreOptions options_;
  ServiceRun run_;
  std::deque<std::function<void(Store&)>> waiting_;
  std::deque<Event> events_;  // newest first, while there is no store
  StoreHealth without_;       // what health() says while there is no store
  bool closed_ = false;
  std::thread thread_;

  std::atomic<bool> wanted_{false};
  std::atomic<Store*> published_{nullptr};
  std::atomic<int64_t> run_id_{0};
};

}  // namespace ddtree
