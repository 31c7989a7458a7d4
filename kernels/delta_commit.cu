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

// Block: (path, layer · value head, slice of the state's rows).
__global__ void delta_commit_kernel(DeltaCommit a) {
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

__global__ void window_commit_kernel(DeltaCommit a) {
  pdl_begin();
  const int path = blockIdx.y, layer = blockIdx.z, c = blockIdx.x * blockDim.x + threadIdx.x;
  const int begin = a.offset[path], n = a.offset[path + 1] - begin;
  if (c >= a.channels || n == 0) return;
  bf16* slot = a.window + (static_cast<int64_t>(layer) * a.slots + a.slot[path]) * (a.width - 1) * a.channels + c;
  for (int t = 0; t < a.width - 1; ++t) {
    const int from = n - (a.width - 1) + t;
    slot[static_cast<int64_t>(t) * a.channels] =
        from >= 0 ? a.input[(static_cast<int64_t>(layer) * a.trace_rows + a.row[begin + from]) * a.channels + c]
                  : slot[static_cast<int64_t>(t + n) * a.channels];
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
  const cudaError_t e = launch(delta_commit_kernel, dim3(a.paths.count, s.layers * s.value_heads, 4), dim3(256), 0, stream, c);
  if (e != cudaSuccess) return e;
  return launch(window_commit_kernel, dim3(blocks(s.channels(), 256), a.paths.count, s.layers), dim3(256), 0, stream, c);
}

}  // namespace ddtree::kernels
