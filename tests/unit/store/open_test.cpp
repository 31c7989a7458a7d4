// What open() refuses, and that it leaves what it refuses as it was.
#include <fcntl.h>
#include <fmt/core.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <catch2/catch_test_macros.hpp>
#include <csignal>
#include <filesystem>
#include <functional>
#include <thread>

#include "store/database.h"
#include "store/schema.h"
#include "store/store.h"
#include "unit/store/temporary.h"

using namespace ddtree;
using test::read_file;
using test::TemporaryFolder;
using test::write_file;

namespace {

// The exit code of a child process that runs body and nothing else.
int in_child(const std::function<int()>& body) {
  const pid_t child = fork();
  if (child == 0) _exit(body());
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
}

bool mentions(const Status& status, std::initializer_list<const char*> words) {
  for (const char* word : words) {
    if (status.message().find(word) == std::string::npos) {
      UNSCOPED_INFO("no \"" << word << "\" in: " << status.message());
      return false;
    }
  }
  return true;
}

Status refused(const std::string& path, StoreOptions options = {}) {
  const std::string before = read_file(path);
  auto opened = Store::open(path, std::move(options));
  CHECK_FALSE(opened.ok());
  CHECK(read_file(path) == before);
  return opened.status();
}

const Migration kFirst{"0001_a.sql", "CREATE TABLE a (x INTEGER) STRICT; INSERT INTO a VALUES (1);"};
// The program's own migrations, then these.
std::vector<Migration> real_and(const std::vector<std::pair<std::string, std::string>>& more = {}) {
  std::vector<std::filesystem::path> files;
  for (const auto& file : std::filesystem::directory_iterator(DDTREE_SOURCE_DIR "/migrations"))
    if (file.path().extension() == ".sql") files.push_back(file.path());
  std::sort(files.begin(), files.end());
  std::vector<Migration> all;
  for (const auto& file : files) all.push_back({file.filename().string(), read_file(file.string())});
  for (const auto& [name, sql] : more) all.push_back({fmt::format("{:04}_{}", all.size() + 1, name), sql});
  return all;
}
const int64_t kReal = static_cast<int64_t>(real_and().size());

void make_history(const std::string& path) {
  auto history = Store::open(path);
  REQUIRE(history.ok());
  for (int i = 0; i < 300; ++i) (*history)->add_request({.request_id = fmt::format("chatcmpl-{}", i), .finish = "stop"});
  REQUIRE((*history)->flush().ok());
}

}  // namespace

TEST_CASE("a newer schema is refused untouched, with both versions") {
  TemporaryFolder folder;
  const std::string path = folder / "ddtree.db";
  StoreOptions newer;
  newer.migrations =
      real_and({{"more.sql", "CREATE TABLE more (x INTEGER) STRICT;"}, {"most.sql", "CREATE TABLE most (x INTEGER) STRICT;"}});
  const std::string theirs = fmt::format("version {}", kReal + 2), ours = fmt::format("up to {}", kReal);
  REQUIRE(Store::open(path, newer).ok());
  CHECK(mentions(refused(path), {path.c_str(), theirs.c_str(), ours.c_str(), "newer", "--db"}));
  auto reader = Store::open_read_only(path);
  REQUIRE_FALSE(reader.ok());
  CHECK(mentions(reader.status(), {theirs.c_str()}));

  // The same where a crash left the newer version in the WAL only.
  const std::string crashed = folder / "crashed.db";
  REQUIRE(in_child([&] {
            auto history = Store::open(crashed, newer);
            if (!history.ok()) return 1;
            kill(getpid(), SIGKILL);
            return 2;
          }) == 1000 + SIGKILL);
  REQUIRE(std::filesystem::exists(crashed + "-wal"));
  const std::string wal = read_file(crashed + "-wal");
  REQUIRE(wal.size() > 1000);
  CHECK(mentions(refused(crashed), {theirs.c_str(), ours.c_str()}));
  CHECK(read_file(crashed + "-wal") == wal);
}

