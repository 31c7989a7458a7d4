// After the target's pass: sample, follow, cut, and learn from what happened.
#include <algorithm>
#include <cmath>
#include <limits>

#include "engine/rounds.h"

namespace ddtree {
namespace {

size_t at(int32_t i) { return static_cast<size_t>(i); }

}  // namespace

// What the target chooses behind each row of a scored text.
void Rounds::judge(Part& p, const PassOutput& output) {
  Sequence& s = *p.sequence;
  Scoring& scored = *s.scoring;
  const auto vocab = static_cast<size_t>(executor_.target().vocab_size);
  const auto real = static_cast<size_t>(executor_.real_vocab());
  for (int32_t i = 0; i < p.prefill_rows; ++i) {
    const int32_t row = s.context + i, index = row + 1 - scored.prompt;  // of the answer's token that follows
    if (row < scored.first_row()) continue;
    const auto fetched = executor_.row_logits(output, output.logits_row[at(p.first_row + i)]);
    if (!fetched) return fail(p, fetched.status().message());
    const std::span<const float> logits(*fetched, vocab);
    if (s.sampling.penalised())
      for (int32_t k = static_cast<int32_t>(s.history_count); k < index; ++k, ++s.history_count)
        ++s.history.generated[scored.generated[at(k)]];
    const ops::Sampled chosen =
        sampler_->choose(logits, s.sampling, s.sampling.penalised() ? &s.history : nullptr, {}, s.commit.banned(index), row + 1);
    double most = -std::numeric_limits<double>::infinity(), sum = 0;
    for (size_t v = 0; v < real; ++v) most = std::max(most, static_cast<double>(logits[v]));
    for (size_t v = 0; v < real; ++v) sum += std::exp(logits[v] - most);
    const int32_t token = scored.generated[at(index)];
    scored.score.tokens.push_back({token, chosen.token, static_cast<float>(logits[at(token)] - most - std::log(sum)), chosen.margin});
  }
}

// Chooses at the rows of the walk and settles what was accepted.
void Rounds::verify(Part& p, const Forest& forest, const PassOutput& output, PassReport* report) {
  Sequence& s = *p.sequence;
  const auto vocab = static_cast<size_t>(executor_.target().vocab_size);
  const ops::TokenHistory* history = s.sampling.penalised() ? &s.history : nullptr;
  const auto sample = [&](int32_t row, std::span<const int32_t> path, std::span<const int32_t> banned, int64_t position) {
    const int32_t of = output.logits_row[at(row)];
    if (!output.logits && output.chosen[at(of)] >= 0) return ops::Sampled{output.chosen[at(of)], output.margin[at(of)]};
    const auto logits = executor_.row_logits(output, of);
    if (!logits) {
      if (!p.failed) fail(p, logits.status().message());
      return ops::Sampled{0, 0};
    }
    return sampler_->choose(std::span(*logits, vocab), s.sampling, history, path, banned, position);
  };

  if (p.prefill) {
    p.accepted.segment = p.segment;
    for (int32_t i = 0; i < p.prefill_rows; ++i) {
      p.accepted.rows.push_back(p.first_row + i);
      const int32_t following = s.context + i + 1;
      p.accepted.next.push_back(following < s.known() ? s.known_token(following) : s.anchor);
    }
    if (s.scoring) {
      judge(p, output);
      if (p.failed) return;  // its error is the answer
    }
    const bool complete = p.prefill_rows == s.known_left();
    s.context += p.prefill_rows;
    if (complete && s.scoring) {
      s.finished = true;
      s.delta.finish = FinishReason::kLength;
    } else if (complete && s.replaying) {
      s.replaying = false;
    } else if (complete) {
      const ops::Sampled first = sample(p.first_row + p.prefill_rows - 1, {}, s.commit.banned(0), s.context);
      if (p.failed) return;
      p.margins = {first.margin};
      p.accepted.next.back() = first.token;
      s.first_token = Clock::now();
      settle(p, std::span(&first.token, 1), report);
    }
  } else {
    // Where the pass has not chosen, choices are drawn as a walk asks for them, and once a row: shadow's two walks share rows.
    std::vector<ops::Sampled> memo(at(p.tree.size()));
    const auto choose = [&](int32_t node) {
      ops::Sampled& chosen = memo[at(node)];
      if (chosen.token < 0) {
        std::vector<int32_t> path;
        for (int32_t n = node; n > 0; n = p.tree.parent[at(n)]) path.push_back(p.tree.token[at(n)]);
        std::reverse(path.begin(), path.end());
        const int32_t depth = p.tree.depth[at(node)];
        chosen = sample(p.first_row + node, path, s.commit.banned(s.commit.count() + depth), s.context + depth + 1);
      }
      return chosen.token;
    };
    if (p.chain.nodes() > 0) {
      std::vector<uint8_t> in_chain(at(p.tree.size()), 0);
      std::fill(in_chain.begin(), in_chain.begin() + p.chain.size(), uint8_t{1});
      p.walk = follow_tree(p.tree, choose, in_chain);
      follow_shadow(p, follow_tree(p.tree, choose, p.in_tree));
    } else {
      p.walk = follow_tree(p.tree, choose);
    }
    if (p.failed) return;
    std::vector<int32_t> run;
    p.margins.push_back(memo[0].margin);
    for (int32_t node : p.walk.path) {
      run.push_back(p.tree.token[at(node)]);
      p.margins.push_back(memo[at(node)].margin);
    }
    run.push_back(p.walk.next);
    settle(p, run, report);
    // Rows whose next token was committed: the root, and the nodes behind it whose own token was and is not the last.
    p.accepted.segment = p.segment;
    for (int32_t i = 0; i < p.kept; ++i) {
      p.accepted.rows.push_back(p.first_row + (i > 0 ? p.walk.path[at(i - 1)] : 0));
      p.accepted.next.push_back(run[at(i)]);
    }
    s.context += p.kept;
  }
  (void)forest;
  p.accepted.feed_drafter = (s.mode == SpeculationMode::kDflash || s.mode == SpeculationMode::kDdtree) && !s.behind;
  p.accepted.feed_mtp = s.mode == SpeculationMode::kNextn;
}

// The host side of the commit point: everything below derives from the cut.
void Rounds::settle(Part& p, std::span<const int32_t> run, PassReport* report) const {
  Sequence& s = *p.sequence;
  const int32_t before = s.commit.count();
  CommitPoint::Cut cut = s.commit.offer(run);
  p.kept = static_cast<int32_t>(cut.ids.size());
  for (int32_t i = 0; i < p.kept; ++i) {
    s.stats.smallest_gap = std::min(s.stats.smallest_gap, p.margins[at(i)]);
    if (p.margins[at(i)] < executor_.near_tie()) {
      if (s.stats.near_ties++ == 0) s.stats.first_near_tie = before + i;
    }
    if (s.sampling.penalised()) ++s.history.generated[cut.ids[at(i)]];
    if (!s.foretold.empty()) {
      const bool same = s.foretold.front() == cut.ids[at(i)];
      s.foretold.pop_front();
      if (!same) ++s.stats.shadow_disagreements, s.foretold.clear();
    }
  }
  s.anchor = cut.ids.back();
  s.generated.insert(s.generated.end(), cut.ids.begin(), cut.ids.end());
  if (!p.prefill) {
    const int32_t confirmed = std::min(static_cast<int32_t>(p.walk.path.size()), p.kept);
    s.acceptance.add(p.tree.nodes(), static_cast<int32_t>(p.walk.path.size()), p.kept);
    if (!s.request.own) {
      ++report->rounds;
      report->emitted += p.kept;
      report->drafted += p.tree.nodes();
      report->accepted += confirmed;
      if (p.drafts) {
        report->accepted_counts.push_back(confirmed);
        ++report->draft_rounds[static_cast<size_t>(s.mode)];
        report->draft_accepted[static_cast<size_t>(s.mode)] += confirmed;
      }
    }
  }
  s.delta.ids = std::move(cut.ids);
  s.delta.pieces = std::move(cut.pieces);
  s.delta.finish = cut.finish;
  s.delta.stop_id = cut.stop_id;
  s.delta.stop_string = std::move(cut.stop_string);
  s.finished = cut.finish != FinishReason::kNone;
}

// Compares what the tree would have committed with the chain, which is committed. Where the tree goes further, its tokens are kept and
// compared with what later rounds commit: the target said both, once in a branch of a tree and once on a chain, so a difference is a fault
// of tree verification (or a near-tie).
void Rounds::follow_shadow(Part& p, const Walk& tree_walk) const {
  Sequence& s = *p.sequence;
  const int32_t left = s.commit.left();
  const int32_t by_chain = std::min(static_cast<int32_t>(p.walk.path.size()) + 1, left);
  const int32_t by_tree = std::min(static_cast<int32_t>(tree_walk.path.size()) + 1, left);
  s.stats.tree_gain += by_tree - by_chain;
  std::vector<int32_t> run;
  for (int32_t node : tree_walk.path) run.push_back(p.tree.token[at(node)]);
  run.push_back(tree_walk.next);
  for (size_t i = s.foretold.size(); i < run.size(); ++i) s.foretold.push_back(run[i]);
}

void Rounds::learn(Part& p, PassReport* report) {
  Sequence& s = *p.sequence;
  if (!p.drafts) return;
  const bool sampled = s.sampling.temperature > 0;
  if (p.chain.nodes() == 0 && s.mode != SpeculationMode::kNextn) {
    std::vector<int32_t> path = p.walk.path;
    if (p.pool.nodes() > 0)
      for (int32_t& node : path) node = p.pool_place[at(node)];
    calibration_.observe(p.pool.nodes() > 0 ? p.pool : p.tree, path, p.walk.next, sampled);
  }
  if (s.fallback.drafted(static_cast<int32_t>(p.walk.path.size()), p.break_even) && !s.request.own) ++report->fallbacks;
}

void Rounds::record(const Part& p, double draft_ms, double verify_ms, double total_ms) {
  Sequence& s = *p.sequence;
  RoundRecord r;
  r.start = s.context - p.kept;
  r.token = p.tree.token;
  r.parent = p.tree.parent;
  r.log_prob.assign(p.tree.log_prob.begin(), p.tree.log_prob.end());
  r.accepted.assign(at(p.tree.size()), 0);
  r.accepted[0] = 1;
  const int32_t path = static_cast<int32_t>(p.walk.path.size());
  for (int32_t i = 0; i < std::min(path, p.kept); ++i) r.accepted[at(p.walk.path[at(i)])] = 1;
  r.next = p.kept > path ? p.walk.next : -1;
  r.draft_ms = static_cast<float>(p.drafts ? draft_ms : 0);
  r.verify_ms = static_cast<float>(verify_ms);
  r.total_ms = static_cast<float>(total_ms);
  s.stats.trees.push_back(std::move(r));
}

}  // namespace ddtree
