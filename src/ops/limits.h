// What a backend is told before anything else, so that every workspace is made at set-up.
#pragma once

#include <cstdint>

namespace ddtree::ops {

// Arrays staged for one use must outlive another's: a draft runs between forward() and the next, and so on.
enum class Lane : uint8_t { kPass, kCommit, kDraft };
inline constexpr int kLanes = 3;

struct BackendLimits {
  int64_t max_rows = 0;           // of any op
  int64_t max_positions = 0;      // largest context + rows that attention can meet
  int64_t max_linear_inputs = 0;  // largest K
  int64_t staged_bytes = 0;       // of one lane
  // Logits: columns, rows of a pass (best_two), rows of a draft and their most candidates (top_k_log_probs).
  int64_t vocab = 0, max_logit_rows = 0, max_draft_rows = 0, max_top_k = 0;
};

}  // namespace ddtree::ops
