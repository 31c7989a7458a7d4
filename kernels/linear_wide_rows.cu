// linear for 33 to 128 rows on Hopper; the promises and the loading of linear_few_rows.cu, but the rows are the wide operand of wgmma (M)
// and a tile of weight rows the narrow one (N).
//
// A product of M = 64 reads both operands from shared memory, whose bandwidth the copies need as well: at 64 rows tiles of 88 weight rows
// were two products of 64 · 64 a step and took 512 cycles of reading a stage beside 300 of copying, of 1,100 that the memory leaves. As N a
// tile costs what it holds: one product of 64 · 88, read once.
//
// The bits are those of linear_few_rows.cu: the same depths, in the same order, by the same groups.
#include <algorithm>

#include "kernels/linear_few_rows.cuh"

namespace ddtree::kernels {
namespace {

using namespace few_rows;

// A stride of 8 (mod 32) floats: the eight rows of a store fall into different banks.
constexpr int sum_stride(int height) { return height % 32 == 8 ? height : height / 32 * 32 + 40; }

// 32-bit words of a row of results in shared memory: eight rows' stores fall into different banks, rows begin at multiples of 16 bytes.
__host__ __device__ constexpr int stage_pitch(int height) { return height / 2 + (height / 2 % 8 == 4 ? 0 : 4); }

template <int kRows, int kHeight, After kAfter, class Out>
struct WideShape {
  static constexpr bool kSplit = kHeight <= 64;           // the warpgroups take one half of each stage's depth each
  static constexpr bool kTurns = !kSplit && kRows == 64;  // they take tiles in turn: one's epilogue runs beside the other's products
  static constexpr int kParts = kSplit ? kRows / 64 : 1;  // of 64 rows, that a group has
  static constexpr int kStride = sum_stride(kHeight);     // kAddNorm: floats of a row
  static constexpr int kExchange = !kSplit ? 0 : kRows * 4 * (kAfter == After::kAddNorm ? kStride : kHeight);
  static constexpr int kResults = kAfter == After::kAddNorm || sizeof(Out) == 4 ? 0 : 64 * stage_pitch(kHeight) * 4;  // of a group
  static constexpr int kBehind = kExchange + kResults * (kSplit ? 1 : 2);  // bytes behind the stages
  static_assert(kSplit || kAfter != After::kAddNorm);
};

// acc of 64 rows and kHeight columns, finished and written: rows row and row + 8 are this thread's, those from row0 on its warp's.
//
// BF16 results go through the warp's 16 rows of `stage`, so that a short loop can write them: unrolled over the accumulators this was 1,800
// instructions, each run once a kernel, and fetching them took 5 µs.
template <int kHeight, After kAfter, class Out>
__device__ __forceinline__ void write_tile(const FewRows& a, const float (&acc)[kHeight / 2], float above, float below, int tile, int row0,
                                           uint32_t* stage) {
  const int lane = threadIdx.x % 32, first = tile * (kAfter == After::kSilu ? a.height / 2 : a.height);
  if constexpr (sizeof(Out) == 4) {
#pragma unroll
    for (int i = 0; i < kHeight / 4; ++i) {
      const int r = row0 + lane / 4 + i % 2 * 8, column = i / 2 * 8 + lane % 4 * 2;
      if (r >= a.rows || column >= a.height || first + column >= a.n) continue;
      const float2 v = {acc[2 * i] * (i % 2 ? below : above), acc[2 * i + 1] * (i % 2 ? below : above)};
      float* y = static_cast<float*>(a.y) + r * a.y_stride + first + column;
      if (a.vectors && first + column + 1 < a.n) {
        *reinterpret_cast<float2*>(y) = v;
      } else {
        y[0] = v.x;
        if (first + column + 1 < a.n) y[1] = v.y;
      }
    }
  } else {
    constexpr int kPitch = stage_pitch(kHeight), kEights = kHeight / 8;
    __syncwarp();  // the tile before has been read
#pragma unroll
    for (int i = 0; i < kHeight / 4; ++i) {
      const float by = i % 2 ? below : above;
      const __nv_bfloat162 v = __floats2bfloat162_rn(acc[2 * i] * by, acc[2 * i + 1] * by);
      stage[(lane / 4 + i % 2 * 8) * kPitch + i / 2 * 4 + lane % 4] = reinterpret_cast<const uint32_t&>(v);
    }
    __syncwarp();
#pragma unroll 1
    for (int at = lane; at < 16 * kEights; at += 32) {
      const int r = row0 + at / kEights, eight = at % kEights;
      if (r >= a.rows || eight * 8 >= a.height) continue;
      const uint4 v = *reinterpret_cast<const uint4*>(stage + at / kEights * kPitch + eight * 4);
      if constexpr (kAfter == After::kSilu) {
        // Eight weight rows of the tile are four of gate, then the four up rows of the same columns. The width is a multiple of four.
        const int column = first + eight * 4;
        if (column >= a.n / 2) continue;
        const auto both = [](uint32_t gate, uint32_t up) {
          const float2 g = __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(gate)),
                       u = __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(up));
          return __floats2bfloat162_rn(silu(g.x) * u.x, silu(g.y) * u.y);
        };
        __nv_bfloat162 out[2] = {both(v.x, v.z), both(v.y, v.w)};
        bf16* y = static_cast<bf16*>(a.y) + r * a.y_stride + column;
        if (a.vectors) *reinterpret_cast<uint2*>(y) = *reinterpret_cast<const uint2*>(out);
        else y[0] = out[0].x, y[1] = out[0].y, y[2] = out[1].x, y[3] = out[1].y;
      } else {
        const int column = first + eight * 8;
        bf16* y = static_cast<bf16*>(a.y) + r * a.y_stride + column;
        if (a.vectors && column + 8 <= a.n) {
          *reinterpret_cast<uint4*>(y) = v;
        } else {
          const uint32_t pairs[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
          for (int i = 0; i < 8; ++i)
            if (column + i < a.n) y[i] = __ushort_as_bfloat16(static_cast<uint16_t>(pairs[i / 2] >> (i % 2 * 16)));
        }
      }
    }
  }
}

// kHeight: of the products, at least the tile's; what lies behind a shorter tile is multiplied too, and not used.
template <int kRows, int kHeight, After kAfter, class Out>
__global__ void __launch_bounds__(kThreads, 1)
    wide_rows_kernel(const __grid_constant__ CUtensorMap weights, const __grid_constant__ CUtensorMap rows, FewRows a) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // wgmma exists on sm_90a alone; other cards take linear_portable
  using namespace hopper;
  using Shape = WideShape<kRows, kHeight, kAfter, Out>;
  extern __shared__ uint8_t raw[];
  uint8_t* base = reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(raw) + 1023) & ~uintptr_t{1023});
  __shared__ Barriers barriers;
  __shared__ uint64_t turn[2];  // kTurns: the other group has had its tile's last stage
  __shared__ float scale[kRows];
  const int weight_half = a.height * 128;
  constexpr int row_half = kRows * 128;
  const int stage_bytes = 2 * (weight_half + row_half);
  const int group = threadIdx.x / 128;
  pdl_release();
  if (threadIdx.x < 2) barrier_init(turn + threadIdx.x, 1);
  init_barriers(&barriers, a.stages, Shape::kTurns ? 1 : 2);
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
  const int thread = threadIdx.x % 128, lane = thread % 32;
  const int row = (Shape::kSplit || Shape::kTurns ? 0 : group * 64) + thread / 32 * 16 + lane / 4;  // and row + 8, of the first part
  [[maybe_unused]] float* other = reinterpret_cast<float*>(base + static_cast<size_t>(a.stages) * stage_bytes);
  [[maybe_unused]] Residual<kRows> residual;
  float acc[Shape::kParts][kHeight / 2];
  for (int m = Shape::kTurns ? group : 0; m < mine; m += Shape::kTurns ? 2 : 1) {
    const int tile = blockIdx.x + m * gridDim.x;
    if constexpr (kAfter == After::kAddNorm) residual.fetch(a, tile);
    // A group that looked at a stage several uses ahead would take an older use's phase for its own.
    if (Shape::kTurns && m > 0) barrier_wait(turn + group, (m - 1) / 2 & 1);
    int s = m * a.chunks % a.stages;
    uint32_t parity = m * a.chunks / a.stages & 1;
    int accumulate = 0;
#pragma unroll 1
    for (int c = 0; c < a.chunks; ++c) {
      barrier_wait(barriers.full + s, parity);
      mma_fence();
      const uint8_t *w_at = base + s * stage_bytes, *x_at = w_at + 2 * weight_half;
      if constexpr (Shape::kSplit) {
        const uint64_t w = descriptor(w_at + group * weight_half), x = descriptor(x_at + group * row_half);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
#pragma unroll
          for (int p = 0; p < Shape::kParts; ++p) Wgmma<kHeight>::mma(acc[p], x + p * (64 * 128 >> 4) + 2 * k, w + 2 * k, accumulate);
          accumulate = 1;
        }
      } else {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint64_t w = descriptor(w_at + half * weight_half),
                         x = descriptor(x_at + half * row_half + (Shape::kTurns ? 0 : group * 64 * 128));
#pragma unroll
          for (int k = 0; k < 4; ++k) Wgmma<kHeight>::mma(acc[0], x + 2 * k, w + 2 * k, accumulate), accumulate = 1;
        }
      }
      mma_commit();
      mma_wait();
      if (thread == 0) barrier_arrive(barriers.empty + s);
      if (++s == a.stages) s = 0, parity ^= 1;
    }
    if (Shape::kTurns && thread == 0) barrier_arrive(turn + 1 - group);
