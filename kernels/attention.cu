// attention_prepare, attention, draft_attention, draft_context, kv_commit. Contract: ops/attention.h.
//
// The plain form of attention, for what the forms by tensor cores do not take (lists of rows, other head sizes): a block takes one row and
// one kv head with all the query heads that read it, and a part of the context; a second kernel joins the parts. One warp a key at a time,
// lanes over the head's dimensions. The row's path is one sequence of positions: committed ones by page, then its ancestors in scratch. How
// many parts there are follows from the row's own context, so a row's bits do not depend on the pass.
#include <algorithm>

#include "kernels/attention.cuh"
#include "kernels/common.cuh"
#include "kernels/kernels.h"
#include "kernels/matrix.cuh"

namespace ddtree::kernels {
namespace {

// One warp a (row, head slot): query heads, then K heads, then V heads.
struct Prepare {
  const bf16* packed;
  int64_t stride;
  const float *q_norm, *k_norm, *cos, *sin;
  const int32_t *position, *place, *segment_of;
  const ops::ForestSegment* segment;
  bf16 *q, *scratch_k, *scratch_v, *pool_k, *pool_v;
  int64_t q_stride;
  int rows, heads, kv_heads, rotary;
  bool gate, aligned;
  float eps;
};

// kPer neighbouring BF16 values, in one access where the rows' strides allow it.
template <int kPer>
__device__ __forceinline__ void load_values(const bf16* from, bool aligned, bf16 (&v)[kPer]) {
  if constexpr (kPer == 8) {
    if (aligned) return void(*reinterpret_cast<uint4*>(v) = *reinterpret_cast<const uint4*>(from));
  } else if constexpr (kPer == 4) {
    if (aligned) return void(*reinterpret_cast<uint2*>(v) = *reinterpret_cast<const uint2*>(from));
  }
#pragma unroll
  for (int i = 0; i < kPer; ++i) v[i] = from[i];
}
template <int kPer>
__device__ __forceinline__ void store_values(bf16* to, bool aligned, const bf16 (&v)[kPer]) {
  if constexpr (kPer == 8) {
    if (aligned) return void(*reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(v));
  } else if constexpr (kPer == 4) {
    if (aligned) return void(*reinterpret_cast<uint2*>(to) = *reinterpret_cast<const uint2*>(v));
  }
#pragma unroll
  for (int i = 0; i < kPer; ++i) to[i] = v[i];
}

// Norms (w · x / rms) and rotates one head; the lane has dimensions lane · kPer ….
template <int kPer>
struct NormRotate {
  alignas(16) float weight[kPer];
  float c[kPer], s[kPer];

