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

// --- the fast form: a row is cut into slices of kSlice logits that sit in registers; each slice gives its best candidates and the sum of
// its exponentials, a second launch joins a row's slices. Two passes over L2-resident data instead of top_k.
constexpr int kSlice = ops::cuda::kLogitSlice, kSliceThreads = 256, kHeld = kSlice / kSliceThreads, kMostFast = 64;

struct SliceResult {
  float top;   // largest logit, -inf where the slice is empty
  int bad;     // holds a NaN or an infinity
  double sum;  // of e^(x - top)
};

struct Best {
  float value;
  int id;
};
// The workspace is sized without CUDA's headers.
static_assert(sizeof(SliceResult) == ops::cuda::kLogitSliceSum && sizeof(Best) == ops::cuda::kLogitBest);
__device__ __forceinline__ Best better(Best a, Best b) { return before(b.value, b.id, a.value, a.id) ? b : a; }
// Best over the block, in every thread.
__device__ __forceinline__ Best block_best(Best b, Best* shared) {
#pragma unroll
  for (int o = 16; o > 0; o >>= 1) b = better(b, Best{__shfl_xor_sync(0xffffffffu, b.value, o), __shfl_xor_sync(0xffffffffu, b.id, o)});
  __syncthreads();
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = b;
  __syncthreads();
  b = shared[0];
#pragma unroll
  for (int w = 1; w < kSliceThreads / 32; ++w) b = better(b, shared[w]);
  return b;
}

// Takes the `count` best of the block's candidates, `held` a thread, in order.
template <int kCount, class Out>
__device__ __forceinline__ void take_best(float (&value)[kCount], int (&id)[kCount], int count, Best* shared, Out&& out) {
  Best mine{-INFINITY, INT32_MAX};
#pragma unroll
  for (int i = 0; i < kCount; ++i) mine = better(mine, Best{value[i], id[i]});
  for (int k = 0; k < count; ++k) {
    const Best b = block_best(mine, shared);
    out(k, b);
    if (b.id != mine.id || b.id == INT32_MAX) continue;
    mine = {-INFINITY, INT32_MAX};
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (id[i] == b.id) id[i] = INT32_MAX, value[i] = -INFINITY;
      mine = better(mine, Best{value[i], id[i]});
    }
  }
}

__global__ void __launch_bounds__(kSliceThreads)
    slice_kernel(const float* logits, int64_t stride, int64_t real, int top_k, bool log_probs, Best* best, SliceResult* result) {
  __shared__ Best shared[kSliceThreads / 32];
  __shared__ double sums[kSliceThreads / 32];
  pdl_begin();
  const int slices = gridDim.x, slice = blockIdx.x;
  const float* row = logits + blockIdx.y * stride;
  const int64_t first = static_cast<int64_t>(slice) * kSlice;
  float value[kHeld];
  int id[kHeld];
  bool bad = false;
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    const int64_t at = first + i * kSliceThreads + threadIdx.x;
    const bool inside = at < real;
    value[i] = inside ? row[at] : -INFINITY;
    id[i] = inside ? static_cast<int>(at) : INT32_MAX;
    bad |= inside && (log_probs ? !(value[i] < INFINITY) : !isfinite(value[i]));  // -inf has a probability: none
  }
  float top = -INFINITY;
#pragma unroll
  for (int i = 0; i < kHeld; ++i) top = fmaxf(top, value[i]);
  top = block_best({top, 0}, shared).value;
  float part = 0;
#pragma unroll
  for (int i = 0; i < kHeld; ++i) part += id[i] == INT32_MAX || top == -INFINITY ? 0.0f : __expf(value[i] - top);
  double sum = part;
#pragma unroll
  for (int o = 16; o > 0; o >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, o);
  const int any_bad = __syncthreads_or(bad);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
  __syncthreads();
  const int64_t out = static_cast<int64_t>(blockIdx.y) * slices + slice;
  if (threadIdx.x == 0) {
    double total = 0;
    for (int w = 0; w < kSliceThreads / 32; ++w) total += sums[w];
    result[out] = {top, any_bad, total};
  }
  take_best(value, id, top_k, shared, [&](int k, Best b) {
    if (threadIdx.x == 0) best[out * top_k + k] = b;
  });
}

// The two best alone, without exponentials and without a reduction a candidate: what greedy rows cost.
struct Pair {
  Best first{-INFINITY, INT32_MAX}, second{-INFINITY, INT32_MAX};
};
// Of two sets without a common member.
__device__ __forceinline__ Pair joined(Pair a, Pair b) {
  const bool behind = before(b.first.value, b.first.id, a.first.value, a.first.id);
  return behind ? Pair{b.first, better(a.first, b.second)} : Pair{a.first, better(a.second, b.first)};
}
template <int kLanes>
__device__ __forceinline__ Pair lanes_joined(Pair p) {
#pragma unroll
  for (int o = kLanes / 2; o > 0; o >>= 1)
    p = joined(p, {{__shfl_xor_sync(0xffffffffu, p.first.value, o), __shfl_xor_sync(0xffffffffu, p.first.id, o)},
                   {__shfl_xor_sync(0xffffffffu, p.second.value, o), __shfl_xor_sync(0xffffffffu, p.second.id, o)}});
  return p;
}

