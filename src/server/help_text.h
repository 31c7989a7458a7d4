// How flags stand in a command's help.
#pragma once

#include <string>
#include <vector>

namespace ddtree {

struct HelpEntry {
  const char* group;
  std::string left;  // "  --flag VALUE"
  const char* help;
};
// Each group once, in the order of its first entry, under its name; what a flag does is wrapped beside it.
std::string help_by_group(std::vector<HelpEntry> entries);

// Names one behind another, wrapped likewise.
std::string help_names(const std::vector<std::string>& names);

}  // namespace ddtree
