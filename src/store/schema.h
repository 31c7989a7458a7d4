// Opening the file: is it ours, whole, of a version that this program knows; then bringing it up to date.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "store/database.h"
#include "store/store.h"

namespace ddtree::store {

// PRAGMA application_id of every store: "ddtr".
inline constexpr int64_t kApplicationId = 0x64647472;

// The embedded migrations in order, or those of the options. kEngineFault if their numbers are not 1, 2, 3 …
Result<std::vector<Migration>> ordered_migrations(const StoreOptions& options);

// Holds the right to write to a store, for the life of the object, against other processes and other Stores of this one. The kernel
// frees it with the process, however that ends.
class OwnerLock {
 public:
  OwnerLock() = default;
  ~OwnerLock();
  OwnerLock(const OwnerLock&) = delete;
  OwnerLock& operator=(const OwnerLock&) = delete;
  Status take(const std::string& path);  // path of the database; the lock is the file PATH.lock

 private:
  int file_ = -1;
};

// Creates the missing folders of path, 0700.
Status make_folder_of(const std::string& path);

// Looks without writing. Fine if the file is missing or empty. Otherwise refuses what open() must not touch. `owner`: this process
// holds the OwnerLock, so no connection of its own can be open. Only then may the file be opened beside SQLite: closing any
// descriptor of a file drops all POSIX locks that the process has on it.
Status inspect(const std::string& path, const std::vector<Migration>& migrations, bool owner);

// A write connection, set up (WAL, foreign keys, sync) and migrated.
Result<std::unique_ptr<Database>> open_and_migrate(const std::string& path, const std::vector<Migration>& migrations);

// Applies what is missing, each in its own transaction; a failure leaves the schema of the migration before it.
Status migrate(Database& database, const std::string& path, const std::vector<Migration>& migrations);

}  // namespace ddtree::store
