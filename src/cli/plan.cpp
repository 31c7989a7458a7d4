// `ddtree plan`: the memory plan that `ddtree serve` would follow, without loading anything and without a card.
#include "engine/plan.h"

#include <fmt/core.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <functional>
#include <utility>
#include <vector>

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
    "  --tp-size N,…       the plan of each of N ranks that share the target, on cards of their own; several numbers: side by side.\n"
    "                      Of this machine's memory for the CPU engine, where ranks are in one process, each has an equal part\n"
    "  --json              one object on standard output, the same that a run's history holds; for several --tp-size: an array of them\n\n"
    "Flags that count: --context-length --max-running-requests --max-total-tokens --kv-pages --page-size --mem-fraction-static\n"
    "--chunked-prefill-size --speculative-algorithm --speculative-ddtree-budget --speculative-num-steps --threads --device\n"
    "(ddtree serve --help).\n\n"
    "Exit codes: 0 it fits, of several at least one; 71 it does not (the table is printed all the same); 64 flags; 65 model files; 69 no "
    "card to ask.\n";

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

Result<PairFootprint> read_footprint(const ServiceOptions& o, ops::DeviceKind kind, std::string* name) {
  if (!o.model_config.empty()) {
    const auto specs = read_pair_specs(o.model_config, o.draft_config);
    if (!specs) return specs.status();
    *name = specs->name;
    return footprint_of(*specs, o, kind);
  }
  const std::string path = o.model_path.empty() ? std::string(kEmbeddedPair) : o.model_path;
  const auto pair = load_pair(path, o.draft_path.empty() ? std::nullopt : std::optional<std::string>(o.draft_path));
  if (!pair) return pair.status();
  *name = pair->name;
  return footprint_of(*pair, o, kind);
}

// "1,2,4": rank counts.
Status read_ranks(const std::string& value, std::vector<int32_t>* out) {
  out->clear();
  for (size_t at = 0; at <= value.size();) {
    const size_t end = std::min(value.find(',', at), value.size());
    int32_t n = 0;
    const auto [p, ec] = std::from_chars(value.data() + at, value.data() + end, n);
    if (ec != std::errc() || p != value.data() + end || n < 1 || n > kMostRanks)
      return {Code::kUsage, fmt::format("--tp-size {}: must be numbers of ranks from 1 to {}, as in 2 or 1,2,4,8", value, kMostRanks)};
    out->push_back(n);
    at = end + 1;
  }
  return {};
}

struct Planned {
  PlanDevice device;
  std::string name;
  EngineOptions engine;
  MemoryPlan plan;
};

Result<Planned> plan_of(const ServiceOptions& options, int64_t card_memory) {
  Planned out;
  const bool ranks = options.tp_size > 1;
  out.device = {ops::DeviceKind::kCuda, card_memory, -1, ranks ? "a rank's card" : "the card"};
  if (card_memory == 0) {
    const auto found = plan_device(options);
    if (!found) {
      const char* const cure = options.cuda_device >= 0 ? "; --gpu-memory SIZE plans for a card that is not here" : "";
      return {found.status().code(), found.status().message() + cure};
    }
    out.device = *found;
  }
  const auto footprint = read_footprint(options, out.device.kind, &out.name);
  if (!footprint) return footprint.status();
  out.engine = options.engine;
  DDTREE_RETURN_IF_ERROR(settle_mode(options, footprint->drafter(), footprint->has_mtp(), out.name, &out.engine));
  auto planned = plan_memory(*footprint, memory_request(options, out.engine, out.device));
  if (!planned) return planned.status();
  out.plan = std::move(*planned);
  return out;
}

