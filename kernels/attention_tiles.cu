// Attention by tensor cores: trees, blocks, prompts and single rows. Contract: ops/attention.h; launched by attention.cu.
//
// The query heads that share a K/V head and the rows of a segment are one operand: item m of a segment is (row m / ratio, head m % ratio),
// so any ratio and any number of rows fill tiles alike, and K and V are read once for all of them. A segment's keys are one sequence:
// committed positions by page, then the rows of the pass, which a bit mask of ancestors hides from those that do not descend from them
// (flash-attention's running maximum and sum; flash-decoding's split over the context, joined by attention_join).
//
// Few items (at most 16 a segment: plain decoding): the four warps take a quarter of a tile's keys each and join at the end. Otherwise each
// takes 16 items and all keys; where heads of 256 leave room for one block a multiprocessor it has eight warps, two for each tensor core.
// Probabilities are rounded to BF16 for the second product; sums and outputs stay float32.
#include <algorithm>

#include "kernels/attention.cuh"
#include "kernels/common.cuh"
#include "kernels/matrix.cuh"

namespace ddtree::kernels {
namespace {

constexpr int kMaskWords = 16;  // own rows that a mask covers: 512
constexpr float kLog2e = 1.4426950408889634f;

template <int kDim, bool kFew, int kKeys, int kStages, int kWarps>
struct TileShape {
  static_assert(!kFew || kWarps == 4);
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kItems = kFew ? 16 : kWarps * 16;
  static constexpr int kRowBytes = kDim * 2, kChunks = kDim / 8;
  static constexpr int kStageBytes = 2 * kKeys * kRowBytes;
  static constexpr int kQueryBytes = kItems * kRowBytes;
  static constexpr int kMaskBytes = kItems * kMaskWords * 4;
  static constexpr int kJoinBytes = kFew ? 4 * 16 * (kDim + 4) * 4 : 0;  // aliases the stages
  static constexpr int kBytes = kQueryBytes + kMaskBytes + (kStages * kStageBytes > kJoinBytes ? kStages * kStageBytes : kJoinBytes);
};

// Chunk c (16 bytes) of row r of a tile whose rows are kChunks chunks: rows that ldmatrix reads together fall into different banks.
template <int kChunks>
__device__ __forceinline__ int swizzled(int r, int c) {
  return r * kChunks + (c ^ (r & 7));
}

template <int kDim, bool kFew, int kKeys, int kStages, int kWarps>
__global__ void __launch_bounds__(kWarps * 32) attention_tile_kernel(AttentionArgsDevice a) {
  using Shape = TileShape<kDim, kFew, kKeys, kStages, kWarps>;
  constexpr int kTileThreads = Shape::kThreads;
  constexpr int kChunks = Shape::kChunks, kItems = Shape::kItems;
  extern __shared__ __align__(128) uint8_t memory[];
  uint4* query = reinterpret_cast<uint4*>(memory);
  uint32_t* mask = reinterpret_cast<uint32_t*>(memory + Shape::kQueryBytes);  // [rows of the tile][kMaskWords]
  uint8_t* stages = memory + Shape::kQueryBytes + Shape::kMaskBytes;
  pdl_begin();
  const int ratio = a.heads / a.kv_heads, kv = blockIdx.y;
  int segment = 0, tile = blockIdx.x;
  for (; segment < a.segments; ++segment) {
    const int tiles = (a.segment[segment].row_count * ratio + kItems - 1) / kItems;
    if (tile < tiles) break;
    tile -= tiles;
  }
  if (segment == a.segments) return;
  const ops::ForestSegment s = a.segment[segment];
  const int item0 = tile * kItems, items = min(kItems, s.row_count * ratio - item0), row0 = item0 / ratio,
            rows = (item0 + items - 1) / ratio - row0 + 1;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t token_stride = static_cast<int64_t>(a.kv_heads) * kDim;

  // Keys of this part. A certain row sees nothing past itself, so a tile of prompt rows ends early.
  const int own = a.bidirectional ? s.row_count : s.certain ? row0 + rows : s.row_count;
  const int lowest = a.window > 0 ? max(0, s.context - a.window + 1) / kKeys * kKeys : 0;
  const int end = s.context + own, all = (end - lowest + kKeys - 1) / kKeys, per = (all + a.splits - 1) / a.splits;
  const int first = blockIdx.z * per, last = min(all, first + per);

  const auto load = [&](int t, int stage) {
    uint4* k = reinterpret_cast<uint4*>(stages + stage * Shape::kStageBytes);
    uint4* v = k + kKeys * kChunks;
#pragma unroll 4
    for (int i = threadIdx.x; i < kKeys * kChunks; i += kTileThreads) {
      const int r = i / kChunks, c = i % kChunks, key = lowest + t * kKeys + r;
      const bf16 *from_k = a.scratch_k, *from_v = a.scratch_v;
      if (key < s.context) {
        const int64_t place = static_cast<int64_t>(a.pages[s.first_page + key / a.page_size]) * a.page_size + key % a.page_size;
        from_k = a.pool_k + place * token_stride, from_v = a.pool_v + place * token_stride;
      } else if (key < end) {
        const int64_t row = s.first_row + key - s.context;
        from_k += row * token_stride, from_v += row * token_stride;
      }
      const int at = swizzled<kChunks>(r, c);
      matrix::copy16(k + at, from_k + kv * kDim + c * 8, key < end);
      matrix::copy16(v + at, from_v + kv * kDim + c * 8, key < end);
    }
    matrix::copy_commit();
  };
#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) {
    if (first + i < last) load(first + i, i);
    else matrix::copy_commit();
  }