__global__ void __launch_bounds__(kSliceThreads)
    two_kernel(const float* logits, int64_t stride, int64_t real, Best* best, SliceResult* result) {
  __shared__ Pair shared[kSliceThreads / 32];
  pdl_begin();
  const float* row = logits + blockIdx.y * stride;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kSlice;
  float value[kHeld];
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    const int64_t at = first + i * kSliceThreads + threadIdx.x;
    value[i] = at < real ? row[at] : -FLT_MAX;
  }
  Pair mine;
  bool bad = false;
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    const int64_t at = first + i * kSliceThreads + threadIdx.x;
    if (at >= real) continue;
    bad |= !isfinite(value[i]);
    mine = joined(mine, {{value[i], static_cast<int>(at)}, {-INFINITY, INT32_MAX}});
  }
  const int any_bad = __syncthreads_or(bad);
  mine = lanes_joined<32>(mine);
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = mine;
  __syncthreads();
  if (threadIdx.x >= 32) return;
  constexpr int kWarps = kSliceThreads / 32;
  mine = threadIdx.x < kWarps ? shared[threadIdx.x] : Pair{};
  mine = lanes_joined<kWarps>(mine);
  if (threadIdx.x != 0) return;
  const int64_t out = static_cast<int64_t>(blockIdx.y) * gridDim.x + blockIdx.x;
  best[2 * out] = mine.first, best[2 * out + 1] = mine.second;
  result[out] = {mine.first.value, any_bad, 0};
}

// kPer candidates a thread: slices · top_k <= kPer · kSliceThreads.
template <int kPer>
__global__ void __launch_bounds__(kSliceThreads) join_kernel(const Best* best, const SliceResult* result, int slices, int top_k,
                                                             bool log_probs, int32_t* token, float* score, int32_t* bad) {
  __shared__ Best shared[kSliceThreads / 32];
  pdl_begin();
  const int64_t row = blockIdx.x;
  const Best* from = best + row * slices * top_k;
  float value[kPer];
  int id[kPer];
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    const int at = i * kSliceThreads + threadIdx.x;
    const Best b = at < slices * top_k ? from[at] : Best{-INFINITY, INT32_MAX};
    value[i] = b.value, id[i] = b.id;
  }
  float top = -INFINITY;
  int any_bad = 0;
  for (int s = 0; s < slices; ++s) top = fmaxf(top, result[row * slices + s].top), any_bad |= result[row * slices + s].bad;
  double log_sum = 0;
  if (log_probs) {
    for (int s = 0; s < slices; ++s)
      if (result[row * slices + s].sum > 0)
        log_sum += result[row * slices + s].sum * exp(static_cast<double>(result[row * slices + s].top) - top);
    log_sum = log(log_sum);
  }
  if (threadIdx.x == 0) bad[row] = any_bad || (log_probs && !isfinite(top));
  take_best(value, id, top_k, shared, [&](int k, Best b) {
    if (threadIdx.x != 0) return;
    token[row * top_k + k] = b.id == INT32_MAX ? 0 : b.id;
    score[row * top_k + k] = log_probs ? static_cast<float>(static_cast<double>(b.value) - top - log_sum) : b.value;
  });
}

}  // namespace

cudaError_t finish_logits(cudaStream_t stream, const ops::Tensor& logits, int64_t real_vocab, int32_t* bad_row) {
  return launch(finish_kernel, dim3(static_cast<unsigned>(logits.rows)), dim3(512), 0, stream, as_f32(logits), logits.stride, logits.cols,
                real_vocab, bad_row);
}

cudaError_t best_of_rows(cudaStream_t stream, const ops::Tensor& logits, int64_t real_vocab, int top_k, bool log_probs, void* work,
                         int32_t* token, float* score, int32_t* bad) {
  const int rows = static_cast<int>(logits.rows), slices = static_cast<int>((real_vocab + kSlice - 1) / kSlice);
  if (top_k > kMostFast || slices * top_k > 16 * kSliceThreads) return cudaErrorNotSupported;
  auto* result = static_cast<SliceResult*>(work);
  auto* best = reinterpret_cast<Best*>(result + static_cast<int64_t>(rows) * slices);
  const dim3 grid(slices, rows), block(kSliceThreads);
  const cudaError_t e =
      top_k == 2 && !log_probs
          ? launch(two_kernel, grid, block, 0, stream, as_f32(logits), logits.stride, real_vocab, best, result)
          : launch(slice_kernel, grid, block, 0, stream, as_f32(logits), logits.stride, real_vocab, top_k, log_probs, best, result);
  if (e != cudaSuccess) return e;
  const auto join = [&]<int kPer>() {
    return launch(join_kernel<kPer>, dim3(rows), dim3(kSliceThreads), 0, stream, best, result, slices, top_k, log_probs, token, score, bad);
  };
  return slices * top_k <= kSliceThreads ? join.template operator()<1>() : join.template operator()<16>();
}

cudaError_t top_k_log_probs(cudaStream_t stream, const ops::Tensor& logits, int64_t real_vocab, int top_k, int32_t* token, float* log_prob,
                            int32_t* bad_row) {
  return launch(top_k_kernel, dim3(static_cast<unsigned>(logits.rows)), dim3(kThreads), 0, stream, as_f32(logits), logits.stride,
                real_vocab, top_k, token, log_prob, bad_row);
}

}  // namespace ddtree::kernels
