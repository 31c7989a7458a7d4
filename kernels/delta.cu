// conv and delta_rule. Contract: ops/delta.h. The algebra over trees without a state for each row is that of
// "rollback-free chunked tree verification" of gated delta nets; a chain is a tree with one child each, so prompts run through the
// same kernels by chunks, and a single row is a chunk of one.
#include <algorithm>

#include "kernels/common.cuh"
#include "kernels/delta.cuh"
#include "kernels/delta_chunk.cuh"
#include "kernels/kernels.h"
#include "kernels/matrix.cuh"

namespace ddtree::kernels {
namespace {

constexpr int kSlice = 32;               // state columns of a block: one warp walks them
constexpr int kTile = 32;                // rows of q and k staged together
constexpr int kRows = ops::kDeltaChunk;  // rows of a tile of the substitution, and of a certain segment's window
constexpr int kDeltaThreads = 256;

// kWide neighbouring channels of a row: 4 by 8-byte loads where strides allow, or 1.
template <int kWide>
__global__ void conv_kernel(const ops::ForestSegment* segment, const int32_t* segment_of, const int32_t* parent, const bf16* x,
                            int64_t x_stride, const float* w, int width, int channels, const bf16* window, bf16* input, bf16* y,
                            int64_t y_stride) {
  struct alignas(kWide * sizeof(bf16)) Narrow {
    bf16 v[kWide];
  };
  struct alignas(kWide * sizeof(float)) Wide {
    float v[kWide];
  };
  pdl_begin();
  const int r = blockIdx.y, c = (blockIdx.x * blockDim.x + threadIdx.x) * kWide;
  if (c >= channels || segment_of[r] < 0) return;  // -1: padding
  const ops::ForestSegment own = segment[segment_of[r]];
  const int64_t slot = static_cast<int64_t>(own.slot) * (width - 1);
  const auto at = [](const bf16* p) -> Narrow { return *reinterpret_cast<const Narrow*>(p); };
  Narrow taps[8];
  int row = r, behind = 0;  // behind: columns of the window already taken
#pragma unroll
  for (int t = 7; t >= 0; --t) {
    if (t >= width) continue;
    if (row >= 0) {
      taps[t] = at(x + row * x_stride + c);
      row = parent[row];
    } else {
      ++behind;
      taps[t] = at(window + (slot + (width - 1 - behind)) * channels + c);
    }
    if (t == width - 1 && !own.certain) *reinterpret_cast<Narrow*>(input + static_cast<int64_t>(r) * channels + c) = taps[t];
  }
  float sum[kWide] = {};
#pragma unroll
  for (int t = 0; t < 8; ++t) {
    if (t >= width) break;
    const Wide weight = *reinterpret_cast<const Wide*>(w + static_cast<int64_t>(t) * channels + c);
#pragma unroll
    for (int e = 0; e < kWide; ++e) sum[e] = fmaf(weight.v[e], to_float(taps[t].v[e]), sum[e]);
  }
  Narrow out;
#pragma unroll
  for (int e = 0; e < kWide; ++e) out.v[e] = from_float<bf16>(silu(sum[e]));
  *reinterpret_cast<Narrow*>(y + r * y_stride + c) = out;
}

// Certain segments: window <- last width - 1 of [window, inputs]. A kernel of its own, since conv still reads the old window.
__global__ void conv_advance_kernel(const ops::ForestSegment* segment, const bf16* x, int64_t x_stride, int width, int channels,
                                    bf16* window, bool but_few_rows) {
  pdl_begin();
  const ops::ForestSegment s = segment[blockIdx.y];
  const int c = blockIdx.x * blockDim.x + threadIdx.x;
  if (!s.certain || c >= channels || (but_few_rows && has_few_rows(s))) return;
  bf16* slot = window + static_cast<int64_t>(s.slot) * (width - 1) * channels + c;
  for (int t = 0; t < width - 1; ++t) {
    const int from = s.row_count - (width - 1) + t;  // row of the segment, or before it
    slot[static_cast<int64_t>(t) * channels] =
        from >= 0 ? x[(s.first_row + from) * x_stride + c] : slot[static_cast<int64_t>(t + s.row_count) * channels];
  }
}

// Raw products of a window's keys and queries by tensor cores: for rows i of one tile of 64 and all j of the window up to it,
// k_j·k_i and k_j·q_i, then scaled by the norms (products of BF16 values are exact in the accumulator; rounding k^ first would lose bits).
// A block: (tile, key head). Rows of a window are a certain segment's chunk, or a whole tentative segment.
constexpr int kGramThreads = 128;

struct Window {
  int first, rows, tile;  // forest row, rows, and which 64 of them
};
// The t-th tile of the forest; false: there are fewer.
__device__ __forceinline__ bool find_window(const ops::ForestSegment* segment, int segments, int t, Window* w, int* which) {
  for (int s = 0; s < segments; ++s) {
    const int tiles = (segment[s].row_count + kRows - 1) / kRows;
    if (t < tiles) {
      const bool chunked = segment[s].certain;
      *which = s;
      *w = chunked ? Window{segment[s].first_row + t * kRows, min(kRows, segment[s].row_count - t * kRows), 0}
                   : Window{segment[s].first_row, segment[s].row_count, t};
      return true;
    }
    t -= tiles;
  }
  return false;
}

struct Gram {
  const ops::ForestSegment* segment;
  int segments, key_heads, key_dim;
  const bf16* c;
  int64_t stride;
  float *q, *k, *dots;  // normed q (scaled) and k [rows, key_heads, key_dim]; dots [rows, key_heads, kDeltaPath, 2]
  float* trace_k;       // k of tentative rows again, for the commit
};

__global__ void __launch_bounds__(kGramThreads) gram_kernel(Gram a) {
  extern __shared__ __align__(16) uint8_t memory[];
  __shared__ float q_scale[kRows], k_scale[kRows], other_scale[kRows];
  pdl_begin();
  Window w;
  int which;
  if (!find_window(a.segment, a.segments, blockIdx.x, &w, &which)) return;
  const int head = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32, chunks = a.key_dim / 8, pitch = a.key_dim + 8;
  bf16* Q = reinterpret_cast<bf16*>(memory);
  bf16 *K = Q + kRows * pitch, *J = K + kRows * pitch;  // rows of this tile, and of the one they meet
  const int i0 = w.tile * kRows, mine = min(kRows, w.rows - i0), key_columns = a.key_heads * a.key_dim;
  const auto load = [&](bf16* to, int first, int count, int column) {
    for (int i = threadIdx.x; i < kRows * chunks; i += kGramThreads) {
      const int r = i / chunks, c = i % chunks;
      uint4 v = {0, 0, 0, 0};
      if (r < count) v = *reinterpret_cast<const uint4*>(a.c + (w.first + first + r) * a.stride + column + head * a.key_dim + c * 8);
      *reinterpret_cast<uint4*>(to + r * pitch + c * 8) = v;
    }
  };
  const auto norms = [&](const bf16* rows, int count, float* scale) {
    for (int r = warp; r < count; r += kGramThreads / 32) {
      float sum = 0;
      for (int d = lane; d < a.key_dim; d += 32) {
        const float v = to_float(rows[r * pitch + d]);
        sum += v * v;
      }
      sum = warp_sum(sum);
      if (lane == 0) scale[r] = rsqrtf(sum + 1e-6f);
    }
  };
  load(Q, i0, mine, 0), load(K, i0, mine, key_columns);
  __syncthreads();
  norms(Q, mine, q_scale), norms(K, mine, k_scale);
  __syncthreads();
  const float root = rsqrtf(static_cast<float>(a.key_dim));
  const bool tentative = !a.segment[which].certain;
  for (int i = threadIdx.x; i < mine * a.key_dim; i += kGramThreads) {
    const int r = i / a.key_dim, d = i % a.key_dim;
    const int64_t to = (static_cast<int64_t>(w.first + i0 + r) * a.key_heads + head) * a.key_dim + d;
    const float k = to_float(K[r * pitch + d]) * k_scale[r];
    a.q[to] = to_float(Q[r * pitch + d]) * (q_scale[r] * root), a.k[to] = k;
    if (tentative) a.trace_k[to] = k;
  }
  for (int tile = 0; tile <= w.tile; ++tile) {
    const bf16* other = K;
    const float* scale = k_scale;
    const int count = min(kRows, w.rows - tile * kRows);
    if (tile < w.tile) {
      __syncthreads();
      load(J, tile * kRows, count, key_columns);
      __syncthreads();
      norms(J, count, other_scale);
      __syncthreads();
      other = J, scale = other_scale;
    }
    if (warp * 16 >= mine) continue;
    float kk[kRows / 8][4], kq[kRows / 8][4];
#pragma unroll
    for (int n = 0; n < kRows / 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) kk[n][e] = kq[n][e] = 0;
    for (int d = 0; d < a.key_dim; d += 16) {
      uint32_t ki[4], qi[4];
      matrix::load4(ki, K + (warp * 16 + lane % 16) * pitch + d + lane / 16 * 8);
      matrix::load4(qi, Q + (warp * 16 + lane % 16) * pitch + d + lane / 16 * 8);
#pragma unroll
      for (int n = 0; n < kRows / 16; ++n) {
        if (n * 16 >= count) break;
        uint32_t b[4];
        matrix::load4(b, other + (n * 16 + lane / 16 * 8 + lane % 8) * pitch + d + lane / 8 % 2 * 8);
        matrix::multiply(kk[2 * n], ki, b[0], b[1]), matrix::multiply(kk[2 * n + 1], ki, b[2], b[3]);
        matrix::multiply(kq[2 * n], qi, b[0], b[1]), matrix::multiply(kq[2 * n + 1], qi, b[2], b[3]);
      }
    }
#pragma unroll
    for (int e = 0; e < 4; e += 2) {
      const int i = warp * 16 + lane / 4 + (e / 2) * 8;
      if (i >= mine) continue;
      const float ks = k_scale[i], qs = q_scale[i] * root;
      float* out = a.dots + ((static_cast<int64_t>(w.first + i0 + i) * a.key_heads + head) * kDeltaPath + tile * kRows) * 2;
#pragma unroll
      for (int n = 0; n < kRows / 8; ++n) {
        const int j = n * 8 + lane % 4 * 2;
        if (j >= count) continue;
        const float js = scale[j], js1 = j + 1 < count ? scale[j + 1] : 0.0f;
        *reinterpret_cast<float4*>(out + 2 * j) =
            make_float4(kk[n][e] * ks * js, kq[n][e] * qs * js, kk[n][e + 1] * ks * js1, kq[n][e + 1] * qs * js1);
      }
    }
  }
}

struct DeltaRule {
  const ops::ForestSegment* segment;
  const int32_t* parent;
  const bf16 *c, *a, *b;
  int64_t c_stride, a_stride, b_stride, o_stride;
  const float *a_log, *dt_bias;
  const float *q, *k, *dots;
  float *state, *u, *k_out;
  double* gate;
  bf16* o;
  int key_heads, value_heads, key_dim, value_dim, window_rows;  // window_rows: whose updates are held in shared memory, a multiple of kRows
  bool but_few_rows, chunks;                                    // segments of few rows, and those that run by chunks, are not this kernel's
};

// Row i of the window that begins at forest row `first`: its gate (a logarithm), beta, and its parent inside the window (-1: none).
__device__ __forceinline__ void read_gates(const DeltaRule& a, int head, int first, int i, float* g, float* beta, int16_t* up) {
  g[i] = log_gate(to_float(a.a[(first + i) * a.a_stride + head]), a.a_log[head], a.dt_bias[head]);
  beta[i] = update_rate(to_float(a.b[(first + i) * a.b_stride + head]));
  const int p = a.parent[first + i] - first;
  up[i] = static_cast<int16_t>(p >= 0 ? p : -1);
}

// Forward substitution over one tile: u_i = beta_i (v_i - base_i - Σ_{j≺i} A_ij u_j). The calling thread owns column `col`; U [n, kSlice]
// holds v before and u after; A's rows are kPitch apart.
template <int kPitch>
__device__ __forceinline__ void substitute(const float* A, const float* base, const float* beta, float* U, int n, int col) {
  float u[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) u[i] = 0;
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    if (i >= n) break;
    float sum[4] = {base[i * kSlice + col], 0, 0, 0};
#pragma unroll
    for (int j = 0; j < i; j += 4) {
      const float4 c = *reinterpret_cast<const float4*>(A + i * kPitch + j);  // columns past i - 1 meet u = 0
      sum[0] = fmaf(c.x, u[j], sum[0]), sum[1] = fmaf(c.y, u[j + 1], sum[1]);
      sum[2] = fmaf(c.z, u[j + 2], sum[2]), sum[3] = fmaf(c.w, u[j + 3], sum[3]);
    }
    u[i] = beta[i] * (U[i * kSlice + col] - ((sum[0] + sum[1]) + (sum[2] + sum[3])));
    U[i * kSlice + col] = u[i];
  }
}

// What delta_kernel has besides, for a window's rows: P, g and beta, up, ancestor.
constexpr size_t kDeltaStatic = kDeltaPath * (sizeof(double) + 2 * sizeof(float) + sizeof(int16_t) + kDeltaPath / 8);

struct DeltaShared {  // offsets in floats into dynamic shared memory
  int state, work, base, u, total;
  __host__ __device__ DeltaShared(int key_dim, int window_rows) {
    state = 0;
    work = state + key_dim * kSlice;
    const int staged = 2 * kTile * key_dim, matrices = 2 * kRows * kRows;  // one after the other
    base = work + (staged > matrices ? staged : matrices);
    u = base + 2 * kRows * kSlice;  // S0ᵀk, S0ᵀq of a tile's rows, then with what earlier rows add
    total = u + window_rows * kSlice;
  }
};

// A block: (segment, value head, slice of the state's columns). Columns are independent, so within the forward substitution a thread owns
// one, with the unknowns of its tile in registers: no synchronisation between rows, whatever the tree. The matrix is dense lower
// triangular in row order (parents stand before children), zero where j is no ancestor of i. Where shared memory does not hold a whole
// tree's updates (99 KiB hold 64 rows'), those of earlier tiles are read back from the trace, which has the same values.
__global__ void __launch_bounds__(kDeltaThreads, 2) delta_kernel(DeltaRule a) {
  extern __shared__ float shared[];
  const DeltaShared at(a.key_dim, a.window_rows);
  float *S = shared + at.state, *work = shared + at.work, *base = shared + at.base, *U = shared + at.u;
  __shared__ double P[kDeltaPath];  // cumulated gate of the window's rows
  __shared__ float g[kDeltaPath], beta[kDeltaPath];
  __shared__ int16_t up[kDeltaPath];                          // parent inside the window, -1: none
  __shared__ uint32_t ancestor[kDeltaPath][kDeltaPath / 32];  // and itself
  pdl_begin();
  const ops::ForestSegment s = a.segment[blockIdx.x];
  if (s.row_count == 0 || (a.but_few_rows && has_few_rows(s)) || (a.chunks && runs_by_chunks(s))) return;  // no rows: padding
  const int head = blockIdx.y, column0 = blockIdx.z * kSlice, key_head = head / (a.value_heads / a.key_heads);
  const int columns = min(kSlice, a.value_dim - column0), col = threadIdx.x % kSlice, group = threadIdx.x / kSlice;
  constexpr int kGroups = kDeltaThreads / kSlice;
  float* state = a.state + (static_cast<int64_t>(s.slot) * a.value_heads + head) * a.key_dim * a.value_dim + column0;
  for (int i = threadIdx.x; i < a.key_dim * kSlice; i += kDeltaThreads)
    S[i] = col < columns ? state[static_cast<int64_t>(i / kSlice) * a.value_dim + col] : 0.0f;
  const int window = s.certain ? kRows : kDeltaPath;
  for (int first = s.first_row; first < s.first_row + s.row_count; first += window) {
    const int n = min(window, s.first_row + s.row_count - first);
    const bool held = n <= a.window_rows;  // certain windows always are
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += kDeltaThreads) {
      read_gates(a, head, first, i, g, beta, up);
    }
    __syncthreads();
    // The gate along a row's path, in float64 (it reaches hundreds and differences would cancel), and who stands on the path.
    for (int i = threadIdx.x; i < n; i += kDeltaThreads) {
      double sum = 0;
      uint32_t bits[kDeltaPath / 32] = {};
      for (int j = i; j >= 0; j = up[j]) {
        sum += g[j];
#pragma unroll
        for (int w = 0; w < kDeltaPath / 32; ++w) bits[w] |= j / 32 == w ? 1u << j % 32 : 0u;
      }
      P[i] = sum;
#pragma unroll
      for (int w = 0; w < kDeltaPath / 32; ++w) ancestor[i][w] = bits[w];
      if (blockIdx.z == 0 && !s.certain) a.gate[static_cast<int64_t>(first + i) * a.value_heads + head] = sum;
    }
    for (int tile = 0; tile < n; tile += kRows) {
      const int m = min(kRows, n - tile);
      float* own = U + (held ? tile : 0) * kSlice;  // updates of this tile's rows
      const auto earlier = [&](int j) {             // of a row of an earlier tile
        if (held) return U[j * kSlice + col];
        return col < columns ? a.u[(static_cast<int64_t>(first + j) * a.value_heads + head) * a.value_dim + column0 + col] : 0.0f;
      };
      for (int part = 0; part < m; part += kTile) {  // S0ᵀk and S0ᵀq, e^P in front
        const int rows = min(kTile, m - part);
        __syncthreads();
        for (int i = threadIdx.x; i < rows * (a.key_dim / 4); i += kDeltaThreads) {
          const int r = i / (a.key_dim / 4), d = i % (a.key_dim / 4);
          const int64_t from = ((static_cast<int64_t>(first + tile + part + r) * a.key_heads + key_head) * a.key_dim) / 4 + d;
          reinterpret_cast<float4*>(work)[i] = reinterpret_cast<const float4*>(a.k)[from];
          reinterpret_cast<float4*>(work + kTile * a.key_dim)[i] = reinterpret_cast<const float4*>(a.q)[from];
        }
        __syncthreads();
        constexpr int kPer = kTile / kGroups;
        if (group * kPer < rows) {
          const float *K = work, *Q = work + kTile * a.key_dim;
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
          for (int i = 0; i < kPer; ++i) {
            const int r = part + group * kPer + i;
            if (r >= m) break;
            const float decay = expf(static_cast<float>(P[tile + r]));
            base[r * kSlice + col] = decay * sk[i], base[(kRows + r) * kSlice + col] = decay * sq[i];
          }
        }
      }
      // Coefficients e^{P_i - P_j} k_j·k_i (A) and … k_j·q_i (B) of 64 rows j of the window, zero where j is no ancestor.
      float *A = work, *B = work + kRows * kRows;
      for (int from = 0; from <= tile; from += kRows) {
        const int width = min(kRows, n - from);
        __syncthreads();
        for (int i = threadIdx.x; i < m * kRows; i += kDeltaThreads) {
          const int r = i / kRows, j = i % kRows, wi = tile + r, wj = from + j;
          float ka = 0, qa = 0;
          if (j < width && (ancestor[wi][wj / 32] >> wj % 32 & 1)) {
            const float2 d =
                reinterpret_cast<const float2*>(a.dots)[(static_cast<int64_t>(first + wi) * a.key_heads + key_head) * kDeltaPath + wj];
            const float decay = __expf(static_cast<float>(P[wi] - P[wj]));
            ka = decay * d.x, qa = decay * d.y;
          }
          A[i] = ka, B[i] = qa;
        }
        __syncthreads();
        if (from == tile) break;
        // Rows of earlier tiles are known: what they add.
        for (int r = group; r < m; r += kGroups) {
          float k_sum = 0, q_sum = 0;
          for (int j = 0; j < kRows; j += 4) {
            const float4 ka = *reinterpret_cast<const float4*>(A + r * kRows + j), qa = *reinterpret_cast<const float4*>(B + r * kRows + j);
            const float u0 = earlier(from + j), u1 = earlier(from + j + 1), u2 = earlier(from + j + 2), u3 = earlier(from + j + 3);
            k_sum = fmaf(ka.x, u0, fmaf(ka.y, u1, fmaf(ka.z, u2, fmaf(ka.w, u3, k_sum))));
            q_sum = fmaf(qa.x, u0, fmaf(qa.y, u1, fmaf(qa.z, u2, fmaf(qa.w, u3, q_sum))));
          }
          base[r * kSlice + col] += k_sum, base[(kRows + r) * kSlice + col] += q_sum;
        }
      }
      // v where the substitution will read it
      for (int r = group; r < m; r += kGroups)
        own[r * kSlice + col] =
            col < columns
                ? to_float(a.c[(first + tile + r) * a.c_stride + 2 * a.key_heads * a.key_dim + head * a.value_dim + column0 + col])
                : 0.0f;
      __syncthreads();
      if (threadIdx.x < kSlice) substitute<kRows>(A, base, beta + tile, own, m, col);
      __syncthreads();
      for (int r = group; r < m; r += kGroups) {
        float out = base[(kRows + r) * kSlice + col];
        for (int j = 0; j <= r; j += 4) {
          const float4 c = *reinterpret_cast<const float4*>(B + r * kRows + j);
#pragma unroll
          for (int e = 0; e < 4; ++e)
            if (j + e <= r) out = fmaf(e == 0 ? c.x : e == 1 ? c.y : e == 2 ? c.z : c.w, own[(j + e) * kSlice + col], out);
        }
        if (col < columns) {
          const int64_t row = first + tile + r;
          if (!s.certain) a.u[(row * a.value_heads + head) * a.value_dim + column0 + col] = own[r * kSlice + col];
          a.o[row * a.o_stride + head * a.value_dim + column0 + col] = from_float<bf16>(out);
        }
      }
    }
    if (!s.certain) break;
    // Fold: S <- e^{P_l} S + Σ_j e^{P_l - P_j} k_j u_jᵀ. A thread keeps one column of key_dim / kGroups rows in registers.
    const double last = P[n - 1];
    __syncthreads();
    for (int i = threadIdx.x; i < n * kSlice; i += kDeltaThreads) U[i] *= __expf(static_cast<float>(last - P[i / kSlice]));
    const float keep = expf(static_cast<float>(last));
    const int rows_each = a.key_dim / kGroups, d0 = group * rows_each;  // key_dim is a multiple of 32, so rows_each of 4
    float sum[32];
#pragma unroll
    for (int e = 0; e < 32; ++e)
      if (e < rows_each) sum[e] = keep * S[(d0 + e) * kSlice + col];
    for (int part = 0; part < n; part += 2 * kTile) {  // the staging area holds 2 · kTile rows of k
      const int rows = min(2 * kTile, n - part);
      __syncthreads();
      for (int i = threadIdx.x; i < rows * (a.key_dim / 4); i += kDeltaThreads) {
        const int r = i / (a.key_dim / 4), d = i % (a.key_dim / 4);
        reinterpret_cast<float4*>(work)[i] =
            reinterpret_cast<const float4*>(a.k)[((static_cast<int64_t>(first + part + r) * a.key_heads + key_head) * a.key_dim) / 4 + d];
      }
      __syncthreads();
      for (int j = 0; j < rows; ++j) {
        const float u = U[(part + j) * kSlice + col];
#pragma unroll
        for (int e = 0; e < 32; e += 4) {
          if (e >= rows_each) break;
          const float4 k = *reinterpret_cast<const float4*>(work + j * a.key_dim + d0 + e);
          sum[e] = fmaf(k.x, u, sum[e]), sum[e + 1] = fmaf(k.y, u, sum[e + 1]), sum[e + 2] = fmaf(k.z, u, sum[e + 2]),
          sum[e + 3] = fmaf(k.w, u, sum[e + 3]);
        }
      }
    }
#pragma unroll
    for (int e = 0; e < 32; ++e)
      if (e < rows_each) S[(d0 + e) * kSlice + col] = sum[e];
  }
  if (s.certain) {
    __syncthreads();
    for (int i = threadIdx.x; i < a.key_dim * kSlice; i += kDeltaThreads)
      if (col < columns) state[static_cast<int64_t>(i / kSlice) * a.value_dim + col] = S[i];
  }
}

