// How fast a checkpoint comes from its files to where it is computed with, beside how fast the same files are read: `bench --only load`.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>

#include "base/status.h"
#include "server/service.h"

namespace ddtree::cli {

struct LoadBenchOptions {
  int64_t bytes = 10'000'000'000;  // of the checkpoint that is written
  std::string folder;              // where; empty: a folder of its own below $TMPDIR or /tmp
  bool keep = false;               // else what was written is removed afterwards
  int32_t repeat = 3;              // reads and loads in turn; medians count
  int32_t readers = 0;             // threads of both; 0: the backend's choice, and 8 for reading
  bool cold = false;               // the files are dropped from the page cache before each
  int64_t buffer_bytes = 0;        // of one staging buffer; 0: the backend's choice
};

// Writes layers of BF16 matrices in shards with an index, or takes the ones that an earlier run with `keep` left there. Reads the files
// with as many threads into ordinary memory, and loads them into a backend (`service.cuda_device`, the CPU below 0) with the packings of a
// model's layers. Beside both stands the link to the card, which bounds a load from the page cache. Prints a table unless json is given.
// kStorage: no room for the files, naming folder, need and what is free.
Status bench_load(const ServiceOptions& service, const LoadBenchOptions& options, nlohmann::ordered_json* json);

}  // namespace ddtree::cli
