// ddtree install: shows what a unit that starts SGLang becomes, and on request puts it in place. ddtree rollback: the way back.
#include <fcntl.h>
#include <fmt/core.h>
#include <pwd.h>
#include <spawn.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "base/embedded.h"
#include "cli/command.h"
#include "server/units/migrate_unit.h"
#include "server/units/unit_swap.h"

extern char** environ;

#ifdef DDTREE_HAS_CUDA
constexpr bool kHasCuda = true;
#else
constexpr bool kHasCuda = false;
#endif

namespace ddtree::cli {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

const char* const kInstallHelp =
    "usage: ddtree install --from-unit FILE [--apply [--now]] [--to FILE] [--leave-out FLAG]… [--executable PATH] [--json]\n\n"
    "Reads a systemd unit that starts SGLang, and its drop-ins in FILE.d/, and shows the unit that starts ddtree in its place, with what\n"
    "is kept, changed, dropped and added, and why. Writes nothing unless --apply is given.\n\n"
    "  --from-unit FILE   the unit's file, or its name in /etc/systemd/system\n"
    "  --apply            write it; the old unit is kept as FILE.before-ddtree, which is never overwritten\n"
    "  --now              with --apply: also run systemctl daemon-reload and restart (start, with --to)\n"
    "  --to FILE          write a new unit there and leave the old one alone; FILE must not exist\n"
    "  --leave-out FLAG   do without a flag that ddtree refuses or does not know; may be given more than once\n"
    "  --executable PATH  what the unit starts (default: this executable)\n"
    "  --json             one JSON object on standard output\n\n"
    "Only SGLang's units are understood (python -m sglang.launch_server, sglang serve; with env, numactl, conda run, bash -c '…' or a\n"
    "start script around it), not vLLM's, llama.cpp's or containers.\n\n"
    "Exit codes: 0 shown or written; 64 the unit cannot be understood, or something is in the way (a flag, a file of that name), with or\n"
    "without --apply; 69 it could not be written, or with --now systemctl failed; 75 another install or rollback is at work there.\n";
const char* const kRollbackHelp =
    "usage: ddtree rollback FILE [--now] [--json]\n\n"
    "Brings back the unit that `ddtree install --apply` replaced: the same file, with its rights, owner and times. The ddtree unit is put\n"
    "aside as FILE.after-ddtree (.2, .3 … where that is taken). A unit that ddtree did not write stays where it is.\n\n"
    "  FILE    the unit's file, or its name in /etc/systemd/system\n"
    "  --now   also run systemctl daemon-reload and restart\n"
    "  --json  one JSON object on standard output\n\n"
    "Exit codes: 0 the old unit is back; 64 nothing to bring back, or another's unit is in its place; 69 the system refused (with --now "
    "also\n"
    "systemctl: the unit is back then); 75 another install or rollback is at work there.\n";

int fail(const char* command, const Status& status) {
  std::fprintf(stderr, "ddtree %s: %s\n", command, status.message().c_str());
  return exit_code(status.code());
}

// Where nothing else has been said yet. A program that asked for JSON gets JSON, whatever went wrong.
class Refusal {
 public:
  Refusal(const char* command, int argc, char** argv)
      : command_(command), json_(std::any_of(argv + 1, argv + argc, [](const char* a) { return std::string_view(a) == "--json"; })) {}
  int operator()(const Status& status) const {
    if (json_)
      fmt::print("{}\n", Json{{"written", false}, {"error", status.message()}}.dump(2, ' ', false, Json::error_handler_t::replace));
    std::fflush(stdout);
    return fail(command_, status);
  }

