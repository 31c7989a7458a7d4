// A thin owner of one SQLite connection and its prepared statements. One thread at a time.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <variant>
#include <vector>

#include "base/status.h"

struct sqlite3;
struct sqlite3_stmt;

namespace ddtree::store {

struct Blob {
  std::string bytes;
};
using Value = std::variant<int64_t, double, std::string, Blob>;

// The columns of the current row, from 0.
class Row {
 public:
  explicit Row(sqlite3_stmt* statement) : statement_(statement) {}
  int64_t integer(int column) const;
  double real(int column) const;
  std::string text(int column) const;
  std::string_view blob(int column) const;  // valid until the next row

 private:
  sqlite3_stmt* statement_;
};

enum class Access { kReadOnly, kReadWrite, kCreate };

// What kind of failure the last call met.
enum class Failure {
  kNone,
  kRow,      // this row cannot be stored (constraint, too big): leave it out and go on
  kStorage,  // disk full, I/O error, read-only, busy: the same call may work later
  kCorrupt,  // the file is damaged or no database
};

class Database {
 public:
  ~Database();
  Database(const Database&) = delete;
  Database& operator=(const Database&) = delete;

  // busy_ms: how long a call waits for another connection's lock. kReadOnly also where the folder cannot be written, unless a log or a
  // journal beside the file holds rows of it.
  static Result<std::unique_ptr<Database>> open(const std::string& path, Access access, int busy_ms);

  // Text is stored as valid UTF-8: broken bytes become U+FFFD, since the rows leave as JSON.
  Status run(const std::string& sql, const std::vector<Value>& values = {});
  // each(row) for every row; it may not use this connection.
  Status query(const std::string& sql, const std::vector<Value>& values, const std::function<void(const Row&)>& each);
  Result<int64_t> integer(const std::string& sql, const std::vector<Value>& values = {});  // first column of the first row; 0 if none
  Status script(const std::string& sql);                                                   // several statements

  int64_t changes() const;  // rows that the last run() changed
  bool in_transaction() const;
  Failure failure() const { return failure_; }

 private:
  explicit Database(sqlite3* handle) : handle_(handle) {}
  Result<sqlite3_stmt*> prepare(const std::string& sql, const std::vector<Value>& values);
  Status fail(std::string_view what);

  sqlite3* handle_;
  std::unordered_map<std::string, sqlite3_stmt*> statements_;
  Failure failure_ = Failure::kNone;
};

std::string valid_utf8(std::string_view text);
int64_t now_ms();

}  // namespace ddtree::store