  for (int i = threadIdx.x; i < kItems * kChunks; i += kTileThreads) {
    const int m = i / kChunks, c = i % kChunks, row = (item0 + m) / ratio, head = kv * ratio + (item0 + m) % ratio;
    uint4 q = {0, 0, 0, 0};
    if (m < items) q = *reinterpret_cast<const uint4*>(a.q + (s.first_row + row) * a.q_stride + head * kDim + c * 8);
    query[swizzled<kChunks>(m, c)] = q;
  }
  if (!a.bidirectional && !s.certain) {
    for (int i = threadIdx.x; i < rows * kMaskWords; i += kTileThreads) mask[i] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < rows; i += kTileThreads)
      for (int j = s.first_row + row0 + i; j >= 0; j = a.parent[j])
        mask[i * kMaskWords + (j - s.first_row) / 32] |= 1u << ((j - s.first_row) % 32);
  }
  __syncthreads();

  float o[kDim / 8][4], top[2] = {-INFINITY, -INFINITY}, sum[2] = {0, 0};
#pragma unroll
  for (int i = 0; i < kDim / 8; ++i) o[i][0] = o[i][1] = o[i][2] = o[i][3] = 0;
  constexpr int kMine = kFew ? kKeys / 4 : kKeys;  // keys of a tile that this warp takes
  const int key0 = kFew ? warp * kMine : 0, m0 = kFew ? 0 : warp * 16;
  const bool busy = m0 < items;
  int row_of[2], position[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int m = min(m0 + lane / 4 + 8 * i, items - 1);
    row_of[i] = (item0 + m) / ratio;
    position[i] = a.position[s.first_row + row_of[i]];
  }
  const float scale = a.scale * kLog2e;

  for (int t = first; t < last; ++t) {
    if (t + kStages - 1 < last) load(t + kStages - 1, (t - first + kStages - 1) % kStages);
    else matrix::copy_commit();
    matrix::copy_wait<kStages - 1>();
    __syncthreads();
    const uint4* k = reinterpret_cast<const uint4*>(stages + (t - first) % kStages * Shape::kStageBytes);
    const uint4* v = k + kKeys * kChunks;
    if (busy) {
      float score[kMine / 8][4];
#pragma unroll
      for (int i = 0; i < kMine / 8; ++i) score[i][0] = score[i][1] = score[i][2] = score[i][3] = 0;
#pragma unroll
      for (int d = 0; d < kDim / 16; ++d) {
        uint32_t q[4];
        matrix::load4(q, query + swizzled<kChunks>(m0 + lane % 16, 2 * d + lane / 16));
#pragma unroll
        for (int n = 0; n < kMine / 16; ++n) {
          uint32_t b[4];
          matrix::load4(b, k + swizzled<kChunks>(key0 + n * 16 + lane / 16 * 8 + lane % 8, 2 * d + lane / 8 % 2));
          matrix::multiply(score[2 * n], q, b[0], b[1]);
          matrix::multiply(score[2 * n + 1], q, b[2], b[3]);
        }
      }
      const int base = lowest + t * kKeys + key0;
      const bool plain = base + kMine <= s.context && a.window == 0;  // all of it is seen by every row
#pragma unroll
      for (int n = 0; n < kMine / 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float x = score[n][e] * scale;
          if (!plain) {
            const int key = base + n * 8 + lane % 4 * 2 + e % 2, i = e / 2, j = key - s.context;
            bool seen;
            if (j < 0) seen = a.window == 0 || key > position[i] - a.window;
            else if (j >= own) seen = false;
            else {
              seen =
                  a.bidirectional || (s.certain ? j <= row_of[i] : (mask[(row_of[i] - row0) * kMaskWords + j / 32] >> (j % 32) & 1) != 0);
              if (a.window > 0 && seen) seen = a.position[s.first_row + j] > position[i] - a.window;
            }
            if (!seen) x = -INFINITY;
          }
          score[n][e] = x;
        }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float m = top[i];
#pragma unroll
        for (int n = 0; n < kMine / 8; ++n) m = fmaxf(m, fmaxf(score[n][2 * i], score[n][2 * i + 1]));
        m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 1));
        m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 2));
        const float from = m == -INFINITY ? 0.0f : m, keep = exp2f(top[i] - from);
        top[i] = m;
        float part = 0;