  // Constants alone: under way before the kernel before this one has finished. cos, sin: of the row's position.
  __device__ __forceinline__ void fetch(const float* w, int rotary, const float* cos, const float* sin, int lane) {
    const int first = lane * kPer, half = rotary / 2;
    if constexpr (kPer % 4 == 0) {
#pragma unroll
      for (int i = 0; i < kPer; i += 4) *reinterpret_cast<float4*>(weight + i) = *reinterpret_cast<const float4*>(w + first + i);
    } else {
#pragma unroll
      for (int i = 0; i < kPer; ++i) weight[i] = w[first + i];
    }
    if (first >= rotary) return;
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      const int d = first + i, pair = d < half ? d : d - half;
      c[i] = d < rotary ? cos[pair] : 1.0f, s[i] = d < rotary ? sin[pair] : 0.0f;
    }
  }
  // The lane meets the other half of its pairs in `buffer`.
  __device__ __forceinline__ void apply(bf16 (&v)[kPer], float eps, int rotary, float* buffer, int lane) const {
    const int first = lane * kPer, half = rotary / 2;
    float x[kPer], sum = 0;
#pragma unroll
    for (int i = 0; i < kPer; ++i) x[i] = to_float(v[i]), sum += x[i] * x[i];
    const float scale = rsqrtf(warp_sum(sum) / static_cast<float>(32 * kPer) + eps);
#pragma unroll
    for (int i = 0; i < kPer; ++i) x[i] = weight[i] * (x[i] * scale);
    if (first < rotary) {
#pragma unroll
      for (int i = 0; i < kPer; ++i) buffer[first + i] = x[i];
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      const int d = first + i;
      if (d < half) x[i] = x[i] * c[i] - buffer[d + half] * s[i];
      else if (d < rotary) x[i] = x[i] * c[i] + buffer[d - half] * s[i];
      v[i] = from_float<bf16>(x[i]);
    }
  }
};

template <int kPer>
__global__ void __launch_bounds__(256) prepare_kernel(Prepare a) {
  __shared__ float buffers[8][32 * kPer];
  pdl_release();
  constexpr int kDim = 32 * kPer;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, per_row = a.heads + 2 * a.kv_heads;
  const int item = blockIdx.x * 8 + warp;
  if (item >= a.rows * per_row) return pdl_wait();
  // The staged forest and constants, before the kernel before this one has finished (delta_few.cu says why that is safe).
  const int r = item / per_row, h = item % per_row, segment = a.segment_of[r];  // -1: a row that only fills a captured graph's bucket
  const int wide = a.gate ? 2 * kDim : kDim, first = lane * kPer, place = a.place[r];
  const bool query = h < a.heads, is_k = !query && h < a.heads + a.kv_heads;
  const bool keeps = !query && a.pool_k && segment >= 0 && place >= 0 && a.segment[segment].certain;
  NormRotate<kPer> norm;
  if (query || is_k) {
    const int64_t angle = static_cast<int64_t>(a.position[r]) * (a.rotary / 2);
    norm.fetch(query ? a.q_norm : a.k_norm, a.rotary, a.cos + angle, a.sin + angle, lane);
  }
  pdl_wait();
  alignas(16) bf16 v[kPer];
  load_values(a.packed + r * a.stride + (query ? h * wide : a.heads * wide + (h - a.heads) * kDim) + first, a.aligned, v);
  if (query || is_k) norm.apply(v, a.eps, a.rotary, buffers[warp], lane);
  if (query) return store_values(a.q + r * a.q_stride + h * kDim + first, a.aligned, v);
  const int kv = h - a.heads - (is_k ? 0 : a.kv_heads);
  store_values((is_k ? a.scratch_k : a.scratch_v) + (static_cast<int64_t>(r) * a.kv_heads + kv) * kDim + first, true, v);
  if (keeps) store_values((is_k ? a.pool_k : a.pool_v) + (static_cast<int64_t>(place) * a.kv_heads + kv) * kDim + first, true, v);
}

constexpr int kWarps = 8, kGroup = 8;              // query heads a block at most; larger ratios take several blocks
constexpr int kPlainParts = 16, kPlainKeys = 128;  // parts of a row's committed keys at most; keys of a part at least

struct Plain : AttentionArgsDevice {
  int group, groups, first, parts;  // first: item of block 0; parts: of the grid, an upper bound. partial: [items, heads, parts, dim + 2]
};
__device__ __forceinline__ int plain_parts(int visible) { return min(kPlainParts, max(1, (visible + kPlainKeys - 1) / kPlainKeys)); }
__device__ __forceinline__ int plain_lowest(const Plain& a, int position) { return a.window > 0 ? max(0, position - a.window + 1) : 0; }

// Lanes hold dim / 32 dimensions of each query head of the group: dimension lane · per + i.
template <int kPer>
__global__ void __launch_bounds__(kWarps * 32) attention_kernel(Plain a) {
  extern __shared__ float shared[];  // merge of the warps: [kWarps][group][dim + 2]
  pdl_begin();
  const int item = a.first + blockIdx.x, kv = blockIdx.y / a.groups, part = blockIdx.y % a.groups, split = blockIdx.z;
  const int r = a.row ? a.row[item] : item;
  if (r < 0 || a.segment_of[r] < 0) return;  // fills a bucket
  const ops::ForestSegment s = a.segment[a.segment_of[r]];
  const int lowest = plain_lowest(a, a.position[r]), visible = max(0, s.context - lowest), parts = plain_parts(visible);
  if (split >= parts) return;
  const int ratio = a.heads / a.kv_heads, head0 = kv * ratio + part * a.group, n = min(a.group, ratio - part * a.group);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, position = a.position[r];
  float q[kGroup][kPer], acc[kGroup][kPer], top[kGroup], sum[kGroup];
#pragma unroll
  for (int h = 0; h < kGroup; ++h) {
    top[h] = -INFINITY, sum[h] = 0;
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      acc[h][i] = 0;
      q[h][i] = h < n ? to_float(a.q[r * a.q_stride + (head0 + h) * a.dim + lane * kPer + i]) * a.scale : 0.0f;
    }
  }
  const auto visit = [&](const bf16* k, const bf16* v) {
    float kf[kPer], vf[kPer];
#pragma unroll
    for (int i = 0; i < kPer; ++i) kf[i] = to_float(k[lane * kPer + i]), vf[i] = to_float(v[lane * kPer + i]);
#pragma unroll
    for (int h = 0; h < kGroup; ++h) {
      if (h >= n) break;
      float d = 0;
#pragma unroll
      for (int i = 0; i < kPer; ++i) d = fmaf(q[h][i], kf[i], d);
      d = warp_sum(d);
      const float m = fmaxf(top[h], d), keep = __expf(top[h] - m), p = __expf(d - m);
      top[h] = m, sum[h] = sum[h] * keep + p;
#pragma unroll
      for (int i = 0; i < kPer; ++i) acc[h][i] = acc[h][i] * keep + p * vf[i];
    }
  };
  // Committed positions of this part of the context.
  const int per = (visible + parts - 1) / parts;
  const int from = lowest + split * per, to = min(s.context, from + per);
  const int64_t token_stride = static_cast<int64_t>(a.kv_heads) * a.dim;
  for (int p = from + warp; p < to; p += kWarps) {
    const int64_t place = static_cast<int64_t>(a.pages[s.first_page + p / a.page_size]) * a.page_size + p % a.page_size;
    visit(a.pool_k + place * token_stride + kv * a.dim, a.pool_v + place * token_stride + kv * a.dim);
  }
  if (split == parts - 1) {
    if (a.bidirectional) {
      for (int j = warp; j < s.row_count; j += kWarps)
        if (a.window == 0 || a.position[s.first_row + j] > position - a.window)
          visit(a.scratch_k + (s.first_row + j) * token_stride + kv * a.dim, a.scratch_v + (s.first_row + j) * token_stride + kv * a.dim);
    } else {
      int turn = 0;
      for (int j = r; j >= 0; j = a.parent[j], ++turn) {
        if (a.window > 0 && a.position[j] <= position - a.window) break;
        if (turn % kWarps == warp) visit(a.scratch_k + j * token_stride + kv * a.dim, a.scratch_v + j * token_stride + kv * a.dim);
      }
    }
  }
  // Merge the warps.
  const int width = a.dim + 2;
#pragma unroll
  for (int h = 0; h < kGroup; ++h) {
    if (h >= n) break;
    float* mine = shared + (warp * a.group + h) * width;
#pragma unroll
    for (int i = 0; i < kPer; ++i) mine[lane * kPer + i] = acc[h][i];
    if (lane == 0) mine[a.dim] = top[h], mine[a.dim + 1] = sum[h];
  }
  __syncthreads();
  for (int i = threadIdx.x; i < n * a.dim; i += kWarps * 32) {
    const int h = i / a.dim, d = i % a.dim;
    float m = -INFINITY, total = 0, value = 0;
    for (int w = 0; w < kWarps; ++w) m = fmaxf(m, shared[(w * a.group + h) * width + a.dim]);
    for (int w = 0; w < kWarps; ++w) {
      const float* one = shared + (w * a.group + h) * width;
      if (one[a.dim] == -INFINITY) continue;
      const float e = __expf(one[a.dim] - m);
      total += e * one[a.dim + 1], value += e * one[d];
    }
    if (parts == 1) {
      float out = value / total;
      if (a.gate) out *= sigmoid(to_float(a.gate[r * a.gate_stride + (head0 + h) * 2 * a.dim + d]));
      a.o[item * a.o_stride + (head0 + h) * a.dim + d] = from_float<bf16>(out);
    } else {
      float* to_part = a.partial + ((static_cast<int64_t>(blockIdx.x) * a.heads + head0 + h) * a.parts + split) * width;
      to_part[d] = value;
      if (d == 0) to_part[a.dim] = m, to_part[a.dim + 1] = total;
    }
  }
}

