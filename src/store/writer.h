// The one thread that writes. It owns the write connection, commits what is queued in batches, keeps the open run's heartbeat and prunes.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "store/database.h"
#include "store/store.h"

namespace ddtree::store {

enum class Weight : uint8_t {
  kTrees,  // dropped first
  kRow,
  kAnchor,  // runs and their ends: other rows hang on them, never dropped
};

class Writer {
 public:
  // May run twice (a failed commit is tried again): must not change its own state.
  using Apply = std::function<Status(Database&)>;

  // event_ids: where ids of events come from, the writer's own among them; outlives the writer.
  Writer(std::string path, std::unique_ptr<Database> database, StoreOptions options, std::atomic<int64_t>* event_ids);
  ~Writer();  // commits what is queued, if the disk lets it

  // rows: how much of the queue's bound it takes. False: dropped and counted.
  bool add(Weight weight, int rows, Apply apply);
  Status flush(double seconds);
  void set_run(int64_t run_id);  // whose heartbeat to keep; 0: none
  void remember(const Event& event);
  std::vector<Event> recent_events() const;  // remembered ones and the writer's own, newest first
  StoreHealth health() const;

 private:
  struct Job {
    Weight weight;
    int rows;
    Apply apply;
  };
  void loop();
  // Writes the batch in one transaction. False: nothing was written, try again later.
  bool commit(const std::vector<Job>& batch);
  Status write(const std::vector<Job>& batch, int64_t* written, int64_t* left_out, int64_t* left_out_trees);
  bool report_drops_due() const;  // mutex_ held
  // An event of the writer's own: remembered now, written with the next commit that works. mutex_ held.
  void tell(Severity severity, const char* kind, std::string message);
  void prune();

  const std::string path_;
  const StoreOptions options_;
  std::unique_ptr<Database> database_;  // the thread's own
  std::atomic<int64_t>* const event_ids_;

  mutable std::mutex mutex_;
  std::condition_variable work_, room_, done_;
  std::deque<Job> queue_;
  int64_t queued_rows_ = 0;            // in queue_ and in the batch being written
  uint64_t added_ = 0, finished_ = 0;  // jobs
  int64_t oldest_ms_ = 0;              // when the queue's first job came
  int flushing_ = 0;
  bool stop_ = false;
  int64_t run_id_ = 0;
  StoreHealth health_;
  int64_t reported_drops_ = 0, last_report_ms_ = 0;
  std::deque<Event> recent_;   // newest first
  std::vector<Event> untold_;  // own events that no commit has taken yet

  int64_t last_heartbeat_ms_ = 0, last_prune_ms_ = 0;  // the thread's own
  bool prune_more_ = false;
  std::thread thread_;
};

// One small step of retention in a transaction of its own; true if there may be more to do.
Result<bool> prune_step(Database& database, const StoreOptions& options, int64_t now);
// Drops the trees of all but the last options.tree_requests requests that have any.
Status prune_trees(Database& database, const StoreOptions& options);

}  // namespace ddtree::store
