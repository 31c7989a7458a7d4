// The flags that `run` and `bench` share, and the engine that they start: the same flags and the same loading as `ddtree serve`.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "server/serve_flags.h"
#include "server/service.h"

namespace ddtree::cli {

// Splits a command's arguments. `own` is asked first: it returns how many arguments after a flag it takes (0 or 1) and is given the value,
// or -1 for a flag that is not its own; those go on to serve's parser, after short names (--mode, --budget, --draft) are spelled out.
// Arguments that belong to no flag are `words`.
struct SplitArguments {
  ServeConfig config;
  std::vector<std::string> words;
  bool help = false;
};
struct OwnFlag {
  const char* name;
  bool takes_value;
  std::function<Status(const std::string& value)> take;
};
Result<SplitArguments> split_arguments(int argc, char** argv, const std::vector<OwnFlag>& own);  // argv[0]: the command, for messages

// "8" -> 8 within bounds; the error names the flag.
Result<double> number_of(const std::string& flag, const std::string& value, double low, double high);

// "none", "dflash", "nextn", "ddtree", "ddtree:32" (1 to 256, as --speculative-ddtree-budget), "ddtree:auto" (any case).
struct ModeChoice {
  SpeculationMode mode = SpeculationMode::kNone;
  int32_t budget = 0;
  std::string name;  // "DDTREE 32"
};
Result<ModeChoice> mode_choice(const std::string& text);

// Status to a line on standard error and an exit code (a wrong argument is exit 64).
int fail(const char* command, const Status& status);

}  // namespace ddtree::cli
