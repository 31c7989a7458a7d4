#include <algorithm>
#include <catch2/catch_test_macros.hpp>

#include "unit/ops/support.h"

namespace ddtree::ops {
namespace {

using namespace test;  // NOLINT(google-build-using-namespace)

TEST_CASE("finish_logits: padding becomes -inf, the first non-finite row is named", "[ops]") {
  Random random(1);
  for (const cpu::Kernels* kernels : all_kernels()) {
    INFO(kernels->name);
    const auto backend = make_backend(kernels);
    for (const int64_t real : {1, 16, 100, 127, 130}) {
      const int64_t rows = 20, vocab = 130;
      Floats x = random.normals(rows * vocab);
      for (int64_t i = real; i < vocab; ++i) x[3 * vocab + i] = NAN;  // padding may hold anything
      const Tensor t = put(backend.get(), x, rows, vocab);
      int32_t bad = 7;
      backend->finish_logits({.logits = t, .real_vocab = real, .bad_row = &bad});
      CHECK(bad == -1);
      for (int64_t r = 0; r < rows; ++r) {
        CHECK(same_bits(t.f32(r), x.data() + r * vocab, real));
        CHECK(std::all_of(t.f32(r) + real, t.f32(r) + vocab, [](float f) { return f == -INFINITY; }));
      }
      for (const float poison : {NAN, INFINITY, -INFINITY}) {
        const Tensor p = put(backend.get(), x, rows, vocab);
        p.f32(17)[0] = poison;
        p.f32(5)[real - 1] = poison;
        backend->finish_logits({.logits = p, .real_vocab = real, .bad_row = &bad});
        CHECK(bad == 5);
      }
    }
  }
}

TEST_CASE("top_k_log_probs: true log-probs over the real vocabulary, ties by smaller id", "[ops]") {
  Random random(2);
  for (const cpu::Kernels* kernels : all_kernels()) {
    const auto backend = make_backend(kernels);
    for (const auto& [vocab, real] : std::vector<std::pair<int64_t, int64_t>>{{4096, 4090}, {64, 64}, {1000, 999}, {7, 3}}) {
      for (const int32_t k : {1, 2, 3, 16, 64, 256, 999}) {
        if (k > real) continue;
        const int64_t rows = 4;
        Floats x = random.normals(rows * vocab, 5.0f);
        // Rows 1 and 2 are full of ties.
        for (int64_t i = 0; i < vocab; ++i) {
          x[vocab + i] = static_cast<float>(random.below(4));
          x[2 * vocab + i] = 1.5f;
        }
        for (int64_t r = 0; r < rows; ++r) std::fill_n(x.begin() + r * vocab + real, vocab - real, 1e9f);  // padding must not be seen
        std::vector<int32_t> token(rows * k);
        Floats log_prob(rows * k);
        int32_t bad = 3;
        backend->top_k_log_probs({.logits = put(backend.get(), x, rows, vocab),
                                  .real_vocab = real,
                                  .top_k = k,
                                  .token = token.data(),
                                  .log_prob = log_prob.data(),
                                  .bad_row = &bad});
        INFO(kernels->name << " vocab " << vocab << " k " << k);
        CHECK(bad == -1);
        for (int64_t r = 0; r < rows; ++r) {
          const float* row = x.data() + r * vocab;
          std::vector<int32_t> order(real);
          std::iota(order.begin(), order.end(), 0);
          std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return row[a] > row[b]; });
          double sum = 0.0;
          for (int64_t i = 0; i < real; ++i) sum += std::exp(static_cast<double>(row[i]) - row[order[0]]);
          bool right = true;
          double worst = 0.0;
          for (int32_t i = 0; i < k; ++i) {
            right = right && token[r * k + i] == order[i];
            worst = std::max(worst, std::fabs(log_prob[r * k + i] - (row[order[i]] - row[order[0]] - std::log(sum))));
          }
          CHECK(right);
          CHECK(worst < 5e-6);
        }
      }
    }
    Floats x = random.normals(3 * 100);
    x[150] = NAN;
    std::vector<int32_t> token(3);
    Floats log_prob(3);
    int32_t bad = -1;
    backend->top_k_log_probs({.logits = put(backend.get(), x, 3, 100),
                              .real_vocab = 100,
                              .top_k = 1,
                              .token = token.data(),
                              .log_prob = log_prob.data(),
                              .bad_row = &bad});
    CHECK(bad == 1);
  }
}

}  // namespace
}  // namespace ddtree::ops
