#include "store/store.h"

#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <mutex>

#include "base/log.h"
#include "store/columns.h"
#include "store/database.h"
#include "store/queries.h"
#include "store/schema.h"
#include "store/writer.h"

namespace ddtree {

using store::Database;
using store::now_ms;
using store::Value;
using store::Weight;
using store::Writer;

const char* severity_name(Severity severity) {
  switch (severity) {
    case Severity::kInfo: return "info";
    case Severity::kWarning: return "warning";
    case Severity::kError: return "error";
  }
  return "info";
}

Result<std::string> default_store_path() {
  const auto variable = [](const char* name) {
    const char* value = std::getenv(name);
    return std::string(value == nullptr ? "" : value);
  };
  // An empty or relative XDG folder counts as not set (XDG base directory specification).
  if (const std::string folder = variable("XDG_STATE_HOME"); !folder.empty() && folder[0] == '/') return folder + "/ddtree/ddtree.db";
  // systemd lists several folders with colons; ours is the first. It is ddtree's own already.
  if (std::string folder = variable("STATE_DIRECTORY"); !folder.empty()) return folder.substr(0, folder.find(':')) + "/ddtree.db";
  if (const std::string home = variable("HOME"); !home.empty() && home[0] == '/') return home + "/.local/state/ddtree/ddtree.db";
  return Status(Code::kUsage,
                "nowhere to keep the history: none of XDG_STATE_HOME, STATE_DIRECTORY and HOME is set; give a path with --db");
}

namespace {

class SqliteStore final : public Store {
 public:
  SqliteStore(std::string path, StoreOptions options) : path_(std::move(path)), options_(std::move(options)) {}

  // Readers go first: the connection that closes last moves the log into the file and removes it, which one that only reads cannot.
  ~SqliteStore() override {
    std::lock_guard lock(readers_mutex_);
    readers_.clear();
    writer_.reset();
  }

  Status start(bool read_only) {
    auto migrations = store::ordered_migrations(options_);
    if (!migrations) return migrations.status();
    if (read_only) return start_read_only(*migrations);

    DDTREE_RETURN_IF_ERROR(store::make_folder_of(path_));
    DDTREE_RETURN_IF_ERROR(lock_.take(path_));
    DDTREE_RETURN_IF_ERROR(store::inspect(path_, *migrations, true));
    auto database = store::open_and_migrate(path_, *migrations);
    if (!database) return database.status();
    DDTREE_RETURN_IF_ERROR(close_dead_runs(**database));
    for (Ids& ids : ids_) {
      auto last = (*database)->integer("SELECT seq FROM sqlite_sequence WHERE name = ?", {std::string(ids.table)});
      if (!last) return last.status();
      ids.next = *last + 1;
    }
    writer_ = std::make_unique<Writer>(path_, std::move(*database), options_, &ids_[kEvents].next);
    return {};
  }

  const std::string& path() const override { return path_; }
  const StoreOptions& options() const override { return options_; }

  StoreHealth health() const override {
    if (writer_) return writer_->health();
    StoreHealth health;
    health.writable = false, health.message = "opened read-only", health.dropped_rows = refused_;
    return health;
  }
  Status flush(double seconds) override {
    return writer_ ? writer_->flush(seconds) : Status(Code::kUnavailable, "the history is open read-only");
  }

  // --- writing --------------------------------------------------------------------------------------------------------------------

  int64_t begin_run(ServiceRun run) override {
    const int64_t id = next(kRuns);
    if (run.started_ms == 0) run.started_ms = now_ms();
    if (run.pid == 0) run.pid = getpid();
    run.heartbeat_ms = now_ms();
    add(Weight::kAnchor, 1, [run, id](Database& database) { return store::insert(database, "service_run", run, id); });
    run_id_ = id;
    if (writer_) writer_->set_run(id);
    return id;
  }

  void set_run_ready(int64_t run_id, int64_t at_ms, const std::string& smoke) override {
    update("UPDATE service_run SET ready_ms = CASE ready_ms WHEN 0 THEN ? ELSE ready_ms END, smoke = ? WHERE id = ?",
           {at_ms, smoke, run_id});
  }
  void set_run_details(int64_t run_id, const std::string& devices, const std::string& plan, const std::string& mode,
                       const std::string& drafter) override {
    update(
        "UPDATE service_run SET devices = ?1, plan = ?2, mode = CASE ?3 WHEN '' THEN mode ELSE ?3 END, "
        "drafter = CASE ?4 WHEN '' THEN drafter ELSE ?4 END WHERE id = ?5",
        {devices, plan, mode, drafter, run_id});
  }
  void end_run(int64_t run_id, const std::string& reason, int32_t exit_code) override {
    const int64_t now = now_ms();
    if (writer_ && run_id_ == run_id) writer_->set_run(0);
    update("UPDATE service_run SET ended_ms = ?, heartbeat_ms = ?, end_reason = ?, exit_code = ? WHERE id = ?",
           {now, now, reason, int64_t{exit_code}, run_id});
    if (Status status = flush(5); !status.ok()) log::warn("{}", status.message());
  }

