#include "nn/synthetic_executor.h"

#include <algorithm>
#include <cmath>

namespace ddtree {
namespace {

constexpr int32_t kNextnPositions = 3;

int32_t positions_of(const Executor& e) { return e.drafter() ? static_cast<int32_t>(e.drafter()->block_size) - 1 : kNextnPositions; }

double mean_of(double q, int32_t positions) {
  double sum = 0, power = 1;
  for (int32_t i = 0; i <= positions; ++i) sum += power, power *= q;
  return sum;
}

double log_prob(double q, int32_t rank) { return rank == 0 ? std::log(q) : std::log((1 - q) / 4) + (rank - 1) * std::log(0.75); }

uint64_t mixed(uint64_t x) {  // splitmix64's finish
  x += 0x9E3779B97F4A7C15u;
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
  x = (x ^ x >> 27) * 0x94D049BB133111EBu;
  return x ^ x >> 31;
}

}  // namespace

double SyntheticExecutor::most(const Executor& inner) { return positions_of(inner) + 1; }

SyntheticExecutor::SyntheticExecutor(std::unique_ptr<Executor> inner, double mean, uint64_t seed) : inner_(std::move(inner)), seed_(seed) {
  double low = 0, high = 1;
  for (int i = 0; i < 60; ++i) {
    q_ = (low + high) / 2;
    (mean_of(q_, positions_of(*inner_)) < mean ? low : high) = q_;
  }
  drafted_.resize(static_cast<size_t>(inner_->options().slots));
}

void SyntheticExecutor::reset_slot(int32_t slot) {
  if (slot >= 0 && slot < static_cast<int32_t>(drafted_.size())) drafted_[static_cast<size_t>(slot)].context = -1;
  inner_->reset_slot(slot);
}

void SyntheticExecutor::remember(std::span<const DraftQuery> queries, DraftOutput* output) {
  const auto each = static_cast<size_t>(output->positions) * static_cast<size_t>(output->top_k);
  for (size_t i = 0; i < queries.size(); ++i) {
    if (queries[i].slot < 0) continue;  // a measurement's, of no sequence
    Drafted& d = drafted_[static_cast<size_t>(queries[i].slot)];
    d.context = queries[i].context, d.positions = output->positions, d.top_k = output->top_k;
    d.token.assign(output->token.begin() + static_cast<std::ptrdiff_t>(i * each),
                   output->token.begin() + static_cast<std::ptrdiff_t>((i + 1) * each));
  }
  for (size_t i = 0; i < output->log_prob.size(); ++i)
    output->log_prob[i] = static_cast<float>(log_prob(q_, static_cast<int32_t>(i % static_cast<size_t>(output->top_k))));
}

Status SyntheticExecutor::draft(std::span<const DraftQuery> queries, int32_t top_k, DraftOutput* output) {
  const Status status = inner_->draft(queries, top_k, output);
  if (status.ok()) remember(queries, output);
  return status;
}

Status SyntheticExecutor::draft_nextn(std::span<const DraftQuery> queries, int32_t steps, DraftOutput* output) {
  const Status status = inner_->draft_nextn(queries, steps, output);
  if (status.ok()) remember(queries, output);
  return status;
}

int32_t SyntheticExecutor::choice(int32_t slot, int32_t position) const {
  const Drafted& d = drafted_[static_cast<size_t>(slot)];
  const uint64_t drawn = mixed(mixed(seed_ ^ d.prompt) ^ static_cast<uint64_t>(position));
  const double u = static_cast<double>(drawn >> 11) * 0x1p-53;
  const int32_t of = position - d.context - 1;  // the anchor stands at the context; drafts follow it
  std::span<const int32_t> candidates;
  if (d.context >= 0 && of >= 0 && of < d.positions)
    candidates = std::span(d.token).subspan(static_cast<size_t>(of) * static_cast<size_t>(d.top_k), static_cast<size_t>(d.top_k));
  double below = 0;
  for (size_t rank = 0; rank < candidates.size(); ++rank)
    if (u < (below += std::exp(log_prob(q_, static_cast<int32_t>(rank))))) return candidates[rank];
  // None of them: any other.
  auto token = static_cast<int32_t>(mixed(drawn) % static_cast<uint64_t>(real_vocab()));
  while (std::find(candidates.begin(), candidates.end(), token) != candidates.end()) token = (token + 1) % real_vocab();
  return token;
}

Status SyntheticExecutor::forward(const Forest& forest, PassOutput* output) {
  DDTREE_RETURN_IF_ERROR(inner_->forward(forest, output));
  const auto wanted =
      static_cast<size_t>(std::count_if(output->logits_row.begin(), output->logits_row.end(), [](int32_t r) { return r >= 0; }));
  output->logits = nullptr;
  output->chosen.assign(wanted, 0), output->margin.assign(wanted, 1.0f);  // no near-ties
  for (const Segment& s : forest.segments) {
    if (s.context == 0 && s.slot >= 0)
      drafted_[static_cast<size_t>(s.slot)].prompt = static_cast<uint64_t>(forest.token[static_cast<size_t>(s.first_row)]);
    for (int32_t r = s.first_row; r < s.first_row + s.row_count; ++r) {
      const int32_t to = output->logits_row[static_cast<size_t>(r)];
      if (to >= 0) output->chosen[static_cast<size_t>(to)] = choice(s.slot, forest.position[static_cast<size_t>(r)] + 1);
    }
  }
  return {};
}

Result<const float*> SyntheticExecutor::row_logits(const PassOutput&, int32_t) {
  return Status(Code::kInvalidArgument, "synthetic acceptance makes choices, not logits: answers can be drawn but not scored");
}

}  // namespace ddtree