__global__ void plain_join_kernel(Plain a) {
  pdl_begin();
  const int item = a.first + blockIdx.x, head = blockIdx.y, width = a.dim + 2;
  const int r = a.row ? a.row[item] : item;
  if (r < 0 || a.segment_of[r] < 0) return;
  const int count = plain_parts(max(0, a.segment[a.segment_of[r]].context - plain_lowest(a, a.position[r])));
  if (count == 1) return;
  const float* parts = a.partial + (static_cast<int64_t>(blockIdx.x) * a.heads + head) * a.parts * width;
  float m = -INFINITY;
  for (int p = 0; p < count; ++p) m = fmaxf(m, parts[p * width + a.dim]);
  for (int d = threadIdx.x; d < a.dim; d += blockDim.x) {
    float total = 0, value = 0;
    for (int p = 0; p < count; ++p) {
      const float* one = parts + p * width;
      if (one[a.dim] == -INFINITY) continue;
      const float e = __expf(one[a.dim] - m);
      total += e * one[a.dim + 1], value += e * one[d];
    }
    float out = value / total;
    if (a.gate) out *= sigmoid(to_float(a.gate[r * a.gate_stride + head * 2 * a.dim + d]));
    a.o[item * a.o_stride + head * a.dim + d] = from_float<bf16>(out);
  }
}

