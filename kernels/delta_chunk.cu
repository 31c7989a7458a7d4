// delta_rule for certain segments of many rows, by the chunkwise form of the gated delta rule: whatever does not depend on the state is
// computed for all chunks at once, and only products with the state are left to run chunk after chunk.
//
// Within a chunk of 64 rows, P the cumulated gate, S the state before it:
//   A_ij = beta_i e^{P_i-P_j} k^_i·k^_j (j < i),  B_ij = e^{P_i-P_j} q^_i·k^_j (j <= i)
//   (I + A) u0 = beta v,  (I + A) w = beta e^P k^                    by forward substitution, 16 rows at a time
//   u = u0 - w S,  o = e^P q^ S + B u,  S <- e^{P_l} S + Σ_j e^{P_l-P_j} k^_j u_jᵀ
// Products run on the tensor cores. q and k are BF16 times a norm, so they go as they are and their factors are applied outside; A, w, B, u
// and S go as two BF16 parts each (17 bits; the third product, of the two remainders, is left out). S itself stays in float32 registers.
// Of the substitution, what earlier rows add to 16 rows is products; among themselves the 16 are multiplied by their own triangle's
// inverse, which is substituted in float32. Its entries are products of I - beta k^k^ᵀ, so none is large, whatever the keys.
#include <algorithm>

#include "kernels/common.cuh"
#include "kernels/delta.cuh"
#include "kernels/delta_chunk.cuh"
#include "kernels/matrix.cuh"

namespace ddtree::kernels {
namespace {

constexpr int kRows = ops::kDeltaChunk;
constexpr int kDim = 128;                                                               // of keys and of values
constexpr int kColumns = 32;                                                            // of the state: a block of the second kernel
constexpr int kThreads = 256;                                                           // of both kernels
constexpr int kPitch = kDim + 8, kSquarePitch = kRows + 8, kSlicePitch = kColumns + 8;  // BF16 elements of a row in shared memory
constexpr int kBlock = 16, kBlockPitch = kBlock + 4;                                    // rows substituted together; floats

// What a chunk's first kernel leaves for the second, of one value head.
struct Tile {
  bf16 w[2][kRows][kDim];   // high and low parts
  float u0[kRows][kDim];    // zero in rows that the chunk does not have, like w and b
  bf16 b[2][kRows][kRows];  // high and low parts
  float query[kRows];       // e^{P_i} and the norm of q_i
  float fold[kRows];        // e^{P_l - P_i} and the norm of k_i
  float keep;               // e^{P_l}
};
static_assert(sizeof(Tile) <= ops::cuda::kDeltaTileBytes, "the memory plan counts kDeltaTileBytes a tile");

struct Chunks {
  const ops::ForestSegment* segment;
  const bf16 *c, *a, *b;
  int64_t c_stride, a_stride, b_stride, o_stride;
  const float *a_log, *dt_bias;
  float* state;
  bf16* o;
  uint8_t* tiles;
  int segments, key_heads, value_heads, from, count;  // of all chunks of the pass, [from, from + count) are computed

