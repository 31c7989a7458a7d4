// Attention over pages and ancestors, and what writes K and V.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "ops/cpu/cpu_backend.h"
#include "ops/cpu/for_items.h"

namespace ddtree::ops::cpu {
namespace {

constexpr float kNever = -std::numeric_limits<float>::infinity();

// NeoX rotation of the first `rope.rotary_dim()` dimensions, in place.
void rotate(const CpuRope& rope, int32_t position, float* x) {
  const int64_t half = rope.rotary_dim() / 2;
  const float* cosine = rope.at(position);
  const float* sine = cosine + half;
  for (int64_t i = 0; i < half; ++i) {
    const float a = x[i], b = x[half + i];
    x[i] = a * cosine[i] - b * sine[i];
    x[half + i] = b * cosine[i] + a * sine[i];
  }
}

}  // namespace

void CpuBackend::attention_prepare(const AttentionPrepareArgs& args) {
  const auto& scratch = static_cast<const CpuKvScratch&>(*args.scratch);
  const auto* pool = static_cast<const CpuKvPool*>(args.pool);
  const auto& rope = static_cast<const CpuRope&>(*args.rope);
  const Forest& forest = *args.forest;
  const int64_t d = scratch.shape().head_dim, kv_heads = scratch.shape().kv_heads, q_step = args.gate ? 2 * d : d;
  pool_.parallel_for(forest.rows, grain((args.heads + 2 * kv_heads) * d * 8), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const float* x = args.packed.f32(r);
      const int32_t position = forest.position[r];
      for (int32_t h = 0; h < args.heads; ++h) {
        float* q = args.q.f32(r) + h * d;
        kernels_.rms_norm(d, x + h * q_step, args.q_norm.f32(), args.eps, q);
        rotate(rope, position, q);
      }
      round(args.heads * d, args.q.f32(r));
      // K in place: the projection's K columns are not read again.
      float* keys = args.packed.f32(r) + args.heads * q_step;
      const float* values = keys + kv_heads * d;
      for (int32_t h = 0; h < kv_heads; ++h) {
        kernels_.rms_norm(d, keys + h * d, args.k_norm.f32(), args.eps, keys + h * d);
        rotate(rope, position, keys + h * d);
      }
      round(kv_heads * d, keys);
      const bool certain = pool != nullptr && forest.segment[forest.segment_of[r]].certain;
      for (int32_t h = 0; h < kv_heads; ++h) {
        scratch.write(args.scratch_layer, static_cast<int32_t>(r), h, keys + h * d, values + h * d);
        if (certain) pool->write(args.pool_layer, forest.place[r], h, keys + h * d, values + h * d);
      }
    }
  });
}

struct CpuBackend::Attend {
  const Forest* forest;
  int32_t heads;
  Tensor q, gate, o;  // gate: the packed projection, or absent
  const CpuKvScratch* scratch;
  int32_t scratch_layer;
  const CpuKvPool* pool;
  int32_t pool_layer;
  const int32_t* row;  // [count], or null
  int32_t count;
  bool block;  // own rows are a block, not a tree
  bool causal;
  int64_t window;
};