// A block folds the parts of one row and head; threads take four dimensions each. All parts' values are on their way at once (each thread
// copies and reads its own), and meanwhile every warp works out the weights for itself.
template <int kBatch>
__global__ void __launch_bounds__(64) attention_join_kernel(AttentionArgsDevice a) {
  struct Weight {
    float keep, take, sum, unused;
  };
  __shared__ __align__(16) float4 values[kBatch][64];
  __shared__ __align__(16) Weight weights[2][kBatch];
  pdl_release();
  // The staged forest does not depend on the kernel before.
  const int r = blockIdx.x, head = blockIdx.y, lane = threadIdx.x % 32;
  const int segment = a.segment_of[r];
  if (segment < 0) return pdl_wait();
  const ops::ForestSegment s = a.segment[segment];
  const int count = attention_parts(a, s.context, s.row_count).count;
  if (count == 1) return pdl_wait();
  int slots = 0;
  for (int i = lane; i < segment; i += 32) {
    const ops::ForestSegment one = a.segment[i];
    const AttentionParts p = attention_parts(a, one.context, one.row_count);
    if (p.count > 1) slots += one.row_count * p.count;
  }
#pragma unroll
  for (int o = 16; o > 0; o /= 2) slots += __shfl_xor_sync(0xffffffffu, slots, o);
  const int64_t at = static_cast<int64_t>(slots + r - s.first_row) * a.heads + head, step = static_cast<int64_t>(s.row_count) * a.heads;
  const int d = min(static_cast<int>(threadIdx.x) * 4, a.dim - 4);
  const float* parts = a.partial + at * a.dim + d;
  Weight* weight = weights[threadIdx.x / 32];
  float4 value = make_float4(0, 0, 0, 0);
  float top = -INFINITY, sum = 0;
  pdl_wait();
  for (int base = 0; base < count; base += kBatch) {
    const int n = min(kBatch, count - base);
    for (int i = 0; i < n; ++i) matrix::copy16(&values[i][threadIdx.x], parts + (base + i) * step * a.dim, true);
    matrix::copy_commit();
    float2 one = make_float2(-INFINITY, 0.0f);
    if (lane < n) one = a.sums[at + (base + lane) * step];
    float now = one.x;
#pragma unroll
    for (int o = 1; o < 32; o *= 2) {
      const float other = __shfl_up_sync(0xffffffffu, now, o);
      if (lane >= o) now = fmaxf(now, other);
    }
    now = fmaxf(now, top);
    const float left = __shfl_up_sync(0xffffffffu, now, 1);
    const FoldWeight w = fold_weight(lane == 0 ? top : left, one.x, now);
    if (lane < kBatch) weight[lane] = {w.keep, w.take, one.y, 0.0f};
    top = __shfl_sync(0xffffffffu, now, 31);
    __syncwarp();
    matrix::copy_wait<0>();
#pragma unroll 4
    for (int i = 0; i < n; ++i) {
      const Weight& has = weight[i];
      const FoldWeight f{has.keep, has.take};
      const float4 next = values[i][threadIdx.x];  // what an empty part left there is not used
      sum = fold(sum, f, has.sum);
      value.x = fold(value.x, f, next.x), value.y = fold(value.y, f, next.y);
      value.z = fold(value.z, f, next.z), value.w = fold(value.w, f, next.w);
    }
    __syncwarp();
  }
  if (static_cast<int>(threadIdx.x) * 4 >= a.dim) return;
  attention_put(a, r, r, head, d, value.x, value.y, sum);
  attention_put(a, r, r, head, d + 2, value.z, value.w, sum);
}

