// A unit is replaced and brought back without ever being lost: also by kill -9 between any two steps, which these tests send.
#include "server/units/unit_swap.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>

using namespace ddtree;
using Catch::Matchers::ContainsSubstring;
namespace fs = std::filesystem;

namespace {

const std::string kOld = "[Service]\nExecStart=/opt/sglang/python -m sglang.launch_server \t\n\n# no newline at the end";
const std::string kNew = std::string(kInstalledUnitMark) + " 0\n[Service]\nExecStart=/usr/bin/ddtree serve\n";

struct Scratch {
  fs::path folder;
  std::string unit;
  struct stat old {};
  Scratch() {
    char name[] = "/tmp/ddtree-swap-XXXXXX";
    folder = mkdtemp(name);
    unit = (folder / "sglang.service").string();
    write(unit, kOld);
    REQUIRE(chmod(unit.c_str(), 0640) == 0);
    if (getuid() == 0) REQUIRE(chown(unit.c_str(), 12, 34) == 0);
    const timespec times[2] = {{1600000000, 1}, {1500000000, 123456789}};
    REQUIRE(utimensat(AT_FDCWD, unit.c_str(), times, 0) == 0);
    REQUIRE(stat(unit.c_str(), &old) == 0);
  }
  ~Scratch() { fs::remove_all(folder); }
  static void write(const std::string& path, const std::string& text) { std::ofstream(path, std::ios::binary) << text; }
  static std::string read(const std::string& path) {
    std::ifstream in(path, std::ios::binary);
    std::ostringstream text;
    text << in.rdbuf();
    return text.str();
  }
  bool is_old(const std::string& path) const {
    struct stat s {};
    return stat(path.c_str(), &s) == 0 && read(path) == kOld && s.st_mode == old.st_mode && s.st_uid == old.st_uid &&
           s.st_gid == old.st_gid && s.st_mtim.tv_sec == old.st_mtim.tv_sec && s.st_mtim.tv_nsec == old.st_mtim.tv_nsec;
  }
  size_t files() const { return static_cast<size_t>(std::distance(fs::directory_iterator(folder), fs::directory_iterator())); }
};

// Runs the action in a process of its own that is killed after its step number `last`. False: it had no such step and came to its end.
template <class Action>
bool killed_after(int last, Action action) {
  const pid_t child = fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    int step = 0;
    action([&](const char*) {
      if (step++ == last) kill(getpid(), SIGKILL);
    });
    _exit(0);
  }
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  return WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
}

}  // namespace

TEST_CASE("a unit is replaced with its rights, and comes back as the same file", "[units]") {
  Scratch s;
  REQUIRE(replace_unit(s.unit, kOld, kNew).ok());
  CHECK(Scratch::read(s.unit) == kNew);
  CHECK(s.is_old(unit_backup_path(s.unit)));
  struct stat now {};
  REQUIRE(stat(s.unit.c_str(), &now) == 0);
  CHECK(now.st_mode == s.old.st_mode);
  CHECK(now.st_uid == s.old.st_uid);
  CHECK(s.files() == 2);
  auto back = rollback_unit(s.unit);
  REQUIRE(back);
  CHECK(s.is_old(s.unit));
  REQUIRE(stat(s.unit.c_str(), &now) == 0);
  CHECK(now.st_ino == s.old.st_ino);
  CHECK(Scratch::read(back->leftover) == kNew);
  CHECK_FALSE(fs::exists(unit_backup_path(s.unit)));
  CHECK(s.files() == 2);
  // And again: the leftover of the first time stays beside that of the second.
  REQUIRE(replace_unit(s.unit, kOld, kNew + "# 2\n").ok());
  REQUIRE(rollback_unit(s.unit));
  CHECK(s.is_old(s.unit));
  CHECK(Scratch::read(unit_leftover_path(s.unit)) == kNew);
  CHECK(Scratch::read(unit_leftover_path(s.unit) + ".2") == kNew + "# 2\n");
  CHECK(s.files() == 3);
}

TEST_CASE("a backup is never overwritten, and nothing is done on a wrong footing", "[units]") {
  Scratch s;
  const auto refused = [&](const Status& status, const char* words) {
    CHECK(status.code() == Code::kUsage);
    CHECK_THAT(status.message(), ContainsSubstring(words));
    CHECK(s.is_old(s.unit));
  };
  refused(replace_unit(s.unit, kOld + "x", kNew), "has changed since");
  Scratch::write(unit_backup_path(s.unit), "somebody's");
  refused(replace_unit(s.unit, kOld, kNew), "is there already");
  CHECK(Scratch::read(unit_backup_path(s.unit)) == "somebody's");
  fs::remove(unit_backup_path(s.unit));
  refused(rollback_unit(s.unit).status(), "nothing to roll back");
  fs::create_symlink(s.unit, s.folder / "alias.service");
  refused(read_unit((s.folder / "alias.service").string()).status(), "is a link to");
  refused(read_unit(s.folder.string()).status(), "no plain file");
  refused(create_unit(s.unit, kNew), "is there already");
  CHECK(s.files() == 2);
}

TEST_CASE("no rollback overwrites what another put aside, nor anything of somebody's own", "[units]") {
  Scratch s;
  Scratch::write(unit_leftover_path(s.unit), "mine");
  for (int round = 2; round <= 4; ++round) {
    const std::string text = kNew + "# edited in round " + std::to_string(round) + "\n";
    REQUIRE(replace_unit(s.unit, kOld, text).ok());
    auto back = rollback_unit(s.unit);
    REQUIRE(back);
    CHECK(back->leftover == unit_leftover_path(s.unit) + "." + std::to_string(round));
    CHECK(Scratch::read(back->leftover) == text);
    CHECK(s.is_old(s.unit));
  }
  CHECK(Scratch::read(unit_leftover_path(s.unit)) == "mine");
  CHECK(Scratch::read(unit_leftover_path(s.unit) + ".2") == kNew + "# edited in round 2\n");
  CHECK(s.files() == 5);
}

