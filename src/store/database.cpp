#include "store/database.h"

#include <fmt/core.h>
#include <sqlite3.h>
#include <sys/stat.h>

#include <chrono>
#include <cstring>

namespace ddtree::store {

int64_t Row::integer(int column) const { return sqlite3_column_int64(statement_, column); }
double Row::real(int column) const { return sqlite3_column_double(statement_, column); }

std::string Row::text(int column) const {
  const auto* text = reinterpret_cast<const char*>(sqlite3_column_text(statement_, column));
  return text == nullptr ? std::string() : std::string(text, static_cast<size_t>(sqlite3_column_bytes(statement_, column)));
}

std::string_view Row::blob(int column) const {
  const auto* bytes = static_cast<const char*>(sqlite3_column_blob(statement_, column));
  return bytes == nullptr ? std::string_view() : std::string_view(bytes, static_cast<size_t>(sqlite3_column_bytes(statement_, column)));
}

int64_t now_ms() {
  return std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::system_clock::now().time_since_epoch()).count();
}

namespace {

// Length of the well-formed UTF-8 sequence at text[at], or 0 (Unicode 15, table 3-7).
size_t sequence_length(std::string_view text, size_t at) {
  const auto byte = [&](size_t i) { return at + i < text.size() ? static_cast<unsigned char>(text[at + i]) : 0u; };
  const auto tail = [&](size_t i, unsigned low = 0x80, unsigned high = 0xBF) { return byte(i) >= low && byte(i) <= high; };
  const unsigned first = byte(0);
  if (first < 0x80) return 1;
  if (first >= 0xC2 && first <= 0xDF) return tail(1) ? 2 : 0;
  if (first >= 0xE0 && first <= 0xEF) return tail(1, first == 0xE0 ? 0xA0 : 0x80, first == 0xED ? 0x9F : 0xBF) && tail(2) ? 3 : 0;
  if (first >= 0xF0 && first <= 0xF4) {
    return tail(1, first == 0xF0 ? 0x90 : 0x80, first == 0xF4 ? 0x8F : 0xBF) && tail(2) && tail(3) ? 4 : 0;
  }
  return 0;
}

Failure classify(int code) {
  switch (code & 0xFF) {
    case SQLITE_OK:
    case SQLITE_ROW:
    case SQLITE_DONE: return Failure::kNone;
    case SQLITE_CONSTRAINT:
    case SQLITE_MISMATCH:
    case SQLITE_TOOBIG:
    case SQLITE_RANGE:
    case SQLITE_ERROR: return Failure::kRow;
    case SQLITE_CORRUPT:
    case SQLITE_NOTADB: return Failure::kCorrupt;
    default: return Failure::kStorage;
  }
}

}  // namespace

std::string valid_utf8(std::string_view text) {
  std::string out;
  for (size_t i = 0; i < text.size();) {
    const size_t length = sequence_length(text, i);
    if (length == 0) out += "\xEF\xBF\xBD";
    else out.append(text, i, length);
    i += length == 0 ? 1 : length;
  }
  return out;
}

Database::~Database() {
  for (auto& [sql, statement] : statements_) sqlite3_finalize(statement);
  sqlite3_close(handle_);
}

namespace {

// SQLite's words alone are "unable to open database file", whatever the system said.
std::string words_of(sqlite3* handle, int code) {
  std::string words = sqlite3_errmsg(handle);
  const int system = sqlite3_system_errno(handle);
  if (((code & 0xFF) == SQLITE_CANTOPEN || (code & 0xFF) == SQLITE_IOERR) && system != 0)
    words += std::string(": ") + std::strerror(system);
  return words;
}

bool has_bytes(const std::string& path) {
  struct stat info {};
  return ::stat(path.c_str(), &info) == 0 && info.st_size > 0;
}

// A path in a URI that SQLite reads: what would end it is encoded.
std::string uri_of(const std::string& path) {
  std::string out = "file:";
  for (const char c : path) {
    if (c == '?' || c == '#' || c == '%') out += fmt::format("%{:02X}", static_cast<unsigned char>(c));
    else if (c != '/' || out.back() != '/') out += c;  // two at the front would begin a host's name
  }
  return out;
}

}  // namespace

