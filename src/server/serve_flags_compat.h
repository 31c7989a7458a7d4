// Flags of other servers' units that mean nothing here, or ask for what is not built. Private to serve_flags.cpp and its test.
#pragma once

#include <string>
#include <vector>

namespace ddtree {

struct CompatFlag {
  enum Arity { kSwitch, kValue, kList };
  std::vector<const char*> names;
  Arity arity = kValue;
  bool refuse = false;               // it changes capacity or results: exit 64 unless the value is neutral
  std::vector<const char*> neutral;  // values that ask for what happens anyway: no line
  const char* instead;
};

const CompatFlag* find_compat(const std::string& name);
std::vector<std::string> compat_flag_names();

}  // namespace ddtree
