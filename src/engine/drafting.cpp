// `auto`: which sequences ask the drafter at all this round. A draft costs before it is known what it brings, so this is decided from what
// drafts brought so far (Outlook) and what everything costs here.
#include <algorithm>

#include "engine/rounds.h"

namespace ddtree {
namespace {

constexpr double kGain = 1.02;       // a plan must be this much better than plain decoding to be taken
constexpr double kNear = 0.85;       // of plain decoding: a plan this good may turn out to be better
constexpr int32_t kSeldom = 8;       // where none is near, only one in so many probes is made
constexpr int32_t kKnown = 64;       // drafts after which others tell what to expect: from then on
constexpr int32_t kSometimes = 4;    // one in so many is made of those that would lose
constexpr int32_t kProbeAfter = 48;  // plain rounds until a sequence is looked at again
constexpr int32_t kHopeless = 8;     // rounds in which even a perfect draft would not pay, until the drafter is no longer fed
constexpr int32_t kPromising = 16;   // rounds in which drafting would pay, until what it missed is run again
constexpr double kReplayGain = 1.1;  // and what that must win over its cost

}  // namespace

void Rounds::decide_drafting(std::vector<Part>& parts) {
  int32_t decoding = 0, fixed_queries = 0;
  double rows = 0, row_context = 0, gain = 0;
  std::vector<Part*> able, behind;
  bool starting = false;
  for (Part& p : parts) {
    Sequence& s = *p.sequence;
    if (p.prefill) {
      starting |= automatic(s) && s.context == 0 && !s.replaying;
      continue;
    }
    ++decoding;
    double nodes = 0;
    if (automatic(s)) {
      if (s.behind) p.drafts = false, behind.push_back(&p);
      else if (p.drafts) able.push_back(&p);
    } else if (p.drafts) {
      nodes = s.mode == SpeculationMode::kNextn ? options_.nextn_steps : s.budget > 0 ? s.budget : executor_.drafter()->block_size - 1;
      fixed_queries += s.mode == SpeculationMode::kNextn ? 0 : 1;
      gain += s.fallback.mean_accepted();
    }
    rows += 1 + nodes;
    row_context += s.context * (1 + nodes);
  }
  if (able.empty() && behind.empty() && !starting) return;

  // Sequences that are about to decode count as if they did: what is decided for a prompt holds for its whole answer.
  const int32_t sequences = starting ? static_cast<int32_t>(parts.size()) : std::max(decoding, 1);
  rows += sequences - decoding;
  const double mean_context = row_context / std::max(rows, 1.0);
  const auto round = [&](int32_t drafts) {
    return [this, fixed_queries, drafts, rows, row_context, mean_context, gain, sequences](int32_t b, double phi) {
      return costs_.draft(fixed_queries + drafts) + pass_ms(rows + b, row_context + b * mean_context, sequences, false) +
             costs_.commit(gain + phi) + costs_.host(sequences);
    };
  };
  const int32_t limit = static_cast<int32_t>(std::max(std::min(max_rows_, max_tentative_rows_) - rows, 0.0));
  const double tokens = sequences + gain, plain = tokens / round(0)(0, 0);
  const auto rate = [&](const std::vector<const Outlook*>& drafting) {
    return best_rate(drafting, tokens, limit, round(static_cast<int32_t>(drafting.size())));
  };

  // Could the best of drafts pay, for one sequence or for all?
  const Outlook perfect = Outlook::chain(static_cast<int32_t>(executor_.drafter()->block_size) - 1, 1.0);
  const bool hope =
      rate({&perfect}) > kGain * plain || rate(std::vector<const Outlook*>(static_cast<size_t>(sequences), &perfect)) > kGain * plain;
  for (Part& p : parts)
    if (automatic(*p.sequence) && p.prefill && p.sequence->context == 0 && !p.sequence->replaying) p.sequence->behind = !hope;

  // A sequence's own drafts count the more, the more there were.
  std::vector<Outlook> outlooks(parts.size());
  const auto outlook = [&](const Part* p) -> const Outlook* {
    Outlook& o = outlooks[static_cast<size_t>(p - parts.data())];
    if (o.expected().empty()) o = Outlook::blend(p->sequence->outlook, outlook_[p->sequence->sampling.temperature > 0]);
    return &o;
  };
  if (!able.empty()) {
    std::stable_sort(able.begin(), able.end(), [&](const Part* a, const Part* b) { return outlook(a)->total() > outlook(b)->total(); });
    size_t chosen = 0;
    double best = kGain * plain;
    const size_t all = able.size();
    for (const size_t n : {all, (all + 1) / 2, size_t{1}}) {
      std::vector<const Outlook*> drafting;
      for (size_t i = 0; i < n; ++i) drafting.push_back(outlook(able[i]));
      if (const double r = rate(drafting); r > best) best = r, chosen = n;
    }
    for (size_t i = 0; i < all; ++i) {
      Sequence& s = *able[i]->sequence;
      // A first draft, and one now and then, tell whether the outlook is (still) right.
      bool probe = hope && i >= chosen && (s.outlook.seen() == 0 ? s.rounds_without_draft == 0 : s.rounds_without_draft >= kProbeAfter);
      const int32_t seen = outlook_[s.sampling.temperature > 0].seen();
      const double alone = probe && seen > 0 ? rate({outlook(able[i])}) / plain : kGain;
      if (alone < kNear || (alone < 1 && seen >= kKnown)) {
        s.rounds_without_draft = 0;
        probe = probes_++ % (alone < kNear ? kSeldom : kSometimes) == 0;
      }
      able[i]->drafts = i < chosen || probe;
      s.rounds_without_draft = able[i]->drafts ? 0 : s.rounds_without_draft + 1;
      s.hopeless_rounds = hope ? 0 : s.hopeless_rounds + 1;
      if (s.hopeless_rounds >= kHopeless) s.behind = true, s.promising_rounds = 0;
    }
  }
  if (!behind.empty()) {
    std::vector<const Outlook*> drafting;
    for (const Part* p : able)
      if (p->drafts) drafting.push_back(outlook(p));
    const double now = drafting.empty() ? plain : rate(drafting);
    for (Part* p : behind) {
      Sequence& s = *p->sequence;
      drafting.push_back(outlook(p));
      const double then = rate(drafting);
      s.promising_rounds = then > kGain * now ? s.promising_rounds + 1 : 0;
      if (s.promising_rounds < kPromising) {
        drafting.pop_back();
        continue;
      }
      // As many tokens may be expected to come as have come already.
      const double coming = std::min(s.commit.left(), std::max(s.commit.count(), 16));
      const double saved = coming * sequences * (1 / now - 1 / then), cost = costs_.verify(s.context, 0.5 * s.context * s.context, 1);
      if (saved < kReplayGain * cost) {
        drafting.pop_back();
        continue;
      }
      executor_.reset_slot(s.slot);
      s.context = 0;
      s.replaying = true;
      s.behind = false;
      s.hopeless_rounds = s.rounds_without_draft = s.promising_rounds = 0;
      p->prefill = true;
      break;  // one at a time: the others go on
    }
  }
}

}  // namespace ddtree
