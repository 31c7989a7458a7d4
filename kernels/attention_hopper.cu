// Attention by Hopper's warpgroup products: single rows, trees, blocks and prompts alike. Contract: ops/attention.h; launched by
// attention.cu.
//
// Items are those of attention_tiles.cu: (row m / ratio, head m % ratio) of a segment and K/V head, so K and V are read once for all of
// them. A block takes 128 items and one part of the keys. A producer warpgroup brings tiles of 64 keys into shared memory: by bulk copies
// of 32 keys where a tile lies wholly in pages or wholly in the pass's own rows, else key by key (where context and own rows meet, at the
// end, pages that cut a copy; keys past the end become zeros). Two consumer warpgroups take 64 items each. Scores are K-major products from
// shared memory; probabilities go back in from registers, against V as it lies ("MN-major"). The scores of the next keys and the
// softmax run while the product with V of the keys before is under way.
//
// With few rows it is latency that counts, not reading: so all that does not depend on the kernel before (who computes what, page tables,
// masks, and the committed keys and values, which earlier passes wrote) is under way before that has finished; see delta_few.cu for why
// such reads are safe. Only q, the gate and the pass's own keys and values are waited for.
//
// Numeric promise: a row's bits depend on its own path, its place in its segment and the segment's length alone (attention.cuh).
#include <algorithm>

#include "kernels/attention.cuh"
#include "kernels/hopper.cuh"
#include "kernels/matrix.cuh"

