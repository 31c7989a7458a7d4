// How many bytes every allocation of the CUDA backend has. The backend allocates by these figures and the memory plan adds them up, also in
// builds without CUDA: nothing here needs its headers.
#pragma once

#include <algorithm>
#include <cstdint>

#include "ops/delta.h"
#include "ops/limits.h"
#include "ops/tensor.h"

namespace ddtree::ops::cuda {

inline constexpr int kDeltaPath = 320;             // most rows of a tentative segment; certain ones run by ops::kDeltaChunk
inline constexpr int kDeltaTiles = 16;             // chunks of certain rows that the delta rule computes together, in one layer at a time
inline constexpr int64_t kDeltaTileBytes = 82944;  // of one chunk and value head: Tile of kernels/delta_chunk.cu
inline constexpr int kLogitSlice = 8192;           // logits of a row that one block of best_of_rows reads
inline constexpr int kLogitBest = 8;               // bytes of one candidate of a slice
inline constexpr int kLogitSliceSum = 16;          // bytes of what a slice has beside its candidates
inline constexpr int kSampleRows = 128;            // rows of logits that sample_rows works on at a time
inline constexpr int kSampleGroups = 256;          // groups of a slice: a thread's 32 logits
inline constexpr int kSampleSlice = 32;            // bytes of what a slice has beside its groups

namespace layout {

inline constexpr int64_t kAlign = 256;                   // of every allocation
inline constexpr int64_t kPage = int64_t{2} << 20;       // what the driver hands out
inline constexpr int64_t kResults = int64_t{4} << 20;    // op results, on the device and pinned
inline constexpr int64_t kBlasWork = int64_t{32} << 20;  // what cuBLASLt may use for a product
inline constexpr int64_t kAttentionWork = int64_t{96}
                                          << 20;  // 2,048 parts of a prompt's rows × 24 heads of 258 floats, and trees beside it

inline int64_t padded(int64_t bytes) { return (std::max<int64_t>(bytes, 1) + kAlign - 1) / kAlign * kAlign; }

inline int64_t tensor(int64_t rows, int64_t cols, Element element) { return rows * cols * (element == Element::kFloat32 ? 4 : 2); }
inline int64_t weight(int64_t n, int64_t k, bool bf16) { return n * k * (bf16 ? 2 : 4); }
inline int64_t rope_half(int64_t positions, int64_t rotary_dim) { return positions * (rotary_dim / 2) * 4; }  // cosines; sines again

// K, BF16; V again.
inline int64_t kv(const KvShape& s, int64_t places) { return places * s.kv_heads * s.head_dim * s.layers * 2; }

inline int64_t states(const DeltaShape& s, int64_t slots) { return slots * s.layers * s.value_heads * s.key_dim * s.value_dim * 4; }
inline int64_t windows(const DeltaShape& s, int64_t slots) { return slots * s.layers * (s.conv_width - 1) * s.channels() * 2; }

// Chunks of certain rows that have workspace: those of the largest pass, but never more than kDeltaTiles. Other heads' dims run without.
inline int64_t delta_tiles(const DeltaShape& s, int64_t rows) {
  return s.key_dim == 128 && s.value_dim == 128 ? std::min<int64_t>((rows + kDeltaChunk - 1) / kDeltaChunk, kDeltaTiles) : 0;
}

// Factors of a pass's tentative rows in all layers, and what one layer at work has of its own for all rows (q and again k, dots, turns,
// tiles).
struct Trace {
  int64_t k, u, gate, input, q, dots, turns, tiles;
};
inline Trace trace(const DeltaShape& s, int64_t rows, int64_t tentative) {
  const int64_t all = tentative * s.layers, keys = int64_t{s.key_heads} * s.key_dim, values = int64_t{s.value_heads} * s.value_dim;
  return {all * keys * 4,
          all * values * 4,
          all * s.value_heads * 8,
          all * s.channels() * 2,
          rows * keys * 4,
          rows * s.key_heads * kDeltaPath * 2 * 4,
          rows * s.key_heads * 4 * 4,
          delta_tiles(s, rows) * s.value_heads * kDeltaTileBytes};
}

// Workspace of best_of_rows.
inline int64_t logits_work(int64_t rows, int64_t vocab, int64_t top_k) {
  const int64_t slices = (vocab + kLogitSlice - 1) / kLogitSlice;
  return rows * slices * (top_k * kLogitBest + kLogitSliceSum) + 256;
}
// Of sample_rows.
inline int64_t sample_work(int64_t rows, int64_t vocab) {
  const int64_t slices = (vocab + kLogitSlice - 1) / kLogitSlice;
  return std::min<int64_t>(rows, kSampleRows) * (slices * (kSampleSlice + 4 * kSampleGroups) + 4);
}
inline int64_t logits_work(const BackendLimits& l) {
  return std::max({logits_work(l.max_logit_rows, l.vocab, 2), logits_work(l.max_draft_rows, l.vocab, l.max_top_k),
                   sample_work(l.max_logit_rows, l.vocab)});
}
inline int64_t logit_row(const BackendLimits& l) { return std::max<int64_t>(l.vocab, 1) * 4; }  // pinned: one row that is fetched

}  // namespace layout
}  // namespace ddtree::ops::cuda
