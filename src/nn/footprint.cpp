#include "nn/footprint.h"

#include "model/roles.h"
#include "nn/pair_executor.h"

namespace ddtree {
namespace {

using ops::MemoryOwner;
using ops::MemoryUse;

Result<ops::MemoryLedger> count(const nn::PairParts& parts, const ExecutorOptions& options, ops::DeviceKind kind, int threads) {
  auto made = nn::PairExecutor::create(std::make_unique<ops::CountingBackend>(kind, threads), parts, options);
  if (!made.ok()) return made.status();
  return (*made)->backend().ledger();
}

constexpr MemoryOwner kOwners[] = {MemoryOwner::kTarget, MemoryOwner::kEmbedding, MemoryOwner::kHead, MemoryOwner::kMtp,
                                   MemoryOwner::kDrafter};

}  // namespace

Result<PairFootprint> PairFootprint::of(const LoadedPair& pair, ops::DeviceKind kind, int threads, int32_t ranks) {
  PairFootprint out;
  out.target_ = pair.spec;
  if (pair.drafter) out.drafter_ = pair.drafter->spec;
  out.mtp_ = pair.has_mtp();
  out.kind_ = kind;
  out.threads_ = threads;
  out.ranks_ = ranks;
  // Weights do not depend on the options: the least of each.
  ExecutorOptions least;
  least.pages = least.slots = least.max_rows = 1;
  nn::PairParts parts = nn::parts_of(pair);
  parts.ranks = ranks, parts.rank = ranks - 1;  // the last one's rows of the vocabulary are never fewer than another's
  auto all = count(parts, least, kind, threads);
  if (!all.ok()) return all.status();
  for (const MemoryOwner owner : kOwners) out.weights_.book(owner, MemoryUse::kWeights, all->bytes(owner, MemoryUse::kWeights));
  return out;
}

Result<PairFootprint> PairFootprint::of(const PairSpecs& specs, ops::DeviceKind kind, int threads, int32_t ranks) {
  LoadedPair pair;
  pair.spec = specs.target;
  const auto checkpoint = Checkpoint::dummy("dummy:" + specs.name, 1);
  auto tensors = bind_target(*checkpoint, &pair.spec);
  if (!tensors.ok()) return tensors.status();
  pair.tensors = std::move(*tensors);
  const auto drafts = Checkpoint::dummy("dummy:" + specs.drafter_name, 1);
  if (specs.drafter) {
    auto of = bind_drafter(*drafts, *specs.drafter);
    if (!of.ok()) return of.status();
    pair.drafter.emplace();
    pair.drafter->spec = *specs.drafter;
    pair.drafter->tensors = std::move(*of);
  }
  return PairFootprint::of(pair, kind, threads, ranks);
}

Result<ops::MemoryLedger> PairFootprint::with(const ExecutorOptions& options) const {
  const nn::PairParts parts{
      .target = &target_, .mtp = mtp_, .drafter = drafter_ ? &*drafter_ : nullptr, .rank = ranks_ - 1, .ranks = ranks_};
  auto ledger = count(parts, options, kind_, threads_);
  if (!ledger.ok()) return ledger;
  for (const MemoryOwner owner : kOwners) ledger->book(owner, MemoryUse::kWeights, weights_.bytes(owner, MemoryUse::kWeights));
  return ledger;
}

PairFootprint PairFootprint::without_drafter() const {
  PairFootprint out = *this;
  out.drafter_.reset();
  out.weights_.book(MemoryOwner::kDrafter, MemoryUse::kWeights, -weights_.bytes(MemoryOwner::kDrafter, MemoryUse::kWeights));
  return out;
}

}  // namespace ddtree
