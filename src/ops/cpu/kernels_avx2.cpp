// AVX2 with FMA: two vector registers hold the 16 lanes. See kernels.inc.
#include "ops/cpu/kernels.h"

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#include <immintrin.h>

namespace ddtree::ops::cpu {
namespace {

#define K_FN __attribute__((target("avx2,fma")))
#define K_INLINE __attribute__((target("avx2,fma"), always_inline)) inline
#define K_ROWS 6
#define K_VECTORS 1

struct V {
  __m256 a, b;
};
K_INLINE V vload(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
K_INLINE void vstore(float* p, V v) {
  _mm256_storeu_ps(p, v.a);
  _mm256_storeu_ps(p + 8, v.b);
}
K_INLINE V vset(float x) {
  const __m256 v = _mm256_set1_ps(x);
  return {v, v};
}
K_INLINE V vadd(V x, V y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
K_INLINE V vsub(V x, V y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
K_INLINE V vmul(V x, V y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
K_INLINE V vdiv(V x, V y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
K_INLINE V vfma(V x, V y, V z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
K_INLINE V vmax(V x, V y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
K_INLINE V vmin(V x, V y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
K_INLINE __m256 round8(__m256 x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
K_INLINE V vround(V x) { return {round8(x.a), round8(x.b)}; }
K_INLINE __m256 scale8(__m256 p, __m256 n) {
  const __m256i i = _mm256_cvtps_epi32(n), half = _mm256_srai_epi32(i, 1), bias = _mm256_set1_epi32(127);
  const __m256 first = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(half, bias), 23));
  const __m256 second = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_sub_epi32(i, half), bias), 23));
  return _mm256_mul_ps(_mm256_mul_ps(p, first), second);
}
K_INLINE V vscale2(V p, V n) { return {scale8(p.a, n.a), scale8(p.b, n.b)}; }
K_INLINE float vsum(V v) {
  const __m256 h = _mm256_add_ps(v.a, v.b);
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  s = _mm_add_ss(s, _mm_shuffle_ps(s, s, 1));
  return _mm_cvtss_f32(s);
}
K_INLINE float vmaxall(V v) {
  const __m256 h = _mm256_max_ps(v.a, v.b);
  __m128 s = _mm_max_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  s = _mm_max_ps(s, _mm_movehl_ps(s, s));
  s = _mm_max_ss(s, _mm_shuffle_ps(s, s, 1));
  return _mm_cvtss_f32(s);
}
K_INLINE __m256i words(const uint32_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
K_INLINE V vpanel_lo(const uint32_t* p) {
  return {_mm256_castsi256_ps(_mm256_slli_epi32(words(p), 16)), _mm256_castsi256_ps(_mm256_slli_epi32(words(p + 8), 16))};
}
K_INLINE V vpanel_hi(const uint32_t* p) {
  const __m256i high = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
  return {_mm256_castsi256_ps(_mm256_and_si256(words(p), high)), _mm256_castsi256_ps(_mm256_and_si256(words(p + 8), high))};
}
K_INLINE __m256 bf16_8(__m256 v) {
  const __m256i bits = _mm256_castps_si256(v), high = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_and_si256(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), high);
  const __m256 quiet = _mm256_castsi256_ps(_mm256_or_si256(bits, _mm256_set1_epi32(0x400000)));
  return _mm256_blendv_ps(_mm256_castsi256_ps(rounded), quiet, _mm256_cmp_ps(v, v, _CMP_UNORD_Q));
}
K_INLINE V vround_bf16(V v) { return {bf16_8(v.a), bf16_8(v.b)}; }
K_INLINE bool vfinite(V v) {
  const __m256i exponent = _mm256_set1_epi32(0x7f800000);
  const __m256i a = _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_castps_si256(v.a), exponent), exponent);
  const __m256i b = _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_castps_si256(v.b), exponent), exponent);
  return _mm256_movemask_epi8(_mm256_or_si256(a, b)) == 0;
}

#include "ops/cpu/kernels.inc"

const Kernels kTable = K_TABLE("avx2");

}  // namespace

const Kernels* avx2_kernels() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? &kTable : nullptr; }

}  // namespace ddtree::ops::cpu

#else
namespace ddtree::ops::cpu {
const Kernels* avx2_kernels() { return nullptr; }
}  // namespace ddtree::ops::cpu
#endif
