// linear for few rows (up to 128) on Hopper: y[r, n] = Σ_k x[r, k] · W[n, k], weights read once at the memory's speed. The kernel for up to
// 32 rows; more go to linear_wide_rows.cu.
//
// The weights are the wide operand of wgmma (M), the rows its narrow one (N), so a tile of weight rows streams through shared memory by
// bulk copies while the tensor cores idle most of the time. A block takes whole tiles, all of K: splitting K over blocks and summing the
// parts cost more (a dependent trip through L2 at each end) than it gained, measured 0.84 against 0.95 of the read bandwidth over a 27B
// layer's matrices. So the tile's height, not a split, evens the work out over the multiprocessors (see few_rows_tile). The prologue starts
// the weights' copies before it waits for the kernel before it: weights do not depend on it.
//
// What follows a product belongs to its epilogue, since a kernel of its own costs a boundary of 3 to 5 µs (contracts: ops/linear.h):
// SiLU(gate) · up, for which the map lays rows of both halves side by side in shared memory; the residual's update and the norm, whose
// scale is left to the product that reads the rows, as its sum needs the tiles of all blocks.
//
// Numeric promise: y[r, n] depends on x[r, :] and W[n, :] only, summed in one fixed order for every number of rows in a bucket.
#include <algorithm>

#include "kernels/linear_few_rows.cuh"