TEST_CASE("an older schema is brought up to date and keeps its rows") {
  TemporaryFolder folder;
  const std::string path = folder / "ddtree.db";
  make_history(path);
  StoreOptions newer;
  newer.migrations = real_and({{"more.sql", "ALTER TABLE request ADD COLUMN more TEXT NOT NULL DEFAULT 'x';"}});
  auto history = Store::open(path, newer);
  INFO(history.status().message());
  REQUIRE(history.ok());
  auto page = (*history)->requests({}, {0, 0});
  CHECK((page.ok() && page->total == 300));
  auto reader = store::Database::open(path, store::Access::kReadOnly, 1000);
  REQUIRE(reader.ok());
  CHECK(*(*reader)->integer("SELECT count(*) FROM request WHERE more = 'x'") == 300);
  CHECK(*(*reader)->integer("PRAGMA user_version") == kReal + 1);
  CHECK(*(*reader)->integer("SELECT count(*) FROM schema_migration") == kReal + 1);
}

TEST_CASE("a migration that fails half-way is taken back whole") {
  TemporaryFolder folder;
  const std::string path = folder / "ddtree.db";
  make_history(path);
  StoreOptions broken;
  broken.migrations = real_and({{"good.sql", "CREATE TABLE good (x INTEGER) STRICT;"},
                                {"bad.sql", "CREATE TABLE half (x INTEGER) STRICT; DELETE FROM request; INSERT INTO nowhere VALUES (1);"}});
  auto opened = Store::open(path, broken);
  REQUIRE_FALSE(opened.ok());
  CHECK(mentions(opened.status(), {"_bad.sql", fmt::format("version {}", kReal + 1).c_str(), "nowhere"}));
  {
    auto reader = store::Database::open(path, store::Access::kReadOnly, 1000);
    REQUIRE(reader.ok());
    CHECK(*(*reader)->integer("PRAGMA user_version") == kReal + 1);
    CHECK(*(*reader)->integer("SELECT count(*) FROM sqlite_master WHERE name = 'good'") == 1);
    CHECK(*(*reader)->integer("SELECT count(*) FROM sqlite_master WHERE name = 'half'") == 0);
    CHECK(*(*reader)->integer("SELECT count(*) FROM request") == 300);
  }
  broken.migrations.back().sql = "CREATE TABLE half (x INTEGER) STRICT;";
  CHECK(Store::open(path, broken).ok());

  StoreOptions ends;
  ends.migrations = real_and({{"ends.sql", "CREATE TABLE early (x INTEGER); COMMIT;"}});
  auto sneaky = Store::open(folder / "other.db", ends);
  REQUIRE_FALSE(sneaky.ok());
  CHECK(mentions(sneaky.status(), {"_ends.sql", "transaction"}));
}

TEST_CASE("an edited migration and gaps in their numbers are refused") {
  TemporaryFolder folder;
  const std::string path = folder / "ddtree.db";
  make_history(path);
  StoreOptions edited;
  edited.migrations = real_and();
  edited.migrations[0].sql += "\n-- an afterthought\n";
  CHECK(mentions(refused(path, edited), {"0001_history.sql", "differs"}));
  StoreOptions gap;
  gap.migrations = {kFirst, {"0003_c.sql", "SELECT 1;"}};
  CHECK(mentions(refused(folder / "none.db", gap), {"0003_c.sql", "place 2"}));
}

TEST_CASE("files that are not a history are refused untouched") {
  TemporaryFolder folder;
  const std::string path = folder / "ddtree.db";
  SECTION("text") {
    write_file(path, std::string(5000, 'x'));
    CHECK(mentions(refused(path), {"not an SQLite database", "left as it is", "--db"}));
  }
  SECTION("a few bytes") {
    write_file(path, "hello");
    CHECK(mentions(refused(path), {"not an SQLite database"}));
  }
  SECTION("another program's database") {
    {
      auto other = store::Database::open(path, store::Access::kCreate, 1000);
      REQUIRE(other.ok());
      REQUIRE((*other)->script("CREATE TABLE bookmarks (url TEXT); PRAGMA user_version = 7").ok());
    }
    CHECK(mentions(refused(path), {"another program's"}));
  }
  SECTION("a folder") {
    std::filesystem::create_directory(path);
    auto opened = Store::open(path);
    REQUIRE_FALSE(opened.ok());
    CHECK(mentions(opened.status(), {"a folder"}));
  }
  SECTION("a file where the folder should be") {
    write_file(path, "x");
    auto opened = Store::open(path + "/ddtree.db");
    REQUIRE_FALSE(opened.ok());
    CHECK(mentions(opened.status(), {path.c_str(), "--db"}));
  }
}

