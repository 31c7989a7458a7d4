// The convolution along parents, the gated delta rule by forward substitution, and the commit.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "ops/cpu/cpu_backend.h"
#include "ops/cpu/for_items.h"

namespace ddtree::ops::cpu {
namespace {

// New window = the last `taps` of [window, inputs]; row(i) is the i-th input. In place: a source never lies before its target.
template <class Row>
void shift_window(int64_t channels, int64_t taps, float* window, int64_t count, const Row& row) {
  for (int64_t i = 0; i < taps; ++i) {
    const int64_t from = i + count;
    std::memmove(window + i * channels, from < taps ? window + from * channels : row(from - taps), sizeof(float) * channels);
  }
}

// Rows of a certain segment at which a chunk begins have no parent inside it: all before is in the state.
int32_t parent_in_chunk(const Forest& forest, const ForestSegment& segment, int32_t row) {
  return segment.certain && (row - segment.first_row) % kDeltaChunk == 0 ? -1 : forest.parent[row];
}

}  // namespace

void CpuBackend::conv(const ConvArgs& args) {
  const auto& states = static_cast<const CpuStatePool&>(*args.states);
  const auto& trace = static_cast<const CpuDeltaTrace&>(*args.trace);
  const Forest& forest = *args.forest;
  const int64_t channels = states.shape().channels();
  const int width = states.shape().conv_width;
  pool_.parallel_for(forest.rows, grain(channels * width * 4), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const ForestSegment& segment = forest.segment[forest.segment_of[r]];
      const float* window = states.window(segment.slot, args.layer);
      const float* m[8];
      auto row = static_cast<int32_t>(r);
      int32_t before = 0;  // columns behind the root
      for (int t = width - 1; t >= 0; --t) {
        if (row >= 0) {
          m[t] = args.x.f32(row);
          row = forest.parent[row];
        } else {
          m[t] = window + (width - 2 - before++) * channels;
        }
      }
      kernels_.conv_silu(channels, width, m, args.w.f32(), args.w.stride, args.y.f32(r));
      round(channels, args.y.f32(r));
      if (!segment.certain) std::memcpy(trace.input(args.layer, static_cast<int32_t>(r)), args.x.f32(r), sizeof(float) * channels);
    }
  });
  for (int32_t s = 0; s < forest.segments; ++s) {
    const ForestSegment& segment = forest.segment[s];
    if (!segment.certain) continue;
    shift_window(channels, width - 1, states.window(segment.slot, args.layer), segment.row_count,
                 [&](int64_t i) { return args.x.f32(segment.first_row + i); });
  }
}

// S <- e^{P_l} S + Σ e^{P_l - P_j} k^_j u_jᵀ over one path, as scaled keys [rows][key_dim] against gathered updates [rows][value_dim].
void CpuBackend::fold(const CpuStatePool& states, const CpuDeltaTrace& trace, int32_t layer, int32_t head, int32_t slot, const int32_t* row,
                      int64_t count, float* workspace) const {
  const DeltaShape& shape = states.shape();
  const int64_t dk = shape.key_dim, dv = shape.value_dim;
  const int32_t key_head = head / (shape.value_heads / shape.key_heads);
  float* keys = workspace;
  float* updates = keys + count * dk;
  const double leaf = trace.prefix(layer, row[count - 1])[head];
  for (int64_t j = 0; j < count; ++j) {
    std::memcpy(keys + j * dk, trace.key(layer, row[j]) + key_head * dk, sizeof(float) * dk);
    kernels_.scale(dk, static_cast<float>(std::exp(leaf - trace.prefix(layer, row[j])[head])), keys + j * dk);
    std::memcpy(updates + j * dv, trace.update(layer, row[j]) + head * dv, sizeof(float) * dv);
  }
  float* state = states.state(slot, layer, head);
  kernels_.scale(dk * dv, static_cast<float>(std::exp(leaf)), state);
  for (int64_t i = 0; i < dk; i += kTileRows) {
    const int m = static_cast<int>(std::min<int64_t>(kTileRows, dk - i));
    kernels_.tile(m, dv, count, keys + i, dk, updates, dv, state + i * dv, dv, true);
  }
}