namespace ddtree::kernels {
namespace {

constexpr int kItems = 128, kThreads = 384;
[[maybe_unused]] constexpr int kNowhere = INT32_MIN;  // a key past the end

template <int kDim>
struct HopperShape {
  static constexpr int kColumns = kDim / 64;          // blocks of 64 dimensions, each with its own 128-byte rows
  static constexpr int kBlockBytes = kKeyTile * 128;  // of 64 keys or items
  static constexpr int kTileBytes = kColumns * kBlockBytes;
  static constexpr int kStages = kDim == 256 ? 2 : 3;
  static constexpr int kMaskBytes = kItems * kMaskWords * 4;
  static constexpr int kBytes = 1024 + 2 * kTileBytes + 2 * kStages * kTileBytes + kMaskBytes;
};

// Byte of the 16-byte chunk c of row r in a tile of 64 rows.
[[maybe_unused]] __device__ __forceinline__ int chunk_at(int r, int c) {
  return (c >> 3) * (kKeyTile * 128) + r * 128 + (((c & 7) ^ (r & 7)) << 4);
}

// The n lowest bits, for any n.
__device__ __forceinline__ uint64_t bits_below(int n) { return n <= 0 ? 0 : n >= 64 ? ~uint64_t{0} : (uint64_t{1} << n) - 1; }

struct Barriers {
  uint64_t full[2][3], empty[2][3];  // [K, V][stage]
};
struct Maps {
  CUtensorMap pool[2], scratch[2];  // K, V
  int pool_row, scratch_row;
  bool pages, own;  // whether they may be used
};

// The producer's warpgroup: keys of tiles [first, last), in the order in which they are used: K0, K1, V0, K2, V1, …
template <int kDim>
__device__ __forceinline__ void produce(const AttentionArgsDevice& a, const Maps& maps, const ops::ForestSegment& s, int kv, int lowest,
                                        int end, int first, int last, uint8_t* tiles, Barriers* b) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using namespace hopper;
  using Shape = HopperShape<kDim>;
  constexpr int kChunks = kDim / 8, kRowsAtOnce = 32 / kChunks, kSteps = kKeyTile / 4 / kRowsAtOnce;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, chunk = lane % kChunks, n = last - first;
  const int64_t token_stride = static_cast<int64_t>(a.kv_heads) * kDim;
  // Copies key by key that the consumers were not told of, oldest first: [V?][stage] of each in four bits.
  uint32_t untold = 0;
  int copies = 0;
  const auto tell = [&] {
    barrier_arrive(&b->full[untold >> 2 & 1][untold & 3]);
    untold >>= 4, --copies;
  };
  const auto acquire = [&](int v, int use) {  // the consumers may wait for what is still to be told, so tell before waiting
    if (use < Shape::kStages) return;
    uint64_t* barrier = &b->empty[v][use % Shape::kStages];
    const uint32_t parity = (use / Shape::kStages - 1) & 1;
    if (barrier_test(barrier, parity)) return;
    if (copies > 0) {
      matrix::copy_wait<0>();
      fence_for_products();
      while (copies > 0) tell();
    }
    barrier_wait(barrier, parity);
  };
  bool waited = false;
  const auto page_place = [&](int key) { return a.pages[s.first_page + key / a.page_size] * a.page_size + key % a.page_size; };
  int ahead = 0;  // warp 0: first places of the next 32 halves of tiles
  const auto bring = [&](int v, int t) {
    const int key0 = lowest + (first + t) * kKeyTile, stage = t % Shape::kStages;
    uint8_t* tile = tiles + (v * Shape::kStages + stage) * Shape::kTileBytes;
    const bool in_pages = maps.pages && key0 + kKeyTile <= s.context, in_own = maps.own && key0 >= s.context && key0 + kKeyTile <= end;
    if (!in_pages && !waited) pdl_wait(), waited = true;  // the pass's own keys
    if (in_pages || in_own) {
      acquire(v, t);  // every warp waits for every use: one that ran ahead by two would take an older phase for the newest
      if (warp > 0) return;
      if (lane == 0) {
        barrier_expect(&b->full[v][stage], Shape::kTileBytes);
        barrier_arrive(&b->full[v][stage], 127);
      }
      __syncwarp();
      const int half = lane / Shape::kColumns, column = lane % Shape::kColumns;
      const int place = __shfl_sync(0xffffffffu, ahead, (t % 16 * 2 + half) % 32);
      if (half < 2)
        bulk_copy(tile + column * Shape::kBlockBytes + half * (Shape::kBlockBytes / 2), in_pages ? &maps.pool[v] : &maps.scratch[v],
                  &b->full[v][stage], kv * kDim + column * 64,
                  in_pages ? maps.pool_row + place : maps.scratch_row + s.first_row + key0 - s.context + half * 32);
      return;
    }
    const auto place_of = [&](int key) {  // ≥ 0: of the pool; else ~row of the scratch
      if (key >= end) return kNowhere;
      return key >= s.context ? ~(s.first_row + key - s.context) : page_place(key);
    };
    const int low = place_of(key0 + lane), high = place_of(key0 + lane + 32);
    acquire(v, t);
    const bf16 *pool = (v ? a.pool_v : a.pool_k) + kv * kDim + chunk * 8, *own = (v ? a.scratch_v : a.scratch_k) + kv * kDim + chunk * 8;
#pragma unroll 4  // addresses of more would not fit the registers
    for (int j = 0; j < kSteps; ++j) {
      const int r = (warp + 4 * j) * kRowsAtOnce + lane / kChunks;
      const int place = __shfl_sync(0xffffffffu, (warp + 4 * j) * kRowsAtOnce < 32 ? low : high, r % 32);
      const bf16* from = place >= 0 ? pool + place * token_stride : own + (place == kNowhere ? 0 : ~place) * token_stride;
      matrix::copy16(tile + chunk_at(r, chunk), from, place != kNowhere);
    }
    matrix::copy_commit();
    untold |= static_cast<uint32_t>(v << 2 | stage) << (4 * copies++);
    if (copies > 2) {
      matrix::copy_wait<2>();
      fence_for_products();
      tell();
    }
  };
  for (int t = 0; t <= n; ++t) {
    if (t > 0 && t % 16 == 0) {
      bring(1, t - 1);  // before the places go
    }
    if (t % 16 == 0 && warp == 0 && maps.pages) {
      const int key = lowest + (first + t) * kKeyTile + lane * 32;
      ahead = key < s.context ? page_place(key) : 0;
    }
    if (t < n) bring(0, t);
    if (t > 0 && t % 16 != 0) bring(1, t - 1);
  }
  matrix::copy_wait<0>();
  fence_for_products();
  while (copies > 0) tell();
  if (!waited) pdl_wait();
#endif
}

template <int kDim>
__global__ void __launch_bounds__(kThreads, 1) attention_hopper_kernel(const __grid_constant__ Maps maps, AttentionArgsDevice a) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // wgmma exists on sm_90a alone; other cards take attention_tiles
  using namespace hopper;
  using Shape = HopperShape<kDim>;
  constexpr int kChunks = kDim / 8;
  extern __shared__ uint8_t raw[];
  uint8_t* query = reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(raw) + 1023) & ~uintptr_t{1023});
  uint8_t* k_tiles = query + 2 * Shape::kTileBytes;
  uint8_t* v_tiles = k_tiles + Shape::kStages * Shape::kTileBytes;
  uint32_t* mask = reinterpret_cast<uint32_t*>(v_tiles + Shape::kStages * Shape::kTileBytes);  // [rows of the tile][kMaskWords]
  __shared__ Barriers barriers;
  pdl_release();
  if (threadIdx.x < 2) {
    if (maps.pages) prefetch_map(&maps.pool[threadIdx.x]);
    if (maps.own) prefetch_map(&maps.scratch[threadIdx.x]);
  }
  AttentionUnit u;
  if (!find_unit(a, blockIdx.x, &u)) return pdl_wait();  // without work, too, it must not let the next kernel pass the one before
  const ops::ForestSegment s = u.s;
  const int ratio = a.ratio, kv = blockIdx.y;
  const int item0 = u.tile * kItems, items = min(kItems, s.row_count * ratio - item0), row0 = row_of_item(a, item0),
            rows = row_of_item(a, item0 + items - 1) - row0 + 1;
  // Keys of this part. A certain row sees nothing past itself, so a tile of prompt rows ends early.
  const int own = a.bidirectional ? s.row_count : s.certain ? row0 + rows : s.row_count;
  const int lowest = attention_lowest(a, s.context), end = s.context + own, all = (end - lowest + kKeyTile - 1) / kKeyTile;
  const int first = a.sequential ? 0 : u.part * u.parts.per, last = a.sequential ? all : min(all, first + u.parts.per);
  if (first >= last) {  // parts that only later rows of the segment reach
    pdl_wait();
    for (int m = threadIdx.x; m < items; m += kThreads) {
      const int row = row_of_item(a, item0 + m), head = kv * ratio + item0 + m - row * ratio;
      a.sums[static_cast<int64_t>(u.first_slot + u.part * s.row_count + row) * a.heads + head] = make_float2(-INFINITY, 0.0f);
    }
    return;
  }
  const int warpgroups = items > 64 ? 2 : 1;
  if (threadIdx.x == 0) {
    for (int i = 0; i < Shape::kStages; ++i) {
      for (int v = 0; v < 2; ++v) barrier_init(&barriers.full[v][i], 128), barrier_init(&barriers.empty[v][i], 4 * warpgroups);
    }
    barrier_init_done();
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    registers_down<40>();
    produce<kDim>(a, maps, s, kv, lowest, end, first, last, k_tiles, &barriers);
    return;
  }
  const int thread = threadIdx.x - 128, group = thread / 128, warp = thread / 32 % 4, lane = thread % 32;
  registers_up<232>();

  if (!a.bidirectional && !s.certain && lowest + last * kKeyTile > s.context) {
    for (int i = thread; i < rows; i += 256) {
      uint32_t* words = mask + i * kMaskWords;
#pragma unroll
      for (int w = 0; w < kMaskWords; ++w) words[w] = 0;
      for (int j = s.first_row + row0 + i; j >= 0; j = a.parent[j]) words[(j - s.first_row) / 32] |= 1u << ((j - s.first_row) % 32);
    }
  }
  const int m0 = group * 64 + warp * 16 + lane / 4;  // and m0 + 8
  int row_of[2], position[2], out_row[2], head[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int m = item0 + min(m0 + 8 * i, items - 1);
    row_of[i] = row_of_item(a, m), head[i] = kv * ratio + m - row_of[i] * ratio;
    out_row[i] = s.first_row + row_of[i];
    position[i] = a.position[out_row[i]];
  }
  pdl_wait();
  {
    constexpr int kStep = 256 / kChunks;
    const int c = thread % kChunks;
#pragma unroll 1
    for (int base = thread / kChunks; base < 64 * warpgroups; base += 8 * kStep) {  // eight loads under way
      uint4 q[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int m = base + i * kStep, row = row_of_item(a, item0 + m), head = kv * ratio + item0 + m - row * ratio;
        q[i] = uint4{0, 0, 0, 0};
        if (m < items) q[i] = *reinterpret_cast<const uint4*>(a.q + (s.first_row + row) * a.q_stride + head * kDim + c * 8);
      }
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int m = base + i * kStep;
        *reinterpret_cast<uint4*>(query + m / 64 * Shape::kTileBytes + chunk_at(m % 64, c)) = q[i];
      }
    }
  }
  fence_for_products();
  asm volatile("bar.sync 1, 256;" ::: "memory");
  if (group >= warpgroups) return;

  const float scale = a.scale * kLog2e;
  const uint64_t q_at = descriptor(query + group * Shape::kTileBytes);
  const uint64_t k_at = descriptor(k_tiles), v_at = descriptor_transposed(v_tiles, Shape::kBlockBytes);

  float o[kDim / 2], x[32], top[2], sum[2], all_top[2] = {-INFINITY, -INFINITY}, all_sum[2] = {0, 0};
  uint32_t p[16];
  int k_stage = 0, v_stage = 0;
  uint32_t k_parity = 0, v_parity = 0;
  const auto scores = [&] {  // enqueues x = Q · Kᵀ
    barrier_wait(&barriers.full[0][k_stage], k_parity);
    const uint64_t k = k_at + k_stage * (Shape::kTileBytes >> 4);
    hold(x);
    mma_fence();
#pragma unroll
    for (int d = 0; d < kDim / 16; ++d) {
      const int at = d / 4 * (Shape::kBlockBytes >> 4) + d % 4 * 2;
      Wgmma<64>::mma(x, q_at + at, k + at, d > 0);
    }
    mma_commit();
  };
  const auto scores_done = [&] {  // after the wait
    hold(x);
    if (lane == 0) barrier_arrive(&barriers.empty[0][k_stage]);
    if (++k_stage == Shape::kStages) k_stage = 0, k_parity ^= 1;
  };
  const auto values = [&](int accumulate) {  // enqueues o (+)= P · V
    barrier_wait(&barriers.full[1][v_stage], v_parity);
    const uint64_t v = v_at + v_stage * (Shape::kTileBytes >> 4);
    hold(p);
    hold(o);
    mma_fence();
#pragma unroll
    for (int k = 0; k < kKeyTile / 16; ++k) {
      WgmmaValues<kDim>::mma(o, p + 4 * k, v + k * (16 * 128 >> 4), accumulate);
      accumulate = 1;
    }
    mma_commit();
  };
  const auto values_done = [&] {
    hold(o);
    if (lane == 0) barrier_arrive(&barriers.empty[1][v_stage]);
    if (++v_stage == Shape::kStages) v_stage = 0, v_parity ^= 1;
  };
  float keep[2];
  const auto softmax = [&](int t) {  // x: scores in, exponentials out
    const int base = lowest + t * kKeyTile;
    const bool seen_by_all = (base + kKeyTile <= s.context && (a.window == 0 || base > s.context + s.row_count - a.window)) ||
                             (s.certain && !a.bidirectional && a.window == 0 && base + kKeyTile - 1 - s.context <= row0);
    if (!seen_by_all) {
      // Bit k of `seen`: the row sees key base + k. A window's own rows are a chain, so a key's number is its position.
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int own0 = s.context - base;  // bit of own row 0; may lie on either side of the tile
        uint64_t seen = bits_below(own0);
        if (a.bidirectional) {
          seen = bits_below(own0 + own);
        } else if (s.certain) {
          seen = bits_below(own0 + row_of[i] + 1);
        } else if (own0 < kKeyTile) {
          const uint32_t* words = mask + (row_of[i] - row0) * kMaskWords;
          if (own0 >= 0) {
            seen |= (words[0] | static_cast<uint64_t>(words[1]) << 32) << own0;
          } else {
            const int w = -own0 / 32, shift = -own0 % 32;
            const auto word = [&](int k) { return k < kMaskWords ? words[k] : 0u; };
            const uint32_t middle = word(w + 1);
            seen = __funnelshift_r(word(w), middle, shift) | static_cast<uint64_t>(__funnelshift_r(middle, word(w + 2), shift)) << 32;
          }
        }
        if (a.window > 0) seen &= ~bits_below(position[i] - a.window + 1 - base);
        seen >>= lane % 4 * 2;
        const uint32_t half[2] = {static_cast<uint32_t>(seen), static_cast<uint32_t>(seen >> 32)};
#pragma unroll
        for (int n = 0; n < 8; ++n)
#pragma unroll
          for (int e = 0; e < 2; ++e)
            if (!(half[n / 4] >> (n % 4 * 8 + e) & 1)) x[n * 4 + 2 * i + e] = -INFINITY;
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float m = fmaxf(x[2 * i], x[2 * i + 1]);
#pragma unroll
      for (int n = 1; n < 8; ++n) m = fmaxf(m, fmaxf(x[n * 4 + 2 * i], x[n * 4 + 2 * i + 1]));
      m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 1));
      m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 2));
      m = fmaxf(top[i], m * scale);
      const float from = m == -INFINITY ? 0.0f : m;
      keep[i] = exp2_fast(top[i] - from);
      top[i] = m;
      float part = 0;