  __device__ Tile& tile(int t, int head) const {
    return *reinterpret_cast<Tile*>(tiles + (static_cast<int64_t>(t - from) * value_heads + head) * ops::cuda::kDeltaTileBytes);
  }
};

// The t-th chunk of the pass: its first row of the forest and how many it has. False: there are fewer.
__device__ __forceinline__ bool find_chunk(const Chunks& a, int t, int* first, int* rows) {
  for (int s = 0; s < a.segments; ++s) {
    const ops::ForestSegment g = a.segment[s];
    if (!runs_by_chunks(g)) continue;
    const int chunks = (g.row_count + kRows - 1) / kRows;
    if (t < chunks) {
      *first = g.first_row + t * kRows, *rows = min(kRows, g.row_count - t * kRows);
      return true;
    }
    t -= chunks;
  }
  return false;
}

__device__ __forceinline__ void split(float x, float y, uint32_t* high, uint32_t* low) {
  const __nv_bfloat162 h = __floats2bfloat162_rn(x, y);
  const float2 back = __bfloat1622float2(h);
  *high = reinterpret_cast<const uint32_t&>(h), *low = matrix::pack(x - back.x, y - back.y);
}

struct PrepareShared {  // byte offsets
  static constexpr int q = 0, k = 2 * kRows * kSquarePitch * 2, v = k + kRows * kPitch * 2, triangles = v + kRows * kPitch * 2,
                       total = triangles + kRows * kBlockPitch * 4;
};
static_assert(kRows * kPitch * 2 <= PrepareShared::k, "both parts of A take the place of Q");

// A block: (chunk, value head).
__global__ void __launch_bounds__(kThreads, 2) chunk_prepare_kernel(Chunks a) {
  extern __shared__ __align__(16) uint8_t memory[];
  using At = PrepareShared;
  bf16 *Q = reinterpret_cast<bf16*>(memory + At::q), *K = reinterpret_cast<bf16*>(memory + At::k),
       *V = reinterpret_cast<bf16*>(memory + At::v);
  bf16 *A = Q, *A_low = A + kRows * kSquarePitch;  // -A, when Q has been used; on the diagonal the inverses of I + A's triangles
  float* triangles = reinterpret_cast<float*>(memory + At::triangles);  // A's, of 16 rows each
  __shared__ double P[kRows];
  __shared__ float g[kRows], beta[kRows], q_scale[kRows], k_scale[kRows],
      factor[2][kRows];  // factor: of v and of k, on the right-hand side
  pdl_begin();
  const int t = a.from + blockIdx.x, head = blockIdx.y, key_head = head / (a.value_heads / a.key_heads);
  int first, n;
  if (!find_chunk(a, t, &first, &n)) return;
  Tile& out = a.tile(t, head);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, keys = a.key_heads * kDim;
  for (int i = threadIdx.x; i < kRows * (kDim / 8); i += kThreads) {
    const int r = i / (kDim / 8), d = i % (kDim / 8) * 8;
    const bf16* row = a.c + static_cast<int64_t>(first + min(r, n - 1)) * a.c_stride + d;
    matrix::copy16(Q + r * kPitch + d, row + key_head * kDim, r < n);
    matrix::copy16(K + r * kPitch + d, row + keys + key_head * kDim, r < n);
    matrix::copy16(V + r * kPitch + d, row + 2 * keys + head * kDim, r < n);
  }
  matrix::copy_commit();
  if (threadIdx.x < kRows) {
    const int i = threadIdx.x;
    float gate = 0, rate = 0;
    if (i < n) {
      gate = log_gate(to_float(a.a[(first + i) * a.a_stride + head]), a.a_log[head], a.dt_bias[head]);
      rate = update_rate(to_float(a.b[(first + i) * a.b_stride + head]));
    }
    g[i] = gate, beta[i] = rate;
  }
  matrix::copy_wait<0>();
  __syncthreads();
  if (warp == 0) {  // in float64: the sum reaches hundreds, and its differences would cancel
    double low = g[lane], high = g[lane + 32];
#pragma unroll
    for (int o = 1; o < 32; o *= 2) {
      const double x = __shfl_up_sync(0xffffffffu, low, o), y = __shfl_up_sync(0xffffffffu, high, o);
      if (lane >= o) low += x, high += y;
    }
    P[lane] = low, P[lane + 32] = high + __shfl_sync(0xffffffffu, low, 31);
  }
  for (int r = warp; r < kRows; r += kThreads / 32) {
    float qq = 0, kk = 0;
    for (int d = lane; d < kDim; d += 32) {
      const float q = to_float(Q[r * kPitch + d]), k = to_float(K[r * kPitch + d]);
      qq += q * q, kk += k * k;
    }
    qq = warp_sum(qq), kk = warp_sum(kk);
    if (lane == 0) q_scale[r] = rsqrtf(qq + 1e-6f) * rsqrtf(static_cast<float>(kDim)), k_scale[r] = rsqrtf(kk + 1e-6f);
  }
  __syncthreads();
  // Warps 0 to 3: 16 rows of k each, 4 to 7: of q; their products with the keys up to them.
  const bool queries = warp >= 4;
  const int i0 = warp % 4 * 16;
  float product[kRows / 8][4];
#pragma unroll
  for (int c = 0; c < kRows / 8; ++c)
#pragma unroll
    for (int e = 0; e < 4; ++e) product[c][e] = 0;
#pragma unroll 2
  for (int d = 0; d < kDim; d += 16) {
    uint32_t left[4];
    matrix::load4(left, (queries ? Q : K) + (i0 + lane % 16) * kPitch + d + lane / 16 * 8);
#pragma unroll
    for (int c = 0; c < kRows / 16; ++c) {
      if (c * 16 > i0) break;
      uint32_t right[4];
      matrix::load4(right, K + (c * 16 + lane / 16 * 8 + lane % 8) * kPitch + d + lane / 8 % 2 * 8);
      matrix::multiply(product[2 * c], left, right[0], right[1]), matrix::multiply(product[2 * c + 1], left, right[2], right[3]);
    }
  }
  if (threadIdx.x < kRows) {
    const int i = threadIdx.x;
    const float decay = expf(static_cast<float>(P[i]));
    const double last = P[n - 1];
    out.query[i] = decay * q_scale[i];
    out.fold[i] = i < n ? expf(static_cast<float>(last - P[i])) * k_scale[i] : 0.0f;
    if (i == 0) out.keep = expf(static_cast<float>(last));
    factor[0][i] = beta[i], factor[1][i] = beta[i] * decay * k_scale[i];
  }
  __syncthreads();  // Q is free
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int i = i0 + lane / 4 + 8 * half;
    const double p = P[i];
    const float own = queries ? q_scale[i] : k_scale[i] * beta[i];
#pragma unroll
    for (int c = 0; c < kRows / 8; ++c) {
      float v[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int j = c * 8 + lane % 4 * 2 + e;
        // Masked before exp: above the diagonal the exponent is positive and may overflow.
        v[e] = j < i + (queries ? 1 : 0) ? __expf(static_cast<float>(p - P[j])) * own * k_scale[j] * product[c][2 * half + e] : 0.0f;
      }
      const int j = c * 8 + lane % 4 * 2;
      if (queries) {
        uint32_t high, low;
        split(v[0], v[1], &high, &low);
        *reinterpret_cast<uint32_t*>(&out.b[0][i][j]) = high, *reinterpret_cast<uint32_t*>(&out.b[1][i][j]) = low;
      } else if (c / 2 == i0 / kBlock) {
        *reinterpret_cast<float2*>(triangles + i * kBlockPitch + j % kBlock) = make_float2(v[0], v[1]);
      } else if (c / 2 < i0 / kBlock) {
        uint32_t high, low;
        split(-v[0], -v[1], &high, &low);
        *reinterpret_cast<uint32_t*>(A + i * kSquarePitch + j) = high, *reinterpret_cast<uint32_t*>(A_low + i * kSquarePitch + j) = low;
      }
    }
  }
  __syncthreads();
  if (threadIdx.x < kRows) {  // a column of an inverse a thread
    const int first_row = threadIdx.x / kBlock * kBlock, j = threadIdx.x % kBlock;
    float x[kBlock];
#pragma unroll
    for (int i = 0; i < kBlock; ++i) x[i] = 0;
#pragma unroll
    for (int i = 0; i < kBlock; ++i) {
      float sum[4] = {};
#pragma unroll
      for (int c = 0; c < i; c += 4) {
        const float4 a4 = *reinterpret_cast<const float4*>(triangles + (first_row + i) * kBlockPitch + c);  // from i on meets x = 0
        sum[0] = fmaf(a4.x, x[c], sum[0]), sum[1] = fmaf(a4.y, x[c + 1], sum[1]);
        sum[2] = fmaf(a4.z, x[c + 2], sum[2]), sum[3] = fmaf(a4.w, x[c + 3], sum[3]);
      }
      x[i] = (i == j ? 1.0f : 0.0f) - ((sum[0] + sum[1]) + (sum[2] + sum[3]));
      const bf16 high = __float2bfloat16_rn(x[i]);
      A[(first_row + i) * kSquarePitch + first_row + j] = high;
      A_low[(first_row + i) * kSquarePitch + first_row + j] = __float2bfloat16_rn(x[i] - to_float(high));
    }
  }
  __syncthreads();
  // Forward substitution. Never by powers of A: those lose every digit when keys repeat. A warp has 32 columns of v or of k, as rows of the
  // products' results (x transposed), so that what is solved goes on as a left operand without leaving its registers.
  const bool values = warp < 4;
  const int column0 = warp % 4 * 32;
  const bf16* right = (values ? V : K) + column0;
  const float* scale = factor[values ? 0 : 1];
  uint32_t solved[kRows / kBlock][2][4], solved_low[kRows / kBlock][2][4];  // [block of rows][16 columns]
#pragma unroll
  for (int block = 0; block < kRows / kBlock; ++block) {
    float x[2][2][4];  // [16 columns][8 rows]
    const int row = block * kBlock + lane % 4 * 2;
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      uint32_t raw[4];
      matrix::load4_transposed(raw, right + (block * kBlock + lane % 16) * kPitch + m * 16 + lane / 16 * 8);
#pragma unroll
      for (int t = 0; t < 2; ++t)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float2 one = __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(raw[t + 2 * half]));
          x[m][t][2 * half] = scale[row + 8 * t] * one.x, x[m][t][2 * half + 1] = scale[row + 8 * t + 1] * one.y;
        }
    }
    uint32_t a_high[4], a_low[4];
    const auto load = [&](int other) {  // 16 rows of A's parts as right operands
      const int at = (block * kBlock + lane / 16 * 8 + lane % 8) * kSquarePitch + other * kBlock + lane / 8 % 2 * 8;
      matrix::load4(a_high, A + at), matrix::load4(a_low, A_low + at);
    };
    const auto add = [&](float(&d)[2][4], const uint32_t(&high)[4], const uint32_t(&low)[4]) {
#pragma unroll
      for (int t = 0; t < 2; ++t) {
        matrix::multiply(d[t], high, a_high[2 * t], a_high[2 * t + 1]), matrix::multiply(d[t], low, a_high[2 * t], a_high[2 * t + 1]);
        matrix::multiply(d[t], high, a_low[2 * t], a_low[2 * t + 1]);
      }
    };
