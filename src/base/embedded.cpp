#include "base/embedded.h"

#include <cstddef>

struct EmbeddedEntry {
  const char* name;
  const char* begin;
  std::size_t size;
};
// Written by cmake/embed.py; ends with an entry without a name.
extern "C" const EmbeddedEntry ddtree_embedded_table[];

namespace ddtree {

std::vector<std::string_view> embedded_files(std::string_view prefix) {
  std::vector<std::string_view> names;
  for (const EmbeddedEntry* e = ddtree_embedded_table; e->name != nullptr; ++e)
    if (std::string_view(e->name).starts_with(prefix)) names.emplace_back(e->name);
  return names;
}

std::optional<std::string_view> embedded_file(std::string_view name) {
  for (const EmbeddedEntry* e = ddtree_embedded_table; e->name != nullptr; ++e)
    if (name == e->name) return std::string_view(e->begin, e->size);
  return std::nullopt;
}

}  // namespace ddtree
