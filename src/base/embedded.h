// Files inside the executable (migrations/*.sql, web/*, models/tiny/*, packaging/systemd/*), by their path in the source tree.
#pragma once

#include <optional>
#include <string_view>
#include <vector>

namespace ddtree {

// The bytes of an embedded file, valid for the life of the process; nothing if there is none of that name.
// The byte after the last one is 0.
std::optional<std::string_view> embedded_file(std::string_view name);

// Names of embedded files that begin with prefix, sorted.
std::vector<std::string_view> embedded_files(std::string_view prefix);

}  // namespace ddtree
