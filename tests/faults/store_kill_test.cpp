// kill -9 while the history is being written: the file opens, is whole, and lacks nothing that was accepted more than a second before.
#include <fcntl.h>
#include <fmt/core.h>
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <catch2/catch_test_macros.hpp>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <map>
#include <random>
#include <thread>
#include <vector>

#include "store/database.h"
#include "store/store.h"

using namespace ddtree;

namespace {

int64_t steady_ms() {
  return std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// What the child says of each row, through a pipe: which table, which id, when it was accepted.
struct Accepted {
  int32_t table;  // 0 request, 1 event
  int32_t trees;  // rounds of the request
  int64_t id, at_ms;
};

// Writes rows until it is killed. Never returns.
[[noreturn]] void write_rows(const std::string& path, int report, unsigned seed) {
  auto history = Store::open(path);
  if (!history.ok()) {
    std::fprintf(stderr, "%s\n", history.status().message().c_str());
    _exit(1);
  }
  (*history)->begin_run({.version = "kill"});
  std::mt19937 random(seed);
  RoundTree tree;
  for (int i = 0; i < 33; ++i)
    tree.parent.push_back(i - 1), tree.log_prob.push_back(-0.1f * static_cast<float>(i)), tree.accepted.push_back(i < 5);
  for (;;) {
    std::vector<RoundTree> trees(random() % 8, tree);
    for (size_t i = 0; i < trees.size(); ++i) trees[i].round = static_cast<int32_t>(i);
    Accepted row{0, static_cast<int32_t>(trees.size()), 0, 0};
    row.id = (*history)->add_request({.finish = "stop", .error = std::string(random() % 300, 'e')}, std::move(trees));
    row.at_ms = steady_ms();
    if (write(report, &row, sizeof row) != sizeof row) _exit(2);
    row = {1, 0, (*history)->add_event({.kind = "tick", .message = "m"}), 0};
    row.at_ms = steady_ms();
    if (write(report, &row, sizeof row) != sizeof row) _exit(2);
    if ((*history)->health().dropped_rows > 0) _exit(3);
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 4000));
  }
}

}  // namespace

TEST_CASE("kill -9 while writing loses at most the last second and never the file") {
  const std::filesystem::path folder = std::filesystem::temp_directory_path() / fmt::format("ddtree-kill-{}", getpid());
  std::filesystem::create_directories(folder);
  const std::string path = (folder / "ddtree.db").string();
  const unsigned seed = std::random_device{}();
  INFO("seed " << seed);
  std::mt19937 random(seed);
  int64_t accepted_total = 0, lost_total = 0, worst_ms = 0;

  constexpr int kKills = 20;
  for (int kill_number = 0; kill_number < kKills; ++kill_number) {
    INFO("kill " << kill_number);
    int ends[2];
    REQUIRE(pipe(ends) == 0);
    const unsigned child_seed = random();
    const pid_t child = fork();
    REQUIRE(child >= 0);
    if (child == 0) {
      close(ends[0]);
      write_rows(path, ends[1], child_seed);
    }
    close(ends[1]);

    // Some kills fall into the opening (recovery, migration), most into steady writing, some after more than a second of it.
    const int delay_ms = kill_number % 5 == 0   ? static_cast<int>(random() % 60)
                         : kill_number % 5 == 1 ? 1500 + static_cast<int>(random() % 1000)
                                                : static_cast<int>(random() % 1200);
    std::vector<Accepted> accepted;
    const int64_t kill_at = steady_ms() + delay_ms;
    bool killed = false;
    int64_t killed_ms = 0;
    std::string pending;
    for (;;) {
      const int64_t now = steady_ms();
      if (!killed && now >= kill_at) {
        killed_ms = now;  // before the signal: no row is accepted later than the child's death
        REQUIRE(kill(child, SIGKILL) == 0);
        killed = true;
      }
      pollfd waiting{ends[0], POLLIN, 0};
      poll(&waiting, 1, killed ? 1000 : static_cast<int>(kill_at - now));
      if (waiting.revents == 0) continue;
      char bytes[4096];
      const ssize_t count = read(ends[0], bytes, sizeof bytes);
      if (count <= 0) break;
      pending.append(bytes, static_cast<size_t>(count));
      while (pending.size() >= sizeof(Accepted)) {
        Accepted row;
        std::memcpy(&row, pending.data(), sizeof row);
        pending.erase(0, sizeof row);
        accepted.push_back(row);
      }
    }
    close(ends[0]);
    int status = 0;
    REQUIRE(waitpid(child, &status, 0) == child);
    REQUIRE((WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL));  // it was writing until then: no error of its own

    auto history = Store::open(path);
    INFO(history.status().message());
    REQUIRE(history.ok());
    auto database = store::Database::open(path, store::Access::kReadOnly, 2000);
    REQUIRE(database.ok());
    std::string verdict;
    REQUIRE((*database)->query("PRAGMA integrity_check", {}, [&](const store::Row& row) { verdict += row.text(0); }).ok());
    REQUIRE(verdict == "ok");
    REQUIRE((*database)->query("PRAGMA foreign_key_check", {}, [&](const store::Row&) { verdict = "dangling"; }).ok());
    REQUIRE(verdict == "ok");

    std::map<int64_t, int64_t> present[2];
    const char* const queries[2] = {"SELECT id, trees FROM request", "SELECT id, 0 FROM event"};
    for (int table = 0; table < 2; ++table) {
      REQUIRE((*database)->query(queries[table], {}, [&](const store::Row& row) { present[table][row.integer(0)] = row.integer(1); }).ok());
    }
    for (const Accepted& row : accepted) {
      ++accepted_total;
      if (present[row.table].count(row.id) > 0) continue;
      ++lost_total;
      const int64_t age = killed_ms - row.at_ms;
      worst_ms = std::max(worst_ms, age);
      INFO("row " << row.id << " of table " << row.table << " was accepted " << age << " ms before the kill");
      REQUIRE(age <= 1000);
    }
    // A tree that is announced is there.
    auto missing =
        (*database)->integer("SELECT count(*) FROM request WHERE trees <> (SELECT count(*) FROM request_tree WHERE request = request.id)");
    REQUIRE((missing.ok() && *missing == 0));
    auto open_runs = (*database)->integer("SELECT count(*) FROM service_run WHERE ended_ms = 0");
    REQUIRE((open_runs.ok() && *open_runs == 0));
    history->reset();
  }
  std::filesystem::remove_all(folder);
  std::fprintf(stderr, "%d kills: %lld rows accepted, %lld lost, the oldest of them %lld ms before its kill\n", kKills,
               static_cast<long long>(accepted_total), static_cast<long long>(lost_total), static_cast<long long>(worst_ms));
  CHECK(accepted_total > 500);
}