  int64_t add_phase(ServicePhase phase) override {
    const int64_t id = next(kPhases);
    if (phase.run_id == 0) phase.run_id = run_id_;
    if (phase.at_ms == 0) phase.at_ms = now_ms();
    add(Weight::kAnchor, 1, [phase, id](Database& database) { return store::insert(database, "service_phase", phase, id); });
    return id;
  }

  int64_t add_request(RequestRecord request, std::vector<RoundTree> trees) override {
    const int64_t id = next(kRequests);
    if (request.run_id == 0) request.run_id = run_id_;
    if (request.finished_ms == 0) request.finished_ms = now_ms();
    if (request.received_ms == 0) request.received_ms = request.finished_ms;
    request.trees = 0;
    if (!options_.store_text) request.prompt_text.clear(), request.answer_text.clear();
    if (!add(Weight::kRow, 1,
             [request = std::move(request), id](Database& database) { return store::insert(database, "request", request, id); })) {
      return id;
    }
    add_trees(id, std::move(trees));
    return id;
  }

  int64_t add_smoke_run(SmokeRun run) override {
    const int64_t id = next(kSmokeRuns);
    if (run.run_id == 0) run.run_id = run_id_;
    const int64_t count = static_cast<int64_t>(run.checks.size());
    const int64_t first = next(kSmokeChecks, count);
    for (int64_t i = 0; i < count; ++i) {
      SmokeCheck& check = run.checks[static_cast<size_t>(i)];
      check.smoke_id = id, check.id = first + i, check.position = static_cast<int32_t>(i);
    }
    add(Weight::kAnchor, static_cast<int>(count) + 1, [run = std::move(run), id](Database& database) -> Status {
      DDTREE_RETURN_IF_ERROR(store::insert(database, "smoke_run", run, id));
      for (const SmokeCheck& check : run.checks) DDTREE_RETURN_IF_ERROR(store::insert(database, "smoke_check", check, check.id));
      return {};
    });
    return id;
  }

  int64_t add_event(Event event) override {
    const int64_t id = next(kEvents);
    if (event.run_id == 0) event.run_id = run_id_;
    if (event.at_ms == 0) event.at_ms = now_ms();
    event.id = id;
    if (writer_) writer_->remember(event);
    add(Weight::kRow, 1, [event = std::move(event), id](Database& database) { return store::insert(database, "event", event, id); });
    return id;
  }

  std::vector<Event> recent_events() const override { return writer_ ? writer_->recent_events() : std::vector<Event>(); }

  int64_t add_calibration(Calibration calibration) override {
    const int64_t id = next(kCalibrations);
    if (calibration.run_id == 0) calibration.run_id = run_id_;
    if (calibration.at_ms == 0) calibration.at_ms = now_ms();
    add(Weight::kRow, 1,
        [calibration = std::move(calibration), id](Database& database) { return store::insert(database, "calibration", calibration, id); });
    return id;
  }

  void put_metric_minute(MetricMinute minute) override {
    if (minute.run_id == 0) minute.run_id = run_id_;
    minute.minute_ms -= minute.minute_ms % 60'000;
    add(Weight::kRow, 1, [minute](Database& database) { return store::insert(database, "metric_minute", minute, 0, "INSERT OR REPLACE"); });
  }

  // --- reading --------------------------------------------------------------------------------------------------------------------

