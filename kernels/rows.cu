// Row-wise ops: embed, copy_rows, the norms, silu_mul. Contracts: ops/rows.h, ops/norm.h, ops/silu_mul.h. All are memory-bound and tiny
// beside the GEMMs; what counts is launch latency, so each is one launch with 16-byte accesses.
#include "kernels/common.cuh"
#include "kernels/kernels.h"

namespace ddtree::kernels {
namespace {

template <class W>
__global__ void embed_kernel(const int32_t* token, const W* weight, int64_t hidden, float* y, int64_t stride) {
  pdl_begin();
  const W* row = weight + static_cast<int64_t>(token[blockIdx.x]) * hidden;
  float* out = y + blockIdx.x * stride;
  for (int64_t i = blockIdx.y * blockDim.x + threadIdx.x; i < hidden; i += gridDim.y * blockDim.x) out[i] = to_float(row[i]);
}

template <class X, class Y>
__global__ void copy_rows_kernel(const X* x, int64_t x_stride, const int32_t* from, Y* y, int64_t y_stride, const int32_t* to,
                                 int64_t cols) {
  pdl_begin();
  const int block = static_cast<int>(blockIdx.x), source = from ? from[block] : block, target = to ? to[block] : block;
  if (source < 0 || target < 0) return;  // padding
  const X* in = x + static_cast<int64_t>(source) * x_stride;
  Y* out = y + static_cast<int64_t>(target) * y_stride;
  for (int64_t i = blockIdx.y * blockDim.x + threadIdx.x; i < cols; i += gridDim.y * blockDim.x) out[i] = from_float<Y>(to_float(in[i]));
}

// Blocks over a row's columns where rows are few: one block takes 43 µs for a drafter's 25,600 features, one load after the other.
dim3 row_blocks(int64_t rows, int64_t cols) {
  const int64_t most = rows < 128 ? (cols + 1023) / 1024 : 1;
  return dim3(static_cast<unsigned>(rows), static_cast<unsigned>(most < 32 ? most : 32));
}

constexpr int kNormThreads = 256;

template <class X>
__global__ void __launch_bounds__(kNormThreads)
    rms_norm_kernel(const X* x, int64_t x_stride, const float* w, float eps, int64_t hidden, bf16* y, int64_t y_stride) {
  __shared__ float scratch[32];
  pdl_begin();
  const X* in = x + blockIdx.x * x_stride;
  bf16* out = y + blockIdx.x * y_stride;
  float sum = 0;
  for (int64_t i = threadIdx.x; i < hidden; i += kNormThreads) {
    const float v = to_float(in[i]);
    sum += v * v;
  }
  const float scale = rsqrtf(block_sum(sum, scratch) / static_cast<float>(hidden) + eps);
  for (int64_t i = threadIdx.x; i < hidden; i += kNormThreads) out[i] = from_float<bf16>(w[i] * (to_float(in[i]) * scale));
}

__global__ void __launch_bounds__(kNormThreads)
    add_rms_norm_kernel(float* x, int64_t x_stride, const bf16* delta, int64_t d_stride, const float* w, float eps, int64_t hidden, bf16* y,
                        int64_t y_stride, bf16* tap, int64_t tap_stride) {
  __shared__ float scratch[32];
  pdl_begin();
  float* row = x + blockIdx.x * x_stride;
  const bf16* add = delta + blockIdx.x * d_stride;
  float sum = 0;
  for (int64_t i = threadIdx.x; i < hidden; i += kNormThreads) {
    const float v = row[i] + to_float(add[i]);
    row[i] = v;
    if (tap) tap[blockIdx.x * tap_stride + i] = from_float<bf16>(v);
    sum += v * v;
  }
  const float scale = rsqrtf(block_sum(sum, scratch) / static_cast<float>(hidden) + eps);
  bf16* out = y + blockIdx.x * y_stride;
  for (int64_t i = threadIdx.x; i < hidden; i += kNormThreads) out[i] = from_float<bf16>(w[i] * (row[i] * scale));
}

// Rows in registers, four values a thread and step: the whole row is in flight at once, and each value is read once. kSteps · 4 · blockDim
// values at most; hidden must be a multiple of 4 and all strides too.
template <int kSteps, class X, bool kAdd>
__global__ void __launch_bounds__(1024)
    norm_vector_kernel(X* x, int64_t x_stride, const bf16* delta, int64_t d_stride, const float* w, float eps, int hidden, bf16* y,
                       int64_t y_stride, bf16* tap, int64_t tap_stride) {
  __shared__ float scratch[32];
  const int quads = hidden / 4;
  float4 weight[kSteps], value[kSteps];
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    const int i = s * blockDim.x + threadIdx.x;
    if (i < quads) weight[s] = reinterpret_cast<const float4*>(w)[i];  // constant: may be read before the kernel before this one is done
  }
  pdl_begin();
  X* row = x + blockIdx.x * x_stride;
  float sum = 0;
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    const int i = s * blockDim.x + threadIdx.x;
    if (i >= quads) continue;
    float4 v;
    if constexpr (sizeof(X) == 4) {
      v = reinterpret_cast<const float4*>(row)[i];
    } else {
      const uint2 raw = reinterpret_cast<const uint2*>(row)[i];
      const float2 a = __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(raw.x)),
                   b = __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(raw.y));
      v = {a.x, a.y, b.x, b.y};
    }
    if constexpr (kAdd) {
      const uint2 raw = reinterpret_cast<const uint2*>(delta + blockIdx.x * d_stride)[i];
      const float2 a = __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(raw.x)),
                   b = __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(raw.y));
      v = {v.x + a.x, v.y + a.y, v.z + b.x, v.w + b.y};
      reinterpret_cast<float4*>(row)[i] = v;
      if (tap) {
        __nv_bfloat162 out[2] = {__floats2bfloat162_rn(v.x, v.y), __floats2bfloat162_rn(v.z, v.w)};
        reinterpret_cast<uint2*>(tap + blockIdx.x * tap_stride)[i] = *reinterpret_cast<uint2*>(out);
      }
    }
    value[s] = v;
    sum += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
  }
  const float scale = rsqrtf(block_sum(sum, scratch) / static_cast<float>(hidden) + eps);
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    const int i = s * blockDim.x + threadIdx.x;
    if (i >= quads) continue;
    const float4 v = value[s], g = weight[s];
    __nv_bfloat162 out[2] = {__floats2bfloat162_rn(g.x * (v.x * scale), g.y * (v.y * scale)),
                             __floats2bfloat162_rn(g.z * (v.z * scale), g.w * (v.w * scale))};
    reinterpret_cast<uint2*>(y + blockIdx.x * y_stride)[i] = *reinterpret_cast<uint2*>(out);
  }
}