#pragma unroll
    for (int p = 0; p < Shape::kParts; ++p) hold(acc[p]);
    if constexpr (kAfter == After::kAddNorm) {
      const auto at = [&](int p, int i) {
        return reinterpret_cast<float2*>(other + (p * 64 + row + i % 2 * 8) * Shape::kStride + i / 2 * 8 + lane % 4 * 2);
      };
      if (group == 1)
#pragma unroll
        for (int p = 0; p < Shape::kParts; ++p)
#pragma unroll
          for (int i = 0; i < kHeight / 4; ++i) *at(p, i) = {acc[p][2 * i], acc[p][2 * i + 1]};
      consumers_sync();
      if (group == 0)
#pragma unroll
        for (int p = 0; p < Shape::kParts; ++p)
#pragma unroll
          for (int i = 0; i < kHeight / 4; ++i) {
            const float2 had = *at(p, i);
            *at(p, i) = {acc[p][2 * i] + had.x, acc[p][2 * i + 1] + had.y};
          }
      consumers_sync();
      residual.add(a, tile, other, Shape::kStride);
      consumers_sync();  // `other` is free again
      continue;
    }
    if constexpr (Shape::kSplit) {
      if (group == 1)
#pragma unroll
        for (int p = 0; p < Shape::kParts; ++p)
#pragma unroll
          for (int i = 0; i < kHeight / 2; ++i) other[(p * (kHeight / 2) + i) * 128 + thread] = acc[p][i];
      consumers_sync();
      if (group == 0)
#pragma unroll
        for (int p = 0; p < Shape::kParts; ++p)
#pragma unroll
          for (int i = 0; i < kHeight / 2; ++i) acc[p][i] += other[(p * (kHeight / 2) + i) * 128 + thread];
      consumers_sync();  // `other` is free again
    }
    if (Shape::kSplit && group == 1) continue;
    if (scaled) barrier_wait(&barriers.scaled, 0);
    [[maybe_unused]] uint32_t* stage =
        reinterpret_cast<uint32_t*>(other + Shape::kExchange / 4) + group * (Shape::kResults / 4) + thread / 32 * 16 * stage_pitch(kHeight);
