// Attention by tensor cores: trees, blocks, prompts and single rows. Contract: ops/attention.h; launched by attention.cu.
//
// The query heads that share a K/V head and the rows of a segment are one operand: item m of a segment is (row m / ratio, head m % ratio),
// so any ratio and any number of rows fill tiles alike, and K and V are read once for all of them. A segment's keys are one sequence:
// committed positions by page, then the rows of the pass, which a bit mask of ancestors hides from those that do not descend from them
// (flash-attention's running maximum and sum; flash-decoding's split over the context, joined by attention_join).
//
// Segments of few items (at most 16: plain decoding): four warps take a quarter of a tile's keys each and join at the end. In others each
// warp takes 16 items and all keys; where heads of 256 leave room for one block a multiprocessor it has eight warps, two for each tensor
// core. Which of the two follows from the segment alone, as its parts do (attention.cuh), so a row's bits do not depend on the pass.
// Probabilities are rounded to BF16 for the second product; sums and outputs stay float32.
#include <algorithm>

#include "kernels/attention.cuh"
#include "kernels/common.cuh"
#include "kernels/matrix.cuh"

namespace ddtree::kernels {
namespace {

constexpr int kFewItems = 16, kFewWarps = 4;

template <int kDim, bool kFew, int kKeys, int kStages, int kWarps>
struct TileShape {
  static_assert(kKeyTile % kKeys == 0 && (!kFew || kKeys == 64));
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kItems = kFew ? kFewItems : kWarps * 16;
  static constexpr int kRowBytes = kDim * 2, kChunks = kDim / 8;
  static constexpr int kStageBytes = 2 * kKeys * kRowBytes;
  static constexpr int kQueryBytes = kItems * kRowBytes;
  static constexpr int kMaskBytes = kItems * kMaskWords * 4;
  static constexpr int kJoinBytes = kFew ? kFewWarps * 16 * (kDim + 4) * 4 : 0;  // aliases the stages
  static constexpr int kBytes = kQueryBytes + kMaskBytes + (kStages * kStageBytes > kJoinBytes ? kStages * kStageBytes : kJoinBytes);
};

// Chunk c (16 bytes) of row r of a tile whose rows are kChunks chunks: rows that ldmatrix reads together fall into different banks.
template <int kChunks>
__device__ __forceinline__ int swizzled(int r, int c) {
  return r * kChunks + (c ^ (r & 7));
}

template <int kDim, bool kFew, int kKeys, int kStages, int kWarps>
__device__ __forceinline__ void attend(const AttentionArgsDevice& a, const AttentionUnit& u) {
  using Shape = TileShape<kDim, kFew, kKeys, kStages, kWarps>;
  constexpr int kTileThreads = Shape::kThreads;
  constexpr int kChunks = Shape::kChunks, kItems = Shape::kItems;
  extern __shared__ __align__(128) uint8_t memory[];
  uint4* query = reinterpret_cast<uint4*>(memory);
  uint32_t* mask = reinterpret_cast<uint32_t*>(memory + Shape::kQueryBytes);  // [rows of the tile][kMaskWords]
  uint8_t* stages = memory + Shape::kQueryBytes + Shape::kMaskBytes;
  const int ratio = a.ratio, kv = blockIdx.y;
  const ops::ForestSegment s = u.s;
  const int item0 = u.tile * kItems, items = min(kItems, s.row_count * ratio - item0), row0 = item0 / ratio,
            rows = (item0 + items - 1) / ratio - row0 + 1;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t token_stride = static_cast<int64_t>(a.kv_heads) * kDim;

  // Keys of this part. A certain row sees nothing past itself, so a tile of prompt rows ends early.
  const int own = a.bidirectional ? s.row_count : s.certain ? row0 + rows : s.row_count;
  const int lowest = attention_lowest(a, s.context), end = s.context + own, all = (end - lowest + kKeys - 1) / kKeys;
  const int per = u.parts.per * (kKeyTile / kKeys);
  const int first = a.sequential ? 0 : u.part * per, last = a.sequential ? all : min(all, first + per);
  const auto slot_of = [&](int row) {  // of a row of the segment
    return static_cast<int64_t>(u.first_slot + row + (a.sequential ? 0 : u.part * s.row_count)) * a.heads;
  };
  if (first >= last) {  // parts that only later rows of the segment reach
    for (int m = threadIdx.x; m < items; m += kTileThreads)
      a.sums[slot_of((item0 + m) / ratio) + kv * ratio + (item0 + m) % ratio] = make_float2(-INFINITY, 0.0f);
    return;
  }

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
  const auto load_first = [&](int from, int to) {
#pragma unroll
    for (int i = 0; i < kStages - 1; ++i) {
      if (from + i < to) load(from + i, i);
      else matrix::copy_commit();
    }
  };
  load_first(first, min(last, first + per));

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
  constexpr int kMine = kFew ? kKeys / kFewWarps : kKeys;  // keys of a tile that this warp takes
  const int key0 = kFew ? warp * kMine : 0, m0 = kFew ? 0 : warp * 16;
  const bool busy = kFew ? warp < kFewWarps : m0 < items;
  int row_of[2], position[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int m = min(m0 + lane / 4 + 8 * i, items - 1);
    row_of[i] = (item0 + m) / ratio;
    position[i] = a.position[s.first_row + row_of[i]];
  }
  const float scale = a.scale * kLog2e;
  bool begun = false;  // a part went before
  float all_top[2] = {-INFINITY, -INFINITY}, all_sum[2] = {0, 0};

  // What of a part's result this thread has goes to its slot, or is folded into what came before and, at the last, put out.
  const auto give = [&](int m, int d, float x, float y, FoldWeight w, float whole, bool at_last) {  // two neighbouring dimensions of item m
    const int row = (item0 + m) / ratio, head = kv * ratio + (item0 + m) % ratio;
    if (u.parts.count > 1) {
      float2* state = reinterpret_cast<float2*>(a.partial + (slot_of(row) + head) * kDim + d);
      if (!a.sequential) {
        *state = make_float2(x, y);
        return;
      }
      const float2 before = begun ? *state : make_float2(0.0f, 0.0f);
      x = fold(before.x, w, x), y = fold(before.y, w, y);
      if (!at_last) {
        *state = make_float2(x, y);
        return;
      }
    }
    attention_put(a, s.first_row + row, s.first_row + row, head, d, x, y, whole);
  };
  const auto tell = [&](int m, float part_top, float part_sum) {  // of a part that stands alone
    if (u.parts.count > 1 && !a.sequential)
      a.sums[slot_of((item0 + m) / ratio) + kv * ratio + (item0 + m) % ratio] = make_float2(part_top, part_sum);
  };
  const auto finish_part = [&](bool at_last) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], 1);
      sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], 2);
    }
    if constexpr (kFew) {
      // Join the warps: each has 16 items over its share of the keys. No copy is under way into the stages that the exchange takes.
      constexpr int kWidth = kDim + 4;
      __shared__ float whole[kFewItems], whole_top[kFewItems], share[kFewItems][kFewWarps];
      __shared__ FoldWeight weight[kFewItems];
      float* join = reinterpret_cast<float*>(stages);
      if (warp < kFewWarps) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float* mine = join + (warp * 16 + lane / 4 + 8 * i) * kWidth;
#pragma unroll
          for (int d = 0; d < kDim / 8; ++d)
            *reinterpret_cast<float2*>(mine + d * 8 + lane % 4 * 2) = make_float2(o[d][2 * i], o[d][2 * i + 1]);
          if (lane % 4 == 0) mine[kDim] = top[i], mine[kDim + 1] = sum[i];
        }
      }
      __syncthreads();
      if (threadIdx.x < items) {
        const int m = threadIdx.x;
        float best = -INFINITY, total = 0;
        for (int w = 0; w < kFewWarps; ++w) best = fmaxf(best, join[(w * 16 + m) * kWidth + kDim]);
        for (int w = 0; w < kFewWarps; ++w) {
          const float t = join[(w * 16 + m) * kWidth + kDim];
          share[m][w] = t == -INFINITY ? 0.0f : exp2_fast(t - best);
          total = __fmaf_rn(share[m][w], join[(w * 16 + m) * kWidth + kDim + 1], total);
        }
        tell(m, best, total);
        if (!begun) whole_top[m] = -INFINITY, whole[m] = 0;
        const float new_top = fmaxf(whole_top[m], best);
        weight[m] = fold_weight(whole_top[m], best, new_top);
        whole_top[m] = new_top, whole[m] = fold(whole[m], weight[m], total);
      }
      __syncthreads();
      for (int i = threadIdx.x; i < items * (kDim / 2); i += kTileThreads) {
        const int m = i / (kDim / 2), d = i % (kDim / 2) * 2;
        float x = 0, y = 0;
#pragma unroll
        for (int w = 0; w < kFewWarps; ++w) {
          const float* one = join + (w * 16 + m) * kWidth;
          x = __fmaf_rn(share[m][w], one[d], x), y = __fmaf_rn(share[m][w], one[d + 1], y);
        }
        give(m, d, x, y, weight[m], whole[m], at_last);
      }
      __syncthreads();
    } else {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int m = m0 + lane / 4 + 8 * i;
        if (m >= items) continue;
        if (lane % 4 == 0) tell(m, top[i], sum[i]);
        const float new_top = fmaxf(all_top[i], top[i]);
        const FoldWeight w = fold_weight(all_top[i], top[i], new_top);
        all_top[i] = new_top, all_sum[i] = fold(all_sum[i], w, sum[i]);
#pragma unroll
        for (int d = 0; d < kDim / 8; ++d) give(m, d * 8 + lane % 4 * 2, o[d][2 * i], o[d][2 * i + 1], w, all_sum[i], at_last);
      }
    }
    begun = true;