struct Context {
  const int32_t *position, *place;
  const bf16* kv;
  int64_t stride, layer_stride;
  const float *k_norm, *cos, *sin;
  bf16 *k, *v;
  int rows, layers, kv_heads, rotary;
  bool aligned;
  float eps;
};

template <int kPer>
__global__ void __launch_bounds__(256) draft_context_kernel(Context a) {
  __shared__ float buffers[8][32 * kPer];
  pdl_begin();
  constexpr int kDim = 32 * kPer;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, per_row = a.layers * 2 * a.kv_heads;
  const int item = blockIdx.x * 8 + warp;
  if (item >= a.rows * per_row) return;
  const int r = item / per_row;
  if (a.place[r] < 0) return;  // fills a bucket
  const int layer = item % per_row / (2 * a.kv_heads), slot = item % (2 * a.kv_heads), kv = slot % a.kv_heads;
  const bool is_k = slot < a.kv_heads;
  const int64_t angle = static_cast<int64_t>(a.position[r]) * (a.rotary / 2);
  NormRotate<kPer> norm;
  if (is_k) norm.fetch(a.k_norm + layer * kDim, a.rotary, a.cos + angle, a.sin + angle, lane);
  alignas(16) bf16 v[kPer];
  load_values(a.kv + r * a.stride + (layer * 2 * a.kv_heads + slot) * kDim + lane * kPer, a.aligned, v);
  if (is_k) norm.apply(v, a.eps, a.rotary, buffers[warp], lane);
  bf16* out = (is_k ? a.k : a.v) + layer * a.layer_stride + (static_cast<int64_t>(a.place[r]) * a.kv_heads + kv) * kDim;
  store_values(out + lane * kPer, true, v);
}

__global__ void kv_commit_kernel(const int32_t* row, const int32_t* place, const bf16* from_k, const bf16* from_v, int64_t from_stride,
                                 bf16* to_k, bf16* to_v, int64_t to_stride, int width) {
  pdl_begin();
  const int r = row[blockIdx.x], layer = blockIdx.y;
  if (r < 0) return;  // padding
  const int64_t from = layer * from_stride + static_cast<int64_t>(r) * width,
                to = layer * to_stride + static_cast<int64_t>(place[r]) * width;
  for (int i = threadIdx.x; i < width; i += blockDim.x) to_k[to + i] = from_k[from + i], to_v[to + i] = from_v[from + i];
}

// A form of a kernel for heads of 32 · kPer dimensions.
template <class F>
cudaError_t by_dim(int dim, const F& f) {
  switch (dim) {
    case 32: return f.template operator()<1>();
    case 64: return f.template operator()<2>();
    case 128: return f.template operator()<4>();
    case 256: return f.template operator()<8>();
    default: return cudaErrorInvalidValue;
  }
}
bool aligned(const ops::Tensor& t) { return t.stride % 8 == 0 && reinterpret_cast<uintptr_t>(t.data) % 16 == 0; }

}  // namespace

cudaError_t attention_prepare(cudaStream_t stream, const ops::AttentionPrepareArgs& a, const Rope& rope, const KvStorage& scratch,
                              const KvStorage* pool) {
  const ops::Forest& f = *a.forest;
  Prepare p{as_bf16(a.packed),
            a.packed.stride,
            as_f32(a.q_norm),
            as_f32(a.k_norm),
            rope.cos,
            rope.sin,
            f.position,
            f.place,
            f.segment_of,
            f.segment,
            as_bf16_out(a.q),
            scratch.k,
            scratch.v,
            pool ? pool->k : nullptr,
            pool ? pool->v : nullptr,
            a.q.stride,
            f.rows,
            a.heads,
            scratch.kv_heads,
            rope.rotary_dim,
            a.gate,
            aligned(a.packed) && aligned(a.q),
            a.eps};
  const int items = f.rows * (a.heads + 2 * scratch.kv_heads);
  return by_dim(scratch.head_dim, [&]<int kPer>() { return launch(prepare_kernel<kPer>, dim3((items + 7) / 8), dim3(256), 0, stream, p); });
}

