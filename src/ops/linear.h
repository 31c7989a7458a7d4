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
#pragma once

#include "model/tensor.h"
#include "ops/tensor.h"

namespace ddtree::ops {

struct LinearArgs {
  Tensor x;  // [R, K] activation
  const Weight* weight = nullptr;
  Tensor y;  // [R, N] activation, or float32 if keep_float32
  bool keep_float32 = false;
};

}  // namespace ddtree::ops
