// What the stages of a round cost on this device, beside what the device could do: the second half of `ddtree bench`.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "base/status.h"
#include "server/service.h"

namespace ddtree::cli {

struct StageOptions {
  std::vector<int32_t> contexts = {1024};
  std::vector<int32_t> batches = {1};
  std::vector<int32_t> rows = {1, 16, 32, 64, 128};  // of one sequence's tree, the root included
  int32_t repeat = 9;                                // the median counts, after one warm-up
  bool ops = false;                                  // each op by itself too
};

// Loads the pair that the flags name (checkpoint, or dummy weights), fills contexts with prompts and times the passes of a round by
// themselves: one plain step, the draft, a random tree's verification for each number of rows, the commit of a path of five with the
// drafter's feeding. Prints tables unless json is given, into which everything goes instead.
Status bench_stages(const ServiceOptions& service, const StageOptions& options, nlohmann::ordered_json* json);

}  // namespace ddtree::cli
