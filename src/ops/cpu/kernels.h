// The inner loops of the CPU ops, in one table an instruction set, chosen at run time. All tables run the same source (kernels.inc) over
// vectors of 16 logical lanes, so reductions have one order everywhere; AVX-512 and AVX2 agree bit for bit.
#pragma once

#include <cstdint>

namespace ddtree::ops::cpu {

inline constexpr int kTileRows = 12;      // most rows of one register tile
inline constexpr int kPanelColumns = 32;  // columns of one weight panel
inline constexpr int kLanes16 = 16;

inline constexpr int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// Lengths named n16 must be multiples of 16. Pointers need no alignment.
struct Kernels {
  const char* name;

  // --- matrix tiles: every output is one chain of multiply-adds over k ascending -----------------------------------------------------
  // C[r][32·p + j] = Σ_k a[k·a_step + r] · W, r < m <= kTileRows, for `panels` panels of 32 columns, each [k] words of 16 × (low: column j,
  // high: column 16 + j) BF16 pairs.
  void (*panels_bf16)(int m, int64_t k, const float* a, int64_t a_step, const uint32_t* panel, int64_t panels, float* c, int64_t ldc);
  // The same with panels of [k][32] floats.
  void (*panels_f32)(int m, int64_t k, const float* a, int64_t a_step, const float* panel, int64_t panels, float* c, int64_t ldc);
  // C[r][j] = (accumulate ? C : 0) + Σ_k a[k·a_step + r] · b[k·b_step + j], j < n16.
  void (*tile)(int m, int64_t n16, int64_t k, const float* a, int64_t a_step, const float* b, int64_t b_step, float* c, int64_t ldc,
               bool accumulate);

  // --- gathered rows: base[row[i] · ld …] ---------------------------------------------------------------------------------------------
  // y[j] += Σ_i w[i] · base[row[i]·ld + j] in order of i.
  void (*add_rows)(int64_t n16, int64_t count, const int32_t* row, const float* w, const float* base, int64_t ld, float* y);
  // The same into two outputs with two weights, over one reading of the rows.
  void (*add_rows2)(int64_t n16, int64_t count, const int32_t* row, const float* w1, const float* w2, const float* base, int64_t ld,
                    float* y1, float* y2);
  // out1[i] = base[row[i]] · x1, out2[i] = base[row[i]] · x2.
  void (*dots2)(int64_t n16, int64_t count, const int32_t* row, const float* base, int64_t ld, const float* x1, const float* x2,
                float* out1, float* out2);

  // --- elementwise over one row; any n ------------------------------------------------------------------------------------------------
  float (*softmax)(int64_t n16, float scale, float* s);  // s = exp(scale · (s - max)); returns the sum. -inf gives 0
  void (*exp)(int64_t n16, const float* x, float* y);    // exact 0 far below, inf far above, NaN stays
  void (*scale)(int64_t n, float by, float* y);
  void (*subtract)(int64_t n, const float* x, float by, const float* s, float* y);  // y = x - by · s
  void (*rms_norm)(int64_t n, const float* x, const float* w, float eps, float* y);
  void (*add_rms_norm)(int64_t n, float* x, const float* delta, const float* w, float eps, float* y);
  void (*gate_silu)(int64_t n, float* y, const float* z);     // y *= silu(z)
  void (*gate_sigmoid)(int64_t n, float* y, const float* z);  // y *= sigmoid(z)
  void (*silu_mul)(int64_t n, const float* g, const float* u, float* y);
  void (*conv_silu)(int64_t n, int taps, const float* const* m, const float* w, int64_t w_stride, float* y);
  float (*max)(int64_t n, const float* x);                  // NaNs are ignored
  double (*sum_exp)(int64_t n, const float* x, float max);  // Σ exp(x - max), NaN if any x is
  bool (*finite)(int64_t n, const float* x);
  void (*round_bf16)(int64_t n, float* y);  // to the nearest BF16 value, ties to even
};

const Kernels& portable_kernels();
const Kernels* avx2_kernels();    // null: this machine or build has no AVX2 + FMA
const Kernels* avx512_kernels();  // null: no AVX-512F

// The best that this machine runs.
const Kernels& best_kernels();

}  // namespace ddtree::ops::cpu
