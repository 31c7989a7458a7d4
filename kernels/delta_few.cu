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
constexpr int kPitch = kDim + 8;             // BF16 rows in shared memory, and float32 ones
constexpr int kSquarePitch = kFewRows + 4;   // float32
constexpr int kOutputPitch = kFewRows + 8;   // BF16
constexpr int kSquaresPitch = kWarps + 4;    // float32
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

// silu without the division's refinement and its slow path, which were a fifth of the kernel. Every instruction runs about once a layer, so
// that fetching it costs more than running it: the tree's code took 17 us at 133 KB, whatever the number of rows.
__device__ __forceinline__ float short_silu(float x) { return __fdividef(x, 1.0f + __expf(-x)); }

__device__ __forceinline__ float4 fma4(float s, const float4& v, const float4& add) {
  return {fmaf(s, v.x, add.x), fmaf(s, v.y, add.y), fmaf(s, v.z, add.z), fmaf(s, v.w, add.w)};
}

// c of one channel: window, then the row itself.
__device__ __forceinline__ float convolve(const float (&w)[kTaps], const bf16 (&before)[kTaps - 1], bf16 x) {
  float sum = 0;
#pragma unroll
  for (int t = 0; t < kTaps - 1; ++t) sum = fmaf(w[t], to_float(before[t]), sum);
  return to_float(from_float<bf16>(short_silu(fmaf(w[kTaps - 1], to_float(x), sum))));
}

// A segment of one row. Thread t has four columns of eight dimensions of the state. Besides, the first 128 threads have a channel of q and
// of k, the next 128 one of v, of the update and of the output, and the last 128 move the inputs of q and k.
__device__ __forceinline__ void one_row(const Mixer& a, const ops::ForestSegment& s, RowShared& m) {
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
  int32_t* turns = a.turns + (blockIdx.x * a.key_heads + h.key) * 4 + warp % 4;
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
    a.o[row * a.o_stride + h.value * kDim + c] = from_float<bf16>(norm * (out * scale) * short_silu(z));
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

struct TreeShared {
  union {
    bf16 q[kFewRows][kPitch];
    float a[kFewRows][kSquarePitch];         // [j][i]: beta_i e^{P_i - P_j} k_j·k_i where j is an ancestor of i, else 0
    float squares[kFewRows][kSquaresPitch];  // of outputs, by row and warp
  };
  union {
    bf16 k[kFewRows][kPitch];
    bf16 b[2][kFewRows][kOutputPitch];  // [i][j] e^{P_i - P_j} k_j·q_i in two parts
  };
  float u[kFewRows][kPitch];    // v, then beta (v - e^P S0ᵀk), then the updates
  double prefix[kFewRows];      // P: the gates along the path, in float64: they reach hundreds and differences would cancel
  uint64_t ancestor[kFewRows];  // and itself
  float taps[kTaps][3 * kDim];  // of q | k | v
  float beta[kFewRows], decay[kFewRows], q_scale[kFewRows], k_scale[kFewRows], o_scale[kFewRows];  // decay: e^P
  int up[kFewRows], jump[kFewRows];                                                                // parent inside the segment, -1: none
};

// Gates along every row's path and who stands on it, by pointer jumping: a warp, two rows a lane. Rows past the last have no ancestors, not
// even themselves.
__device__ __forceinline__ void tree_gates(const Mixer& a, const ops::ForestSegment& s, const Head& h, TreeShared& m) {
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
    if (i < n) a.gate[static_cast<int64_t>(s.first_row + i) * a.value_heads + h.value] = sum[e];
  }
}