// One item is a tile of at most 12 (row, query head) pairs of one segment and kv head. Scores of a tile lie in one array by position, so
// everything after them (softmax, weighted sum) runs in order of position and cannot tell pages from scratch or a chain from a tree.
void CpuBackend::attend(const Attend& args) {
  const Forest& forest = *args.forest;
  const CpuKvScratch& scratch = *args.scratch;
  const CpuKvPool& pool = *args.pool;
  const int64_t d = scratch.shape().head_dim, kv_heads = scratch.shape().kv_heads, page_size = pool.page_size();
  const int32_t group = args.heads / static_cast<int32_t>(kv_heads);
  const float scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(d)));
  const int64_t span = round_up(limits_.max_positions + 1, 64) + 64;  // floats of one row of scores

  // Items: `first` counts pairs of the segment; pair e is row list[e / group], head e % group.
  items_.clear();
  int64_t work = 0;
  for (int32_t i = 0, end = 0; i < args.count; i = end) {
    const int32_t segment = forest.segment_of[args.row ? args.row[i] : i];
    for (end = i; end < args.count && forest.segment_of[args.row ? args.row[end] : end] == segment;) ++end;
    const int32_t pairs = (end - i) * group, tiles = (pairs + kTileRows - 1) / kTileRows;
    for (int32_t t = 0; t < tiles; ++t) {
      const int32_t first = static_cast<int32_t>(int64_t{pairs} * t / tiles), last = static_cast<int32_t>(int64_t{pairs} * (t + 1) / tiles);
      for (int32_t h = 0; h < kv_heads; ++h) items_.push_back({segment, h, i * group + first, last - first});
    }
    work = std::max<int64_t>(work, forest.segment[segment].context + end - i);
  }

  for_items(static_cast<int64_t>(items_.size()), work * d * 4, [&](int thread, int64_t index) {
    const Item& item = items_[index];
    const ForestSegment& segment = forest.segment[item.segment];
    const int m = item.count;
    const int64_t context = segment.context;
    float* queries = worker(thread);                                                       // [D][m]
    float* out = queries + kTileRows * d;                                                  // [m][D]
    float* scores = out + kTileRows * d;                                                   // [m][span]
    float* transposed = scores + kTileRows * span;                                         // [positions][m]
    float* own = transposed + kTileRows * span;                                            // [m][32]
    auto* paths = reinterpret_cast<int32_t*>(own + 2 * kTileRows * CpuKvScratch::kPanel);  // [m][max_rows]

    struct Pair {
      int32_t out_row, row, head;  // row of o, row of the forest, query head
      const int32_t* path;         // own rows that it sees, in order of position
      int32_t length, at;          // of path; progress through it
      int64_t low;                 // first visible position
    } pair[kTileRows];
    int32_t common = std::numeric_limits<int32_t>::max(), last_own = 0;
    int64_t low = std::numeric_limits<int64_t>::max();
    for (int e = 0; e < m; ++e) {
      Pair& p = pair[e];
      const int32_t at = item.first + e;
      p.out_row = at / group;
      p.row = args.row ? args.row[p.out_row] : p.out_row;
      p.head = item.head * group + at % group;
      p.at = 0;
      if (e > 0 && pair[e - 1].row == p.row) {
        p.path = pair[e - 1].path;
        p.length = pair[e - 1].length;
      } else {
        int32_t* path = paths + int64_t{e} * limits_.max_rows;
        if (args.block) {
          p.length = args.causal ? p.row - segment.first_row + 1 : segment.row_count;
          for (int32_t i = 0; i < p.length; ++i) path[i] = segment.first_row + i;
        } else {
          p.length = forest.position[p.row] - segment.context + 1;
          int32_t r = p.row;
          for (int32_t i = p.length - 1; i >= 0; --i, r = forest.parent[r]) path[i] = r;
        }
        p.path = path;
      }
      p.low = args.window > 0 ? std::max<int64_t>(0, forest.position[p.row] - args.window + 1) : 0;
      low = std::min(low, p.low);
      last_own = std::max(last_own, p.path[p.length - 1]);
      // Own rows that all pairs share and that lie behind one another: the whole past of a prompt chunk, as a rule.
      int32_t run = 0;
      while (run < std::min(p.length, common) && p.path[run] == segment.first_row + run) ++run;
      common = run;
      const float* q = args.q.f32(p.row) + p.head * d;
      for (int64_t i = 0; i < d; ++i) queries[i * m + e] = q[i];
    }

    // Scores of committed positions, page by page; column = position - base. The columns of a page past `context` are overwritten below.
    const int64_t base = std::min(low, context) / page_size * page_size;
    for (int64_t start = base; start < context; start += page_size) {
      const int32_t page = forest.pages[segment.first_page + start / page_size];
      kernels_.tile(m, page_size, d, queries, m, pool.k_page(args.pool_layer, page, item.head), page_size, scores + (start - base), span,
                    false);
    }
    // Scores of own rows: against whole panels of the scratch, then picked along each path.
    for (int32_t panel = segment.first_row / CpuKvScratch::kPanel; panel <= last_own / CpuKvScratch::kPanel; ++panel) {
      kernels_.tile(m, CpuKvScratch::kPanel, d, queries, m, scratch.k_panel(args.scratch_layer, item.head, panel), CpuKvScratch::kPanel,
                    own, CpuKvScratch::kPanel, false);
      const int32_t first = panel * CpuKvScratch::kPanel, end = first + CpuKvScratch::kPanel;
      for (int e = 0; e < m; ++e) {
        Pair& p = pair[e];
        float* s = scores + e * span + (context - base);
        for (; p.at < p.length && p.path[p.at] < end; ++p.at) s[p.at] = own[e * CpuKvScratch::kPanel + p.path[p.at] - first];
      }
    }
    float sum[kTileRows];
    for (int e = 0; e < m; ++e) {
      const Pair& p = pair[e];
      float* s = scores + e * span;
      const int64_t length = context + p.length - base, padded = round_up(length, kLanes16);
      std::fill(s, s + std::clamp<int64_t>(p.low - base, 0, length), kNever);
      std::fill(s + length, s + padded, kNever);
      sum[e] = kernels_.softmax(padded, scale, s);
    }

    // Weighted sums in order of position: committed pages and the common run as matrix tiles, the rest of each path by itself.
    const int64_t shared = context - base + common;
    const float* weights = scores;
    if (m > 1) {
      for (int e = 0; e < m; ++e) {
        const float* s = scores + e * span;
        for (int64_t i = 0; i < shared; ++i) transposed[i * m + e] = s[i];
      }
      weights = transposed;
    }
    bool more = false;
    for (int64_t start = base; start < context; start += page_size, more = true) {
      const int32_t page = forest.pages[segment.first_page + start / page_size];
      kernels_.tile(m, d, std::min(page_size, context - start), weights + (start - base) * m, m,
                    pool.v_page(args.pool_layer, page, item.head), d, out, d, more);
    }
    const float* values = scratch.v_rows(args.scratch_layer, item.head);
    kernels_.tile(m, d, common, weights + (context - base) * m, m, values + segment.first_row * d, d, out, d, more);
    for (int e = 0; e < m; ++e) {
      const Pair& p = pair[e];
      float* y = out + e * d;
      kernels_.add_rows(d, p.length - common, p.path + common, scores + e * span + shared, values, d, y);
      kernels_.scale(d, 1.0f / sum[e], y);
      if (args.gate.present()) kernels_.gate_sigmoid(d, y, args.gate.f32(p.row) + (2 * p.head + 1) * d);
      round(d, y);
      std::memcpy(args.o.f32(p.out_row) + p.head * d, y, sizeof(float) * d);
    }
  });
}

