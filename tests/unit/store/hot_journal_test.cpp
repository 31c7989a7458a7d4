// Killed at any system call while a new history is being made: the next start opens it.
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#include <catch2/catch_test_macros.hpp>
#include <filesystem>
#include <fstream>

#include "store/database.h"
#include "store/store.h"

using namespace ddtree;

TEST_CASE("a history that was killed in its first transaction, before it was switched to WAL, opens") {
  const std::filesystem::path folder = std::filesystem::temp_directory_path() / ("ddtree-journal-" + std::to_string(getpid()));
  std::filesystem::create_directories(folder);
  const std::string path = (folder / "ddtree.db").string();
  std::ofstream(path).close();  // SQLite is never asked to create it
  const pid_t child = fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    auto database = store::Database::open(path, store::Access::kReadWrite, 1000);
    if (!database.ok()) _exit(2);
    // A cache of one page spills the transaction to the file at once: journal and half-written file stand there together.
    bool ok = (*database)->script("PRAGMA page_size = 4096; PRAGMA journal_mode = DELETE").ok() &&
              (*database)->script("CREATE TABLE t (x)").ok() && (*database)->script("DROP TABLE t").ok() &&
              (*database)->script("PRAGMA cache_size = 1; PRAGMA cache_spill = 1; BEGIN IMMEDIATE").ok() &&
              (*database)->script("CREATE TABLE u (x)").ok();
    for (int i = 0; ok && i < 200; ++i) ok = (*database)->script("INSERT INTO u VALUES (randomblob(3000))").ok();
    _exit(ok && std::filesystem::exists(path + "-journal") ? 0 : 3);  // no destructor: the transaction stays open
  }
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  REQUIRE((WIFEXITED(status) && WEXITSTATUS(status) == 0));
  REQUIRE(std::filesystem::exists(path + "-journal"));
  REQUIRE(std::filesystem::file_size(path) > 0);
  {
    auto history = Store::open(path);
    INFO(history.status().message());
    REQUIRE(history.ok());
  }
  std::filesystem::remove_all(folder);
}