// conv of the head's q, k and v of all rows. An item is a row's q, k or v; 16 threads, of 8 channels each, take two items at a time.
__device__ __forceinline__ void tree_conv(const Mixer& a, const ops::ForestSegment& s, const Head& h, TreeShared& m) {
  const int chunk = threadIdx.x % 16 * 8, n = s.row_count, padded = (n + 15) / 16 * 16, items = 3 * padded;
  const bf16* window = a.window + static_cast<int64_t>(s.slot) * (kTaps - 1) * h.channels + chunk;
  const bf16* x = a.x + s.first_row * a.x_stride + chunk;
#pragma unroll 1
  for (int item = threadIdx.x / 16; item < items; item += 2 * kThreads / 16) {
    int part[2], row[2], channel[2];
    uint4 tap[2][kTaps];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int mine = item + e * kThreads / 16;
      part[e] = (mine >= padded) + (mine >= 2 * padded), row[e] = mine < items ? mine - part[e] * padded : padded;
      channel[e] = part[e] == 0 ? h.q : part[e] == 1 ? h.k : h.v;
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
        *reinterpret_cast<float4*>(w) = *reinterpret_cast<const float4*>(m.taps[t] + part[e] * kDim + chunk);
        *reinterpret_cast<float4*>(w + 4) = *reinterpret_cast<const float4*>(m.taps[t] + part[e] * kDim + chunk + 4);
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
        out[i] = matrix::pack(short_silu(sum[2 * i]), short_silu(sum[2 * i + 1]));  // rows past the last: zeros
        const float2 v = __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(out[i]));
        sum[2 * i] = v.x, sum[2 * i + 1] = v.y;
        squares = fmaf(v.x, v.x, fmaf(v.y, v.y, squares));
      }
      if (part[e] == 2) {
        *reinterpret_cast<float4*>(m.u[r] + chunk) = {sum[0], sum[1], sum[2], sum[3]};
        *reinterpret_cast<float4*>(m.u[r] + chunk + 4) = {sum[4], sum[5], sum[6], sum[7]};
      } else {
        const bool query = part[e] == 0;
#pragma unroll
        for (int o = 8; o > 0; o >>= 1) squares += __shfl_xor_sync(0xffffffffu, squares, o);
        const float scale = rsqrtf(squares + kTiny);
        if (chunk == 0) (query ? m.q_scale : m.k_scale)[r] = query ? scale * rsqrtf(static_cast<float>(kDim)) : scale;
        *reinterpret_cast<uint4*>((query ? m.q : m.k)[r] + chunk) = {out[0], out[1], out[2], out[3]};
        if (!query && h.first_of_key && r < n) {
          float* to = a.k + (forest_row * a.key_heads + h.key) * kDim + chunk;
          *reinterpret_cast<float4*>(to) = {sum[0] * scale, sum[1] * scale, sum[2] * scale, sum[3] * scale};
          *reinterpret_cast<float4*>(to + 4) = {sum[4] * scale, sum[5] * scale, sum[6] * scale, sum[7] * scale};
        }
      }
      if (r < n && (part[e] == 2 || h.first_of_key))
        *reinterpret_cast<uint4*>(a.input + forest_row * h.channels + channel[e] + chunk) = tap[e][kTaps - 1];
    }
  }
}

// u_i = beta_i (v_i - …) by forward substitution, a column of values a thread: 16 rows in registers, first what earlier rows add, then
// among themselves. A product of powers of the matrix would lose all digits where keys repeat.
__device__ __forceinline__ void tree_substitute(const Mixer& a, const ops::ForestSegment& s, const Head& h, TreeShared& m) {
  const int c = threadIdx.x, n = s.row_count;
  for (int first = 0; first < n; first += 16) {
    float u[16];
#pragma unroll
    for (int r = 0; r < 16; ++r) u[r] = m.u[first + r][c];
#pragma unroll 4
    for (int j = 0; j < first; ++j) {
      const float known = m.u[j][c];
#pragma unroll
      for (int r = 0; r < 16; r += 4) {
        const float4 w = *reinterpret_cast<const float4*>(m.a[j] + first + r);
        u[r] = fmaf(-w.x, known, u[r]), u[r + 1] = fmaf(-w.y, known, u[r + 1]);
        u[r + 2] = fmaf(-w.z, known, u[r + 2]), u[r + 3] = fmaf(-w.w, known, u[r + 3]);
      }
    }
#pragma unroll
    for (int j = 0; j < 15; ++j)
#pragma unroll
      for (int r = (j + 1) / 4 * 4; r < 16; r += 4) {  // columns up to j are zeros
        const float4 w = *reinterpret_cast<const float4*>(m.a[first + j] + first + r);
        if (r > j) u[r] = fmaf(-w.x, u[j], u[r]);
        if (r + 1 > j) u[r + 1] = fmaf(-w.y, u[j], u[r + 1]);
        if (r + 2 > j) u[r + 2] = fmaf(-w.z, u[j], u[r + 2]);
        u[r + 3] = fmaf(-w.w, u[j], u[r + 3]);
      }
#pragma unroll
    for (int r = 0; r < 16; ++r) {
      m.u[first + r][c] = u[r];
      if (first + r < n) a.u[(static_cast<int64_t>(s.first_row + first + r) * a.value_heads + h.value) * kDim + c] = u[r];
    }
  }
}

// BF16 parts of two values: what is left of them goes into the next part.
__device__ __forceinline__ uint32_t take_part(float& x, float& y) {
  const __nv_bfloat162 v = __floats2bfloat162_rn(x, y);
  const float2 back = __bfloat1622float2(v);
  x -= back.x, y -= back.y;
  return reinterpret_cast<const uint32_t&>(v);
}