#pragma unroll
    for (int other = 0; other < block; ++other) {
      load(other);
#pragma unroll
      for (int m = 0; m < 2; ++m) add(x[m], solved[other][m], solved_low[other][m]);
    }
    load(block);
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      uint32_t(&high)[4] = solved[block][m];
      uint32_t(&low)[4] = solved_low[block][m];
      const auto part = [&] {
#pragma unroll
        for (int e = 0; e < 4; ++e) split(x[m][e / 2][e % 2 * 2], x[m][e / 2][e % 2 * 2 + 1], &high[e], &low[e]);
      };
      part();
#pragma unroll
      for (int e = 0; e < 8; ++e) x[m][e / 4][e % 4] = 0;
      add(x[m], high, low);
      part();
#pragma unroll
      for (int e = 0; e < 4; ++e) {  // 8 rows by 8 columns
        const int first_row = block * kBlock + e / 2 * 8, first_column = column0 + m * 16 + e % 2 * 8;
        if (values) {
          float* to = &out.u0[first_row + lane % 4 * 2][first_column + lane / 4];
          to[0] = x[m][e / 2][e % 2 * 2], to[kDim] = x[m][e / 2][e % 2 * 2 + 1];
        } else {
          const int r = first_row + lane / 4, c = first_column + lane % 4 * 2;
          *reinterpret_cast<uint32_t*>(&out.w[0][r][c]) = matrix::transpose(high[e]);
          *reinterpret_cast<uint32_t*>(&out.w[1][r][c]) = matrix::transpose(low[e]);
        }
      }
    }
  }
}

