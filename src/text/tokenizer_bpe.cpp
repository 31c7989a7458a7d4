#include "text/tokenizer_bpe.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <functional>

namespace ddtree {
namespace {

constexpr uint32_t kNoRank = UINT32_MAX;
// Up to here, scanning for the lowest rank beats a heap.
constexpr size_t kShortWord = 48;

uint64_t pair_of(int32_t left, int32_t right) {
  return static_cast<uint64_t>(static_cast<uint32_t>(left)) << 32 | static_cast<uint32_t>(right);
}

}  // namespace

size_t BpeMerges::slot_of(uint64_t pair) const {
  size_t i = static_cast<size_t>((pair * 0x9E3779B97F4A7C15ull) >> shift_);
  while (slots_[i].pair != pair && slots_[i].pair != UINT64_MAX) i = (i + 1) & (slots_.size() - 1);
  return i;
}

void BpeMerges::reserve(size_t rules) {
  const size_t size = std::bit_ceil(std::max<size_t>(2 * rules, 16));
  if (size <= slots_.size()) return;
  std::vector<Slot> old(size);
  old.swap(slots_);
  shift_ = 64 - std::countr_zero(size);
  for (const Slot& s : old)
    if (s.pair != UINT64_MAX) slots_[slot_of(s.pair)] = s;
}

void BpeMerges::add(int32_t left, int32_t right, uint32_t rank, int32_t merged) {
  reserve(used_ + 1);
  Slot& slot = slots_[slot_of(pair_of(left, right))];
  if (slot.pair == UINT64_MAX) ++used_;
  slot = {pair_of(left, right), {rank, merged}};
}

BpeMerges::Rule BpeMerges::find(int32_t left, int32_t right) const {
  if (slots_.empty()) return {};
  return slots_[slot_of(pair_of(left, right))].rule;
}

BpeEncoder::BpeEncoder(const BpeMerges& merges) : merges_(&merges), cache_(kCacheSlots) {}

void BpeEncoder::encode(std::string_view word, std::vector<int32_t>* out) {
  if (word.empty()) return;
  CacheSlot* slot = nullptr;
  if (word.size() > 1 && word.size() <= kKeyBytes) {
    uint64_t key[4] = {};
    std::memcpy(key, word.data(), word.size());
    uint64_t hash = word.size();
    for (uint64_t k : key) hash = (std::rotl(hash, 23) ^ k) * 0x9E3779B97F4A7C15ull;
    slot = &cache_[(hash ^ hash >> 32) & (kCacheSlots - 1)];
    if (slot->length == word.size() && std::memcmp(slot->key, word.data(), word.size()) == 0) {
      out->insert(out->end(), slot->ids, slot->ids + slot->count);
      return;
    }
  }
  symbols_.clear();
  bool after_unknown = false;
  for (char c : word) {
    int32_t id = merges_->byte_id[static_cast<unsigned char>(c)];
    const bool unknown = id < 0;
    if (unknown) {
      id = merges_->unknown_id;
      if (id < 0 || (after_unknown && merges_->fuse_unknown)) continue;
    }
    after_unknown = unknown;
    symbols_.push_back(id);
  }
  const size_t begin = out->size();
  if (symbols_.size() <= kShortWord) merge_short(out);
  else merge_long(out);
  const size_t count = out->size() - begin;
  if (slot != nullptr && count <= kCachedIds) {
    slot->length = static_cast<uint8_t>(word.size());
    slot->count = static_cast<uint8_t>(count);
    std::memcpy(slot->key, word.data(), word.size());
    std::copy_n(out->data() + begin, count, slot->ids);
  }
}

void BpeEncoder::merge_short(std::vector<int32_t>* out) {
  size_t n = symbols_.size();
  ranks_.resize(n);  // ranks_[i]: of joining i and i + 1
  for (size_t i = 0; i + 1 < n; ++i) ranks_[i] = merges_->find(symbols_[i], symbols_[i + 1]).rank;
  while (n > 1) {
    size_t best = 0;
    for (size_t i = 1; i + 1 < n; ++i)
      if (ranks_[i] < ranks_[best]) best = i;
    if (ranks_[best] == kNoRank) break;
    symbols_[best] = merges_->find(symbols_[best], symbols_[best + 1]).merged;
    std::copy(symbols_.begin() + static_cast<ptrdiff_t>(best) + 2, symbols_.begin() + static_cast<ptrdiff_t>(n),
              symbols_.begin() + static_cast<ptrdiff_t>(best) + 1);
    std::copy(ranks_.begin() + static_cast<ptrdiff_t>(best) + 1, ranks_.begin() + static_cast<ptrdiff_t>(n) - 1,
              ranks_.begin() + static_cast<ptrdiff_t>(best));
    --n;
    if (best > 0) ranks_[best - 1] = merges_->find(symbols_[best - 1], symbols_[best]).rank;
    if (best + 1 < n) ranks_[best] = merges_->find(symbols_[best], symbols_[best + 1]).rank;
  }
  out->insert(out->end(), symbols_.begin(), symbols_.begin() + static_cast<ptrdiff_t>(n));
}

void BpeEncoder::merge_long(std::vector<int32_t>* out) {
  const auto n = static_cast<uint32_t>(symbols_.size());
  constexpr uint32_t kNone = UINT32_MAX;
  next_.resize(n);
  previous_.resize(n);
  heap_.clear();
  const auto entry = [](uint32_t rank, uint32_t position) { return static_cast<uint64_t>(rank) << 32 | position; };
  for (uint32_t i = 0; i < n; ++i) {
    next_[i] = i + 1 < n ? i + 1 : kNone;
    previous_[i] = i > 0 ? i - 1 : kNone;
    if (i + 1 < n)
      if (const auto rule = merges_->find(symbols_[i], symbols_[i + 1]); rule.rank != kNoRank) heap_.push_back(entry(rule.rank, i));
  }
  std::make_heap(heap_.begin(), heap_.end(), std::greater<>());
  const auto push = [&](uint32_t left) {
    if (const auto rule = merges_->find(symbols_[left], symbols_[next_[left]]); rule.rank != kNoRank) {
      heap_.push_back(entry(rule.rank, left));
      std::push_heap(heap_.begin(), heap_.end(), std::greater<>());
    }
  };
  while (!heap_.empty()) {
    const uint64_t top = heap_.front();
    std::pop_heap(heap_.begin(), heap_.end(), std::greater<>());
    heap_.pop_back();
    const auto at = static_cast<uint32_t>(top);
    if (symbols_[at] < 0 || next_[at] == kNone) continue;  // joined into its left neighbour, or last by now
    const auto rule = merges_->find(symbols_[at], symbols_[next_[at]]);
    if (rule.rank != static_cast<uint32_t>(top >> 32)) continue;  // one of the two has changed since
    const uint32_t gone = next_[at];
    symbols_[at] = rule.merged;
    symbols_[gone] = -1;
    next_[at] = next_[gone];
    if (next_[at] != kNone) {
      previous_[next_[at]] = at;
      push(at);
    }
    if (previous_[at] != kNone) push(previous_[at]);
  }
  for (uint32_t i = 0; i != kNone; i = next_[i]) out->push_back(symbols_[i]);
  // One huge word must not keep its memory for ever.
  if (n > 1u << 16) {
    std::vector<uint64_t>().swap(heap_);
    std::vector<uint32_t>().swap(next_);
    std::vector<uint32_t>().swap(previous_);
    std::vector<int32_t>().swap(symbols_);
  }
}

}  // namespace ddtree
