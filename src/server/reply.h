// The parts that replies of all kinds share: usage, draft statistics, timings, SSE frames. .cpp files only (json).
#pragma once

#include <string>

#include "engine/request.h"
#include "server/json.h"
#include "server/service.h"

namespace ddtree {

struct HttpResponse;

struct ReplyTotals {   // of one reply: all its choices
  RequestStats stats;  // sums; times are the longest
  int32_t reasoning_tokens = 0;
  int64_t branch_hits = 0;  // accepted nodes that were not their parent's best child: what a chain would have lost
  void add(const RequestStats& choice, int32_t choice_reasoning_tokens);
};

Json usage_json(int32_t prompt_tokens, int32_t cached_tokens, int32_t completion_tokens, int32_t reasoning_tokens);
Json usage_json(const ReplyTotals& totals);
// metrics.speculative_decoding with the names that vLLM's clients read, and what a tree adds to them.
Json metrics_json(const ReplyTotals& totals, int32_t budget, int32_t positions);
Json timings_json(const ReplyTotals& totals);  // llama.cpp's names

// "data: {…}\n\n"
std::string sse_event(const Json& value);
inline constexpr const char* kSseDone = "data: [DONE]\n\n";
inline constexpr const char* kSseComment = ": keep-alive\n\n";

// The headers that every generation reply carries.
void set_reply_headers(HttpResponse& response, const std::string& id, const std::vector<std::string>& ignored);

// An error that comes after bytes were sent: one event, then the stream ends.
Json stream_error_json(const std::string& message);

// Text for "stop_reason": the id or string that ended the choice, null otherwise.
Json stop_reason_json(const Delta& last);

int64_t unix_now();

}  // namespace ddtree
