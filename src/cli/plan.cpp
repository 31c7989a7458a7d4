// `ddtree plan`: the memory plan that `ddtree serve` would follow, without loading anything and without a card.
#include "engine/plan.h"

#include <fmt/core.h>

#include <charconv>
#include <cmath>
#include <cstdio>
#include <utility>

#include "cli/command.h"
#include "cli/local_engine.h"
#include "model/pair.h"
#include "server/serving_plan.h"

namespace ddtree::cli {
namespace {

constexpr const char* kHelp =
    "usage: ddtree plan --model-config NAME|FILE [--draft-config NAME|FILE|none] [options] [flags of ddtree serve]\n"
    "       ddtree plan --model-path DIR [--speculative-draft-model-path DIR] [options] [flags of ddtree serve]\n\n"
    "Prints what `ddtree serve` with the same flags takes of its device, line by line, and what is left. Nothing is loaded; of a "
    "checkpoint\n"
    "only the headers are read. A plan that does not fit is shown with what it needs and the changes with which it fits.\n\n"
    "  --gpu-memory SIZE   of the card, as nvidia-smi shows it: 143771MiB, 96GiB, 80GB; or a6000, rtx-pro-6000, h100, h200.\n"
    "                      Default: with --device cuda the card of this machine, otherwise this machine's memory for the CPU engine\n"
    "  --json              one object on standard output, the same that a run's history holds\n\n"
    "Flags that count: --context-length --max-running-requests --max-total-tokens --kv-pages --page-size --mem-fraction-static\n"
    "--chunked-prefill-size --speculative-algorithm --speculative-ddtree-budget --speculative-num-steps --threads --device\n"
    "(ddtree serve --help).\n\n"
    "Exit codes: 0 it fits; 71 it does not (the table is printed all the same); 64 flags; 65 model files; 69 no card to ask.\n";

struct Card {
  const char* name;
  int64_t mib;
};
constexpr Card kCards[] = {{"a6000", 49140}, {"rtx-pro-6000", 97887}, {"h100", 81559}, {"h200", 143771}};  // as nvidia-smi shows them

Result<int64_t> card_bytes(const std::string& text) {
  for (const Card& card : kCards)
    if (text == card.name) return card.mib * kMiB;
  double n = 0;
  const char* end = text.data() + text.size();
  const auto [p, ec] = std::from_chars(text.data(), end, n);
  const std::string_view unit(p, static_cast<size_t>(end - p));
  const double scale = unit == "MiB" ? 1048576.0 : unit == "GiB" ? 1073741824.0 : unit == "MB" ? 1e6 : unit == "GB" ? 1e9 : 0;
  const double bytes = std::isfinite(n) ? n * scale : 0;
  if (ec != std::errc() || scale == 0 || bytes < 1048576.0 || bytes > 1e15)
    return Status(Code::kUsage, fmt::format("--gpu-memory {}: must be a size with its unit, as in 143771MiB, 96GiB or 80GB (1 MiB to "
                                            "1,000,000 GB), or a6000, rtx-pro-6000, h100 or h200",
                                            text));
  return static_cast<int64_t>(bytes) / kMiB * kMiB;
}

Result<PairFootprint> footprint_of(const ServiceOptions& o, ops::DeviceKind kind, std::string* name) {
  if (!o.model_config.empty()) {
    const auto specs = read_pair_specs(o.model_config, o.draft_config);
    if (!specs) return specs.status();
    *name = specs->name;
    return PairFootprint::of(*specs, kind, o.threads);
  }
  const std::string path = o.model_path.empty() ? std::string(kEmbeddedPair) : o.model_path;
  const auto pair = load_pair(path, o.draft_path.empty() ? std::nullopt : std::optional<std::string>(o.draft_path));
  if (!pair) return pair.status();
  *name = pair->name;
  return PairFootprint::of(*pair, kind, o.threads);
}

int plan(int argc, char** argv) {
  bool json = false, dummy = false, format = false;
  int64_t memory = 0;
  // serve's parser wants to hear that the shapes' weights are no checkpoint's; here that goes without saying.
  std::vector<char*> arguments(argv, argv + argc);
  std::string flag = "--load-format=dummy";
  for (int i = 1; i < argc; ++i) {
    const std::string_view word = argv[i];
    dummy |= word == "--model-config" || word.starts_with("--model-config=");
    format |= word == "--load-format" || word.starts_with("--load-format=");
  }
  if (dummy && !format) arguments.push_back(flag.data());
  const std::vector<OwnFlag> own = {{"--json", false, [&](const std::string&) { return json = true, Status(); }},
                                    {"--gpu-memory", true, [&](const std::string& value) {
                                       const auto bytes = card_bytes(value);
                                       if (bytes) memory = *bytes;
                                       return bytes.status();
                                     }}};
  auto split = split_arguments(static_cast<int>(arguments.size()), arguments.data(), own);
  if (!split) return fail("plan", split.status());
  if (split->help) return std::fputs(kHelp, stdout), 0;
  if (!split->words.empty())
    return fail("plan", {Code::kUsage, fmt::format("'{}' belongs to no flag; ddtree plan --help lists them", split->words.front())});
  const ServiceOptions& options = split->config.service;

  PlanDevice device{ops::DeviceKind::kCuda, memory, -1, "the card"};
  if (memory == 0) {
    const auto found = plan_device(options);
    if (!found) {
      const char* const cure = options.cuda_device >= 0 ? "; --gpu-memory SIZE plans for a card that is not here" : "";
      return fail("plan", {found.status().code(), found.status().message() + cure});
    }
    device = *found;
  }
  std::string name;
  const auto footprint = footprint_of(options, device.kind, &name);
  if (!footprint) return fail("plan", footprint.status());
  EngineOptions engine = options.engine;
  if (const Status s = settle_mode(options, footprint->drafter(), footprint->has_mtp(), name, &engine); !s.ok()) return fail("plan", s);
  const auto planned = plan_memory(*footprint, memory_request(options, engine, device));
  if (!planned) return fail("plan", planned.status());
  if (json) {
    fmt::print("{}\n", plan_json(*planned));
  } else {
    fmt::print("{}, {}, on {} of {} MiB\n\n", name, mode_name(engine.mode), device.name, with_commas(device.memory / kMiB));
    for (const std::string& line : plan_table(*planned)) fmt::print("{}\n", line);
  }
  if (planned->fits) return 0;
  std::fflush(stdout);
  const Status why = refusal(*planned);
  return fail("plan", {why.code(), name + " " + why.message()});
}

}  // namespace

DDTREE_COMMAND("plan", "what a model takes of a card's memory, without the card", plan);

}  // namespace ddtree::cli
