// What the kernels of sample_rows share: the noise, order and fixed-point weights of tokens.
#pragma once

#include <cfloat>
#include <cstdint>

#include "kernels/common.cuh"
#include "kernels/kernels.h"

namespace ddtree::kernels::sampling {

constexpr int kSlice = ops::cuda::kLogitSlice;           // logits of a row that one block scores
constexpr int kSliceThreads = ops::cuda::kSampleGroups;  // a thread's logits of a slice are a group
constexpr int kQuads = kSlice / kSliceThreads / 4;       // four neighbours share a block of random words
constexpr float kNothing = -FLT_MAX;                     // a banned logit: finite, so that it is not taken for a fault
constexpr double kHair = 1e-3;                           // as ops/cpu/sample.cpp has them
constexpr float kNoRival = 1000;

// What a slice says of its part of a row.
struct Slice {
  double first, second;  // unfiltered: the two best scores. Filtered: first = Σ exp((x - top) / T)
  float top, low;        // filtered: largest and smallest logit; greedy: the two largest
  int id;                // of the best score, or of the largest logit (of equals the smallest)
  int bad;               // holds a NaN or an infinity
};
static_assert(sizeof(Slice) == ops::cuda::kSampleSlice);

struct Rows {
  int first;      // row of logits that block 0 has: rows come by ops::cuda::kSampleRows
  float* logits;  // of row `first`
  int64_t stride;
  int real, slices;
  bool quads;  // four logits may be read at once
  const int32_t *row, *segment_of, *token, *position, *parent, *list;
  const ops::SampleRule* rule;
  Slice* slice;   // [rows, slices]
  float* group;   // [rows, slices, kSliceThreads] largest logit of each group
  int32_t* left;  // [rows] 1: the host has to choose
  int32_t* token_out;
  float* margin_out;
  int32_t* bad_out;
};

// The forest's row of logits row i, or -1 for padding.
__device__ __forceinline__ int forest_row(const Rows& a, int i) {
  const int row = a.row ? a.row[a.first + i] : a.first + i;
  return row < 0 || a.segment_of[row] < 0 ? -1 : row;
}

__device__ __forceinline__ bool filtered(const ops::SampleParams& p, int real) {
  return (p.top_k > 0 && p.top_k < real) || p.top_p < 1 || p.min_p > 0;
}

// Logits 4q … 4q+3; -inf where there is none to choose.
__device__ __forceinline__ float4 raw_quad(const Rows& a, const float* row, int q) {
  if (a.quads) return *reinterpret_cast<const float4*>(row + 4 * q);
  float4 x = {-INFINITY, -INFINITY, -INFINITY, -INFINITY};
  if (4 * q + 0 < a.real) x.x = row[4 * q];
  if (4 * q + 1 < a.real) x.y = row[4 * q + 1];
  if (4 * q + 2 < a.real) x.z = row[4 * q + 2];
  if (4 * q + 3 < a.real) x.w = row[4 * q + 3];
  return x;
}
__device__ __forceinline__ float usable(float x, int id, int real) { return id < real && x > kNothing ? x : -INFINITY; }

struct Words {
  uint32_t w[4];
};
// ops::philox4x32 of the tokens 4q … 4q+3.
__device__ __forceinline__ Words words(uint64_t seed, uint32_t choice, int position, int q) {
  uint32_t c0 = static_cast<uint32_t>(q), c1 = static_cast<uint32_t>(position), c2 = 0, c3 = choice;  // positions have 31 bits
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = static_cast<uint64_t>(0xD2511F53u) * c0, b = static_cast<uint64_t>(0xCD9E8D57u) * c2;
    c0 = static_cast<uint32_t>(b >> 32) ^ c1 ^ k0, c1 = static_cast<uint32_t>(b);
    c2 = static_cast<uint32_t>(a >> 32) ^ c3 ^ k1, c3 = static_cast<uint32_t>(a);
    k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

// Gumbel noise of a word: exactly, as ops::gumbel; and to 5e-5 for finding out whose exact one is worth computing.
static __device__ __noinline__ double exact_gumbel(uint32_t w) { return -log(-log((static_cast<double>(w) + 0.5) * 0x1p-32)); }
__device__ __forceinline__ float near_gumbel(uint32_t w) {
  // -log(u) from 1 - u where u is near 1: there float32 has no digits of it.
  const float u = (static_cast<float>(w) + 0.5f) * 0x1p-32f, v = (static_cast<float>(~w) + 0.5f) * 0x1p-32f;
  const float t = v < 0x1p-6f ? v * (1 + v * (0.5f + v * (0.33333333f + v * (0.25f + v * 0.2f)))) : -__logf(u);
  return -__logf(t);
}
// How far below a near score another's exact one may still be above its own: both errors, the rounding of large quotients too.
__device__ __forceinline__ float slack(float score) { return 2e-4f + fabsf(score) * 0x1p-20f; }

__device__ __forceinline__ bool before(float a, int ai, float b, int bi) { return a > b || (a == b && ai < bi); }

// Ascending in the order of choice: larger logits first, then smaller ids.
__device__ __forceinline__ uint64_t order_key(float x, int id) {
  const uint32_t b = __float_as_uint(x + 0.0f);  // -0 is 0
  const uint32_t rising = b >> 31 ? ~b : b | 0x80000000u;
  return static_cast<uint64_t>(~rising) << 32 | static_cast<uint32_t>(id);
}
__device__ __forceinline__ uint32_t rising_key(float x) { return ~static_cast<uint32_t>(order_key(x, 0) >> 32); }
__device__ __forceinline__ float key_value(uint64_t key) {
  const uint32_t rising = ~static_cast<uint32_t>(key >> 32);
  return __uint_as_float(rising >> 31 ? rising ^ 0x80000000u : ~rising);
}

// e^((x - top) / T) in units of 2^-40: integers, so that any order of adding gives the same sum.
constexpr double kUnit = 0x1p-40;
__device__ __forceinline__ uint64_t weight(float x, float top, float inverse) {
  return __float2ull_rz(__expf((x - top) * inverse) * 0x1p40f);
}

// The best score and the second; equal scores: the smaller id is better.
struct Two {
  double first = -INFINITY, second = -INFINITY;
  int id = INT32_MAX;
  __device__ __forceinline__ void add(double score, int of) {
    if (score > first || (score == first && of < id)) second = first, first = score, id = of;
    else second = fmax(second, score);
  }
  __device__ __forceinline__ void join(const Two& o) {
    if (o.first > first || (o.first == first && o.id < id)) second = fmax(first, o.second), first = o.first, id = o.id;
    else second = fmax(second, o.first);
  }
};
__device__ __forceinline__ Two warp_two(Two t) {
#pragma unroll
  for (int o = 16; o > 0; o >>= 1)
    t.join({__shfl_xor_sync(0xffffffffu, t.first, o), __shfl_xor_sync(0xffffffffu, t.second, o), __shfl_xor_sync(0xffffffffu, t.id, o)});
  return t;
}

struct Pair {  // two largest values
  float first = -INFINITY, second = -INFINITY;
  __device__ __forceinline__ void add(float v) {
    second = fmaxf(second, fminf(first, v));
    first = fmaxf(first, v);
  }
  __device__ __forceinline__ void join(const Pair& o) {
    second = fmaxf(fmaxf(second, o.second), fminf(first, o.first));
    first = fmaxf(first, o.first);
  }
};
__device__ __forceinline__ Pair warp_pair(Pair p) {
#pragma unroll
  for (int o = 16; o > 0; o >>= 1) p.join({__shfl_xor_sync(0xffffffffu, p.first, o), __shfl_xor_sync(0xffffffffu, p.second, o)});
  return p;
}

cudaError_t choose_rows(cudaStream_t stream, const Rows& rows, int count);  // sample_join.cu

}  // namespace ddtree::kernels::sampling