#pragma unroll
        for (int n = 0; n < kMine / 8; ++n) {
          score[n][2 * i] = exp2f(score[n][2 * i] - from), score[n][2 * i + 1] = exp2f(score[n][2 * i + 1] - from);
          part += score[n][2 * i] + score[n][2 * i + 1];
        }
        sum[i] = sum[i] * keep + part;
#pragma unroll
        for (int d = 0; d < kDim / 8; ++d) o[d][2 * i] *= keep, o[d][2 * i + 1] *= keep;
      }
#pragma unroll
      for (int n = 0; n < kMine / 16; ++n) {
        const uint32_t p[4] = {matrix::pack(score[2 * n][0], score[2 * n][1]), matrix::pack(score[2 * n][2], score[2 * n][3]),
                               matrix::pack(score[2 * n + 1][0], score[2 * n + 1][1]),
                               matrix::pack(score[2 * n + 1][2], score[2 * n + 1][3])};
#pragma unroll
        for (int d = 0; d < kDim / 16; ++d) {
          uint32_t b[4];
          matrix::load4_transposed(b, v + swizzled<kChunks>(key0 + n * 16 + lane % 16, 2 * d + lane / 16));
          matrix::multiply(o[2 * d], p, b[0], b[1]);
          matrix::multiply(o[2 * d + 1], p, b[2], b[3]);
        }
      }
    }
    __syncthreads();  // the stage may be overwritten
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], 1);
    sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], 2);
    if (top[i] != -INFINITY) top[i] *= 1.0f / kLog2e;  // to natural units, as attention_join reads them
  }

  const auto put = [&](int m, int d, float x, float y, float m_top, float m_sum) {  // two neighbouring dimensions of one item
    const int row = s.first_row + (item0 + m) / ratio, head = kv * ratio + (item0 + m) % ratio;
    if (a.splits == 1) {
      x /= m_sum, y /= m_sum;
      if (a.gate) {
        const bf16* g = a.gate + row * a.gate_stride + head * 2 * kDim + d;
        x *= sigmoid(to_float(g[0])), y *= sigmoid(to_float(g[1]));
      }
      *reinterpret_cast<uint32_t*>(a.o + row * a.o_stride + head * kDim + d) = matrix::pack(x, y);
    } else {
      float* part = a.partial + ((static_cast<int64_t>(row) * a.heads + head) * a.splits + blockIdx.z) * (kDim + 2);
      *reinterpret_cast<float2*>(part + d) = make_float2(x, y);
      if (d == 0) *reinterpret_cast<float2*>(part + kDim) = make_float2(m_top, m_sum);
    }
  };
  if constexpr (kFew) {
    // Join the warps: each has 16 items over its share of the keys.
    constexpr int kWidth = kDim + 4;
    float* join = reinterpret_cast<float*>(stages);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float* mine = join + (warp * 16 + lane / 4 + 8 * i) * kWidth;
#pragma unroll
      for (int d = 0; d < kDim / 8; ++d)
        *reinterpret_cast<float2*>(mine + d * 8 + lane % 4 * 2) = make_float2(o[d][2 * i], o[d][2 * i + 1]);
      if (lane % 4 == 0) mine[kDim] = top[i], mine[kDim + 1] = sum[i];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < items * (kDim / 2); i += kTileThreads) {
      const int m = i / (kDim / 2), d = i % (kDim / 2) * 2;
      float best = -INFINITY, total = 0, x = 0, y = 0;
#pragma unroll
      for (int w = 0; w < 4; ++w) best = fmaxf(best, join[(w * 16 + m) * kWidth + kDim]);
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const float* one = join + (w * 16 + m) * kWidth;
        if (one[kDim] == -INFINITY) continue;
        const float e = __expf(one[kDim] - best);
        total += e * one[kDim + 1], x += e * one[d], y += e * one[d + 1];
      }
      put(m, d, x, y, best, total);
    }
  } else {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int m = m0 + lane / 4 + 8 * i;
      if (m >= items) continue;
#pragma unroll
      for (int d = 0; d < kDim / 8; ++d) put(m, d * 8 + lane % 4 * 2, o[d][2 * i], o[d][2 * i + 1], top[i], sum[i]);
    }
  }
}