  Result<Page<ServiceRun>> runs(Paging paging) override {
    return with_reader<Page<ServiceRun>>([&](Database& database) { return store::read_runs(database, 0, paging); });
  }
  Result<std::optional<ServiceRun>> run(int64_t run_id) override {
    if (run_id == 0) return std::optional<ServiceRun>();
    return with_reader<std::optional<ServiceRun>>([&](Database& database) { return only(store::read_runs(database, run_id, {1, 0})); });
  }
  Result<std::vector<ServicePhase>> phases(int64_t run_id) override {
    return with_reader<std::vector<ServicePhase>>([&](Database& database) { return store::read_phases(database, run_id); });
  }
  Result<Page<RequestRecord>> requests(const RequestFilter& filter, Paging paging) override {
    return with_reader<Page<RequestRecord>>([&](Database& database) { return store::read_requests(database, filter, paging); });
  }
  Result<std::optional<RequestRecord>> request(int64_t id) override {
    return with_reader<std::optional<RequestRecord>>([&](Database& database) { return store::read_request(database, id); });
  }
  Result<std::vector<int64_t>> request_ids(const RequestFilter& filter) override {
    return with_reader<std::vector<int64_t>>([&](Database& database) { return store::read_request_ids(database, filter); });
  }
  Result<std::vector<RequestRecord>> requests_of(const std::vector<int64_t>& ids) override {
    return with_reader<std::vector<RequestRecord>>([&](Database& database) { return store::read_requests_of(database, ids); });
  }
  Result<RequestTotals> request_totals(const RequestFilter& filter) override {
    return with_reader<RequestTotals>([&](Database& database) { return store::read_totals(database, filter); });
  }
  Result<RequestSummary> request_summary(const RequestFilter& filter) override {
    return with_reader<RequestSummary>([&](Database& database) { return store::read_summary(database, filter); });
  }
  Result<AcceptanceBreakdown> acceptance(const RequestFilter& filter) override {
    return with_reader<AcceptanceBreakdown>([&](Database& database) { return store::read_acceptance(database, filter); });
  }
  Result<Page<RoundTree>> trees(int64_t request, Paging paging) override {
    return with_reader<Page<RoundTree>>([&](Database& database) { return store::read_trees(database, request, paging); });
  }
  Result<Page<SmokeRun>> smoke_runs(Paging paging, int64_t run_id) override {
    return with_reader<Page<SmokeRun>>([&](Database& database) { return store::read_smoke_runs(database, 0, run_id, paging); });
  }
  Result<std::optional<SmokeRun>> smoke_run(int64_t id) override {
    if (id == 0) return std::optional<SmokeRun>();
    return with_reader<std::optional<SmokeRun>>([&](Database& database) { return only(store::read_smoke_runs(database, id, 0, {1, 0})); });
  }
  Result<Page<Event>> events(const EventFilter& filter, Paging paging) override {
    return with_reader<Page<Event>>([&](Database& database) { return store::read_events(database, filter, paging); });
  }
  Result<std::optional<Calibration>> latest_calibration(const std::string& machine, const std::string& name) override {
    return with_reader<std::optional<Calibration>>([&](Database& database) { return store::read_calibration(database, machine, name); });
  }
  Result<std::vector<MetricMinute>> metric_minutes(int64_t from_ms, int64_t to_ms) override {
    return with_reader<std::vector<MetricMinute>>([&](Database& database) { return store::read_minutes(database, from_ms, to_ms); });
  }

 private:
  enum Table { kRuns, kPhases, kRequests, kSmokeRuns, kSmokeChecks, kEvents, kCalibrations, kTables };
  struct Ids {
    const char* table;
    std::atomic<int64_t> next{1};
  };

  int64_t next(Table table, int64_t count = 1) { return ids_[table].next.fetch_add(count); }

  bool add(Weight weight, int rows, Writer::Apply apply) {
    if (writer_) return writer_->add(weight, rows, std::move(apply));
    refused_ += rows;
    return false;
  }
  void update(const std::string& sql, std::vector<Value> values) {
    add(Weight::kAnchor, 1, [sql, values = std::move(values)](Database& database) { return database.run(sql, values); });
  }

  void add_trees(int64_t request, std::vector<RoundTree> trees) {
    if (trees.size() > static_cast<size_t>(std::max(0, options_.tree_rounds)))
      trees.resize(static_cast<size_t>(std::max(0, options_.tree_rounds)));
    if (trees.empty() || options_.tree_requests <= 0) return;
    if (!options_.store_text) {
      for (RoundTree& tree : trees) tree.token.clear(), tree.next = -1;
    }
    const int rows = static_cast<int>(trees.size());
    add(Weight::kTrees, rows, [trees = std::move(trees), request, rows](Database& database) -> Status {
      for (const RoundTree& tree : trees) {
        DDTREE_RETURN_IF_ERROR(
            database.run("INSERT INTO request_tree (request, round, start, next, token, parent, log_prob, accepted, draft_ms, verify_ms, "
                         "total_ms) VALUES "
                         "(?,?,?,?,?,?,?,?,?,?,?)",
                         {request, int64_t{tree.round}, int64_t{tree.start}, int64_t{tree.next}, store::Blob{store::pack(tree.token)},
                          store::Blob{store::pack(tree.parent)}, store::Blob{store::pack(tree.log_prob)},
                          store::Blob{std::string(tree.accepted.begin(), tree.accepted.end())}, double{tree.draft_ms},
                          double{tree.verify_ms}, double{tree.total_ms}}));
      }
      return database.run("UPDATE request SET trees = ? WHERE id = ?", {int64_t{rows}, request});
    });
  }