TEST_CASE("a damaged history is refused untouched and says how to go on") {
  TemporaryFolder folder;
  const std::string path = folder / "ddtree.db";
  make_history(path);
  std::string bytes = read_file(path);
  REQUIRE(bytes.size() > 8 * 4096);
  SECTION("pages overwritten") {
    for (size_t page = 2; page < bytes.size() / 4096; ++page) bytes.replace(page * 4096, 64, std::string(64, '\xAA'));
  }
  SECTION("cut in the header") { bytes.resize(60); }
  SECTION("cut in a page") { bytes.resize(3 * 4096 + 100); }
  SECTION("the schema page overwritten") { bytes.replace(100, 2000, std::string(2000, '\x55')); }
  write_file(path, bytes);
  CHECK(mentions(refused(path), {path.c_str(), "damaged", ".recover", "--db"}));
}

TEST_CASE("an empty file and one whose set-up was cut short are taken") {
  TemporaryFolder folder;
  const std::string path = folder / "ddtree.db";
  write_file(path, "");
  CHECK(Store::open(path).ok());
}

TEST_CASE("a second process is told who has the history") {
  TemporaryFolder folder;
  const std::string path = folder / "ddtree.db";
  auto history = Store::open(path);
  REQUIRE(history.ok());
  auto again = Store::open(path);
  REQUIRE_FALSE(again.ok());
  CHECK(again.status().code() == Code::kTemporary);
  CHECK(mentions(again.status(), {"another ddtree", std::to_string(getpid()).c_str(), "--db"}));
  // Reading beside it works and sees what is committed; writing there does nothing and counts.
  (*history)->add_event({.kind = "x"});
  REQUIRE((*history)->flush().ok());
  auto reader = Store::open_read_only(path);
  INFO(reader.status().message());
  REQUIRE(reader.ok());
  auto events = (*reader)->events({}, {});
  CHECK((events.ok() && events->total == 1));
  (*reader)->add_event({.kind = "y"});
  CHECK((*reader)->health().dropped_rows == 1);
  CHECK_FALSE((*reader)->flush(1).ok());
  history->reset();
  CHECK(Store::open(path).ok());  // free again
}

TEST_CASE("a process that vanished is found at the next open") {
  TemporaryFolder folder;
  const std::string path = folder / "ddtree.db";
  const int64_t before = store::now_ms();
  REQUIRE(in_child([&] {
            auto history = Store::open(path);
            if (!history.ok()) return 1;
            (*history)->begin_run({.version = "9"});
            (*history)->add_phase({.phase = "starting"});
            if (!(*history)->flush().ok()) return 2;
            kill(getpid(), SIGKILL);
            return 3;
          }) == 1000 + SIGKILL);
  const int64_t after = store::now_ms();
  auto history = Store::open(path);
  REQUIRE(history.ok());
  auto runs = (*history)->runs({});
  REQUIRE((runs.ok() && runs->rows.size() == 1));
  const ServiceRun& run = runs->rows[0];
  CHECK(run.end_reason == kEndedWithoutNotice);
  CHECK((run.ended_ms >= before && run.ended_ms <= after));  // the last heartbeat, not the time of the discovery
  CHECK(run.exit_code == -1);
  auto events = (*history)->events({.kind = "service.ended-without-notice"}, {});
  REQUIRE((events.ok() && events->total == 1));
  CHECK((events->rows[0].run_id == run.id && events->rows[0].severity == Severity::kError));
}