// Threads of a row of `hidden` values in one, two or four steps; 0: not in this form.
int vector_threads(int64_t hidden, int steps) {
  const int64_t threads = ((hidden / 4 + steps - 1) / steps + 31) / 32 * 32;
  return hidden % 4 == 0 && threads <= 1024 ? static_cast<int>(threads) : 0;
}
bool quad(const void* p, int64_t stride, int64_t bytes) { return reinterpret_cast<uintptr_t>(p) % (4 * bytes) == 0 && stride % 4 == 0; }

template <class X, bool kAdd>
cudaError_t norm_vector(cudaStream_t stream, X* x, int64_t x_stride, const bf16* delta, int64_t d_stride, const float* w, float eps,
                        int64_t hidden, int rows, bf16* y, int64_t y_stride, bf16* tap, int64_t tap_stride) {
  if (!quad(x, x_stride, sizeof(X)) || !quad(w, 0, 4) || !quad(y, y_stride, 2) || (kAdd && !quad(delta, d_stride, 2)) ||
      (tap && !quad(tap, tap_stride, 2)))
    return cudaErrorNotSupported;
  const auto run = [&]<int kSteps>(int threads) {
    return launch(norm_vector_kernel<kSteps, X, kAdd>, dim3(rows), dim3(threads), 0, stream, x, x_stride, delta, d_stride, w, eps,
                  static_cast<int>(hidden), y, y_stride, tap, tap_stride);
  };
  if (const int t = vector_threads(hidden, 1); t > 0 && t <= 512) return run.template operator()<1>(t);
  if (const int t = vector_threads(hidden, 2); t > 0) return run.template operator()<2>(t);
  if (const int t = vector_threads(hidden, 8); t > 0) return run.template operator()<8>(t);
  return cudaErrorNotSupported;
}

