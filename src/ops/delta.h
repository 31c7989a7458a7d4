// The gated-delta mixer: convolution, delta rule, gated norm, commit.
//
// gated_delta_mixer: all that stands between a layer's packed projection and its output projection: conv, delta_rule and gated_rms_norm one
//   after another, as each is written below and in norm.h, BF16 boundaries included (c and the delta rule's o are rounded too). `c` is
//   workspace: undefined afterwards. CUDA runs segments of one row and trees of at most 64 rows in one kernel (key and value heads of 128,
//   four taps, rows of a multiple of 16 bytes), other segments as the three ops; which of both depends on the segment alone.
//
// conv: c[r, ch] = silu( Σ_t w[ch, t] · m_t ), where m_{W-1} is the row's own input x[r, ch], m_{W-2} its parent's, …; taps before the
//   segment's root come from the slot's window, which is zero for a new sequence. Taps follow parents, not rows. Accumulated over t
//   ascending in float32. BF16 boundaries: c is rounded once, after silu. (Hugging Face also rounds the sum before silu; we do not.)
//   Side effects: certain segments advance their slot's window; inputs of tentative rows are kept in `trace` until the next pass.
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
//   with the same arithmetic as a tentative row and its commit. (CUDA: from 17 rows on the chunks' parts that need no state come first, all
//   at once: kernels/delta_chunk.cu.) Tentative segments write no state. Factors (k^, u, P) of tentative rows stay in `trace` until the
//   next pass. All float32 but g and P (float64); BF16 boundaries: o is rounded once.
//   A row's result depends on its own path and, for certain rows, on where chunks begin; never on other segments. (CUDA, outside
//   the kernel for few rows: to rounding only, where another segment of the pass is a tree of more than 64 rows; a tree has at most 320
//   there.)
//
// delta_commit: for each path with leaf l, in every layer: S <- e^{P_l} S + Σ_{j on path} e^{P_l-P_j} k^_j u_jᵀ, and the window becomes the
//   last W-1 of [window, the path's inputs]. Only for tentative segments: certain ones have done both.
#pragma once

#include "ops/forest.h"
#include "ops/norm.h"
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

struct GatedDeltaMixerArgs {
  const Forest* forest = nullptr;
  Tensor x;               // [R, C] activation: the q | k | v part of the packed projection
  Tensor z;               // [R, value_heads · value_dim] activation
  Tensor a, b;            // [R, value_heads] activation
  Tensor taps;            // [W, C] float32, as ConvArgs::w
  Tensor a_log, dt_bias;  // [1, value_heads] float32
  Tensor norm;            // [1, value_dim] float32, shared by all heads
  float eps = 1e-6f;
  StatePool* states = nullptr;
  DeltaTrace* trace = nullptr;
  int32_t layer = 0;
  Tensor c;  // [R, C] activation: workspace
  Tensor o;  // [R, value_heads · value_dim] activation
};
// Its three parts, for backends that run them one after another.
inline ConvArgs conv_of(const GatedDeltaMixerArgs& m) {
  return {.forest = m.forest, .x = m.x, .w = m.taps, .states = m.states, .trace = m.trace, .layer = m.layer, .y = m.c};
}
inline DeltaRuleArgs delta_rule_of(const GatedDeltaMixerArgs& m) {
  return {.forest = m.forest,
          .c = m.c,
          .a = m.a,
          .b = m.b,
          .a_log = m.a_log,
          .dt_bias = m.dt_bias,
          .states = m.states,
          .trace = m.trace,
          .layer = m.layer,
          .o = m.o};
}
inline GatedRmsNormArgs gated_rms_norm_of(const GatedDeltaMixerArgs& m) {
  return {.o = m.o, .z = m.z, .w = m.norm, .heads = static_cast<int32_t>(m.o.cols / m.norm.cols), .eps = m.eps, .y = m.o};
}

struct DeltaCommitArgs {
  Paths paths;
  StatePool* states = nullptr;
  const DeltaTrace* trace = nullptr;
};

}  // namespace ddtree::ops