TEST_CASE("a folder that cannot be written is named") {
  TemporaryFolder folder;
  std::filesystem::create_directory(folder / "locked");
  make_history(folder / "locked/ddtree.db");
  REQUIRE(chmod((folder / "locked").c_str(), 0555) == 0);
  REQUIRE(chmod((folder / "locked/ddtree.db").c_str(), 0444) == 0);
  REQUIRE(chmod(folder.path().c_str(), 0755) == 0);
  const auto as_nobody = [&](const std::string& path, std::initializer_list<const char*> words) {
    // Root may write anywhere.
    if (geteuid() == 0 && (setgid(65534) != 0 || setuid(65534) != 0)) return 9;
    auto opened = Store::open(path);
    if (opened.ok()) return 1;
    for (const char* word : words)
      if (opened.status().message().find(word) == std::string::npos)
        return std::fprintf(stderr, "%s\n", opened.status().message().c_str()), 2;
    return 0;
  };
  CHECK(in_child([&] { return as_nobody(folder / "locked/new.db", {"locked", "cannot be written", "--db"}); }) == 0);
  CHECK(in_child([&] { return as_nobody(folder / "locked/ddtree.db", {"locked", "cannot be written", "--db"}); }) == 0);
  CHECK(in_child([&] { return as_nobody(folder / "locked/sub/ddtree.db", {"locked/sub", "cannot be made", "--db"}); }) == 0);
  chmod((folder / "locked").c_str(), 0755);
}

