#include "engine/plan.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <optional>

namespace ddtree {
namespace {

constexpr int32_t kSmallestContext = 1024;  // that a cure names; a model with less has its own

int64_t limit_of(const MemoryRequest& r) {
  // In whole MiB, so that 0.95 of a card is the same number here and in the table.
  return static_cast<int64_t>(std::floor(r.fraction * static_cast<double>(r.memory / kMiB) + 1e-9)) * kMiB;
}

int32_t pages_of_one(const MemoryRequest& r) {
  // NEXTN drafts may write a few positions past the end.
  return static_cast<int32_t>((int64_t{r.engine.context_length} + r.engine.nextn_steps + r.page_size - 1) / r.page_size);
}

int32_t pages_of_all(const MemoryRequest& r) {
  const int64_t most = int64_t{pages_of_one(r)} * r.engine.max_running;
  return static_cast<int32_t>(std::min<int64_t>(most, INT32_MAX / r.page_size));
}

ExecutorOptions executor_of(const MemoryRequest& r, int32_t pages) {
  ExecutorOptions o;
  o.page_size = r.page_size;
  o.pages = pages;
  o.slots = r.engine.max_running + 1;  // one for texts that are scored (Engine::score)
  // A fixed budget on every sequence at once, beside a prefill chunk; `auto` shares what there is.
  const int32_t tentative = r.engine.budget > 0 ? r.engine.max_running * (r.engine.budget + 1) : 0;
  o.max_logit_rows = std::max(512, tentative);
  o.max_rows = std::max({512, r.engine.prefill_chunk + tentative, r.engine.lone_chunk});
  o.max_tentative_rows = std::min(o.max_logit_rows, o.max_rows);  // each of them wants logits
  o.top_k = r.engine.top_k;
  return o;
}

struct Sized {
  ExecutorOptions executor;
  std::vector<PlanRow> rows;
  int64_t need = 0, pinned = 0;
};

Result<Sized> size(const PairFootprint& footprint, const MemoryRequest& r, int32_t pages) {
  Sized s;
  s.executor = executor_of(r, pages);
  auto ledger = footprint.with(s.executor);
  if (!ledger.ok()) return ledger.status();
  s.rows = plan_rows(footprint, r, s.executor, *ledger);
  for (const PlanRow& row : s.rows) s.need += row.bytes;
  s.pinned = ledger->pinned();
  return s;
}

// The largest n in [low, high] that `fits`, which holds up to some n and no further; nothing if not even low does.
std::optional<int32_t> largest(int32_t low, int32_t high, const std::function<bool(int32_t)>& fits) {
  if (high < low || !fits(low)) return std::nullopt;
  while (low < high) {
    const int32_t middle = low + (high - low + 1) / 2;
    if (fits(middle)) low = middle;
    else high = middle - 1;
  }
  return low;
}

// Without cures. Pages: what was asked for, or the most that fit, or (fits is false then) those of one sequence.
Result<MemoryPlan> plan_once(const PairFootprint& footprint, const MemoryRequest& request) {
  MemoryPlan plan;
  plan.request = request;
  plan.ranks = footprint.ranks();
  plan.limit = limit_of(request);
  int32_t pages = request.pages;
  if (pages == 0) {
    const auto fits = [&](int32_t n) {
      const auto s = size(footprint, request, n);
      return s.ok() && s->need <= plan.limit;
    };
    pages = largest(pages_of_one(request), pages_of_all(request), fits).value_or(pages_of_one(request));
  }
  auto sized = size(footprint, request, pages);
  if (!sized.ok()) return sized.status();
  plan.executor = sized->executor;
  plan.rows = std::move(sized->rows);
  plan.need = sized->need;
  plan.pinned = sized->pinned;
  plan.fits = plan.need <= plan.limit;
  return plan;
}

// Everything that this build can change, the least harmful first; each is kept only if a plan with it fits.
class Cures {
 public:
  Cures(const PairFootprint& footprint, const MemoryRequest& request)
      : with_(footprint), without_(footprint.without_drafter()), request_(request) {}

