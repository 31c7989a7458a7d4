#include "server/units/unit_swap.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>

namespace ddtree {

namespace {

namespace fs = std::filesystem;

Status trouble(const std::string& what, const std::string& path) {
  return {Code::kUnavailable, fmt::format("{}: cannot {}: {}", path, what, std::strerror(errno))};
}

// The folder of a unit, locked against another swap, and made durable after each step.
class Folder {
 public:
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  Folder() = default;
  ~Folder() {
    if (fd_ >= 0) ::close(fd_);
  }
  Status open(const std::string& unit) {
    path_ = fs::path(unit).parent_path().string();
    if (path_.empty()) path_ = ".";
    fd_ = ::open(path_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd_ < 0) return trouble("open the folder", path_);
    // Two at once could each take the other's half-made file for a leftover.
    if (::flock(fd_, LOCK_EX | LOCK_NB) != 0) return {Code::kTemporary, path_ + ": another ddtree install or rollback is at work there"};
    return {};
  }
  Status sync() const { return ::fsync(fd_) == 0 ? Status() : trouble("write the folder", path_); }

 private:
  std::string path_;
  int fd_ = -1;
};

bool there(const std::string& path, struct stat* s) { return ::lstat(path.c_str(), s) == 0; }
bool same_file(const struct stat& a, const struct stat& b) { return a.st_dev == b.st_dev && a.st_ino == b.st_ino; }

std::string hidden_path(const std::string& unit, const char* end) {
  const fs::path p(unit);
  return (p.parent_path() / ("." + p.filename().string() + end)).string();
}

// A whole, durable file under a name that systemd does not read. `like`: whose rights and owner it gets; null: 0644.
Status write_aside(const std::string& path, const std::string& text, const struct stat* like) {
  ::unlink(path.c_str());  // what a kill left; the folder is locked
  const int fd = ::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
  if (fd < 0) return trouble("create", path);
  Status status;
  for (size_t done = 0; status.ok() && done < text.size();) {
    const ssize_t n = ::write(fd, text.data() + done, text.size() - done);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) status = trouble("write", path);
    else done += static_cast<size_t>(n);
  }
  if (status.ok() && like && ::fchown(fd, like->st_uid, like->st_gid) != 0) status = trouble("give its owner to", path);
  if (status.ok() && ::fchmod(fd, like ? like->st_mode & 07777 : 0644) != 0) status = trouble("set the rights of", path);
  if (status.ok() && ::fsync(fd) != 0) status = trouble("write", path);
  if (::close(fd) != 0 && status.ok()) status = trouble("write", path);
  if (!status.ok()) ::unlink(path.c_str());
  return status;
}

Result<std::string> read_whole(const std::string& path, size_t most) {
  std::FILE* file = std::fopen(path.c_str(), "rbe");
  if (!file) return trouble("read", path);
  std::string text;
  char buffer[8192];
  for (size_t n; text.size() <= most && (n = std::fread(buffer, 1, sizeof buffer, file)) > 0;) text.append(buffer, n);
  const bool bad = std::ferror(file) != 0;
  std::fclose(file);
  if (bad) return trouble("read", path);
  return text;
}

// Gives the unit a second name, the first of FILE.after-ddtree, FILE.after-ddtree.2 … that is free: it may have been edited since it was
// written, and so may those of earlier rollbacks.
Result<std::string> put_aside(const std::string& unit, const struct stat& now) {
  constexpr int kMost = 1000;
  for (int n = 1; n <= kMost; ++n) {
    std::string name = unit_leftover_path(unit) + (n > 1 ? fmt::format(".{}", n) : "");
    if (::link(unit.c_str(), name.c_str()) == 0) return name;
    if (errno != EEXIST) return trouble("give another name to", unit);
    struct stat earlier {};
    if (there(name, &earlier) && same_file(earlier, now)) return name;  // a kill came after this step
  }
  return Status(Code::kUsage,
                fmt::format("{} and {} more of its kind are there already; move them away", unit_leftover_path(unit), kMost - 1));
}

void done(const UnitSwapStep& step, const char* name) {
  if (step) step(name);
}

}  // namespace

std::string unit_backup_path(const std::string& unit) { return unit + ".before-ddtree"; }
std::string unit_leftover_path(const std::string& unit) { return unit + ".after-ddtree"; }

Result<std::string> read_unit(const std::string& unit) {
  constexpr size_t kMost = 1 << 20;
  struct stat s {};
  if (!there(unit, &s)) return Status(Code::kUsage, fmt::format("{}: {}", unit, std::strerror(errno)));
  if (S_ISLNK(s.st_mode)) {
    std::error_code none;
    return Status(Code::kUsage, fmt::format("{} is a link to {}; give the file itself", unit, fs::read_symlink(unit, none).string()));
  }
  if (!S_ISREG(s.st_mode)) return Status(Code::kUsage, unit + " is no plain file; give a .service file");
  auto text = read_whole(unit, kMost);
  if (text && text->size() > kMost) return Status(Code::kUsage, unit + " is over 1 MiB; that is no unit file");
  return text;
}

