// AVX-512F: one vector register holds the 16 lanes. See kernels.inc.
#include "ops/cpu/kernels.h"

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#include <immintrin.h>

// GCC 12 takes the deliberately undefined pass-through operand of its own intrinsics for a mistake of ours.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

namespace ddtree::ops::cpu {
namespace {

#define K_FN __attribute__((target("avx512f,avx2,fma")))
#define K_INLINE __attribute__((target("avx512f,avx2,fma"), always_inline)) inline
#define K_ROWS 12
#define K_VECTORS 2

using V = __m512;
K_INLINE V vload(const float* p) { return _mm512_loadu_ps(p); }
K_INLINE void vstore(float* p, V v) { _mm512_storeu_ps(p, v); }
K_INLINE V vset(float x) { return _mm512_set1_ps(x); }
K_INLINE V vadd(V a, V b) { return _mm512_add_ps(a, b); }
K_INLINE V vsub(V a, V b) { return _mm512_sub_ps(a, b); }
K_INLINE V vmul(V a, V b) { return _mm512_mul_ps(a, b); }
K_INLINE V vdiv(V a, V b) { return _mm512_div_ps(a, b); }
K_INLINE V vfma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
K_INLINE V vmax(V a, V b) { return _mm512_max_ps(a, b); }
K_INLINE V vmin(V a, V b) { return _mm512_min_ps(a, b); }
K_INLINE V vround(V a) { return _mm512_roundscale_ps(a, 0); }
K_INLINE V vscale2(V p, V n) {
  const __m512i i = _mm512_cvtps_epi32(n), half = _mm512_srai_epi32(i, 1), bias = _mm512_set1_epi32(127);
  const V first = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(half, bias), 23));
  const V second = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_sub_epi32(i, half), bias), 23));
  return _mm512_mul_ps(_mm512_mul_ps(p, first), second);
}
K_INLINE float sum8(__m256 v) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  s = _mm_add_ss(s, _mm_shuffle_ps(s, s, 1));
  return _mm_cvtss_f32(s);
}
K_INLINE __m256 high_half(V v) { return _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(v), 1)); }
K_INLINE float vsum(V v) { return sum8(_mm256_add_ps(_mm512_castps512_ps256(v), high_half(v))); }
K_INLINE float vmaxall(V v) {
  const __m256 h = _mm256_max_ps(_mm512_castps512_ps256(v), high_half(v));
  __m128 s = _mm_max_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  s = _mm_max_ps(s, _mm_movehl_ps(s, s));
  s = _mm_max_ss(s, _mm_shuffle_ps(s, s, 1));
  return _mm_cvtss_f32(s);
}
K_INLINE V vpanel_lo(const uint32_t* p) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(p), 16)); }
K_INLINE V vpanel_hi(const uint32_t* p) {
  return _mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
}
K_INLINE V vround_bf16(V v) {
  const __m512i bits = _mm512_castps_si512(v), high = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_and_si512(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), high);
  const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
  return _mm512_castsi512_ps(_mm512_mask_mov_epi32(rounded, nan, _mm512_or_si512(bits, _mm512_set1_epi32(0x400000))));
}
K_INLINE bool vfinite(V v) {
  const __m512i exponent = _mm512_set1_epi32(0x7f800000);
  return _mm512_cmpeq_epi32_mask(_mm512_and_si512(_mm512_castps_si512(v), exponent), exponent) == 0;
}

#include "ops/cpu/kernels.inc"

const Kernels kTable = K_TABLE("avx512");

}  // namespace

const Kernels* avx512_kernels() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? &kTable : nullptr;
}

}  // namespace ddtree::ops::cpu

#else
namespace ddtree::ops::cpu {
const Kernels* avx512_kernels() { return nullptr; }
}  // namespace ddtree::ops::cpu
#endif
