// linear on a card: the Hopper and the portable kernels, the shapes of the tiny pair and of Qwen3.6-27B, any row count.
#include <array>
#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

#include "gpu/support.h"

namespace ddtree::ops::gpu_test {
namespace {

// float32 sums of K products in another order (a few 1e-6 up to K = 17408), and tensor cores that cut instead of rounding each time they
// add 16 products: up to 2^-23 of the sum, K / 16 times.
double sum_limit(int64_t k) { return 2e-5 + static_cast<double>(k) / 16 * 0x1p-23; }
// Rounded to BF16, a share difference / step of the values goes the other way, each by a step of up to 2^-7.
double rounded_limit(int64_t k) { return std::sqrt(sum_limit(k) * 0x1p-7); }

// Rows of x behind the ones in use hold NaN: they are nobody's input.
struct Rows {
  Rows(const Twins& t, int64_t most, int64_t k_) : twins(t), k(k_), buffer(t.activations(most + 64, k_)) {
    twins.upload(Floats(static_cast<size_t>((most + 64) * k), NAN), buffer);
  }
  Each<Tensor> fill(const Floats& values) const {
    const auto rows = static_cast<int64_t>(values.size()) / k;
    twins.upload(Floats(static_cast<size_t>(buffer[0].rows * k), NAN), buffer);
    const auto x = rows_of(buffer, twins.count(), 0, rows);
    twins.upload(values, x);
    return x;
  }
  const Twins& twins;
  int64_t k;
  Each<Tensor> buffer;
};

Output run(const Twins& twins, const Each<const Weight*>& weight, const Each<Tensor>& x, bool float32) {
  const Output y = twins.output(x[0].rows, weight[0]->n(), float32);
  twins.each([&](Backend& b, size_t i) { b.linear({.x = x[i], .weight = weight[i], .y = y.view[i], .keep_float32 = float32}); });
  return y;
}

void check(const Twins& twins, const Each<const Weight*>& weight, const Rows& in, int64_t rows, Random* random, bool float32) {
  const int64_t k = weight[0]->k();
  INFO("n " << weight[0]->n() << " k " << k << " rows " << rows << " float32 " << float32);
  const Output y = run(twins, weight, in.fill(random->activations(rows * k)), float32);
  twins.compare("linear", y, float32 ? sum_limit(k) : rounded_limit(k));
}

TEST_CASE("gpu: linear, small and odd shapes, BF16 and float32 weights, every row count") {
  INFO(seed_text());
  Random random(seed());
  const Twins twins(300, 64, 1024);
  for (const auto& [n, k] :
       {std::pair<int64_t, int64_t>{1, 1}, {4, 7}, {33, 64}, {100, 257}, {1544, 256}, {3072, 256}, {1280, 256}, {256, 640}, {256, 1024}}) {
    for (const bool bf16 : {true, false}) {
      const HostWeight w(random.normals(n * k, 0.1f), n, k, bf16);
      const auto weight = twins.make([&](Backend& b) { return b.pack_weight(std::array{w.view}); });
      const Rows in(twins, 300, k);
      for (const int64_t rows : {1, 2, 7, 8, 9, 16, 17, 33, 64, 65, 128, 129, 200, 256, 300}) {
        if (!bf16 && rows > 65) continue;
        check(twins, weight, in, rows, &random, false);
        if (rows % 2) check(twins, weight, in, rows, &random, true);
      }
    }
  }
}

TEST_CASE("gpu: linear, several matrices packed as one, strided rows") {
  INFO(seed_text());
  Random random(seed());
  const Twins twins(128, 64, 512);
  const int64_t k = 512;
  const HostWeight a(random.normals(2048 * k, 0.1f), 2048, k, true), b(random.normals(48 * k, 0.1f), 48, k, true),
      c(random.normals(777 * k, 0.1f), 777, k, true), d(random.normals(48 * k, 0.1f), 48, k, false);
  const auto same = twins.make([&](Backend& x) { return x.pack_weight(std::array{a.view, b.view, c.view}); });
  const auto mixed = twins.make([&](Backend& x) { return x.pack_weight(std::array{b.view, d.view}); });
  for (const auto* weight : {&same, &mixed}) {
    for (const int64_t rows : {1, 16, 65, 128}) {
      for (const int64_t margin : {64, 3}) {  // rows that bulk copies can read, and rows that begin at no multiple of 16 bytes
        INFO("n " << (*weight)[0]->n() << " rows " << rows << " margin " << margin);
        const auto wide = twins.activations(Floats(static_cast<size_t>(rows * (k + 2 * margin)), NAN), rows, k + 2 * margin);
        const auto x = cols_of(wide, twins.count(), margin, k);
        twins.upload(random.activations(rows * k), x);
        twins.compare("linear", run(twins, *weight, x, true), sum_limit(k));
      }
    }
  }
}

TEST_CASE("gpu: linear, the matrices of Qwen3.6-27B") {
  INFO(seed_text());
  Random random(seed());
  for (const auto& [n, k] : {std::pair<int64_t, int64_t>{16480, 5120}, {5120, 6144}, {34816, 5120}, {5120, 17408}, {14336, 5120}}) {
    const Twins twins(200, 64, k);
    const HostWeight w(&random, n, k);
    const auto weight = twins.make([&](Backend& b) { return b.pack_weight(std::array{w.view}); });
    const Rows in(twins, 200, k);
    for (const int64_t rows : {1, 7, 16, 33, 65, 128}) check(twins, weight, in, rows, &random, false);
    check(twins, weight, in, 2, &random, true);
    if (n == 5120) check(twins, weight, in, 200, &random, true);
  }
}

TEST_CASE("gpu: linear and the ops over logits, the head of Qwen3.6-27B") {
  INFO(seed_text());
  Random random(seed());
  const int64_t n = 248320, k = 5120, real = 248077;
  const Twins twins(33, 64, k);
  const HostWeight w(&random, n, k);
  const auto weight = twins.make([&](Backend& b) { return b.pack_weight(std::array{w.view}); });
  const Rows in(twins, 33, k);
  for (const int64_t rows : {1, 16, 33}) {
    INFO("rows " << rows);
    const Output y = run(twins, weight, in.fill(random.activations(rows * k)), true);
    twins.compare("head", y, sum_limit(k));
    std::vector<std::vector<int32_t>> token(twins.count(), std::vector<int32_t>(static_cast<size_t>(rows), -1));
    std::vector<Floats> margin(twins.count(), Floats(static_cast<size_t>(rows), NAN));
    twins.each([&](Backend& b, size_t i) {
      std::vector<uint8_t> bad(static_cast<size_t>(rows), 7);
      int32_t bad_row = 7;
      b.finish_logits({.logits = y.view[i], .real_vocab = real, .bad_row = &bad_row});
      b.best_two({.logits = y.view[i], .real_vocab = real, .token = token[i].data(), .margin = margin[i].data(), .bad = bad.data()});
      REQUIRE(b.finish().ok());
      CHECK(bad_row == -1);
      CHECK(bad == std::vector<uint8_t>(static_cast<size_t>(rows), 0));
    });
    // The largest of 250 thousand logits is some 4.5 deviations out; sums agree to sum_limit of one deviation.
    for (size_t i = 1; i < twins.count(); ++i)
      for (size_t r = 0; r < static_cast<size_t>(rows); ++r) {
        INFO("row " << r << " on " << twins.at(i).name() << ": margins " << margin[0][r] << " and " << margin[i][r]);
        CHECK((token[i][r] == token[0][r] || margin[0][r] < 2e-3f));
        CHECK(std::abs(margin[i][r] - margin[0][r]) < 2e-3f);
      }
  }
}

TEST_CASE("gpu: a row of linear has the same bits whatever the other rows are, and for every row count of its bucket") {
  INFO(seed_text());
  Random random(seed());
  const Twins twins(128, 64, 1024);
  const int64_t n = 1544, k = 1024;
  const HostWeight w(random.normals(n * k, 0.1f), n, k, true);
  const auto weight = twins.make([&](Backend& b) { return b.pack_weight(std::array{w.view}); });
  const Rows in(twins, 128, k);
  for (const int64_t most : {8, 16, 32, 64, 128}) {
    Floats values = random.activations(most * k);
    const Output all = run(twins, weight, in.fill(values), true);
    const int64_t fewer = most / 2 + 1, row = random.below(fewer);  // still more than the next smaller bucket holds
    const Output few = run(twins, weight, in.fill(Floats(values.begin(), values.begin() + fewer * k)), true);
    for (int64_t i = 0; i < most * k; ++i)
      if (i / k != row) values[static_cast<size_t>(i)] = round_to_bf16(random.normal(50.0f));
    const Output others = run(twins, weight, in.fill(values), true);
    for (size_t i = 1; i < twins.count(); ++i) {
      INFO(twins.at(i).name() << ", " << most << " rows, row " << row);
      const Floats a = twins.read("all", all, i), b = twins.read("few", few, i), c = twins.read("others", others, i);
      CHECK(std::memcmp(a.data() + row * n, c.data() + row * n, sizeof(float) * n) == 0);
      CHECK(std::memcmp(a.data(), b.data(), sizeof(float) * static_cast<size_t>(fewer * n)) == 0);
    }
  }
}

}  // namespace
}  // namespace ddtree::ops::gpu_test
