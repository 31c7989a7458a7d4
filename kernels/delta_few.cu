// gated_delta_mixer for few rows, in one launch. Contract: ops/delta.h; the arithmetic is that of conv, delta_rule and gated_rms_norm, with
// their rounding points. A block: (segment, value head), with the whole state of the head in its registers. Segments of one row, certain or
// tentative, take one_row(); trees of 2 to 64 rows take tree(); all others are left to the three ops.
//
// What is read before the kernel before this one has finished: constants, the staged forest, and this layer's state and window. The last
// three were written before the pass began (by a copy, by another graph, or in another pass), and no kernel of a pass is started before all
// that came before the pass has finished; within a pass this layer's state and window are written here alone.
#include <algorithm>

#include "kernels/common.cuh"
#include "kernels/delta.cuh"
#include "kernels/kernels.h"
#include "kernels/matrix.cuh"

namespace ddtree::kernels {
namespace {

constexpr int kDim = 128;  // of a head's keys and of its values
constexpr int kTaps = 4;
constexpr int kWarps = 16;                   // that hold the state
constexpr int kThreads = kWarps * 32;        // of a block for single rows
constexpr int kTreeThreads = kThreads + 32;  // and a warp for the gates
constexpr int kHalf = kDim / 2;              // columns of values that a block of a pair has
constexpr int kPitch = kDim + 8;             // BF16 rows in shared memory
constexpr int kSquarePitch = kFewRows + 8;   // BF16
constexpr float kTiny = 1e-6f;               // of the norms of q and k

struct Mixer {
  const ops::ForestSegment* segment;
  const int32_t* parent;
  const bf16 *x, *z, *a, *b;
  int64_t x_stride, z_stride, a_stride, b_stride, o_stride;
  const float *taps, *a_log, *dt_bias, *norm;
  float eps;
  float *state, *k, *u;
  double* gate;
  bf16 *window, *input, *o;
  int32_t* turns;  // [segments, key_heads, 4] zeros between launches
  int key_heads, value_heads;
};

struct Head {
  int value, key, first_of_key;  // value head, key head, whether no value head before this one has the same key head
  int q, k, v, channels;         // first channels of this head's
};
__device__ __forceinline__ Head head_of(const Mixer& a) {
  const int head = blockIdx.y, ratio = a.value_heads / a.key_heads, key = head / ratio, keys = a.key_heads * kDim;
  return {head, key, head % ratio == 0, key * kDim, keys + key * kDim, 2 * keys + head * kDim, 2 * keys + a.value_heads * kDim};
}

struct RowShared {
  float partial[2][kWarps][kDim];  // Sᵀk and Sᵀq over 8 dimensions of the keys each
  float q[kDim], k[kDim], u[kDim];
  float sums[3][4], squares[4];  // of q·q, k·k, k·q; of the output
  float decay;
};

__device__ __forceinline__ float4 fma4(float s, const float4& v, const float4& add) {
  return {fmaf(s, v.x, add.x), fmaf(s, v.y, add.y), fmaf(s, v.z, add.z), fmaf(s, v.w, add.w)};
}

// c of one channel: window, then the row itself.
__device__ __forceinline__ float convolve(const float (&w)[kTaps], const bf16 (&before)[kTaps - 1], bf16 x) {
  float sum = 0;
#pragma unroll
  for (int t = 0; t < kTaps - 1; ++t) sum = fmaf(w[t], to_float(before[t]), sum);
  return to_float(from_float<bf16>(silu(fmaf(w[kTaps - 1], to_float(x), sum))));
}

// A segment of one row. Thread t has four columns of eight dimensions of the state. Besides, the first 128 threads have a channel of q and
// of k, the next 128 one of v, of the update and of the output, and the last 128 move the inputs of q and k.
__device__ __forceinline__ void one_row(const Mixer& a, const ops::ForestSegment& s, int segment, RowShared& m) {
  const Head h = head_of(a);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, role = threadIdx.x / kDim, c = threadIdx.x % kDim;
  float4* state = reinterpret_cast<float4*>(a.state + (static_cast<int64_t>(s.slot) * a.value_heads + h.value) * kDim * kDim) + lane;
  bf16* window = a.window + static_cast<int64_t>(s.slot) * (kTaps - 1) * h.channels;
  float4 S[8];
  if (warp < kWarps)
#pragma unroll
    for (int i = 0; i < 8; ++i) S[i] = state[(warp * 8 + i) * 32];
  const int one = (role == 1 ? h.v : h.q) + c, two = h.k + c;  // this thread's channels
  float w1[kTaps], w2[kTaps], norm = 0, a_log = 0, dt_bias = 0;
  bf16 m1[kTaps - 1], m2[kTaps - 1];
  if (role < 2 || role == 3)
#pragma unroll
    for (int t = 0; t < kTaps - 1; ++t) m1[t] = window[t * h.channels + one], m2[t] = window[t * h.channels + two];
  if (role < 2)
#pragma unroll
    for (int t = 0; t < kTaps; ++t) w1[t] = a.taps[t * h.channels + one], w2[t] = a.taps[t * h.channels + two];
  if (role == 1) norm = a.norm[c], a_log = a.a_log[h.value], dt_bias = a.dt_bias[h.value];
  pdl_wait();
  const int64_t row = s.first_row;
  bf16 x1 = {}, x2 = {};
  if (role < 2 || role == 3) x1 = a.x[row * a.x_stride + one], x2 = a.x[row * a.x_stride + two];
  float v = 0, z = 0, g = 0, beta = 0, decay = 0;
  if (role == 0) {
    const float q = convolve(w1, m1, x1), k = convolve(w2, m2, x2);
    m.q[c] = q, m.k[c] = k;
    const float qq = warp_sum(q * q), kk = warp_sum(k * k), kq = warp_sum(k * q);
    if (lane == 0) m.sums[0][warp] = qq, m.sums[1][warp] = kk, m.sums[2][warp] = kq;
  } else if (role == 1) {
    z = to_float(a.z[row * a.z_stride + h.value * kDim + c]);
    g = log_gate(to_float(a.a[row * a.a_stride + h.value]), a_log, dt_bias);
    beta = update_rate(to_float(a.b[row * a.b_stride + h.value]));
    v = convolve(w1, m1, x1);
    decay = expf(g);
  }
  __syncthreads();
  // The window's q and k serve all value heads of the key head: who comes last moves them, for by then all have read them.
  const int ratio = a.value_heads / a.key_heads;
  int32_t* turns = a.turns + (segment * a.key_heads + h.key) * 4 + warp % 4;
  int turn = 0;
  if (role == 3 && s.certain && lane == 0) __threadfence(), turn = atomicAdd(turns, 1);
  if (warp < kWarps) {
    float4 sk = {}, sq = {};
#pragma unroll
    for (int i = 0; i < 8; i += 4) {
      const float4 k = *reinterpret_cast<const float4*>(m.k + warp * 8 + i), q = *reinterpret_cast<const float4*>(m.q + warp * 8 + i);
      sk = fma4(k.w, S[i + 3], fma4(k.z, S[i + 2], fma4(k.y, S[i + 1], fma4(k.x, S[i], sk))));
      sq = fma4(q.w, S[i + 3], fma4(q.z, S[i + 2], fma4(q.y, S[i + 1], fma4(q.x, S[i], sq))));
    }
    *reinterpret_cast<float4*>(&m.partial[0][warp][lane * 4]) = sk, *reinterpret_cast<float4*>(&m.partial[1][warp][lane * 4]) = sq;
  }
  __syncthreads();
  const auto sum = [&](const float* four) { return (four[0] + four[1]) + (four[2] + four[3]); };
  float out = 0, k_scale = 0;
  if (role < 2) k_scale = rsqrtf(sum(m.sums[1]) + kTiny);
  if (role == 1) {
    float sk = 0, sq = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sk += m.partial[0][w][c], sq += m.partial[1][w][c];
    const float q_scale = rsqrtf(sum(m.sums[0]) + kTiny) * rsqrtf(static_cast<float>(kDim));
    const float u = beta * (v - decay * (k_scale * sk));
    out = to_float(from_float<bf16>(fmaf(sum(m.sums[2]) * q_scale * k_scale, u, decay * (q_scale * sq))));
    const float squares = warp_sum(out * out);
    if (lane == 0) m.squares[warp % 4] = squares;
    m.u[c] = u * k_scale;
    if (c == 0) m.decay = decay;
    if (!s.certain) a.u[(row * a.value_heads + h.value) * kDim + c] = u;
  }
  __syncthreads();
  if (s.certain && warp < kWarps) {
    const float4 u = *reinterpret_cast<const float4*>(m.u + lane * 4);
    const float keep = m.decay;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float k = m.k[warp * 8 + i];
      state[(warp * 8 + i) * 32] = {fmaf(k, u.x, keep * S[i].x), fmaf(k, u.y, keep * S[i].y), fmaf(k, u.z, keep * S[i].z),
                                    fmaf(k, u.w, keep * S[i].w)};
    }
  }
  if (role == 1) {
    const float scale = rsqrtf(sum(m.squares) / static_cast<float>(kDim) + a.eps);
    a.o[row * a.o_stride + h.value * kDim + c] = from_float<bf16>(norm * (out * scale) * silu(z));
    if (s.certain) {
      window[one] = m1[1], window[h.channels + one] = m1[2], window[2 * h.channels + one] = x1;
    } else {
      a.input[row * h.channels + one] = x1;
      if (c == 0) a.gate[row * a.value_heads + h.value] = g;
    }
  } else if (role == 0 && !s.certain && h.first_of_key) {
    a.k[(row * a.key_heads + h.key) * kDim + c] = m.k[c] * k_scale;
  } else if (role == 3) {
    if (s.certain) {
      if (__shfl_sync(0xffffffffu, turn, 0) == ratio - 1) {
        __threadfence();
        if (lane == 0) *turns = 0;
        window[one] = m1[1], window[h.channels + one] = m1[2], window[2 * h.channels + one] = x1;
        window[two] = m2[1], window[h.channels + two] = m2[2], window[2 * h.channels + two] = x2;
      }
    } else if (h.first_of_key) {
      a.input[row * h.channels + one] = x1, a.input[row * h.channels + two] = x2;
    }
  }
}

// What a tree's block has in shared memory. A pair of blocks (one cluster) shares a head: each has half of the values' columns, computes
// half of the rows of q and k, and writes them into both. Where there are no clusters one block has both halves.
template <bool kPair>
struct TreeShared {
  static constexpr int kHalves = kPair ? 1 : 2;
  struct Rows {
    bf16 q[kFewRows][kPitch], k[kFewRows][kPitch];
  };
  union {
    Rows rows;
    uint32_t u[kHalves][8][4][2][2][32];  // [8 columns][16 rows][part][register][lane]: the updates as right operands of products
  };
  bf16 v[kFewRows][kHalves * kHalf + 8];
  bf16 a[2][kFewRows][kSquarePitch];  // [i][j] -beta_i e^{P_i - P_j} k_j·k_i, j an ancestor of i, in two parts; on the diagonal inverses
  bf16 b[2][kFewRows][kSquarePitch];  // [i][j] e^{P_i - P_j} k_j·q_i, i itself included
  union {
    float taps[kTaps][3 * kDim];  // of q | k | v
    float diagonal[4][16][20];    // [16 rows][j][i]: beta_i e^{P_i - P_j} k_j·k_i
    float own_squares[kPair ? 1 : 2][kFewRows][8];
  };
  float pair_squares[kPair ? 2 : 1][kFewRows][8];  // of outputs, by half, row and warp; the other block writes half of them
  double prefix[kFewRows];                         // P: gates along the path, in float64: they reach hundreds and differences would cancel
  uint64_t ancestor[kFewRows];                     // and itself
  float beta[kFewRows], decay[kFewRows], q_scale[kFewRows], k_scale[kFewRows];  // decay: e^P
  int up[kFewRows], jump[kFewRows];                                             // parent inside the segment, -1: none