// A tentative segment of 2 to 64 rows. Warp w of the first 16 has the state's columns 8w to 8w + 7, as right operands of matrix products,
// and computes those columns of S0ᵀk, S0ᵀq and the outputs. q and k are BF16 times a norm, so that their products are exact in the
// accumulator; the state's float32 values are taken as three BF16 parts, which loses nothing either.
__device__ __forceinline__ void tree(const Mixer& a, const ops::ForestSegment& s, TreeShared& m) {
  const Head h = head_of(a);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, pair = lane % 4 * 2, n = s.row_count, tiles = (n + 15) / 16;
  const int column = warp * 8 + pair;  // and the next: where this thread's accumulators stand
  float S[kDim / 16][4];
  float2 norm = {};
  if (warp < kWarps) {
    const float* from = a.state + (static_cast<int64_t>(s.slot) * a.value_heads + h.value) * kDim * kDim + pair * kDim + warp * 8 + group;
#pragma unroll
    for (int d = 0; d < kDim / 16; ++d)
#pragma unroll
      for (int e = 0; e < 4; ++e) S[d][e] = from[(16 * d + e % 2 + e / 2 * 8) * kDim];
    norm = *reinterpret_cast<const float2*>(a.norm + column);
  }
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
  if (warp < kWarps) {
    tree_conv(a, s, h, m);
  } else {
    tree_gates(a, s, h, m);
  }
  __syncthreads();
  float acc[8][4] = {};   // rows of 16: S0ᵀk, then S0ᵀq
  float dots[4][4] = {};  // k·k or k·q of 16 rows i and 32 rows j
  uint32_t z[4][2] = {};
  const bool queries = warp >= kWarps / 2;
  const int i_tile = warp % 8 / 2, j_tile = warp % 2 * 2;
  const bool squares = warp < kWarps && i_tile < tiles && j_tile <= i_tile;  // later rows are nobody's ancestors
  if (warp < kWarps) {
#pragma unroll
    for (int d = 0; d < kDim / 16; ++d) {
      uint32_t parts[3][2];
#pragma unroll
      for (int p = 0; p < 3; ++p) parts[p][0] = take_part(S[d][0], S[d][1]), parts[p][1] = take_part(S[d][2], S[d][3]);
#pragma unroll
      for (int t = 0; t < 4; ++t) {
        if (t >= tiles) break;
        uint32_t k[4], q[4];
        matrix::load4(k, m.k[t * 16 + lane % 16] + d * 16 + lane / 16 * 8),
            matrix::load4(q, m.q[t * 16 + lane % 16] + d * 16 + lane / 16 * 8);
#pragma unroll
        for (int p = 0; p < 3; ++p)
          matrix::multiply(acc[t], k, parts[p][0], parts[p][1]), matrix::multiply(acc[4 + t], q, parts[p][0], parts[p][1]);
      }
    }
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      if (t >= tiles) break;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int i = t * 16 + group + 8 * half;
        const float decay = m.decay[i], kd = decay * m.k_scale[i], qd = decay * m.q_scale[i], beta = m.beta[i];
        float2* cell = reinterpret_cast<float2*>(m.u[i] + column);
        const float2 v = *cell;
        *cell = {beta * (v.x - kd * acc[t][2 * half]), beta * (v.y - kd * acc[t][2 * half + 1])};
        acc[4 + t][2 * half] *= qd, acc[4 + t][2 * half + 1] *= qd;
        if (i < n)
          z[t][half] =
              *reinterpret_cast<const uint32_t*>(a.z + static_cast<int64_t>(s.first_row + i) * a.z_stride + h.value * kDim + column);
      }
    }
    if (squares)
#pragma unroll
      for (int d = 0; d < kDim / 16; ++d) {
        uint32_t left[4];
        matrix::load4(left, (queries ? m.q : m.k)[i_tile * 16 + lane % 16] + d * 16 + lane / 16 * 8);
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          if (j_tile + c > i_tile) break;
          uint32_t right[4];
          matrix::load4(right, m.k[(j_tile + c) * 16 + lane / 16 * 8 + lane % 8] + d * 16 + lane / 8 % 2 * 8);
          matrix::multiply(dots[2 * c], left, right[0], right[1]), matrix::multiply(dots[2 * c + 1], left, right[2], right[3]);
        }
      }
  }
  __syncthreads();  // q and k are free
  if (squares) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = i_tile * 16 + group + 8 * half;
      const uint64_t seen = m.ancestor[i] & (queries ? ~uint64_t{0} : ~(uint64_t{1} << i));
      const double prefix = m.prefix[i];
      const float own = queries ? m.q_scale[i] : m.beta[i] * m.k_scale[i];
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        if (j_tile + c / 2 > i_tile) break;
        float value[2];
        const int j = (j_tile * 2 + c) * 8 + pair;