// One warp a (row, head).
__global__ void gated_rms_norm_kernel(const bf16* o, int64_t o_stride, const bf16* z, int64_t z_stride, const float* w, int heads, int dim,
                                      float eps, bf16* y, int64_t y_stride, int rows) {
  pdl_begin();
  const int item = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (item >= rows * heads) return;
  const int row = item / heads, head = item % heads;
  const bf16* in = o + row * o_stride + head * dim;
  const bf16* gate = z + row * z_stride + head * dim;
  bf16* out = y + row * y_stride + head * dim;
  float sum = 0;
  for (int i = lane; i < dim; i += 32) {
    const float v = to_float(in[i]);
    sum += v * v;
  }
  const float scale = rsqrtf(warp_sum(sum) / static_cast<float>(dim) + eps);
  for (int i = lane; i < dim; i += 32) out[i] = from_float<bf16>(w[i] * (to_float(in[i]) * scale) * silu(to_float(gate[i])));
}

// Heads of 128: half a warp each, eight values a lane, kItems heads at once.
template <int kItems>
__global__ void __launch_bounds__(256)
    gated_rms_norm_128_kernel(const bf16* o, int64_t o_stride, const bf16* z, int64_t z_stride, const float* w, int heads, float eps,
                              bf16* y, int64_t y_stride, int rows) {
  constexpr int kDim = 128;
  const int half = threadIdx.x / 16, d = threadIdx.x % 16 * 8, all = rows * heads;
  float weight[8];
#pragma unroll
  for (int e = 0; e < 8; ++e) weight[e] = w[d + e];  // constant: may be read before the kernel before this one is done
  pdl_begin();
  const int first = (blockIdx.x * 16 + half) * kItems;
  uint4 value[kItems], gate[kItems];
#pragma unroll
  for (int k = 0; k < kItems; ++k) {
    const int item = min(first + k, all - 1), row = item / heads, head = item % heads;
    value[k] = *reinterpret_cast<const uint4*>(o + row * o_stride + head * kDim + d);
    gate[k] = *reinterpret_cast<const uint4*>(z + row * z_stride + head * kDim + d);
  }
#pragma unroll
  for (int k = 0; k < kItems; ++k) {
    const int item = min(first + k, all - 1), row = item / heads, head = item % heads;
    const auto *v = reinterpret_cast<const __nv_bfloat162*>(value + k), *g = reinterpret_cast<const __nv_bfloat162*>(gate + k);
    float sum = 0;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float2 x = __bfloat1622float2(v[e]);
      sum = fmaf(x.x, x.x, fmaf(x.y, x.y, sum));
    }
#pragma unroll
    for (int step = 8; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    const float scale = rsqrtf(sum / static_cast<float>(kDim) + eps);
    uint4 out;
    auto* to = reinterpret_cast<__nv_bfloat162*>(&out);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float2 x = __bfloat1622float2(v[e]), s = __bfloat1622float2(g[e]);
      to[e] = __floats2bfloat162_rn(weight[2 * e] * (x.x * scale) * silu(s.x), weight[2 * e + 1] * (x.y * scale) * silu(s.y));
    }
    if (first + k < all) *reinterpret_cast<uint4*>(y + row * y_stride + head * kDim + d) = out;
  }
}

__global__ void silu_mul_kernel(const bf16* x, int64_t x_stride, int64_t width, bf16* y, int64_t y_stride) {
  pdl_begin();
  const bf16* in = x + blockIdx.y * x_stride;
  bf16* out = y + blockIdx.y * y_stride;
  const int64_t first = (blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x) * 2,
                step = static_cast<int64_t>(gridDim.x) * blockDim.x * 2;
  for (int64_t i = first; i < width; i += step) {
    const __nv_bfloat162 g = *reinterpret_cast<const __nv_bfloat162*>(in + i), u = *reinterpret_cast<const __nv_bfloat162*>(in + width + i);
    const float2 a = __bfloat1622float2(g), b = __bfloat1622float2(u);
    *reinterpret_cast<__nv_bfloat162*>(out + i) = __floats2bfloat162_rn(silu(a.x) * b.x, silu(a.y) * b.y);
  }
}

