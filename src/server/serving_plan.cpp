#include "server/serving_plan.h"

#include <fmt/core.h>

#include <cmath>

#include "base/host_memory.h"
#include "nn/cpu_executor.h"
#include "nn/cuda_executor.h"
#include "server/json.h"

namespace ddtree {

Result<PlanDevice> plan_device(const ServiceOptions& options) {
  PlanDevice device;
  if (options.cuda_device < 0) {
    device.memory = host_memory_bytes();
    device.name = "this machine";
    if (device.memory <= 0) return Status(Code::kUnavailable, "the system does not say how much memory it has");
    if (options.tp_size > 1)
      device.memory /= options.tp_size, device.name = fmt::format("this machine, for each of {} ranks", options.tp_size);
    return device;
  }
  const auto card = card_memory(options.cuda_device);
  if (!card.ok()) return card.status();
  device.kind = ops::DeviceKind::kCuda;
  device.memory = card->total / kMiB * kMiB;
  // In coarse steps: what a driver has taken differs by a little from start to start, and the plan should not.
  constexpr int64_t kStep = 64 * kMiB;
  device.taken = (card->total - card->free + kStep - 1) / kStep * kStep;
  device.name = card->name;
  return device;
}

namespace {
template <class T>
Result<PairFootprint> footprint_of_either(const T& pair, const ServiceOptions& o, ops::DeviceKind kind) {
  const bool shared = kind == ops::DeviceKind::kCpu && o.tp_size > 1;
  auto out = PairFootprint::of(pair, kind, shared ? threads_of_rank(o.threads, o.tp_size) : o.threads, o.tp_size);
  if (!out.ok() && out.status().code() == Code::kUsage)
    return Status(Code::kUsage, fmt::format("--tp-size {}: {}", o.tp_size, out.status().message()));
  return out;
}
}  // namespace

Result<PairFootprint> footprint_of(const LoadedPair& pair, const ServiceOptions& options, ops::DeviceKind kind) {
  return footprint_of_either(pair, options, kind);
}
Result<PairFootprint> footprint_of(const PairSpecs& specs, const ServiceOptions& options, ops::DeviceKind kind) {
  return footprint_of_either(specs, options, kind);
}

Status settle_mode(const ServiceOptions& options, const DrafterSpec* drafter, bool has_mtp, const std::string& model,
                   EngineOptions* engine) {
  if (!options.mode_given) engine->mode = drafter ? SpeculationMode::kDdtree : SpeculationMode::kNone;
  const bool needs_drafter = engine->mode == SpeculationMode::kDflash || engine->mode == SpeculationMode::kDdtree;
  const std::string instead = has_mtp ? "this checkpoint has an MTP head, so NEXTN works too" : "NONE works without one";
  if (needs_drafter && !drafter)
    return {Code::kUsage, fmt::format("--speculative-algorithm {} needs a drafter: give --speculative-draft-model-path DIR; {}",
                                      mode_name(engine->mode), instead)};
  if (engine->mode == SpeculationMode::kNextn && !has_mtp)
    return {Code::kUsage, fmt::format("--speculative-algorithm NEXTN needs an MTP head, which {} has not; {}", model,
                                      drafter ? "DDTREE works with the drafter given" : "NONE works")};
  if (drafter && engine->block_size > drafter->block_size)
    return {Code::kUsage, fmt::format("a block of {} (--speculative-dflash-block-size, --speculative-num-draft-tokens) is more than this "
                                      "drafter's block of {}; give at most that",
                                      engine->block_size, drafter->block_size)};
  return {};
}

MemoryRequest memory_request(const ServiceOptions& options, const EngineOptions& engine, const PlanDevice& device) {
  MemoryRequest r;
  r.engine = engine;
  r.page_size = options.page_size;
  r.pages = options.pages;
  r.fraction = options.mem_fraction;
  r.memory = device.memory;
  r.taken = device.taken;
  r.device_name = device.name;
  const bool drafts = engine.mode == SpeculationMode::kDflash || engine.mode == SpeculationMode::kDdtree;
  r.without_drafter = options.model_config.empty() ? "no --speculative-draft-model-path" : "--draft-config none";
  if (options.mode_given && drafts) r.without_drafter += " --speculative-algorithm NONE";
  return r;
}

std::string plan_json(const MemoryPlan& plan) {
  const auto mib = [](int64_t bytes) { return std::round(static_cast<double>(bytes) / static_cast<double>(kMiB) * 10) / 10; };
  Json rows = Json::array();
  for (const PlanRow& row : plan.rows)
    rows.push_back(Json{{"name", row.name}, {"label", row.label}, {"mib", mib(row.bytes)}, {"detail", row.detail}});
  Json out{{"fits", plan.fits},
           {"device", plan.request.device_name},
           {"tp_size", plan.ranks},
           {"memory_mib", mib(plan.request.memory)},
           {"mem_fraction", plan.request.fraction},
           {"limit_mib", mib(plan.limit)},
           {"need_mib", mib(plan.need)},
           {"left_mib", mib(plan.left())},
           {"pinned_host_mib", mib(plan.pinned)},
           {"context_length", plan.request.engine.context_length},
           {"max_running", plan.request.engine.max_running},
           {"kv_pages", plan.executor.pages},
           {"page_size", plan.executor.page_size},
           {"kv_tokens", plan.kv_tokens()},
           {"state_slots", plan.executor.slots},
           {"pass_rows", plan.executor.max_rows},
           {"rows", std::move(rows)}};
  if (!plan.fits) {
    Json cures = Json::array();
    for (const MemoryCure& c : plan.cures) cures.push_back(c.text);
    out["refusal"] = refusal(plan).message();
    out["cures"] = std::move(cures);
  }
  return dump_json(out);
}

}  // namespace ddtree
