// Random inputs, random trees and backends for the op tests. Oracles are plain float64 loops in the test files.
#pragma once

#include <catch2/catch_test_macros.hpp>
#include <cmath>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "base/bf16.h"
#include "model/tensor.h"
#include "ops/cpu/cpu_backend.h"
#include "support/op_values.h"

namespace ddtree::ops::test {

using testing::Floats;
using testing::HostWeight;
using testing::Random;

inline std::vector<const cpu::Kernels*> all_kernels() {
  std::vector<const cpu::Kernels*> v{&cpu::portable_kernels()};
  if (cpu::avx2_kernels()) v.push_back(cpu::avx2_kernels());
  if (cpu::avx512_kernels()) v.push_back(cpu::avx512_kernels());
  return v;
}

inline std::unique_ptr<cpu::CpuBackend> make_backend(const cpu::Kernels* kernels = nullptr, bool bf16 = false, int threads = 2,
                                                     int64_t max_rows = 300, int64_t max_positions = 1024) {
  auto backend = std::make_unique<cpu::CpuBackend>(cpu::CpuOptions{.threads = threads, .bfloat16_boundaries = bf16, .kernels = kernels});
  REQUIRE(
      backend->set_limits({.max_rows = max_rows, .max_positions = max_positions, .max_linear_inputs = 2048, .staged_bytes = 1 << 20}).ok());
  return backend;
}

// A host tensor on the backend, from values.
inline Tensor put(cpu::CpuBackend* backend, const Floats& values, int64_t rows, int64_t cols) {
  auto t = backend->constant(values, rows, cols);
  REQUIRE(t.ok());
  return *t;
}
inline Tensor zeros(cpu::CpuBackend* backend, int64_t rows, int64_t cols) {
  auto t = backend->make_tensor(rows, cols, Element::kFloat32);
  REQUIRE(t.ok());
  return *t;
}
inline Floats get(const Tensor& t) {
  Floats v;
  for (int64_t r = 0; r < t.rows; ++r) v.insert(v.end(), t.f32(r), t.f32(r) + t.cols);
  return v;
}

// A forest with its arrays. Pages of a segment are scattered over the pool.
struct Trees {
  explicit Trees(int32_t page_size_ = 32) : page_size(page_size_) {}
  // shape: 'c' certain chain, 'l' tentative chain, 't' random tree, 'b' a drafter's block
  void add(char kind, int32_t rows, int32_t context, int32_t slot, Random* random) {
    const auto first = static_cast<int32_t>(token.size());
    ForestSegment s{.first_row = first,
                    .row_count = rows,
                    .certain = kind == 'c',
                    .slot = slot,
                    .context = context,
                    .first_page = static_cast<int32_t>(pages.size())};
    for (int32_t i = 0; i < rows; ++i) {
      int32_t up = i == 0 ? -1 : first + i - 1;
      if (kind == 't') {
        up = first + random->below(i + 1) - 1;
        if (up < first) up = -1;
      }
      parent.push_back(up);
      position.push_back(up < 0 ? context : position[up] + 1);
      token.push_back(0);
      segment_of.push_back(static_cast<int32_t>(segments.size()));
    }
    const int32_t need = (context + rows) / page_size + 1;
    for (int32_t i = 0; i < need; ++i) pages.push_back(free_page++);
    std::shuffle(pages.begin() + s.first_page, pages.end(), std::mt19937(static_cast<uint32_t>(random->below(1 << 20))));
    for (int32_t i = 0; i < rows; ++i) place.push_back(place_of(s, position[first + i]));
    segments.push_back(s);
  }
  int32_t place_of(const ForestSegment& s, int32_t p) const { return pages[s.first_page + p / page_size] * page_size + p % page_size; }
  const Forest& view() {
    forest = {.rows = static_cast<int32_t>(token.size()),
              .segments = static_cast<int32_t>(segments.size()),
              .segment = segments.data(),
              .segment_of = segment_of.data(),
              .token = token.data(),
              .position = position.data(),
              .parent = parent.data(),
              .place = place.data(),
              .pages = pages.data(),
              .max_position = *std::max_element(position.begin(), position.end())};
    return forest;
  }
  std::vector<int32_t> path(int32_t row) const {  // root first
    std::vector<int32_t> p;
    for (; row >= 0; row = parent[row]) p.insert(p.begin(), row);
    return p;
  }

  int32_t page_size, free_page = 0;
  std::vector<ForestSegment> segments;
  std::vector<int32_t> token, position, parent, segment_of, place, pages;
  Forest forest;
};

// Largest difference relative to the largest wanted magnitude.
inline double error(const Floats& got, const std::vector<double>& want) {
  REQUIRE(got.size() == want.size());
  double worst = 0.0, scale = 1e-30;
  for (size_t i = 0; i < got.size(); ++i) {
    if (!std::isfinite(got[i])) return INFINITY;
    worst = std::max(worst, std::fabs(got[i] - want[i]));
    scale = std::max(scale, std::fabs(want[i]));
  }
  return worst / scale;
}
inline bool same_bits(const float* a, const float* b, int64_t n) { return std::memcmp(a, b, sizeof(float) * n) == 0; }

}  // namespace ddtree::ops::test
