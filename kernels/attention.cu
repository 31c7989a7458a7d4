// attention_prepare, attention, draft_attention, draft_context, kv_commit. Contract: ops/attention.h.
//
// The plain form of attention, for what attention_tiles.cu does not take: a block takes one row and one kv head with all the query heads
// that read it, and a part of the context; a second kernel joins the parts. One warp a key at a time, lanes over the head's dimensions. The
// row's path is one sequence of positions: committed ones by page, then its ancestors in scratch.
#include <algorithm>

#include "kernels/attention.cuh"
#include "kernels/common.cuh"
#include "kernels/kernels.h"

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
  int rows, heads, kv_heads, dim, rotary;
  bool gate;
  float eps;
};

// Norms (w · x / rms) and rotates one head held in shared memory; lanes stride over it.
__device__ void norm_rotate(const bf16* in, const float* w, float eps, int dim, int rotary, const float* cos, const float* sin,
                            float* buffer, int lane) {
  float sum = 0;
  for (int i = lane; i < dim; i += 32) {
    const float v = to_float(in[i]);
    buffer[i] = v;
    sum += v * v;
  }
  const float scale = rsqrtf(warp_sum(sum) / static_cast<float>(dim) + eps);
  __syncwarp();
  for (int i = lane; i < dim; i += 32) buffer[i] = w[i] * (buffer[i] * scale);
  __syncwarp();
  const int half = rotary / 2;
  for (int i = lane; i < half; i += 32) {
    const float a = buffer[i], b = buffer[i + half];
    buffer[i] = a * cos[i] - b * sin[i];
    buffer[i + half] = b * cos[i] + a * sin[i];
  }
  __syncwarp();
}

__global__ void __launch_bounds__(256) prepare_kernel(Prepare a) {
  __shared__ float buffers[8][256];
  pdl_begin();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, per_row = a.heads + 2 * a.kv_heads;
  const int item = blockIdx.x * 8 + warp;
  if (item >= a.rows * per_row) return;
  const int r = item / per_row, h = item % per_row;
  const bf16* row = a.packed + r * a.stride;
  const int position = a.position[r], wide = a.gate ? 2 * a.dim : a.dim;
  const float *cos = a.cos + static_cast<int64_t>(position) * (a.rotary / 2),
              *sin = a.sin + static_cast<int64_t>(position) * (a.rotary / 2);
  float* buffer = buffers[warp];
  if (h < a.heads) {
    norm_rotate(row + h * wide, a.q_norm, a.eps, a.dim, a.rotary, cos, sin, buffer, lane);
    for (int i = lane; i < a.dim; i += 32) a.q[r * a.q_stride + h * a.dim + i] = from_float<bf16>(buffer[i]);
    return;
  }
  const int segment = a.segment_of[r];
  const bool certain = a.pool_k && segment >= 0 && a.segment[segment].certain;  // -1: padding
  const bool is_k = h < a.heads + a.kv_heads;
  const int kv = h - a.heads - (is_k ? 0 : a.kv_heads);
  const bf16* in = row + a.heads * wide + (h - a.heads) * a.dim;
  bf16* scratch = (is_k ? a.scratch_k : a.scratch_v) + (static_cast<int64_t>(r) * a.kv_heads + kv) * a.dim;
  bf16* pool = certain ? (is_k ? a.pool_k : a.pool_v) + (static_cast<int64_t>(a.place[r]) * a.kv_heads + kv) * a.dim : nullptr;
  if (is_k) norm_rotate(in, a.k_norm, a.eps, a.dim, a.rotary, cos, sin, buffer, lane);
  for (int i = lane; i < a.dim; i += 32) {
    const bf16 v = is_k ? from_float<bf16>(buffer[i]) : in[i];
    scratch[i] = v;
    if (pool) pool[i] = v;
  }
}

constexpr int kWarps = 8, kGroup = 8;  // query heads a block at most; larger ratios take several blocks

using Attention = AttentionArgsDevice;

