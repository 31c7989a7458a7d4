#include "base/host_memory.h"

#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <string>

namespace ddtree {
namespace {

// A limit file's number; "max", an absent file or nonsense: no limit.
int64_t limit_in(const std::string& path) {
  std::ifstream in(path);
  int64_t bytes = 0;
  return in >> bytes && bytes > 0 ? bytes : INT64_MAX;
}

}  // namespace

int64_t host_memory_bytes() {
  int64_t bytes = int64_t{sysconf(_SC_PHYS_PAGES)} * sysconf(_SC_PAGESIZE);
  if (bytes <= 0) return 0;
  bytes = std::min(bytes, limit_in("/sys/fs/cgroup/memory/memory.limit_in_bytes"));  // the first version of control groups, in a container
  std::ifstream groups("/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    if (!line.starts_with("0::")) continue;
    // Every group above this one limits it too.
    for (std::string path = line.substr(3);; path.resize(path.rfind('/'))) {
      bytes = std::min(bytes, limit_in("/sys/fs/cgroup" + (path == "/" ? "" : path) + "/memory.max"));
      if (path.rfind('/') == std::string::npos || path.empty()) break;
    }
  }
  return bytes;
}

}  // namespace ddtree