  __device__ __forceinline__ float (*squares())[kFewRows][8] {
    if constexpr (kPair) return pair_squares;
    else return own_squares;
  }
};

// Clusters of two (PTX ISA: barrier.cluster, mapa); sm_90 on.
__device__ __forceinline__ void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}
// The same place in the shared memory of the cluster's block `rank`.
__device__ __forceinline__ uint32_t remote(const void* p, int rank) {
  uint32_t at = matrix::shared_address(p);
#if __CUDA_ARCH__ >= 900
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"(at), "r"(rank));
#endif
  return at;
}
__device__ __forceinline__ void remote_put(uint32_t at, uint4 v) {
#if __CUDA_ARCH__ >= 900
  asm volatile("st.shared::cluster.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
#endif
}
__device__ __forceinline__ void remote_put(uint32_t at, float v) {
#if __CUDA_ARCH__ >= 900
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(at), "f"(v) : "memory");
#endif
}

// Gates along every row's path and who stands on it, by pointer jumping: a warp, two rows a lane. Rows past the last have no ancestors, not
// even themselves.
template <bool kPair>
__device__ __forceinline__ void tree_gates(const Mixer& a, const ops::ForestSegment& s, const Head& h, TreeShared<kPair>& m, int rank) {
  const int lane = threadIdx.x % 32, n = s.row_count;
  const float a_log = a.a_log[h.value], dt_bias = a.dt_bias[h.value];
  double sum[2];
  uint64_t path[2];
  int at[2];
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const int i = lane + 32 * e;
    const int64_t row = s.first_row + i;
    const bool valid = i < n;
    sum[e] = valid ? log_gate(to_float(a.a[row * a.a_stride + h.value]), a_log, dt_bias) : 0.0f;
    m.beta[i] = valid ? update_rate(to_float(a.b[row * a.b_stride + h.value])) : 0.0f;
    path[e] = valid ? uint64_t{1} << i : 0;
    at[e] = valid ? m.up[i] : -1;
  }
  while (__any_sync(0xffffffffu, at[0] >= 0 || at[1] >= 0)) {
#pragma unroll
    for (int e = 0; e < 2; ++e) m.prefix[lane + 32 * e] = sum[e], m.ancestor[lane + 32 * e] = path[e], m.jump[lane + 32 * e] = at[e];
    __syncwarp();
#pragma unroll
    for (int e = 0; e < 2; ++e)
      if (at[e] >= 0) sum[e] += m.prefix[at[e]], path[e] |= m.ancestor[at[e]], at[e] = m.jump[at[e]];
    __syncwarp();
  }
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const int i = lane + 32 * e;
    m.prefix[i] = sum[e], m.ancestor[i] = path[e], m.decay[i] = expf(static_cast<float>(sum[e]));
    if (i < n && rank == 0) a.gate[static_cast<int64_t>(s.first_row + i) * a.value_heads + h.value] = sum[e];
  }
}

