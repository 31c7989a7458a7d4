// delta_commit: one root path of every tentative segment folded into its slot, all layers at once. Contract: ops/delta.h.
#include "kernels/common.cuh"
#include "kernels/kernels.h"

namespace ddtree::kernels {
namespace {

struct DeltaCommit {
  const int32_t *offset, *row, *slot;
  const float *k, *u;
  const double* gate;
  const bf16* input;
  float* state;
  bf16* window;
  int trace_rows, slots, key_heads, value_heads, key_dim, value_dim, channels, width;
};

constexpr int kDim = 128, kFoldThreads = 512, kStaged = 16;  // rows of a path staged at a time

// Heads of 128: the memory's speed. A block: (path, layer · value head), the state in registers, read in one go and written once.
__global__ void __launch_bounds__(kFoldThreads, 2) fold_kernel(DeltaCommit a) {
  __shared__ float k[kStaged][kDim], u[kStaged][kDim];  // k times what its row's update decays by
  pdl_begin();
  const int path = blockIdx.x, layer = blockIdx.y / a.value_heads, head = blockIdx.y % a.value_heads,
            key_head = head / (a.value_heads / a.key_heads), warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int begin = a.offset[path], end = a.offset[path + 1];
  if (begin == end) return;
  float4* state =
      reinterpret_cast<float4*>(a.state + ((static_cast<int64_t>(layer) * a.slots + a.slot[path]) * a.value_heads + head) * kDim * kDim) +
      warp * 8 * 32 + lane;
  float4 S[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) S[i] = state[i * 32];
  const int64_t trace = static_cast<int64_t>(layer) * a.trace_rows;
  const double last = a.gate[(trace + a.row[end - 1]) * a.value_heads + head];
  for (int first = begin; first < end; first += kStaged) {
    const int count = min(kStaged, end - first);
    __syncthreads();
    if (warp < count) {
      const int64_t r = trace + a.row[first + warp];
      const float decay = __expf(static_cast<float>(last - a.gate[r * a.value_heads + head]));
      const float4 key = reinterpret_cast<const float4*>(a.k + (r * a.key_heads + key_head) * kDim)[lane];
      reinterpret_cast<float4*>(k[warp])[lane] = {decay * key.x, decay * key.y, decay * key.z, decay * key.w};
      reinterpret_cast<float4*>(u[warp])[lane] = reinterpret_cast<const float4*>(a.u + (r * a.value_heads + head) * kDim)[lane];
    }
    __syncthreads();
    if (first == begin) {
      const float keep = expf(static_cast<float>(last));
#pragma unroll
      for (int i = 0; i < 8; ++i) S[i] = {keep * S[i].x, keep * S[i].y, keep * S[i].z, keep * S[i].w};
    }
    for (int j = 0; j < count; ++j) {
      const float4 update = reinterpret_cast<const float4*>(u[j])[lane];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float key = k[j][warp * 8 + i];
        S[i] = {fmaf(key, update.x, S[i].x), fmaf(key, update.y, S[i].y), fmaf(key, update.z, S[i].z), fmaf(key, update.w, S[i].w)};
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) state[i * 32] = S[i];
}

// Any head. Block: (path, layer · value head, slice of the state's rows).
__global__ void fold_any_kernel(DeltaCommit a) {
  pdl_begin();
  const int path = blockIdx.x, layer = blockIdx.y / a.value_heads, head = blockIdx.y % a.value_heads,
            key_head = head / (a.value_heads / a.key_heads);
  const int begin = a.offset[path], end = a.offset[path + 1];
  if (begin == end) return;
  const int64_t trace = static_cast<int64_t>(layer) * a.trace_rows;
  float* state = a.state + ((static_cast<int64_t>(layer) * a.slots + a.slot[path]) * a.value_heads + head) * a.key_dim * a.value_dim;
  const double last = a.gate[(trace + a.row[end - 1]) * a.value_heads + head];
  const float keep = expf(static_cast<float>(last));
  const int per = (a.key_dim + gridDim.z - 1) / gridDim.z, d0 = blockIdx.z * per, d1 = min(a.key_dim, d0 + per);
  for (int i = d0 * a.value_dim + threadIdx.x; i < d1 * a.value_dim; i += blockDim.x) {
    const int d = i / a.value_dim, col = i % a.value_dim;
    float v = keep * state[i];
    for (int p = begin; p < end; ++p) {
      const int64_t r = trace + a.row[p];
      const float decay = __expf(static_cast<float>(last - a.gate[r * a.value_heads + head]));
      v = fmaf(decay * a.k[(r * a.key_heads + key_head) * a.key_dim + d], a.u[(r * a.value_heads + head) * a.value_dim + col], v);
    }
    state[i] = v;
  }
}

// Element: one channel, or the 16 bytes of eight.
template <class Element>
__global__ void window_commit_kernel(DeltaCommit a) {
  pdl_begin();
  const int path = blockIdx.y, layer = blockIdx.z, c = blockIdx.x * blockDim.x + threadIdx.x,
            width = a.channels / static_cast<int>(sizeof(Element) / sizeof(bf16));
  const int begin = a.offset[path], n = a.offset[path + 1] - begin;
  if (c >= width || n == 0) return;
  Element* slot =
      reinterpret_cast<Element*>(a.window + (static_cast<int64_t>(layer) * a.slots + a.slot[path]) * (a.width - 1) * a.channels) + c;
  const Element* input = reinterpret_cast<const Element*>(a.input + static_cast<int64_t>(layer) * a.trace_rows * a.channels) + c;
  for (int t = 0; t < a.width - 1; ++t) {
    const int from = n - (a.width - 1) + t;
    slot[static_cast<int64_t>(t) * width] =
        from >= 0 ? input[static_cast<int64_t>(a.row[begin + from]) * width] : slot[static_cast<int64_t>(t + n) * width];
  }
}

unsigned blocks(int64_t n, int64_t per) { return static_cast<unsigned>((n + per - 1) / per); }

}  // namespace

cudaError_t delta_commit(cudaStream_t stream, const ops::DeltaCommitArgs& a, const DeltaStorage& states, const TraceStorage& trace) {
  const ops::DeltaShape& s = states.shape;
  if (a.paths.count == 0) return cudaSuccess;
  DeltaCommit c{a.paths.offset, a.paths.row,  a.paths.slot,  trace.k,      trace.u,      trace.gate,
                trace.input,    states.state, states.window, trace.rows,   states.slots, s.key_heads,
                s.value_heads,  s.key_dim,    s.value_dim,   s.channels(), s.conv_width};
  const dim3 grid(a.paths.count, s.layers * s.value_heads);
  const cudaError_t e = s.key_dim == kDim && s.value_dim == kDim
                            ? launch(fold_kernel, grid, dim3(kFoldThreads), 0, stream, c)
                            : launch(fold_any_kernel, dim3(grid.x, grid.y, 4), dim3(256), 0, stream, c);
  if (e != cudaSuccess) return e;
  const auto windows = [&]<class Element>() {
    const int64_t width = s.channels() / static_cast<int64_t>(sizeof(Element) / sizeof(bf16));
    return launch(window_commit_kernel<Element>, dim3(blocks(width, 128), a.paths.count, s.layers), dim3(128), 0, stream, c);
  };
  return s.channels() % 8 == 0 ? windows.template operator()<uint4>() : windows.template operator()<bf16>();
}

}  // namespace ddtree::kernels
