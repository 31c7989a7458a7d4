// What goes, and when: in steps small enough that new rows never wait long.
#include <fmt/core.h>

#include "store/writer.h"

namespace ddtree::store {
namespace {

constexpr int64_t kStepRows = 500;
constexpr int64_t kKeptSmokeRuns = 10;  // the last ones stay whatever their age: they are what a new run is compared with
constexpr int64_t kDayMs = 86'400'000;

// Deletes up to kStepRows rows that `where` selects, oldest first. Returns how many.
Result<int64_t> delete_some(Database& database, const char* table, const std::string& key, const std::string& where) {
  DDTREE_RETURN_IF_ERROR(database.run(
      fmt::format("DELETE FROM {0} WHERE {1} IN (SELECT {1} FROM {0} WHERE {2} ORDER BY {1} LIMIT {3})", table, key, where, kStepRows)));
  return database.changes();
}

Result<int64_t> delete_by_age(Database& database, int64_t cutoff) {
  const struct {
    const char *table, *key;
    std::string where;
  } rules[] = {
      {"request", "id", fmt::format("received_ms < {}", cutoff)},
      {"event", "id", fmt::format("at_ms < {}", cutoff)},
      {"metric_minute", "minute_ms", fmt::format("minute_ms < {}", cutoff)},
      {"smoke_run", "id",
       fmt::format("started_ms < {} AND id NOT IN (SELECT id FROM smoke_run ORDER BY id DESC LIMIT {})", cutoff, kKeptSmokeRuns)},
      {"calibration", "id", fmt::format("at_ms < {} AND id NOT IN (SELECT max(id) FROM calibration GROUP BY machine, name)", cutoff)},
      {"service_run", "id", fmt::format("ended_ms > 0 AND ended_ms < {} AND id <> (SELECT max(id) FROM service_run)", cutoff)},
  };
  int64_t deleted = 0;
  for (const auto& rule : rules) {
    auto count = delete_some(database, rule.table, rule.key, rule.where);
    if (!count) return count;
    deleted += *count;
  }
  return deleted;
}

Result<int64_t> delete_by_size(Database& database, int64_t limit) {
  int64_t pages[3] = {};
  const char* const pragmas[3] = {"PRAGMA page_count", "PRAGMA freelist_count", "PRAGMA page_size"};
  for (int i = 0; i < 3; ++i) {
    auto value = database.integer(pragmas[i]);
    if (!value) return value;
    pages[i] = *value;
  }
  if ((pages[0] - pages[1]) * pages[2] <= limit) return int64_t{0};
  // Requests are what grows; the rest goes only where they are gone.
  const char* const order[][2] = {{"request", "id"}, {"event", "id"}, {"metric_minute", "minute_ms"}};
  for (const auto& table : order) {
    auto count = delete_some(database, table[0], table[1], "1");
    if (!count || *count > 0) return count;
  }
  return int64_t{0};
}

}  // namespace

Status prune_trees(Database& database, const StoreOptions& options) {
  // The newest request whose trees are one too many; all older ones lose theirs too.
  auto last =
      database.integer("SELECT id FROM request WHERE trees > 0 ORDER BY id DESC LIMIT 1 OFFSET ?", {int64_t{options.tree_requests}});
  if (!last) return last.status();
  if (*last == 0) return {};
  DDTREE_RETURN_IF_ERROR(database.run("DELETE FROM request_tree WHERE request <= ?", {*last}));
  return database.run("UPDATE request SET trees = 0 WHERE trees > 0 AND id <= ?", {*last});
}

Result<bool> prune_step(Database& database, const StoreOptions& options, int64_t now) {
  DDTREE_RETURN_IF_ERROR(database.script("BEGIN IMMEDIATE"));
  int64_t deleted = 0;
  if (options.retain_days > 0) {
    auto count = delete_by_age(database, now - options.retain_days * kDayMs);
    if (!count) return count.status();
    deleted += *count;
  }
  if (options.retain_bytes > 0) {
    auto count = delete_by_size(database, options.retain_bytes);
    if (!count) return count.status();
    deleted += *count;
  }
  DDTREE_RETURN_IF_ERROR(database.script("COMMIT"));
  // Gives pages back to the file system; a few are left for the next rows.
  auto free = database.integer("PRAGMA freelist_count");
  if (!free) return free.status();
  const bool vacuum = *free > 256;
  if (vacuum) DDTREE_RETURN_IF_ERROR(database.script("PRAGMA incremental_vacuum(512)"));
  return deleted > 0 || vacuum;
}

}  // namespace ddtree::store
