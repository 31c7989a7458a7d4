// finish_logits and top_k_log_probs. Contract: ops/logits.h.
#include <cfloat>

#include "kernels/common.cuh"
#include "kernels/kernels.h"

namespace ddtree::kernels {
namespace {

__global__ void __launch_bounds__(512) finish_kernel(float* logits, int64_t stride, int64_t cols, int64_t real, int32_t* bad_row) {
  pdl_begin();
  float* row = logits + blockIdx.x * stride;
  bool bad = false;
  for (int64_t i = threadIdx.x; i < real; i += blockDim.x) bad |= !isfinite(row[i]);
  for (int64_t i = real + threadIdx.x; i < cols; i += blockDim.x) row[i] = -INFINITY;
  if (bad)
    atomicMin(reinterpret_cast<unsigned*>(bad_row),
              static_cast<unsigned>(blockIdx.x));  // -1 is the largest unsigned: the first bad row wins
}

constexpr int kThreads = 512;

// (value, id) with larger value first, then smaller id.
__device__ __forceinline__ bool before(float a, int ai, float b, int bi) { return a > b || (a == b && ai < bi); }

// A block a row. Each round finds the best candidate after the last one taken: top_k passes over a row that sits in L2. Plain; the fast
// form keeps thread-local candidates.
__global__ void __launch_bounds__(kThreads)
    top_k_kernel(const float* logits, int64_t stride, int64_t real, int top_k, int32_t* token, float* log_prob, int32_t* bad_row) {
  __shared__ float values[kThreads / 32];
  __shared__ int ids[kThreads / 32];
  __shared__ double sums[kThreads / 32];
  __shared__ float best_value;
  __shared__ int best_id;
  pdl_begin();
  const float* row = logits + blockIdx.x * stride;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  float last = INFINITY, top = 0;
  int last_id = -1;
  double log_sum = 0;
  for (int k = 0; k < top_k; ++k) {
    float v = -INFINITY;
    int id = INT32_MAX;
    for (int i = threadIdx.x; i < real; i += kThreads) {
      const float x = row[i];
      if (before(last, last_id, x, i) && before(x, i, v, id)) v = x, id = i;
    }
#pragma unroll
    for (int o = 16; o > 0; o >>= 1) {
      const float ov = __shfl_xor_sync(0xffffffffu, v, o);
      const int oi = __shfl_xor_sync(0xffffffffu, id, o);
      if (before(ov, oi, v, id)) v = ov, id = oi;
    }
    if (lane == 0) values[warp] = v, ids[warp] = id;
    __syncthreads();
    if (threadIdx.x == 0) {
      for (int w = 1; w < kThreads / 32; ++w)
        if (before(values[w], ids[w], v, id)) v = values[w], id = ids[w];
      best_value = v, best_id = id;
    }
    __syncthreads();
    last = best_value, last_id = best_id;
    if (k == 0) {
      top = last;
      double sum = 0;
      for (int i = threadIdx.x; i < real; i += kThreads) sum += __expf(row[i] - top);
#pragma unroll
      for (int o = 16; o > 0; o >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, o);
      if (lane == 0) sums[warp] = sum;
      __syncthreads();
      sum = 0;
      for (int w = 0; w < kThreads / 32; ++w) sum += sums[w];
      log_sum = log(sum);
      if (threadIdx.x == 0 && !(isfinite(sum) && isfinite(top)))
        atomicMin(reinterpret_cast<unsigned*>(bad_row), static_cast<unsigned>(blockIdx.x));
    }
    if (threadIdx.x == 0) {
      token[blockIdx.x * top_k + k] = last_id == INT32_MAX ? 0 : last_id;
      log_prob[blockIdx.x * top_k + k] = static_cast<float>(static_cast<double>(last) - top - log_sum);
    }
    __syncthreads();
  }
}

}  // namespace

cudaError_t finish_logits(cudaStream_t stream, const ops::Tensor& logits, int64_t real_vocab, int32_t* bad_row) {
  return launch(finish_kernel, dim3(static_cast<unsigned>(logits.rows)), dim3(512), 0, stream, as_f32(logits), logits.stride, logits.cols,
                real_vocab, bad_row);
}

cudaError_t top_k_log_probs(cudaStream_t stream, const ops::Tensor& logits, int64_t real_vocab, int top_k, int32_t* token, float* log_prob,
                            int32_t* bad_row) {
  return launch(top_k_kernel, dim3(static_cast<unsigned>(logits.rows)), dim3(kThreads), 0, stream, as_f32(logits), logits.stride,
                real_vocab, top_k, token, log_prob, bad_row);
}

}  // namespace ddtree::kernels