// The second kernel works in two phases a chunk, with w, q and S, then with b, k and u. kAhead: each phase's operands are fetched during
// the other; else they share their place, for cards with less shared memory.
template <bool kAhead>
struct ScanShared {  // byte offsets
  static constexpr int w = 0, q = w + 2 * kRows * kPitch * 2, b = kAhead ? q + kRows * kPitch * 2 : 0, k = b + 2 * kRows * kSquarePitch * 2,
                       work = (kAhead ? k : q) + kRows * kPitch * 2;
  static constexpr int total = work + 4 * kRows * kSlicePitch * 2;  // both parts of S [kDim], or of u and of the scaled u [kRows]
};
static_assert(ScanShared<false>::k + kRows * kPitch * 2 <= ScanShared<false>::work, "b and k fit where w and q were");
static_assert(2 * kDim == 4 * kRows, "S and u share their place");

// A block: (segment, value head, columns of the state), over the segment's chunks among [from, from + count).
template <bool kAhead>
__global__ void __launch_bounds__(kThreads, 2) chunk_scan_kernel(Chunks a) {
  using At = ScanShared<kAhead>;
  extern __shared__ __align__(16) uint8_t memory[];
  bf16 *W = reinterpret_cast<bf16*>(memory + At::w), *Q = reinterpret_cast<bf16*>(memory + At::q),
       *B = reinterpret_cast<bf16*>(memory + At::b), *K = reinterpret_cast<bf16*>(memory + At::k),
       *work = reinterpret_cast<bf16*>(memory + At::work);
  pdl_begin();
  const ops::ForestSegment s = a.segment[blockIdx.x];
  if (!runs_by_chunks(s)) return;
  int before = 0;  // chunks of earlier segments
  for (int i = 0; i < static_cast<int>(blockIdx.x); ++i)
    if (runs_by_chunks(a.segment[i])) before += (a.segment[i].row_count + kRows - 1) / kRows;
  const int begin = max(a.from, before), end = min(a.from + a.count, before + (s.row_count + kRows - 1) / kRows);
  if (begin >= end) return;
  const int head = blockIdx.y, key_head = head / (a.value_heads / a.key_heads), column0 = blockIdx.z * kColumns, warp = threadIdx.x / 32,
            lane = threadIdx.x % 32, keys = a.key_heads * kDim;
  const auto load = [&](int t, bool second) {  // w and q, or b and k
    const Tile& tile = a.tile(t, head);
    const int first = s.first_row + (t - before) * kRows, n = min(kRows, s.first_row + s.row_count - first);
    const bf16* c = a.c + (second ? keys : 0) + key_head * kDim;
    for (int i = threadIdx.x; i < kRows * (kDim / 8); i += kThreads) {
      const int r = i / (kDim / 8), d = i % (kDim / 8) * 8;
      matrix::copy16((second ? K : Q) + r * kPitch + d, c + static_cast<int64_t>(first + min(r, n - 1)) * a.c_stride + d, r < n);
    }
    if (second) {
      for (int i = threadIdx.x; i < 2 * kRows * (kRows / 8); i += kThreads) {
        const int r = i / (kRows / 8), j = i % (kRows / 8) * 8;
        matrix::copy16(B + r * kSquarePitch + j, &tile.b[0][0][0] + r * kRows + j, true);
      }
    } else {
      for (int i = threadIdx.x; i < 2 * kRows * (kDim / 8); i += kThreads) {
        const int r = i / (kDim / 8), d = i % (kDim / 8) * 8;
        matrix::copy16(W + r * kPitch + d, &tile.w[0][0][0] + r * kDim + d, true);
      }
    }
  };
  if (kAhead) load(begin, false);
  matrix::copy_commit();
  // A thread holds S of rows d and d + 8 in column pairs: the tensor cores' layout of a result.
  const int d0 = warp * 16 + lane / 4, pair = lane % 4 * 2;
  float* state = a.state + (static_cast<int64_t>(s.slot) * a.value_heads + head) * kDim * kDim + column0 + pair;
  float S[kColumns / 8][4];
#pragma unroll
  for (int c = 0; c < kColumns / 8; ++c) {
    const float2 x = *reinterpret_cast<const float2*>(state + d0 * kDim + c * 8),
                 y = *reinterpret_cast<const float2*>(state + (d0 + 8) * kDim + c * 8);
    S[c][0] = x.x, S[c][1] = x.y, S[c][2] = y.x, S[c][3] = y.y;
  }
  const bool queries = warp >= 4;
  const int i0 = warp % 4 * 16, i = i0 + lane / 4;  // rows i and i + 8 of the chunk
  bf16 *S_low = work + kDim * kSlicePitch, *u_low = work + kRows * kSlicePitch, *scaled = u_low + kRows * kSlicePitch,
       *scaled_low = scaled + kRows * kSlicePitch;
  const auto right = [&](uint32_t(&r)[kColumns / 16][4], const bf16* rows) {  // 16 rows of a slice, as the right side of products
#pragma unroll
    for (int c = 0; c < kColumns / 16; ++c) matrix::load4_transposed(r[c], rows + lane % 16 * kSlicePitch + c * 16 + lane / 16 * 8);
  };
  const auto multiply = [&](float(&d)[kColumns / 8][4], const uint32_t(&l)[4], const uint32_t(&r)[kColumns / 16][4]) {
#pragma unroll
    for (int c = 0; c < kColumns / 8; ++c) matrix::multiply(d[c], l, r[c / 2][c % 2 * 2], r[c / 2][c % 2 * 2 + 1]);
  };
  for (int t = begin; t < end; ++t) {
    const Tile& tile = a.tile(t, head);
    const int first = s.first_row + (t - before) * kRows, n = min(kRows, s.first_row + s.row_count - first);
#pragma unroll
    for (int c = 0; c < kColumns / 8; ++c)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int at = (d0 + 8 * half) * kSlicePitch + c * 8 + pair;
        uint32_t high, low;
        split(S[c][2 * half], S[c][2 * half + 1], &high, &low);
        *reinterpret_cast<uint32_t*>(work + at) = high, *reinterpret_cast<uint32_t*>(S_low + at) = low;
      }
    load(t, kAhead);  // of this chunk: b and k, or, without room, first of all w and q
    matrix::copy_commit();
    // Fetched here and used after the products.
    float u[kColumns / 8][4];
    const float keep = tile.keep, row_scale[2] = {queries ? tile.query[i] : tile.fold[i], queries ? tile.query[i + 8] : tile.fold[i + 8]};
    if (!queries)
#pragma unroll
      for (int c = 0; c < kColumns / 8; ++c) {
        const float2 x = *reinterpret_cast<const float2*>(&tile.u0[i][column0 + c * 8 + pair]),
                     y = *reinterpret_cast<const float2*>(&tile.u0[i + 8][column0 + c * 8 + pair]);
        u[c][0] = x.x, u[c][1] = x.y, u[c][2] = y.x, u[c][3] = y.y;
      }
    float product[kColumns / 8][4];
#pragma unroll
    for (int c = 0; c < kColumns / 8; ++c)
#pragma unroll
      for (int e = 0; e < 4; ++e) product[c][e] = 0;
    matrix::copy_wait<kAhead ? 1 : 0>();
    __syncthreads();
#pragma unroll 2
    for (int d = 0; d < kDim; d += 16) {  // w S, or q S
      const int at = (i0 + lane % 16) * kPitch + d + lane / 16 * 8;
      uint32_t left[4], high[kColumns / 16][4], low[kColumns / 16][4];
      matrix::load4(left, (queries ? Q : W) + at);
      right(high, work + d * kSlicePitch), right(low, S_low + d * kSlicePitch);
      multiply(product, left, high), multiply(product, left, low);
      if (!queries) {
        matrix::load4(left, W + kRows * kPitch + at);
        multiply(product, left, high);
      }
    }
    __syncthreads();  // w, q and S's parts are free
    if (!queries) {
#pragma unroll
      for (int c = 0; c < kColumns / 8; ++c)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int at = (i + 8 * half) * kSlicePitch + c * 8 + pair;
          const float x = u[c][2 * half] - product[c][2 * half], y = u[c][2 * half + 1] - product[c][2 * half + 1];
          uint32_t high, low;
          split(x, y, &high, &low);
          *reinterpret_cast<uint32_t*>(work + at) = high, *reinterpret_cast<uint32_t*>(u_low + at) = low;
          split(x * row_scale[half], y * row_scale[half], &high, &low);
          *reinterpret_cast<uint32_t*>(scaled + at) = high, *reinterpret_cast<uint32_t*>(scaled_low + at) = low;
        }
    }
    if (kAhead) {
      if (t + 1 < end) load(t + 1, false);
    } else {
      load(t, true);
    }
    matrix::copy_commit();
    matrix::copy_wait<kAhead ? 1 : 0>();
    __syncthreads();
    if (queries) {  // o = e^P q S + B u
#pragma unroll
      for (int c = 0; c < kColumns / 8; ++c)
#pragma unroll
        for (int e = 0; e < 4; ++e) product[c][e] *= row_scale[e / 2];
#pragma unroll
      for (int j = 0; j < kRows; j += 16) {
        if (j > i0) break;
        const int at = (i0 + lane % 16) * kSquarePitch + j + lane / 16 * 8;
        uint32_t left[4], left_low[4], high[kColumns / 16][4], low[kColumns / 16][4];
        matrix::load4(left, B + at), matrix::load4(left_low, B + kRows * kSquarePitch + at);
        right(high, work + j * kSlicePitch), right(low, u_low + j * kSlicePitch);
        multiply(product, left, high), multiply(product, left, low), multiply(product, left_low, high);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (i + 8 * half >= n) continue;
        bf16* o = a.o + static_cast<int64_t>(first + i + 8 * half) * a.o_stride + head * kDim + column0 + pair;
#pragma unroll
        for (int c = 0; c < kColumns / 8; ++c)
          *reinterpret_cast<uint32_t*>(o + c * 8) = matrix::pack(product[c][2 * half], product[c][2 * half + 1]);
      }
    }