bool attention_plan(AttentionArgsDevice* a, const ops::Forest& f, const AttentionWork& work, AttentionPlan* plan) {
  const int ratio = a->heads / a->kv_heads, small = std::min(32, f.max_segment_rows * ratio);
  const int64_t items = int64_t{f.rows} * ratio, tiles = std::min<int64_t>(items / a->tile_items + f.segments, items);
  const int64_t longest = std::max<int64_t>(f.max_position, 0) + 1 + f.max_segment_rows;
  const int64_t keys = a->window > 0 ? std::min<int64_t>(longest, int64_t{a->window} + f.max_segment_rows + kKeyTile) : longest;
  const int64_t key_tiles = (keys + kKeyTile - 1) / kKeyTile;
  // A segment of t tiles has one part or at most blocks / t; few items have more blocks, and one tile.
  const bool only_few = f.max_segment_rows * ratio <= small;
  const int64_t few = attention_blocks(1) / a->kv_heads, many = only_few ? 0 : attention_blocks(a->tile_items) / a->kv_heads;
  int64_t most = std::max<int64_t>(1, std::min({std::max(few, many), key_tiles, int64_t{kMaxParts}}));
  const int64_t rows_of_tile = (a->tile_items + ratio - 1) / ratio, rows_of_few = (small + ratio - 1) / ratio;
  const int64_t segment_slots = std::max(rows_of_few * few, rows_of_tile * many);
  int64_t slots = most == 1 ? 0 : std::min(f.rows * most, f.segments * segment_slots + f.rows);
  int64_t units = std::min(f.segments * std::max(few, many) + tiles, tiles * most);
  // Segments that would have one part by that, and may have more for the last wave's sake.
  const int64_t tiles_whole = attention_blocks(a->tile_items) / 2 / a->kv_heads + 1, rows_whole = (tiles_whole - 1) * a->tile_items / ratio;
  if (a->tile_items == kSplitItems && f.max_segment_rows > rows_whole && key_tiles >= kSplitKeyTiles) {
    if (f.segments == 1 && f.max_certain_rows == f.rows && f.rows > 128) {  // a prompt alone: never padded, so its parts are known
      most = attention_split(static_cast<int>(items + a->tile_items - 1) / a->tile_items * a->kv_heads, f.rows, kSplitKeyTiles);
      slots = most == 1 ? 0 : f.rows * most, units = tiles * most;
    } else {
      const int64_t whole = f.rows / std::max<int64_t>(rows_whole, 1);
      slots = std::min(f.rows * std::max<int64_t>(most, kSplitParts), slots + std::min<int64_t>(f.rows * kSplitParts, whole * kSplitSlots));
      units = std::min(units + tiles * (kSplitParts - 1), tiles * std::max<int64_t>(most, kSplitParts));
      most = std::max<int64_t>(most, kSplitParts);
    }
  }
  const auto floats = [&](int64_t n) { return n * a->heads * (a->dim + 2); };
  a->sequential = floats(slots) > work.capacity;
  if (a->sequential && floats(f.rows) > work.capacity) return false;
  a->partial = work.partial;
  a->sums = reinterpret_cast<float2*>(work.partial + slots * a->heads * a->dim);
  plan->join = most > 1 && !a->sequential;
  plan->parts = static_cast<int>(most);
  plan->units = static_cast<int>(a->sequential ? tiles : units);
  return true;
}

cudaError_t attention_join(cudaStream_t stream, const AttentionArgsDevice& a, int rows, const AttentionPlan& plan) {
  // A prompt's rows are many and their parts few: with less shared memory more blocks are under way.
  const auto join = plan.parts <= kSplitParts ? attention_join_kernel<kSplitParts> : attention_join_kernel<32>;
  return launch(join, dim3(rows, a.heads), dim3(a.dim > 128 ? 64 : 32), 0, stream, a);
}

