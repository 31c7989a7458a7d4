// The part of the POSIX shell's language that start scripts of servers use: simple commands one after the other, variables, quotes,
// redirections. What needs a shell to know (loops, pipes, subshells) is refused by name, never guessed; $(…) and `…` stay in the word as
// they are written, so that only who uses that word has to refuse it.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"

namespace ddtree {

struct ShellCommand {
  int line = 1;                                                  // within the script
  std::vector<std::pair<std::string, std::string>> assignments;  // NAME=VALUE before the words (or alone)
  std::vector<std::string> words;         // unquoted, in a unit's writing: ${NAME} is a variable of unknown value, $$ a dollar
  std::vector<std::string> redirections;  // as ">>/var/log/x", "2>&1"
  std::string text;                       // as it is written, spaces squeezed
  bool fallback = false;                  // stands after ||: runs where the one before failed
};

// lookup: a variable of the unit; assignments and exports within the script come first. Such a variable stays ${NAME}, except where it is
// unquoted and has spaces: then its words are written out, as the shell would. kUsage: "where:line: what was found".
Result<std::vector<ShellCommand>> parse_shell_script(const std::string& text, const std::string& where,
                                                     const std::function<std::optional<std::string>(const std::string&)>& lookup);

}  // namespace ddtree
