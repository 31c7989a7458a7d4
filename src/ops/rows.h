// Ops that move or start rows: embed, copy_rows.
//
// embed: y[r] = W[token[r]] for r < rows. Exact. y is the residual stream: float32 (BF16 values only with a BF16 residual).
//   token must be in [0, W.n()): checked by the caller. On a rank W has the rows of ids first_id, first_id + 1, … only; rows of other ids
//   come out zero, and an all_reduce completes them, exactly.
//
// copy_rows: y[to ? to[i] : i] = x[from ? from[i] : i] for i < count. Exact (BF16 -> float32 where the views
//   differ; float32 -> BF16 rounds). Rows of `to` must be distinct and the two must not overlap.
//
// No workspace, no side effects.
#pragma once

#include <cstdint>

#include "ops/tensor.h"

namespace ddtree::ops {

struct EmbedArgs {
  const int32_t* token = nullptr;  // [rows] staged
  int32_t rows = 0;
  const Weight* weight = nullptr;  // [V, H]
  Tensor y;                        // [rows, H] float32
  int32_t first_id = 0;            // of a rank in a group
};

struct CopyRowsArgs {
  int32_t count = 0;
  Tensor x;                       // [*, C]
  const int32_t* from = nullptr;  // [count] staged, or null
  Tensor y;                       // [*, C]
  const int32_t* to = nullptr;    // [count] staged, or null
};

}  // namespace ddtree::ops
