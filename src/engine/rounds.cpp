#include "engine/rounds.h"

#include <algorithm>

#include "base/log.h"
#include "engine/pools.h"

namespace ddtree {
namespace {

size_t at(int32_t i) { return static_cast<size_t>(i); }
// Nodes grown per sequence for `auto` to choose from; beyond it the golden prompts gain nothing. Of a batch fewer: rows that all share are
// never enough for so many, and growing, weighing and sorting 16 × 256 nodes takes 2.6 ms of a 30 ms round.
constexpr int32_t kPoolNodes = 256, kBatchNodes = 768, kLeastNodes = 48;
constexpr int32_t kScoreRows = 64;  // of one pass

}  // namespace

Rounds::Rounds(Executor& executor, const EngineOptions& options, EngineSeams seams)
    : executor_(executor),
      options_(options),
      sampler_(std::move(seams.sampler)),
      now_(std::move(seams.now)),
      costs_(executor.options().max_rows, std::max(options.max_running, 2)),
      max_rows_(executor.options().max_rows),
      max_logit_rows_(executor.options().max_logit_rows > 0 ? executor.options().max_logit_rows : executor.options().max_rows),
      max_tentative_rows_(executor.options().max_tentative_rows > 0 ? executor.options().max_tentative_rows : executor.options().max_rows) {
  forget_drafts();
}

void Rounds::forget_drafts() {
  calibration_ = Calibration();
  probes_ = 0;
  // Until a draft was seen: published acceptance on the spine is 65 to 84 % a token.
  if (executor_.drafter() != nullptr) outlook_.fill(Outlook::chain(static_cast<int32_t>(executor_.drafter()->block_size) - 1, 0.8));
}

void Rounds::grow(Part& part, const Candidates& candidates, bool nextn, int32_t pool_nodes) const {
  const Sequence& s = *part.sequence;
  // Deeper nodes could only confirm tokens that max_tokens cuts off; they would also need positions that no page was set aside for.
  const int32_t depth = s.commit.left() - 1;
  const int32_t chain_length =
      std::min({depth, candidates.positions, nextn || options_.block_size <= 0 ? INT32_MAX : options_.block_size - 1});
  if (s.mode != SpeculationMode::kDdtree) {
    part.tree = chain_tree(s.anchor, candidates, chain_length);
    return;
  }
  if (s.shadow) part.chain = chain_tree(s.anchor, candidates, chain_length);
  if (s.budget > 0) {
    part.tree = grow_tree(s.anchor, candidates, {.budget = s.budget, .max_depth = depth, .seed_chain = options_.seed_chain});
  } else {
    // The pool holds the whole chain, so that a choice between a deep and a bushy tree is left to the calibrated probabilities.
    part.pool = grow_tree(s.anchor, candidates, {.budget = pool_nodes, .max_depth = depth, .seed_chain = true});
  }
}

void Rounds::run_drafter(std::vector<Part>& parts, bool nextn, PassReport* report) {
  std::vector<DraftQuery> queries;
  std::vector<Part*> asking;
  int32_t top_k = 1;
  for (Part& p : parts) {
    const Sequence& s = *p.sequence;
    if (!p.drafts || (s.mode == SpeculationMode::kNextn) != nextn) continue;
    queries.push_back({s.slot, s.pages, s.context, s.anchor});
    asking.push_back(&p);
    if (s.mode == SpeculationMode::kDdtree) top_k = std::max(top_k, s.budget > 0 ? std::min(options_.top_k, s.budget) : options_.top_k);
  }
  if (queries.empty()) return;
  DraftOutput output;
  const auto begin = now_();
  const Status status = nextn ? executor_.draft_nextn(queries, options_.nextn_steps, &output) : executor_.draft(queries, top_k, &output);
  const double ms = milliseconds_between(begin, now_());
  draft_ms_ += ms;
  queries_ += static_cast<int32_t>(queries.size());
  if (!status.ok()) {
    // A broken drafter must cost speed, not answers.
    log::warn("drafting failed, decoding plainly for a while: {}", status.message());
    ++report->failed_drafts;
    for (Part* p : asking) {
      p->drafts = false;
      p->sequence->fallback.give_up();
      report->fallbacks += p->sequence->request.own ? 0 : 1;
    }
    return;
  }
  if (!nextn) costs_.observe_draft(static_cast<int32_t>(queries.size()), ms);
  const int32_t pool_nodes =
      std::min({kPoolNodes, std::max(kBatchNodes / static_cast<int32_t>(queries.size()), kLeastNodes), max_rows_ - 1});
  const size_t stride = static_cast<size_t>(output.positions) * at(output.top_k);
  for (size_t q = 0; q < asking.size(); ++q)
    grow(*asking[q],
         {output.positions, output.top_k, std::span(output.token).subspan(q * stride, stride),
          std::span(output.log_prob).subspan(q * stride, stride)},
         nextn, pool_nodes);
}

// Decides which nodes are verified: fixed trees as far as they fit, then `auto` by measured costs, then shadow's chains on top.
void Rounds::shape(std::vector<Part>& parts, int32_t node_limit, int32_t base_rows, double base_row_context, bool prompts) {
  int32_t decoding = 0, shadows = 0;
  double context = 0, gain = 0;
  std::vector<Part*> fixed, automatic;
  for (Part& p : parts) {
    if (p.prefill) continue;
    ++decoding;
    context += p.sequence->context;
    shadows += p.chain.nodes() > 0 ? 1 : 0;
    if (p.pool.nodes() > 0) automatic.push_back(&p);
    else if (p.tree.nodes() > 0) fixed.push_back(&p);
  }
  int32_t chain_nodes = 0;
  for (Part& p : parts)
    if (p.chain.nodes() > 0) {
      p.chain.truncate(std::min(p.chain.nodes(), node_limit / shadows));
      chain_nodes += p.chain.nodes();
    }
  node_limit -= chain_nodes;

  int32_t fixed_nodes = 0;
  std::vector<const DraftTree*> trees;
  for (Part* p : fixed) trees.push_back(&p->tree);
  const std::vector<int32_t> keep = fit_nodes(trees, node_limit);
  for (size_t i = 0; i < fixed.size(); ++i) {
    fixed[i]->tree.truncate(keep[i]);
    fixed_nodes += keep[i];
    gain += fixed[i]->sequence->fallback.mean_accepted();
  }

  if (!automatic.empty()) {
    std::vector<std::vector<double>> expected;
    std::vector<PoolView> pools;
    for (Part* p : automatic) expected.push_back(expected_acceptance(calibration_, p->pool, p->sequence->sampling.temperature > 0));
    for (size_t i = 0; i < automatic.size(); ++i) pools.push_back({&automatic[i]->pool, expected[i]});
    const MergedNodes merged = merge_pools(pools);
    const double mean_context = context / std::max(decoding, 1);
    const auto verify_ms = [&](int32_t nodes) {
      return pass_ms(base_rows + nodes, base_row_context + nodes * mean_context, static_cast<int32_t>(parts.size()), prompts);
    };
    const double beside = costs_.draft(queries_) + costs_.host(decoding);
    for (size_t i = 0; i < automatic.size(); ++i) {
      Sequence& s = *automatic[i]->sequence;
      s.outlook.observe(std::span(expected[i]).subspan(1));
      outlook_[s.sampling.temperature > 0].observe(std::span(expected[i]).subspan(1));
    }
    const int32_t others = fixed_nodes + chain_nodes;
    const int32_t count = choose_count(merged, decoding + gain, node_limit - fixed_nodes,
                                       [&](int32_t b, double phi) { return beside + verify_ms(others + b) + costs_.commit(gain + phi); });
    const auto masks = masks_of(merged, count, pools);
    double gain_all = gain;
    for (Part* p : automatic) gain_all += p->sequence->fallback.mean_accepted();
    for (size_t i = 0; i < automatic.size(); ++i) {
      Part& p = *automatic[i];
      p.pool_mask = masks[i];
      p.tree = select_nodes(p.pool, p.pool_mask, &p.pool_place);
      BreakEven round;
      round.with_all = beside + verify_ms(others + count) + costs_.commit(gain_all);
      round.without_this = costs_.draft(queries_ - 1) + costs_.host(decoding) + verify_ms(others + count - p.tree.nodes()) +
                           costs_.commit(gain_all - p.sequence->fallback.mean_accepted());
      round.without_any = costs_.host(decoding) + verify_ms(others) + costs_.commit(gain);
      round.sequences = decoding;
      round.drafting = static_cast<int32_t>(automatic.size());
      round.gain_of_others = gain_all - p.sequence->fallback.mean_accepted();
      p.break_even = break_even(round);
    }
  }
  for (Part& p : parts)
    if (p.chain.nodes() > 0) {
      UnionTree both = unite(p.chain, p.tree);
      p.tree = std::move(both.tree);
      p.in_tree = std::move(both.in_tree);
    }
}

// A token's index in the answer and its position differ by the prompt's length, so one rule serves all rows.
Choice Rounds::choice_of(const Sequence& s) {
  Choice c;
  if (s.scoring || s.replaying) return c;  // judge() chooses from the logits, which it needs anyway
  const auto prompt = static_cast<int32_t>(s.request.prompt.size());
  c.params = s.sampling;
  if (s.sampling.penalised()) c.history = &s.history, c.history_end = prompt + s.commit.count();
  c.banned = s.commit.banned(s.commit.count());
  c.banned_end = prompt + s.request.min_tokens;
  return c;
}

Forest Rounds::build(std::vector<Part>& parts) const {
  Forest forest;
  const auto row = [&](int32_t token, int32_t position, int32_t parent, bool logits) {
    forest.token.push_back(token);
    forest.position.push_back(position);
    forest.parent.push_back(parent);
    forest.wants_logits.push_back(logits ? 1 : 0);
  };
  const auto add = [&](Part& p) {
    const Sequence& s = *p.sequence;
    p.first_row = static_cast<int32_t>(forest.token.size());
    p.segment = static_cast<int32_t>(forest.segments.size());
    if (p.prefill) {
      if (p.prefill_rows == 0) {
        p.segment = -1;
        return;
      }
      for (int32_t i = 0; i < p.prefill_rows; ++i)
        row(s.known_token(s.context + i), s.context + i, i > 0 ? p.first_row + i - 1 : -1,
            s.scoring ? s.context + i >= s.scoring->first_row() : i + 1 == s.known_left() && !s.replaying);
    } else {
      for (int32_t i = 0; i < p.tree.size(); ++i)
        row(p.tree.token[at(i)], s.context + p.tree.depth[at(i)], i > 0 ? p.first_row + p.tree.parent[at(i)] : -1, true);
    }
    forest.segments.push_back({p.first_row, static_cast<int32_t>(forest.token.size()) - p.first_row, p.prefill || p.tree.nodes() == 0,
                               s.slot, s.pages, s.context, choice_of(s)});
  };
  // Tentative segments first (ExecutorOptions::max_tentative_rows).
  for (Part& p : parts)
    if (!p.prefill && p.tree.nodes() > 0) add(p);
  for (Part& p : parts)
    if (p.prefill || p.tree.nodes() == 0) add(p);
  return forest;
}

// The device side of the commit. Finished sequences keep nothing: their slot and pages go back.
void Rounds::commit(std::vector<Part>& parts, const Forest& forest, PassReport* report) {
  std::vector<Accepted> accepted;
  int32_t tentative = 0;
  for (Part& p : parts)
    if (p.segment >= 0 && !p.sequence->finished && !p.accepted.rows.empty()) {
      if (!forest.segments[at(p.segment)].certain) tentative += static_cast<int32_t>(p.accepted.rows.size());
      accepted.push_back(std::move(p.accepted));
    }
  const auto begin = now_();
  const Status status = accepted.empty() ? Status() : executor_.commit(forest, accepted);
  commit_ms_ = milliseconds_between(begin, now_());
  if (tentative > 0) costs_.observe_commit(tentative, commit_ms_);
  if (status.ok()) return;
  log::error("commit failed: {}", status.message());
  report->lost = status;
  for (Part& p : parts)
    if (p.segment >= 0 && !p.sequence->finished) fail(p, status.message());
}

// Prompt rows that a sequence may bring into this pass. A scored text's rows want logits one by one, so only some of them at a time.
int32_t Rounds::known_rows(const Sequence& s, int32_t logit_rows) const {
  if (!s.scoring) return s.known_left();
  const int32_t before = s.scoring->first_row() - s.context;
  return before > 0 ? std::min(before, s.known_left()) : std::clamp(logit_rows, 0, std::min(kScoreRows, s.known_left()));
}

void Rounds::fail(Part& part, const std::string& message) {
  Sequence& s = *part.sequence;
  part.failed = true;
  s.finished = true;
  s.delta.finish = FinishReason::kError;
  s.delta.error = message;
}

PassReport Rounds::step(std::span<Sequence* const> running) {
  PassReport report;
  const auto begin = now_();
  draft_ms_ = commit_ms_ = 0;
  queries_ = 0;
  std::vector<Part> parts;
  std::vector<int32_t> prompt_left;
  for (Sequence* s : running) {
    Part p;
    p.sequence = s;
    p.prefill = !s->decoding();
    p.tree = root_only(s->anchor);
    if (!p.prefill && s->mode != SpeculationMode::kNone && s->commit.left() > 1) {
      p.drafts = s->fallback.wants_draft();
      if (!p.drafts) s->fallback.plain();
    }
    parts.push_back(std::move(p));
  }

  decide_drafting(parts);
  int32_t logit_rows = max_logit_rows_ - static_cast<int32_t>(parts.size());  // for scored rows: the others may want one each
  for (const Part& p : parts) {
    prompt_left.push_back(p.prefill ? known_rows(*p.sequence, logit_rows) : 0);
    report.decoding += p.prefill ? 0 : 1;
    report.own_decoding += !p.prefill && p.sequence->request.own ? 1 : 0;
  }
  run_drafter(parts, false, &report);
  run_drafter(parts, true, &report);

  // Prompt rows first, but never so many that no tree would fit: eight streams that decode must not stall while a long prompt comes in.
  const bool trees = std::any_of(parts.begin(), parts.end(), [](const Part& p) { return p.drafts; });
  const int32_t free_rows = max_rows_ - report.decoding;
  const int32_t chunk = report.decoding == 0 ? std::max(options_.prefill_chunk, options_.lone_chunk) : options_.prefill_chunk;
  // Of the rows that a pass with trees may have, not of those that only a prompt alone takes: trees would wait longer for no more room.
  const int32_t shared_rows = std::min(max_rows_, std::max(max_tentative_rows_, options_.prefill_chunk)) - report.decoding;
  const int32_t prompt_limit = std::min(chunk, trees ? std::max(shared_rows / 2, 1) : free_rows);
  const std::vector<int32_t> share = share_rows(prompt_left, std::min(prompt_limit, free_rows));
  int32_t completing = 0;
  double row_context = 0;
  for (size_t i = 0; i < parts.size(); ++i) {
    Part& p = parts[i];
    p.prefill_rows = share[i];
    report.prompt_rows += share[i];
    if (p.sequence->request.own) report.own_prompt_rows += share[i];
    else report.replayed_rows += p.sequence->replaying ? share[i] : 0;
    if (const Scoring* scored = p.sequence->scoring.get()) completing += p.sequence->context >= scored->first_row() ? share[i] : 0;
    else completing += p.prefill && share[i] == prompt_left[i] ? 1 : 0;
    row_context += static_cast<double>(p.sequence->context) * (p.prefill ? share[i] : 1);
  }
  const int32_t base_rows = report.decoding + report.prompt_rows;
  const int32_t node_limit =
      std::min({max_rows_ - base_rows, max_logit_rows_ - report.decoding - completing, max_tentative_rows_ - report.decoding});
  shape(parts, std::max(node_limit, 0), base_rows, row_context, report.prompt_rows > 0);

  const Forest forest = build(parts);
  if (forest.token.empty()) return report;
  PassOutput output;
  const auto verify_begin = now_();
  const Status status = executor_.forward(forest, &output);
  const double verify_ms = milliseconds_between(verify_begin, now_());
  report.ran = true;
  if (!status.ok()) {
    log::error("forward pass failed: {}", status.message());
    for (Part& p : parts) {
      if (p.segment < 0) continue;
      const Segment& seg = forest.segments[at(p.segment)];
      const bool named = std::any_of(output.faulty_rows.begin(), output.faulty_rows.end(),
                                     [&](int32_t r) { return r >= seg.first_row && r < seg.first_row + seg.row_count; });
      if (output.faulty_rows.empty() || named) fail(p, status.message());
      report.nan_faults += named ? 1 : 0;
    }
    if (output.faulty_rows.empty()) report.lost = status;
    else report.nan_message = status.message();
  } else if (report.prompt_rows == 0) {
    double pass_context = 0;
    for (const Segment& s : forest.segments) pass_context += static_cast<double>(s.context) * s.row_count;
    report.timed = measured_;
    report.pass_ms = draft_ms_ + verify_ms;
    const int32_t rows = executor_.padded_rows(static_cast<int32_t>(forest.token.size())),
                  sequences = static_cast<int32_t>(forest.segments.size());
    report.promised_ms = start_costs_.draft(queries_) + start_costs_.verify(rows, pass_context, sequences);
    costs_.observe_verify(rows, pass_context, sequences, verify_ms);
  }

  for (Part& p : parts)
    if (p.segment >= 0 && !p.failed) verify(p, forest, output, &report);
  commit(parts, forest, &report);
  for (Part& p : parts)
    if (!p.prefill && !p.failed) learn(p, &report);

  report.milliseconds = milliseconds_between(begin, now_());
  if (report.prompt_rows == 0) costs_.observe_host(report.decoding, report.milliseconds - draft_ms_ - verify_ms - commit_ms_);
  for (Part& p : parts)
    if (!p.prefill && !p.failed && p.sequence->request.record_trees) record(p, draft_ms_, verify_ms, report.milliseconds);
  return report;
}

}  // namespace ddtree