// The same for windows of at most kRows rows (certain segments always, trees of at most 64 rows), in one launch: the products of q and k
// with each other and with the state run on the tensor cores. q and k are BF16 times a norm, so their products are exact in the
// accumulator; the state's float32 values are taken as three BF16 parts, which loses nothing either.
struct SmallShared {  // byte offsets into dynamic shared memory
  int state, q, k, parts, a, b, u, total;
  __host__ __device__ explicit SmallShared(int key_dim) {
    const int rows = kRows * (key_dim + 8) * 2, split = 3 * kSlice * (key_dim + 8) * 2, square = kRows * kPitch * 4;
    state = 0;
    q = align(state + key_dim * (kSlice + 1) * 4);  // later S0ᵀk and S0ᵀq, in front
    const int q_bytes = rows > 2 * kRows * kSlice * 4 ? rows : 2 * kRows * kSlice * 4;
    k = align(q + q_bytes);
    parts = a = align(k + rows);
    b = a + square;
    const int matrices = 2 * square > split ? 2 * square : split;
    u = align(a + matrices);
    total = u + kRows * kSlice * 4;
  }
  static constexpr int kPitch = kRows + 4;
  __host__ __device__ static int align(int n) { return (n + 15) / 16 * 16; }
};

__global__ void __launch_bounds__(kDeltaThreads, 2) delta_small_kernel(DeltaRule a) {
  extern __shared__ __align__(16) uint8_t memory[];
  const SmallShared at(a.key_dim);
  constexpr int kPitch = SmallShared::kPitch, kGroups = kDeltaThreads / kSlice, kStatePitch = kSlice + 1;
  float* S = reinterpret_cast<float*>(memory + at.state);
  bf16 *Q = reinterpret_cast<bf16*>(memory + at.q), *K = reinterpret_cast<bf16*>(memory + at.k),
       *parts = reinterpret_cast<bf16*>(memory + at.parts);
  float *base = reinterpret_cast<float*>(memory + at.q), *A = reinterpret_cast<float*>(memory + at.a),
        *B = reinterpret_cast<float*>(memory + at.b), *U = reinterpret_cast<float*>(memory + at.u);
  __shared__ double P[kRows];
  __shared__ float g[kRows], beta[kRows], q_scale[kRows], k_scale[kRows];
  __shared__ int16_t up[kRows];
  __shared__ uint64_t ancestor[kRows];  // and itself
  pdl_begin();
  const ops::ForestSegment s = a.segment[blockIdx.x];
  if (s.row_count == 0 || (a.but_few_rows && has_few_rows(s)) || (a.chunks && runs_by_chunks(s))) return;  // no rows: padding
  const int head = blockIdx.y, column0 = blockIdx.z * kSlice, ratio = a.value_heads / a.key_heads, key_head = head / ratio;
  const int columns = min(kSlice, a.value_dim - column0), col = threadIdx.x % kSlice, group = threadIdx.x / kSlice, lane = col;
  const int pitch = a.key_dim + 8, chunks = a.key_dim / 8, key_columns = a.key_heads * a.key_dim;
  float* state = a.state + (static_cast<int64_t>(s.slot) * a.value_heads + head) * a.key_dim * a.value_dim + column0;
  const float root = rsqrtf(static_cast<float>(a.key_dim));
  for (int first = s.first_row; first < s.first_row + s.row_count; first += kRows) {
    const int n = min(kRows, s.first_row + s.row_count - first), padded = (n + 15) / 16 * 16;
    for (int i = threadIdx.x; i < padded * chunks; i += kDeltaThreads) {
      const int r = i / chunks, c = i % chunks;
      const bf16* row = a.c + static_cast<int64_t>(first + r) * a.c_stride + key_head * a.key_dim + c * 8;
      matrix::copy16(Q + r * pitch + c * 8, row, r < n);
      matrix::copy16(K + r * pitch + c * 8, row + key_columns, r < n);
    }
    matrix::copy_commit();
    if (first == s.first_row)
      for (int d = group; d < a.key_dim; d += kGroups)
        S[d * kStatePitch + col] = col < columns ? state[static_cast<int64_t>(d) * a.value_dim + col] : 0.0f;
    for (int r = group; r < n; r += kGroups)
      U[r * kSlice + col] =
          col < columns ? to_float(a.c[static_cast<int64_t>(first + r) * a.c_stride + 2 * key_columns + head * a.value_dim + column0 + col])
                        : 0.0f;
    if (threadIdx.x < n) read_gates(a, head, first, threadIdx.x, g, beta, up);
    matrix::copy_wait<0>();
    __syncthreads();
    if (threadIdx.x < n) {
      const int i = threadIdx.x;
      double sum = 0;
      uint64_t bits = 0;
      for (int j = i; j >= 0; j = up[j]) sum += g[j], bits |= uint64_t{1} << j;
      P[i] = sum, ancestor[i] = bits;
      if (blockIdx.z == 0 && !s.certain) a.gate[static_cast<int64_t>(first + i) * a.value_heads + head] = sum;
    }
    // The state's three parts, [column][key dimension].
    for (int i = threadIdx.x; i < kSlice * a.key_dim / 2; i += kDeltaThreads) {
      const int c = i / (a.key_dim / 2), d = i % (a.key_dim / 2) * 2;
      float x = S[d * kStatePitch + c], y = S[(d + 1) * kStatePitch + c];
#pragma unroll
      for (int p = 0; p < 3; ++p) {
        const __nv_bfloat162 v = __floats2bfloat162_rn(x, y);
        *reinterpret_cast<__nv_bfloat162*>(parts + (p * kSlice + c) * pitch + d) = v;
        const float2 back = __bfloat1622float2(v);
        x -= back.x, y -= back.y;
      }
    }
    for (int r = group; r < n; r += kGroups) {
      float qq = 0, kk = 0;
      for (int d = lane; d < a.key_dim; d += 32) {
        const float qv = to_float(Q[r * pitch + d]), kv = to_float(K[r * pitch + d]);
        qq += qv * qv, kk += kv * kv;
      }
      qq = warp_sum(qq), kk = warp_sum(kk);
      if (lane == 0) q_scale[r] = rsqrtf(qq + 1e-6f) * root, k_scale[r] = rsqrtf(kk + 1e-6f);
    }
    __syncthreads();
    // Warps 0 to 3: 16 rows of k each, 4 to 7: of q. Their products with the state's columns and with all k.
    float from_state[kSlice / 8][4], with_keys[kRows / 8][4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
#pragma unroll
      for (int c = 0; c < kSlice / 8; ++c) from_state[c][e] = 0;
#pragma unroll
      for (int c = 0; c < kRows / 8; ++c) with_keys[c][e] = 0;
    }
    const bool queries = group >= 4;
    const int i0 = group % 4 * 16;
    if (i0 < n) {
      const bf16* rows = (queries ? Q : K) + i0 * pitch;
      for (int d = 0; d < a.key_dim; d += 16) {
        uint32_t left[4];
        matrix::load4(left, rows + lane % 16 * pitch + d + lane / 16 * 8);
#pragma unroll
        for (int c = 0; c < kSlice / 16; ++c)
#pragma unroll
          for (int p = 0; p < 3; ++p) {
            uint32_t right[4];
            matrix::load4(right, parts + (p * kSlice + c * 16 + lane / 16 * 8 + lane % 8) * pitch + d + lane / 8 % 2 * 8);
            matrix::multiply(from_state[2 * c], left, right[0], right[1]),
                matrix::multiply(from_state[2 * c + 1], left, right[2], right[3]);
          }
#pragma unroll
        for (int c = 0; c < kRows / 16; ++c) {
          if (c * 16 > i0) break;  // later rows are nobody's ancestors
          uint32_t right[4];
          matrix::load4(right, K + (c * 16 + lane / 16 * 8 + lane % 8) * pitch + d + lane / 8 % 2 * 8);
          matrix::multiply(with_keys[2 * c], left, right[0], right[1]), matrix::multiply(with_keys[2 * c + 1], left, right[2], right[3]);
        }
      }
    }
    if (!s.certain && blockIdx.z == 0 && head % ratio == 0)  // for the commit
      for (int i = threadIdx.x; i < n * a.key_dim; i += kDeltaThreads) {
        const int r = i / a.key_dim, d = i % a.key_dim;
        a.k_out[(static_cast<int64_t>(first + r) * a.key_heads + key_head) * a.key_dim + d] = to_float(K[r * pitch + d]) * k_scale[r];
      }
    __syncthreads();  // parts and Q are free
    if (i0 < n) {
      float* to = queries ? B : A;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int i = i0 + lane / 4 + 8 * half;
        if (i >= n) continue;
        const double p = P[i];
        const float own = queries ? q_scale[i] : k_scale[i], decay = expf(static_cast<float>(p)) * own;
        const uint64_t seen = ancestor[i];
#pragma unroll
        for (int c = 0; c < kSlice / 8; ++c)
#pragma unroll
          for (int e = 0; e < 2; ++e)
            base[((queries ? kRows : 0) + i) * kSlice + c * 8 + lane % 4 * 2 + e] = decay * from_state[c][2 * half + e];
#pragma unroll
        for (int c = 0; c < kRows / 8; ++c) {
          if (c * 8 >= padded) break;
          float out[2];
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int j = c * 8 + lane % 4 * 2 + e;
            out[e] = seen >> j & 1 ? __expf(static_cast<float>(p - P[j])) * own * k_scale[j] * with_keys[c][2 * half + e] : 0.0f;
          }
          *reinterpret_cast<float2*>(to + i * kPitch + c * 8 + lane % 4 * 2) = make_float2(out[0], out[1]);
        }
      }
    }
    __syncthreads();
    if (threadIdx.x < kSlice) substitute<kPitch>(A, base, beta, U, n, col);
    __syncthreads();
    for (int r = group; r < n; r += kGroups) {
      float out = base[(kRows + r) * kSlice + col];
      for (int j = 0; j <= r; j += 4) {
        const float4 c = *reinterpret_cast<const float4*>(B + r * kPitch + j);
        out = fmaf(c.x, U[j * kSlice + col], out);
        if (j + 1 <= r) out = fmaf(c.y, U[(j + 1) * kSlice + col], out);
        if (j + 2 <= r) out = fmaf(c.z, U[(j + 2) * kSlice + col], out);
        if (j + 3 <= r) out = fmaf(c.w, U[(j + 3) * kSlice + col], out);
      }
      if (col < columns) {
        const int64_t row = first + r;
        if (!s.certain) a.u[(row * a.value_heads + head) * a.value_dim + column0 + col] = U[r * kSlice + col];
        a.o[row * a.o_stride + head * a.value_dim + column0 + col] = from_float<bf16>(out);
      }
    }
    if (!s.certain) return;
    // Fold: S <- e^{P_l} S + Σ_j e^{P_l - P_j} k_j u_jᵀ.
    const double last = P[n - 1];
    __syncthreads();
    for (int r = group; r < n; r += kGroups) U[r * kSlice + col] *= __expf(static_cast<float>(last - P[r])) * k_scale[r];
    __syncthreads();
    const float keep = expf(static_cast<float>(last));
    const bool done = first + kRows >= s.first_row + s.row_count;
    for (int d = group * 2; d < a.key_dim; d += kGroups * 2) {
      float x = keep * S[d * kStatePitch + col], y = keep * S[(d + 1) * kStatePitch + col];
      for (int j = 0; j < n; ++j) {
        const float2 k = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(K + j * pitch + d));
        const float u = U[j * kSlice + col];
        x = fmaf(k.x, u, x), y = fmaf(k.y, u, y);
      }
      S[d * kStatePitch + col] = x, S[(d + 1) * kStatePitch + col] = y;
      if (done && col < columns)
        state[static_cast<int64_t>(d) * a.value_dim + col] = x, state[static_cast<int64_t>(d + 1) * a.value_dim + col] = y;
    }
    __syncthreads();
  }
}