  std::vector<MemoryCure> find() {
    const MemoryRequest& r = request_;
    if (r.pages > 0) fewer_tokens(r, "");
    fraction(r, "", kDefaultFraction);
    fewer_sequences(r, "");
    for (const int32_t chunk : {2048, 1024, 512, 256})
      if (chunk < std::max(r.engine.prefill_chunk, r.engine.lone_chunk) &&
          changed(r, fmt::format("--chunked-prefill-size {}", chunk),
                  [&](MemoryRequest* m) { m->engine.prefill_chunk = chunk, m->engine.lone_chunk = 0; }))
        break;
    for (const int32_t budget : {128, 64, 32, 16})
      if (budget < r.engine.budget &&
          changed(r, fmt::format("--speculative-ddtree-budget {}", budget), [&](MemoryRequest* m) { m->engine.budget = budget; }))
        break;
    shorter_context(r, "");
    fraction(r, "", kLargestFraction);
    if (!found_.empty()) return std::move(found_);

    // Two changes, and three.
    const auto combine = [&](MemoryRequest m, const std::string& text) {
      fewer_sequences(m, text);
      shorter_context(m, text);
      m.engine.max_running = 1;
      if (found_.empty() && r.engine.max_running > 1) shorter_context(m, text + "--max-running-requests 1 ");
    };
    MemoryRequest m = r;
    m.pages = 0;  // the most that fit
    const std::string open = r.pages > 0 ? "no --max-total-tokens, " : "";
    combine(m, open);
    if (found_.empty()) {
      m.fraction = kLargestFraction;
      combine(m, open + fmt::format("--mem-fraction-static {:.2f} ", kLargestFraction));
    }
    if (found_.empty() && with_.drafter()) {
      drafterless_ = true;
      MemoryRequest n = r;
      changed(n, r.without_drafter, [](MemoryRequest*) {});
      n.pages = 0;
      if (found_.empty()) combine(n, open + r.without_drafter + ", ");
      if (found_.empty())
        n.fraction = kLargestFraction, combine(n, open + fmt::format("{}, --mem-fraction-static {:.2f} ", r.without_drafter, n.fraction));
      drafterless_ = false;
    }
    if (found_.empty()) larger_device();
    return std::move(found_);
  }

 private:
  bool fits(const MemoryRequest& m) const {
    const auto plan = plan_once(drafterless_ ? without_ : with_, m);
    return plan.ok() && plan->fits;
  }
  bool changed(MemoryRequest m, const std::string& text, const std::function<void(MemoryRequest*)>& change) {
    change(&m);
    if (!fits(m)) return false;
    found_.push_back({text, m, drafterless_});
    return true;
  }
  void fewer_tokens(const MemoryRequest& r, const std::string& with) {
    const auto at = [&](int32_t pages) {
      MemoryRequest m = r;
      m.pages = pages;
      return m;
    };
    const auto pages = largest(pages_of_one(r), r.pages - 1, [&](int32_t n) { return fits(at(n)); });
    if (pages) found_.push_back({with + fmt::format("--max-total-tokens {}", int64_t{*pages} * r.page_size), at(*pages), drafterless_});
  }
  void fraction(const MemoryRequest& r, const std::string& with, double most) {
    for (int hundredths = static_cast<int>(std::floor(r.fraction * 100 + 1e-9)) + 1; hundredths <= std::lround(most * 100); ++hundredths) {
      MemoryRequest m = r;
      m.fraction = hundredths / 100.0;
      if (!fits(m)) continue;
      // The same cure is not named twice: the first range ends where the second begins.
      const std::string text = with + fmt::format("--mem-fraction-static {:.2f}", m.fraction);
      for (const MemoryCure& c : found_)
        if (c.text == text) return;
      found_.push_back({text, m, drafterless_});
      return;
    }
  }
  void fewer_sequences(const MemoryRequest& r, const std::string& with) {
    const auto at = [&](int32_t n) {
      MemoryRequest m = r;
      m.engine.max_running = n;
      return m;
    };
    const auto n = largest(1, r.engine.max_running - 1, [&](int32_t k) { return fits(at(k)); });
    if (n) found_.push_back({with + fmt::format("--max-running-requests {}", *n), at(*n), drafterless_});
  }
  void shorter_context(const MemoryRequest& r, const std::string& with) {
    const int32_t step = r.engine.context_length > kSmallestContext ? 1024 : 16;
    const auto at = [&](int32_t steps) {
      MemoryRequest m = r;
      m.engine.context_length = steps * step;
      return m;
    };
    const auto steps = largest(1, (r.engine.context_length - 1) / step, [&](int32_t n) { return fits(at(n)); });
    if (steps) found_.push_back({with + fmt::format("--context-length {}", *steps * step), at(*steps), drafterless_});
  }
  // Nothing that can be set is enough: the smallest device on which the request, as it stands, fits.
  void larger_device() {
    const auto at = [&](int32_t mib) {
      MemoryRequest m = request_;
      m.memory = mib * kMiB;
      return m;
    };
    int32_t low = static_cast<int32_t>(request_.memory / kMiB), high = std::max(low, 1);
    while (high < (1 << 29) && !fits(at(high))) low = high, high *= 2;
    while (low + 1 < high) {
      const int32_t middle = low + (high - low) / 2;
      if (fits(at(middle))) high = middle;
      else low = middle;
    }
    // Ranks on the CPU share a machine, and each was given its part of it; a card is a rank's own.
    const bool cuda = with_.kind() == ops::DeviceKind::kCuda;
    const int64_t whole = int64_t{high} * (cuda ? 1 : with_.ranks());
    found_.push_back({fmt::format("{} with at least {} MiB", cuda ? "a card" : "a machine", with_commas(whole)), at(high), false});
  }

