// Finds SGLang's server in a unit's ExecStart=, whatever stands around it: env, numactl, conda run, bash -c '…', a start script. Private to
// migrate_unit.cpp and its test.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"
#include "server/units/unit_file.h"

namespace ddtree {

struct UnitDifference {
  enum Kind { kKept, kChanged, kDropped, kAdded, kRefused };
  Kind kind = kKept;
  std::string what;    // as the old unit has it (as the new one has it where added)
  std::string reason;  // empty: kept as it is
};
const char* difference_name(UnitDifference::Kind kind);  // "kept" …

struct LaunchCommand {
  std::vector<std::string> flags;                             // the words after the server's name, in a unit's writing ($NAME, %x, $$)
  Variables environment;                                      // what env, export and NAME=VALUE set on the way, variables expanded
  std::vector<std::pair<std::string, std::string>> settings;  // settings of [Service] that do what a wrapper did
  std::vector<UnitDifference> around;
};

// exec_start: the value of the setting. where: for messages. lookup: variables of the unit. read_file: start scripts. kUsage: another
// server (named), or what was found and cannot be read.
Result<LaunchCommand> find_launch_command(const std::string& exec_start, const std::string& where,
                                          const std::function<std::optional<std::string>(const std::string&)>& lookup,
                                          const std::function<std::optional<std::string>(const std::string&)>& read_file);

}  // namespace ddtree
