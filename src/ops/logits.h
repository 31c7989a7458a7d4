// Ops over rows of logits.
//
// finish_logits: sets columns >= real_vocab to -inf (padding rows of the head must never be drawn) and reports the first row that holds a
//   NaN or an infinity among the real columns: *bad_row = that row, or -1. *bad_row is a host value, read after Backend::finish().
//
// top_k_log_probs: per row the top_k best columns below real_vocab, best first, ties by smaller id, with true log-probabilities
//   (l - max - log Σ exp(l - max) over the real columns; the sum in float32 lanes of fixed order, the rest in float64). Writes host arrays,
//   valid after finish(). A row with a non-finite sum sets *bad_row. 1 <= top_k <= real_vocab.
//
// In a group of ranks (Backend::join) top_k_log_probs and best_two take a rank's columns, of ids first_id, first_id + 1, …, of which the
// first real_vocab are real (0: none; and top_k may be more), and give every rank the result over all columns of all ranks.
//
// best_two: per row the best column below real_vocab (ties by the smaller id) and how far the second is behind it: what greedy decoding
// needs of
//   a row without moving the row. bad [R]: 1 where the row holds a NaN or an infinity. Host arrays, valid after finish().
#pragma once

#include "ops/tensor.h"

namespace ddtree::ops {

struct FinishLogitsArgs {
  Tensor logits;  // [R, V] float32, updated
  int64_t real_vocab = 0;
  int32_t* bad_row = nullptr;
};

struct BestTwoArgs {
  Tensor logits;  // [R, V] float32
  int64_t real_vocab = 0;
  int32_t first_id = 0;
  int32_t* token = nullptr;  // [R] host
  float* margin = nullptr;   // [R] host; +inf where there is one column only
  uint8_t* bad = nullptr;    // [R] host
};

struct TopKArgs {
  Tensor logits;  // [R, V] float32
  int64_t real_vocab = 0;
  int32_t first_id = 0;
  int32_t top_k = 0;
  int32_t* token = nullptr;   // [R, top_k] host
  float* log_prob = nullptr;  // [R, top_k] host
  int32_t* bad_row = nullptr;
};

}  // namespace ddtree::ops