// One column a number of ranks; rows by name, in the order of the last plan: more ranks have all that fewer have.
void print_side_by_side(const std::vector<Planned>& all) {
  const auto line = [&](const std::string& label, const std::function<std::string(const MemoryPlan&)>& cell) {
    std::string text = fmt::format("{:<26}", label);
    for (const Planned& p : all) text += fmt::format(" {:>12}", cell(p.plan));
    fmt::print("{}\n", text);
  };
  fmt::print("{}, {}, on {} of {} MiB; MiB that each rank takes\n\n", all[0].name, mode_name(all[0].engine.mode), all[0].device.name,
             with_commas(all[0].device.memory / kMiB));
  line("ranks", [](const MemoryPlan& p) { return fmt::format("{}", p.ranks); });
  std::vector<std::pair<std::string, std::string>> rows;
  for (auto p = all.rbegin(); p != all.rend(); ++p)
    for (const PlanRow& row : p->plan.rows)
      if (std::none_of(rows.begin(), rows.end(), [&](const auto& r) { return r.first == row.name; }))
        rows.emplace_back(row.name, row.label);
  for (const auto& [name, label] : rows)
    line(label, [&](const MemoryPlan& p) {
      for (const PlanRow& row : p.rows)
        if (row.name == name) return mib_text(row.bytes);
      return std::string("-");
    });
  line("sum", [](const MemoryPlan& p) { return mib_text(p.need); });
  line("may be used", [](const MemoryPlan& p) { return mib_text(p.limit); });
  line("tokens in KV pages", [](const MemoryPlan& p) { return with_commas(p.kv_tokens()); });
  line("", [](const MemoryPlan& p) { return std::string(p.fits ? "fits" : "does not fit"); });
}

int plan(int argc, char** argv) {
  bool json = false, dummy = false, format = false, card = false, device = false;
  int64_t memory = 0;
  std::vector<int32_t> ranks = {1};
  // serve's parser wants to hear that the shapes' weights are no checkpoint's; here that goes without saying.
  std::vector<char*> arguments(argv, argv + argc);
  std::string flag = "--load-format=dummy", on_card = "--device=cuda";
  for (int i = 1; i < argc; ++i) {
    const std::string_view word = argv[i];
    dummy |= word == "--model-config" || word.starts_with("--model-config=");
    format |= word == "--load-format" || word.starts_with("--load-format=");
    card |= word == "--gpu-memory" || word.starts_with("--gpu-memory=");
    device |= word == "--device" || word.starts_with("--device=");
  }
  if (dummy && !format) arguments.push_back(flag.data());
  // A card's defaults (rows of a prompt's chunk) are another device's otherwise, and the plan would not be the one that serve follows
  // there.
  if (card && !device) arguments.push_back(on_card.data());
  // Not serve's: a plan needs no such cards, nor a build that can use them.
  const auto take_ranks = [&](const std::string& value) { return read_ranks(value, &ranks); };
  const std::vector<OwnFlag> own = {{"--json", false, [&](const std::string&) { return json = true, Status(); }},
                                    {"--tp-size", true, take_ranks},
                                    {"--tp", true, take_ranks},
                                    {"--tensor-parallel-size", true, take_ranks},
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
  ServiceOptions& options = split->config.service;

  std::vector<Planned> all;
  for (const int32_t n : ranks) {
    options.tp_size = n;
    auto planned = plan_of(options, memory);
    if (!planned) return fail("plan", planned.status());
    all.push_back(std::move(*planned));
  }
  if (json) {
    std::string text;
    for (const Planned& p : all) text += (text.empty() ? "" : ",\n ") + plan_json(p.plan);
    fmt::print("{}\n", all.size() == 1 ? text : "[" + text + "]");
  } else if (all.size() > 1) {
    print_side_by_side(all);
  } else {
    fmt::print("{}, {}, on {} of {} MiB\n\n", all[0].name, mode_name(all[0].engine.mode), all[0].device.name,
               with_commas(all[0].device.memory / kMiB));
    for (const std::string& line : plan_table(all[0].plan)) fmt::print("{}\n", line);
  }
  if (std::any_of(all.begin(), all.end(), [](const Planned& p) { return p.plan.fits; })) return 0;
  std::fflush(stdout);
  const Status why = refusal(all.back().plan);
  return fail("plan", {why.code(), all.back().name + " " + why.message()});
}

}  // namespace

DDTREE_COMMAND("plan", "what a model takes of a card's memory, without the card", plan);

}  // namespace ddtree::cli
