// Plain code in 4-lane vectors of the compiler: any machine. Multiply-adds round twice (there may be no FMA). See kernels.inc.
#include <cmath>
#include <cstring>

#include "ops/cpu/kernels.h"

namespace ddtree::ops::cpu {
namespace {

#define K_FN
#define K_INLINE inline
#define K_ROWS 2
#define K_VECTORS 1

typedef float F4 __attribute__((vector_size(16)));
struct V {
  F4 q[4];
};
template <class F>
inline V each(F f) {
  V r;
  for (int i = 0; i < 4; ++i) r.q[i] = f(i);
  return r;
}
template <class F>
inline V each_lane(const V& v, F f) {
  V r;
  for (int i = 0; i < 16; ++i) r.q[i / 4][i % 4] = f(v.q[i / 4][i % 4], i);
  return r;
}
inline V vload(const float* p) {
  V r;
  std::memcpy(&r, p, sizeof r);
  return r;
}
inline void vstore(float* p, const V& v) { std::memcpy(p, &v, sizeof v); }
inline V vset(float x) {
  return each([&](int) { return F4{x, x, x, x}; });
}
inline V vadd(const V& a, const V& b) {
  return each([&](int i) { return a.q[i] + b.q[i]; });
}
inline V vsub(const V& a, const V& b) {
  return each([&](int i) { return a.q[i] - b.q[i]; });
}
inline V vmul(const V& a, const V& b) {
  return each([&](int i) { return a.q[i] * b.q[i]; });
}
inline V vdiv(const V& a, const V& b) {
  return each([&](int i) { return a.q[i] / b.q[i]; });
}
inline V vfma(const V& a, const V& b, const V& c) {
  return each([&](int i) { return a.q[i] * b.q[i] + c.q[i]; });
}
inline V vmax(const V& a, const V& b) {
  return each([&](int i) { return a.q[i] > b.q[i] ? a.q[i] : b.q[i]; });
}
inline V vmin(const V& a, const V& b) {
  return each([&](int i) { return a.q[i] < b.q[i] ? a.q[i] : b.q[i]; });
}
inline V vround(const V& a) {
  return each_lane(a, [](float x, int) { return std::nearbyint(x); });
}
inline float power2(int n) {
  const uint32_t bits = static_cast<uint32_t>(n + 127) << 23;
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}
inline V vscale2(const V& p, const V& n) {
  return each_lane(p, [&](float x, int i) {
    const float f = n.q[i / 4][i % 4];
    if (!(f == f)) return f;
    const int whole = static_cast<int>(f), half = whole >> 1;
    return x * power2(half) * power2(whole - half);
  });
}
inline float vsum(const V& v) {
  const F4 a = v.q[0] + v.q[2], b = v.q[1] + v.q[3], s = a + b;
  return (s[0] + s[2]) + (s[1] + s[3]);
}
inline float vmaxall(const V& v) {
  float m = v.q[0][0];
  for (int i = 1; i < 16; ++i) m = v.q[i / 4][i % 4] > m ? v.q[i / 4][i % 4] : m;
  return m;
}
inline V from_bits(const uint32_t* p, int shift, uint32_t mask) {
  uint32_t t[16];
  for (int i = 0; i < 16; ++i) t[i] = (p[i] << shift) & mask;
  V r;
  std::memcpy(&r, t, sizeof r);
  return r;
}
inline V vpanel_lo(const uint32_t* p) { return from_bits(p, 16, 0xffffffffu); }
inline V vpanel_hi(const uint32_t* p) { return from_bits(p, 0, 0xffff0000u); }
inline V vround_bf16(const V& v) {
  uint32_t t[16];
  std::memcpy(t, &v, sizeof v);
  for (uint32_t& b : t) b = (b & 0x7fffffffu) > 0x7f800000u ? (b | 0x400000u) : (b + 0x7fffu + ((b >> 16) & 1u)) & 0xffff0000u;
  V r;
  std::memcpy(&r, t, sizeof r);
  return r;
}
inline bool vfinite(const V& v) {
  uint32_t t[16];
  std::memcpy(t, &v, sizeof v);
  bool finite = true;
  for (uint32_t b : t) finite = finite && (b & 0x7f800000u) != 0x7f800000u;
  return finite;
}

#include "ops/cpu/kernels.inc"

const Kernels kTable = K_TABLE("portable");

}  // namespace

const Kernels& portable_kernels() { return kTable; }

const Kernels& best_kernels() {
  if (const Kernels* k = avx512_kernels()) return *k;
  if (const Kernels* k = avx2_kernels()) return *k;
  return portable_kernels();
}

}  // namespace ddtree::ops::cpu
