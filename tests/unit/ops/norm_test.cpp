#include <catch2/catch_test_macros.hpp>

#include "unit/ops/support.h"

namespace ddtree::ops {
namespace {

using namespace test;  // NOLINT(google-build-using-namespace)

double sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }

std::vector<double> rms(const Floats& x, const Floats& w, int64_t width, double eps) {
  std::vector<double> y(x.size());
  for (size_t first = 0; first < x.size(); first += width) {
    double sum = 0.0;
    for (int64_t i = 0; i < width; ++i) sum += static_cast<double>(x[first + i]) * x[first + i];
    const double inverse = 1.0 / std::sqrt(sum / static_cast<double>(width) + eps);
    for (int64_t i = 0; i < width; ++i) y[first + i] = w[i] * (x[first + i] * inverse);
  }
  return y;
}

TEST_CASE("rms_norm and add_rms_norm: any width, tiny rows, taps", "[ops]") {
  Random random(1);
  for (const cpu::Kernels* kernels : all_kernels()) {
    const auto backend = make_backend(kernels);
    for (const int64_t width : {1, 5, 16, 17, 256, 1000}) {
      for (const float scale : {1.0f, 1e-4f, 300.0f}) {
        const int64_t rows = 7;
        const Floats x = random.normals(rows * width, scale), d = random.normals(rows * width, scale), w = random.normals(width);
        const Tensor tx = put(backend.get(), x, rows, width), tw = put(backend.get(), w, 1, width), y = zeros(backend.get(), rows, width);
        backend->rms_norm({.x = tx, .w = tw, .eps = 1e-6f, .y = y});
        INFO(kernels->name << " width " << width << " scale " << scale);
        CHECK(error(get(y), rms(x, w, width, 1e-6)) < 1e-6);
        const Tensor tap = zeros(backend.get(), rows, 2 * width);
        backend->add_rms_norm(
            {.x = tx, .delta = put(backend.get(), d, rows, width), .w = tw, .eps = 1e-6f, .y = y, .tap = tap.col_range(width, width)});
        Floats sum(x.size());
        for (size_t i = 0; i < x.size(); ++i) sum[i] = x[i] + d[i];
        CHECK(get(tx) == sum);
        CHECK(get(tap.col_range(width, width)) == sum);
        CHECK(get(tap.col_range(0, width)) == Floats(rows * width, 0.0f));
        CHECK(error(get(y), rms(sum, w, width, 1e-6)) < 1e-6);
      }
    }
  }
}

TEST_CASE("norm_weight adds one in float32 for zero-centred norms", "[ops]") {
  Random random(2);
  const auto backend = make_backend();
  const HostWeight w(random.normals(33), 33, 1, true);
  const auto plain = backend->norm_weight(w.view, 0.0f), centred = backend->norm_weight(w.view, 1.0f);
  REQUIRE(plain.ok());
  REQUIRE(centred.ok());
  for (int i = 0; i < 33; ++i) {
    CHECK(plain->f32()[i] == w.values[i]);
    CHECK(centred->f32()[i] == 1.0f + w.values[i]);
  }
}

TEST_CASE("gated_rms_norm: a norm for each head, then silu of z", "[ops]") {
  Random random(3);
  for (const cpu::Kernels* kernels : all_kernels()) {
    const auto backend = make_backend(kernels);
    for (const auto& [heads, width] : std::vector<std::pair<int32_t, int64_t>>{{4, 128}, {1, 16}, {3, 32}, {5, 7}}) {
      const int64_t rows = 9, n = heads * width;
      const Floats o = random.normals(rows * n, 0.3f), z = random.normals(rows * n, 3.0f), w = random.normals(width);
      std::vector<double> want = rms(o, w, width, 1e-6);
      for (size_t i = 0; i < want.size(); ++i) want[i] *= z[i] * sigmoid(z[i]);
      const Tensor y = put(backend.get(), o, rows, n);  // in place, as nn uses it
      backend->gated_rms_norm(
          {.o = y, .z = put(backend.get(), z, rows, n), .w = put(backend.get(), w, 1, width), .heads = heads, .eps = 1e-6f, .y = y});
      INFO(kernels->name);
      CHECK(error(get(y), want) < 1e-6);
    }
  }
}

TEST_CASE("silu_mul: ordinary and extreme gates", "[ops]") {
  Random random(4);
  for (const cpu::Kernels* kernels : all_kernels()) {
    const auto backend = make_backend(kernels);
    for (const int64_t n : {1, 30, 640}) {
      const int64_t rows = 6;
      Floats x = random.normals(rows * 2 * n, 4.0f);
      x[0] = -1000.0f;  // silu -> -0
      x[2 * n] = 1000.0f;
      x[4 * n] = -88.0f;
      std::vector<double> want;
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t i = 0; i < n; ++i) {
          const double g = x[r * 2 * n + i], u = x[r * 2 * n + n + i];
          want.push_back(g * sigmoid(g) * u);
        }
      }
      const Tensor y = zeros(backend.get(), rows, n);
      backend->silu_mul({.x = put(backend.get(), x, rows, 2 * n), .y = y});
      INFO(kernels->name << " n " << n);
      CHECK(error(get(y), want) < 1e-6);
    }
  }
}

TEST_CASE("kernels: exp is right to 2 ulp, 0 and inf at the ends, NaN stays NaN", "[ops]") {
  for (const cpu::Kernels* kernels : all_kernels()) {
    INFO(kernels->name);
    double worst = 0.0;
    for (float x = -87.0f; x < 88.0f; x += 0.0137f) {
      Floats v(16, x);
      kernels->exp(16, v.data(), v.data());
      const double want = std::exp(static_cast<double>(x));
      worst = std::max(worst, std::fabs(v[3] - want) / want);
    }
    CHECK(worst < 2.4e-7);
    Floats v{-INFINITY, -200.0f, -104.0f, -100.0f, INFINITY, 89.0f, NAN, 0.0f, -0.0f, 1e-10f, 1, 1, 1, 1, 1, 1};
    kernels->exp(16, v.data(), v.data());
    CHECK(v[0] == 0.0f);
    CHECK(v[1] == 0.0f);
    CHECK(v[2] == 0.0f);
    CHECK(std::fabs(v[3] - 3.78e-44) < 1.5e-45);
    CHECK(v[4] == INFINITY);
    CHECK(v[5] == INFINITY);
    CHECK(std::isnan(v[6]));
    CHECK(v[7] == 1.0f);
    CHECK(v[8] == 1.0f);
    CHECK(v[9] == 1.0f);
  }
}

TEST_CASE("kernels: BF16 rounding is to nearest, ties to even, with inf and NaN", "[ops]") {
  Random random(5);
  for (const cpu::Kernels* kernels : all_kernels()) {
    INFO(kernels->name);
    Floats x = random.normals(1000, 100.0f);
    const Floats extra{1.00390625f, 1.01171875f, INFINITY, -INFINITY, 0.0f, -0.0f, 3.4e38f, 1e-40f};
    x.insert(x.end(), extra.begin(), extra.end());
    Floats y = x;
    kernels->round_bf16(static_cast<int64_t>(y.size()), y.data());
    for (size_t i = 0; i < x.size(); ++i) CHECK(y[i] == round_to_bf16(x[i]));
    Floats nan(16, NAN);
    kernels->round_bf16(16, nan.data());
    CHECK(std::isnan(nan[7]));
  }
}

}  // namespace
}  // namespace ddtree::ops
