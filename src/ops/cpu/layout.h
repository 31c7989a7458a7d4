// How large every block of the CPU backend is, in elements. The backend allocates by these figures and the memory plan adds them up.
#pragma once

#include <algorithm>
#include <cstdint>

#include "ops/cpu/kernels.h"
#include "ops/limits.h"
#include "ops/tensor.h"

namespace ddtree::ops::cpu::layout {

inline constexpr int32_t kScratchPanel = 32;  // rows of one K panel of a KvScratch

inline int64_t block_bytes(int64_t count, int64_t element_size) { return count * element_size + 64; }  // Block begins on a cache line

// Rows end on a vector, so that kernels of whole vectors may read (never use) past the last column.
inline int64_t tensor_floats(int64_t rows, int64_t cols) { return rows * cols + kLanes16; }

// BF16 pairs a word, float32 otherwise; panels of 32 columns.
inline int64_t weight_words(int64_t n, int64_t k, bool bf16) { return round_up(n, kPanelColumns) * k / (bf16 ? 2 : 1); }

inline int64_t rope_floats(int64_t positions, int64_t rotary_dim) { return positions * rotary_dim; }

// K, and V again.
inline int64_t kv_pool_floats(const KvShape& s, int64_t pages, int64_t page_size) {
  return int64_t{s.layers} * pages * s.kv_heads * page_size * s.head_dim;
}
inline int64_t scratch_k_floats(const KvShape& s, int64_t rows) {
  return int64_t{s.layers} * s.kv_heads * round_up(rows, kScratchPanel) * s.head_dim;
}
inline int64_t scratch_v_floats(const KvShape& s, int64_t rows) { return int64_t{s.layers} * s.kv_heads * rows * s.head_dim; }

inline int64_t state_floats(const DeltaShape& s, int64_t slots) { return slots * s.layers * s.value_heads * s.key_dim * s.value_dim; }
inline int64_t window_floats(const DeltaShape& s, int64_t slots) { return slots * s.layers * (s.conv_width - 1) * s.channels(); }

// Factors of all layers, and what one layer at work has of its own (queries, betas).
struct Trace {
  int64_t inputs, keys, updates, queries, betas;  // floats
  int64_t prefixes;                               // doubles
};
inline Trace trace(const DeltaShape& s, int64_t rows) {
  const int64_t all = rows * s.layers, keys = int64_t{s.key_heads} * s.key_dim, values = int64_t{s.value_heads} * s.value_dim;
  return {all * s.channels(), all * keys, all * values, rows * keys, rows * s.value_heads, all * s.value_heads};
}

// linear: x in tiles, k-major.
inline int64_t linear_floats(const BackendLimits& l) { return round_up(l.max_rows, kTileRows) * l.max_linear_inputs; }

// One worker's floats; a worker runs one op at a time, so it needs the most of these.
inline constexpr int64_t kLinearWorker = int64_t{kTileRows} * kPanelColumns * 4;
// attend(): queries and outputs of a tile, scores twice (row-major and position-major), one panel of own scores, the rows' paths.
inline int64_t attend_worker(const KvShape& s, const BackendLimits& l) {
  const int64_t positions = round_up(l.max_positions + 1, 64) + 64;
  return kTileRows * (2 * int64_t{s.head_dim} + 2 * positions + 2 * kScratchPanel + l.max_rows);
}
// delta_rule(): tiles of keys and queries and their products, coefficients and a path. fold(): scaled keys and gathered updates of a path.
inline int64_t delta_worker(const DeltaShape& s, int64_t rows) {
  const int64_t dims = int64_t{s.key_dim} + s.value_dim;
  return 2 * kTileRows * dims + 2 * s.value_dim + 8 * (rows + 16) + rows * dims + 64;
}

}  // namespace ddtree::ops::cpu::layout
