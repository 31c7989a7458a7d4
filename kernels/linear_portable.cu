// linear on any card (sm_80 and later): tensor cores through mma.sync where the weights are BF16, plain products where they are float32.
// The fallback where neither the Hopper kernel nor cuBLASLt serves: right everywhere, tuned nowhere.
#include <mma.h>

#include "kernels/common.cuh"
#include "kernels/kernels.h"

namespace ddtree::kernels {
namespace {

constexpr int kTileN = 64, kTileR = 32, kDepth = 64, kPad = 8;

// Block: 64 weight rows × 32 rows; 4 warps, each 16 weight rows. K in steps of 64 through shared memory.
template <class Out>
__global__ void __launch_bounds__(128)
    mma_kernel(const bf16* w, const bf16* x, int64_t x_stride, int rows, int64_t n, int64_t k, Out* y, int64_t y_stride) {
  using namespace nvcuda;
  __shared__ __align__(16) bf16 ws[kTileN][kDepth + kPad];
  __shared__ __align__(16) bf16 xs[kTileR][kDepth + kPad];
  __shared__ float out[4][16][kTileR + 4];
  pdl_begin();
  const int64_t n0 = static_cast<int64_t>(blockIdx.x) * kTileN;
  const int r0 = blockIdx.y * kTileR, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  wmma::fragment<wmma::accumulator, 16, 16, 16, float> acc[2];
  wmma::fill_fragment(acc[0], 0.0f), wmma::fill_fragment(acc[1], 0.0f);
  for (int64_t k0 = 0; k0 < k; k0 += kDepth) {
    const auto fill = [&](bf16* to, const bf16* from, bool valid, int64_t at) {  // 8 elements
      if (valid && at + 8 <= k && (reinterpret_cast<uintptr_t>(from) & 15) == 0) {
        *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
      } else {
        for (int e = 0; e < 8; ++e) to[e] = valid && at + e < k ? from[e] : from_float<bf16>(0.0f);
      }
    };
    for (int i = threadIdx.x; i < kTileN * kDepth / 8; i += 128) {
      const int row = i / (kDepth / 8), c = i % (kDepth / 8) * 8;
      fill(&ws[row][c], w + (n0 + row) * k + k0 + c, n0 + row < n, k0 + c);
    }
    for (int i = threadIdx.x; i < kTileR * kDepth / 8; i += 128) {
      const int row = i / (kDepth / 8), c = i % (kDepth / 8) * 8;
      fill(&xs[row][c], x + (r0 + row) * x_stride + k0 + c, r0 + row < rows, k0 + c);
    }
    __syncthreads();
#pragma unroll
    for (int c = 0; c < kDepth; c += 16) {
      wmma::fragment<wmma::matrix_a, 16, 16, 16, bf16, wmma::row_major> a;
      wmma::load_matrix_sync(a, &ws[warp * 16][c], kDepth + kPad);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        wmma::fragment<wmma::matrix_b, 16, 16, 16, bf16, wmma::col_major> b;
        wmma::load_matrix_sync(b, &xs[h * 16][c], kDepth + kPad);
        wmma::mma_sync(acc[h], a, b, acc[h]);
      }
    }
    __syncthreads();
  }
  wmma::store_matrix_sync(&out[warp][0][0], acc[0], kTileR + 4, wmma::mem_row_major);
  wmma::store_matrix_sync(&out[warp][0][16], acc[1], kTileR + 4, wmma::mem_row_major);
  __syncwarp();
  for (int i = lane; i < 16 * kTileR; i += 32) {
    const int r = i / 16, c = i % 16;
    if (r0 + r < rows && n0 + warp * 16 + c < n) y[(r0 + r) * y_stride + n0 + warp * 16 + c] = from_float<Out>(out[warp][c][r]);
  }
}

// float32 weights: one warp a (row, weight row).
template <class Out>
__global__ void plain_kernel(const float* w, const bf16* x, int64_t x_stride, int rows, int64_t n, int64_t k, Out* y, int64_t y_stride) {
  pdl_begin();
  const int64_t item = blockIdx.x * static_cast<int64_t>(blockDim.x / 32) + threadIdx.x / 32;
  if (item >= n * rows) return;
  const int64_t r = item / n, c = item % n;
  float sum = 0;
  for (int64_t i = threadIdx.x % 32; i < k; i += 32) sum = fmaf(to_float(x[r * x_stride + i]), w[c * k + i], sum);
  sum = warp_sum(sum);
  if (threadIdx.x % 32 == 0) y[r * y_stride + c] = from_float<Out>(sum);
}

}  // namespace

cudaError_t linear_portable(cudaStream_t stream, const void* weight, bool weight_bf16, const ops::Tensor& x, int64_t n, int64_t k,
                            const ops::Tensor& y) {
  const int rows = static_cast<int>(x.rows);
  const auto run = [&]<class Out>() {
    Out* out = static_cast<Out*>(y.data);
    if (weight_bf16)
      return launch(mma_kernel<Out>, dim3(static_cast<unsigned>((n + kTileN - 1) / kTileN), (rows + kTileR - 1) / kTileR), dim3(128), 0,
                    stream, static_cast<const bf16*>(weight), as_bf16(x), x.stride, rows, n, k, out, y.stride);
    return launch(plain_kernel<Out>, dim3(static_cast<unsigned>((n * rows + 7) / 8)), dim3(256), 0, stream,
                  static_cast<const float*>(weight), as_bf16(x), x.stride, rows, n, k, out, y.stride);
  };
  return y.element == ops::Element::kFloat32 ? run.template operator()<float>() : run.template operator()<bf16>();
}

}  // namespace ddtree::kernels