// conv of the head's q, k and v. An item is a row's q or k, of a pair's rows this block's half, or 128 columns of v: a row's, or the
// block's half of two rows'. 16 threads, of 8 channels each, take two items at a time.
template <bool kPair>
__device__ __forceinline__ void tree_conv(const Mixer& a, const ops::ForestSegment& s, const Head& h, TreeShared<kPair>& m, int rank) {
  const int n = s.row_count, padded = (n + 15) / 16 * 16, rows = kPair ? padded / 2 : padded, items = 3 * rows;
  const bf16* window = a.window + static_cast<int64_t>(s.slot) * (kTaps - 1) * h.channels;
  const bf16* x = a.x + s.first_row * a.x_stride;
#pragma unroll 1
  for (int item = threadIdx.x / 16; item < items; item += 2 * kThreads / 16) {
    int part[2], row[2], chunk[2], channel[2];
    uint4 tap[2][kTaps];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int mine = item + e * kThreads / 16;
      part[e] = (mine >= rows) + (mine >= 2 * rows), row[e] = mine - part[e] * rows, chunk[e] = threadIdx.x % 16 * 8;
      if (mine >= items) row[e] = padded;
      else if (kPair && part[e] == 2) row[e] = 2 * row[e] + threadIdx.x % 16 / 8, chunk[e] = rank * kHalf + threadIdx.x % 8 * 8;
      else if (kPair) row[e] += rank * rows;
      channel[e] = (part[e] == 0 ? h.q : part[e] == 1 ? h.k : h.v) + chunk[e];
      int at = row[e], column = kTaps - 1;  // row of the segment that the tap reads, or what is left of the window
#pragma unroll
      for (int t = kTaps - 1; t >= 0; --t) {
        tap[e][t] = {0, 0, 0, 0};
        if (row[e] >= n) continue;
        const bf16* from = at >= 0 ? x + at * a.x_stride : window + static_cast<int64_t>(--column) * h.channels;
        tap[e][t] = *reinterpret_cast<const uint4*>(from + channel[e]);
        at = at >= 0 ? m.up[at] : -1;
      }
    }
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int r = row[e];
      if (r >= padded) break;  // the whole warp
      float sum[8] = {};
#pragma unroll
      for (int t = 0; t < kTaps; ++t) {
        float w[8];
        *reinterpret_cast<float4*>(w) = *reinterpret_cast<const float4*>(m.taps[t] + part[e] * kDim + chunk[e]);
        *reinterpret_cast<float4*>(w + 4) = *reinterpret_cast<const float4*>(m.taps[t] + part[e] * kDim + chunk[e] + 4);
        const uint32_t pairs[4] = {tap[e][t].x, tap[e][t].y, tap[e][t].z, tap[e][t].w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float2 v = __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(pairs[i]));
          sum[2 * i] = fmaf(w[2 * i], v.x, sum[2 * i]), sum[2 * i + 1] = fmaf(w[2 * i + 1], v.y, sum[2 * i + 1]);
        }
      }
      const int64_t forest_row = s.first_row + r;
      uint32_t out[4];
      float squares = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        out[i] = matrix::pack(silu(sum[2 * i]), silu(sum[2 * i + 1]));  // rows past the last: zeros
        const float2 v = __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(out[i]));
        sum[2 * i] = v.x, sum[2 * i + 1] = v.y;
        squares = fmaf(v.x, v.x, fmaf(v.y, v.y, squares));
      }
      const uint4 values = {out[0], out[1], out[2], out[3]};
      if (part[e] == 2) {
        *reinterpret_cast<uint4*>(m.v[r] + chunk[e] - (kPair ? rank * kHalf : 0)) = values;
      } else {
        const bool query = part[e] == 0;
#pragma unroll
        for (int o = 8; o > 0; o >>= 1) squares += __shfl_xor_sync(0xffffffffu, squares, o);
        const float norm = rsqrtf(squares + kTiny), scale = query ? norm * rsqrtf(static_cast<float>(kDim)) : norm;
        float* own_scale = (query ? m.q_scale : m.k_scale) + r;
        bf16* own = (query ? m.rows.q : m.rows.k)[r] + chunk[e];
        *reinterpret_cast<uint4*>(own) = values;
        if (chunk[e] == 0) *own_scale = scale;
        if constexpr (kPair) {
          remote_put(remote(own, rank ^ 1), values);
          if (chunk[e] == 0) remote_put(remote(own_scale, rank ^ 1), scale);
        }
        if (!query && h.first_of_key && r < n) {
          float* to = a.k + (forest_row * a.key_heads + h.key) * kDim + chunk[e];
          *reinterpret_cast<float4*>(to) = {sum[0] * norm, sum[1] * norm, sum[2] * norm, sum[3] * norm};
          *reinterpret_cast<float4*>(to + 4) = {sum[4] * norm, sum[5] * norm, sum[6] * norm, sum[7] * norm};
        }
      }
      if (r < n && (part[e] == 2 || h.first_of_key))
        *reinterpret_cast<uint4*>(a.input + forest_row * h.channels + channel[e]) = tap[e][kTaps - 1];
    }
  }
}

