#include "server/help_text.h"

#include <algorithm>
#include <string_view>

namespace ddtree {
namespace {

constexpr size_t kBeside = 38, kColumns = 108;

std::string wrapped(const std::string& left, const char* help) {
  std::string line = left.size() < kBeside ? left + std::string(kBeside - left.size(), ' ') : left + "\n" + std::string(kBeside, ' ');
  size_t column = kBeside;
  std::string word;
  for (const char* p = help;; ++p) {
    if (*p && *p != ' ') {
      word += *p;
      continue;
    }
    if (column + word.size() > kColumns) {
      while (line.back() == ' ') line.pop_back();
      line += "\n" + std::string(kBeside, ' ');
      column = kBeside;
    }
    line += word + " ";
    column += word.size() + 1;
    word.clear();
    if (!*p) break;
  }
  while (!line.empty() && line.back() == ' ') line.pop_back();
  return line + "\n";
}

}  // namespace

std::string help_by_group(std::vector<HelpEntry> entries) {
  std::vector<std::string_view> groups;
  const auto place = [&](const HelpEntry& e) { return std::find(groups.begin(), groups.end(), e.group) - groups.begin(); };
  for (const HelpEntry& e : entries)
    if (place(e) == static_cast<std::ptrdiff_t>(groups.size())) groups.emplace_back(e.group);
  std::stable_sort(entries.begin(), entries.end(), [&](const HelpEntry& a, const HelpEntry& b) { return place(a) < place(b); });
  std::string out;
  std::string_view group;
  for (const HelpEntry& e : entries) {
    if (group != e.group) {
      group = e.group;
      out += "\n" + std::string(group) + "\n";
    }
    out += wrapped(e.left, e.help);
  }
  return out;
}

std::string help_names(const std::vector<std::string>& names) {
  std::string out, line = " ";
  for (const std::string& name : names) {
    if (line.size() + name.size() > kColumns) {
      out += line + "\n";
      line = " ";
    }
    line += " " + name;
  }
  return out + line + "\n";
}

}  // namespace ddtree