 private:
  const char* command_;
  bool json_;
};

std::optional<std::string> read_file(const std::string& path) {
  std::error_code none;
  if (!fs::is_regular_file(path, none)) return std::nullopt;
  std::ifstream in(path, std::ios::binary);
  std::ostringstream text;
  text << in.rdbuf();
  if (!in) return std::nullopt;
  return text.str();
}

std::optional<std::string> home_of(const std::string& user) {
  const passwd* entry = getpwnam(user.c_str());
  return entry && entry->pw_dir ? std::optional<std::string>(entry->pw_dir) : std::nullopt;
}

std::string own_path() {
  std::error_code none;
  const fs::path self = fs::read_symlink("/proc/self/exe", none);
  return none ? "/usr/bin/ddtree" : self.string();
}

// A name without a slash that is no file here is one of the machine's own units.
std::string unit_path(const std::string& given) {
  std::error_code none;
  std::string path = given;
  if (given.find('/') == std::string::npos && !fs::exists(fs::symlink_status(given, none))) {
    path = "/etc/systemd/system/" + given;
    if (!given.ends_with(".service")) path += ".service";
  }
  const fs::path whole = fs::absolute(path, none);
  return (none ? fs::path(path) : whole.lexically_normal()).string();
}
std::string unit_name(const std::string& path) { return fs::path(path).filename().string(); }

// An instance has to be named; the template itself cannot be started.
std::vector<std::vector<std::string>> systemctl_commands(const std::string& name, const char* verb) {
  std::vector<std::vector<std::string>> out = {{"systemctl", "daemon-reload"}};
  if (name.find("@.") == std::string::npos) out.push_back({"systemctl", verb, name});
  else out.push_back({"systemctl", verb, name.substr(0, name.find("@.") + 1) + "INSTANCE.service"});
  return out;
}
std::string text_of(const std::vector<std::string>& words) {
  std::string out;
  for (const std::string& w : words) out += (out.empty() ? "" : " ") + w;
  return out;
}

Status run(const std::vector<std::string>& words) {
  std::vector<char*> argv;
  for (const std::string& w : words) argv.push_back(const_cast<char*>(w.c_str()));
  argv.push_back(nullptr);
  pid_t pid = 0;
  // What systemctl says belongs to people, also where standard output is JSON.
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, STDERR_FILENO, STDOUT_FILENO);
  const int error = posix_spawnp(&pid, argv[0], &actions, nullptr, argv.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  if (error != 0) return {Code::kUnavailable, fmt::format("{}: {}", words[0], std::strerror(error))};
  int state = 0;
  while (waitpid(pid, &state, 0) < 0 && errno == EINTR) {
  }
  if (state != 0)
    return {Code::kUnavailable,
            fmt::format("`{}` failed ({})", text_of(words), WIFEXITED(state) ? fmt::format("exit {}", WEXITSTATUS(state)) : "killed")};
  return {};
}

// With --now, after the files are as they should be: what fails here leaves them so.
Status run_all(const std::vector<std::vector<std::string>>& commands) {
  for (const auto& words : commands) DDTREE_RETURN_IF_ERROR(run(words));
  return {};
}

void print_list(const char* title, const std::vector<UnitDifference>& list) {
  if (list.empty()) return;
  fmt::print("\n{}\n", title);
  for (const UnitDifference& d : list)
    fmt::print("  {:<8} {}{}{}\n", difference_name(d.kind), d.what, d.reason.empty() ? "" : "\n           ", d.reason);
}

Json list_json(const std::vector<UnitDifference>& list) {
  Json out = Json::array();
  for (const UnitDifference& d : list) out.push_back({{"kind", difference_name(d.kind)}, {"what", d.what}, {"reason", d.reason}});
  return out;
}

int install(int argc, char** argv) {
  const Refusal refuse("install", argc, argv);
  std::string from, to;
  MigrationOptions options;
  options.executable = own_path();
  bool apply = false, now = false, json = false, dry = false;
  for (int i = 1; i < argc; ++i) {
    std::string flag = argv[i], value;
    bool has_value = false;
    if (const size_t equal = flag.find('='); flag.starts_with("--") && equal != std::string::npos) {
      value = flag.substr(equal + 1);
      flag.resize(equal);
      has_value = true;
    }
    const auto need = [&](std::string* into) -> Status {
      if (!has_value && i + 1 >= argc) return {Code::kUsage, flag + " needs a value"};
      *into = has_value ? value : argv[++i];
      return into->empty() ? Status(Code::kUsage, flag + " needs a value") : Status();
    };
    Status status;
    if (flag == "--help" || flag == "-h") return std::fputs(kInstallHelp, stdout), 0;
    if (flag == "--apply") apply = true;
    else if (flag == "--now") now = true;
    else if (flag == "--json") json = true;
    else if (flag == "--dry-run") dry = true;
    else if (flag == "--from-unit") status = need(&from);
    else if (flag == "--to") status = need(&to);
    else if (flag == "--executable") status = need(&options.executable);
    else if (flag == "--leave-out") status = need(&options.leave_out.emplace_back());
    else status = {Code::kUsage, fmt::format("'{}' is no option of ddtree install; ddtree install --help lists them", argv[i])};
    if (!status.ok()) return refuse(status);
  }
  if (from.empty()) return refuse({Code::kUsage, "--from-unit FILE says which unit; ddtree install --help says more"});
  if (dry && apply) return refuse({Code::kUsage, "--dry-run and --apply exclude each other"});
  if (now && !apply) return refuse({Code::kUsage, "--now needs --apply"});
  if (options.executable[0] != '/')
    return refuse({Code::kUsage, fmt::format("--executable {}: must be an absolute path", options.executable)});

  options.source = unit_path(from);
  options.target = to.empty() ? options.source : unit_path(to);
  if (!to.empty() && to.find('/') == std::string::npos) options.target = "/etc/systemd/system/" + unit_name(to);
  if (!options.target.ends_with(".service")) return refuse({Code::kUsage, options.target + ": a unit's name ends in .service"});
  if (!to.empty() && options.target == options.source)
    return refuse({Code::kUsage, "--to names the old unit itself; without it that is replaced"});
  options.packaged_unit = std::string(embedded_file("packaging/systemd/ddtree.service").value_or(""));
  options.cuda = kHasCuda;
  options.read_file = read_file;
  options.home_of = home_of;

  auto before = read_unit(options.source);
  if (!before) return refuse(before.status());
  auto unit = UnitFile::parse(*before, options.source);
  if (!unit) return refuse(unit.status());
  std::vector<std::string> paths;
  std::error_code none;
  for (const auto& entry : fs::directory_iterator(options.source + ".d", none))
    if (entry.path().extension() == ".conf") paths.push_back(entry.path().string());
  std::sort(paths.begin(), paths.end());
  std::vector<UnitFile> drop_ins;
  for (const std::string& path : paths) {
    const auto text = read_file(path);
    if (!text) return refuse({Code::kUsage, path + " cannot be read"});
    auto parsed = UnitFile::parse(*text, path);
    if (!parsed) return refuse(parsed.status());
    drop_ins.push_back(std::move(*parsed));
  }
  auto migrated = migrate_unit(*unit, drop_ins, options);
  if (!migrated) return refuse(migrated.status());
  UnitMigration& m = *migrated;
  const bool in_place = to.empty();
  // A package's own file comes back with its next upgrade.
  if (in_place && (options.source.starts_with("/usr/lib/") || options.source.starts_with("/lib/")))
    m.blockers.push_back(fmt::format("{} belongs to a package; --to /etc/systemd/system/{} writes one that stands before it",
                                     options.source, unit_name(options.source)));
  // What --apply would meet is said before it is asked for.
  const auto free_path = [](const std::string& path) { return !fs::exists(fs::symlink_status(path)); };
  if (!in_place && !free_path(options.target)) m.blockers.push_back(options.target + " is there already; --to needs a name that is free");
  if (in_place)
    if (Status free = backup_free(options.source); !free.ok()) m.blockers.push_back(free.message());

  const std::string backup = in_place ? unit_backup_path(options.source) : "";
  const auto commands = systemctl_commands(unit_name(options.target), in_place ? "restart" : "start");
  Status status;
  bool written = false;
  if (apply && m.blockers.empty()) {
    status = in_place ? replace_unit(options.source, *before, m.text) : create_unit(options.target, m.text);
    written = status.ok();
    if (written && now) status = run_all(commands);
  }
  if (json) {
    Json systemctl = Json::array();
    for (const auto& words : commands) systemctl.push_back(text_of(words));
    const Json out = {{"source", options.source},
                      {"target", options.target},
                      {"server", "SGLang"},
                      {"command", m.command},
                      {"unit", m.text},
                      {"flags", list_json(m.flags)},
                      {"around", list_json(m.around)},
                      {"environment", list_json(m.environment)},
                      {"settings", list_json(m.settings)},
                      {"notes", m.notes},
                      {"blockers", m.blockers},
                      {"written", written},
                      {"backup", written && in_place ? Json(backup) : Json(nullptr)},
                      {"systemctl", systemctl},
                      {"error", status.ok() ? Json(nullptr) : Json(status.message())}};
    fmt::print("{}\n", out.dump(2, ' ', false, Json::error_handler_t::replace));
  } else {
    fmt::print("{} starts SGLang. The same service with ddtree:\n\n", options.source);
    std::istringstream lines(m.text);
    for (std::string line; std::getline(lines, line);) fmt::print("    {}\n", line);
    print_list("Flags", m.flags);
    print_list("Around the command", m.around);
    print_list("Environment", m.environment);
    print_list("Settings of the unit", m.settings);
    if (!m.notes.empty()) fmt::print("\nTo know\n");
    for (const std::string& note : m.notes) fmt::print("  {}\n", note);
    if (!m.blockers.empty()) fmt::print("\nIn the way\n");
    for (const std::string& b : m.blockers) fmt::print("  {}\n", b);
    fmt::print("\n");
    if (written) {
      fmt::print("{} is written.{}\n", options.target,
                 in_place ? fmt::format(" The old unit is {}; `ddtree rollback {}` brings it back.", backup, options.source)
                          : " The old unit is as it was.");
      if (!now) {
        fmt::print("Then:\n");
        for (const auto& words : commands) fmt::print("    {}\n", text_of(words));
      }
    } else if (m.blockers.empty() && status.ok()) {
      fmt::print("Nothing was written. --apply {}\n",
                 in_place ? "replaces the unit, and keeps the old one for `ddtree rollback`." : "writes it.");
    } else {
      fmt::print("Nothing was written.\n");
    }
  }
  std::fflush(stdout);
  if (!status.ok()) return fail("install", status);
  if (m.blockers.empty()) return 0;
  return fail("install", {Code::kUsage, (apply ? "not applied: " : "in the way: ") + m.blockers.front()});
}

int rollback(int argc, char** argv) {
  const Refusal refuse("rollback", argc, argv);
  std::string given;
  bool now = false, json = false;
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    if (flag == "--help" || flag == "-h") return std::fputs(kRollbackHelp, stdout), 0;
    if (flag == "--now") now = true;
    else if (flag == "--json") json = true;
    else if (flag.empty() || flag[0] == '-')
      return refuse({Code::kUsage, fmt::format("'{}' is no option of ddtree rollback; it has --now and --json", flag)});
    else if (!given.empty()) return refuse({Code::kUsage, fmt::format("one unit at a time: {} or {}", given, flag)});
    else given = flag;
  }
  if (given.empty()) return refuse({Code::kUsage, "which unit? ddtree rollback FILE"});
  const std::string unit = unit_path(given);
  auto done = rollback_unit(unit);
  if (!done) return refuse(done.status());
  const auto commands = systemctl_commands(unit_name(unit), "restart");
  const Status status = now ? run_all(commands) : Status();
  if (json) {
    Json systemctl = Json::array();
    for (const auto& words : commands) systemctl.push_back(text_of(words));
    const Json out = {{"unit", unit},
                      {"was_in_place", done->was_in_place},
                      {"put_aside", done->leftover.empty() ? Json(nullptr) : Json(done->leftover)},
                      {"systemctl", systemctl},
                      {"error", status.ok() ? Json(nullptr) : Json(status.message())}};
    fmt::print("{}\n", out.dump(2, ' ', false, Json::error_handler_t::replace));
  } else {
    fmt::print("{} is the old unit again{}\n", unit,
               done->was_in_place       ? " (it had not been replaced: an install was cut short)"
               : done->leftover.empty() ? ""
                                        : "; ddtree's is " + done->leftover);
    if (!now) {
      fmt::print("Then:\n");
      for (const auto& words : commands) fmt::print("    {}\n", text_of(words));
    }
  }
  std::fflush(stdout);
  return status.ok() ? 0 : fail("rollback", status);
}

}  // namespace

DDTREE_COMMAND("install", "what an SGLang unit becomes, and why; --apply puts it in place", install);
DDTREE_COMMAND("rollback", "bring back the unit that install replaced", rollback);

}  // namespace ddtree::cli
