// linear for few rows (up to 128) on Hopper: y[r, n] = Σ_k x[r, k] · W[n, k], weights read once at the memory's speed.
//
// The weights are the wide operand of wgmma (M), the rows its narrow one (N), so a tile of weight rows streams through shared memory by
// bulk copies while the tensor cores idle most of the time. A block takes whole tiles, all of K: splitting K over blocks and summing the
// parts cost more (a dependent trip through L2 at each end) than it gained, measured 0.84 against 0.95 of the read bandwidth over a 27B
// layer's matrices. So the tile's height, not a split, evens the work out over the multiprocessors (see few_rows_tile). The prologue starts
// the weights' copies before it waits for the kernel before it: weights do not depend on it.
//
// Numeric promise: y[r, n] depends on x[r, :] and W[n, :] only, summed in one fixed order for every number of rows in a bucket.
#include <algorithm>

#include "kernels/common.cuh"
#include "kernels/hopper.cuh"
#include "kernels/kernels.h"

namespace ddtree::kernels {
namespace {

constexpr int kDepth = 128;  // of a stage, in two halves of 64 (one 128-byte swizzle row each)
constexpr int kMaxStages = 16;
constexpr int kThreads = 288;  // two consumer warpgroups and a producer warp

struct FewRows {
  int rows, n, height, tiles, chunks, stages;
  void* y;
  int64_t y_stride;
};

// kSplit: tiles of at most 64 weight rows; the warpgroups take one half of each stage's depth each and add up at the end. Otherwise each
// takes 64 of the tile's weight rows.
template <int kRows, bool kSplit, class Out>
__global__ void __launch_bounds__(kThreads, 1)
    few_rows_kernel(const __grid_constant__ CUtensorMap weights, const __grid_constant__ CUtensorMap rows, FewRows a) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // wgmma exists on sm_90a alone; other cards take linear_portable
  using namespace hopper;
  extern __shared__ uint8_t raw[];
  uint8_t* base = reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(raw) + 1023) & ~uintptr_t{1023});
  __shared__ uint64_t full[kMaxStages], empty[kMaxStages];
  const int weight_half = a.height * 128;
  constexpr int row_half = kRows * 128;
  const int stage_bytes = 2 * (weight_half + row_half);
  const int group = threadIdx.x / 128;
  pdl_release();
  if (threadIdx.x == 0) {
    for (int s = 0; s < a.stages; ++s) barrier_init(full + s, 1), barrier_init(empty + s, 2);
    barrier_init_done();
  }
  __syncthreads();
  const int mine = a.tiles > static_cast<int>(blockIdx.x) ? (a.tiles - blockIdx.x + gridDim.x - 1) / gridDim.x : 0;
  const int total = mine * a.chunks;
  if (group == 2) {
    if (threadIdx.x == 256) {
      const auto load_weights = [&](int i, int s) {
        const int tile = blockIdx.x + (i / a.chunks) * gridDim.x, k = (i % a.chunks) * kDepth;
        uint8_t* to = base + s * stage_bytes;
        bulk_copy(to, &weights, full + s, k, tile * a.height);
        bulk_copy(to + weight_half, &weights, full + s, k + 64, tile * a.height);
      };
      const auto load_rows = [&](int i, int s) {
        const int k = (i % a.chunks) * kDepth;
        uint8_t* to = base + s * stage_bytes + 2 * weight_half;
        bulk_copy(to, &rows, full + s, k, 0);
        bulk_copy(to + row_half, &rows, full + s, k + 64, 0);
      };
      const int ahead = min(a.stages, total);
      for (int i = 0; i < ahead; ++i) barrier_expect(full + i, stage_bytes), load_weights(i, i);
      pdl_wait();
      for (int i = 0; i < ahead; ++i) load_rows(i, i);
      int s = 0;
      uint32_t parity = 0;
      for (int i = ahead; i < total; ++i) {
        barrier_wait(empty + s, parity);
        barrier_expect(full + s, stage_bytes);
        load_weights(i, s);
        load_rows(i, s);
        if (++s == a.stages) s = 0, parity ^= 1;
      }
    } else {
      pdl_wait();
    }
    return;
  }
  pdl_wait();  // y may still be read by the kernel before this one
  const int thread = threadIdx.x % 128, lane = thread % 32, warp = thread / 32;
  float acc[kRows / 2];
  int s = 0;
  uint32_t parity = 0;
  for (int m = 0; m < mine; ++m) {
    int accumulate = 0;
    for (int c = 0; c < a.chunks; ++c) {
      barrier_wait(full + s, parity);
      mma_fence();
      const uint8_t* stage = base + s * stage_bytes;
      if constexpr (kSplit) {
        const uint64_t w = descriptor(stage + group * weight_half), x = descriptor(stage + 2 * weight_half + group * row_half);
#pragma unroll
        for (int k = 0; k < 4; ++k) Wgmma<kRows>::mma(acc, w + 2 * k, x + 2 * k, accumulate), accumulate = 1;
      } else {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint64_t w = descriptor(stage + half * weight_half + group * 64 * 128),
                         x = descriptor(stage + 2 * weight_half + half * row_half);
#pragma unroll
          for (int k = 0; k < 4; ++k) Wgmma<kRows>::mma(acc, w + 2 * k, x + 2 * k, accumulate), accumulate = 1;
        }
      }
      mma_commit();
      mma_wait();
      if (thread == 0) barrier_arrive(empty + s);
      if (++s == a.stages) s = 0, parity ^= 1;
    }
    if constexpr (kSplit) {
      float* other = reinterpret_cast<float*>(base + static_cast<size_t>(a.stages) * stage_bytes);
      if (group == 1)
#pragma unroll
        for (int i = 0; i < kRows / 2; ++i) other[i * 128 + thread] = acc[i];
      asm volatile("bar.sync 1, 256;" ::: "memory");
      if (group == 0)
#pragma unroll
        for (int i = 0; i < kRows / 2; ++i) acc[i] += other[i * 128 + thread];
    }
    if (!kSplit || group == 0) {
      const int n0 = (kSplit ? 0 : group * 64) + warp * 16 + lane / 4, r0 = (lane % 4) * 2;
      const int first = (blockIdx.x + m * gridDim.x) * a.height;
      Out* y = static_cast<Out*>(a.y);
      const auto put = [&](int n, int r, float v) {
        if (n < a.height && first + n < a.n && r < a.rows) y[r * a.y_stride + first + n] = from_float<Out>(v);
      };
#pragma unroll
      for (int j = 0; j < kRows / 8; ++j) {
        put(n0, j * 8 + r0, acc[j * 4]), put(n0, j * 8 + r0 + 1, acc[j * 4 + 1]);
        put(n0 + 8, j * 8 + r0, acc[j * 4 + 2]), put(n0 + 8, j * 8 + r0 + 1, acc[j * 4 + 3]);
      }
    }
    if constexpr (kSplit) asm volatile("bar.sync 1, 256;" ::: "memory");  // `other` is free again
  }
