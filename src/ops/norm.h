// RMS norms over a whole row.
//
// rms_norm:      y = w · x · rsqrt(mean(x²) + eps)
// add_rms_norm:  x += delta (the residual stream, in place); tap = x if tap is present; y as above of the new x
// gated_rms_norm (per value head of width D): y = w · o · rsqrt(mean(o²) + eps) · silu(z). Norm first, then gate.
//
// `w` is the effective weight: for zero-centred norms the loader has added the 1 in float32 (Backend::norm_weight).
// Reductions, rsqrt and products in float32; the reduction's order depends on the width only, so a row's result does not depend on
// the other rows. BF16 boundaries: y is rounded once; x and tap only with a BF16 residual (tap is rounded as an activation, for fc).
// No workspace. Rows of y may be shorter-strided views (halves of a concatenation).
#pragma once

#include "ops/tensor.h"

namespace ddtree::ops {

struct RmsNormArgs {
  Tensor x;  // [R, H] float32 residual or activation
  Tensor w;  // [1, H] float32
  float eps = 1e-6f;
  Tensor y;  // [R, H] activation
};

struct AddRmsNormArgs {
  Tensor x;      // [R, H] residual, updated
  Tensor delta;  // [R, H] activation
  Tensor w;      // [1, H] float32
  float eps = 1e-6f;
  Tensor y;    // [R, H] activation
  Tensor tap;  // [R, H] activation, or absent
};

struct GatedRmsNormArgs {
  Tensor o;  // [R, heads · D] activation
  Tensor z;  // [R, heads · D] activation
  Tensor w;  // [1, D] float32, shared by all heads
  int32_t heads = 0;
  float eps = 1e-6f;
  Tensor y;  // [R, heads · D] activation; may be o
};

}  // namespace ddtree::ops
