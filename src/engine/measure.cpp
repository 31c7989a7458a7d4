// What passes cost here and now, for `auto`.
#include <algorithm>

#include "base/log.h"
#include "engine/rounds.h"

namespace ddtree {
namespace {

constexpr double kTimeLimit = 900;   // ms; past it nothing is repeated, but every size is still run once:
constexpr double kHardLimit = 8000;  // a busy machine must not leave `auto` with guesses. ms
constexpr int32_t kContext = 64;     // committed tokens below the measured rows
constexpr int32_t kAcceptedPerSequence = 16;
constexpr int32_t kRowsPerSequence = 32;  // as a batch of trees has them

}  // namespace

Status Rounds::measure() {
  const ExecutorOptions& e = executor_.options();
  const auto begin = now_();
  const auto out_of_time = [&](double limit) { return milliseconds_between(begin, now_()) > limit; };
  // As many sequences as slots and pages allow, each with a committed prefix, so that drafts and attention have something to read.
  const int32_t pages_each = (kContext + kRowsPerSequence + e.page_size - 1) / e.page_size + 1;
  const int32_t sequences = std::min({options_.max_running, e.slots, e.pages / pages_each});
  const int32_t context = std::min<int32_t>(kContext, std::max(e.max_rows / std::max(sequences, 1), 1));
  if (sequences < 1) return {};
  std::vector<std::vector<int32_t>> pages(static_cast<size_t>(sequences));
  for (int32_t s = 0; s < sequences; ++s) {
    for (int32_t i = 0; i < pages_each; ++i) pages[static_cast<size_t>(s)].push_back(s * pages_each + i);
  }
  const auto token = [&](int32_t i) { return (i * 31 + 7) % executor_.real_vocab(); };

  Forest forest;
  const auto add_chain = [&](int32_t slot, int32_t rows, int32_t from, bool certain, bool logits = false) {
    const int32_t first = static_cast<int32_t>(forest.token.size());
    for (int32_t i = 0; i < rows; ++i) {
      forest.token.push_back(token(slot * 1000 + from + i));
      forest.position.push_back(from + i);
      forest.parent.push_back(i > 0 ? first + i - 1 : -1);
      forest.wants_logits.push_back(certain && !logits ? 0 : 1);
    }
    forest.segments.push_back({first, rows, certain, slot, pages[static_cast<size_t>(slot)], from});
  };
  PassOutput output;
  std::vector<Accepted> all;
  const auto commit_prefixes = [&]() -> Status {
    forest = Forest();
    all.clear();
    for (int32_t s = 0; s < sequences; ++s) {
      executor_.reset_slot(s);
      add_chain(s, context, 0, true);
      Accepted a;
      a.segment = s;
      for (int32_t i = 0; i < context; ++i) a.rows.push_back(s * context + i), a.next.push_back(token(s * 1000 + i + 1));
      a.feed_drafter = executor_.drafter() != nullptr;
      all.push_back(a);
    }
    DDTREE_RETURN_IF_ERROR(executor_.forward(forest, &output));
    return executor_.commit(forest, all);
  };
  DDTREE_RETURN_IF_ERROR(commit_prefixes());

  // The median of a few: running averages go on from here, and they are means of passes on a machine that does other things too.
  const int32_t warm = executor_.warm_up_runs();
  const auto median_of = [&](int repeats, auto&& body) -> Result<double> {
    for (int32_t i = 0; i < warm; ++i) DDTREE_RETURN_IF_ERROR(body());
    std::vector<double> all_ms;
    for (int i = 0; i < repeats && (i == 0 || !out_of_time(kTimeLimit)); ++i) {
      const auto start = now_();
      DDTREE_RETURN_IF_ERROR(body());
      all_ms.push_back(milliseconds_between(start, now_()));
    }
    std::sort(all_ms.begin(), all_ms.end());
    return all_ms[(all_ms.size() - 1) / 2];
  };
  const int32_t logit_rows = std::min(max_logit_rows_, max_tentative_rows_);
  const auto fill = [](CostCurve& curve, size_t from) {  // what there was no time for: by the last slope
    const auto& k = curve.knots();
    for (size_t i = std::max<size_t>(from, 1); i < k.size(); ++i) {
      const double slope = i > 1 ? std::max(curve.values()[i - 1] - curve.values()[i - 2], 0.0) / (k[i - 1] - k[i - 2]) : 0;
      curve.set(i, curve.values()[i - 1] + slope * (k[i] - k[i - 1]));
    }
  };

  CostCurve& draft = costs_.draft_curve();
  size_t measured = 0;
  if (executor_.drafter() != nullptr) {
    DraftOutput drafts;
    for (; measured < draft.knots().size() && !out_of_time(kHardLimit); ++measured) {
      const int32_t n = static_cast<int32_t>(draft.knots()[measured]);
      if (n > sequences) break;
      std::vector<DraftQuery> queries;
      for (int32_t s = 0; s < n; ++s) queries.push_back({s, pages[static_cast<size_t>(s)], context, token(s * 1000 + context)});
      const auto ms = median_of(3, [&] { return executor_.draft(queries, options_.top_k, &drafts); });
      if (!ms) return ms.status();
      draft.set(measured, *ms);
    }
    fill(draft, measured);
  }

  // Attention grows with the context: the same rows far down a long one (what stands in those pages does not matter).
  std::vector<int32_t> long_table;
  for (int32_t i = 0; i < e.pages && i * e.page_size < 1024; ++i) long_table.push_back(i);
  const int32_t probe_rows = std::min({16, logit_rows, e.page_size}),
                far = static_cast<int32_t>(long_table.size()) * e.page_size - probe_rows;
  if (far >= 4 * context && !out_of_time(kHardLimit)) {
    double ms[2];
    for (int i = 0; i < 2; ++i) {
      forest = Forest();
      add_chain(0, probe_rows, i == 0 ? context : far, false);
      forest.segments[0].pages = long_table;
      const auto best = median_of(3, [&] { return executor_.forward(forest, &output); });
      if (!best) return best.status();
      ms[i] = *best;
    }
    costs_.set_context_slope((ms[1] - ms[0]) / (static_cast<double>(probe_rows) * (far - context)));
  }

  // As many rows: one sequence's chain, and a plain step of several, whose states are read and written.
  const int32_t spread = std::min({sequences, 16, logit_rows});
  if (spread > 1 && !out_of_time(kHardLimit)) {
    forest = Forest();
    add_chain(0, spread, context, false);
    const auto chain = median_of(4, [&] { return executor_.forward(forest, &output); });
    if (!chain) return chain.status();
    int32_t at = context;  // each step is another position: certain rows stay
    const auto step = median_of(4, [&] {
      forest = Forest();
      for (int32_t s = 0; s < spread; ++s) add_chain(s, 1, at, true, true);
      ++at;
      return executor_.forward(forest, &output);
    });
    if (!step) return step.status();
    DDTREE_RETURN_IF_ERROR(commit_prefixes());
    costs_.set_sequence_slope((*step - *chain) / (spread - 1));
  }

  CostCurve& verify = costs_.verify_curve();
  for (measured = 0; measured < verify.knots().size() && !out_of_time(kHardLimit); ++measured) {
    const int32_t rows = static_cast<int32_t>(verify.knots()[measured]);
    if (rows > logit_rows || rows > sequences * kRowsPerSequence) break;
    forest = Forest();
    const int32_t share = (rows + kRowsPerSequence - 1) / kRowsPerSequence;
    for (int32_t s = 0, left = rows; left > 0; ++s) {
      const int32_t take = (left + share - s - 1) / (share - s);
      add_chain(s, take, context, false);
      left -= take;
    }
    const auto ms = median_of(rows <= 32 ? 4 : 2, [&] { return executor_.forward(forest, &output); });
    if (!ms) return ms.status();
    verify.set(measured, *ms - costs_.beside_rows(static_cast<double>(rows) * context, share));
  }
  fill(verify, measured);

  CostCurve& fold = costs_.commit_curve();
  for (measured = 0; measured < fold.knots().size() && !out_of_time(kTimeLimit); ++measured) {
    const int32_t rows = static_cast<int32_t>(fold.knots()[measured]);
    if (rows > logit_rows || rows > sequences * kAcceptedPerSequence) break;
    forest = Forest();
    all.clear();
    const int32_t share = (rows + kAcceptedPerSequence - 1) / kAcceptedPerSequence;
    for (int32_t s = 0, left = rows; left > 0; ++s) {
      const int32_t take = (left + share - s - 1) / (share - s);
      Accepted a;
      a.segment = s;
      a.feed_drafter = executor_.drafter() != nullptr;
      for (int32_t i = 0; i < take; ++i) a.rows.push_back(static_cast<int32_t>(forest.token.size()) + i), a.next.push_back(token(i));
      add_chain(s, take, context, false);
      for (int32_t i = 0; i + 1 < take; ++i)
        a.next[static_cast<size_t>(i)] = forest.token[static_cast<size_t>(a.rows[static_cast<size_t>(i)] + 1)];
      all.push_back(std::move(a));
      left -= take;
    }
    std::vector<double> ms;
    for (int32_t i = 0; i < warm + 3; ++i) {
      DDTREE_RETURN_IF_ERROR(executor_.forward(forest, &output));
      const auto start = now_();
      DDTREE_RETURN_IF_ERROR(executor_.commit(forest, all));
      if (i >= warm) ms.push_back(milliseconds_between(start, now_()));
    }
    std::sort(ms.begin(), ms.end());
    fold.set(measured, ms[1]);
  }
  fill(fold, measured);
  for (int32_t s = 0; s < sequences; ++s) executor_.reset_slot(s);
  start_costs_ = costs_;
  measured_ = true;
  log::info(
      "measured in {:.0f} ms: a row {:.2f} ms, 16 rows {:.2f} ms, 64 rows {:.2f} ms, each further sequence {:.3f} ms, a draft {:.2f} ms",
      milliseconds_between(begin, now_()), costs_.verify(1, 0, 1), costs_.verify(16, 0, 1), costs_.verify(64, 0, 1),
      costs_.sequence_slope(), executor_.drafter() ? costs_.draft(1) : 0.0);
  return {};
}

}  // namespace ddtree
