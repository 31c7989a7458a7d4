// What rounds accepted, and when drafting stops paying for a sequence.
#pragma once

#include <cstdint>
#include <vector>

namespace ddtree {

// Identities (tests hold them): sum(histogram) == rounds; sum(j · histogram[j]) == accepted == sum(accepted_at);
// sum(emitted) == accepted + rounds - (1 if the last round was cut inside its accepted run).
struct AcceptanceStats {
  int32_t rounds = 0;
  int64_t drafted = 0;               // nodes verified, roots not counted
  int64_t accepted = 0;              // draft tokens committed
  std::vector<int32_t> histogram;    // [max + 1] rounds by accepted count
  std::vector<int32_t> accepted_at;  // [max] rounds that accepted at least i + 1
  std::vector<int32_t> emitted;      // tokens committed by each round

  // One round: nodes verified, draft tokens that the target confirmed, tokens committed after the cut (1 … confirmed + 1).
  void add(int32_t nodes, int32_t confirmed, int32_t committed);
};

// Falls back to plain decoding by itself, for a while, where acceptance stays under what pays; tries again later, with longer and longer
// pauses while it keeps failing. Prevents: a drafter made for another model, or text it cannot follow, that makes every answer slower.
class FallbackPolicy {
 public:
  // Accepted draft tokens a round under which a fixed budget counts as not paying. A constant, so that a fixed budget's rounds do not
  // depend on the machine's speed; `auto` passes measured break-evens instead.
  static constexpr double kFixedBreakEven = 0.25;
  static constexpr double kTolerance = 0.8;                        // of a break-even: measured costs are not exact
  static constexpr int32_t kWindow = 16;                           // rounds before a verdict; also the running mean's length
  static constexpr int32_t kProbe = 6;                             // rounds of a later trial
  static constexpr int32_t kFirstPause = 32, kLongestPause = 512;  // plain rounds

  bool wants_draft() const { return pause_left_ == 0; }
  // After a round that drafted. True: this was the round that made it fall back.
  bool drafted(int32_t accepted, double break_even);
  // The drafter failed: pause at once.
  void give_up();
  // After a round without a draft.
  void plain();
  double mean_accepted() const { return mean_; }
  int32_t rounds_seen() const { return seen_; }

 private:
  double mean_ = 0, mean_break_even_ = 0;
  int32_t seen_ = 0;  // drafting rounds since the start or the last pause
  bool probing_ = false;
  int32_t pause_left_ = 0, next_pause_ = kFirstPause;
};

}  // namespace ddtree