#pragma unroll
        for (int e = 0; e < 2; ++e)
          value[e] = seen >> (j + e) & 1
                         ? __expf(static_cast<float>(prefix - m.prefix[j + e])) * (own * m.k_scale[j + e]) * dots[c][2 * half + e]
                         : 0.0f;
        if (queries) {
          *reinterpret_cast<uint32_t*>(m.b[0][i] + j) = take_part(value[0], value[1]);
          *reinterpret_cast<uint32_t*>(m.b[1][i] + j) = matrix::pack(value[0], value[1]);
        } else {
          m.a[j][i] = value[0], m.a[j + 1][i] = value[1];
        }
      }
    }
  }
  __syncthreads();
  if (warp < kDim / 32) tree_substitute(a, s, h, m);
  __syncthreads();
  // o = e^P S0ᵀq + B u, in two BF16 parts each without the product of the smaller ones: 2^-16, where o is rounded to 2^-9.
  if (warp < kWarps) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (j >= tiles) break;
      float u[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) u[e] = m.u[j * 16 + pair + e % 2 + e / 2 * 8][warp * 8 + group];
      uint32_t parts[2][2];
#pragma unroll
      for (int p = 0; p < 2; ++p) parts[p][0] = take_part(u[0], u[1]), parts[p][1] = take_part(u[2], u[3]);
#pragma unroll
      for (int i = j; i < 4; ++i) {
        if (i >= tiles) break;
        uint32_t high[4], low[4];
        matrix::load4(high, m.b[0][i * 16 + lane % 16] + j * 16 + lane / 16 * 8),
            matrix::load4(low, m.b[1][i * 16 + lane % 16] + j * 16 + lane / 16 * 8);
        matrix::multiply(acc[4 + i], high, parts[0][0], parts[0][1]), matrix::multiply(acc[4 + i], high, parts[1][0], parts[1][1]);
        matrix::multiply(acc[4 + i], low, parts[0][0], parts[0][1]);
      }
    }
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      if (t >= tiles) break;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float &x = acc[4 + t][2 * half], &y = acc[4 + t][2 * half + 1];
        x = to_float(from_float<bf16>(x)), y = to_float(from_float<bf16>(y));
        float sum = fmaf(x, x, y * y);
        sum += __shfl_xor_sync(0xffffffffu, sum, 1), sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        if (pair == 0) m.squares[t * 16 + group + 8 * half][warp] = sum;
      }
    }
  }
  __syncthreads();
  if (threadIdx.x < n) {
    float sum = 0;
#pragma unroll
    for (int w = 0; w < kWarps; w += 4) {
      const float4 v = *reinterpret_cast<const float4*>(m.squares[threadIdx.x] + w);
      sum += (v.x + v.y) + (v.z + v.w);
    }
    m.o_scale[threadIdx.x] = rsqrtf(sum / static_cast<float>(kDim) + a.eps);
  }
  __syncthreads();
  if (warp >= kWarps) return;
#pragma unroll
  for (int t = 0; t < 4; ++t) {
    if (t >= tiles) break;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = t * 16 + group + 8 * half;
      if (i >= n) continue;
      const float scale = m.o_scale[i];
      const float2 gate = __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(z[t][half]));
      *reinterpret_cast<uint32_t*>(a.o + static_cast<int64_t>(s.first_row + i) * a.o_stride + h.value * kDim + column) = matrix::pack(
          norm.x * (acc[4 + t][2 * half] * scale) * short_silu(gate.x), norm.y * (acc[4 + t][2 * half + 1] * scale) * short_silu(gate.y));
    }
  }
}

template <bool kTrees>
__global__ void __launch_bounds__(kTrees ? kTreeThreads : kThreads, kTrees ? 1 : 2) mixer_kernel(Mixer a) {
  extern __shared__ __align__(16) uint8_t memory[];
  pdl_release();
  const ops::ForestSegment s = a.segment[blockIdx.x];
  if (s.row_count == 1) return one_row(a, s, *reinterpret_cast<RowShared*>(memory));
  if constexpr (kTrees)
    if (has_few_rows(s)) return tree(a, s, *reinterpret_cast<TreeShared*>(memory));
  pdl_wait();  // a block without work, too, must not let the next kernel pass the one before
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
  if (f.max_segment_rows == 1) return launch(mixer_kernel<false>, grid, dim3(kThreads), sizeof(RowShared), stream, m);
  constexpr size_t kShared = std::max(sizeof(TreeShared), sizeof(RowShared));
  static const cudaError_t allowed =
      cudaFuncSetAttribute(mixer_kernel<true>, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(kShared));
  if (allowed != cudaSuccess) return allowed;
  return launch(mixer_kernel<true>, grid, dim3(kTreeThreads), kShared, stream, m);
}

}  // namespace ddtree::kernels