#pragma unroll
    for (int i = 0; i < kDim / 8; ++i) o[i][0] = o[i][1] = o[i][2] = o[i][3] = 0;
    top[0] = top[1] = -INFINITY, sum[0] = sum[1] = 0;
  };

  for (int from = first; from < last; from += per) {
    const int to = min(last, from + per);
    if (from > first) load_first(from, to);
    for (int t = from; t < to; ++t) {
      if (t + kStages - 1 < to) load(t + kStages - 1, (t - from + kStages - 1) % kStages);
      else matrix::copy_commit();
      matrix::copy_wait<kStages - 1>();
      __syncthreads();
      const uint4* k = reinterpret_cast<const uint4*>(stages + (t - from) % kStages * Shape::kStageBytes);
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
          const float from = m == -INFINITY ? 0.0f : m, keep = exp2_fast(top[i] - from);
          top[i] = m;
          float part = 0;
#pragma unroll
          for (int n = 0; n < kMine / 8; ++n) {
            score[n][2 * i] = exp2_fast(score[n][2 * i] - from), score[n][2 * i + 1] = exp2_fast(score[n][2 * i + 1] - from);
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
    finish_part(to == last);
  }
}

template <int kDim, int kKeys, int kStages, int kFewStages, int kWarps>
__global__ void __launch_bounds__(kWarps * 32) attention_tile_kernel(AttentionArgsDevice a) {
  pdl_begin();
  AttentionUnit u;
  if (!find_unit(a, blockIdx.x, &u)) return;
  if (u.s.row_count * (a.ratio) <= kFewItems) attend<kDim, true, 64, kFewStages, kWarps>(a, u);
  else attend<kDim, false, kKeys, kStages, kWarps>(a, u);
}

template <int kDim, int kKeys, int kStages, int kFewStages, int kWarps>
cudaError_t run(cudaStream_t stream, AttentionArgsDevice a, const ops::Forest& f, const AttentionWork& work) {
  using Shape = TileShape<kDim, false, kKeys, kStages, kWarps>;
  constexpr int kBytes = std::max(Shape::kBytes, TileShape<kDim, true, 64, kFewStages, kWarps>::kBytes);
  const auto kernel = attention_tile_kernel<kDim, kKeys, kStages, kFewStages, kWarps>;
  static const cudaError_t once = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (once != cudaSuccess) return once;
  a.tile_items = Shape::kItems;
  AttentionPlan plan;
  if (!attention_plan(&a, f, work, &plan)) return cudaErrorNotSupported;
  const cudaError_t e = launch(kernel, dim3(plan.units, a.kv_heads), dim3(Shape::kThreads), kBytes, stream, a);
  return e == cudaSuccess && plan.join ? attention_join(stream, a, f.rows, plan) : e;
}

}  // namespace

cudaError_t attention_tiles(cudaStream_t stream, AttentionArgsDevice a, const ops::Forest& f, const AttentionWork& work) {
  if (f.max_segment_rows == 0 || f.max_tree_rows > kMaskWords * 32 || a.q_stride % 8 || a.o_stride % 2) return cudaErrorNotSupported;
  switch (a.dim) {
    case 64: return run<64, 64, 2, 2, 4>(stream, a, f, work);
    case 128: return run<128, 64, 2, 2, 4>(stream, a, f, work);
    case 256:
      return work.shared_limit >= 200 * 1024 ? run<256, 64, 2, 2, 8>(stream, a, f, work) : run<256, 32, 1, 1, 4>(stream, a, f, work);
    default: return cudaErrorNotSupported;
  }
}

}  // namespace ddtree::kernels
