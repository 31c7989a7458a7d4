#include "store/schema.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <filesystem>

#include "base/embedded.h"

namespace ddtree::store {
namespace {

// A file to be left alone: says what it is, and the two ways on.
std::string leave_alone(const std::string& path, const std::string& what) {
  return fmt::format("{}: {}; it was left as it is. Give another path with --db", path, what);
}

// Whose fault is it that a file cannot be opened or made? A disk that is full, read-only or failing may be mended without the user.
Code code_of(int error) {
  return error == ENOSPC || error == EDQUOT || error == EROFS || error == EIO ? Code::kStorage : Code::kUnavailable;
}

Status corrupt(const std::string& path, const std::string& detail) {
  return Status(
      Code::kUnavailable,
      fmt::format("{}: the history is damaged ({}); it was left as it is. To save what is readable: sqlite3 {} .recover | sqlite3 "
                  "recovered.db. To begin a new history: move it and its -wal file away, or give another path with --db",
                  path, detail, path));
}

// FNV-1a over the migration's text: tells an edited migration from the one that was applied. No defence against intent.
std::string checksum(std::string_view text) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  return fmt::format("{:016x}", hash);
}

int64_t big_endian(const unsigned char* bytes) {
  return static_cast<int32_t>((uint32_t{bytes[0]} << 24) | (uint32_t{bytes[1]} << 16) | (uint32_t{bytes[2]} << 8) | bytes[3]);
}

Status newer(const std::string& path, int64_t found, size_t known) {
  return Status(Code::kUnavailable,
                leave_alone(path, fmt::format("its schema is version {}, made by a newer ddtree; this one ({}) knows versions up to {}",
                                              found, DDTREE_VERSION, known)));
}

}  // namespace

Result<std::vector<Migration>> ordered_migrations(const StoreOptions& options) {
  std::vector<Migration> all = options.migrations;
  if (all.empty()) {
    for (const std::string_view name : embedded_files("migrations/")) {
      all.push_back({std::string(name.substr(std::strlen("migrations/"))), std::string(*embedded_file(name))});
    }
  }
  std::sort(all.begin(), all.end(), [](const Migration& a, const Migration& b) { return a.name < b.name; });
  for (size_t i = 0; i < all.size(); ++i) {
    size_t number = 0;
    std::from_chars(all[i].name.data(), all[i].name.data() + all[i].name.size(), number);
    if (number != i + 1) {
      return Status(Code::kEngineFault,
                    fmt::format("migration {} stands at place {}: names must begin 0001_, 0002_ … without gaps", all[i].name, i + 1));
    }
  }
  if (all.empty()) return Status(Code::kEngineFault, "this executable holds no migrations");
  return all;
}

OwnerLock::~OwnerLock() {
  if (file_ >= 0) close(file_);
}