Result<std::unique_ptr<Database>> Database::open(const std::string& path, Access access, int busy_ms) {
  int flags = SQLITE_OPEN_NOMUTEX | SQLITE_OPEN_EXRESCODE;
  flags |= access == Access::kReadOnly ? SQLITE_OPEN_READONLY : SQLITE_OPEN_READWRITE;
  if (access == Access::kCreate) flags |= SQLITE_OPEN_CREATE;
  const auto attempt = [&](const std::string& name, int more) -> Result<std::unique_ptr<Database>> {
    sqlite3* handle = nullptr;
    const int code = sqlite3_open_v2(name.c_str(), &handle, flags | more, nullptr);
    std::unique_ptr<Database> database(new Database(handle));
    if (code != SQLITE_OK) return Status(Code::kUnavailable, fmt::format("cannot open {}: {}", path, words_of(handle, code)));
    sqlite3_busy_timeout(handle, busy_ms);
    return database;
  };
  auto database = attempt(path, 0);
  if (access != Access::kReadOnly || !database) return database;
  // A reader of a WAL database makes a -shm file beside it. In a folder where it may not, the file can still be read where nothing else
  // holds rows of it: no log (a server that has it open has one) and no journal.
  sqlite3* const handle = (*database)->handle_;
  const int looked = sqlite3_exec(handle, "PRAGMA schema_version", nullptr, nullptr, nullptr);
  const int kind = looked & 0xFF;
  if (kind != SQLITE_CANTOPEN && kind != SQLITE_READONLY) return database;
  const std::string why = words_of(handle, looked);
  if (!has_bytes(path + "-wal") && !has_bytes(path + "-journal")) return attempt(uri_of(path) + "?immutable=1", SQLITE_OPEN_URI);
  return Status(
      Code::kUnavailable,
      fmt::format("cannot read {}: {}. Its newest rows are in {}-wal, and to read those this user must be able to write the folder; "
                  "read it as the server's user, or copy both files elsewhere",
                  path, why, path));
}

Status Database::fail(std::string_view what) {
  const int code = sqlite3_extended_errcode(handle_);
  failure_ = classify(code);
  return Status(failure_ == Failure::kRow       ? Code::kInvalidArgument
                : failure_ == Failure::kStorage ? Code::kStorage
                                                : Code::kUnavailable,
                fmt::format("{}: {} (SQLite code {})", what, words_of(handle_, code), code));
}

Result<sqlite3_stmt*> Database::prepare(const std::string& sql, const std::vector<Value>& values) {
  failure_ = Failure::kNone;
  // Filters make statements of many forms; the cache must not grow with them.
  if (statements_.size() >= 128 && statements_.count(sql) == 0) {
    for (auto& [text, old] : statements_) sqlite3_finalize(old);
    statements_.clear();
  }
  sqlite3_stmt*& statement = statements_[sql];
  if (statement == nullptr) {
    const int code = sqlite3_prepare_v3(handle_, sql.data(), static_cast<int>(sql.size()), SQLITE_PREPARE_PERSISTENT, &statement, nullptr);
    if (code != SQLITE_OK) {
      statements_.erase(sql);
      return fail(sql.substr(0, 60));
    }
  }
  for (size_t i = 0; i < values.size(); ++i) {
    const int at = static_cast<int>(i) + 1;
    int code = SQLITE_OK;
    if (const auto* integer = std::get_if<int64_t>(&values[i])) code = sqlite3_bind_int64(statement, at, *integer);
    else if (const auto* real = std::get_if<double>(&values[i])) code = sqlite3_bind_double(statement, at, *real);
    else if (const auto* text = std::get_if<std::string>(&values[i])) {
      const std::string valid = valid_utf8(*text);
      code = sqlite3_bind_text64(statement, at, valid.data(), valid.size(), SQLITE_TRANSIENT, SQLITE_UTF8);
    } else {
      const std::string& bytes = std::get<Blob>(values[i]).bytes;
      // A null pointer would bind NULL, not an empty blob.
      code = bytes.empty() ? sqlite3_bind_zeroblob(statement, at, 0)
                           : sqlite3_bind_blob64(statement, at, bytes.data(), bytes.size(), SQLITE_TRANSIENT);
    }
    if (code != SQLITE_OK) return fail(sql.substr(0, 60));
  }
  return statement;
}

Status Database::query(const std::string& sql, const std::vector<Value>& values, const std::function<void(const Row&)>& each) {
  auto statement = prepare(sql, values);
  if (!statement) return statement.status();
  int code;
  while ((code = sqlite3_step(*statement)) == SQLITE_ROW)
    if (each) each(Row(*statement));
  Status status;
  if (code != SQLITE_DONE) status = fail(sql.substr(0, 60));
  sqlite3_reset(*statement);
  sqlite3_clear_bindings(*statement);
  return status;
}

Status Database::run(const std::string& sql, const std::vector<Value>& values) { return query(sql, values, nullptr); }

Result<int64_t> Database::integer(const std::string& sql, const std::vector<Value>& values) {
  int64_t value = 0;
  bool first = true;
  Status status = query(sql, values, [&](const Row& row) {
    if (first) value = row.integer(0);
    first = false;
  });
  if (!status.ok()) return status;
  return value;
}

Status Database::script(const std::string& sql) {
  failure_ = Failure::kNone;
  // A statement of its own: a failing one must not leave the rest to run.
  return sqlite3_exec(handle_, sql.c_str(), nullptr, nullptr, nullptr) == SQLITE_OK ? Status() : fail(sql.substr(0, 40));
}

int64_t Database::changes() const { return sqlite3_changes64(handle_); }
bool Database::in_transaction() const { return sqlite3_get_autocommit(handle_) == 0; }

}  // namespace ddtree::store