// The inverse of 16 rows' unit triangle (I + A), a column c a thread, by forward substitution: a product of powers of A would lose all
// digits where keys repeat. Its values are those of products of projections: none is larger than 1.
template <bool kPair>
__device__ __forceinline__ void invert_diagonal(TreeShared<kPair>& m, int block, int c) {
  float u[16];
#pragma unroll
  for (int r = 0; r < 16; ++r) u[r] = r == c ? 1.0f : 0.0f;
#pragma unroll
  for (int j = 0; j < 15; ++j)
#pragma unroll
    for (int r = (j + 1) / 4 * 4; r < 16; r += 4) {  // columns up to j are zeros
      const float4 w = *reinterpret_cast<const float4*>(m.diagonal[block][j] + r);
      if (r > j) u[r] = fmaf(-w.x, u[j], u[r]);
      if (r + 1 > j) u[r + 1] = fmaf(-w.y, u[j], u[r + 1]);
      if (r + 2 > j) u[r + 2] = fmaf(-w.z, u[j], u[r + 2]);
      u[r + 3] = fmaf(-w.w, u[j], u[r + 3]);
    }
#pragma unroll
  for (int r = 0; r < 16; ++r) {
    const bf16 high = from_float<bf16>(u[r]);
    m.a[0][block * 16 + r][block * 16 + c] = high;
    m.a[1][block * 16 + r][block * 16 + c] = from_float<bf16>(u[r] - to_float(high));
  }
}

