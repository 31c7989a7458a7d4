// The memory plan: every allocation of a pair on its device, from shapes and options alone, before anything is loaded. The figures come
// from the executor's own set-up code (nn/footprint.h); serve takes page and slot counts from here, so what is planned is what is taken.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"
#include "engine/engine.h"
#include "nn/footprint.h"

namespace ddtree {

inline constexpr double kDefaultFraction = 0.95;  // of the device's memory
inline constexpr double kLargestFraction = 0.99;
inline constexpr int64_t kMiB = int64_t{1} << 20;

struct MemoryRequest {
  EngineOptions engine;  // context_length 0: the model's own
  int32_t page_size = 32;
  int32_t pages = 0;    // 0: as many as fit, at most those of max_running sequences of full length
  double fraction = 0;  // of `memory` that the plan may come to, all of it (--mem-fraction-static); 0: kDefaultFraction
  int64_t memory = 0;   // the device's, bytes
  int64_t taken = -1;   // of it before anything is loaded: driver, CUDA context, other processes; -1: what they usually take
  std::string without_drafter = "no drafter";  // how the caller's user would leave it out
  std::string device_name;                     // for messages: "the card", "NVIDIA H200", "this machine"
};

struct PlanRow {
  std::string name;    // for JSON: "target_kv"
  std::string label;   // "KV pages, target"
  std::string detail;  // the arithmetic: "64 KiB a token × 262,144 tokens"
  int64_t bytes = 0;
};

// One change to the request with which it fits, found by planning it.
struct MemoryCure {
  std::string text;  // "--context-length 65536"
  MemoryRequest request;
  bool without_drafter = false;
};

struct MemoryPlan {
  MemoryRequest request;          // with context_length and fraction as they hold
  ExecutorOptions executor;       // pages, slots, rows: what the executor is made with
  std::vector<PlanRow> rows;      // of the device; none is empty
  int64_t need = 0;               // their sum
  int64_t limit = 0;              // fraction · memory
  int64_t pinned = 0;             // host memory that the device reads
  int32_t ranks = 1;              // it is the plan of each of so many
  bool fits = false;              // need <= limit
  std::vector<MemoryCure> cures;  // where it does not: what would, the least change first. Never empty

  int64_t kv_tokens() const { return int64_t{executor.pages} * executor.page_size; }
  int64_t left() const { return request.memory - need; }
};

// kUsage: options that no memory would satisfy (a context longer than the model's, pages that do not hold one sequence), naming the flag.
// A plan that does not fit is no error here: see refusal().
Result<MemoryPlan> plan_memory(const PairFootprint& footprint, const MemoryRequest& request);

// Ok, or kDoesNotFit: what is needed, what there is, and the first change that fits.
Status refusal(const MemoryPlan& plan);

// The rows as a table of lines without line ends, in MiB; and in one line, for STATUS=.
std::vector<std::string> plan_table(const MemoryPlan& plan);
std::string plan_sentence(const MemoryPlan& plan);

// What the rows are made of; plan.cpp sums it. Internal, here for tests.
std::vector<PlanRow> plan_rows(const PairFootprint& footprint, const MemoryRequest& request, const ExecutorOptions& executor,
                               const ops::MemoryLedger& ledger);
std::string with_commas(int64_t n);
std::string mib_text(int64_t bytes);         // "1,234.5"
std::string fraction_text(double fraction);  // "0.90"; as it is where it has more digits

}  // namespace ddtree