// Lanes hold dim / 32 dimensions of each query head of the group: dimension lane · per + i.
template <int kPer>
__global__ void __launch_bounds__(kWarps * 32) attention_kernel(Attention a) {
  extern __shared__ float shared[];  // merge of the warps: [kWarps][group][dim + 2]
  pdl_begin();
  const int item = blockIdx.x, kv = blockIdx.y / a.groups, part = blockIdx.y % a.groups, split = blockIdx.z;
  const int r = a.row ? a.row[item] : item;
  if (a.segment_of[r] < 0) return;  // padding: nobody reads its output
  const ops::ForestSegment s = a.segment[a.segment_of[r]];
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
  const int lowest = a.window > 0 ? max(0, position - a.window + 1) : 0;
  const int visible = max(0, s.context - lowest), per = (visible + a.splits - 1) / a.splits;
  const int from = lowest + split * per, to = min(s.context, from + per);
  const int64_t token_stride = static_cast<int64_t>(a.kv_heads) * a.dim;
  for (int p = from + warp; p < to; p += kWarps) {
    const int64_t place = static_cast<int64_t>(a.pages[s.first_page + p / a.page_size]) * a.page_size + p % a.page_size;
    visit(a.pool_k + place * token_stride + kv * a.dim, a.pool_v + place * token_stride + kv * a.dim);
  }
  if (split == a.splits - 1) {
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
    if (a.splits == 1) {
      float out = value / total;
      if (a.gate) out *= sigmoid(to_float(a.gate[r * a.gate_stride + (head0 + h) * 2 * a.dim + d]));
      a.o[item * a.o_stride + (head0 + h) * a.dim + d] = from_float<bf16>(out);
    } else {
      float* to_part = a.partial + ((static_cast<int64_t>(item) * a.heads + head0 + h) * a.splits + split) * width;
      to_part[d] = value;
      if (d == 0) to_part[a.dim] = m, to_part[a.dim + 1] = total;
    }
  }
}