Status backup_free(const std::string& unit) {
  const std::string backup = unit_backup_path(unit);
  struct stat now {
  }, kept{};
  if (!there(backup, &kept) || (there(unit, &now) && same_file(now, kept))) return {};
  return {Code::kUsage,
          fmt::format("{} is there already, from an earlier install; `ddtree rollback {}` brings it back, or move it away", backup, unit)};
}

Status replace_unit(const std::string& unit, const std::string& before, const std::string& text, const UnitSwapStep& step) {
  Folder folder;
  DDTREE_RETURN_IF_ERROR(folder.open(unit));
  const std::string backup = unit_backup_path(unit), aside = hidden_path(unit, ".ddtree-new");
  auto now = read_unit(unit);
  if (!now) return now.status();
  if (*now != before) return {Code::kUsage, unit + " has changed since it was read; run the command again"};
  struct stat old {
  }, kept{};
  if (!there(unit, &old)) return trouble("read", unit);
  DDTREE_RETURN_IF_ERROR(backup_free(unit));
  const bool unfinished = there(backup, &kept);
  DDTREE_RETURN_IF_ERROR(write_aside(aside, text, &old));
  done(step, "written aside");
  // A second name for the same inode: nothing is copied, and a name that is there makes it fail.
  if (!unfinished && ::link(unit.c_str(), backup.c_str()) != 0) {
    const Status status = trouble("give the old unit the name", backup);
    ::unlink(aside.c_str());
    return status;
  }
  // The backup's name must be on disk before the unit's own name changes hands.
  DDTREE_RETURN_IF_ERROR(folder.sync());
  done(step, "backed up");
  if (::rename(aside.c_str(), unit.c_str()) != 0) {
    const Status status = trouble("put the new unit in place of", unit);
    ::unlink(aside.c_str());
    ::unlink(backup.c_str());
    return status;
  }
  DDTREE_RETURN_IF_ERROR(folder.sync());
  done(step, "replaced");
  return {};
}

Status create_unit(const std::string& unit, const std::string& text, const UnitSwapStep& step) {
  Folder folder;
  DDTREE_RETURN_IF_ERROR(folder.open(unit));
  const std::string aside = hidden_path(unit, ".ddtree-new");
  DDTREE_RETURN_IF_ERROR(write_aside(aside, text, nullptr));
  done(step, "written aside");
  const int linked = ::link(aside.c_str(), unit.c_str());  // fails where the name is taken; a rename would not
  const Status status = linked == 0       ? folder.sync()
                        : errno == EEXIST ? Status(Code::kUsage, unit + " is there already; nothing was written")
                                          : trouble("create", unit);
  ::unlink(aside.c_str());
  done(step, "created");
  return status;
}

Result<UnitRollback> rollback_unit(const std::string& unit, const UnitSwapStep& step) {
  Folder folder;
  DDTREE_RETURN_IF_ERROR(folder.open(unit));
  const std::string backup = unit_backup_path(unit);
  struct stat kept {
  }, now{};
  if (!there(backup, &kept)) return Status(Code::kUsage, fmt::format("nothing to roll back: there is no {}", backup));
  UnitRollback out;
  if (there(unit, &now) && same_file(now, kept)) {
    // Renaming one name of a file onto another of the same file does nothing at all: the backup's name goes by itself.
    if (::unlink(backup.c_str()) != 0) return trouble("remove", backup);
    out.was_in_place = true;
  } else {
    if (there(unit, &now)) {
      // Somebody may have brought back a unit of their own by hand, or by other means: that is no ddtree unit to be put aside.
      auto text = read_unit(unit);
      if (!text) return text.status();
      if (!text->starts_with(kInstalledUnitMark))
        return Status(Code::kUsage, fmt::format("{} is not the unit that ddtree install wrote (its first line would begin \"{}\"): move it "
                                                "away, and the old unit can come back from {}",
                                                unit, kInstalledUnitMark, backup));
      auto name = put_aside(unit, now);
      if (!name) return name.status();
      out.leftover = std::move(*name);
      DDTREE_RETURN_IF_ERROR(folder.sync());
      done(step, "put aside");
    }
    if (::rename(backup.c_str(), unit.c_str()) != 0) return trouble("bring back", backup);
  }
  DDTREE_RETURN_IF_ERROR(folder.sync());
  done(step, "brought back");
  return out;
}

}  // namespace ddtree
