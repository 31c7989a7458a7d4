// systemd unit files as systemd reads them (systemd.syntax(7)): sections, continued lines, lists that an empty value resets, and the
// quoting of command lines and variables. %-specifiers stay as they are written.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"

namespace ddtree {

struct UnitSetting {
  std::string section;  // without brackets
  std::string name;
  std::string value;  // continued lines joined by one space each; no space at either end
  std::string path;   // the file it stands in, and the line where it begins (from 1)
  int line = 0;
};

class UnitFile {
 public:
  // path is for messages. kUsage names file and line: a line that is no setting, one outside a section, a section that is not closed.
  static Result<UnitFile> parse(const std::string& text, const std::string& path);

  // A drop-in's settings come after these.
  void add(const UnitFile& drop_in);

  const std::vector<UnitSetting>& settings() const { return settings_; }
  // The settings in force: those after the last empty value.
  std::vector<UnitSetting> values(const std::string& section, const std::string& name) const;
  // Of a setting that takes one value: the last; empty where there is none.
  std::string value(const std::string& section, const std::string& name) const;

 private:
  std::vector<UnitSetting> settings_;
};

// The words of a command line: split at spaces, single and double quotes, C escapes. $NAME and %x are left alone. kUsage: an open quote,
// a backslash at the end. Escapes that are none stay.
Result<std::vector<std::string>> split_unit_words(const std::string& text);

// One word so that split_unit_words gives it back, with quotes only where they are needed.
std::string quote_unit_word(const std::string& word);

// Text from elsewhere, so that a unit takes none of it for a %-specifier.
std::string without_specifiers(const std::string& text);

using Variables = std::vector<std::pair<std::string, std::string>>;
// NAME=VALUE words of an Environment= setting; words of another form are kUsage.
Result<Variables> parse_environment(const std::string& value);
// Lines of an EnvironmentFile=. Lines that are no assignment are passed over, as systemd does.
Variables parse_environment_file(const std::string& text);
// The last of that name.
std::optional<std::string> find_variable(const Variables& variables, const std::string& name);

}  // namespace ddtree