#endif
}

template <int kRows, bool kSplit, class Out>
cudaError_t run(cudaStream_t stream, const CUtensorMap& weights, const CUtensorMap& rows, FewRows a, int multiprocessors,
                size_t shared_limit) {
  static const cudaError_t once = cudaFuncSetAttribute(few_rows_kernel<kRows, kSplit, Out>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                       static_cast<int>(shared_limit));
  if (once != cudaSuccess) return once;
  const size_t stage = 2 * (static_cast<size_t>(a.height) + kRows) * 128;
  // Alignment, the split's exchange, and room behind the last stage: products read 64 rows of a shorter tile, whatever lies there.
  const size_t extra = 1024 + (kSplit ? static_cast<size_t>(kRows) * 64 * 4 : 0) + (a.height % 64 ? 64 * 128 : 0);
  a.stages = static_cast<int>(std::min<size_t>(kMaxStages, (shared_limit - extra) / stage));
  return launch(few_rows_kernel<kRows, kSplit, Out>, dim3(std::min(multiprocessors, a.tiles)), dim3(kThreads), extra + a.stages * stage,
                stream, weights, rows, a);
}

}  // namespace

int few_rows_bucket(int rows) {
  for (const int b : {8, 16, 32, 64, 128})
    if (rows <= b) return b;
  return 0;
}

int few_rows_tile(int64_t n, int multiprocessors) {
  int best = 64;
  double least = 1e30;
  for (int h = 40; h <= 128; h += 8) {
    const int64_t tiles = (n + h - 1) / h, waves = (tiles + multiprocessors - 1) / multiprocessors;
    const double cost = static_cast<double>(waves) * h;  // weight rows that the busiest multiprocessor reads
    if (cost < least * 0.99 || (cost < least * 1.01 && h > best)) least = std::min(cost, least), best = h;
  }
  return best;
}

cudaError_t linear_few_rows(cudaStream_t stream, const CUtensorMap& weights, const CUtensorMap& rows, int row_count, int64_t n, int64_t k,
                            int tile, const ops::Tensor& y, int multiprocessors, size_t shared_limit) {
  FewRows a{
      row_count, static_cast<int>(n), tile, static_cast<int>((n + tile - 1) / tile), static_cast<int>((k + kDepth - 1) / kDepth), 0, y.data,
      y.stride};
  const bool split = tile <= 64, f32 = y.element == ops::Element::kFloat32;
  const auto pick = [&]<int kRows>() {
    if (split)
      return f32 ? run<kRows, true, float>(stream, weights, rows, a, multiprocessors, shared_limit)
                 : run<kRows, true, bf16>(stream, weights, rows, a, multiprocessors, shared_limit);
    return f32 ? run<kRows, false, float>(stream, weights, rows, a, multiprocessors, shared_limit)
               : run<kRows, false, bf16>(stream, weights, rows, a, multiprocessors, shared_limit);
  };
  switch (few_rows_bucket(row_count)) {
    case 8: return pick.template operator()<8>();
    case 16: return pick.template operator()<16>();
    case 32: return pick.template operator()<32>();
    case 64: return pick.template operator()<64>();
    case 128: return pick.template operator()<128>();
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace ddtree::kernels
