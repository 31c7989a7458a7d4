// What happened in the last minute, in one-second buckets.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>

namespace ddtree {

class MinuteRates {
 public:
  struct Bucket {
    int64_t second = -1;
    double prompt_tokens = 0, prompt_ms = 0;   // passes with prompt rows
    double decoded_tokens = 0, decode_ms = 0;  // passes with decoding sequences
    double rounds = 0;
  };
  using Time = std::chrono::steady_clock::time_point;

  Bucket& now(Time time) {
    const int64_t second = std::chrono::duration_cast<std::chrono::seconds>(time.time_since_epoch()).count();
    Bucket& b = buckets_[static_cast<size_t>(second % 60)];
    if (b.second != second) b = Bucket{second};
    return b;
  }
  Bucket sum(Time time) const {
    const int64_t second = std::chrono::duration_cast<std::chrono::seconds>(time.time_since_epoch()).count();
    Bucket total;
    for (const Bucket& b : buckets_) {
      if (b.second < 0 || b.second <= second - 60) continue;
      total.prompt_tokens += b.prompt_tokens, total.prompt_ms += b.prompt_ms;
      total.decoded_tokens += b.decoded_tokens, total.decode_ms += b.decode_ms;
      total.rounds += b.rounds;
    }
    return total;
  }

 private:
  std::array<Bucket, 60> buckets_;
};

}  // namespace ddtree
