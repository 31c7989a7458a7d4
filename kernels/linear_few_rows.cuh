// What the two forms of linear for few rows on Hopper share (linear_few_rows.cu: up to 32 rows, linear_wide_rows.cu: up to 128): what a
// block is given, how weights and rows reach its shared memory, and the scales of rows that a norm left unscaled.
#pragma once

#include "kernels/common.cuh"
#include "kernels/hopper.cuh"
#include "kernels/kernels.h"

namespace ddtree::kernels::few_rows {

constexpr int kDepth = 128;  // of a stage, in two halves of 64 (one 128-byte swizzle row each)
constexpr int kMaxStages = 16;
constexpr int kConsumers = 256;  // threads: two warpgroups
constexpr int kScaleWarps = 3;
constexpr int kThreads = kConsumers + 32 + 32 * kScaleWarps;  // and a producer warp, and the warps that work out rows' scales
constexpr int kMostParts = static_cast<int>(ops::kNormParts);
constexpr int kQuads = 16;  // of a row's tile of at most 64 columns, in the norm's epilogue; a thread each

struct FewRows {
  int rows, n, height, tiles, chunks, stages;
  void* y;
  int64_t y_stride;
  bool vectors;  // eight neighbouring columns of a BF16 y, two of a float32 one, may be written at once
  // Scale of x's rows, if `squares`: partial sums of squares, to be added up.
  const float* squares;
  int64_t squares_stride;
  int parts;
  float width, eps;
  // kAddNorm.
  float* residual;
  const float* norm;
  bf16* tap;
  float* own_squares;
  int64_t residual_stride, tap_stride, own_stride;
};

enum class After { kNothing, kSilu, kAddNorm };

struct Barriers {
  uint64_t full[kMaxStages], empty[kMaxStages], scaled;
};
// By all threads: `takers` arrivals free a stage.
__device__ __forceinline__ void init_barriers(Barriers* b, int stages, int takers) {
  if (threadIdx.x == 0) {
    for (int s = 0; s < stages; ++s) hopper::barrier_init(b->full + s, 1), hopper::barrier_init(b->empty + s, takers);
    hopper::barrier_init(&b->scaled, kScaleWarps);
    hopper::barrier_init_done();
  }
  __syncthreads();
}

// The producer's one thread. Stages of all tiles of this block, in order: weights [2][height][64], rows [2][kRows][64]. The first weights
// are on their way before the kernel before this one has finished: they do not depend on it.
template <int kRows, After kAfter>
__device__ __forceinline__ void produce(const CUtensorMap& weights, const CUtensorMap& rows, const FewRows& a, int total, uint8_t* base,
                                        Barriers* b) {
  using namespace hopper;
  const int weight_half = a.height * 128, stage_bytes = 2 * (weight_half + kRows * 128);
  struct Place {  // of the next stage; a division for each would take as long as a short tile's stage
    int tile, k;
  };
  const auto next = [&](Place& p) {
    if ((p.k += kDepth) >= a.chunks * kDepth) p.k = 0, p.tile += gridDim.x;
  };
  const auto load_weights = [&](const Place& p, int s) {
    uint8_t* to = base + s * stage_bytes;
    if constexpr (kAfter == After::kSilu) {
      bulk_copy(to, &weights, b->full + s, p.k, 0, 0, p.tile * (a.height / 8));
      bulk_copy(to + weight_half, &weights, b->full + s, p.k + 64, 0, 0, p.tile * (a.height / 8));
    } else {
      bulk_copy(to, &weights, b->full + s, p.k, p.tile * a.height);
      bulk_copy(to + weight_half, &weights, b->full + s, p.k + 64, p.tile * a.height);
    }
  };
  const auto load_rows = [&](const Place& p, int s) {
    uint8_t* to = base + s * stage_bytes + 2 * weight_half;
    bulk_copy(to, &rows, b->full + s, p.k, 0);
    bulk_copy(to + kRows * 128, &rows, b->full + s, p.k + 64, 0);
  };
  const int ahead = min(a.stages, total);
  const Place start{static_cast<int>(blockIdx.x), 0};
  Place at = start;
#pragma unroll 1
  for (int i = 0; i < ahead; ++i, next(at)) barrier_expect(b->full + i, stage_bytes), load_weights(at, i);
  pdl_wait();
  at = start;
#pragma unroll 1
  for (int i = 0; i < ahead; ++i, next(at)) load_rows(at, i);
  int s = 0;
  uint32_t parity = 0;
#pragma unroll 1
  for (int i = ahead; i < total; ++i, next(at)) {
    barrier_wait(b->empty + s, parity);
    barrier_expect(b->full + s, stage_bytes);
    load_weights(at, s);
    load_rows(at, s);
    if (++s == a.stages) s = 0, parity ^= 1;
  }
}

// scale[r] = 1 / rms of row r, by the kScaleWarps last warps while the products run: a lane adds four of the parts, the lanes' sums are
// added as a tree over the bits of their number from the highest.
__device__ __forceinline__ void row_scales(const FewRows& a, float* scale, Barriers* b) {
  static_assert(kMostParts == 128);
  constexpr int kAtOnce = 4;
  const int warp = (static_cast<int>(threadIdx.x) - kConsumers - 32) / 32, at = threadIdx.x % 32 * 4;
#pragma unroll 1
  for (int first = warp; first < a.rows; first += kScaleWarps * kAtOnce) {
    float v[kAtOnce];
#pragma unroll
    for (int e = 0; e < kAtOnce; ++e) {
      const int row = first + e * kScaleWarps;
      float4 q{0, 0, 0, 0};
      if (row < a.rows && at < a.parts) q = *reinterpret_cast<const float4*>(a.squares + row * a.squares_stride + at);
      v[e] = (q.x + (at + 1 < a.parts ? q.y : 0.0f)) + ((at + 2 < a.parts ? q.z : 0.0f) + (at + 3 < a.parts ? q.w : 0.0f));
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2)
#pragma unroll
      for (int e = 0; e < kAtOnce; ++e) v[e] += __shfl_xor_sync(0xffffffffu, v[e], step);
    if (threadIdx.x % 32 == 0)
#pragma unroll
      for (int e = 0; e < kAtOnce; ++e)
        if (first + e * kScaleWarps < a.rows) scale[first + e * kScaleWarps] = rsqrtf(v[e] / a.width + a.eps);
  }
  if (threadIdx.x % 32 == 0) hopper::barrier_arrive(&b->scaled);
}

__device__ __forceinline__ float rounded(float v) { return to_float(from_float<bf16>(v)); }
__device__ __forceinline__ uint2 pack4(float4 v) {
  const __nv_bfloat162 a = __floats2bfloat162_rn(v.x, v.y), b = __floats2bfloat162_rn(v.z, v.w);
  return {reinterpret_cast<const uint32_t&>(a), reinterpret_cast<const uint32_t&>(b)};
}
__device__ __forceinline__ void consumers_sync() { asm volatile("bar.sync 1, 256;" ::: "memory"); }

// kAddNorm: thread q of a row's sixteen holds four columns of the residual, fetched before the product that is added to them.
template <int kRows>
struct Residual {
  static constexpr int kRowsAtOnce = kConsumers / kQuads, kPasses = (kRows + kRowsAtOnce - 1) / kRowsAtOnce;
  float4 before[kPasses];

