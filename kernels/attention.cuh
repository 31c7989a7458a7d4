// What the forms of attention share (attention.cu: plain; attention_tiles.cu: mma.sync; attention_hopper.cu: wgmma): how the keys of a
// segment are cut into parts and how the parts' results become one.
//
// A row's result must not depend on what else is in the pass, nor on how far a captured graph rounded its sizes up. So where a part ends
// is a function of the segment alone, and parts are joined by a left fold in order of position. Either each part is a block and
// attention_join folds them, or (no room for all partial results) one block takes all parts of its items, one after another, and folds
// them as it goes: the same operations on the same values, so the same bits.
#pragma once

#include <cuda_bf16.h>

#include "kernels/common.cuh"
#include "kernels/kernels.h"

namespace ddtree::kernels {

constexpr int kKeyTile = 64;    // parts begin at multiples of this
constexpr int kMaxParts = 64;   // of a segment's keys
constexpr int kMaskWords = 16;  // own rows that a mask of ancestors covers: 512
constexpr float kLog2e = 1.4426950408889634f;

struct AttentionArgsDevice {
  const ops::ForestSegment* segment;
  const int32_t *segment_of, *position, *parent, *pages, *row;
  const __nv_bfloat16 *q, *scratch_k, *scratch_v, *pool_k, *pool_v, *gate;
  int64_t q_stride, gate_stride, o_stride;
  __nv_bfloat16* o;
  // Results of parts: [slots, heads, dim] and [slots, heads] (largest score in powers of two, sum of exponentials).
  float* partial;
  float2* sums;
  int segments, heads, kv_heads, dim, page_size, window;
  int ratio;               // heads / kv_heads
  uint32_t ratio_inverse;  // ⌈2³² / ratio⌉, 0 for a ratio of 1
  int tile_items;          // (row, head) items of a tile
  bool sequential;         // one block takes all parts of its items
  bool bidirectional;
  float scale;
};

struct AttentionParts {
  int tiles = 0, count = 1, per = 1;  // tiles of items; parts; key tiles of a part
};
// Few items have small partial results: their parts may fill the card by themselves. More would cost more to join than they gain.
__host__ __device__ constexpr int attention_blocks(int items) { return items <= 32 ? 132 : 96; }
__host__ __device__ inline int attention_want(int items, int tiles, int kv_heads) {
  const int want = attention_blocks(items) / (tiles * kv_heads);
  return want < 1 ? 1 : want > kMaxParts ? kMaxParts : want;
}
// Prompts fill the card, but rarely their last wave of blocks: where the keys are many, the parts (at most four) with which a block's time
// in wholes is least, if that gains a tenth; fewer keys would not pay for the join. Tiles of 128 items, a block a multiprocessor.
constexpr int kSplitItems = 128, kSplitKeyTiles = 64, kSplitParts = 4, kSplitSlots = 2048;
__host__ __device__ constexpr int attention_split(int units, int rows, int key_tiles) {
  if (key_tiles < kSplitKeyTiles) return 1;
  const auto waves = [&](int parts) { return (units * parts + 131) / 132; };
  int best = 1;
  for (int p = 2; p <= kSplitParts && rows * p <= kSplitSlots; ++p)
    if (waves(p) * best * 10 <= waves(best) * p * 9) best = p;
  return best;
}
// Row and query head of an item, both counted within the segment and the K/V head.
__device__ __forceinline__ int row_of_item(const AttentionArgsDevice& a, int m) {
  return a.ratio == 1 ? m : static_cast<int>(__umulhi(static_cast<uint32_t>(m), a.ratio_inverse));
}
__device__ __forceinline__ int attention_lowest(const AttentionArgsDevice& a, int context) {
  return a.window > 0 ? max(0, context - a.window + 1) / kKeyTile * kKeyTile : 0;
}
__device__ __forceinline__ AttentionParts attention_parts(const AttentionArgsDevice& a, int context, int rows) {
  AttentionParts p;
  const int items = rows * a.ratio;
  if (items <= 0) return p;
  p.tiles = (items + a.tile_items - 1) / a.tile_items;
  const int keys = (context + rows - attention_lowest(a, context) + kKeyTile - 1) / kKeyTile;
  int want = attention_want(items, p.tiles, a.kv_heads);
  if (want == 1 && a.tile_items == kSplitItems) want = attention_split(p.tiles * a.kv_heads, rows, keys);
  p.per = (keys + want - 1) / want;
  p.count = (keys + p.per - 1) / p.per;
  return p;
}

// What one block does.
struct AttentionUnit {
  ops::ForestSegment s;
  AttentionParts parts;
  int tile = 0, part = 0;  // part 0 of a sequential unit stands for all
  int first_slot = 0;      // slot of the segment's row i and part p: first_slot + p · row_count + i
};
__device__ __forceinline__ int scan_add(int v) {
#pragma unroll
  for (int o = 1; o < 32; o *= 2) {
    const int before = __shfl_up_sync(0xffffffffu, v, o);
    if (threadIdx.x % 32 >= o) v += before;
  }
  return v;
}
// Every warp of the block calls it and gets the same. False: past the last unit (the grid is an upper bound).
__device__ __forceinline__ bool find_unit(const AttentionArgsDevice& a, int index, AttentionUnit* u) {
  const int lane = threadIdx.x % 32;
  int slots = 0;
  for (int base = 0; base < a.segments; base += 32) {
    int units = 0, mine = 0;
    AttentionParts p;
    ops::ForestSegment s;
    if (base + lane < a.segments) {
      s = a.segment[base + lane];
      p = attention_parts(a, s.context, s.row_count);
      units = p.tiles * (a.sequential ? 1 : p.count);
      if (!a.sequential && p.count > 1) mine = s.row_count * p.count;
    }
    const int units_to = scan_add(units), slots_to = scan_add(mine);
    const unsigned past = __ballot_sync(0xffffffffu, index < units_to);
    if (past) {
      const int l = __ffs(past) - 1;
      const int local = index - __shfl_sync(0xffffffffu, units_to - units, l);
      slots += __shfl_sync(0xffffffffu, slots_to - mine, l);
      const auto of = [&](int v) { return __shfl_sync(0xffffffffu, v, l); };
      u->s.first_row = of(s.first_row), u->s.row_count = of(s.row_count), u->s.certain = of(s.certain);
      u->s.context = of(s.context), u->s.first_page = of(s.first_page);
      u->parts.tiles = of(p.tiles), u->parts.count = of(p.count), u->parts.per = of(p.per);
      u->tile = local % u->parts.tiles, u->part = local / u->parts.tiles;  // neighbours read the same keys
      u->first_slot = a.sequential ? u->s.first_row : slots;
      return true;
    }
    index -= __shfl_sync(0xffffffffu, units_to, 31), slots += __shfl_sync(0xffffffffu, slots_to, 31);
  }
  return false;
}

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// The fold: value = fold(value, keep, next, take), alike for outputs and sums of exponentials.
struct FoldWeight {
  float keep, take;
};
__device__ __forceinline__ FoldWeight fold_weight(float top, float next_top, float new_top) {
  return {top == -INFINITY ? 0.0f : exp2_fast(top - new_top), next_top == -INFINITY ? 0.0f : exp2_fast(next_top - new_top)};
}
__device__ __forceinline__ float fold(float value, FoldWeight w, float next) {
  if (w.take == 0.0f) return value;
  return w.keep == 0.0f ? next : __fmaf_rn(next, w.take, __fmul_rn(value, w.keep));
}

// Two neighbouring dimensions of the finished output.
__device__ __forceinline__ void attention_put(const AttentionArgsDevice& a, int row, int out_row, int head, int d, float x, float y,
                                              float sum) {
  const float inverse = __frcp_rn(sum);
  x *= inverse, y *= inverse;
  if (a.gate) {
    const __nv_bfloat162 g = *reinterpret_cast<const __nv_bfloat162*>(a.gate + row * a.gate_stride + head * 2 * a.dim + d);
    x *= sigmoid(__low2float(g)), y *= sigmoid(__high2float(g));
  }
  *reinterpret_cast<__nv_bfloat162*>(a.o + out_row * a.o_stride + head * a.dim + d) = __floats2bfloat162_rn(x, y);
}

// Upper bounds of a pass by the host's figures, and whether its parts run side by side. False: no room for the rows at all.
struct AttentionPlan {
  int units = 0, parts = 1;  // parts: of any segment
  bool join = false;
};
bool attention_plan(AttentionArgsDevice* a, const ops::Forest& forest, const AttentionWork& work, AttentionPlan* plan);
// Folds the parts of every row that has more than one.
cudaError_t attention_join(cudaStream_t stream, const AttentionArgsDevice& a, int rows, const AttentionPlan& plan);

// cudaErrorNotSupported where a form does not take the shape: row lists, other head sizes, trees past 512 rows.
cudaError_t attention_tiles(cudaStream_t stream, AttentionArgsDevice a, const ops::Forest& forest, const AttentionWork& work);
cudaError_t attention_hopper(cudaStream_t stream, AttentionArgsDevice a, const AttentionCall& call, const AttentionWork& work);

}  // namespace ddtree::kernels
