#include "ops/rank_group.h"

#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <mutex>

namespace ddtree::ops {
namespace {

constexpr auto kStep = std::chrono::milliseconds(50);

}  // namespace

std::string rank_name(int32_t rank, int32_t ranks) { return fmt::format("rank {} of {}", rank, ranks); }

struct RankGroup::State {
  State(int32_t n, double limit) : ranks(n), seconds(limit), at(static_cast<size_t>(n)), gone(at.size()), brought(at.size()) {}

  const int32_t ranks;
  const double seconds;
  mutable std::mutex mutex;
  std::condition_variable changed;
  int32_t arrived = 0;
  uint64_t generation = 0;
  std::vector<uint64_t> at;     // [ranks] barriers that a rank has come to, for naming the one that is missing
  std::vector<Status> gone;     // [ranks] how a rank that is in no run of ops ended its last
  std::vector<Tensor> brought;  // [ranks] to the collective at hand
  Status broken;

  void break_with(const Status& why) {  // mutex held
    if (broken.ok()) broken = why;
    changed.notify_all();
  }

  // False: the group is broken.
  bool meet(int32_t rank) {
    std::unique_lock lock(mutex);
    if (!broken.ok()) return false;
    ++at[static_cast<size_t>(rank)];
    const uint64_t mine = generation;
    if (++arrived == ranks) {
      arrived = 0;
      ++generation;
      changed.notify_all();
      return true;
    }
    const auto steps = static_cast<int64_t>(seconds / std::chrono::duration<double>(kStep).count()) + 1;
    for (int64_t step = 0;; ++step) {
      if (generation != mine) return true;
      if (!broken.ok()) return false;
      for (int32_t r = 0; r < ranks; ++r)
        if (const Status& s = gone[static_cast<size_t>(r)]; !s.ok()) {
          break_with({s.code(), fmt::format("{}: {}", rank_name(r, ranks), s.message())});
          return false;
        }
      if (step >= steps) {
        const auto late = static_cast<int32_t>(std::min_element(at.begin(), at.end()) - at.begin());
        break_with({Code::kEngineFault, fmt::format("{} did not come to a collective for {:g} s, where {} waited", rank_name(late, ranks),
                                                    seconds, rank_name(rank, ranks))});
        return false;
      }
      changed.wait_for(lock, kStep);
    }
  }
};

class RankGroup::End final : public Collectives {
 public:
  End(std::shared_ptr<State> state, int32_t rank) : state_(std::move(state)), rank_(rank) {}

  int32_t rank() const override { return rank_; }
  int32_t ranks() const override { return state_->ranks; }

  // Every rank adds up all of them for itself: rows of a pass are few, and so two meetings are enough.
  void all_reduce(const Tensor& x) override {
    bring(x);
    if (!state_->meet(rank_)) return;
    sum_.resize(static_cast<size_t>(x.rows * x.cols));
    for (int64_t r = 0; r < x.rows; ++r) {
      float* to = sum_.data() + r * x.cols;
      for (int32_t from = 0; from < state_->ranks; ++from) {
        const float* summand = state_->brought[static_cast<size_t>(from)].f32(r);
        if (from == 0) std::memcpy(to, summand, sizeof(float) * static_cast<size_t>(x.cols));
        else
          for (int64_t c = 0; c < x.cols; ++c) to[c] += summand[c];
      }
    }
    if (!state_->meet(rank_)) return;  // nobody reads x any more
    for (int64_t r = 0; r < x.rows; ++r) std::memcpy(x.f32(r), sum_.data() + r * x.cols, sizeof(float) * static_cast<size_t>(x.cols));
  }

  void all_gather(const void* mine, int64_t bytes, void* all) override {
    // A copy that lives as long as this end: where the group breaks, `mine` may be gone while another rank still reads.
    mine_.assign(static_cast<const char*>(mine), static_cast<const char*>(mine) + bytes);
    bring({.data = mine_.data()});
    if (!state_->meet(rank_)) return;
    for (int32_t from = 0; from < state_->ranks; ++from)
      std::memcpy(static_cast<char*>(all) + from * bytes, state_->brought[static_cast<size_t>(from)].data, static_cast<size_t>(bytes));
    state_->meet(rank_);
  }

  Status status() const override {
    const std::lock_guard lock(state_->mutex);
    return state_->broken;
  }

 private:
  void bring(const Tensor& what) {
    const std::lock_guard lock(state_->mutex);
    state_->brought[static_cast<size_t>(rank_)] = what;
  }

  const std::shared_ptr<State> state_;
  const int32_t rank_;
  std::vector<float> sum_;
  std::vector<char> mine_;
};

RankGroup::RankGroup(int32_t ranks, double seconds) : state_(std::make_shared<State>(ranks, seconds)) {}
RankGroup::~RankGroup() = default;

int32_t RankGroup::ranks() const { return state_->ranks; }

std::shared_ptr<Collectives> RankGroup::collectives(int32_t rank) const { return std::make_shared<End>(state_, rank); }

void RankGroup::begin() {
  const std::lock_guard lock(state_->mutex);
  for (Status& s : state_->gone) s = {};
}

void RankGroup::leave(int32_t rank, const Status& status) {
  const std::lock_guard lock(state_->mutex);
  state_->gone[static_cast<size_t>(rank)] = status;
  if (!status.ok()) state_->changed.notify_all();
}

void RankGroup::fail(const Status& status) {
  const std::lock_guard lock(state_->mutex);
  state_->break_with(status);
}

Status RankGroup::status() const {
  const std::lock_guard lock(state_->mutex);
  return state_->broken;
}

}  // namespace ddtree::ops
