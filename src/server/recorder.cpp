#include "server/recorder.h"

#include <unistd.h>

#include <algorithm>
#include <fstream>

namespace ddtree {

namespace {

double rss_mib() {
  std::ifstream statm("/proc/self/statm");
  int64_t size = 0, resident = 0;
  statm >> size >> resident;
  return static_cast<double>(resident) * static_cast<double>(sysconf(_SC_PAGESIZE)) / (1 << 20);
}

double percentile(std::vector<double> values, double share) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  return values[static_cast<size_t>(share * static_cast<double>(values.size() - 1) + 0.5)];
}

}  // namespace

RequestRecord request_record(const RecentRequest& f, int64_t run_id, const std::string& model) {
  const RequestStats& s = f.stats;
  RequestRecord r;
  r.run_id = run_id;
  r.request_id = f.request.id;
  r.endpoint = f.request.endpoint == "chat" ? "/v1/chat/completions" : "/v1/completions";
  r.client = f.request.client;
  r.model = model;
  r.received_ms = static_cast<int64_t>(f.request.started * 1000);
  r.finished_ms = static_cast<int64_t>(f.finished * 1000);
  r.stream = f.request.stream;
  r.thinking = f.thinking;
  r.http_status = f.http_status;
  r.finish = f.finish;
  r.error = f.error;
  // As it ran in the end: the ladder may have lowered it. What was refused never ran.
  r.mode = mode_name(s.prompt_tokens > 0 ? s.mode : f.request.mode);
  r.budget = f.budget;
  r.temperature = f.temperature;
  r.prompt_tokens = f.request.prompt_tokens;
  r.completion_tokens = s.completion_tokens;
  r.cached_tokens = s.cached_tokens;
  r.reasoning_tokens = f.reasoning_tokens;
  r.rounds = s.rounds;
  r.drafted = s.drafted;
  r.accepted = s.accepted;
  r.nodes_verified = s.drafted;
  r.accepted_at = s.accepted_at;
  r.histogram = s.histogram;
  r.tree_gain = s.tree_gain;
  r.shadow_disagreements = s.shadow_disagreements;
  r.near_ties = s.near_ties;
  r.smallest_gap = s.smallest_gap;
  r.queue_ms = s.queue_ms;
  r.prefill_ms = s.prefill_ms;
  r.decode_ms = s.decode_ms;
  r.first_token_ms = s.first_token_ms;
  r.total_ms = s.total_ms;
  r.tokens_per_second = s.decode_ms > 0 && s.completion_tokens > 1 ? (s.completion_tokens - 1) * 1000 / s.decode_ms : 0;
  r.prompt_text = f.prompt_text;
  r.answer_text = f.answer_text;
  return r;
}

std::vector<RoundTree> round_trees(const RequestStats& stats) {
  std::vector<RoundTree> out;
  out.reserve(stats.trees.size());
  for (size_t i = 0; i < stats.trees.size(); ++i) {
    const RoundRecord& r = stats.trees[i];
    out.push_back(
        {static_cast<int32_t>(i), r.start, r.next, r.token, r.parent, r.log_prob, r.accepted, r.draft_ms, r.verify_ms, r.total_ms});
  }
  return out;
}

void MinuteRecorder::request(const RecentRequest& f) {
  ++minute_.requests;
  if (!f.error.empty()) ++minute_.errors;
  minute_.prompt_tokens += f.request.prompt_tokens;
  minute_.completion_tokens += f.stats.completion_tokens;
  minute_.cached_tokens += f.stats.cached_tokens;
  minute_.rounds += f.stats.rounds;
  minute_.drafted += f.stats.drafted;
  minute_.accepted += f.stats.accepted;
  if (f.stats.completion_tokens > 0) first_token_ms_.push_back(f.stats.first_token_ms);
}

std::optional<MetricMinute> MinuteRecorder::tick(int64_t now_ms, const EngineSnapshot& s) {
  const int64_t start = now_ms - now_ms % 60'000;
  std::optional<MetricMinute> ended;
  if (minute_.minute_ms != 0 && start != minute_.minute_ms) {
    ended = minute_;
    ended->first_token_ms_p50 = percentile(first_token_ms_, 0.5);
    ended->first_token_ms_p95 = percentile(first_token_ms_, 0.95);
    ended->prefill_tps = prefill_active_ > 0 ? prefill_sum_ / prefill_active_ : 0;
    ended->decode_tps = decode_active_ > 0 ? decode_sum_ / decode_active_ : 0;
    ended->rss_mib = rss_mib();
    *this = MinuteRecorder();
  }
  minute_.minute_ms = start;
  minute_.running_max = std::max(minute_.running_max, s.running);
  minute_.waiting_max = std::max(minute_.waiting_max, s.waiting);
  minute_.pages_used_max = std::max(minute_.pages_used_max, s.pages_used);
  minute_.slots_used_max = std::max(minute_.slots_used_max, s.slots_used);
  minute_.pages_total = s.pages_total;
  minute_.slots_total = s.slots_total;
  if (s.prefill_tps_1m > 0) prefill_sum_ += s.prefill_tps_1m, ++prefill_active_;
  if (s.decode_tps_1m > 0) decode_sum_ += s.decode_tps_1m, ++decode_active_;
  return ended;
}

}  // namespace ddtree