TEST_CASE("a full disk: callers never wait, drops are counted, and writing goes on when there is room") {
  TemporaryFolder folder;
  const std::string path = folder / "ddtree.db";
  const int code = in_child([&] {
    StoreOptions options;
    options.store_text = true, options.queue_rows = 64, options.retain_bytes = 0;
    options.full_wait_ms = 3'600'000;  // a store that makes callers wait for a broken disk never ends this test
    auto history = Store::open(path, options);
    if (!history.ok()) return 1;
    signal(SIGXFSZ, SIG_IGN);  // write() then fails with EFBIG, as it would with ENOSPC
    rlimit limit{400'000, RLIM_INFINITY};
    if (setrlimit(RLIMIT_FSIZE, &limit) != 0) return 2;
    const std::string text(20'000, 'x');
    const auto add = [&] {
      (*history)->add_request({.finish = "stop", .answer_text = text}, {RoundTree{.parent = {-1}, .log_prob = {0}, .accepted = {1}}});
    };
    for (int i = 0; i < 200 && (*history)->health().writable; ++i) {
      add();
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    for (int i = 0; i < 500 && (*history)->health().writable; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(10));
    StoreHealth health = (*history)->health();
    if (health.writable || health.message.empty()) return 3;
    for (int i = 0; i < 5000; ++i) add();
    health = (*history)->health();
    if (health.dropped_rows == 0 || health.dropped_trees == 0 || health.queued > 64 + 1) return 5;
    if ((*history)->flush(0.2).ok()) return 6;
    if (!(*history)->requests({}, {1, 0}).ok()) return 7;  // reading goes on
    limit.rlim_cur = RLIM_INFINITY;
    if (setrlimit(RLIMIT_FSIZE, &limit) != 0) return 8;
    if (!(*history)->flush(20).ok() || !(*history)->health().writable) return 9;
    history->reset();  // the end of the store reports the drops, if it has not yet
    return 0;
  });
  REQUIRE(code == 0);
  auto history = Store::open(path);
  REQUIRE(history.ok());
  auto events = (*history)->events({.kind = "store.dropped"}, {});
  REQUIRE((events.ok() && events->total >= 1));
  CHECK(events->rows[0].severity == Severity::kWarning);
  auto page = (*history)->requests({}, {0, 0});
  CHECK((page.ok() && page->total > 0));
}

TEST_CASE("a queue that is full drops trees first, and says so") {
  TemporaryFolder folder;
  StoreOptions options;
  options.queue_rows = 40, options.full_wait_ms = 5000, options.commit_ms = 2000;
  auto history = Store::open(folder / "ddtree.db", options);
  REQUIRE(history.ok());
  const RoundTree tree{.parent = {-1}, .log_prob = {0}, .accepted = {1}};
  const int64_t big = (*history)->add_request({.finish = "stop"}, std::vector<RoundTree>(100, tree));  // more than the queue takes
  const int64_t small = (*history)->add_request({.finish = "stop"}, {tree});
  CHECK((*history)->health().dropped_trees == 100);
  for (int i = 0; i < 200; ++i) (*history)->add_request({.finish = "stop"});
  REQUIRE((*history)->flush(30).ok());
  CHECK((*history)->health().dropped_rows == 0);
  auto page = (*history)->requests({}, {0, 0});
  CHECK((page.ok() && page->total == 202));
  auto none = (*history)->trees(big, {}), one = (*history)->trees(small, {});
  CHECK((none.ok() && none->total == 0 && one.ok() && one->total == 1));
  history->reset();
  auto again = Store::open(folder / "ddtree.db");
  REQUIRE(again.ok());
  auto events = (*again)->events({.kind = "store.dropped"}, {});
  REQUIRE((events.ok() && events->total == 1));
  CHECK(events->rows[0].message.find("100 rows") != std::string::npos);
}

TEST_CASE("a history in a folder that cannot be written is read; where rows are in its log only, that is said", "[read-only]") {
  // Root may write anywhere: the reader is a child with no rights to the folder.
  TemporaryFolder folder;
  const std::string inner = folder / "read only % #1";
  std::filesystem::create_directory(inner);
  const std::string path = inner + "/ddtree.db";
  make_history(path);
  REQUIRE_FALSE(std::filesystem::exists(path + "-wal"));
  const auto readable = [&] {
    for (const auto& file : std::filesystem::directory_iterator(inner)) chmod(file.path().c_str(), 0444);
    chmod(folder.path().c_str(), 0755);
    chmod(inner.c_str(), 0555);
  };
  readable();
  const auto as_nobody = [&](const std::function<int()>& body) {
    return in_child([&] {
      if (getuid() == 0 && (setgid(65534) != 0 || setuid(65534) != 0)) return 90;
      if (access(inner.c_str(), W_OK) == 0) return 91;
      return body();
    });
  };
  CHECK(as_nobody([&] {
          auto history = Store::open_read_only(path);
          if (!history.ok()) return 1;
          auto page = (*history)->requests({}, {5, 0});
          return page.ok() && page->total == 300 && page->rows.size() == 5 ? 0 : 2;
        }) == 0);
  CHECK_FALSE(std::filesystem::exists(path + "-shm"));

  // A server that was killed leaves a log, and no reader may make the file that it takes to read it.
  chmod(inner.c_str(), 0755), chmod(path.c_str(), 0644);
  REQUIRE(in_child([&] {
            auto history = Store::open(path);
            if (!history.ok()) return 1;
            (*history)->add_event({.kind = "x", .message = "in the log"});
            if (!(*history)->flush().ok()) return 2;
            kill(getpid(), SIGKILL);
            return 3;
          }) == 1000 + SIGKILL);
  REQUIRE(std::filesystem::file_size(path + "-wal") > 0);
  std::filesystem::remove(path + "-shm");
  readable();
  CHECK(as_nobody([&] {
          auto history = Store::open_read_only(path);
          if (history.ok()) return 1;
          return mentions(history.status(), {"cannot read", "-wal", "write the folder", "copy both files"}) ? 0 : 2;
        }) == 0);
  // And a file that may not be read at all says why.
  chmod(path.c_str(), 0600);
  CHECK(as_nobody([&] {
          auto history = Store::open_read_only(path);
          if (history.ok()) return 1;
          return mentions(history.status(), {"cannot open", "Permission denied"}) ? 0 : 2;
        }) == 0);
  chmod(inner.c_str(), 0700);
  CHECK(as_nobody([&] {
          auto history = Store::open_read_only(path);
          return mentions(history.status(), {path.c_str(), "Permission denied"}) ? 0 : 2;
        }) == 0);
  CHECK(mentions(Store::open_read_only(inner + "/none.db").status(), {"there is no history yet"}));
}
