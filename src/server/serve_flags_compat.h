// Flags of other servers' units that mean nothing here, or ask for what is not built. Private to serve_flags.cpp and its test.
#pragma once

#include <string>
#include <vector>

namespace ddtree {

// What a value must look like. A flag that means nothing here is checked all the same: a unit with a slip in it is wrong everywhere.
struct CompatValue {
  enum Kind {
    kAny,     // paths, JSON
    kName,    // a word: backends are not listed, their names change with every release of the other servers
    kOneOf,   // one of `words`
    kWhole,   // a whole number from low to high
    kNumber,  // a number from low to high
    kAbove,   // a number above low, at most high
  };
  Kind kind = kAny;
  double low = 0, high = 0;
  std::vector<const char*> words;
};

struct CompatFlag {
  enum Arity { kSwitch, kValue, kList };
  std::vector<const char*> names;
  Arity arity = kValue;
  bool refuse = false;               // it changes capacity or results: exit 64 unless the value is neutral
  std::vector<const char*> neutral;  // values that ask for what happens anyway: no line
  const char* instead;
  CompatValue value;  // of kValue, and of each of kList

  // "" where `given` may be given; otherwise what it must be ("a number above 0 and at most 1"). A list is words between spaces.
  std::string wrong(const std::string& given) const;
};

const CompatFlag* find_compat(const std::string& name);
size_t edit_distance(const std::string& a, const std::string& b);  // letters to change, add or leave out
std::vector<std::string> compat_flag_names();

}  // namespace ddtree