namespace {

cudaError_t plain(cudaStream_t stream, const AttentionArgsDevice& args, const AttentionCall& c, const AttentionWork& work) {
  const int ratio = args.heads / args.kv_heads, width = args.dim + 2;
  Plain a{args, std::min(ratio, kGroup), (ratio + kGroup - 1) / kGroup, 0, 1};
  const int64_t longest = c.window > 0 ? std::min<int64_t>(c.window, c.forest->max_position) : c.forest->max_position;
  a.parts = static_cast<int>(std::clamp<int64_t>((longest + kPlainKeys - 1) / kPlainKeys, 1, kPlainParts));
  a.partial = work.partial;
  // As many rows at a time as have room for their parts.
  const int64_t room = a.parts == 1 ? c.count : work.capacity / (int64_t{a.heads} * a.parts * width);
  if (room < 1) return cudaErrorInvalidValue;
  const size_t shared = static_cast<size_t>(kWarps) * a.group * width * sizeof(float);
  const auto run = [&]<int kPer>() -> cudaError_t {
    static const cudaError_t once =
        cudaFuncSetAttribute(attention_kernel<kPer>, cudaFuncAttributeMaxDynamicSharedMemorySize, kWarps * kGroup * (kPer * 32 + 2) * 4);
    if (once != cudaSuccess) return once;
    for (a.first = 0; a.first < c.count; a.first += static_cast<int>(room)) {
      const int rows = static_cast<int>(std::min<int64_t>(room, c.count - a.first));
      cudaError_t e = launch(attention_kernel<kPer>, dim3(rows, a.kv_heads * a.groups, a.parts), dim3(kWarps * 32), shared, stream, a);
      if (e == cudaSuccess && a.parts > 1) e = launch(plain_join_kernel, dim3(rows, a.heads), dim3(128), 0, stream, a);
      if (e != cudaSuccess) return e;
    }
    return cudaSuccess;
  };
  return by_dim(a.dim, run);
}

}  // namespace

cudaError_t attention(cudaStream_t stream, const AttentionCall& c, const AttentionWork& work) {
  const ops::Forest& f = *c.forest;
  const int dim = c.scratch.head_dim;
  AttentionArgsDevice a{};
  a.segment = f.segment, a.segment_of = f.segment_of, a.position = f.position, a.parent = f.parent, a.pages = f.pages, a.row = c.row;
  a.q = as_bf16(c.q), a.scratch_k = c.scratch.k, a.scratch_v = c.scratch.v, a.pool_k = c.pool.k, a.pool_v = c.pool.v;
  a.gate = c.gate ? as_bf16(c.packed) + dim : nullptr;
  a.q_stride = c.q.stride, a.gate_stride = c.packed.stride, a.o_stride = c.o.stride;
  a.o = as_bf16_out(c.o);
  a.segments = f.segments, a.heads = c.heads, a.kv_heads = c.scratch.kv_heads, a.dim = dim, a.page_size = c.pool.page_size;
  a.ratio = c.heads / a.kv_heads;
  a.ratio_inverse = a.ratio == 1 ? 0 : static_cast<uint32_t>(((uint64_t{1} << 32) + a.ratio - 1) / a.ratio);
  a.window = static_cast<int>(c.window);
  a.bidirectional = c.bidirectional;
  a.scale = 1.0f / sqrtf(static_cast<float>(dim));
  if (!c.row) {
    cudaError_t e = attention_hopper(stream, a, c, work);
    if (e == cudaErrorNotSupported) e = attention_tiles(stream, a, f, work);
    if (e != cudaErrorNotSupported) return e;
  }
  return plain(stream, a, c, work);
}

cudaError_t draft_context(cudaStream_t stream, const ops::DraftContextArgs& a, const Rope& rope, const KvStorage& pool) {
  Context c{a.position,
            a.place,
            as_bf16(a.kv),
            a.kv.stride,
            pool.layer_stride,
            as_f32(a.k_norm),
            rope.cos,
            rope.sin,
            pool.k,
            pool.v,
            a.rows,
            static_cast<int>(a.k_norm.rows),
            pool.kv_heads,
            rope.rotary_dim,
            aligned(a.kv),
            a.eps};
  const int items = a.rows * c.layers * 2 * c.kv_heads;
  return by_dim(pool.head_dim,
                [&]<int kPer>() { return launch(draft_context_kernel<kPer>, dim3((items + 7) / 8), dim3(256), 0, stream, c); });
}

cudaError_t kv_commit(cudaStream_t stream, const ops::KvCommitArgs& a, const KvStorage& scratch, const KvStorage& pool, int layers) {
  if (a.paths.rows == 0) return cudaSuccess;
  return launch(kv_commit_kernel, dim3(a.paths.rows, layers), dim3(256), 0, stream, a.paths.row, a.forest->place, scratch.k, scratch.v,
                scratch.layer_stride, pool.k, pool.v, pool.layer_stride, scratch.kv_heads * scratch.head_dim);
}

}  // namespace ddtree::kernels
