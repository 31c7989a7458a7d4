// Ranks in one process, each a thread with a backend in the host's memory: they meet at a barrier and read each other's tensors.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "ops/collectives.h"

namespace ddtree::ops {

class RankGroup {
 public:
  // seconds: how long a rank waits for the others in one collective before the group is broken. Counted in steps of the waiting thread, so
  // that a process which is stopped and goes on does not count the stop.
  explicit RankGroup(int32_t ranks, double seconds = 20);
  ~RankGroup();
  RankGroup(const RankGroup&) = delete;
  RankGroup& operator=(const RankGroup&) = delete;

  int32_t ranks() const;
  std::shared_ptr<Collectives> collectives(int32_t rank) const;  // keeps the group's shared state alive

  // A run of ops begins on all ranks, none of which is at work; a rank has ended its own. One that ends with an error breaks the group for
  // ranks that wait for it in a collective: it comes to none. Where all end with their errors and none waits, the group is as good as
  // before.
  void begin();
  void leave(int32_t rank, const Status& status);
  void fail(const Status& status);  // breaks the group; the first reason stays
  Status status() const;

 private:
  struct State;
  class End;
  std::shared_ptr<State> state_;
};

std::string rank_name(int32_t rank, int32_t ranks);  // "rank 1 of 2", as in every message

}  // namespace ddtree::ops