namespace ddtree::kernels {
namespace {

using namespace few_rows;

constexpr int kNarrow = 32;     // rows that this file's kernels take
constexpr int kSumStride = 68;  // floats of a row's tile in shared memory: a warp's accumulators fall into different banks
constexpr int exchange_bytes(int rows, bool split, After after) {
  return !split ? 0 : rows * 4 * (after == After::kAddNorm ? kSumStride : 64);
}

// kSplit: tiles of at most 64 weight rows; the warpgroups take one half of each stage's depth each and add up at the end. Otherwise each
// takes 64 of the tile's weight rows.
template <int kRows, bool kSplit, After kAfter, class Out>
__global__ void __launch_bounds__(kThreads, 1)
    few_rows_kernel(const __grid_constant__ CUtensorMap weights, const __grid_constant__ CUtensorMap rows, FewRows a) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // wgmma exists on sm_90a alone; other cards take linear_portable
  using namespace hopper;
  extern __shared__ uint8_t raw[];
  uint8_t* base = reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(raw) + 1023) & ~uintptr_t{1023});
  __shared__ Barriers barriers;
  __shared__ float scale[kRows];
  const int weight_half = a.height * 128;
  constexpr int row_half = kRows * 128;
  const int stage_bytes = 2 * (weight_half + row_half);
  const int group = threadIdx.x / 128;
  pdl_release();
  init_barriers(&barriers, a.stages, 2);
  const int mine = a.tiles > static_cast<int>(blockIdx.x) ? (a.tiles - blockIdx.x + gridDim.x - 1) / gridDim.x : 0;
  const bool scaled = kAfter != After::kAddNorm && a.squares != nullptr;
  if (group == 2) {
    if (threadIdx.x == kConsumers) {
      produce<kRows, kAfter>(weights, rows, a, mine * a.chunks, base, &barriers);
    } else {
      pdl_wait();
      if (scaled && threadIdx.x >= kConsumers + 32) row_scales(a, scale, &barriers);
    }
    return;
  }
  pdl_wait();  // y may still be read by the kernel before this one
  const int thread = threadIdx.x % 128, lane = thread % 32, warp = thread / 32;
  float acc[kRows / 2];
  [[maybe_unused]] Residual<kRows> residual;
  int s = 0;
  uint32_t parity = 0;
  for (int m = 0; m < mine; ++m) {
    const int tile = blockIdx.x + m * gridDim.x;
    if constexpr (kAfter == After::kAddNorm) residual.fetch(a, tile);
    int accumulate = 0;
    for (int c = 0; c < a.chunks; ++c) {
      barrier_wait(barriers.full + s, parity);
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
      if (thread == 0) barrier_arrive(barriers.empty + s);
      if (++s == a.stages) s = 0, parity ^= 1;
    }
    [[maybe_unused]] float* other = reinterpret_cast<float*>(base + static_cast<size_t>(a.stages) * stage_bytes);
    const int n0 = (kSplit ? 0 : group * 64) + warp * 16 + lane / 4, r0 = (lane % 4) * 2;
    if constexpr (kAfter == After::kAddNorm) {
      const auto at = [&](int i) { return other + (i / 4 * 8 + r0 + i % 2) * kSumStride + n0 + (i % 4 / 2) * 8; };
      if (group == 1)
#pragma unroll
        for (int i = 0; i < kRows / 2; ++i) *at(i) = acc[i];
      consumers_sync();
      if (group == 0)
#pragma unroll
        for (int i = 0; i < kRows / 2; ++i) *at(i) = acc[i] + *at(i);
      consumers_sync();
      residual.add(a, tile, other, kSumStride);
      consumers_sync();  // `other` is free again
      continue;
    }
    if constexpr (kSplit) {
      if (group == 1)
#pragma unroll
        for (int i = 0; i < kRows / 2; ++i) other[i * 128 + thread] = acc[i];
      consumers_sync();
      if (group == 0)
#pragma unroll
        for (int i = 0; i < kRows / 2; ++i) acc[i] += other[i * 128 + thread];
    }
    if (!kSplit || group == 0) {
      if (scaled) {
        barrier_wait(&barriers.scaled, 0);
#pragma unroll
        for (int i = 0; i < kRows / 2; ++i) acc[i] *= scale[i / 4 * 8 + r0 + i % 2];
      }
      if constexpr (kAfter == After::kSilu) {
        // Eight rows of the tile are four of gate, then four of up: lanes below 16 hold gates, those above the ups of the same columns.
        // Each half of the warp finishes one of the thread's two eights.
        const int column = n0 / 16 * 8 + lane / 4, width = a.height / 2, first = tile * width;
        const bool upper = lane >= 16, valid = column < width && first + column < a.n / 2;
        bf16* y = static_cast<bf16*>(a.y) + first + column;
#pragma unroll
        for (int j = 0; j < kRows / 8; ++j)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const float near = acc[j * 4 + e], far = acc[j * 4 + 2 + e];
            const float got = __shfl_xor_sync(0xffffffffu, upper ? near : far, 16);
            const float gate = rounded(upper ? got : near), up = rounded(upper ? far : got);
            const int r = j * 8 + r0 + e;
            if (valid && r < a.rows) y[r * a.y_stride] = from_float<bf16>(silu(gate) * up);
          }
      } else {
        const int first = tile * a.height;
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
    }
    if constexpr (kSplit) consumers_sync();  // `other` is free again
  }
#endif
}

template <int kRows, bool kSplit, After kAfter, class Out>
cudaError_t run(cudaStream_t stream, const CUtensorMap& weights, const CUtensorMap& rows, FewRows a, int multiprocessors,
                size_t shared_limit) {
  const auto kernel = few_rows_kernel<kRows, kSplit, kAfter, Out>;
  static const cudaError_t once = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_limit));
  if (once != cudaSuccess) return once;
  const size_t stage = 2 * (static_cast<size_t>(a.height) + kRows) * 128;
  // Alignment, the split's exchange, and room behind the last stage: products read 64 rows of a shorter tile, whatever lies there.
  const size_t extra = 1024 + exchange_bytes(kRows, kSplit, kAfter) + (a.height % 64 ? 64 * 128 : 0);
  a.stages = static_cast<int>(std::min<size_t>(kMaxStages, (shared_limit - extra) / stage));
  return launch(kernel, dim3(std::min(multiprocessors, a.tiles)), dim3(kThreads), extra + a.stages * stage, stream, weights, rows, a);
}

// f.operator()<kRows>() for the bucket of `rows`, up to 32.
template <class F>
cudaError_t by_bucket(int rows, const F& f) {
  switch (few_rows_bucket(rows)) {
    case 8: return f.template operator()<8>();
    case 16: return f.template operator()<16>();
    case 32: return f.template operator()<32>();
    default: return cudaErrorInvalidValue;
  }
}