#pragma unroll
      for (int n = 0; n < 8; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& one = x[n * 4 + 2 * i + e];
          one = exp2_fast(__fmaf_rn(one, scale, -from));
          part += one;
        }
      sum[i] = __fmaf_rn(sum[i], keep[i], part);
    }
  };
  const auto round_values = [&] {
#pragma unroll
    for (int i = 0; i < 16; ++i) p[i] = matrix::pack(x[2 * i], x[2 * i + 1]);
  };

  for (int from = first; from < last; from += u.parts.per) {
    const int to = min(last, from + u.parts.per);
    top[0] = top[1] = -INFINITY, sum[0] = sum[1] = 0;
#pragma unroll
    for (int i = 0; i < kDim / 2; ++i) o[i] = 0;
#pragma unroll
    for (int i = 0; i < 32; ++i) x[i] = 0;
    // The first keys and the last by code of their own: in one loop with conditions the compiler serializes the products (C7514), which
    // made a prompt's attention a fifth slower.
    scores();
    mma_wait<0>();
    scores_done();
    softmax(from);
    round_values();
    for (int t = from + 1; t < to; ++t) {
      scores();
      values(t > from + 1);
      mma_wait<1>();
      scores_done();
      softmax(t);
      mma_wait<0>();
      values_done();
      if (__any_sync(0xffffffffu, keep[0] != 1.0f || keep[1] != 1.0f)) {
#pragma unroll
        for (int n = 0; n < kDim / 8; ++n) {
          o[n * 4] *= keep[0], o[n * 4 + 1] *= keep[0];
          o[n * 4 + 2] *= keep[1], o[n * 4 + 3] *= keep[1];
        }
      }
      round_values();
    }
    values(to > from + 1);
    mma_wait<0>();
    values_done();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], 1);
      sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], 2);
    }
    if (u.parts.count == 1) {
      all_sum[0] = sum[0], all_sum[1] = sum[1];
      break;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (m0 + 8 * i >= items) continue;
      const int slot = a.sequential ? out_row[i] : u.first_slot + u.part * s.row_count + row_of[i];
      const int64_t at = static_cast<int64_t>(slot) * a.heads + head[i];
      float* state = a.partial + at * kDim + lane % 4 * 2;
      if (!a.sequential) {
#pragma unroll
        for (int n = 0; n < kDim / 8; ++n) *reinterpret_cast<float2*>(state + n * 8) = make_float2(o[n * 4 + 2 * i], o[n * 4 + 2 * i + 1]);
        if (lane % 4 == 0) a.sums[at] = make_float2(top[i], sum[i]);
        continue;
      }
      const float new_top = fmaxf(all_top[i], top[i]);
      const FoldWeight w = fold_weight(all_top[i], top[i], new_top);
      all_top[i] = new_top, all_sum[i] = fold(all_sum[i], w, sum[i]);
#pragma unroll
      for (int n = 0; n < kDim / 8; ++n) {
        float2* place = reinterpret_cast<float2*>(state + n * 8);
        const float2 before = from == first ? make_float2(0.0f, 0.0f) : *place;
        o[n * 4 + 2 * i] = fold(before.x, w, o[n * 4 + 2 * i]), o[n * 4 + 2 * i + 1] = fold(before.y, w, o[n * 4 + 2 * i + 1]);
        if (to < last) *place = make_float2(o[n * 4 + 2 * i], o[n * 4 + 2 * i + 1]);
      }
    }
  }
  if (u.parts.count > 1 && !a.sequential) return;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (m0 + 8 * i >= items) continue;
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n)
      attention_put(a, out_row[i], out_row[i], head[i], n * 8 + lane % 4 * 2, o[n * 4 + 2 * i], o[n * 4 + 2 * i + 1], all_sum[i]);
  }