unsigned blocks(int64_t n, int64_t per) { return static_cast<unsigned>((n + per - 1) / per); }

}  // namespace

cudaError_t conv(cudaStream_t stream, const ops::ConvArgs& a, const DeltaStorage& states, const TraceStorage& trace, bool but_few_rows) {
  const ops::Forest& f = *a.forest;
  const int channels = states.shape.channels(), width = states.shape.conv_width;
  bf16* window = states.window + static_cast<int64_t>(a.layer) * states.slots * (width - 1) * channels;
  bf16* input = trace.input + static_cast<int64_t>(a.layer) * trace.rows * channels;
  // Few rows are better spread over more threads: 6.8 against 7.9 us at 16 rows, 11.4 against 9.9 at 64, 59 against 32 at 512.
  const bool wide = f.rows > 32 && channels % 4 == 0 && a.x.stride % 4 == 0 && a.y.stride % 4 == 0 &&
                    (reinterpret_cast<uintptr_t>(a.x.data) | reinterpret_cast<uintptr_t>(a.y.data)) % 8 == 0;
  const auto run = [&]<int kWide>() {
    constexpr int kThreads = kWide == 1 ? 256 : 128;
    return launch(conv_kernel<kWide>, dim3(blocks(channels, kThreads * kWide), f.rows), dim3(kThreads), 0, stream, f.segment, f.segment_of,
                  f.parent, as_bf16(a.x), a.x.stride, as_f32(a.w), width, channels, window, input, as_bf16_out(a.y), a.y.stride);
  };
  constexpr int kManyRows = 128;  // from here on conv_rows has blocks enough
  cudaError_t e = f.rows >= kManyRows ? conv_rows(stream, a, states, trace) : cudaErrorNotSupported;
  if (e == cudaErrorNotSupported) e = wide ? run.template operator()<4>() : run.template operator()<1>();
  if (e != cudaSuccess || !f.any_certain) return e;
  return launch(conv_advance_kernel, dim3(blocks(channels, 256), f.segments), dim3(256), 0, stream, f.segment, as_bf16(a.x), a.x.stride,
                width, channels, window, but_few_rows);
}

