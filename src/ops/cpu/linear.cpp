// linear() and the row-wise ops.
#include <algorithm>
#include <cstring>

#include "base/bf16.h"
#include "ops/cpu/cpu_backend.h"

namespace ddtree::ops::cpu {

// x is packed once into tiles of at most 12 rows, k-major, so that a tile's broadcasts are neighbours in memory. Threads share the panels:
// a panel stays in the first-level cache while the tiles pass over it.
void CpuBackend::linear(const LinearArgs& args) {
  const auto& w = static_cast<const CpuWeight&>(*args.weight);
  const int64_t rows = args.x.rows, k = w.k(), n = w.n(), panels = w.panels();
  if (rows == 0) return;
  const int64_t tiles = (rows + kTileRows - 1) / kTileRows, each = rows / tiles, more = rows % tiles;
  const auto tile_first = [&](int64_t t) { return t * each + std::min(t, more); };
  const float* packed = args.x.f32();
  if (rows > 1) {
    pool_.parallel_for(tiles, grain(k * kTileRows * 4), [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) {
        const int64_t first = tile_first(t), m = tile_first(t + 1) - first;
        float* out = packed_.data() + first * k;
        for (int64_t r = 0; r < m; ++r) {
          const float* x = args.x.f32(first + r);
          for (int64_t i = 0; i < k; ++i) out[i * m + r] = x[i];
        }
      }
    });
    packed = packed_.data();
  }
  const bool round_y = bfloat16_ && !args.keep_float32;
  const auto run = [&](int64_t begin, int64_t end) {
    float last[kTileRows * kPanelColumns];  // the panel that N ends in: y has fewer columns than the panel
    for (int64_t p = begin; p < end;) {
      const int64_t whole = std::min(end, n / kPanelColumns) - p;
      const int64_t count = whole > 0 ? (rows <= kTileRows ? whole : 1) : 1;  // few rows: let the kernel take several panels at once
      for (int64_t t = 0; t < tiles; ++t) {
        const int64_t first = tile_first(t);
        const int m = static_cast<int>(tile_first(t + 1) - first);
        const float* a = packed + first * k;
        const int64_t a_step = rows > 1 ? m : 1;
        float* c = whole > 0 ? args.y.f32(first) + p * kPanelColumns : last;
        const int64_t ldc = whole > 0 ? args.y.stride : kPanelColumns;
        if (w.bf16) {
          kernels_.panels_bf16(m, k, a, a_step, w.pairs.data() + p * k * 16, count, c, ldc);
        } else {
          kernels_.panels_f32(m, k, a, a_step, w.floats.data() + p * k * 32, count, c, ldc);
        }
        const int64_t columns = whole > 0 ? count * kPanelColumns : n - p * kPanelColumns;
        for (int64_t r = 0; r < m; ++r) {
          float* y = args.y.f32(first + r) + p * kPanelColumns;
          if (whole <= 0) std::copy_n(last + r * kPanelColumns, columns, y);
          if (round_y) kernels_.round_bf16(columns, y);
        }
      }
      p += count;
    }
  };
  pool_.parallel_for(panels, grain(rows * k * kPanelColumns / 4), run);
}

void CpuBackend::embed(const EmbedArgs& args) {
  const auto& w = static_cast<const CpuWeight&>(*args.weight);
  // A row of W is a column of a panel, one element a cache line: threads share the misses.
  pool_.parallel_for(args.rows, grain(w.k() * 64), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const int64_t id = int64_t{args.token[r]} - args.first_id, column = id % kPanelColumns, panel = id / kPanelColumns;
      float* y = args.y.f32(r);
      if (group_ && (id < 0 || id >= w.n())) {  // another rank's
        std::fill_n(y, w.k(), 0.0f);
        continue;
      }
      if (w.bf16) {
        const uint32_t* from = w.pairs.data() + panel * w.k() * 16 + column % 16;
        const int shift = column < 16 ? 0 : 16;
        for (int64_t i = 0; i < w.k(); ++i) y[i] = bf16_to_float(static_cast<uint16_t>(from[i * 16] >> shift));
      } else {
        const float* from = w.floats.data() + panel * w.k() * 32 + column;
        for (int64_t i = 0; i < w.k(); ++i) y[i] = from[i * 32];
      }
      if (bfloat16_residual_) kernels_.round_bf16(w.k(), y);
    }
  });
}

void CpuBackend::all_reduce(const AllReduceArgs& args) {
  if (!group_) return;
  group_->all_reduce(args.x);
  if (args.keep_float32) return;
  for (int64_t r = 0; r < args.x.rows; ++r) round(args.x.cols, args.x.f32(r));
}

void CpuBackend::copy_rows(const CopyRowsArgs& args) {
  for (int32_t i = 0; i < args.count; ++i) {
    std::copy_n(args.x.f32(args.from ? args.from[i] : i), args.x.cols, args.y.f32(args.to ? args.to[i] : i));
  }
}

void CpuBackend::rms_norm(const RmsNormArgs& args) {
  const int64_t n = args.x.cols;
  pool_.parallel_for(args.x.rows, grain(4 * n), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      kernels_.rms_norm(n, args.x.f32(r), args.w.f32(), args.eps, args.y.f32(r));
      round(n, args.y.f32(r));
    }
  });
}

void CpuBackend::add_rms_norm(const AddRmsNormArgs& args) {
  const int64_t n = args.x.cols;
  pool_.parallel_for(args.x.rows, grain(4 * n), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      float* x = args.x.f32(r);
      if (bfloat16_residual_) {
        const float* delta = args.delta.f32(r);
        for (int64_t i = 0; i < n; ++i) x[i] = round_to_bf16(x[i] + delta[i]);
        kernels_.rms_norm(n, x, args.w.f32(), args.eps, args.y.f32(r));
      } else {
        kernels_.add_rms_norm(n, x, args.delta.f32(r), args.w.f32(), args.eps, args.y.f32(r));
      }
      round(n, args.y.f32(r));
      if (args.tap.present()) {
        std::copy_n(x, n, args.tap.f32(r));
        round(n, args.tap.f32(r));
      }
    }
  });
}

void CpuBackend::gated_rms_norm(const GatedRmsNormArgs& args) {
  const int64_t n = args.w.cols;
  pool_.parallel_for(args.o.rows, grain(16 * args.o.cols), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      float* y = args.y.f32(r);
      for (int32_t h = 0; h < args.heads; ++h) kernels_.rms_norm(n, args.o.f32(r) + h * n, args.w.f32(), args.eps, y + h * n);
      kernels_.gate_silu(args.heads * n, y, args.z.f32(r));
      round(args.heads * n, y);
    }
  });
}

void CpuBackend::silu_mul(const SiluMulArgs& args) {
  const int64_t n = args.y.cols;
  pool_.parallel_for(args.x.rows, grain(16 * n), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      kernels_.silu_mul(n, args.x.f32(r), args.x.f32(r) + n, args.y.f32(r));
      round(n, args.y.f32(r));
    }
  });
}

}  // namespace ddtree::ops::cpu
