// A subcommand of the executable. Each file of src/cli/ registers its own with DDTREE_COMMAND.
#pragma once

#include <vector>

namespace ddtree::cli {

struct Command {
  const char* name;
  const char* summary;                // one line for `ddtree --help`
  int (*run)(int argc, char** argv);  // argv[0] is the subcommand's name; returns the process's exit code
};

std::vector<Command>& commands();

struct Registration {
  Registration(const char* name, const char* summary, int (*run)(int, char**)) { commands().push_back({name, summary, run}); }
};

#define DDTREE_COMMAND(name, summary, function) static const ::ddtree::cli::Registration registration_of_##function(name, summary, function)

}  // namespace ddtree::cli