#pragma unroll
    for (int p = 0; p < Shape::kParts; ++p) {
      const float above = scaled ? scale[p * 64 + row] : 1.0f, below = scaled ? scale[p * 64 + row + 8] : 1.0f;
      write_tile<kHeight, kAfter, Out>(a, acc[p], above, below, tile, p * 64 + row - lane / 4, stage);
    }
  }
#endif
}

template <int kRows, int kHeight, After kAfter, class Out>
cudaError_t run(cudaStream_t stream, const CUtensorMap& weights, const CUtensorMap& rows, FewRows a, int multiprocessors,
                size_t shared_limit) {
  const auto kernel = wide_rows_kernel<kRows, kHeight, kAfter, Out>;
  static const cudaError_t once = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_limit));
  if (once != cudaSuccess) return once;
  // What the products read behind a shorter tile, at most 56 rows, is the tile's other half or the rows: inside the stage.
  const size_t stage = 2 * (static_cast<size_t>(a.height) + kRows) * 128, extra = 1024 + WideShape<kRows, kHeight, kAfter, Out>::kBehind;
  a.stages = static_cast<int>(std::min<size_t>(kMaxStages, (shared_limit - extra) / stage));
  return launch(kernel, dim3(std::min(multiprocessors, a.tiles)), dim3(kThreads), extra + a.stages * stage, stream, weights, rows, a);
}

}  // namespace

namespace few_rows {

cudaError_t wide_rows(cudaStream_t stream, const CUtensorMap& weights, const CUtensorMap& rows, FewRows a, After after, bool float32,
                      int multiprocessors, size_t shared_limit) {
  const auto by_rows = [&]<int kHeight, After kAfter, class Out>() {
    return a.rows <= 64 ? run<64, kHeight, kAfter, Out>(stream, weights, rows, a, multiprocessors, shared_limit)
                        : run<128, kHeight, kAfter, Out>(stream, weights, rows, a, multiprocessors, shared_limit);
  };
  if (after == After::kAddNorm)
    return a.height <= 40 ? by_rows.template operator()<40, After::kAddNorm, bf16>()
                          : by_rows.template operator()<64, After::kAddNorm, bf16>();
  if (float32)  // heads: few products, where a larger one costs nothing beside writing them
    return a.height <= 64 ? by_rows.template operator()<64, After::kNothing, float>()
                          : by_rows.template operator()<128, After::kNothing, float>();
  const auto by_height = [&]<After kAfter>() {
    if (a.height <= 40) return by_rows.template operator()<40, kAfter, bf16>();
    if (a.height <= 64) return by_rows.template operator()<64, kAfter, bf16>();
    if (a.height <= 88) return by_rows.template operator()<88, kAfter, bf16>();
    if (a.height <= 112) return by_rows.template operator()<112, kAfter, bf16>();
    return by_rows.template operator()<128, kAfter, bf16>();
  };
  return after == After::kSilu ? by_height.template operator()<After::kSilu>() : by_height.template operator()<After::kNothing>();
}

}  // namespace few_rows
}  // namespace ddtree::kernels