// Many rows: eight values of kEach rows a thread, all loads in flight together.
template <int kEach>
__global__ void __launch_bounds__(128)
    silu_mul_rows_kernel(const bf16* x, int64_t x_stride, int width, bf16* y, int64_t y_stride, int rows) {
  pdl_begin();
  const int i = (blockIdx.x * blockDim.x + threadIdx.x) * 8, first = blockIdx.y * kEach;
  if (i >= width) return;
  uint4 gate[kEach], up[kEach];
#pragma unroll
  for (int r = 0; r < kEach; ++r) {
    if (first + r >= rows) break;
    const bf16* in = x + (first + r) * x_stride + i;
    gate[r] = *reinterpret_cast<const uint4*>(in), up[r] = *reinterpret_cast<const uint4*>(in + width);
  }
#pragma unroll
  for (int r = 0; r < kEach; ++r) {
    if (first + r >= rows) break;
    const __nv_bfloat162 *g = reinterpret_cast<const __nv_bfloat162*>(gate + r), *u = reinterpret_cast<const __nv_bfloat162*>(up + r);
    uint4 out;
    auto* to = reinterpret_cast<__nv_bfloat162*>(&out);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float2 a = __bfloat1622float2(g[e]), b = __bfloat1622float2(u[e]);
      to[e] = __floats2bfloat162_rn(silu(a.x) * b.x, silu(a.y) * b.y);
    }
    *reinterpret_cast<uint4*>(y + (first + r) * y_stride + i) = out;
  }
}

bool sixteen(const ops::Tensor& t) { return reinterpret_cast<uintptr_t>(t.data) % 16 == 0 && t.stride % 8 == 0; }  // BF16 rows

}  // namespace

cudaError_t embed(cudaStream_t stream, const int32_t* token, int rows, const void* weight, bool weight_bf16, int64_t hidden,
                  const ops::Tensor& y) {
  if (weight_bf16)
    return launch(embed_kernel<bf16>, row_blocks(rows, hidden), dim3(256), 0, stream, token, static_cast<const bf16*>(weight), hidden,
                  as_f32(y), y.stride);
  return launch(embed_kernel<float>, row_blocks(rows, hidden), dim3(256), 0, stream, token, static_cast<const float*>(weight), hidden,
                as_f32(y), y.stride);
}

cudaError_t copy_rows(cudaStream_t stream, const ops::CopyRowsArgs& a) {
  // The element types may differ: activations become the residual stream of a layer of their own.
  const auto run = [&]<class X, class Y>() {
    return launch(copy_rows_kernel<X, Y>, row_blocks(a.count, a.x.cols), dim3(256), 0, stream, static_cast<const X*>(a.x.data), a.x.stride,
                  a.from, static_cast<Y*>(a.y.data), a.y.stride, a.to, a.x.cols);
  };
  const bool x32 = a.x.element == ops::Element::kFloat32, y32 = a.y.element == ops::Element::kFloat32;
  if (x32) return y32 ? run.template operator()<float, float>() : run.template operator()<float, bf16>();
  return y32 ? run.template operator()<bf16, float>() : run.template operator()<bf16, bf16>();
}