void CpuBackend::delta_rule(const DeltaRuleArgs& args) {
  const auto& states = static_cast<const CpuStatePool&>(*args.states);
  const auto& trace = static_cast<const CpuDeltaTrace&>(*args.trace);
  const Forest& forest = *args.forest;
  const DeltaShape& shape = states.shape();
  const int64_t dk = shape.key_dim, dv = shape.value_dim, keys = trace.key_width(), heads = shape.value_heads;
  const int32_t layer = args.layer, ratio = shape.value_heads / shape.key_heads;
  const float query_scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(dk)));

  // Gates and normed keys and queries of every row. Parents come first, so prefixes are one sweep.
  pool_.parallel_for(forest.rows, grain(keys * 8), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const float* c = args.c.f32(r);
      float* q = trace.queries.data() + r * keys;
      float* k = trace.key(layer, static_cast<int32_t>(r));
      std::memcpy(q, c, sizeof(float) * keys);
      std::memcpy(k, c + keys, sizeof(float) * keys);
      const int32_t self = 0;
      for (int32_t h = 0; h < shape.key_heads; ++h) {
        float qq, kk, unused;
        kernels_.dots2(dk, 1, &self, q + h * dk, 0, q + h * dk, q + h * dk, &qq, &unused);
        kernels_.dots2(dk, 1, &self, k + h * dk, 0, k + h * dk, k + h * dk, &kk, &unused);
        kernels_.scale(dk, 1.0f / std::sqrt(qq + 1e-6f) * query_scale, q + h * dk);
        kernels_.scale(dk, 1.0f / std::sqrt(kk + 1e-6f), k + h * dk);
      }
      double* prefix = trace.prefix(layer, static_cast<int32_t>(r));
      for (int64_t h = 0; h < heads; ++h) {
        const double x = static_cast<double>(args.a.f32(r)[h]) + args.dt_bias.f32()[h];
        prefix[h] = -std::exp(static_cast<double>(args.a_log.f32()[h])) * (x > 20.0 ? x : std::log1p(std::exp(x)));
        trace.betas.data()[r * heads + h] = static_cast<float>(1.0 / (1.0 + std::exp(-static_cast<double>(args.b.f32(r)[h]))));
      }
    }
  });
  for (int32_t s = 0; s < forest.segments; ++s) {
    const ForestSegment& segment = forest.segment[s];
    for (int32_t r = segment.first_row; r < segment.first_row + segment.row_count; ++r) {
      const int32_t parent = parent_in_chunk(forest, segment, r);
      if (parent < 0) continue;
      const double* above = trace.prefix(layer, parent);
      double* prefix = trace.prefix(layer, r);
      for (int64_t h = 0; h < heads; ++h) prefix[h] += above[h];
    }
  }

  for_items(forest.segments * heads, 3 * dk * dv, [&](int thread, int64_t index) {
    const ForestSegment& segment = forest.segment[index / heads];
    const auto head = static_cast<int32_t>(index % heads);
    const int32_t key_head = head / ratio;
    float* tile_k = worker(thread);           // [dk][m]
    float* tile_q = tile_k + kTileRows * dk;  // [dk][m]
    float* from_k = tile_q + kTileRows * dk;  // [m][dv]  S0ᵀ k^
    float* from_q = from_k + kTileRows * dv;  // [m][dv]  S0ᵀ q^
    float* coefficients = from_q + kTileRows * dv;
    const int64_t room = trace.rows() + 16;
    float* kk = coefficients;  // k^_j · k^_i, then its coefficient
    float* kq = kk + room;     // k^_j · q^_i
    float* decay = kq + room;  // P_i - P_j, then its exponential
    auto* path = reinterpret_cast<int32_t*>(decay + room);
    float* folding = decay + 2 * room;
    const float* key_base = trace.key(layer, 0) + key_head * dk;
    const float* update_base = trace.update(layer, 0) + head * dv;
    const float* state = states.state(segment.slot, layer, head);

    const int32_t all = segment.row_count, chunk = segment.certain ? kDeltaChunk : all;
    for (int32_t first = segment.first_row; first < segment.first_row + all; first += chunk) {
      const int32_t rows = std::min(chunk, segment.first_row + all - first), tiles = (rows + kTileRows - 1) / kTileRows;
      for (int32_t t = 0; t < tiles; ++t) {
        const int32_t begin = first + static_cast<int32_t>(int64_t{rows} * t / tiles);
        const int32_t end = first + static_cast<int32_t>(int64_t{rows} * (t + 1) / tiles);
        const int m = end - begin;
        for (int e = 0; e < m; ++e) {
          const float* k = trace.key(layer, begin + e) + key_head * dk;
          const float* q = trace.queries.data() + (begin + e) * keys + key_head * dk;
          for (int64_t i = 0; i < dk; ++i) {
            tile_k[i * m + e] = k[i];
            tile_q[i * m + e] = q[i];
          }
        }
        kernels_.tile(m, dv, dk, tile_k, m, state, dv, from_k, dv, false);
        kernels_.tile(m, dv, dk, tile_q, m, state, dv, from_q, dv, false);
        for (int e = 0; e < m; ++e) {
          const int32_t row = begin + e;
          // path[0 … ancestors] ends with the row itself.
          int32_t ancestors = 0;
          for (int32_t r = parent_in_chunk(forest, segment, row); r >= 0; r = parent_in_chunk(forest, segment, r)) ++ancestors;
          int32_t r = row;
          for (int32_t i = ancestors; i >= 0; --i, r = parent_in_chunk(forest, segment, r)) path[i] = r;
          const double prefix = trace.prefix(layer, row)[head];
          kernels_.dots2(dk, ancestors + 1, path, key_base, keys, trace.key(layer, row) + key_head * dk,
                         trace.queries.data() + row * keys + key_head * dk, kk, kq);
          for (int32_t j = 0; j < ancestors; ++j) decay[j] = static_cast<float>(prefix - trace.prefix(layer, path[j])[head]);
          if (ancestors > 0) kernels_.exp(round_up(ancestors, kLanes16), decay, decay);
          const float own = kq[ancestors];
          for (int32_t j = 0; j < ancestors; ++j) {
            kk[j] *= -decay[j];
            kq[j] *= decay[j];
          }
          const auto from_state = static_cast<float>(std::exp(prefix));
          const float* v = args.c.f32(row) + 2 * keys + head * dv;
          float* u = trace.update(layer, row) + head * dv;
          float* o = from_q + e * dv;
          const float* s = from_k + e * dv;
          kernels_.subtract(dv, v, from_state, s, u);
          kernels_.scale(dv, from_state, o);
          kernels_.add_rows2(dv, ancestors, path, kk, kq, update_base, heads * dv, u, o);
          kernels_.scale(dv, trace.betas.data()[row * heads + head], u);
          kernels_.add_rows(dv, 1, &row, &own, update_base, heads * dv, o);
          round(dv, o);
          std::memcpy(args.o.f32(row) + head * dv, o, sizeof(float) * dv);
        }
      }
      if (segment.certain) {
        for (int32_t i = 0; i < rows; ++i) path[i] = first + i;
        fold(states, trace, layer, head, segment.slot, path, rows, folding);
      }
    }
  });
}

void CpuBackend::delta_commit(const DeltaCommitArgs& args) {
  const auto& states = static_cast<const CpuStatePool&>(*args.states);
  const auto& trace = static_cast<const CpuDeltaTrace&>(*args.trace);
  const DeltaShape& shape = states.shape();
  const int64_t heads = shape.value_heads, channels = shape.channels();
  for_items(args.paths.count * shape.layers * heads, 2 * states.matrix(), [&](int thread, int64_t index) {
    const auto head = static_cast<int32_t>(index % heads), layer = static_cast<int32_t>(index / heads % shape.layers);
    const int64_t path = index / heads / shape.layers;
    const int32_t begin = args.paths.offset[path], count = args.paths.offset[path + 1] - begin;
    const int32_t* row = args.paths.row + begin;
    fold(states, trace, layer, head, args.paths.slot[path], row, count, worker(thread));
    if (head == 0) {
      shift_window(channels, shape.conv_width - 1, states.window(args.paths.slot[path], layer), count,
                   [&](int64_t i) { return trace.input(layer, row[i]); });
    }
  });
}

}  // namespace ddtree::ops::cpu
