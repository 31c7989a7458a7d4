// The plan's table: one row a kind of allocation, with the arithmetic in words.
#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "engine/plan.h"
#include "model/shard.h"
#include "ops/cuda/layout.h"

namespace ddtree {
namespace {

using ops::MemoryOwner;
using ops::MemoryUse;

// What the driver, a CUDA context and this executable's kernels take before the first allocation. `serve` measures it; a plan without the
// card reckons with the most seen. Of what nvidia-smi shows, 470 (A6000) to 640 MiB (RTX PRO 6000) are never free, and a context takes 400
// to 600.
constexpr int64_t kUsuallyTaken = 1280 * kMiB;
// For what comes after the plan: kernels loaded on first use, their local memory, graphs, events. On the CPU: the process itself, its
// tokenizer, connections and history.
constexpr int64_t kRuntime = 256 * kMiB;
// What a library for collectives keeps for its channels on each card, an estimate.
constexpr int64_t kCollectives = 256 * kMiB;

std::string per(int64_t count, const char* what, int64_t bytes) {
  const double each = count > 0 ? static_cast<double>(bytes) / static_cast<double>(count) : 0;
  const std::string size = each >= 2 * 1024 * 1024 ? fmt::format("{:.1f} MiB", each / (1024 * 1024))
                           : each >= 1024          ? fmt::format("{:.1f} KiB", each / 1024)
                                                   : fmt::format("{:.0f} B", each);
  return fmt::format("{} {}s × {}", with_commas(count), what, size);
}

}  // namespace

std::string with_commas(int64_t n) {
  const std::string digits = fmt::format("{}", std::abs(n));
  std::string out = n < 0 ? "-" : "";
  for (size_t i = 0; i < digits.size(); ++i) {
    if (i > 0 && (digits.size() - i) % 3 == 0) out += ',';
    out += digits[i];
  }
  return out;
}

std::string mib_text(int64_t bytes) {
  const int64_t tenths = (bytes * 10 + (bytes < 0 ? -kMiB / 2 : kMiB / 2)) / kMiB;
  return fmt::format("{}.{}", with_commas(tenths / 10), std::abs(tenths % 10));
}

std::string fraction_text(double fraction) {
  const double hundredths = fraction * 100;
  return std::abs(hundredths - std::round(hundredths)) < 1e-6 ? fmt::format("{:.2f}", fraction) : fmt::format("{:g}", fraction);
}

std::vector<PlanRow> plan_rows(const PairFootprint& footprint, const MemoryRequest& request, const ExecutorOptions& e,
                               const ops::MemoryLedger& ledger) {
  const ModelSpec& s = footprint.target();
  const DrafterSpec* d = footprint.drafter();
  const bool cuda = footprint.kind() == ops::DeviceKind::kCuda;
  const int64_t tokens = int64_t{e.pages} * e.page_size;
  std::vector<PlanRow> rows;
  const auto add = [&](const char* name, const char* label, int64_t bytes, std::string detail) {
    if (bytes > 0) rows.push_back({name, label, std::move(detail), bytes});
  };
  const auto of = [&](MemoryOwner owner, MemoryUse use) { return ledger.bytes(owner, use); };

  if (cuda) {
    const bool measured = request.taken >= 0;
    add("taken", "driver and CUDA context", measured ? request.taken : kUsuallyTaken,
        measured ? "taken before loading, other processes included" : "an estimate; serve measures it");
  }
  const int64_t embedding = of(MemoryOwner::kEmbedding, MemoryUse::kWeights);
  // The last rank's, which no other has more than.
  const int32_t ranks = footprint.ranks();
  const int64_t vocab = share_rows(s.vocab_size, ranks, ranks - 1).count;
  const std::string part = ranks > 1 ? fmt::format(", 1 of {} parts", ranks) : "", whole = ranks > 1 ? ", whole on every rank" : "";
  add("embedding_weights", "embedding", embedding, fmt::format("{} × {}{}", with_commas(vocab), with_commas(s.hidden_size), part));
  const int64_t full = std::count(s.layers.begin(), s.layers.end(), LayerKind::kFullAttention);
  add("target_weights", "target's layers", of(MemoryOwner::kTarget, MemoryUse::kWeights),
      fmt::format("{} gated-delta + {} full{}", s.num_layers() - full, full, part));
  add("head_weights", "LM head", of(MemoryOwner::kHead, MemoryUse::kWeights), "untied" + part);
  add("mtp_weights", "MTP head", of(MemoryOwner::kMtp, MemoryUse::kWeights), "one layer" + part);
  add("drafter_weights", "drafter", of(MemoryOwner::kDrafter, MemoryUse::kWeights),
      d ? fmt::format("{} layers, {} taps{}", d->layers.size(), d->taps.size(), whole) : "");

  const auto kv = [&](const char* name, const char* label, MemoryOwner owner) {
    const int64_t bytes = of(owner, MemoryUse::kKvPages);
    add(name, label, bytes, per(tokens, "token", bytes));
  };
  kv("target_kv", "KV pages, target", MemoryOwner::kTarget);
  kv("mtp_kv", "KV pages, MTP head", MemoryOwner::kMtp);
  kv("drafter_kv", "KV pages, drafter", MemoryOwner::kDrafter);
  const int64_t states = of(MemoryOwner::kTarget, MemoryUse::kStates);
  add("states", "recurrent states", states, per(e.slots, "slot", states));

  const int64_t trace = of(MemoryOwner::kTarget, MemoryUse::kTrace);
  add("factors", "delta-rule factors", trace, per(cuda ? e.max_tentative_rows : e.max_rows, cuda ? "tentative row" : "row", trace));
  const int64_t scratch = ledger.of_use(MemoryUse::kKvScratch);
  add("kv_scratch", "K/V of a pass", scratch, per(e.max_rows, "row", scratch));
  const int64_t logits = of(MemoryOwner::kHead, MemoryUse::kActivations);
  add("activations", "activations", ledger.of_use(MemoryUse::kActivations) - logits,
      per(e.max_rows, "row", ledger.of_use(MemoryUse::kActivations) - logits));
  const int64_t logit_row = vocab * 4 + s.hidden_size * (cuda ? 2 : 4);
  add("logits", "logits", logits, per(logits / logit_row, "row", logits));
  add("tables", "rotary tables", ledger.of_use(MemoryUse::kTables),
      fmt::format("{} tokens of context", with_commas(request.engine.context_length)));
  add("staging", "staging and results", ledger.of_use(MemoryUse::kStaging), "page tables and rows on their way to the device");
  add("workspace", "workspaces", ledger.of_use(MemoryUse::kWorkspace), cuda ? "attention, ranking of logits" : "of every thread");
  if (cuda && ranks > 1) add("collectives", "collectives", kCollectives, "an estimate: this build has none between cards yet");
  // One block is taken for all of it, and the driver hands out whole pages.
  const int64_t page = cuda ? ops::cuda::layout::kPage : 4096;
  const int64_t rounding = (page - ledger.total() % page) % page;
  add("runtime", cuda ? "kernels and graphs" : "the process itself", kRuntime + rounding,
      cuda ? "loaded on first use" : "tokenizer, connections, history");
  return rows;
}

std::vector<std::string> plan_table(const MemoryPlan& plan) {
  std::vector<std::string> out;
  const auto line = [&](const std::string& label, int64_t bytes, const std::string& detail) {
    std::string text = fmt::format("{:<26} {:>12}", label, mib_text(bytes));
    if (!detail.empty()) text += "  " + detail;
    out.push_back(std::move(text));
  };
  const MemoryRequest& r = plan.request;
  out.push_back(fmt::format("{:<26} {:>12}", "", "MiB"));
  for (const PlanRow& row : plan.rows) line(row.label, row.bytes, row.detail);
  line("sum", plan.need, fmt::format("{} may be used: {} of {}", mib_text(plan.limit), fraction_text(r.fraction), r.device_name));
  line(plan.left() >= 0 ? "left" : "short of", std::abs(plan.left()), fmt::format("of {}", mib_text(r.memory)));
  if (plan.pinned > 0) line("pinned host memory", plan.pinned, "beside it");
  if (plan.ranks > 1)
    out.push_back(fmt::format("each of {} ranks takes this; pages and slots are of the same sequences on all", plan.ranks));
  out.push_back(fmt::format("{} sequences at once, {} tokens each; {} KV pages of {} hold {} tokens", r.engine.max_running,
                            with_commas(r.engine.context_length), with_commas(plan.executor.pages), plan.executor.page_size,
                            with_commas(plan.kv_tokens())));
  return out;
}

std::string plan_sentence(const MemoryPlan& plan) {
  return fmt::format("{} of {} MiB planned, {} tokens in KV pages, {} slots", with_commas((plan.need + kMiB - 1) / kMiB),
                     with_commas(plan.request.memory / kMiB), with_commas(plan.kv_tokens()), plan.executor.slots);
}

}  // namespace ddtree
