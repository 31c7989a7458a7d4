#include "engine/validate.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <unordered_set>

#include "engine/pools.h"

namespace ddtree {
namespace {

template <class... A>
Status refuse(fmt::format_string<A...> format, A&&... a) {
  return {Code::kInvalidArgument, fmt::format(format, std::forward<A>(a)...)};
}

Status check_sampling(const SamplingParams& p) {
  const auto within = [](float x, float low, float high) { return std::isfinite(x) && x >= low && x <= high; };
  if (!within(p.temperature, 0, 100)) return refuse("temperature is {}; it must be from 0 (greedy) to 100", p.temperature);
  if (!within(p.top_p, 0, 1) || p.top_p == 0) return refuse("top_p is {}; it must be above 0 and at most 1 (off)", p.top_p);
  if (!within(p.min_p, 0, 1)) return refuse("min_p is {}; it must be from 0 (off) to 1", p.min_p);
  if (p.top_k < -1) return refuse("top_k is {}; it must be at least 1, or 0 or -1 for off", p.top_k);
  if (!within(p.presence_penalty, -2, 2)) return refuse("presence_penalty is {}; it must be from -2 to 2", p.presence_penalty);
  if (!within(p.frequency_penalty, -2, 2)) return refuse("frequency_penalty is {}; it must be from -2 to 2", p.frequency_penalty);
  // Divided by less, logits become infinite: in the pass they cannot be told from a broken card's, which takes the service's modes away.
  if (!within(p.repetition_penalty, kLeastRepetitionPenalty, 100))
    return refuse("repetition_penalty is {}; it must be from {} to 100 (1: off)", p.repetition_penalty, kLeastRepetitionPenalty);
  return {};
}

int32_t context_limit(const EngineOptions& options, const Executor& executor) {
  return options.context_length > 0 ? options.context_length : static_cast<int32_t>(executor.target().max_positions);
}

}  // namespace

SpeculationMode limited_mode(SpeculationMode mode, SpeculationMode most) {
  if (most == SpeculationMode::kNone) return most;
  if (most == SpeculationMode::kDflash && mode == SpeculationMode::kDdtree) return most;
  return mode;
}

SpeculationMode effective_mode(const Request& request, const EngineOptions& options) { return request.mode.value_or(options.mode); }

int32_t effective_budget(const Request& request, const EngineOptions& options) { return request.budget.value_or(options.budget); }

int32_t draft_overshoot(SpeculationMode mode, const EngineOptions& options) {
  return mode == SpeculationMode::kNextn ? options.nextn_steps : 0;
}

Status check_mode(SpeculationMode mode, const Executor& executor) {
  if ((mode == SpeculationMode::kDflash || mode == SpeculationMode::kDdtree) && executor.drafter() == nullptr)
    return refuse("mode {} needs a DFlash drafter and none is loaded; what works: {}", mode_name(mode),
                  executor.has_mtp() ? "NONE, NEXTN" : "NONE");
  if (mode == SpeculationMode::kNextn && !executor.has_mtp())
    return refuse("mode NEXTN needs an MTP head and the target has none; what works: {}",
                  executor.drafter() ? "NONE, DFLASH, DDTREE" : "NONE");
  return {};
}

Status validate_options(const EngineOptions& o, const Executor& executor) {
  const ExecutorOptions& e = executor.options();
  const int32_t logit_rows = e.max_logit_rows > 0 ? e.max_logit_rows : e.max_rows;
  if (o.max_running < 1) return refuse("max_running is {}; at least 1 sequence must run", o.max_running);
  if (o.max_running > std::min(e.max_rows, logit_rows))
    return refuse("max_running is {}, but a forest has {} rows ({} with logits): every sequence needs one", o.max_running, e.max_rows,
                  logit_rows);
  if (o.max_queue < 0) return refuse("max_queue is {}; it cannot be negative", o.max_queue);
  if (o.prefill_chunk < 1) return refuse("prefill_chunk is {}; at least 1 prompt row a pass is needed", o.prefill_chunk);
  if (o.lone_chunk < 0) return refuse("lone_chunk is {}; it must be prompt rows a pass, or 0 for prefill_chunk's", o.lone_chunk);
  if (o.top_k < 1) return refuse("top_k (candidates a position) is {}; at least 1 is needed", o.top_k);
  if (o.budget < 0 || o.budget >= e.max_rows)
    return refuse("budget is {}; it must be 0 (auto) to {}, the rows of a forest less the root", o.budget, e.max_rows - 1);
  if (o.nextn_steps < 1 || o.nextn_steps >= e.max_rows)
    return refuse("nextn_steps is {}; it must be 1 to {}", o.nextn_steps, e.max_rows - 1);
  if (executor.drafter() != nullptr && o.block_size != 0 && (o.block_size < 2 || o.block_size > executor.drafter()->block_size))
    return refuse("block_size is {}; it must be 2 to {}, the drafter's own (or 0 for that)", o.block_size, executor.drafter()->block_size);
  if (o.context_length < 0 || o.context_length > executor.target().max_positions)
    return refuse("context_length is {}; the model has {} positions", o.context_length, executor.target().max_positions);
  if (o.shadow_linear && o.mode != SpeculationMode::kDdtree)
    return refuse("shadow linear compares a tree with the chain: it needs mode DDTREE, not {}", mode_name(o.mode));
  if (e.slots < 1 || e.pages < 1) return refuse("the executor has {} slots and {} pages; at least one of each is needed", e.slots, e.pages);
  return check_mode(o.mode, executor);
}

Status validate_score(const ScoreRequest& s, const EngineOptions& options, const Executor& executor) {
  const size_t count = s.generated.size();
  if (count == 0) return refuse("there is no answer to score");
  if (s.from < 0 || static_cast<size_t>(s.from) >= count)
    return refuse("scoring from token {} of an answer of {}; it must be from 0 to {}", s.from, count, count - 1);
  if (s.request.sampling.temperature > 0 && s.request.sampling.seed == 0 && !s.request.sampling.seed_given)
    return refuse("a sampled answer can be scored only with the seed it was drawn with");
  Request whole = s.request;  // the same rules, for the text as a whole
  whole.prompt.insert(whole.prompt.end(), s.generated.begin(), s.generated.end() - 1);
  whole.max_tokens = 1;
  whole.min_tokens = 0;
  whole.mode = SpeculationMode::kNone;
  return validate_request(whole, options, executor);
}

Status validate_request(const Request& r, const EngineOptions& options, const Executor& executor) {
  if (r.prompt.empty()) return refuse("prompt is empty; at least one token is needed");
  const int32_t vocab = executor.real_vocab();
  for (size_t i = 0; i < r.prompt.size(); ++i)
    if (r.prompt[i] < 0 || r.prompt[i] >= vocab)
      return refuse("prompt[{}] is token {}; the vocabulary ends at {}", i, r.prompt[i], vocab - 1);
  if (r.max_tokens < 1) return refuse("max_tokens is {}; it must be at least 1", r.max_tokens);
  const int32_t context = context_limit(options, executor);
  if (static_cast<int64_t>(r.prompt.size()) + r.max_tokens > context)
    return refuse("prompt of {} tokens and max_tokens {} need {} positions; the context length is {}", r.prompt.size(), r.max_tokens,
                  r.prompt.size() + static_cast<size_t>(r.max_tokens), context);
  if (r.min_tokens < 0 || r.min_tokens > r.max_tokens)
    return refuse("min_tokens is {}; it must be from 0 to max_tokens ({})", r.min_tokens, r.max_tokens);
  for (size_t i = 0; i < r.stop_ids.size(); ++i)
    if (r.stop_ids[i] < 0 || r.stop_ids[i] >= vocab)
      return refuse("stop_token_ids[{}] is {}; the vocabulary ends at {}", i, r.stop_ids[i], vocab - 1);
  if (r.min_tokens > 0) {  // until then stop ids are banned; with every token banned there would be nothing to choose
    std::unordered_set<int32_t> banned(r.stop_ids.begin(), r.stop_ids.end());
    if (!r.ignore_eos)
      std::copy_if(options.eos_ids.begin(), options.eos_ids.end(), std::inserter(banned, banned.end()),
                   [&](int32_t id) { return id < vocab; });
    if (static_cast<int64_t>(banned.size()) >= vocab)
      return refuse("min_tokens is {}, and all {} tokens of the vocabulary are stop ids: none could come before", r.min_tokens, vocab);
  }
  for (size_t i = 0; i < r.stop_strings.size(); ++i)
    if (r.stop_strings[i].empty()) return refuse("stop[{}] is empty; a stop string needs at least one character", i);
  DDTREE_RETURN_IF_ERROR(check_sampling(r.sampling));
  const SpeculationMode mode = effective_mode(r, options);
  DDTREE_RETURN_IF_ERROR(check_mode(mode, executor));
  const int32_t budget = effective_budget(r, options), rows = executor.options().max_rows;
  if (budget < 0 || budget >= rows)
    return refuse("budget is {}; it must be 0 (auto) to {}, the rows of a forest less the root", budget, rows - 1);
  const int32_t need =
      pages_needed(static_cast<int32_t>(r.prompt.size()), r.max_tokens, draft_overshoot(mode, options), executor.options().page_size);
  if (need > executor.options().pages)
    return {Code::kDoesNotFit, fmt::format("prompt of {} tokens and max_tokens {} need {} KV pages of {} tokens; the pool has {}",
                                           r.prompt.size(), r.max_tokens, need, executor.options().page_size, executor.options().pages)};
  return {};
}

}  // namespace ddtree
