#include <array>
#include <catch2/catch_test_macros.hpp>

#include "unit/ops/support.h"

namespace ddtree::ops {
namespace {

using namespace test;  // NOLINT(google-build-using-namespace)

std::vector<double> product(const Floats& x, const Floats& w, int64_t rows, int64_t n, int64_t k) {
  std::vector<double> y(rows * n);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t j = 0; j < n; ++j) {
      for (int64_t i = 0; i < k; ++i) y[r * n + j] += static_cast<double>(x[r * k + i]) * w[j * k + i];
    }
  }
  return y;
}

TEST_CASE("linear: equals a float64 product for every row count, odd widths, BF16 and float32 weights", "[ops]") {
  Random random(1);
  for (const cpu::Kernels* kernels : all_kernels()) {
    const auto backend = make_backend(kernels);
    for (const bool bf16 : {true, false}) {
      for (const auto& [n, k] : std::vector<std::pair<int64_t, int64_t>>{{1, 1}, {4, 7}, {33, 64}, {100, 257}, {1544, 256}, {31, 640}}) {
        const HostWeight w(random.normals(n * k, 0.1f), n, k, bf16);
        const auto packed = backend->pack_weight(std::array{w.view});
        REQUIRE(packed.ok());
        for (const int64_t rows : {1, 2, 3, 4, 5, 11, 12, 13, 24, 25, 33, 64, 100}) {
          if (rows > 33 && n > 1000) continue;
          const Floats x = random.normals(rows * k);
          const Tensor y = zeros(backend.get(), rows, n);
          backend->linear({.x = put(backend.get(), x, rows, k), .weight = *packed, .y = y});
          INFO(kernels->name << " bf16 " << bf16 << " n " << n << " k " << k << " rows " << rows);
          CHECK(error(get(y), product(x, w.values, rows, n, k)) < 3e-6);
        }
      }
    }
  }
}

TEST_CASE("linear: a row has the same bits alone, in any batch, in any place, with any number of threads", "[ops]") {
  Random random(2);
  const int64_t n = 530, k = 300, rows = 256;
  for (const cpu::Kernels* kernels : all_kernels()) {
    for (const bool bf16 : {true, false}) {
      const HostWeight w(random.normals(n * k, 0.1f), n, k, bf16);
      const Floats x = random.normals(rows * k);
      const auto one = make_backend(kernels, false, 1), two = make_backend(kernels, false, 2);
      const auto w1 = one->pack_weight(std::array{w.view}), w2 = two->pack_weight(std::array{w.view});
      const Tensor alone = zeros(one.get(), rows, n), x1 = put(one.get(), x, rows, k), x2 = put(two.get(), x, rows, k);
      for (int64_t r = 0; r < rows; ++r) one->linear({.x = x1.row_range(r, 1), .weight = *w1, .y = alone.row_range(r, 1)});
      for (int64_t count = 2; count <= rows; count += count < 40 ? 1 : 27) {
        const int64_t first = random.below(rows - count + 1);
        const Tensor y = zeros(two.get(), count, n);
        two->linear({.x = x2.row_range(first, count), .weight = *w2, .y = y});
        INFO(kernels->name << " bf16 " << bf16 << " rows " << first << " + " << count);
        CHECK(same_bits(y.f32(), alone.f32(first), count * n));
      }
    }
  }
}

TEST_CASE("linear: AVX2 and AVX-512 agree bit for bit", "[ops]") {
  if (!cpu::avx2_kernels() || !cpu::avx512_kernels()) SKIP("one of the two is missing on this machine");
  Random random(3);
  const int64_t n = 97, k = 111, rows = 30;
  const HostWeight w(random.normals(n * k), n, k, true);
  const Floats x = random.normals(rows * k);
  Floats y[2];
  for (int i = 0; i < 2; ++i) {
    const auto backend = make_backend(i ? cpu::avx512_kernels() : cpu::avx2_kernels());
    const Tensor t = zeros(backend.get(), rows, n);
    backend->linear({.x = put(backend.get(), x, rows, k), .weight = *backend->pack_weight(std::array{w.view}), .y = t});
    y[i] = get(t);
  }
  CHECK(same_bits(y[0].data(), y[1].data(), rows * n));
}

