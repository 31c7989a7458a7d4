// The gated-delta mixer: convolution, delta rule, commit.
//
// conv: c[r, ch] = silu( Σ_t w[ch, t] · m_t ), where m_{W-1} is the row's own input x[r, ch], m_{W-2} its parent's, …; taps before the
//   segment's root come from the slot's window, which is zero for a new sequence. Taps follow parents, not rows. Accumulated over t
//   ascending in float32. BF16 boundaries: c is rounded once, after silu. (Hugging Face also rounds the sum before silu; we do not.)
//   Side effects: certain segments advance their slot's window; inputs of all rows are kept in `trace` until the next pass.
//
// delta_rule, per value head (key head = value head / (value_heads / key_heads)); q, k, v are columns of c:
//     q^ = q · rsqrt(Σq² + 1e-6) / √key_dim,  k^ = k · rsqrt(Σk² + 1e-6)
//     g = -exp(a_log) · softplus(a + dt_bias),  beta = sigmoid(b)
//     S_i = e^{g_i} S_par(i) + k^_i u_iᵀ,  u_i = beta_i (v_i - e^{g_i} S_par(i)ᵀ k^_i),  o_i = S_iᵀ q^_i
//   computed without a state for each row, from the slot's state S0 and the ancestors j of i (P = Σ g along the path):
//     u_i = beta_i (v_i - e^{P_i} S0ᵀ k^_i - Σ_{j≺i} e^{P_i-P_j} (k^_j·k^_i) u_j)                 forward substitution, parents first
//     o_i = e^{P_i} S0ᵀ q^_i + Σ_{j⪯i} e^{P_i-P_j} (k^_j·q^_i) u_j
//   (an inverse by powers of the matrix is exact on paper and loses all digits when keys repeat). P is kept in float64: it reaches
//   hundreds, and its differences would cancel in float32. Only ancestors are visited, so no exponent is positive.
//   Certain segments run as chunks of at most 64 rows, each folded into the slot's state before the next: a single row is a chunk of one,
//   with the same arithmetic as a tentative row and its commit. Tentative segments write no state. Factors (k^, u, P) of all rows
//   stay in `trace` until the next pass. All float32 but g and P (float64); BF16 boundaries: o is rounded once.
//   A row's result depends on its own path and, for certain rows, on where chunks begin; never on other segments. (CUDA: to rounding only,
//   where another segment of the pass is a tree of more than 64 rows; a tree has at most 320 there.)
//
// delta_commit: for each path with leaf l, in every layer: S <- e^{P_l} S + Σ_{j on path} e^{P_l-P_j} k^_j u_jᵀ, and the window becomes the
//   last W-1 of [window, the path's inputs]. Only for tentative segments: certain ones have done both.
#pragma once

#include "ops/forest.h"
#include "ops/tensor.h"

namespace ddtree::ops {

inline constexpr int kDeltaChunk = 64;  // rows of a certain segment between two folds

struct ConvArgs {
  const Forest* forest = nullptr;
  Tensor x;  // [R, C] activation: the qkv part of the packed projection
  Tensor w;  // [W, C] float32: tap-major, tap W-1 multiplies the row itself
  StatePool* states = nullptr;
  DeltaTrace* trace = nullptr;
  int32_t layer = 0;
  Tensor y;  // [R, C] activation
};

struct DeltaRuleArgs {
  const Forest* forest = nullptr;
  Tensor c;               // [R, C] of conv: q | k | v
  Tensor a, b;            // [R, value_heads] activation
  Tensor a_log, dt_bias;  // [1, value_heads] float32
  StatePool* states = nullptr;
  DeltaTrace* trace = nullptr;
  int32_t layer = 0;
  Tensor o;  // [R, value_heads · value_dim] activation
};

struct DeltaCommitArgs {
  Paths paths;
  StatePool* states = nullptr;
  const DeltaTrace* trace = nullptr;
};

}  // namespace ddtree::ops