void CpuBackend::attention(const AttentionArgs& args) {
  attend({.forest = args.forest,
          .heads = args.heads,
          .q = args.q,
          .gate = args.gate ? args.packed : Tensor{},
          .o = args.o,
          .scratch = static_cast<const CpuKvScratch*>(args.scratch),
          .scratch_layer = args.scratch_layer,
          .pool = static_cast<const CpuKvPool*>(args.pool),
          .pool_layer = args.pool_layer,
          .row = args.row,
          .count = args.row ? args.count : args.forest->rows,
          .block = false,
          .causal = true,
          .window = 0});
}

void CpuBackend::draft_attention(const DraftAttentionArgs& args) {
  attend({.forest = args.forest,
          .heads = args.heads,
          .q = args.q,
          .gate = {},
          .o = args.o,
          .scratch = static_cast<const CpuKvScratch*>(args.scratch),
          .scratch_layer = args.scratch_layer,
          .pool = static_cast<const CpuKvPool*>(args.pool),
          .pool_layer = args.pool_layer,
          .row = nullptr,
          .count = args.forest->rows,
          .block = true,
          .causal = args.causal,
          .window = args.window});
}

void CpuBackend::draft_context(const DraftContextArgs& args) {
  const auto& pool = static_cast<const CpuKvPool&>(*args.pool);
  const auto& rope = static_cast<const CpuRope&>(*args.rope);
  const KvShape& shape = pool.shape();
  const int64_t d = shape.head_dim, width = 2 * shape.kv_heads * d;
  pool_.parallel_for(args.rows, grain(shape.layers * width * 4), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      for (int32_t layer = 0; layer < shape.layers; ++layer) {
        float* keys = args.kv.f32(r) + layer * width;
        const float* values = keys + shape.kv_heads * d;
        for (int32_t h = 0; h < shape.kv_heads; ++h) {
          kernels_.rms_norm(d, keys + h * d, args.k_norm.f32(layer), args.eps, keys + h * d);
          rotate(rope, args.position[r], keys + h * d);
          round(d, keys + h * d);
          pool.write(layer, args.place[r], h, keys + h * d, values + h * d);
        }
      }
    }
  });
}

void CpuBackend::kv_commit(const KvCommitArgs& args) {
  const auto& scratch = static_cast<const CpuKvScratch&>(*args.scratch);
  const auto& pool = static_cast<const CpuKvPool&>(*args.pool);
  const KvShape& shape = scratch.shape();
  const int64_t d = shape.head_dim, heads = int64_t{shape.layers} * shape.kv_heads;
  pool_.parallel_for(heads, grain(args.paths.rows * d * 4), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const auto layer = static_cast<int32_t>(i / shape.kv_heads), head = static_cast<int32_t>(i % shape.kv_heads);
      for (int32_t j = 0; j < args.paths.rows; ++j) {
        const int32_t row = args.paths.row[j], place = args.forest->place[row];
        const float* from = scratch.k_panel(layer, head, row / CpuKvScratch::kPanel) + row % CpuKvScratch::kPanel;
        float* to = pool.k_page(layer, place / pool.page_size(), head) + place % pool.page_size();
        for (int64_t x = 0; x < d; ++x) to[x * pool.page_size()] = from[x * CpuKvScratch::kPanel];
        std::memcpy(pool.v_page(layer, place / pool.page_size(), head) + int64_t{place % pool.page_size()} * d,
                    scratch.v_rows(layer, head) + int64_t{row} * d, sizeof(float) * d);
      }
    }
  });
}

}  // namespace ddtree::ops::cpu
