// sample_rows: one token for every row of logits of a pass, each by its sequence's rules. The choice of a row is ops::sample's (sample.h):
// the same processing, noise and ties, whatever other rows there are. So all rows of a tree are chosen in the pass, before anybody walks.
//
//   History: what the penalties count of a sequence's tokens at positions below history_end comes as a list. From history_end on the row's
//   ancestors and the row itself are counted (the path inside the pass: at these positions the pass holds all of them).
//   Banned ids apply where the token to be chosen stands at a position below banned_end.
//   The token chosen at a row stands at the row's position + 1.
//
// Writes host arrays, valid after finish(): token and margin [L], and bad [L]: 1 where the row holds a NaN or an infinity among the real
// columns; its choice is then of no use. A token of -1: this row was beyond the backend's bounds (a device's lists of near candidates; ties
// by the thousand at a filter's edge), and the caller chooses itself. Such rows' logits are untouched; of other rows that are penalised or
// have banned ids the op may change the logits.
//
// Sums of probabilities are not the CPU's bit by bit: where a filter's edge falls between, or two scores are this close, another token may
// be chosen, and the margin says so. Within a backend a row gets the same bits in any pass.
#pragma once

#include <cstdint>

#include "ops/forest.h"
#include "ops/sample.h"
#include "ops/tensor.h"

namespace ddtree::ops {

// Of one segment; as it is, greedy.
struct SampleRule {
  SampleParams params{.temperature = 0};
  // Into Forest::pages: `seen` pairs (token, times generated), each token once. 0 times: in the prompt only, which the repetition penalty
  // alone looks at.
  int32_t first_seen = 0, seen = 0, history_end = 0;
  int32_t first_banned = 0, banned = 0, banned_end = 0;  // into Forest::pages: ids
};

struct SampleRowsArgs {
  const Forest* forest = nullptr;    // segment_of, token, position, parent, pages
  Tensor logits;                     // [L, V] float32
  const int32_t* row = nullptr;      // [L] the forest's row of each, staged; null: the same number. -1: padding
  const SampleRule* rule = nullptr;  // [segments] staged
  int64_t real_vocab = 0;
  int32_t* token = nullptr;  // [L] host
  float* margin = nullptr;   // [L] host
  uint8_t* bad = nullptr;    // [L] host
};

}  // namespace ddtree::ops