__global__ void attention_join_kernel(Attention a) {
  pdl_begin();
  const int item = blockIdx.x, head = blockIdx.y, width = a.dim + 2;
  const int r = a.row ? a.row[item] : item;
  const float* parts = a.partial + (static_cast<int64_t>(item) * a.heads + head) * a.splits * width;
  float m = -INFINITY;
  for (int p = 0; p < a.splits; ++p) m = fmaxf(m, parts[p * width + a.dim]);
  for (int d = threadIdx.x; d < a.dim; d += blockDim.x) {
    float total = 0, value = 0;
    for (int p = 0; p < a.splits; ++p) {
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

struct Context {
  const int32_t *position, *place;
  const bf16* kv;
  int64_t stride, layer_stride;
  const float *k_norm, *cos, *sin;
  bf16 *k, *v;
  int rows, layers, kv_heads, dim, rotary;
  float eps;
};

__global__ void __launch_bounds__(256) draft_context_kernel(Context a) {
  __shared__ float buffers[8][256];
  pdl_begin();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, per_row = a.layers * 2 * a.kv_heads;
  const int item = blockIdx.x * 8 + warp;
  if (item >= a.rows * per_row) return;
  const int r = item / per_row, layer = item % per_row / (2 * a.kv_heads), slot = item % (2 * a.kv_heads), kv = slot % a.kv_heads;
  if (a.place[r] < 0) return;  // padding
  const bool is_k = slot < a.kv_heads;
  const bf16* in = a.kv + r * a.stride + (layer * 2 * a.kv_heads + slot) * a.dim;
  const int64_t angle = static_cast<int64_t>(a.position[r]) * (a.rotary / 2);
  if (is_k) norm_rotate(in, a.k_norm + layer * a.dim, a.eps, a.dim, a.rotary, a.cos + angle, a.sin + angle, buffers[warp], lane);
  bf16* out = (is_k ? a.k : a.v) + layer * a.layer_stride + (static_cast<int64_t>(a.place[r]) * a.kv_heads + kv) * a.dim;
  for (int i = lane; i < a.dim; i += 32) out[i] = is_k ? from_float<bf16>(buffers[warp][i]) : in[i];
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
            scratch.head_dim,
            rope.rotary_dim,
            a.gate,
            a.eps};
  const int items = f.rows * (a.heads + 2 * scratch.kv_heads);
  return launch(prepare_kernel, dim3((items + 7) / 8), dim3(256), 0, stream, p);
}

cudaError_t attention(cudaStream_t stream, const AttentionCall& c, const AttentionWork& work) {
  const ops::Forest& f = *c.forest;
  const int dim = c.scratch.head_dim, kv_heads = c.scratch.kv_heads, ratio = c.heads / kv_heads;
  Attention a{f.segment,
              f.segment_of,
              f.position,
              f.parent,
              f.pages,
              c.row,
              as_bf16(c.q),
              c.scratch.k,
              c.scratch.v,
              c.pool.k,
              c.pool.v,
              c.gate ? as_bf16(c.packed) + dim : nullptr,
              c.q.stride,
              c.packed.stride,
              c.o.stride,
              as_bf16_out(c.o),
              work.partial,
              f.segments,
              c.heads,
              kv_heads,
              dim,
              c.pool.page_size,
              std::min(ratio, kGroup),
              (ratio + kGroup - 1) / kGroup,
              1,
              static_cast<int>(c.window),
              c.bidirectional,
              1.0f / sqrtf(static_cast<float>(dim))};
  if (!c.row) {
    const cudaError_t tiles = attention_tiles(stream, a, f, work.capacity, work.multiprocessors, work.shared_limit);
    if (tiles != cudaErrorNotSupported) return tiles;
  }
  // Parts of at least 128 keys, as many as fill the card and fit the workspace.
  const int64_t longest = c.window > 0 ? std::min<int64_t>(c.window, f.max_position) : f.max_position;
  const int64_t blocks = static_cast<int64_t>(c.count) * kv_heads * a.groups;
  int64_t splits = std::min<int64_t>((longest + 127) / 128, std::max<int64_t>(1, 4 * 132 / std::max<int64_t>(blocks, 1)));
  splits = std::min(splits, work.capacity / (static_cast<int64_t>(c.count) * c.heads * (dim + 2)));
  a.splits = static_cast<int>(std::max<int64_t>(splits, 1));
  const size_t shared = static_cast<size_t>(kWarps) * a.group * (dim + 2) * sizeof(float);
  const dim3 grid(c.count, kv_heads * a.groups, a.splits);
  cudaError_t e = cudaErrorInvalidValue;
  const auto run = [&]<int kPer>() {
    static const cudaError_t once =
        cudaFuncSetAttribute(attention_kernel<kPer>, cudaFuncAttributeMaxDynamicSharedMemorySize, kWarps * kGroup * (kPer * 32 + 2) * 4);
    return once != cudaSuccess ? once : launch(attention_kernel<kPer>, grid, dim3(kWarps * 32), shared, stream, a);
  };
  switch (dim) {
    case 32: e = run.template operator()<1>(); break;
    case 64: e = run.template operator()<2>(); break;
    case 128: e = run.template operator()<4>(); break;
    case 256: e = run.template operator()<8>(); break;
    default: return cudaErrorInvalidValue;
  }
  if (e != cudaSuccess || a.splits == 1) return e;
  return attention_join(stream, a, c.count);
}

cudaError_t attention_join(cudaStream_t stream, const AttentionArgsDevice& a, int rows) {
  return launch(attention_join_kernel, dim3(rows, a.heads), dim3(128), 0, stream, a);
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
            pool.head_dim,
            rope.rotary_dim,
            a.eps};
  const int items = a.rows * c.layers * 2 * c.kv_heads;
  return launch(draft_context_kernel, dim3((items + 7) / 8), dim3(256), 0, stream, c);
}

cudaError_t kv_commit(cudaStream_t stream, const ops::KvCommitArgs& a, const KvStorage& scratch, const KvStorage& pool, int layers) {
  if (a.paths.rows == 0) return cudaSuccess;
  return launch(kv_commit_kernel, dim3(a.paths.rows, layers), dim3(256), 0, stream, a.paths.row, a.forest->place, scratch.k, scratch.v,
                scratch.layer_stride, pool.k, pool.v, pool.layer_stride, scratch.kv_heads * scratch.head_dim);
}

}  // namespace ddtree::kernels
