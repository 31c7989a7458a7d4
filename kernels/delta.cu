// conv, delta_rule and delta_commit. Contract: ops/delta.h. The algebra over trees without a state for each row is that of
// "rollback-free chunked tree verification" of gated delta nets; a chain is a tree with one child each, so prompts run through the
// same kernel by chunks, and a single row is a chunk of one.
//
// Columns of the state over value_dim are independent of each other, so a block takes one value head and a slice of columns, and within
// the substitution a thread owns a column: no synchronisation between rows, whatever the tree.
#include "kernels/common.cuh"
#include "kernels/kernels.h"

namespace ddtree::kernels {
namespace {

constexpr int kSlice = 32;  // state columns of a block: one warp walks them
constexpr int kTile = 32;   // rows whose S0ᵀk and S0ᵀq are made together
constexpr int kDeltaThreads = 256;

// One thread a row: the rows of its path inside its window. A certain segment's window begins anew every kDeltaChunk rows.
__global__ void paths_kernel(const ops::ForestSegment* segment, const int32_t* segment_of, const int32_t* parent, int rows, int32_t* path,
                             int32_t* length) {
  pdl_begin();
  const int r = blockIdx.x * blockDim.x + threadIdx.x;
  if (r >= rows) return;
  const ops::ForestSegment s = segment[segment_of[r]];
  const int first = s.certain ? s.first_row + (r - s.first_row) / ops::kDeltaChunk * ops::kDeltaChunk : s.first_row;
  int depth = 0;
  for (int i = r; i >= first && depth < kDeltaPath; i = parent[i]) ++depth;
  length[r] = depth;
  int32_t* out = path + static_cast<int64_t>(r) * kDeltaPath;
  for (int i = r, t = depth - 1; t >= 0; --t, i = parent[i]) out[t] = i;
}

__global__ void conv_kernel(const ops::ForestSegment* segment, const int32_t* segment_of, const int32_t* parent, const bf16* x,
                            int64_t x_stride, const float* w, int width, int channels, const bf16* window, bf16* input, bf16* y,
                            int64_t y_stride) {
  pdl_begin();
  const int r = blockIdx.y, c = blockIdx.x * blockDim.x + threadIdx.x;
  if (c >= channels) return;
  const ops::ForestSegment s = segment[segment_of[r]];
  const bf16 own = x[r * x_stride + c];
  input[static_cast<int64_t>(r) * channels + c] = own;
  float taps[8];
  int row = r, behind = 0;  // behind: columns of the window already taken
  for (int t = width - 1; t >= 0; --t) {
    if (row >= 0) {
      taps[t] = to_float(x[row * x_stride + c]);
      row = parent[row];
    } else {
      ++behind;
      taps[t] = to_float(window[(static_cast<int64_t>(s.slot) * (width - 1) + (width - 1 - behind)) * channels + c]);
    }
  }
  float sum = 0;
  for (int t = 0; t < width; ++t) sum = fmaf(w[static_cast<int64_t>(t) * channels + c], taps[t], sum);
  y[r * y_stride + c] = from_float<bf16>(silu(sum));
}

// Certain segments: window <- last width - 1 of [window, inputs]. A kernel of its own, since conv still reads the old window.
__global__ void conv_advance_kernel(const ops::ForestSegment* segment, const bf16* x, int64_t x_stride, int width, int channels,
                                    bf16* window) {
  pdl_begin();
  const ops::ForestSegment s = segment[blockIdx.y];
  const int c = blockIdx.x * blockDim.x + threadIdx.x;
  if (!s.certain || c >= channels) return;
  bf16* slot = window + static_cast<int64_t>(s.slot) * (width - 1) * channels + c;
  for (int t = 0; t < width - 1; ++t) {
    const int from = s.row_count - (width - 1) + t;  // row of the segment, or before it
    slot[static_cast<int64_t>(t) * channels] =
        from >= 0 ? x[(s.first_row + from) * x_stride + c] : slot[static_cast<int64_t>(t + s.row_count) * channels];
  }
}

// One warp a (row, key head): norms q and k and takes the dots with every row of the path. Norms of path rows are taken anew: cheaper than
// a launch between.
__global__ void dots_kernel(const bf16* c, int64_t stride, int rows, int key_heads, int key_dim, const int32_t* path, const int32_t* length,
                            float* q_out, float* k_out, float* dots) {
  pdl_begin();
  const int item = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (item >= rows * key_heads) return;
  const int r = item / key_heads, h = item % key_heads;
  const bf16* q = c + r * stride + h * key_dim;
  const bf16* k = q + key_heads * key_dim;
  float qv[8], kv[8], qq = 0, kk = 0;  // key_dim <= 256
  const int per = key_dim / 32;
#pragma unroll
  for (int i = 0; i < 8; ++i)
    if (i < per) {
      qv[i] = to_float(q[lane + 32 * i]), kv[i] = to_float(k[lane + 32 * i]);
      qq += qv[i] * qv[i], kk += kv[i] * kv[i];
    }
  const float qs = rsqrtf(warp_sum(qq) + 1e-6f) * rsqrtf(static_cast<float>(key_dim)), ks = rsqrtf(warp_sum(kk) + 1e-6f);
  const int64_t at = (static_cast<int64_t>(r) * key_heads + h) * key_dim;
#pragma unroll
  for (int i = 0; i < 8; ++i)
    if (i < per) {
      qv[i] *= qs, kv[i] *= ks;
      q_out[at + lane + 32 * i] = qv[i], k_out[at + lane + 32 * i] = kv[i];
    }
  const int n = length[r];
  float2* out = reinterpret_cast<float2*>(dots) + (static_cast<int64_t>(r) * key_heads + h) * kDeltaPath;
  for (int t = 0; t < n; ++t) {
    const int j = path[static_cast<int64_t>(r) * kDeltaPath + t];
    const bf16* other = c + j * stride + (key_heads + h) * key_dim;
    float jj = 0, kd = 0, qd = 0, ov[8];
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (i < per) ov[i] = to_float(other[lane + 32 * i]), jj += ov[i] * ov[i];
    const float js = rsqrtf(warp_sum(jj) + 1e-6f);
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (i < per) ov[i] *= js, kd += ov[i] * kv[i], qd += ov[i] * qv[i];
    kd = warp_sum(kd), qd = warp_sum(qd);
    if (lane == 0) out[t] = make_float2(kd, qd);
  }
}

struct DeltaRule {
  const ops::ForestSegment* segment;
  const bf16 *c, *a, *b;
  int64_t c_stride, a_stride, b_stride, o_stride;
  const float *a_log, *dt_bias;
  const float *q, *k, *dots;
  const int32_t *path, *length;
  float *state, *u;
  double* gate;
  bf16* o;
  int key_heads, value_heads, key_dim, value_dim;
};

struct DeltaShared {  // offsets in floats into dynamic shared memory
  int state, q, k, base, kq, u, total;
  __host__ __device__ DeltaShared(int key_dim) {
    state = 0;
    q = state + key_dim * kSlice;
    k = q + kTile * key_dim;
    base = k + kTile * key_dim;
    kq = base + 2 * kTile * kSlice;  // coefficients of one row: e^{P_i - P_j} k_j·k_i and … k_j·q_i
    u = kq + 2 * kDeltaPath;
    total = u + kDeltaPath * kSlice;  // u of the window's rows, by row
  }
};

__global__ void __launch_bounds__(kDeltaThreads) delta_kernel(DeltaRule a) {
  extern __shared__ float shared[];
  const DeltaShared at(a.key_dim);
  float *S = shared + at.state, *Q = shared + at.q, *K = shared + at.k, *base = shared + at.base, *coef = shared + at.kq,
        *U = shared + at.u;
  __shared__ double P[kDeltaPath];  // cumulated gate of the window's rows
  __shared__ float beta[kDeltaPath];
  pdl_begin();
  const ops::ForestSegment s = a.segment[blockIdx.x];
  const int head = blockIdx.y, column0 = blockIdx.z * kSlice, key_head = head / (a.value_heads / a.key_heads);
  const int columns = min(kSlice, a.value_dim - column0);
  float* state = a.state + (static_cast<int64_t>(s.slot) * a.value_heads + head) * a.key_dim * a.value_dim + column0;
  for (int i = threadIdx.x; i < a.key_dim * kSlice; i += kDeltaThreads) {
    const int d = i / kSlice, col = i % kSlice;
    S[i] = col < columns ? state[static_cast<int64_t>(d) * a.value_dim + col] : 0.0f;
  }
  const int window = s.certain ? ops::kDeltaChunk : kDeltaPath;
  for (int first = s.first_row; first < s.first_row + s.row_count; first += window) {
    const int n = min(window, s.first_row + s.row_count - first);
    __syncthreads();
    // Gates: g of every row, then its sum along the row's path, in float64 (it reaches hundreds and differences would cancel).
    for (int i = threadIdx.x; i < n; i += kDeltaThreads) {
      const float x = to_float(a.a[(first + i) * a.a_stride + head]) + a.dt_bias[head];
      const float softplus = x > 20.0f ? x : log1pf(expf(x));
      coef[i] = -expf(a.a_log[head]) * softplus;
      beta[i] = 1.0f / (1.0f + expf(-to_float(a.b[(first + i) * a.b_stride + head])));
    }
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += kDeltaThreads) {
      double sum = 0;
      const int32_t* path = a.path + static_cast<int64_t>(first + i) * kDeltaPath;
      for (int t = 0, m = a.length[first + i]; t < m; ++t) sum += coef[path[t] - first];
      P[i] = sum;
      if (blockIdx.z == 0) a.gate[static_cast<int64_t>(first + i) * a.value_heads + head] = sum;
    }
    for (int tile = 0; tile < n; tile += kTile) {
      const int m = min(kTile, n - tile);
      __syncthreads();
      for (int i = threadIdx.x; i < m * a.key_dim; i += kDeltaThreads) {
        const int r = first + tile + i / a.key_dim;
        const int64_t from = (static_cast<int64_t>(r) * a.key_heads + key_head) * a.key_dim + i % a.key_dim;
        Q[i] = a.q[from], K[i] = a.k[from];
      }
      __syncthreads();
      {  // base = S0ᵀk, S0ᵀq: thread = (column, group of rows)
        const int col = threadIdx.x % kSlice, group = threadIdx.x / kSlice;
        constexpr int kPer = kTile / (kDeltaThreads / kSlice);
        if (group * kPer < m) {
          float sk[kPer] = {}, sq[kPer] = {};
          for (int d = 0; d < a.key_dim; d += 4) {
            float sv[4];
#pragma unroll
            for (int e = 0; e < 4; ++e) sv[e] = S[(d + e) * kSlice + col];
#pragma unroll
            for (int i = 0; i < kPer; ++i) {
              const float4 kv = *reinterpret_cast<const float4*>(K + (group * kPer + i) * a.key_dim + d),
                           qv = *reinterpret_cast<const float4*>(Q + (group * kPer + i) * a.key_dim + d);
              sk[i] = fmaf(kv.x, sv[0], fmaf(kv.y, sv[1], fmaf(kv.z, sv[2], fmaf(kv.w, sv[3], sk[i]))));
              sq[i] = fmaf(qv.x, sv[0], fmaf(qv.y, sv[1], fmaf(qv.z, sv[2], fmaf(qv.w, sv[3], sq[i]))));
            }
          }
#pragma unroll
          for (int i = 0; i < kPer; ++i)
            base[(group * kPer + i) * kSlice + col] = sk[i], base[(kTile + group * kPer + i) * kSlice + col] = sq[i];
        }
      }
      __syncthreads();
      if (threadIdx.x < 32) {  // forward substitution, parents first; the thread owns one column
        const int col = threadIdx.x;
        for (int i = 0; i < m; ++i) {
          const int r = first + tile + i, depth = a.length[r];
          const int32_t* path = a.path + static_cast<int64_t>(r) * kDeltaPath;
          const float2* dots = reinterpret_cast<const float2*>(a.dots) + (static_cast<int64_t>(r) * a.key_heads + key_head) * kDeltaPath;
          const double p = P[tile + i];
          for (int t = col; t < depth; t += 32) {
            const float decay = __expf(static_cast<float>(p - P[path[t] - first]));
            const float2 d = dots[t];
            coef[t] = decay * d.x, coef[kDeltaPath + t] = decay * d.y;
          }
          __syncwarp();
          const float from_state = expf(static_cast<float>(p));
          float sum = from_state * base[i * kSlice + col], out = from_state * base[(kTile + i) * kSlice + col];
          for (int t = 0; t < depth - 1; ++t) {
            const float u = U[(path[t] - first) * kSlice + col];
            sum = fmaf(coef[t], u, sum), out = fmaf(coef[kDeltaPath + t], u, out);
          }
          if (col < columns) {
            const float v = to_float(a.c[r * a.c_stride + 2 * a.key_heads * a.key_dim + head * a.value_dim + column0 + col]);
            const float u = beta[tile + i] * (v - sum);
            U[(tile + i) * kSlice + col] = u;
            a.u[(static_cast<int64_t>(r) * a.value_heads + head) * a.value_dim + column0 + col] = u;
            a.o[r * a.o_stride + head * a.value_dim + column0 + col] = from_float<bf16>(fmaf(coef[kDeltaPath + depth - 1], u, out));
          }
          __syncwarp();
        }
      }
    }
    if (!s.certain) break;
    __syncthreads();
    // Fold: S <- e^{P_l} S + Σ_j e^{P_l - P_j} k_j u_jᵀ.
    const double last = P[n - 1];
    for (int i = threadIdx.x; i < n; i += kDeltaThreads) coef[i] = __expf(static_cast<float>(last - P[i]));
    __syncthreads();
    const float keep = expf(static_cast<float>(last));
    for (int i = threadIdx.x; i < a.key_dim * kSlice; i += kDeltaThreads) {
      const int d = i / kSlice, col = i % kSlice;
      float v = keep * S[i];
      for (int j = 0; j < n; ++j)
        v = fmaf(coef[j] * a.k[(static_cast<int64_t>(first + j) * a.key_heads + key_head) * a.key_dim + d], U[j * kSlice + col], v);
      S[i] = v;
    }
  }
  if (s.certain) {
    __syncthreads();
    for (int i = threadIdx.x; i < a.key_dim * kSlice; i += kDeltaThreads)
      if (i % kSlice < columns) state[static_cast<int64_t>(i / kSlice) * a.value_dim + i % kSlice] = S[i];
  }
}

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

cudaError_t delta_paths(cudaStream_t stream, const ops::Forest& f, const DeltaWork& work) {
  return launch(paths_kernel, dim3(blocks(f.rows, 64)), dim3(64), 0, stream, f.segment, f.segment_of, f.parent, f.rows, work.path,
                work.length);
}

cudaError_t conv(cudaStream_t stream, const ops::ConvArgs& a, const DeltaStorage& states, const TraceStorage& trace) {
  const ops::Forest& f = *a.forest;
  const int channels = states.shape.channels(), width = states.shape.conv_width;
  bf16* window = states.window + static_cast<int64_t>(a.layer) * states.slots * (width - 1) * channels;
  bf16* input = trace.input + static_cast<int64_t>(a.layer) * trace.rows * channels;
  const cudaError_t e = launch(conv_kernel, dim3(blocks(channels, 256), f.rows), dim3(256), 0, stream, f.segment, f.segment_of, f.parent,
                               as_bf16(a.x), a.x.stride, as_f32(a.w), width, channels, window, input, as_bf16_out(a.y), a.y.stride);
  if (e != cudaSuccess) return e;
  return launch(conv_advance_kernel, dim3(blocks(channels, 256), f.segments), dim3(256), 0, stream, f.segment, as_bf16(a.x), a.x.stride,
                width, channels, window);
}

cudaError_t delta_rule(cudaStream_t stream, const ops::DeltaRuleArgs& a, const DeltaStorage& states, const TraceStorage& trace,
                       const DeltaWork& work) {
  const ops::Forest& f = *a.forest;
  const ops::DeltaShape& s = states.shape;
  float* k = trace.k + static_cast<int64_t>(a.layer) * trace.rows * s.key_heads * s.key_dim;
  cudaError_t e = launch(dots_kernel, dim3(blocks(static_cast<int64_t>(f.rows) * s.key_heads, 8)), dim3(256), 0, stream, as_bf16(a.c),
                         a.c.stride, f.rows, s.key_heads, s.key_dim, work.path, work.length, work.q, k, work.dots);
  if (e != cudaSuccess) return e;
  const size_t bytes = static_cast<size_t>(DeltaShared(s.key_dim).total) * sizeof(float);
  static size_t allowed = 0;
  if (bytes > allowed) {
    if ((e = cudaFuncSetAttribute(delta_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes))) != cudaSuccess)
      return e;
    allowed = bytes;
  }
  DeltaRule r{f.segment,
              as_bf16(a.c),
              as_bf16(a.a),
              as_bf16(a.b),
              a.c.stride,
              a.a.stride,
              a.b.stride,
              a.o.stride,
              as_f32(a.a_log),
              as_f32(a.dt_bias),
              work.q,
              k,
              work.dots,
              work.path,
              work.length,
              states.state + static_cast<int64_t>(a.layer) * states.slots * s.value_heads * s.key_dim * s.value_dim,
              trace.u + static_cast<int64_t>(a.layer) * trace.rows * s.value_heads * s.value_dim,
              trace.gate + static_cast<int64_t>(a.layer) * trace.rows * s.value_heads,
              as_bf16_out(a.o),
              s.key_heads,
              s.value_heads,
              s.key_dim,
              s.value_dim};
  return launch(delta_kernel, dim3(f.segments, s.value_heads, blocks(s.value_dim, kSlice)), dim3(kDeltaThreads), bytes, stream, r);
}

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