TEST_CASE("linear: packs several matrices as one, writes into a strided view and nothing beside it", "[ops]") {
  Random random(4);
  const auto backend = make_backend();
  const int64_t k = 48, rows = 13;
  const HostWeight a(random.normals(20 * k), 20, k, true), b(random.normals(3 * k), 3, k, true), c(random.normals(50 * k), 50, k, true);
  const auto packed = backend->pack_weight(std::array{a.view, b.view, c.view});
  REQUIRE(packed.ok());
  REQUIRE((*packed)->n() == 73);
  Floats all = a.values;
  all.insert(all.end(), b.values.begin(), b.values.end());
  all.insert(all.end(), c.values.begin(), c.values.end());
  const Floats x = random.normals(rows * k);
  const Tensor wide = put(backend.get(), Floats(rows * 100, 7.5f), rows, 100);
  backend->linear({.x = put(backend.get(), x, rows, k), .weight = *packed, .y = wide.col_range(11, 73)});
  CHECK(error(get(wide.col_range(11, 73)), product(x, all, rows, 73, k)) < 3e-6);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t i = 0; i < 100; ++i) {
      if (i < 11 || i >= 84) CHECK(wide.f32(r)[i] == 7.5f);
    }
  }
  // Mixed dtypes become float32, which is exact for both.
  const HostWeight d(random.normals(4 * k), 4, k, false);
  const auto mixed = backend->pack_weight(std::array{a.view, d.view});
  REQUIRE(mixed.ok());
  const Tensor y = zeros(backend.get(), 1, k);
  const int32_t token = 21;
  backend->embed({.token = &token, .rows = 1, .weight = *mixed, .y = y});
  CHECK(same_bits(y.f32(), d.values.data() + k, k));
  // A matrix of another width is refused with both shapes.
  const HostWeight e(random.normals(4 * 10), 4, 10, true);
  const auto refused = backend->pack_weight(std::array{a.view, e.view});
  REQUIRE(!refused.ok());
  CHECK(refused.status().code() == Code::kBadModel);
}

TEST_CASE("linear: BF16 boundaries round the result once, logits stay float32", "[ops]") {
  Random random(5);
  const int64_t n = 70, k = 64, rows = 5;
  const HostWeight w(random.normals(n * k), n, k, true);
  const Floats x = random.normals(rows * k);
  const auto exact = make_backend(), rounded = make_backend(nullptr, true);
  const Tensor y = zeros(exact.get(), rows, n), z = zeros(rounded.get(), rows, n), logits = zeros(rounded.get(), rows, n);
  exact->linear({.x = put(exact.get(), x, rows, k), .weight = *exact->pack_weight(std::array{w.view}), .y = y});
  const Weight* packed = *rounded->pack_weight(std::array{w.view});
  const Tensor xr = put(rounded.get(), x, rows, k);
  rounded->linear({.x = xr, .weight = packed, .y = z});
  rounded->linear({.x = xr, .weight = packed, .y = logits, .keep_float32 = true});
  CHECK(same_bits(logits.f32(), y.f32(), rows * n));
  for (int64_t i = 0; i < rows * n; ++i) CHECK(z.f32()[i] == round_to_bf16(y.f32()[i]));
}

