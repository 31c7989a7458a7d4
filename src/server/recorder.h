// Finished requests and passing minutes as rows of the history.
#pragma once

#include <optional>
#include <vector>

#include "engine/engine.h"
#include "server/service.h"
#include "store/records.h"

namespace ddtree {

RequestRecord request_record(const RecentRequest& finished, int64_t run_id, const std::string& model);
std::vector<RoundTree> round_trees(const RequestStats& stats);

// Adds up one minute of serving. Not thread-safe.
class MinuteRecorder {
 public:
  void request(const RecentRequest& finished);
  // Call about once a second. Gives the row of the minute that has just ended, if one has.
  std::optional<MetricMinute> tick(int64_t now_ms, const EngineSnapshot& snapshot);

 private:
  MetricMinute minute_;
  std::vector<double> first_token_ms_;
  double prefill_sum_ = 0, decode_sum_ = 0;
  int prefill_active_ = 0, decode_active_ = 0;
};

}  // namespace ddtree