cudaError_t delta_rule(cudaStream_t stream, const ops::DeltaRuleArgs& a, const DeltaStorage& states, const TraceStorage& trace,
                       const DeltaWork& work, bool but_few_rows) {
  const ops::Forest& f = *a.forest;
  const ops::DeltaShape& s = states.shape;
  float* k = trace.k + static_cast<int64_t>(a.layer) * trace.rows * s.key_heads * s.key_dim;
  DeltaRule r{f.segment,
              f.parent,
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
              work.k,
              work.dots,
              states.state + static_cast<int64_t>(a.layer) * states.slots * s.value_heads * s.key_dim * s.value_dim,
              trace.u + static_cast<int64_t>(a.layer) * trace.rows * s.value_heads * s.value_dim,
              k,
              trace.gate + static_cast<int64_t>(a.layer) * trace.rows * s.value_heads,
              as_bf16_out(a.o),
              s.key_heads,
              s.value_heads,
              s.key_dim,
              s.value_dim,
              std::max((f.max_tree_rows + kRows - 1) / kRows * kRows, kRows),
              but_few_rows,
              f.any_certain && f.max_segment_rows >= kChunkedRows && has_chunks(a, s, work)};
  cudaError_t e = cudaSuccess;
  if (r.chunks) {
    e = delta_chunks(stream, a, states, work);
    // A prompt alone leaves nothing. Sizes may be rounded up, at most twofold, where passes are recorded.
    if (e != cudaSuccess || (f.segments == 1 && f.max_tree_rows == 0 && f.max_segment_rows > 2 * kChunkedRows)) return e;
  }
  static size_t gram_allowed = 0, allowed = 0, small_allowed = 0;  // one device a process, set-up is not concurrent
  const auto allow = [](auto kernel, size_t bytes, size_t* so_far) {
    if (bytes <= *so_far) return cudaSuccess;
    *so_far = bytes;
    return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
  };
  const dim3 grid(f.segments, s.value_heads, blocks(s.value_dim, kSlice));
  if (f.max_tree_rows <= kRows && s.key_dim % 16 == 0 && a.c.stride % 8 == 0) {
    const size_t bytes = SmallShared(s.key_dim).total;
    if ((e = allow(delta_small_kernel, bytes, &small_allowed)) != cudaSuccess) return e;
    return launch(delta_small_kernel, grid, dim3(kDeltaThreads), bytes, stream, r);
  }
  const int tiles = std::min(f.rows / kRows + f.segments, f.rows);
  const size_t gram_bytes = static_cast<size_t>(3 * kRows) * (s.key_dim + 8) * sizeof(bf16);
  if ((e = allow(gram_kernel, gram_bytes, &gram_allowed)) != cudaSuccess) return e;
  e = launch(gram_kernel, dim3(tiles, s.key_heads), dim3(kGramThreads), gram_bytes, stream,
             Gram{f.segment, f.segments, s.key_heads, s.key_dim, as_bf16(a.c), a.c.stride, work.q, work.k, work.dots, k});
  if (e != cudaSuccess) return e;
  const auto dynamic = [&](int held) { return static_cast<size_t>(DeltaShared(s.key_dim, held).total) * sizeof(float); };
  if (dynamic(r.window_rows) + kDeltaStatic > work.shared_limit) r.window_rows = kRows;
  const size_t bytes = dynamic(r.window_rows);
  // Cards with more shared memory would run it: so that they show, too, what smaller ones refuse.
  if (bytes + kDeltaStatic > work.shared_limit) return cudaErrorInvalidConfiguration;
  if ((e = allow(delta_kernel, bytes, &allowed)) != cudaSuccess) return e;
  return launch(delta_kernel, grid, dim3(kDeltaThreads), bytes, stream, r);
}

}  // namespace ddtree::kernels