  // This process holds the lock, so a run that is still open has no process any more.
  static Status close_dead_runs(Database& database) {
    DDTREE_RETURN_IF_ERROR(database.script("BEGIN IMMEDIATE"));
    DDTREE_RETURN_IF_ERROR(database.run(
        "INSERT INTO event (run_id, at_ms, severity, kind, message, request, detail) SELECT id, heartbeat_ms, ?, "
        "'service.ended-without-notice', "
        "'the process (' || pid || ') ended without notice; it was last seen at this time', 0, '' FROM service_run WHERE ended_ms = 0",
        {static_cast<int64_t>(Severity::kError)}));
    DDTREE_RETURN_IF_ERROR(
        database.run("UPDATE service_run SET ended_ms = max(heartbeat_ms, started_ms), end_reason = ? WHERE ended_ms = 0",
                     {std::string(kEndedWithoutNotice)}));
    return database.script("COMMIT");
  }

  Status start_read_only(const std::vector<Migration>& migrations) {
    if (access(path_.c_str(), F_OK) != 0)
      return Status(Code::kUnavailable, errno == ENOENT ? fmt::format("{}: there is no history yet", path_)
                                                        : fmt::format("{}: {}", path_, std::strerror(errno)));
    DDTREE_RETURN_IF_ERROR(store::inspect(path_, migrations, false));
    auto version = with_reader<int64_t>([](Database& database) { return database.integer("PRAGMA user_version"); });
    if (!version) return version.status();
    if (*version != static_cast<int64_t>(migrations.size())) {
      return Status(Code::kUnavailable,
                    fmt::format("{}: its schema is version {}, this program reads version {}; `ddtree serve` brings it up to date", path_,
                                *version, migrations.size()));
    }
    return {};
  }

  // Borrows a read-only connection from the pool.
  template <class T, class Read>
  Result<T> with_reader(Read read) {
    std::unique_ptr<Database> reader;
    {
      std::lock_guard lock(readers_mutex_);
      if (!readers_.empty()) reader = std::move(readers_.back()), readers_.pop_back();
    }
    if (!reader) {
      auto opened = Database::open(path_, store::Access::kReadOnly, 2000);
      if (!opened) return opened.status();
      reader = std::move(*opened);
    }
    // One snapshot for all statements of a read.
    DDTREE_RETURN_IF_ERROR(reader->script("BEGIN"));
    Result<T> result = read(*reader);
    const Status ended = reader->script("COMMIT");
    if (!result.ok() || !ended.ok())
      return result.ok() ? Result<T>(ended) : Result<T>(Status(result.status().code(), path_ + ": " + result.status().message()));
    std::lock_guard lock(readers_mutex_);
    if (readers_.size() < 4) readers_.push_back(std::move(reader));
    return result;
  }

  template <class T>
  static Result<std::optional<T>> only(Result<Page<T>> page) {
    if (!page) return page.status();
    if (page->rows.empty()) return std::optional<T>();
    return std::optional<T>(std::move(page->rows.front()));
  }

  const std::string path_;
  const StoreOptions options_;
  store::OwnerLock lock_;
  Ids ids_[kTables] = {{"service_run"}, {"service_phase"}, {"request"}, {"smoke_run"}, {"smoke_check"}, {"event"}, {"calibration"}};
  std::atomic<int64_t> run_id_{0}, refused_{0};
  std::mutex readers_mutex_;
  std::vector<std::unique_ptr<Database>> readers_;
  std::unique_ptr<Writer> writer_;  // last: its end commits before the lock goes
};

Result<std::unique_ptr<Store>> open_store(const std::string& path, StoreOptions options, bool read_only) {
  if (path.empty()) return Status(Code::kUsage, "the path of the history (--db) is empty");
  auto opened = std::make_unique<SqliteStore>(path, std::move(options));
  if (Status status = opened->start(read_only); !status.ok()) return status;
  return std::unique_ptr<Store>(std::move(opened));
}

}  // namespace

Result<std::unique_ptr<Store>> Store::open(const std::string& path, StoreOptions options) {
  return open_store(path, std::move(options), false);
}
Result<std::unique_ptr<Store>> Store::open_read_only(const std::string& path, StoreOptions options) {
  return open_store(path, std::move(options), true);
}

}  // namespace ddtree