// BF16 parts of two values: what is left of them goes into the next part.
__device__ __forceinline__ uint32_t take_part(float& x, float& y) {
  const __nv_bfloat162 v = __floats2bfloat162_rn(x, y);
  const float2 back = __bfloat1622float2(v);
  x -= back.x, y -= back.y;
  return reinterpret_cast<const uint32_t&>(v);
}
// 16 rows and 8 columns as a product leaves them, as the right operand of the next, in two parts.
__device__ __forceinline__ void right_operand(const float (&d)[4], uint32_t (&parts)[2][2]) {
  float v[4] = {d[0], d[1], d[2], d[3]};
#pragma unroll
  for (int p = 0; p < 2; ++p)
    parts[p][0] = matrix::transpose(take_part(v[0], v[1])), parts[p][1] = matrix::transpose(take_part(v[2], v[3]));
}
// d += left · right of two parts each, without the product of the smaller ones: 2^-16 of the result. left: [2][..][kSquarePitch], 16 rows
// from `row` and 16 columns from `column`.
__device__ __forceinline__ void multiply_parts(float (&d)[4], const bf16 (*left)[kFewRows][kSquarePitch], int row, int column,
                                               const uint32_t (&right)[2][2]) {
  const int lane = threadIdx.x % 32;
  uint32_t high[4], low[4];
  matrix::load4(high, left[0][row + lane % 16] + column + lane / 16 * 8),
      matrix::load4(low, left[1][row + lane % 16] + column + lane / 16 * 8);
  matrix::multiply(d, high, right[0][0], right[0][1]), matrix::multiply(d, high, right[1][0], right[1][1]);
  matrix::multiply(d, low, right[0][0], right[0][1]);
}