Status OwnerLock::take(const std::string& path) {
  const std::string name = path + ".lock";
  file_ = ::open(name.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
  if (file_ < 0) {
    const int error = errno;
    return Status(code_of(error), fmt::format("the history cannot be written: {}: {}. Its folder must be writable for this user; give "
                                              "another path with --db",
                                              name, std::strerror(error)));
  }
  if (flock(file_, LOCK_EX | LOCK_NB) != 0) {
    char owner[32] = {};
    const ssize_t length = pread(file_, owner, sizeof owner - 1, 0);
    const std::string pid(owner, length > 0 ? strcspn(owner, "\n") : 0);
    return Status(Code::kTemporary, fmt::format("{}: another ddtree{} has this history open; stop it, or give another path with --db", path,
                                                pid.empty() ? "" : fmt::format(" (process {})", pid)));
  }
  const std::string pid = fmt::format("{}\n", getpid());
  if (ftruncate(file_, 0) != 0 || pwrite(file_, pid.data(), pid.size(), 0) < 0) {
    // The pid only serves another process's message; a full disk must not keep the server from starting.
  }
  return {};
}

Status make_folder_of(const std::string& path) {
  const std::filesystem::path folder = std::filesystem::path(path).parent_path();
  std::filesystem::path at;
  for (const auto& part : folder) {
    at /= part;
    if (at == "/" || mkdir(at.c_str(), 0700) == 0 || errno == EEXIST) continue;
    const int error = errno;
    std::error_code ignored;
    if (std::filesystem::is_directory(at, ignored)) continue;  // EROFS, EACCES come before EEXIST on some file systems
    return Status(code_of(error), fmt::format("the folder {} for the history cannot be made: {}; give another path with --db", at.string(),
                                              std::strerror(error)));
  }
  return {};
}

Status inspect(const std::string& path, const std::vector<Migration>& migrations, bool owner) {
  struct stat info {};
  if (stat(path.c_str(), &info) != 0) {
    if (errno == ENOENT) return {};
    return Status(Code::kUnavailable, fmt::format("{}: {}", path, std::strerror(errno)));
  }
  if (!S_ISREG(info.st_mode)) {
    return Status(Code::kUnavailable, fmt::format("{}: the history must be a file, this is {}; give a file's path with --db", path,
                                                  S_ISDIR(info.st_mode) ? "a folder" : "none"));
  }
  if (info.st_size == 0) return {};

  if (owner) {
    // The header first, by hand: SQLite would already touch -wal and -shm.
    unsigned char header[100];
    const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (file < 0) return Status(Code::kUnavailable, fmt::format("{}: {}", path, std::strerror(errno)));
    const ssize_t length = pread(file, header, sizeof header, 0);
    close(file);
    if (length < 16 || std::memcmp(header, "SQLite format 3", 16) != 0) {
      return Status(Code::kUnavailable, leave_alone(path, "this is not an SQLite database"));
    }
    if (length < static_cast<ssize_t>(sizeof header)) return corrupt(path, fmt::format("cut off after {} bytes", info.st_size));
    if (big_endian(header + 68) == kApplicationId && big_endian(header + 60) > static_cast<int64_t>(migrations.size())) {
      return newer(path, big_endian(header + 60), migrations.size());
    }
  }

  // What a crash left in the WAL counts too. A read-only connection recovers it without writing to the file.
  // A rollback journal is different: killed while it was made, before it was switched to WAL, the file cannot be read until the journal is
  // played back, and that writes. It brings the file to the state before the kill, so even a stranger's file is left as it was.
  const bool journal = owner && stat((path + "-journal").c_str(), &info) == 0;
  auto database = Database::open(path, journal ? Access::kReadWrite : Access::kReadOnly, 2000);
  if (!database) return database.status();
  const auto read = [&](const char* sql) { return (*database)->integer(sql); };
  const auto version = read("PRAGMA user_version"), application = read("PRAGMA application_id"),
             tables = read("SELECT count(*) FROM sqlite_master");
  for (const auto* result : {&version, &application, &tables}) {
    if (result->ok()) continue;
    if ((*database)->failure() == Failure::kCorrupt) return corrupt(path, result->status().message());
    return Status((*database)->failure() == Failure::kStorage ? Code::kStorage : Code::kUnavailable,
                  fmt::format("{}: {}", path, result->status().message()));
  }
  if (*application != kApplicationId && (*tables > 0 || *application != 0)) {
    return Status(Code::kUnavailable, leave_alone(path, "this is another program's SQLite database"));
  }
  if (*version > static_cast<int64_t>(migrations.size())) return newer(path, *version, migrations.size());
  return {};
}

Status migrate(Database& database, const std::string& path, const std::vector<Migration>& migrations) {
  auto version = database.integer("PRAGMA user_version");
  if (!version) return version.status();
  if (*version > static_cast<int64_t>(migrations.size())) return newer(path, *version, migrations.size());

  // Was anything that is applied edited since? Then this program and the file disagree on what a version means.
  Status edited;
  if (*version > 0) {
    DDTREE_RETURN_IF_ERROR(database.query("SELECT version, name, checksum FROM schema_migration ORDER BY version", {}, [&](const Row& row) {
      const auto at = static_cast<size_t>(row.integer(0));
      if (!edited.ok() || at < 1 || at > migrations.size()) return;
      if (row.text(2) != checksum(migrations[at - 1].sql)) {
        edited = Status(Code::kUnavailable,
                        leave_alone(path, fmt::format("its schema version {} was made by {}, which differs from this program's {}", at,
                                                      row.text(1), migrations[at - 1].name)));
      }
    }));
    if (!edited.ok()) return edited;
  }

  for (auto i = static_cast<size_t>(*version); i < migrations.size(); ++i) {
    const auto attempt = [&]() -> Status {
      DDTREE_RETURN_IF_ERROR(database.script("BEGIN IMMEDIATE"));
      DDTREE_RETURN_IF_ERROR(database.script(migrations[i].sql));
      if (!database.in_transaction()) return Status(Code::kEngineFault, "it ends its own transaction");
      if (i == 0) {
        DDTREE_RETURN_IF_ERROR(
            database.script("CREATE TABLE schema_migration (version INTEGER PRIMARY KEY, name TEXT NOT NULL, checksum TEXT NOT NULL, "
                            "applied_ms INTEGER NOT "
                            "NULL, program TEXT NOT NULL) STRICT"));
      }
      DDTREE_RETURN_IF_ERROR(database.run(
          "INSERT INTO schema_migration VALUES (?, ?, ?, ?, ?)",
          {static_cast<int64_t>(i + 1), migrations[i].name, checksum(migrations[i].sql), now_ms(), std::string(DDTREE_VERSION)}));
      DDTREE_RETURN_IF_ERROR(database.script(fmt::format("PRAGMA user_version = {}", i + 1)));
      return database.script("COMMIT");
    };
    if (Status status = attempt(); !status.ok()) {
      const bool storage = database.failure() == Failure::kStorage;
      if (database.in_transaction()) (void)database.script("ROLLBACK");
      return Status(storage ? Code::kStorage : Code::kUnavailable,
                    fmt::format("{}: migration {} failed and was taken back; the history is still at version {}: {}", path,
                                migrations[i].name, i, status.message()));
    }
  }
  return {};
}

Result<std::unique_ptr<Database>> open_and_migrate(const std::string& path, const std::vector<Migration>& migrations) {
  // Created here and not by SQLite, for the mode.
  const int file = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (file < 0) {
    const int error = errno;
    return Status(code_of(error),
                  fmt::format("{}: the history cannot be written: {}; give another path with --db", path, std::strerror(error)));
  }
  struct stat info {};
  fstat(file, &info);
  close(file);

  auto opened = Database::open(path, Access::kReadWrite, 5000);
  if (!opened) return opened.status();
  Database& database = **opened;
  const auto set_up = [&]() -> Status {
    if (info.st_size == 0) {
      // Only settable while the file is empty.
      DDTREE_RETURN_IF_ERROR(database.script("PRAGMA page_size = 4096; PRAGMA auto_vacuum = INCREMENTAL"));
      DDTREE_RETURN_IF_ERROR(database.script(fmt::format("PRAGMA application_id = {}", kApplicationId)));
    }
    // FULL: what is committed survives a power cut too. The writer commits a few times a second, no request waits for it.
    DDTREE_RETURN_IF_ERROR(
        database.script("PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL; PRAGMA foreign_keys = ON; "
                        "PRAGMA journal_size_limit = 16777216; PRAGMA cache_size = -4096; PRAGMA temp_store = MEMORY"));
    std::string mode;
    DDTREE_RETURN_IF_ERROR(database.query("PRAGMA journal_mode", {}, [&](const Row& row) { mode = row.text(0); }));
    if (mode != "wal") return Status(Code::kUnavailable, fmt::format("the file system does not allow WAL mode (journal_mode is {})", mode));
    auto application = database.integer("PRAGMA application_id");
    if (!application) return application.status();
    if (*application == 0) DDTREE_RETURN_IF_ERROR(database.script(fmt::format("PRAGMA application_id = {}", kApplicationId)));
    return {};
  };
  const auto explain = [&](const Status& status) {
    if (database.failure() == Failure::kCorrupt) return corrupt(path, status.message());
    return Status(database.failure() == Failure::kStorage ? Code::kStorage : Code::kUnavailable,
                  fmt::format("{}: the history cannot be used: {}", path, status.message()));
  };
  if (Status status = set_up(); !status.ok()) return explain(status);

  // A whole check costs about a second a gigabyte; larger files are checked as they are read.
  if (info.st_size <= int64_t{256} << 20) {
    std::string verdict;
    Status status = database.query("PRAGMA quick_check(1)", {}, [&](const Row& row) { verdict = row.text(0); });
    if (!status.ok()) return explain(status);
    if (verdict != "ok") return corrupt(path, verdict);
  }
  if (Status status = migrate(database, path, migrations); !status.ok()) {
    if (database.failure() == Failure::kCorrupt) return corrupt(path, status.message());
    return status;
  }
  return opened;
}

}  // namespace ddtree::store