TEST_CASE("a unit that was edited or deleted since does not hinder the way back; one that is not ddtree's does", "[units]") {
  Scratch s;
  REQUIRE(replace_unit(s.unit, kOld, kNew).ok());
  Scratch::write(s.unit, kNew + "Environment=EDITED=1\n");
  REQUIRE(rollback_unit(s.unit));
  CHECK(s.is_old(s.unit));
  CHECK(Scratch::read(unit_leftover_path(s.unit)) == kNew + "Environment=EDITED=1\n");
  fs::remove(unit_leftover_path(s.unit));
  REQUIRE(replace_unit(s.unit, kOld, kNew).ok());
  fs::remove(s.unit);
  auto back = rollback_unit(s.unit);
  REQUIRE(back);
  CHECK(back->leftover.empty());
  CHECK(s.is_old(s.unit));

  REQUIRE(replace_unit(s.unit, kOld, kNew).ok());
  Scratch::write(s.unit, "[Service]\nExecStart=/opt/mine\n");
  back = rollback_unit(s.unit);
  REQUIRE_FALSE(back);
  CHECK(back.status().code() == Code::kUsage);
  CHECK_THAT(back.status().message(), ContainsSubstring("is not the unit that ddtree install wrote") && ContainsSubstring("move it away"));
  CHECK(Scratch::read(s.unit) == "[Service]\nExecStart=/opt/mine\n");
  CHECK(s.is_old(unit_backup_path(s.unit)));
  fs::rename(s.unit, s.unit + ".mine");
  REQUIRE(rollback_unit(s.unit));
  CHECK(s.is_old(s.unit));
}

TEST_CASE("kill -9 between any two steps of a replacement loses nothing, and the next call completes it", "[units]") {
  const bool forward = GENERATE(true, false);  // either way on: to the end, or back
  int kills = 0;
  for (int step = 0;; ++step) {
    Scratch s;
    const bool killed = killed_after(step, [&](const UnitSwapStep& hook) { (void)replace_unit(s.unit, kOld, kNew, hook); });
    if (!killed) break;
    ++kills;
    INFO("killed after step " << step);
    const std::string now = Scratch::read(s.unit);
    CHECK((now == kOld || now == kNew));
    CHECK((s.is_old(s.unit) || s.is_old(unit_backup_path(s.unit))));
    if (now == kOld) {
      if (forward || !fs::exists(unit_backup_path(s.unit))) {
        REQUIRE(replace_unit(s.unit, kOld, kNew).ok());
        CHECK(Scratch::read(s.unit) == kNew);
        CHECK(s.is_old(unit_backup_path(s.unit)));
        CHECK(s.files() == 2);  // no half-made file stays
      } else {
        auto back = rollback_unit(s.unit);
        REQUIRE(back);
        CHECK(back->was_in_place);
        CHECK(s.is_old(s.unit));
        continue;
      }
    }
    REQUIRE(rollback_unit(s.unit));
    CHECK(s.is_old(s.unit));
  }
  CHECK(kills == 3);  // written aside, backed up, replaced
}

TEST_CASE("kill -9 between any two steps of a rollback loses nothing, and the next call completes it", "[units]") {
  int kills = 0;
  for (int step = 0;; ++step) {
    Scratch s;
    REQUIRE(replace_unit(s.unit, kOld, kNew).ok());
    const bool killed = killed_after(step, [&](const UnitSwapStep& hook) { (void)rollback_unit(s.unit, hook); });
    if (!killed) break;
    ++kills;
    INFO("killed after step " << step);
    CHECK((s.is_old(s.unit) || s.is_old(unit_backup_path(s.unit))));
    if (!s.is_old(s.unit)) {
      CHECK(Scratch::read(s.unit) == kNew);
      REQUIRE(rollback_unit(s.unit));
    }
    CHECK(s.is_old(s.unit));
    CHECK(Scratch::read(unit_leftover_path(s.unit)) == kNew);
    CHECK(s.files() == 2);
  }
  CHECK(kills == 2);  // put aside, brought back
}

TEST_CASE("a unit beside the old one appears whole or not at all", "[units]") {
  for (int step = 0;; ++step) {
    Scratch s;
    const std::string beside = (s.folder / "ddtree-sglang.service").string();
    const bool killed = killed_after(step, [&](const UnitSwapStep& hook) { (void)create_unit(beside, kNew, hook); });
    CHECK((!fs::exists(beside) || Scratch::read(beside) == kNew));
    CHECK(s.is_old(s.unit));
    if (!fs::exists(beside)) REQUIRE(create_unit(beside, kNew).ok());
    CHECK(Scratch::read(beside) == kNew);
    CHECK(s.files() == 2);
    if (!killed) break;
  }
}

TEST_CASE("two at once: the second one is told so", "[units]") {
  Scratch s;
  const int fd = open(s.folder.c_str(), O_RDONLY | O_DIRECTORY);
  REQUIRE(flock(fd, LOCK_EX) == 0);
  CHECK(replace_unit(s.unit, kOld, kNew).code() == Code::kTemporary);
  CHECK(rollback_unit(s.unit).status().code() == Code::kTemporary);
  close(fd);
  CHECK(s.is_old(s.unit));
  CHECK(replace_unit(s.unit, kOld, kNew).ok());
}