FewRows product(int rows, int64_t n, int64_t k, int tile, const ops::Tensor& y) {
  FewRows a{};
  a.rows = rows, a.n = static_cast<int>(n), a.height = tile, a.tiles = static_cast<int>((n + tile - 1) / tile);
  a.chunks = static_cast<int>((k + kDepth - 1) / kDepth);
  a.y = y.data, a.y_stride = y.stride;
  const int64_t together = y.element == ops::Element::kFloat32 ? 2 : 8;
  a.vectors = y.stride % together == 0 && reinterpret_cast<uintptr_t>(y.data) % (together * y.size()) == 0;
  return a;
}
void set_scale(FewRows* a, const ops::RowScale& s) {
  if (s.parts == 0) return;
  a->squares = as_f32(s.squares), a->squares_stride = s.squares.stride, a->parts = s.parts;
  a->width = static_cast<float>(s.width), a->eps = s.eps;
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

bool few_rows_norms(int64_t n, int tile) { return n % 4 == 0 && tile <= 64 && (n + tile - 1) / tile <= kMostParts; }

cudaError_t linear_few_rows(cudaStream_t stream, const FewRowsWeight& w, const CUtensorMap& rows, int row_count, const ops::Tensor& y,
                            const ops::RowScale& scale) {
  FewRows a = product(row_count, w.n, w.k, w.tile, y);
  set_scale(&a, scale);
  const bool split = w.tile <= 64, f32 = y.element == ops::Element::kFloat32;
  if (row_count > kNarrow) return wide_rows(stream, *w.map, rows, a, After::kNothing, f32, w.multiprocessors, w.shared_limit);
  return by_bucket(row_count, [&]<int kRows>() {
    const auto go = [&]<bool kSplit, class Out>() {
      return run<kRows, kSplit, After::kNothing, Out>(stream, *w.map, rows, a, w.multiprocessors, w.shared_limit);
    };
    if (split) return f32 ? go.template operator()<true, float>() : go.template operator()<true, bf16>();
    return f32 ? go.template operator()<false, float>() : go.template operator()<false, bf16>();
  });
}

cudaError_t linear_silu_few_rows(cudaStream_t stream, const FewRowsWeight& w, const CUtensorMap& rows, int row_count, const ops::Tensor& y,
                                 const ops::RowScale& scale) {
  FewRows a = product(row_count, w.n, w.k, w.tile, y);
  set_scale(&a, scale);
  if (row_count > kNarrow) return wide_rows(stream, *w.map, rows, a, After::kSilu, false, w.multiprocessors, w.shared_limit);
  return by_bucket(row_count, [&]<int kRows>() {
    return w.tile <= 64 ? run<kRows, true, After::kSilu, bf16>(stream, *w.map, rows, a, w.multiprocessors, w.shared_limit)
                        : run<kRows, false, After::kSilu, bf16>(stream, *w.map, rows, a, w.multiprocessors, w.shared_limit);
  });
}

cudaError_t linear_add_norm_few_rows(cudaStream_t stream, const FewRowsWeight& w, const CUtensorMap& rows, int row_count,
                                     const ops::LinearAddNormArgs& args) {
  FewRows a = product(row_count, w.n, w.k, w.tile, args.y);
  a.residual = as_f32(args.residual), a.residual_stride = args.residual.stride;
  a.norm = as_f32(args.w);
  a.tap = as_bf16_out(args.tap), a.tap_stride = args.tap.stride;
  a.own_squares = as_f32(args.squares), a.own_stride = args.squares.stride;
  if (row_count > kNarrow) return wide_rows(stream, *w.map, rows, a, After::kAddNorm, false, w.multiprocessors, w.shared_limit);
  return by_bucket(row_count, [&]<int kRows>() {
    return run<kRows, true, After::kAddNorm, bf16>(stream, *w.map, rows, a, w.multiprocessors, w.shared_limit);
  });
}

}  // namespace ddtree::kernels
