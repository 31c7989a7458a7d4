#include "nn/pair_executor.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "nn/assign.h"
#include "nn/buckets.h"

namespace ddtree::nn {
namespace {

Status invalid(std::string message) { return {Code::kInvalidArgument, std::move(message)}; }
Status fault(std::string message) { return {Code::kEngineFault, std::move(message)}; }

Status positive(const char* name, int64_t value) {
  if (value > 0) return {};
  return invalid(fmt::format("executor option {} is {}: it must be positive", name, value));
}

// Kinds of segments (ops/segment.h): the first part of their keys.
enum Kind : int32_t { kVerify = 1, kCommit, kDraft, kDraftStep };

void pad(std::vector<int32_t>* list, int32_t to, int32_t with) { list->resize(static_cast<size_t>(to), with); }

constexpr int32_t kFixedRows = 128;    // of a draft that is rounded up, as row_bucket's largest
constexpr int32_t kDraftRows = 256;    // rows of one draft pass: more queries than fit run one pass after another
constexpr int64_t kSeenTokens = 4096;  // different tokens of a slot's penalties that are staged with a pass; sequences share them

}  // namespace

PairParts parts_of(const LoadedPair& pair) {
  PairParts parts{.target = &pair.spec, .tensors = &pair.tensors, .mtp = pair.has_mtp()};
  if (pair.drafter) parts.drafter = &pair.drafter->spec, parts.drafter_tensors = &pair.drafter->tensors;
  return parts;
}

Result<std::unique_ptr<PairExecutor>> PairExecutor::create(std::unique_ptr<ops::Backend> backend, const LoadedPair& pair,
                                                           ExecutorOptions options, const Probe& probe) {
  return create(std::move(backend), parts_of(pair), options, probe);
}

Result<std::unique_ptr<PairExecutor>> PairExecutor::create(std::unique_ptr<ops::Backend> backend, const PairParts& parts,
                                                           ExecutorOptions options, const Probe& probe) {
  std::unique_ptr<PairExecutor> executor(new PairExecutor());
  executor->backend_ = std::move(backend);
  executor->spec_ = *parts.target;
  executor->options_ = options;
  DDTREE_RETURN_IF_ERROR(executor->check_options(parts));
  DDTREE_RETURN_IF_ERROR(executor->load(parts, probe));
  return executor;
}

Status PairExecutor::check_options(const PairParts& parts) {
  ExecutorOptions& o = options_;
  DDTREE_RETURN_IF_ERROR(positive("page_size", o.page_size));
  DDTREE_RETURN_IF_ERROR(positive("pages", o.pages));
  DDTREE_RETURN_IF_ERROR(positive("slots", o.slots));
  DDTREE_RETURN_IF_ERROR(positive("max_rows", o.max_rows));
  if (int64_t{o.pages} * o.page_size > INT32_MAX) {
    return invalid(fmt::format("executor options: {} pages of {} are more than {} tokens", o.pages, o.page_size, INT32_MAX));
  }
  if (o.max_logit_rows == 0) o.max_logit_rows = o.max_rows;
  if (o.max_logit_rows < 0 || o.max_logit_rows > o.max_rows) {
    return invalid(fmt::format("executor option max_logit_rows is {}: 0 to max_rows ({}) are possible", o.max_logit_rows, o.max_rows));
  }
  if (o.max_tentative_rows == 0) o.max_tentative_rows = o.max_rows;
  if (o.max_tentative_rows < 0 || o.max_tentative_rows > o.max_rows) {
    return invalid(
        fmt::format("executor option max_tentative_rows is {}: 0 to max_rows ({}) are possible", o.max_tentative_rows, o.max_rows));
  }
  if (o.real_vocab == 0) o.real_vocab = static_cast<int32_t>(spec_.vocab_size);
  if (o.real_vocab < 0 || o.real_vocab > spec_.vocab_size) {
    return invalid(
        fmt::format("executor option real_vocab is {}: the checkpoint has {} rows of embed_tokens", o.real_vocab, spec_.vocab_size));
  }
  DDTREE_RETURN_IF_ERROR(positive("top_k", o.top_k));
  if (parts.drafter && parts.drafter->hidden_size != spec_.hidden_size) {
    return {Code::kBadModel, fmt::format("drafter hidden_size {} is not the target's {}", parts.drafter->hidden_size, spec_.hidden_size)};
  }
  return {};
}

Status PairExecutor::load(const PairParts& parts, const Probe& probe) {
  const ExecutorOptions& o = options_;
  DDTREE_ASSIGN(share_, share_of(spec_, parts.ranks, parts.rank));
  const bool across_ranks = share_.ranks > 1;
  const ModelSpec own = share_spec(spec_, share_);
  const TargetTensors own_tensors = parts.tensors ? share_tensors(*parts.tensors, spec_, share_) : TargetTensors{};
  const auto first_id = static_cast<int32_t>(share_.vocab.first);
  own_real_vocab_ = static_cast<int32_t>(std::clamp<int64_t>(o.real_vocab - share_.vocab.first, 0, own.vocab_size));
  const int64_t room = int64_t{o.pages} * o.page_size;
  const int64_t positions = spec_.max_positions > 0 ? std::min(spec_.max_positions, room) : room;
  limits_ = {.max_rows = o.max_rows,
             .max_logit_rows = o.max_logit_rows,
             .max_tentative_rows = o.max_tentative_rows,
             .slots = o.slots,
             .pages = o.pages,
             .page_size = o.page_size,
             .vocab = spec_.vocab_size,
             .max_positions = positions};
  const DrafterSpec* draft = parts.drafter;
  const int64_t block = draft ? draft->block_size : 0;
  if (draft) blocks_ = static_cast<int32_t>(std::clamp<int64_t>(kDraftRows / block, 1, o.slots));
  const int64_t rows = std::max<int64_t>({o.max_rows, blocks_ * block, o.slots});
  const int64_t ahead = std::max<int64_t>(block, 64);  // positions that drafts may reach past the last committed one

  std::vector<int32_t> captures = draft ? draft->taps : std::vector<int32_t>{};
  captures.insert(captures.end(), probe.captures.begin(), probe.captures.end());
  ops::BackendLimits limits;
  limits.max_rows = rows;
  limits.max_positions = (positions + o.page_size - 1) / o.page_size * o.page_size + ahead;
  limits.max_linear_inputs = std::max({spec_.hidden_size * 2, own.intermediate_size, own.heads * own.head_dim,
                                       own.value_heads * own.value_dim, static_cast<int64_t>(captures.size()) * spec_.hidden_size,
                                       draft ? std::max(draft->intermediate_size, draft->heads * draft->head_dim) : 0});
  listed_ = 2 * kSeenTokens * std::clamp<int64_t>(o.slots, 4, 16);
  // Every segment of a pass has a slot of its own.
  limits.staged_bytes =
      ForestArrays::staged_bytes(rows, o.slots, o.slots * ((positions + ahead) / o.page_size + 2) + listed_) + 12 * rows * 4 + 1024;
  const int64_t draft_rows = std::max<int64_t>(draft ? blocks_ * (block - 1) : 0, parts.mtp ? o.slots : 0);
  limits.vocab = own.vocab_size;
  limits.max_logit_rows = o.max_logit_rows;
  limits.max_draft_rows = draft_rows;
  limits.max_top_k = std::min<int64_t>(o.top_k, o.real_vocab);
  DDTREE_RETURN_IF_ERROR(backend_->set_limits(limits));

  backend_->begin_loading();
  backend_->set_owner(ops::MemoryOwner::kTarget);
  const ops::RopeTable* rope = nullptr;
  DDTREE_ASSIGN(rope, backend_->make_rope(positions + ahead, spec_.rotary_dim, spec_.rope_theta));
  DDTREE_ASSIGN(target_, Target::create(backend_.get(), own, parts.tensors ? &own_tensors : nullptr,
                                        {.max_rows = o.max_rows,
                                         .max_tentative_rows = o.max_tentative_rows,
                                         .slots = o.slots,
                                         .pages = o.pages,
                                         .page_size = o.page_size,
                                         .captures = captures,
                                         .first_id = first_id,
                                         .across_ranks = across_ranks},
                                        rope));
  if (parts.mtp) {
    DDTREE_ASSIGN(mtp_, Mtp::create(backend_.get(), parts.tensors ? &*own_tensors.mtp : nullptr, target_->shape(),
                                    {.max_rows = static_cast<int32_t>(std::max(o.max_rows, o.slots)),
                                     .slots = o.slots,
                                     .pages = o.pages,
                                     .page_size = o.page_size,
                                     .fc_first = share_.fc.first},
                                    target_->embedding(), rope));
    all_mtp_rows_ = probe.all_mtp_rows;
  }
  if (draft) {
    backend_->set_owner(ops::MemoryOwner::kDrafter);
    const ops::RopeTable* draft_rope = nullptr;
    DDTREE_ASSIGN(draft_rope, backend_->make_rope(positions + ahead, draft->head_dim, draft->rope_theta));
    DDTREE_ASSIGN(
        drafter_,
        Drafter::create(
            backend_.get(), *draft, parts.drafter_tensors,
            {.context_rows = o.max_rows, .block_rows = static_cast<int32_t>(blocks_ * block), .pages = o.pages, .page_size = o.page_size},
            target_->embedding(), draft_rope));
  }
  backend_->set_owner(ops::MemoryOwner::kHead);
  DDTREE_ASSIGN(wanted_, backend_->make_tensor(o.max_logit_rows, spec_.hidden_size, backend_->activation()));
  DDTREE_ASSIGN(logits_, backend_->make_tensor(o.max_logit_rows, own.vocab_size, ops::Element::kFloat32));
  if (draft_rows > 0) {
    DDTREE_ASSIGN(draft_wanted_, backend_->make_tensor(draft_rows, spec_.hidden_size, backend_->activation()));
    DDTREE_ASSIGN(draft_logits_, backend_->make_tensor(draft_rows, own.vocab_size, ops::Element::kFloat32));
    draft_token_.resize(static_cast<size_t>(draft_rows * limits.max_top_k)), draft_log_prob_.resize(draft_token_.size());
  }
  chosen_.resize(static_cast<size_t>(o.max_logit_rows)), margin_.resize(chosen_.size()), bad_rows_.resize(chosen_.size());
  choose_in_pass_ = probe.choose_in_pass;
  backend_->set_owner(ops::MemoryOwner::kPass);
  mtp_position_.assign(o.slots, -1);
  DDTREE_RETURN_IF_ERROR(backend_->finish_loading(o.loading));
  options_.loading = {};
  return backend_->finish();
}

// BF16 activations: the golden prompts' logits move by up to 0.05 between kernels; float32 ones by less than 0.01.
float PairExecutor::near_tie() const {
  const bool narrow = backend_->activation() == ops::Element::kBfloat16 || options_.precision == Precision::kBfloat16Boundaries;
  return narrow ? 0.05f : 0.01f;
}

int32_t PairExecutor::padded_rows(int32_t rows) const {
  const int32_t bucket = backend_->fixed_shapes() ? row_bucket(rows, options_.max_logit_rows) : 0;
  return bucket > 0 ? bucket : rows;
}

void PairExecutor::reset_slot(int32_t slot) {
  if (slot < 0 || slot >= options_.slots) return;
  target_->reset_slot(slot);
  mtp_position_[slot] = -1;
}

std::optional<ForestShape> PairExecutor::rounded(const ForestShape& of, int32_t most_rows) const {
  if (!backend_->fixed_shapes()) return std::nullopt;
  ForestShape to = of;
  to.rows = row_bucket(of.rows, most_rows);
  if (to.rows == 0) return std::nullopt;
  to.segments = count_bucket(of.segments, options_.slots);
  to.max_position = position_bucket(of.max_position);
  to.max_segment_rows = row_bucket(of.max_segment_rows, to.rows);
  to.max_tree_rows = of.max_tree_rows > 0 ? row_bucket(of.max_tree_rows, to.rows) : 0;
  to.max_certain_rows = of.max_certain_rows > 0 ? row_bucket(of.max_certain_rows, to.rows) : 0;
  return to;
}

bool PairExecutor::make_rules(const Forest& forest, std::vector<ops::SampleRule>* rules, std::vector<uint8_t>* left) {
  bool any = false;
  int64_t listed = 0;
  std::vector<int32_t> seen;
  left->assign(forest.segments.size(), 0);
  for (size_t i = 0; i < forest.segments.size(); ++i) {
    ops::SampleRule& rule = rules->emplace_back();
    const Segment& s = forest.segments[i];
    const Choice& c = s.choice;
    const auto wants = forest.wants_logits.begin() + s.first_row;
    if (c.greedy() || std::find(wants, wants + s.row_count, uint8_t{1}) == wants + s.row_count) continue;
    seen.clear();
    if (c.history && c.params.penalised()) {
      for (const auto& [id, times] : c.history->generated)
        if (times > 0) seen.push_back(id), seen.push_back(times);
      if (c.params.repetition_penalty != 1) {
        for (const int32_t id : c.history->prompt) {
          const auto g = c.history->generated.find(id);
          if (g == c.history->generated.end() || g->second <= 0) seen.push_back(id), seen.push_back(0);
        }
      }
    }
    const auto more = static_cast<int64_t>(seen.size() + c.banned.size());
    if (listed + more > listed_ || share_.ranks > 1) {  // no rank has whole rows of logits
      (*left)[i] = 1;
      continue;
    }
    listed += more;
    any = true;
    rule.params = c.params;
    if (!c.history) rule.params.presence_penalty = rule.params.frequency_penalty = 0, rule.params.repetition_penalty = 1;
    rule.first_seen = arrays_.add_list(seen), rule.seen = static_cast<int32_t>(seen.size() / 2), rule.history_end = c.history_end;
    rule.first_banned = arrays_.add_list(c.banned), rule.banned = static_cast<int32_t>(c.banned.size()), rule.banned_end = c.banned_end;
  }
  return any;
}

Status PairExecutor::forward(const Forest& forest, PassOutput* output) {
  DDTREE_RETURN_IF_ERROR(check_forest(forest, limits_));
  committed_ = true;  // until the pass has run, there is nothing to commit
  arrays_.clear();
  bool steps = true;  // certain segments have one row each: no prompt
  for (const Segment& s : forest.segments) {
    arrays_.add_segment(s.certain, s.slot, s.pages, s.context);
    for (int32_t r = s.first_row; r < s.first_row + s.row_count; ++r) {
      arrays_.add_row(forest.token[r], forest.position[r], forest.parent[r], options_.page_size);
    }
    steps &= !s.certain || s.row_count == 1;
  }
  std::vector<int32_t> from;
  output->faulty_rows.clear();
  output->logits_row.assign(forest.token.size(), -1);
  for (size_t r = 0; r < forest.token.size(); ++r) {
    if (!forest.wants_logits[r]) continue;
    output->logits_row[r] = static_cast<int32_t>(from.size());
    from.push_back(static_cast<int32_t>(r));
  }
  const auto count = static_cast<int32_t>(from.size());
  const bool all = count == arrays_.rows();
  const std::optional<ForestShape> fixed = steps && all ? rounded(arrays_.shape(), options_.max_logit_rows) : std::nullopt;
  if (fixed) arrays_.pad(*fixed);
  std::vector<ops::SampleRule> rules;
  std::vector<uint8_t> left;
  const ops::SampleRule* staged_rules = nullptr;
  const bool sampled = !logits_on_host() && count > 0 && make_rules(forest, &rules, &left);
  backend_->stage_begin(ops::Lane::kPass);
  DDTREE_RETURN_IF_ERROR(arrays_.stage(backend_.get(), ops::Lane::kPass, &staged_, sampled ? &rules : nullptr, &staged_rules));
  const int32_t* staged_from = all ? nullptr : backend_->stage<int32_t>(ops::Lane::kPass, from);
  if (!all && !staged_from) return fault("the list of logit rows does not fit its staging lane");

  output->logits = nullptr;
  output->chosen.clear(), output->margin.clear();
  const bool on_host = logits_on_host();
  const int32_t logit_rows = fixed ? fixed->rows : count;
  const ops::Tensor logits = logits_.row_range(0, logit_rows);
  const auto ops = [&] {
    target_->forward(staged_);
    if (logit_rows == 0) return;
    ops::Tensor x = target_->hidden().row_range(0, logit_rows);
    if (!all) {
      x = wanted_.row_range(0, logit_rows);
      backend_->copy_rows({.count = logit_rows, .x = target_->hidden(), .from = staged_from, .y = x});
    }
    target_->head(x, logits);
    if (on_host) {
      backend_->finish_logits({.logits = logits, .real_vocab = options_.real_vocab, .bad_row = &bad_row_});
    } else if (sampled) {
      backend_->sample_rows({.forest = &staged_,
                             .logits = logits,
                             .row = staged_from,
                             .rule = staged_rules,
                             .real_vocab = options_.real_vocab,
                             .token = chosen_.data(),
                             .margin = margin_.data(),
                             .bad = bad_rows_.data()});
    } else {
      backend_->best_two({.logits = logits,
                          .real_vocab = own_real_vocab_,
                          .first_id = static_cast<int32_t>(share_.vocab.first),
                          .token = chosen_.data(),
                          .margin = margin_.data(),
                          .bad = bad_rows_.data()});
    }
  };
  bad_row_ = -1;
  if (fixed) {
    const ForestShape& f = *fixed;
    backend_->segment(
        {{kVerify, f.rows, f.segments, f.max_position, f.max_segment_rows, f.max_tree_rows, f.max_certain_rows, sampled ? 1 : 0}}, ops);
  } else {
    backend_->once(ops);
  }
  if (count > 0 && on_host) DDTREE_ASSIGN(output->logits, backend_->host_floats(logits));
  DDTREE_RETURN_IF_ERROR(backend_->finish());
  if (!on_host)
    output->chosen.assign(chosen_.begin(), chosen_.begin() + count), output->margin.assign(margin_.begin(), margin_.begin() + count);
  for (size_t i = 0; i < left.size(); ++i) {
    const Segment& s = forest.segments[i];
    for (int32_t r = s.first_row; left[i] && r < s.first_row + s.row_count; ++r)
      if (output->logits_row[r] >= 0) output->chosen[output->logits_row[r]] = -1;
  }

  // What commit() needs stays here: the caller's page tables may move.
  pass_ = forest;
  pass_pages_.clear();
  for (const Segment& s : forest.segments) pass_pages_.insert(pass_pages_.end(), s.pages.begin(), s.pages.end());
  size_t at = 0;
  for (Segment& s : pass_.segments) {
    s.pages = std::span<const int32_t>(pass_pages_).subspan(at, s.pages.size());
    at += s.pages.size();
    s.choice = {};  // points into what is the caller's
  }
  committed_ = false;
  const auto finite = [&](int32_t i) {
    const float* x = output->logits + static_cast<int64_t>(i) * spec_.vocab_size;
    return std::all_of(x, x + options_.real_vocab, [](float v) { return std::isfinite(v); });
  };
  // One sequence's fault is not its neighbours': rows never see other segments, so all rows but these are right.
  for (int32_t i = 0; i < count; ++i)
    if (on_host ? bad_row_ >= 0 && !finite(i) : bad_rows_[i] != 0) output->faulty_rows.push_back(from[i]);
  if (!output->faulty_rows.empty()) {
    const int32_t row = output->faulty_rows.front();
    size_t segment = 0;
    while (row >= pass_.segments[segment].first_row + pass_.segments[segment].row_count) ++segment;
    return fault(fmt::format("logits of row {} (segment {}, slot {}, position {}, token {}) are not finite", row, segment,
                             pass_.segments[segment].slot, pass_.position[row], pass_.token[row]));
  }
  return {};
}

Result<const float*> PairExecutor::row_logits(const PassOutput& output, int32_t logits_row) {
  if (output.logits) return output.logits + static_cast<int64_t>(logits_row) * spec_.vocab_size;
  if (logits_row < 0 || logits_row >= static_cast<int32_t>(output.chosen.size()))
    return fault(fmt::format("logits of row {} of {} asked for", logits_row, output.chosen.size()));
  const float* values = nullptr;
  DDTREE_ASSIGN(values, backend_->host_floats(logits_.row_range(logits_row, 1)));
  if (ops::Collectives* group = share_.ranks > 1 ? backend_->group() : nullptr) {
    // Ranks have as many columns or one less; what is gathered is as long for all.
    const int64_t each = (spec_.vocab_size + share_.ranks - 1) / share_.ranks;
    std::vector<float> mine(values, values + share_.vocab.count), all(static_cast<size_t>(each * share_.ranks));
    mine.resize(static_cast<size_t>(each));
    group->all_gather(mine.data(), each * static_cast<int64_t>(sizeof(float)), all.data());
    DDTREE_RETURN_IF_ERROR(group->status());
    row_.clear();
    for (int32_t r = 0; r < share_.ranks; ++r)
      row_.insert(row_.end(), all.begin() + r * each, all.begin() + r * each + share_rows(spec_.vocab_size, share_.ranks, r).count);
  } else {
    row_.assign(values, values + spec_.vocab_size);
  }
  std::fill(row_.begin() + options_.real_vocab, row_.end(), -std::numeric_limits<float>::infinity());
  return static_cast<const float*>(row_.data());
}

Status PairExecutor::check_accepted(std::span<const Accepted> accepted) const {
  std::vector<uint8_t> seen(pass_.segments.size(), 0);
  for (size_t i = 0; i < accepted.size(); ++i) {
    const Accepted& a = accepted[i];
    if (a.segment < 0 || a.segment >= static_cast<int32_t>(pass_.segments.size())) {
      return invalid(fmt::format("accepted {}: segment {} of {}", i, a.segment, pass_.segments.size()));
    }
    if (seen[a.segment]++) return invalid(fmt::format("accepted {}: segment {} is named twice", i, a.segment));
    const Segment& s = pass_.segments[a.segment];
    if (a.rows.empty()) return invalid(fmt::format("accepted {}: no rows", i));
    if (s.certain && static_cast<int32_t>(a.rows.size()) != s.row_count) {
      return invalid(fmt::format("accepted {}: {} rows of certain segment {}, all {} are", i, a.rows.size(), a.segment, s.row_count));
    }
    if ((a.feed_drafter || a.feed_mtp) && a.next.size() != a.rows.size()) {
      return invalid(fmt::format("accepted {}: next has {} tokens for {} rows", i, a.next.size(), a.rows.size()));
    }
    if (a.feed_drafter && !drafter_) return invalid(fmt::format("accepted {}: feed_drafter, but no drafter is loaded", i));
    if (a.feed_mtp && !mtp_) return invalid(fmt::format("accepted {}: feed_mtp, but the checkpoint has no MTP head", i));
    for (size_t j = 0; j < a.rows.size(); ++j) {
      const int32_t row = a.rows[j];
      if (row < s.first_row || row >= s.first_row + s.row_count) {
        return invalid(fmt::format("accepted {}: row {} is not of segment {}", i, row, a.segment));
      }
      const int32_t parent = j == 0 ? -1 : a.rows[j - 1];
      if (pass_.parent[row] != parent) {
        return invalid(fmt::format("accepted {}: row {} follows {}, but its parent is {}", i, row, parent, pass_.parent[row]));
      }
      if (a.feed_mtp && (a.next[j] < 0 || a.next[j] >= spec_.vocab_size)) {
        return invalid(fmt::format("accepted {}: next token {} is outside the vocabulary of {}", i, a.next[j], spec_.vocab_size));
      }
    }
  }
  return {};
}

Status PairExecutor::commit(const Forest& forest, std::span<const Accepted> accepted) {
  if (committed_) return fault("commit() without a forward() before it");
  if (forest.token.size() != pass_.token.size() || forest.segments.size() != pass_.segments.size()) {
    return invalid(fmt::format("commit(): a forest of {} rows and {} segments, the last pass had {} and {}", forest.token.size(),
                               forest.segments.size(), pass_.token.size(), pass_.segments.size()));
  }
  DDTREE_RETURN_IF_ERROR(check_accepted(accepted));
  committed_ = true;
  Kept kept;
  keep_paths(accepted, &kept);
  if (drafter_) keep_features(accepted, &kept);
  if (mtp_) keep_mtp(accepted, &kept);
  if (kept.slot.empty() && kept.from.empty() && kept.mtp_from.empty()) return {};
  const bool fixed = pad_kept(&kept);

  const auto stage = [&](const std::vector<int32_t>& list) { return backend_->stage<int32_t>(ops::Lane::kCommit, list); };
  backend_->stage_begin(ops::Lane::kCommit);
  const ops::Paths paths{.count = static_cast<int32_t>(kept.slot.size()),
                         .rows = static_cast<int32_t>(kept.row.size()),
                         .offset = stage(kept.offset),
                         .row = stage(kept.row),
                         .slot = stage(kept.slot)};
  const int32_t *from = stage(kept.from), *position = stage(kept.position), *place = stage(kept.place);
  const int32_t *mtp_from = stage(kept.mtp_from), *wanted = stage(kept.mtp_wanted), *last = stage(kept.mtp_last),
                *mtp_slot = stage(kept.mtp_slot);
  if (!paths.offset || !paths.row || !paths.slot || !from || !position || !place || !mtp_from || !wanted || !last || !mtp_slot)
    return fault("the accepted rows do not fit their staging lane");
  ops::Forest view;
  if (!kept.mtp_from.empty()) DDTREE_RETURN_IF_ERROR(arrays_.stage(backend_.get(), ops::Lane::kCommit, &view));

  const auto ops = [&] {
    target_->commit(staged_, paths);
    if (const auto rows = static_cast<int32_t>(kept.from.size()); rows > 0) {
      // The drafter's taps are the first captures; a probe's come behind them.
      const ops::Tensor to = drafter_->features();
      backend_->copy_rows({.count = rows, .x = target_->features().col_range(0, to.cols), .from = from, .y = to});
      drafter_->feed(rows, position, place);
    }
    if (!kept.mtp_from.empty()) {
      mtp_->forward(view, target_->hidden(), mtp_from, wanted, static_cast<int32_t>(kept.mtp_wanted.size()));
      backend_->copy_rows(
          {.count = static_cast<int32_t>(kept.mtp_slot.size()), .x = mtp_->output(), .from = last, .y = mtp_->slots(), .to = mtp_slot});
    }
  };
  if (fixed) {
    backend_->segment({{kCommit, paths.count, paths.rows, static_cast<int32_t>(kept.from.size()), view.rows, view.segments,
                        view.max_position, view.max_certain_rows}},
                      ops);
  } else {
    backend_->once(ops);
  }
  return {};
}

void PairExecutor::keep_paths(std::span<const Accepted> accepted, Kept* kept) const {
  for (const Accepted& a : accepted) {
    if (pass_.segments[a.segment].certain) continue;
    kept->row.insert(kept->row.end(), a.rows.begin(), a.rows.end());
    kept->offset.push_back(static_cast<int32_t>(kept->row.size()));
    kept->slot.push_back(pass_.segments[a.segment].slot);
  }
}

void PairExecutor::keep_features(std::span<const Accepted> accepted, Kept* kept) const {
  for (const Accepted& a : accepted) {
    if (!a.feed_drafter) continue;
    const auto& pages = pass_.segments[a.segment].pages;
    for (const int32_t row : a.rows) {
      const int32_t position = pass_.position[row];
      kept->from.push_back(row);
      kept->position.push_back(position);
      kept->place.push_back(pages[position / options_.page_size] * options_.page_size + position % options_.page_size);
    }
  }
}

void PairExecutor::keep_mtp(std::span<const Accepted> accepted, Kept* kept) {
  arrays_.clear();
  for (const Accepted& a : accepted) {
    if (!a.feed_mtp) continue;
    const Segment& s = pass_.segments[a.segment];
    // Row i of the head stands where the target's row stands, and is made of the token after it.
    arrays_.add_segment(true, s.slot, s.pages, pass_.position[a.rows.front()]);
    for (size_t j = 0; j < a.rows.size(); ++j) {
      const int32_t row = arrays_.rows();
      arrays_.add_row(a.next[j], pass_.position[a.rows[j]], j == 0 ? -1 : row - 1, options_.page_size);
      kept->mtp_from.push_back(a.rows[j]);
      if (all_mtp_rows_ || j + 1 == a.rows.size()) kept->mtp_wanted.push_back(row);
    }
    kept->mtp_last.push_back(static_cast<int32_t>(kept->mtp_wanted.size()) - 1);
    kept->mtp_slot.push_back(s.slot);
    mtp_position_[s.slot] = pass_.position[a.rows.back()];
  }
}

// Rounds everything up; false where something is too large, and nothing was padded then.
bool PairExecutor::pad_kept(Kept* kept) {
  if (!backend_->fixed_shapes() || all_mtp_rows_) return false;
  const auto size = [](const std::vector<int32_t>& list) { return static_cast<int32_t>(list.size()); };
  const int32_t rows = kept_bucket(size(kept->row), options_.max_rows), fed = kept_bucket(size(kept->from), options_.max_rows);
  if ((rows == 0 && !kept->row.empty()) || (fed == 0 && !kept->from.empty())) return false;
  if (!kept->mtp_from.empty()) {
    const std::optional<ForestShape> shape = rounded(arrays_.shape(), options_.max_rows);
    if (!shape) return false;
    arrays_.pad(*shape);
    pad(&kept->mtp_from, shape->rows, -1);
    pad(&kept->mtp_wanted, shape->segments, 0), pad(&kept->mtp_last, shape->segments, -1), pad(&kept->mtp_slot, shape->segments, -1);
  }
  if (!kept->slot.empty()) {
    const int32_t count = count_bucket(size(kept->slot), options_.slots);
    pad(&kept->row, rows, -1), pad(&kept->offset, count + 1, kept->offset.back()), pad(&kept->slot, count, -1);
  }
  pad(&kept->from, fed, -1), pad(&kept->position, fed, 0), pad(&kept->place, fed, -1);
  return true;
}

Status PairExecutor::check_queries(std::span<const DraftQuery> queries, bool needs_slot) const {
  for (size_t i = 0; i < queries.size(); ++i) {
    const DraftQuery& q = queries[i];
    if (q.context < 0 || q.context > limits_.max_positions) {
      return invalid(fmt::format("draft {}: context {} of at most {} positions", i, q.context, limits_.max_positions));
    }
    if (q.anchor < 0 || q.anchor >= spec_.vocab_size) {
      return invalid(fmt::format("draft {}: anchor {} is outside the vocabulary of {}", i, q.anchor, spec_.vocab_size));
    }
    if (needs_slot && (q.slot < 0 || q.slot >= options_.slots)) {
      return invalid(fmt::format("draft {}: slot {} of {}", i, q.slot, options_.slots));
    }
    DDTREE_RETURN_IF_ERROR(check_pages(q.pages, q.context, limits_, fmt::format("draft {}", i)));
  }
  return {};
}

Status PairExecutor::draft(std::span<const DraftQuery> queries, int32_t top_k, DraftOutput* output) {
  if (!drafter_) return invalid("draft(): no drafter is loaded");
  if (top_k < 1 || top_k > options_.real_vocab) {
    return invalid(fmt::format("draft(): top_k is {}, 1 to {} are possible", top_k, options_.real_vocab));
  }
  const auto block = static_cast<int32_t>(drafter_->spec().block_size);
  DDTREE_RETURN_IF_ERROR(check_queries(queries, false));
  output->positions = block - 1;
  output->top_k = top_k;
  const size_t each = static_cast<size_t>(block - 1) * static_cast<size_t>(top_k);
  output->token.resize(queries.size() * each);
  output->log_prob.resize(queries.size() * each);
  for (size_t first = 0; first < queries.size(); first += static_cast<size_t>(blocks_)) {
    const size_t count = std::min(queries.size() - first, static_cast<size_t>(blocks_));
    DDTREE_RETURN_IF_ERROR(
        draft_blocks(queries.subspan(first, count), top_k, output->token.data() + first * each, output->log_prob.data() + first * each));
  }
  return {};
}

Status PairExecutor::draft_blocks(std::span<const DraftQuery> queries, int32_t top_k, int32_t* token, float* log_prob) {
  const DrafterSpec& spec = drafter_->spec();
  const auto block = static_cast<int32_t>(spec.block_size), count = static_cast<int32_t>(queries.size());
  arrays_.clear();
  std::vector<int32_t> wanted;
  for (const DraftQuery& q : queries) {
    arrays_.add_segment(false, -1, q.pages, q.context);
    for (int32_t i = 0; i < block; ++i) {
      const int32_t row = arrays_.rows();
      arrays_.add_row(i == 0 ? q.anchor : spec.mask_id, q.context + i, i == 0 ? -1 : row - 1, options_.page_size);
      if (i > 0) wanted.push_back(row);  // row k predicts the token at its own position; the anchor's row predicts nothing
    }
  }
  const int32_t drafts = count_bucket(count, blocks_);
  const bool fixed = backend_->fixed_shapes() && drafts * block <= kFixedRows && top_k <= options_.top_k;
  if (fixed) {
    ForestShape to = arrays_.shape();
    to.rows = drafts * block, to.segments = drafts, to.max_position = position_bucket(to.max_position);
    arrays_.pad(to);
    pad(&wanted, drafts * (block - 1), -1);
  }
  backend_->stage_begin(ops::Lane::kDraft);
  const int32_t* from = backend_->stage<int32_t>(ops::Lane::kDraft, wanted);
  ops::Forest view;
  DDTREE_RETURN_IF_ERROR(arrays_.stage(backend_.get(), ops::Lane::kDraft, &view));
  if (!from) return fault("the drafted rows do not fit their staging lane");
  const auto rows = static_cast<int32_t>(wanted.size());
  const ops::Tensor x = draft_wanted_.row_range(0, rows), logits = draft_logits_.row_range(0, rows);
  int32_t* const tokens = fixed ? draft_token_.data() : token;
  float* const log_probs = fixed ? draft_log_prob_.data() : log_prob;
  const auto ops = [&] {
    drafter_->forward(view);
    backend_->copy_rows({.count = rows, .x = drafter_->hidden(), .from = from, .y = x});
    target_->head(x, logits);
    backend_->top_k_log_probs({.logits = logits,
                               .real_vocab = own_real_vocab_,
                               .first_id = static_cast<int32_t>(share_.vocab.first),
                               .top_k = top_k,
                               .token = tokens,
                               .log_prob = log_probs,
                               .bad_row = &bad_row_});
  };
  bad_row_ = -1;
  if (fixed) backend_->segment({{kDraft, drafts, view.max_position, top_k}}, ops);
  else backend_->once(ops);
  DDTREE_RETURN_IF_ERROR(backend_->finish());
  const int32_t real = count * (block - 1);  // the rest is padding
  if (fixed) std::copy_n(tokens, real * top_k, token), std::copy_n(log_probs, real * top_k, log_prob);
  if (bad_row_ >= 0 && bad_row_ < real) {
    const DraftQuery& q = queries[bad_row_ / (block - 1)];
    return fault(fmt::format("drafter logits of position {} (slot {}, context {}) are not finite", q.context + 1 + bad_row_ % (block - 1),
                             q.slot, q.context));
  }
  return {};
}

Status PairExecutor::draft_nextn(std::span<const DraftQuery> queries, int32_t steps, DraftOutput* output) {
  if (!mtp_) return invalid("draft_nextn(): the checkpoint has no MTP head");
  if (steps < 1 || steps > 64 || steps > options_.max_rows) {
    return invalid(fmt::format("draft_nextn(): {} steps, 1 to {} are possible", steps, std::min(64, options_.max_rows)));
  }
  DDTREE_RETURN_IF_ERROR(check_queries(queries, true));
  for (size_t i = 0; i < queries.size(); ++i) {
    const DraftQuery& q = queries[i];
    if (q.context == 0 || mtp_position_[q.slot] != q.context - 1) {
      return invalid(
          fmt::format("draft_nextn {}: slot {} holds the MTP row of position {}, context {} needs that of {} (feed_mtp in every commit)", i,
                      q.slot, mtp_position_[q.slot], q.context, q.context - 1));
    }
  }
  output->positions = steps;
  output->top_k = 1;
  output->token.resize(queries.size() * static_cast<size_t>(steps));
  output->log_prob.resize(queries.size() * static_cast<size_t>(steps));
  const size_t together = std::min<size_t>(options_.slots, options_.max_rows / steps);
  for (size_t first = 0; first < queries.size(); first += together) {
    DDTREE_RETURN_IF_ERROR(draft_steps(queries.subspan(first, std::min(queries.size() - first, together)), steps, output, first));
  }
  return {};
}

// Step s runs rows 0 … s-1 of every chain again as tentative rows: their K and V live in the pass's scratch only, so pages keep nothing but
// committed rows. Chains are short, and the head is one layer.
Status PairExecutor::draft_steps(std::span<const DraftQuery> queries, int32_t steps, DraftOutput* output, size_t first) {
  const auto count = static_cast<int32_t>(queries.size());
  const int32_t chains = count_bucket(count, std::min(options_.slots, options_.max_rows / steps));
  const bool fixed = backend_->fixed_shapes() && chains * steps <= kFixedRows;
  const int32_t rows = fixed ? chains : count;
  std::vector<int32_t> slot;
  const ops::Tensor x = draft_wanted_.row_range(0, rows), logits = draft_logits_.row_range(0, rows);
  // Hidden state that chain b's row s reads: row b · steps + s. Row 0 reads the slot's.
  const ops::Tensor states = mtp_->chain_states();
  for (const DraftQuery& q : queries) slot.push_back(q.slot);
  pad(&slot, rows, -1);
  for (int32_t step = 0; step < steps; ++step) {
    std::vector<int32_t> to, from, wanted;
    for (int32_t b = 0; b < count; ++b) to.push_back(b * steps + step);
    arrays_.clear();
    for (int32_t b = 0; b < count && step > 0; ++b) {
      const DraftQuery& q = queries[b];
      arrays_.add_segment(false, q.slot, q.pages, q.context);
      for (int32_t s = 0; s < step; ++s) {
        const int32_t row = arrays_.rows();
        arrays_.add_row(output->token[(first + b) * steps + s], q.context + s, s == 0 ? -1 : row - 1, options_.page_size);
        from.push_back(b * steps + s);
      }
      wanted.push_back(arrays_.rows() - 1);
    }
    if (fixed) {
      ForestShape shape = arrays_.shape();
      shape.rows = chains * step, shape.segments = chains, shape.max_position = position_bucket(shape.max_position);
      if (step > 0) arrays_.pad(shape), pad(&from, shape.rows, -1), pad(&wanted, chains, 0);
      pad(&to, chains, -1);
    }
    backend_->stage_begin(ops::Lane::kDraft);
    const int32_t* staged[4] = {backend_->stage<int32_t>(ops::Lane::kDraft, slot), backend_->stage<int32_t>(ops::Lane::kDraft, to),
                                backend_->stage<int32_t>(ops::Lane::kDraft, from), backend_->stage<int32_t>(ops::Lane::kDraft, wanted)};
    if (!staged[0] || !staged[1] || !staged[2] || !staged[3]) return fault("the drafted rows do not fit their staging lane");
    ops::Forest view;
    if (step > 0) DDTREE_RETURN_IF_ERROR(arrays_.stage(backend_.get(), ops::Lane::kDraft, &view));
    const auto ops = [&] {
      if (step == 0) {
        backend_->copy_rows({.count = rows, .x = mtp_->slots(), .from = staged[0], .y = x});
      } else {
        mtp_->forward(view, states, staged[2], staged[3], rows);
        backend_->copy_rows({.count = rows, .x = mtp_->output(), .y = x});
      }
      backend_->copy_rows({.count = rows, .x = x, .y = states, .to = staged[1]});
      target_->head(x, logits);
      backend_->top_k_log_probs({.logits = logits,
                                 .real_vocab = own_real_vocab_,
                                 .first_id = static_cast<int32_t>(share_.vocab.first),
                                 .top_k = 1,
                                 .token = draft_token_.data(),
                                 .log_prob = draft_log_prob_.data(),
                                 .bad_row = &bad_row_});
    };
    bad_row_ = -1;
    if (fixed) backend_->segment({{kDraftStep, step, chains, view.max_position}}, ops);
    else backend_->once(ops);
    DDTREE_RETURN_IF_ERROR(backend_->finish());
    if (bad_row_ >= 0 && bad_row_ < count) {
      return fault(fmt::format("MTP logits of draft {} (slot {}, context {}) are not finite", step, queries[bad_row_].slot,
                               queries[bad_row_].context));
    }
    for (int32_t b = 0; b < count; ++b) {
      output->token[(first + b) * steps + step] = draft_token_[b];
      output->log_prob[(first + b) * steps + step] = draft_log_prob_[b];
    }
  }
  return {};
}

Status PairExecutor::feed_features(std::span<const int32_t> pages, int32_t first, std::span<const float> features) {
  if (!drafter_) return invalid("feed_features(): no drafter is loaded");
  const ops::Tensor to = drafter_->features();
  const auto all = static_cast<int32_t>(static_cast<int64_t>(features.size()) / to.cols);
  DDTREE_RETURN_IF_ERROR(check_pages(pages, first + all, limits_, "feed_features"));
  for (int32_t done = 0; done < all; done += options_.max_rows) {
    const int32_t rows = std::min(all - done, options_.max_rows);
    std::vector<int32_t> position(rows), place(rows);
    for (int32_t i = 0; i < rows; ++i) {
      position[i] = first + done + i;
      place[i] = pages[position[i] / options_.page_size] * options_.page_size + position[i] % options_.page_size;
    }
    backend_->stage_begin(ops::Lane::kCommit);
    const int32_t* staged[2] = {backend_->stage<int32_t>(ops::Lane::kCommit, position),
                                backend_->stage<int32_t>(ops::Lane::kCommit, place)};
    if (!staged[0] || !staged[1]) return fault("the drafter's rows do not fit their staging lane");
    backend_->upload(features.subspan(static_cast<size_t>(done) * to.cols, static_cast<size_t>(rows) * to.cols), to.row_range(0, rows));
    drafter_->feed(rows, staged[0], staged[1]);
  }
  return backend_->finish();
}

}  // namespace ddtree::nn