  const PairFootprint& with_;
  const PairFootprint without_;
  const MemoryRequest request_;
  bool drafterless_ = false;
  std::vector<MemoryCure> found_;
};

}  // namespace

Result<MemoryPlan> plan_memory(const PairFootprint& footprint, const MemoryRequest& asked) {
  MemoryRequest r = asked;
  const int64_t longest = footprint.target().max_positions;
  if (r.engine.context_length <= 0) r.engine.context_length = static_cast<int32_t>(longest);
  if (r.engine.context_length > longest)
    return {Code::kUsage, fmt::format("--context-length {} is more than the {} positions of this model; give at most that",
                                      r.engine.context_length, longest)};
  if (r.fraction <= 0) r.fraction = kDefaultFraction;
  if (r.device_name.empty()) r.device_name = footprint.kind() == ops::DeviceKind::kCuda ? "the card" : "this machine";
  if (r.pages > 0 && r.pages < pages_of_one(r))
    return {Code::kUsage, fmt::format("--kv-pages {} hold {} tokens, less than --context-length {}; give at least {}", r.pages,
                                      int64_t{r.pages} * r.page_size, r.engine.context_length, pages_of_one(r))};
  auto plan = plan_once(footprint, r);
  if (plan.ok() && !plan->fits) plan->cures = Cures(footprint, r).find();
  return plan;
}

Status refusal(const MemoryPlan& plan) {
  if (plan.fits) return {};
  const MemoryRequest& r = plan.request;
  const PlanRow* most = &plan.rows.front();
  int64_t weights = 0, pages = 0;
  for (const PlanRow& row : plan.rows) {
    if (row.bytes > most->bytes) most = &row;
    if (row.name.ends_with("weights")) weights += row.bytes;
    if (row.name.ends_with("_kv")) pages += row.bytes;
  }
  const auto mib = [](int64_t bytes) { return with_commas((bytes + kMiB - 1) / kMiB); };
  std::string text = fmt::format(
      "does not fit: at least {} MiB are needed (weights {}, KV pages of {} tokens {}, the rest {}), and {} may be used "
      "(--mem-fraction-static {} of the {} MiB of {})",
      mib(plan.need), mib(weights), with_commas(plan.kv_tokens()), mib(pages), mib(plan.need - weights - pages),
      with_commas(plan.limit / kMiB), fraction_text(r.fraction), with_commas(r.memory / kMiB), r.device_name);
  text += fmt::format(". {} fits", plan.cures.front().text);
  for (size_t i = 1; i < std::min<size_t>(plan.cures.size(), 3); ++i) text += fmt::format("; so does {}", plan.cures[i].text);
  return {Code::kDoesNotFit, text};
}

}  // namespace ddtree
