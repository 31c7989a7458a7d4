// From a unit that starts SGLang to the one that starts ddtree in its place, with a reason for each difference. Pure: reads nothing but
// what it is given.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "base/status.h"
#include "server/units/launch_command.h"
#include "server/units/unit_file.h"

namespace ddtree {

struct UnitMigration {
  std::vector<std::string> command;    // the new ExecStart's words, in a unit's writing: $NAME, %x and $$ unexpanded
  std::vector<UnitDifference> flags;   // in the order of the old command line, then what was added
  std::vector<UnitDifference> around;  // what stood around the command: env, shell, numactl …
  std::vector<UnitDifference> environment;
  std::vector<UnitDifference> settings;  // of all sections
  std::vector<std::string> notes;        // what differs without any line of the unit saying so
  std::vector<std::string> blockers;     // why the new unit may not replace the old one yet, each with what would help
  std::string text;                      // the new unit
};

struct MigrationOptions {
  std::string source;         // the old unit's file
  std::string target;         // the new unit's: the same, or one beside it
  std::string packaged_unit;  // packaging/systemd/ddtree.service
  std::string executable = "/usr/bin/ddtree";
  bool cuda = false;                   // this executable has a CUDA engine
  std::vector<std::string> leave_out;  // refused or unknown flags that the user agrees to lose
  // A file's text: start scripts and environment files. Nothing where it cannot be read.
  std::function<std::optional<std::string>(const std::string& path)> read_file;
  // Home folder of a user of this machine; nothing where there is none.
  std::function<std::optional<std::string>(const std::string& user)> home_of;
};

// drop_ins: FILE.d/*.conf in order. They stay in force for a unit that is replaced, and are taken over into one beside it. kUsage: what the
// unit starts is not SGLang, or cannot be read; the message says what was found and where.
Result<UnitMigration> migrate_unit(const UnitFile& unit, const std::vector<UnitFile>& drop_ins, const MigrationOptions& options);

}  // namespace ddtree