#pragma unroll
    for (int c = 0; c < kColumns / 8; ++c)
#pragma unroll
      for (int e = 0; e < 4; ++e) S[c][e] *= keep;
#pragma unroll
    for (int j = 0; j < kRows; j += 16) {  // S <- e^{P_l} S + kᵀ (scaled u)
      uint32_t left[4], high[kColumns / 16][4], low[kColumns / 16][4];
      matrix::load4_transposed(left, K + (j + lane / 16 * 8 + lane % 8) * kPitch + warp * 16 + lane / 8 % 2 * 8);
      right(high, scaled + j * kSlicePitch), right(low, scaled_low + j * kSlicePitch);
      multiply(S, left, high), multiply(S, left, low);
    }
    __syncthreads();  // u's parts, b and k are free
  }
#pragma unroll
  for (int c = 0; c < kColumns / 8; ++c) {
    *reinterpret_cast<float2*>(state + d0 * kDim + c * 8) = make_float2(S[c][0], S[c][1]);
    *reinterpret_cast<float2*>(state + (d0 + 8) * kDim + c * 8) = make_float2(S[c][2], S[c][3]);
  }
}

// Once a kernel: one device a process, and set-up is not concurrent.
cudaError_t allow_shared() {
  static cudaError_t done = [] {
    const auto allow = [](auto kernel, size_t bytes) {
      return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
    };
    cudaError_t e = allow(chunk_prepare_kernel, PrepareShared::total);
    if (e == cudaSuccess) e = allow(chunk_scan_kernel<false>, ScanShared<false>::total);
    if (e != cudaSuccess) return e;
    // Where this is refused, the limit keeps the kernel from being chosen.
    if (allow(chunk_scan_kernel<true>, ScanShared<true>::total) != cudaSuccess) cudaGetLastError();
    return cudaSuccess;
  }();
  return done;
}

}  // namespace