  static __device__ __forceinline__ int quad() { return threadIdx.x % kQuads * 4; }
  static __device__ __forceinline__ bool live(const FewRows& a, int tile) { return quad() < a.height && tile * a.height + quad() < a.n; }
  __device__ __forceinline__ void fetch(const FewRows& a, int tile) {
#pragma unroll
    for (int p = 0; p < kPasses; ++p) {
      const int r = p * kRowsAtOnce + threadIdx.x / kQuads;
      before[p] = {0, 0, 0, 0};
      if (live(a, tile) && r < a.rows)
        before[p] = *reinterpret_cast<const float4*>(a.residual + r * a.residual_stride + tile * a.height + quad());
    }
  }
  // product: [kRows][stride] in shared memory.
  __device__ __forceinline__ void add(const FewRows& a, int tile, const float* product, int stride) const {
    const bool has = live(a, tile);
    const int column = tile * a.height + quad();
    const float4 g = has ? *reinterpret_cast<const float4*>(a.norm + column) : float4{0, 0, 0, 0};
#pragma unroll
    for (int p = 0; p < kPasses; ++p) {
      const int r = p * kRowsAtOnce + threadIdx.x / kQuads;
      float sum = 0;
      if (has && r < a.rows) {
        const float4 d = *reinterpret_cast<const float4*>(product + r * stride + quad());
        float4 x = before[p];
        x = {x.x + rounded(d.x), x.y + rounded(d.y), x.z + rounded(d.z), x.w + rounded(d.w)};
        *reinterpret_cast<float4*>(a.residual + r * a.residual_stride + column) = x;
        *reinterpret_cast<uint2*>(static_cast<bf16*>(a.y) + r * a.y_stride + column) = pack4({x.x * g.x, x.y * g.y, x.z * g.z, x.w * g.w});
        if (a.tap) *reinterpret_cast<uint2*>(a.tap + r * a.tap_stride + column) = pack4(x);
        sum = (x.x * x.x + x.y * x.y) + (x.z * x.z + x.w * x.w);
      }
#pragma unroll
      for (int step = kQuads / 2; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
      if (quad() == 0 && r < a.rows) a.own_squares[r * a.own_stride + tile] = sum;
    }
  }
};

// linear_wide_rows.cu: `rows` of 33 to 128, by the bucket of 64 or 128. bf16 or float32 y for kNothing.
cudaError_t wide_rows(cudaStream_t stream, const CUtensorMap& weights, const CUtensorMap& rows, FewRows a, After after, bool float32,
                      int multiprocessors, size_t shared_limit);

}  // namespace ddtree::kernels::few_rows