// A tentative segment of 2 to 64 rows. Of the first 16 warps eight have keys (S0ᵀk, then the updates) and eight queries (S0ᵀq, then the
// outputs), each of 8 columns of values. q and k are BF16 times a norm, so that their products are exact in the accumulator; the state's
// float32 values are taken as two BF16 parts: 2^-17. Updates by 16 rows: (I + A)⁻¹ of a block of the diagonal, then what its rows add to
// later ones, all in a warp's registers.
template <bool kPair>
__device__ __forceinline__ void tree(const Mixer& a, const ops::ForestSegment& s, TreeShared<kPair>& m, int rank) {
  constexpr int kHalves = TreeShared<kPair>::kHalves;
  const Head h = head_of(a);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, pair = lane % 4 * 2, n = s.row_count, tiles = (n + 15) / 16;
  const bool keys = warp < 8, works = warp < kWarps;
  const int own = warp % 8 * 8;  // first column of this warp's in the half
  const auto half_of = [&](int i) { return kPair ? rank : i; };
  const float* state =
      a.state + (static_cast<int64_t>(s.slot) * a.value_heads + h.value) * kDim * kDim + pair * kDim + half_of(0) * kHalf + own + group;
  float S[kDim / 16][4];
  const auto load_state = [&](int half) {
#pragma unroll
    for (int d = 0; d < kDim / 16; ++d)
#pragma unroll
      for (int e = 0; e < 4; ++e) S[d][e] = state[(16 * d + e % 2 + e / 2 * 8) * kDim + half * kHalf];
  };
  if constexpr (kPair) cluster_arrive();
  if (works) load_state(0);
  float2 norm[kHalves];
#pragma unroll
  for (int half = 0; half < kHalves; ++half) norm[half] = *reinterpret_cast<const float2*>(a.norm + half_of(half) * kHalf + own + pair);
  if (threadIdx.x < kTaps * 3 * kDim / 4) {
    const int t = threadIdx.x / (3 * kDim / 4), part = threadIdx.x / (kDim / 4) % 3, c = threadIdx.x % (kDim / 4) * 4;
    matrix::copy16(m.taps[t] + part * kDim + c, a.taps + t * h.channels + (part == 0 ? h.q : part == 1 ? h.k : h.v) + c, true);
  }
  matrix::copy_commit();
  if (threadIdx.x < kFewRows) {
    const int i = threadIdx.x;
    m.up[i] = i < n ? max(a.parent[s.first_row + i] - s.first_row, -1) : -1;
  }
  matrix::copy_wait<0>();
  __syncthreads();
  pdl_wait();
  if constexpr (kPair) cluster_wait();  // the other block runs: its shared memory is there
  if (works) tree_conv<kPair>(a, s, h, m, rank);
  else tree_gates<kPair>(a, s, h, m, rank);
  if constexpr (kPair) cluster_arrive(), cluster_wait();
  else __syncthreads();

  float acc[kHalves][4][4] = {};  // by 16 rows
  // Keys first work out S0ᵀk while queries work out k·k, then keys q·k while queries work out S0ᵀq: one code for each.
#pragma unroll 1
  for (int round = 0; round < 2; ++round) {
    const bool q_dots = round == 1;
    if (q_dots && (warp == 8 || warp == 9) && (warp % 8 * 2 + lane / 16) < tiles)
      invert_diagonal<kPair>(m, warp % 8 * 2 + lane / 16, lane % 16);
    __syncwarp();
    if (works && keys != q_dots) {
      const bf16(*left)[kPitch] = keys ? m.rows.k : m.rows.q;
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        if (half > 0) load_state(half);
#pragma unroll
        for (int d = 0; d < kDim / 16; ++d) {
          uint32_t parts[2][2];
#pragma unroll
          for (int p = 0; p < 2; ++p) parts[p][0] = take_part(S[d][0], S[d][1]), parts[p][1] = take_part(S[d][2], S[d][3]);
#pragma unroll
          for (int t = 0; t < 4; ++t) {
            if (t >= tiles) break;
            uint32_t x[4];
            matrix::load4(x, left[t * 16 + lane % 16] + d * 16 + lane / 16 * 8);
#pragma unroll
            for (int p = 0; p < 2; ++p) matrix::multiply(acc[half][t], x, parts[p][0], parts[p][1]);
          }
        }
      }
#pragma unroll
      for (int t = 0; t < 4; ++t) {
        if (t >= tiles) break;
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int i = t * 16 + group + 8 * e;
          const float scale = m.decay[i] * (keys ? m.k_scale : m.q_scale)[i], beta = m.beta[i];
#pragma unroll
          for (int half = 0; half < kHalves; ++half) {
            float &x = acc[half][t][2 * e], &y = acc[half][t][2 * e + 1];
            x *= scale, y *= scale;
            if (!keys) continue;
            const float2 v = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(m.v[i] + half * kHalf + own + pair));
            x = beta * (v.x - x), y = beta * (v.y - y);
          }
        }
      }
    } else if (works) {
      const bf16(*left)[kPitch] = q_dots ? m.rows.q : m.rows.k;
#pragma unroll 1
      for (int tile = warp % 8; tile < tiles * (tiles + 1) / 2; tile += 8) {
        const int i_tile = (tile >= 1) + (tile >= 3) + (tile >= 6), j_tile = tile - i_tile * (i_tile + 1) / 2;
        float dots[2][4] = {};
#pragma unroll
        for (int d = 0; d < kDim / 16; ++d) {
          uint32_t x[4], y[4];
          matrix::load4(x, left[i_tile * 16 + lane % 16] + d * 16 + lane / 16 * 8);
          matrix::load4(y, m.rows.k[j_tile * 16 + lane / 16 * 8 + lane % 8] + d * 16 + lane / 8 % 2 * 8);
          matrix::multiply(dots[0], x, y[0], y[1]), matrix::multiply(dots[1], x, y[2], y[3]);
        }
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int i = i_tile * 16 + group + 8 * e;
          const uint64_t seen = m.ancestor[i] & (q_dots ? ~uint64_t{0} : ~(uint64_t{1} << i));
          const double prefix = m.prefix[i];
          const float scale = q_dots ? m.q_scale[i] : m.beta[i] * m.k_scale[i];
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            const int j = j_tile * 16 + c * 8 + pair;
            float value[2];
#pragma unroll
            for (int x = 0; x < 2; ++x)
              value[x] = seen >> (j + x) & 1
                             ? __expf(static_cast<float>(prefix - m.prefix[j + x])) * (scale * m.k_scale[j + x]) * dots[c][2 * e + x]
                             : 0.0f;
            if (!q_dots && i_tile == j_tile) {
              m.diagonal[i_tile][j % 16][i % 16] = value[0], m.diagonal[i_tile][j % 16 + 1][i % 16] = value[1];
              continue;
            }
            if (!q_dots) value[0] = -value[0], value[1] = -value[1];
            bf16(*to)[kFewRows][kSquarePitch] = q_dots ? m.b : m.a;
            *reinterpret_cast<uint32_t*>(to[0][i] + j) = take_part(value[0], value[1]);
            *reinterpret_cast<uint32_t*>(to[1][i] + j) = matrix::pack(value[0], value[1]);
          }
        }
      }
    }
    __syncthreads();
  }
  // q and k are free: the updates' parts take their place.
  uint32_t z[kHalves][4][2] = {};
  if (keys) {
#pragma unroll
    for (int half = 0; half < kHalves; ++half)
#pragma unroll
      for (int b = 0; b < 4; ++b) {
        if (b >= tiles) break;
        uint32_t right[2][2];
        right_operand(acc[half][b], right);
        float u[4] = {};
        multiply_parts(u, m.a, b * 16, b * 16, right);
        right_operand(u, right);
#pragma unroll
        for (int p = 0; p < 2; ++p)
#pragma unroll
          for (int r = 0; r < 2; ++r) m.u[half][warp][b][p][r][lane] = right[p][r];
#pragma unroll
        for (int i = b + 1; i < 4; ++i) {
          if (i >= tiles) break;
          multiply_parts(acc[half][i], m.a, i * 16, b * 16, right);
        }
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int i = b * 16 + group + 8 * e;
          if (i < n)
            *reinterpret_cast<float2*>(a.u + (static_cast<int64_t>(s.first_row + i) * a.value_heads + h.value) * kDim +
                                       half_of(half) * kHalf + own + pair) = {u[2 * e], u[2 * e + 1]};
        }
      }
  } else if (works) {
#pragma unroll
    for (int half = 0; half < kHalves; ++half)
#pragma unroll
      for (int t = 0; t < 4; ++t)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int i = t * 16 + group + 8 * e;
          if (i < n)
            z[half][t][e] = *reinterpret_cast<const uint32_t*>(a.z + static_cast<int64_t>(s.first_row + i) * a.z_stride + h.value * kDim +
                                                               half_of(half) * kHalf + own + pair);
        }
  }
  // o = e^P S0ᵀq + B u.
  if (works) asm volatile("bar.sync %0, 64;" ::"r"(1 + warp % 8) : "memory");  // the two warps of the same columns
  if (works && !keys) {
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (j >= tiles) break;
        uint32_t right[2][2];
#pragma unroll
        for (int p = 0; p < 2; ++p)
#pragma unroll
          for (int r = 0; r < 2; ++r) right[p][r] = m.u[half][warp % 8][j][p][r][lane];
#pragma unroll
        for (int i = j; i < 4; ++i) {
          if (i >= tiles) break;
          multiply_parts(acc[half][i], m.b, i * 16, j * 16, right);
        }
      }