bool has_chunks(const ops::DeltaRuleArgs& a, const ops::DeltaShape& shape, const DeltaWork& work) {
  return shape.key_dim == kDim && shape.value_dim == kDim && a.c.stride % 8 == 0 && reinterpret_cast<uintptr_t>(a.c.data) % 16 == 0 &&
         a.o.stride % 2 == 0 && reinterpret_cast<uintptr_t>(a.o.data) % 4 == 0 && work.tiles > 0 &&
         work.shared_limit >= static_cast<size_t>(ScanShared<false>::total);
}

cudaError_t delta_chunks(cudaStream_t stream, const ops::DeltaRuleArgs& a, const DeltaStorage& states, const DeltaWork& work) {
  const ops::Forest& f = *a.forest;
  const ops::DeltaShape& s = states.shape;
  Chunks c{f.segment,
           as_bf16(a.c),
           as_bf16(a.a),
           as_bf16(a.b),
           a.c.stride,
           a.a.stride,
           a.b.stride,
           a.o.stride,
           as_f32(a.a_log),
           as_f32(a.dt_bias),
           states.state + static_cast<int64_t>(a.layer) * states.slots * s.value_heads * kDim * kDim,
           as_bf16_out(a.o),
           work.tile,
           f.segments,
           s.key_heads,
           s.value_heads,
           0,
           0};
  // At most so many, whatever the segments: their sizes are not the host's to use where a pass is replayed.
  const int most =
      f.segments == 1 ? (f.max_segment_rows + kRows - 1) / kRows : f.rows / kRows + std::min(f.segments, f.rows / kChunkedRows);
  const bool ahead = work.shared_limit >= static_cast<size_t>(ScanShared<true>::total);
  const auto scan = ahead ? chunk_scan_kernel<true> : chunk_scan_kernel<false>;
  const size_t scan_bytes = ahead ? ScanShared<true>::total : ScanShared<false>::total;
  cudaError_t e = allow_shared();
  for (c.from = 0; c.from < most && e == cudaSuccess; c.from += c.count) {
    c.count = std::min(work.tiles, most - c.from);
    e = launch(chunk_prepare_kernel, dim3(c.count, s.value_heads), dim3(kThreads), PrepareShared::total, stream, c);
    if (e != cudaSuccess) return e;
    e = launch(scan, dim3(f.segments, s.value_heads, kDim / kColumns), dim3(kThreads), scan_bytes, stream, c);
  }
  return e;
}

}  // namespace ddtree::kernels
