// linear_silu and linear_add_norm on a card: against the CPU, against the ops that they fuse, and a row alone against the row in company.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "gpu/support.h"

namespace ddtree::ops::gpu_test {
namespace {

// As in linear_test.cpp: sums of K products in another order by tensor cores, and what rounding to BF16 makes of it.
double rounded_limit(int64_t k) { return std::sqrt((2e-5 + static_cast<double>(k) / 16 * 0x1p-23) * 0x1p-7); }
// Normed rows rounded to BF16 before or after they are scaled: each value by up to 2^-8 of itself in either case, 1.6e-3 in the mean
// square, of which a product keeps the share. Over n values a mean square scatters: 4 / √n of it.
double scaled_later(int64_t hidden, int64_t after) { return 2.3e-3 * (1 + 4 / std::sqrt(static_cast<double>(std::min(hidden, after)))); }

bool same(const Floats& a, const Floats& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}
bool own_kernels(const Backend& b) { return std::string(b.name()).find("Hopper") != std::string::npos; }
Floats row_of(const Floats& values, int64_t row, int64_t cols) { return {values.begin() + row * cols, values.begin() + (row + 1) * cols}; }

// Products of rows of size one have about that size.
HostWeight weights(Random* random, int64_t n, int64_t k) {
  if (k > 4000) return {random, n, k};
  return {random->normals(n * k, 1.0f / std::sqrt(static_cast<float>(k))), n, k, true};
}

// Rows of a product, followed by NaN: a box of the kernels for few rows reads up to its bucket.
Each<Tensor> rows_and_nan(const Twins& twins, const Floats& values, int64_t cols) {
  const auto rows = static_cast<int64_t>(values.size()) / cols;
  const auto wide = twins.activations(Floats(static_cast<size_t>((rows + 128) * cols), NAN), rows + 128, cols);
  const auto x = rows_of(wide, twins.count(), 0, rows);
  twins.upload(values, x);
  return x;
}

Output silu_of(const Twins& twins, const Each<const Weight*>& weight, const Each<Tensor>& x) {
  const int64_t rows = x[0].rows, n = weight[0]->n();
  const Each<Tensor> gate_up = twins.activations(rows, n);
  const Output y = twins.output(rows, n / 2);
  twins.each([&](Backend& b, size_t i) { b.linear_silu({.x = x[i], .weight = weight[i], .gate_up = gate_up[i], .y = y.view[i]}); });
  return y;
}

TEST_CASE("gpu: linear_silu equals the CPU's, and linear and silu_mul bit for bit") {
  INFO(seed_text());
  Random random(seed());
  for (const auto& [width, k] :
       {std::pair<int64_t, int64_t>{2, 64}, {4, 128}, {30, 64}, {44, 192}, {640, 256}, {1000, 256}, {17408, 5120}}) {
    const Twins twins(130, 64, k);
    const HostWeight w = weights(&random, 2 * width, k);
    const auto weight = twins.make([&](Backend& b) { return b.pack_weight(std::array{w.view}); });
    const bool big = width > 10000;
    for (const int64_t rows : {1, 2, 7, 8, 9, 16, 17, 33, 64, 65, 128, 129, 130}) {
      if (big && rows != 1 && rows != 17 && rows != 64 && rows != 130) continue;
      INFO("I " << width << " k " << k << " rows " << rows);
      const auto x = rows_and_nan(twins, random.activations(rows * k), k);
      const Output y = silu_of(twins, weight, x);
      twins.compare("linear_silu", y, 3 * rounded_limit(k));
      const Output gate_up = twins.output(rows, 2 * width), apart = twins.output(rows, width);
      twins.each([&](Backend& b, size_t i) {
        b.linear({.x = x[i], .weight = weight[i], .y = gate_up.view[i]});
        b.silu_mul({.x = gate_up.view[i], .y = apart.view[i]});
        INFO(b.name());
        CHECK(same(twins.read("linear_silu", y, i), twins.read("linear, silu_mul", apart, i)));
      });
    }
  }
}

// A mixer's last product, the norm, and the first product of what follows.
struct Chain {
  Chain(const Twins& t, Random* random, int64_t hidden_, int64_t k_, int64_t after_) : twins(t), hidden(hidden_), k(k_), after(after_) {
    const HostWeight a = weights(random, hidden, k), b = weights(random, after, hidden);
    weight = twins.make([&](Backend& x) { return x.pack_weight(std::array{a.view}); });
    next = twins.make([&](Backend& x) { return x.pack_weight(std::array{b.view}); });
    Floats w = random->normals(hidden, 0.2f);
    for (float& v : w) v += 1.0f;
    norm = twins.constants(w, 1, hidden);
  }
  struct Result {
    Output residual, tap, linear, silu;
  };
  // tapped: with a tap; last: no product follows, the normed rows are the result (in `linear`).
  Result run(const Floats& x, const Floats& before, bool tapped, bool last) const {
    const auto rows = static_cast<int64_t>(x.size()) / k;
    const int64_t out = last ? hidden : after;
    Result r{twins.output(rows, hidden, true), twins.output(rows, hidden), twins.output(rows, out, !last), twins.output(rows, after / 2)};
    twins.upload(before, r.residual.view);
    const auto in = rows_and_nan(twins, x, k), normed = rows_and_nan(twins, Floats(static_cast<size_t>(rows * hidden), NAN), hidden);
    const auto delta = twins.activations(rows, hidden), gate_up = twins.activations(rows, after);
    const auto squares =
        twins.make([&](Backend& b) { return b.make_tensor(std::min(rows, kUnscaledRows), kNormParts, Element::kFloat32); });
    twins.each([&](Backend& b, size_t i) {
      const RowScale scale = b.linear_add_norm({.x = in[i],
                                                .weight = weight[i],
                                                .delta = delta[i],
                                                .residual = r.residual.view[i],
                                                .w = norm[i],
                                                .eps = 1e-6f,
                                                .y = last ? r.linear.view[i] : normed[i],
                                                .tap = tapped ? r.tap.view[i] : Tensor{},
                                                .next = last ? nullptr : next[i],
                                                .squares = last ? Tensor{} : squares[i]});
      INFO(b.name() << ", " << rows << " rows");
      CHECK((scale.parts > 0) == (!last && own_kernels(b) && rows <= kUnscaledRows));  // fused where it is promised to be, and only there
      if (last) return;
      b.linear({.x = normed[i], .weight = next[i], .y = r.linear.view[i], .keep_float32 = true, .scale = scale});
      b.linear_silu({.x = normed[i], .weight = next[i], .gate_up = gate_up[i], .y = r.silu.view[i], .scale = scale});
    });
    return r;
  }
  const Twins& twins;
  int64_t hidden, k, after;
  Each<const Weight*> weight, next;
  Each<Tensor> norm;
};

TEST_CASE("gpu: linear_add_norm and the product of its rows equal the CPU's") {
  INFO(seed_text());
  Random random(seed());
  for (const auto& [hidden, k, after] : {std::tuple<int64_t, int64_t, int64_t>{64, 64, 48},
                                         {256, 640, 1280},
                                         {256, 512, 1544},
                                         {1000, 256, 200},
                                         {5120, 6144, 2048},
                                         {5120, 17408, 1024},
                                         {5120, 4096, 768}}) {
    const Twins twins(130, 64, std::max(hidden, k));
    const Chain chain(twins, &random, hidden, k, after);
    for (const int64_t rows : {1, 2, 8, 9, 16, 17, 33, 64, 65, 128, 129, 130}) {
      if (hidden == 5120 && rows != 1 && rows != 16 && rows != 64 && rows != 65 && rows != 130) continue;
      INFO("H " << hidden << " k " << k << " after " << after << " rows " << rows);
      const bool tapped = rows % 2 == 0, last = rows == 17;
      // Streams of very different size: the scale is what differs most between rows.
      Floats before = random.normals(rows * hidden);
      for (int64_t r = 0; r < rows; ++r)
        for (int64_t i = 0; i < hidden; ++i) before[static_cast<size_t>(r * hidden + i)] *= std::ldexp(1.0f, static_cast<int>(r % 9) - 2);
      const auto got = chain.run(random.activations(rows * k), before, tapped, last);
      // What is added is rounded first: a value that goes the other way moves its row by a step of up to 2^-7 of that value.
      twins.compare("residual", got.residual, rounded_limit(k) + 0x1p-7 / std::sqrt(static_cast<double>(hidden)));
      if (tapped) twins.compare("tap", got.tap, rounded_limit(k));
      if (last) {
        twins.compare("normed", got.linear, rounded_limit(k));
      } else {
        twins.compare("linear of the normed rows", got.linear, rounded_limit(k) + scaled_later(hidden, after));
        twins.compare("linear_silu of the normed rows", got.silu, 3 * (rounded_limit(k) + scaled_later(hidden, after)));
      }
    }
  }
}

TEST_CASE("gpu: a row of the fused ops has the same bits alone and in company, up to 128 rows") {
  INFO(seed_text());
  Random random(seed());
  for (const auto& [hidden, k, after] : {std::tuple<int64_t, int64_t, int64_t>{256, 640, 1280}, {5120, 1024, 4096}}) {
    const Twins twins(128, 64, std::max(hidden, k));
    const Chain chain(twins, &random, hidden, k, after);
    for (const int64_t rows : {3, 8, 16, 30, 32, 64, 128}) {
      const Floats x = random.activations(rows * k), before = random.normals(rows * hidden, 4.0f);
      const auto all = chain.run(x, before, true, false);
      const int64_t row = random.below(rows);
      const auto alone = chain.run(row_of(x, row, k), row_of(before, row, hidden), true, false);
      for (size_t i = 1; i < twins.count(); ++i) {
        INFO(twins.at(i).name() << ", row " << row << " of " << rows << ", H " << hidden);
        CHECK(same(row_of(twins.read("residual", all.residual, i), row, hidden), twins.read("residual", alone.residual, i)));
        CHECK(same(row_of(twins.read("tap", all.tap, i), row, hidden), twins.read("tap", alone.tap, i)));
        CHECK(same(row_of(twins.read("linear", all.linear, i), row, after), twins.read("linear", alone.linear, i)));
        CHECK(same(row_of(twins.read("silu", all.silu, i), row, after / 2), twins.read("silu", alone.silu, i)));
      }
    }
  }
}

}  // namespace
}  // namespace ddtree::ops::gpu_test