#pragma unroll
      for (int t = 0; t < 4; ++t) {
        if (t >= tiles) break;
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float &x = acc[half][t][2 * e], &y = acc[half][t][2 * e + 1];
          x = to_float(from_float<bf16>(x)), y = to_float(from_float<bf16>(y));
          float sum = fmaf(x, x, y * y);
          sum += __shfl_xor_sync(0xffffffffu, sum, 1), sum += __shfl_xor_sync(0xffffffffu, sum, 2);
          float* to = &m.squares()[half_of(half)][t * 16 + group + 8 * e][warp % 8];
          if (pair == 0) *to = sum;
          if constexpr (kPair)
            if (pair == 2) remote_put(remote(to, rank ^ 1), sum);
        }
      }
    }
  }
  if constexpr (kPair) cluster_arrive(), cluster_wait();
  else __syncthreads();
  if (keys || !works) return;
#pragma unroll
  for (int t = 0; t < 4; ++t) {
    if (t >= tiles) break;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int i = t * 16 + group + 8 * e;
      const float4 four = *reinterpret_cast<const float4*>(m.squares()[pair / 4][i] + pair % 4 * 2);
      float sum = (four.x + four.y) + (four.z + four.w);
      sum += __shfl_xor_sync(0xffffffffu, sum, 1), sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      if (i >= n) continue;
      const float scale = rsqrtf(sum / static_cast<float>(kDim) + a.eps);
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        const int column = half_of(half) * kHalf + own + pair;
        const float2 gate = __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(z[half][t][e]));
        *reinterpret_cast<uint32_t*>(a.o + static_cast<int64_t>(s.first_row + i) * a.o_stride + h.value * kDim + column) = matrix::pack(
            norm[half].x * (acc[half][t][2 * e] * scale) * silu(gate.x), norm[half].y * (acc[half][t][2 * e + 1] * scale) * silu(gate.y));
      }
    }
  }
}