cudaError_t rms_norm(cudaStream_t stream, const ops::RmsNormArgs& a) {
  const dim3 grid(static_cast<unsigned>(a.x.rows)), block(kNormThreads);
  const int rows = static_cast<int>(a.x.rows);
  const cudaError_t fast = a.x.element == ops::Element::kFloat32
                               ? norm_vector<float, false>(stream, as_f32(a.x), a.x.stride, nullptr, 0, as_f32(a.w), a.eps, a.x.cols, rows,
                                                           as_bf16_out(a.y), a.y.stride, nullptr, 0)
                               : norm_vector<bf16, false>(stream, as_bf16_out(a.x), a.x.stride, nullptr, 0, as_f32(a.w), a.eps, a.x.cols,
                                                          rows, as_bf16_out(a.y), a.y.stride, nullptr, 0);
  if (fast != cudaErrorNotSupported) return fast;
  if (a.x.element == ops::Element::kFloat32)
    return launch(rms_norm_kernel<float>, grid, block, 0, stream, as_f32(a.x), a.x.stride, as_f32(a.w), a.eps, a.x.cols, as_bf16_out(a.y),
                  a.y.stride);
  return launch(rms_norm_kernel<bf16>, grid, block, 0, stream, as_bf16(a.x), a.x.stride, as_f32(a.w), a.eps, a.x.cols, as_bf16_out(a.y),
                a.y.stride);
}

cudaError_t add_rms_norm(cudaStream_t stream, const ops::AddRmsNormArgs& a) {
  const cudaError_t fast =
      norm_vector<float, true>(stream, as_f32(a.x), a.x.stride, as_bf16(a.delta), a.delta.stride, as_f32(a.w), a.eps, a.x.cols,
                               static_cast<int>(a.x.rows), as_bf16_out(a.y), a.y.stride, as_bf16_out(a.tap), a.tap.stride);
  if (fast != cudaErrorNotSupported) return fast;
  return launch(add_rms_norm_kernel, dim3(static_cast<unsigned>(a.x.rows)), dim3(kNormThreads), 0, stream, as_f32(a.x), a.x.stride,
                as_bf16(a.delta), a.delta.stride, as_f32(a.w), a.eps, a.x.cols, as_bf16_out(a.y), a.y.stride, as_bf16_out(a.tap),
                a.tap.stride);
}

cudaError_t gated_rms_norm(cudaStream_t stream, const ops::GatedRmsNormArgs& a) {
  const int rows = static_cast<int>(a.o.rows), dim = static_cast<int>(a.o.cols) / a.heads, items = rows * a.heads;
  const auto run = [&]<int kItems>() {
    return launch(gated_rms_norm_128_kernel<kItems>, dim3((items + 16 * kItems - 1) / (16 * kItems)), dim3(256), 0, stream, as_bf16(a.o),
                  a.o.stride, as_bf16(a.z), a.z.stride, as_f32(a.w), a.heads, a.eps, as_bf16_out(a.y), a.y.stride, rows);
  };
  if (dim == 128 && sixteen(a.o) && sixteen(a.z) && sixteen(a.y))
    return items >= 8192 ? run.template operator()<2>() : run.template operator()<1>();  // few are better spread
  return launch(gated_rms_norm_kernel, dim3((items + 7) / 8), dim3(256), 0, stream, as_bf16(a.o), a.o.stride, as_bf16(a.z), a.z.stride,
                as_f32(a.w), a.heads, dim, a.eps, as_bf16_out(a.y), a.y.stride, rows);
}

cudaError_t silu_mul(cudaStream_t stream, const ops::SiluMulArgs& a) {
  constexpr int kEach = 4, kManyRows = 64;
  if (a.y.rows >= kManyRows && a.y.cols % 8 == 0 && sixteen(a.x) && sixteen(a.y))
    return launch(silu_mul_rows_kernel<kEach>,
                  dim3(static_cast<unsigned>((a.y.cols / 8 + 127) / 128), static_cast<unsigned>((a.y.rows + kEach - 1) / kEach)), dim3(128),
                  0, stream, as_bf16(a.x), a.x.stride, static_cast<int>(a.y.cols), as_bf16_out(a.y), a.y.stride,
                  static_cast<int>(a.y.rows));
  const unsigned blocks = static_cast<unsigned>((a.y.cols / 2 + 255) / 256);
  return launch(silu_mul_kernel, dim3(blocks, static_cast<unsigned>(a.y.rows)), dim3(256), 0, stream, as_bf16(a.x), a.x.stride, a.y.cols,
                as_bf16_out(a.y), a.y.stride);
}

}  // namespace ddtree::kernels