template <int kDim, bool kFew, int kKeys, int kStages, int kWarps>
cudaError_t run(cudaStream_t stream, AttentionArgsDevice a, int rows, int64_t keys, int64_t partial_floats, int multiprocessors) {
  using Shape = TileShape<kDim, kFew, kKeys, kStages, kWarps>;
  static const cudaError_t once = cudaFuncSetAttribute(attention_tile_kernel<kDim, kFew, kKeys, kStages, kWarps>,
                                                       cudaFuncAttributeMaxDynamicSharedMemorySize, Shape::kBytes);
  if (once != cudaSuccess) return once;
  const int ratio = a.heads / a.kv_heads;
  // Tiles of all segments, at most: each segment's last one may be partly empty.
  const int tiles = std::min(rows * ratio / Shape::kItems + a.segments, rows * ratio);
  const int64_t blocks = static_cast<int64_t>(tiles) * a.kv_heads, resident = multiprocessors * std::max(1, 220 * 1024 / Shape::kBytes);
  int64_t splits = std::min<int64_t>((keys + kKeys - 1) / kKeys, std::max<int64_t>(1, resident / blocks));
  splits = std::min(splits, partial_floats / (static_cast<int64_t>(rows) * a.heads * (kDim + 2)));
  a.splits = static_cast<int>(std::max<int64_t>(splits, 1));
  const cudaError_t e = launch(attention_tile_kernel<kDim, kFew, kKeys, kStages, kWarps>, dim3(tiles, a.kv_heads, a.splits),
                               dim3(Shape::kThreads), Shape::kBytes, stream, a);
  if (e != cudaSuccess || a.splits == 1) return e;
  return attention_join(stream, a, rows);
}

}  // namespace

cudaError_t attention_tiles(cudaStream_t stream, const AttentionArgsDevice& a, const ops::Forest& f, int64_t partial_floats,
                            int multiprocessors, size_t shared_limit) {
  const int ratio = a.heads / a.kv_heads;
  if (f.max_segment_rows == 0 || f.max_tree_rows > kMaskWords * 32 || a.q_stride % 8 || a.o_stride % 2) return cudaErrorNotSupported;
  const int64_t keys = (a.window > 0 ? std::min<int64_t>(a.window, f.max_position) : f.max_position) + 1 + f.max_segment_rows;
  const bool few = f.max_segment_rows * ratio <= 16, large = shared_limit >= 200 * 1024;
  const auto go = [&]<int kDim, bool kFew, int kKeys, int kStages, int kWarps = 4>() {
    return run<kDim, kFew, kKeys, kStages, kWarps>(stream, a, f.rows, keys, partial_floats, multiprocessors);
  };
  switch (a.dim) {
    case 64: return few ? go.template operator()<64, true, 64, 2>() : go.template operator()<64, false, 64, 2>();
    case 128: return few ? go.template operator()<128, true, 64, 2>() : go.template operator()<128, false, 64, 2>();
    case 256:
      if (!large) return few ? go.template operator()<256, true, 64, 1>() : go.template operator()<256, false, 32, 1>();
      if (few) return go.template operator()<256, true, 64, 2>();
      // Few keys are better spread over more blocks: for 96 items 37 against 51 us at 1,000 keys, but 92 against 78 at 8,000.
      return f.max_segment_rows * ratio > 128 || keys > 4096 ? go.template operator()<256, false, 64, 2, 8>()
                                                             : go.template operator()<256, false, 64, 2>();
    default: return cudaErrorNotSupported;
  }
}

}  // namespace ddtree::kernels