__global__ void __launch_bounds__(kThreads, 2) row_kernel(Mixer a) {
  extern __shared__ __align__(16) uint8_t memory[];
  pdl_release();
  const ops::ForestSegment s = a.segment[blockIdx.x];
  if (s.row_count == 1) return one_row(a, s, blockIdx.x, *reinterpret_cast<RowShared*>(memory));
  pdl_wait();  // a block without work, too, must not let the next kernel pass the one before
}

// Blocks of a pair have the same segment, so both or none meet at the cluster's barriers.
template <bool kPair>
__global__ void __launch_bounds__(kTreeThreads, 1) tree_kernel(Mixer a) {
  extern __shared__ __align__(16) uint8_t memory[];
  pdl_release();
  const int segment = kPair ? blockIdx.x / 2 : blockIdx.x, rank = kPair ? blockIdx.x % 2 : 0;
  const ops::ForestSegment s = a.segment[segment];
  if (s.row_count == 1 && rank == 0) return one_row(a, s, segment, *reinterpret_cast<RowShared*>(memory));
  if (s.row_count > 1 && has_few_rows(s)) return tree<kPair>(a, s, *reinterpret_cast<TreeShared<kPair>*>(memory), rank);
  pdl_wait();
}

bool aligned16(const ops::Tensor& t) { return reinterpret_cast<uintptr_t>(t.data) % 16 == 0 && t.stride * 2 % 16 == 0; }

}  // namespace

cudaError_t gated_delta_mixer(cudaStream_t stream, const ops::GatedDeltaMixerArgs& a, const DeltaStorage& states, const TraceStorage& trace,
                              const DeltaWork& work) {
  const ops::Forest& f = *a.forest;
  const ops::DeltaShape& s = states.shape;
  const bool served =
      s.key_dim == kDim && s.value_dim == kDim && s.conv_width == kTaps && aligned16(a.x) && aligned16(a.z) && aligned16(a.o);
  // Segments that the kernel for few rows does not serve: the three ops, before it, since both write outputs and conv still reads windows.
  const bool others = !served || f.max_tree_rows > kFewRows || f.max_certain_rows > 1;
  if (others) {
    cudaError_t e = conv(stream, ops::conv_of(a), states, trace, served);
    if (e == cudaSuccess) e = delta_rule(stream, ops::delta_rule_of(a), states, trace, work, served);
    if (e == cudaSuccess) e = gated_rms_norm(stream, ops::gated_rms_norm_of(a));
    if (e != cudaSuccess || !served || f.segments == 1) return e;
  }
  const int64_t layer = a.layer;
  const Mixer m{f.segment,
                f.parent,
                as_bf16(a.x),
                as_bf16(a.z),
                as_bf16(a.a),
                as_bf16(a.b),
                a.x.stride,
                a.z.stride,
                a.a.stride,
                a.b.stride,
                a.o.stride,
                as_f32(a.taps),
                as_f32(a.a_log),
                as_f32(a.dt_bias),
                as_f32(a.norm),
                a.eps,
                states.state + layer * states.slots * s.value_heads * kDim * kDim,
                trace.k + layer * trace.rows * s.key_heads * kDim,
                trace.u + layer * trace.rows * s.value_heads * kDim,
                trace.gate + layer * trace.rows * s.value_heads,
                states.window + layer * states.slots * (kTaps - 1) * s.channels(),
                trace.input + layer * trace.rows * s.channels(),
                as_bf16_out(a.o),
                work.turns,
                s.key_heads,
                s.value_heads};
  const dim3 grid(f.segments, s.value_heads);
  if (f.max_segment_rows == 1) return launch(row_kernel, grid, dim3(kThreads), sizeof(RowShared), stream, m);
  const auto trees = [&]<bool kPair>() {
    constexpr size_t kShared = std::max(sizeof(TreeShared<kPair>), sizeof(RowShared));
    static_assert(kPair || kShared <= 99 << 10);  // what cards of 8.6 have
    static const cudaError_t allowed =
        cudaFuncSetAttribute(tree_kernel<kPair>, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(kShared));
    if (allowed != cudaSuccess) return allowed;
    return kPair ? launch_clusters(tree_kernel<kPair>, dim3(2 * f.segments, s.value_heads), dim3(kTreeThreads), 2, kShared, stream, m)
                 : launch(tree_kernel<kPair>, grid, dim3(kTreeThreads), kShared, stream, m);
  };
  return work.pairs ? trees.template operator()<true>() : trees.template operator()<false>();
}

}  // namespace ddtree::kernels