TEST_CASE("embed and copy_rows are exact", "[ops]") {
  Random random(6);
  const auto backend = make_backend();
  for (const bool bf16 : {true, false}) {
    const HostWeight w(random.normals(77 * 40), 77, 40, bf16);
    const Weight* packed = *backend->pack_weight(std::array{w.view});
    const std::vector<int32_t> token{0, 76, 31, 32, 16, 15, 76};
    const Tensor y = zeros(backend.get(), 7, 40);
    backend->embed({.token = token.data(), .rows = 7, .weight = packed, .y = y});
    for (int r = 0; r < 7; ++r) CHECK(same_bits(y.f32(r), w.values.data() + token[r] * 40, 40));
    const std::vector<int32_t> from{6, 1}, to{2, 0};
    const Tensor z = zeros(backend.get(), 3, 40);
    backend->copy_rows({.count = 2, .x = y, .from = from.data(), .y = z, .to = to.data()});
    CHECK(same_bits(z.f32(2), y.f32(6), 40));
    CHECK(same_bits(z.f32(0), y.f32(1), 40));
    CHECK(get(z.row_range(1, 1)) == Floats(40, 0.0f));
  }
}

TEST_CASE("linear_silu and linear_add_norm: float64 products, norms and gates, taps, BF16 boundaries as in the ops they stand for",
          "[ops]") {
  Random random(7);
  for (const bool bf16 : {false, true}) {
    const auto backend = make_backend(nullptr, bf16);
    const int64_t rows = 5, hidden = 40, k = 96, width = 52;
    const HostWeight down(random.normals(hidden * k, 0.1f), hidden, k, true),
        both(random.normals(2 * width * hidden, 0.2f), 2 * width, hidden, true);
    const auto w_down = backend->pack_weight(std::array{down.view}), w_both = backend->pack_weight(std::array{both.view});
    REQUIRE((w_down.ok() && w_both.ok()));
    const Floats x = random.activations(rows * k), before = random.normals(rows * hidden, 3.0f), w = random.normals(hidden);
    const Tensor residual = put(backend.get(), before, rows, hidden), tap = zeros(backend.get(), rows, hidden),
                 h = zeros(backend.get(), rows, hidden), delta = zeros(backend.get(), rows, hidden),
                 act = zeros(backend.get(), rows, width), gate_up = zeros(backend.get(), rows, 2 * width),
                 squares = zeros(backend.get(), rows, kNormParts);
    const RowScale scale = backend->linear_add_norm({.x = put(backend.get(), x, rows, k),
                                                     .weight = *w_down,
                                                     .delta = delta,
                                                     .residual = residual,
                                                     .w = put(backend.get(), w, 1, hidden),
                                                     .eps = 1e-5f,
                                                     .y = h,
                                                     .tap = tap,
                                                     .next = *w_both,
                                                     .squares = squares});
    backend->linear_silu({.x = h, .weight = *w_both, .gate_up = gate_up, .y = act, .scale = scale});
    INFO("bf16 " << bf16);
    const double limit = bf16 ? 8e-3 : 4e-6;
    std::vector<double> sum = product(x, down.values, rows, hidden, k);
    for (size_t i = 0; i < sum.size(); ++i) sum[i] += before[i];
    CHECK(error(get(residual), sum) < limit);
    CHECK(error(get(tap), sum) < limit);
    Floats normed(sum.size());
    for (int64_t r = 0; r < rows; ++r) {
      double squared = 0;
      for (int64_t i = 0; i < hidden; ++i) squared += sum[r * hidden + i] * sum[r * hidden + i];
      for (int64_t i = 0; i < hidden; ++i)
        normed[r * hidden + i] = static_cast<float>(w[i] * sum[r * hidden + i] / std::sqrt(squared / hidden + 1e-5));
    }
    const std::vector<double> products = product(normed, both.values, rows, 2 * width, hidden);
    std::vector<double> want;
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t i = 0; i < width; ++i) {
        const double g = products[r * 2 * width + i], u = products[r * 2 * width + width + i];
        want.push_back(g / (1 + std::exp(-g)) * u);
      }
    CHECK(error(get(act), want) < 3 * limit);
    if (!bf16) continue;
    Floats rounded = get(act);
    for (float& v : rounded) v = round_to_bf16(v);
    CHECK(get(act) == rounded);
  }
}

}  // namespace
}  // namespace ddtree::ops
