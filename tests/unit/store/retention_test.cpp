// Retention goes in small steps, each a transaction of its own, so that new rows never wait for a whole clearing out.
#include <fmt/core.h>

#include <catch2/catch_test_macros.hpp>

#include "store/database.h"
#include "store/schema.h"
#include "store/writer.h"
#include "unit/store/temporary.h"

using namespace ddtree;
using test::TemporaryFolder;

namespace {

constexpr int64_t kDay = 86'400'000;

std::unique_ptr<store::Database> filled(const std::string& path, int64_t now, int old_rows, int new_rows) {
  auto migrations = store::ordered_migrations({});
  REQUIRE(migrations.ok());
  auto database = store::open_and_migrate(path, *migrations);
  REQUIRE(database.ok());
  REQUIRE((*database)->script("BEGIN").ok());
  for (int i = 0; i < old_rows + new_rows; ++i) {
    const int64_t at = i < old_rows ? now - 100 * kDay : now;
    REQUIRE((*database)
                ->run("INSERT INTO event (run_id, at_ms, severity, kind, message, request, detail) VALUES (1, ?, 0, 'x', ?, 0, '')",
                      {at, std::string(400, 'm')})
                .ok());
  }
  REQUIRE((*database)->script("COMMIT").ok());
  return std::move(*database);
}

int64_t count(store::Database& database) {
  auto n = database.integer("SELECT count(*) FROM event");
  REQUIRE(n.ok());
  return *n;
}

}  // namespace

TEST_CASE("a step of retention takes at most 500 rows of a table and leaves no transaction open") {
  TemporaryFolder folder;
  const int64_t now = store::now_ms();
  auto database = filled(folder / "ddtree.db", now, 1700, 30);
  StoreOptions options;
  options.retain_days = 90, options.retain_bytes = 0;
  int64_t before = count(*database);
  int steps = 0;
  for (;;) {
    auto more = store::prune_step(*database, options, now);
    REQUIRE(more.ok());
    CHECK_FALSE(database->in_transaction());
    const int64_t left = count(*database);
    CHECK(before - left <= 500);
    before = left;
    if (!*more) break;
    REQUIRE(++steps < 100);
  }
  CHECK(before == 30);
  CHECK(steps >= 4);
}

TEST_CASE("retention by size stops as soon as the file's rows fit, and 0 keeps everything") {
  TemporaryFolder folder;
  const int64_t now = store::now_ms();
  auto database = filled(folder / "ddtree.db", now, 0, 4000);
  StoreOptions options;
  options.retain_days = 0, options.retain_bytes = 0;
  auto nothing = store::prune_step(*database, options, now);
  REQUIRE((nothing.ok() && !*nothing));
  CHECK(count(*database) == 4000);
  options.retain_bytes = 1'000'000;
  for (int i = 0; i < 100; ++i) {
    auto more = store::prune_step(*database, options, now);
    REQUIRE(more.ok());
    if (!*more) break;
  }
  // 400 bytes of text a row and as much again of the rest, at most: what is left is near the limit, not far below it.
  CHECK(count(*database) > 600);
  CHECK(count(*database) < 2600);
  auto newest = database->integer("SELECT max(id) FROM event");
  REQUIRE(newest.ok());
  CHECK(*newest == 4000);
}

TEST_CASE("a step that the disk refuses takes nothing back with it") {
  TemporaryFolder folder;
  const int64_t now = store::now_ms();
  auto database = filled(folder / "ddtree.db", now, 600, 10);
  // Another connection holds the write lock, as a backup would.
  auto other = store::Database::open(folder / "ddtree.db", store::Access::kReadWrite, 0);
  REQUIRE(other.ok());
  REQUIRE(database->script("PRAGMA busy_timeout = 0").ok());
  REQUIRE((*other)->script("BEGIN IMMEDIATE").ok());
  StoreOptions options;
  options.retain_days = 90;
  const auto refused = store::prune_step(*database, options, now);
  CHECK(refused.status().code() == Code::kStorage);
  REQUIRE((*other)->script("COMMIT").ok());
  CHECK(count(*database) == 610);
  CHECK(store::prune_step(*database, options, now).ok());
  CHECK(count(*database) == 110);
}
