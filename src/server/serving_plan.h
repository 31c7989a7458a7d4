// From the command line to the memory plan: for serve before it loads, and for `ddtree plan`.
#pragma once

#include "base/status.h"
#include "engine/plan.h"
#include "server/service.h"

namespace ddtree {

// The device that the plan is for.
struct PlanDevice {
  ops::DeviceKind kind = ops::DeviceKind::kCpu;
  int64_t memory = 0, taken = -1;  // MemoryRequest's
  std::string name;
};
// --device's: this machine's memory (with --tp-size its equal part for each rank, which are all in this process), or what a card's driver
// says. Errors are card_memory()'s.
Result<PlanDevice> plan_device(const ServiceOptions& options);

// What the pair takes of the device, of each rank where there are several. kUsage: they cannot share it.
Result<PairFootprint> footprint_of(const LoadedPair& pair, const ServiceOptions& options, ops::DeviceKind kind);
Result<PairFootprint> footprint_of(const PairSpecs& specs, const ServiceOptions& options, ops::DeviceKind kind);

// The mode where the command line gives none, and whether the pair can do what it gives. `model`: its name, for the message.
Status settle_mode(const ServiceOptions& options, const DrafterSpec* drafter, bool has_mtp, const std::string& model,
                   EngineOptions* engine);

// What plan_memory() is asked. `engine` is settled.
MemoryRequest memory_request(const ServiceOptions& options, const EngineOptions& engine, const PlanDevice& device);

// For the history, /admin/api/status and `ddtree plan --json`.
std::string plan_json(const MemoryPlan& plan);

}  // namespace ddtree
