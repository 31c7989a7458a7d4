// linear: y[r, n] = Σ_k x[r, k] · W[n, k].
//
// Weights keep the checkpoint's precision (BF16 as BF16, everything else as float32), so they are exact. Several matrices of the same K
// are packed as one (q|gate|k|v, qkv|z|a|b, gate|up), so that one call serves each.
//
// Numeric promise, CPU: y[r, n] is one chain of float32 fused multiply-adds over k = 0, 1, …, K-1 from 0, whatever the number of rows, the
// row's place among them, or the number of threads. Rows are therefore bit-identical in every batch: a tree row, a chain row and the same
// row alone give the same bits, which is what makes speculation lossless. That is why this is own code: general BLAS kernels choose
// blocking, and with it rounding, by the matrix's shape. (AVX-512 and AVX2 agree bit for bit; the portable path multiplies and adds with
// two roundings.)
// Numeric promise, CUDA: float32 accumulation; row-count invariance within one row bucket.
// BF16 boundaries: y is rounded once, unless keep_float32 (logits).
// Side effects: none. Workspace: the backend's own.
//
// linear_silu: y[r, i] = silu(g[r, i]) · u[r, i], where g | u = linear(x); g and u are rounded as linear() rounds its y. The same as linear
// into gate_up, then silu_mul; gate_up holds the products where they are not fused, else it is left as it was.
//
// linear_add_norm: delta = linear(x); then add_rms_norm (ops/norm.h) of residual and delta to y and tap, delta rounded as linear() rounds.
// `delta` holds it where they are not fused, else it is left as it was. The scale of a row needs the whole row, which no block of a card
// sees: with `next`, the weight that y goes to, y may be left unscaled, w · residual, and the RowScale that is returned must then go
// to the linear or linear_silu of y with that weight, which multiplies by it. It is decided by shapes and row count alone. Without `next`,
// and on the CPU, y is normed. A row's result does not depend on the other rows.
// across_ranks: x and weight are one rank's part of K, so delta is a partial sum, rounded as linear() rounds; it is all-reduced
// (ops/collectives.h) before it is added.
#pragma once

#include "model/tensor.h"
#include "ops/tensor.h"

namespace ddtree::ops {

inline constexpr int64_t kNormParts = 128;     // most partial sums of a row
inline constexpr int64_t kUnscaledRows = 128;  // most rows of a pass whose scale may be left to the next product

// What linear() multiplies row r of its result by: 1 / sqrt(Σ_p squares[r, p] / width + eps) over `parts` columns. parts 0: nothing.
struct RowScale {
  Tensor squares;  // [R, kNormParts] float32
  int32_t parts = 0;
  int64_t width = 0;  // of the rows that were squared
  float eps = 0;
};

struct LinearArgs {
  Tensor x;  // [R, K] activation
  const Weight* weight = nullptr;
  Tensor y;  // [R, N] activation, or float32 if keep_float32
  bool keep_float32 = false;
  RowScale scale;  // of x, if linear_add_norm left one
};

struct LinearSiluArgs {
  Tensor x;                        // [R, K] activation
  const Weight* weight = nullptr;  // [2·I, K], gate | up
  Tensor gate_up;                  // [R, 2·I] activation
  Tensor y;                        // [R, I] activation
  RowScale scale;                  // of x
};

struct LinearAddNormArgs {
  Tensor x;                        // [R, K] activation
  const Weight* weight = nullptr;  // [H, K]
  Tensor delta;                    // [R, H] activation
  Tensor residual;                 // [R, H] float32, updated
  Tensor w;                        // [1, H] float32, of the norm
  float eps = 1e-6f;
  Tensor y;                      // [R, H] activation
  Tensor tap;                    // [R, H] activation, or absent
  const Weight* next = nullptr;  // that y goes to
  Tensor squares;                // [min(R, kUnscaledRows), kNormParts] float32, or absent if next is
  bool across_ranks = false;
};

}  // namespace ddtree::ops