#endif
}

template <int kDim>
cudaError_t run(cudaStream_t stream, AttentionArgsDevice a, const AttentionCall& c, const AttentionWork& work) {
  constexpr int kBytes = HopperShape<kDim>::kBytes;
  static const cudaError_t once = cudaFuncSetAttribute(attention_hopper_kernel<kDim>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (once != cudaSuccess) return once;
  a.tile_items = kItems;
  AttentionPlan plan;
  if (!attention_plan(&a, *c.forest, work, &plan)) return cudaErrorNotSupported;
  Maps maps{};
  maps.pages = c.pool.k_map != nullptr, maps.own = c.scratch.k_map != nullptr;
  if (maps.pages) maps.pool[0] = *c.pool.k_map, maps.pool[1] = *c.pool.v_map, maps.pool_row = c.pool.map_row;
  if (maps.own) maps.scratch[0] = *c.scratch.k_map, maps.scratch[1] = *c.scratch.v_map, maps.scratch_row = c.scratch.map_row;
  const cudaError_t e = launch(attention_hopper_kernel<kDim>, dim3(plan.units, a.kv_heads), dim3(kThreads), kBytes, stream, maps, a);
  return e == cudaSuccess && plan.join ? attention_join(stream, a, c.forest->rows, plan) : e;
}

}  // namespace

cudaError_t attention_hopper(cudaStream_t stream, AttentionArgsDevice a, const AttentionCall& c, const AttentionWork& work) {
  const ops::Forest& f = *c.forest;
  if (!work.hopper || f.max_segment_rows == 0 || f.max_tree_rows > kMaskWords * 32 || a.q_stride % 8 || a.o_stride % 2 ||
      a.heads / a.kv_heads > kItems)
    return cudaErrorNotSupported;
  switch (a.dim) {
    case 128: return run<128>(stream, a, c, work);
    case 256: return run<256>(stream, a, c, work);
    default: return cudaErrorNotSupported;
  }
}

}  // namespace ddtree::kernels
