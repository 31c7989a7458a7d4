// Ranks as threads: sums and choices of any split are those of the whole, to the same bits on every rank; a rank that fails or does not
// come breaks the group with its name, and nobody waits for ever.
#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <functional>
#include <limits>
#include <thread>

#include "ops/rank_group.h"
#include "unit/ops/support.h"

namespace ddtree::ops::test {
namespace {

using Catch::Matchers::ContainsSubstring;

void on_ranks(int32_t ranks, const std::function<void(int32_t)>& body) {
  std::vector<std::thread> threads;
  for (int32_t r = 0; r < ranks; ++r) threads.emplace_back([&, r] { body(r); });
  for (std::thread& t : threads) t.join();
}

Tensor view(Floats* values, int64_t rows, int64_t cols) { return {values->data(), Element::kFloat32, rows, cols, cols}; }

// Backends of a group; Catch's macros are for the test's own thread, so nothing is checked on a rank's.
struct Ranks {
  explicit Ranks(int32_t n, double seconds = 20) : group(n, seconds) {
    for (int32_t r = 0; r < n; ++r) {
      backends.push_back(make_backend(nullptr, false, 1));
      REQUIRE(backends.back()->join(group.collectives(r)).ok());
    }
  }
  RankGroup group;
  std::vector<std::unique_ptr<cpu::CpuBackend>> backends;
};

}  // namespace

TEST_CASE("all_reduce: the sum in order of rank, the same bits on every rank", "[collectives]") {
  Random random(std::random_device{}());
  for (const int32_t ranks : {1, 2, 3, 4, 8}) {
    Ranks all(ranks);
    for (int round = 0; round < 5; ++round) {
      const int64_t rows = 1 + random.below(9), cols = 1 + random.below(70);
      std::vector<Floats> x(static_cast<size_t>(ranks));
      for (Floats& v : x) v = random.normals(rows * cols);
      Floats want = x[0];
      for (int32_t r = 1; r < ranks; ++r)
        for (size_t i = 0; i < want.size(); ++i) want[i] += x[static_cast<size_t>(r)][i];
      on_ranks(ranks,
               [&](int32_t r) { all.backends[static_cast<size_t>(r)]->all_reduce({.x = view(&x[static_cast<size_t>(r)], rows, cols)}); });
      for (const Floats& got : x) REQUIRE(std::memcmp(got.data(), want.data(), want.size() * 4) == 0);
      REQUIRE(all.group.status().ok());
    }
  }
  // Alone it is what it was.
  auto alone = make_backend();
  Floats x = random.normals(12);
  const Floats before = x;
  alone->all_reduce({.x = view(&x, 3, 4)});
  CHECK(x == before);
}

TEST_CASE("linear_add_norm across ranks: the whole product, from columns of the weight", "[collectives]") {
  Random random(17);
  constexpr int64_t kRows = 7, kK = 48, kN = 20;
  const Floats x = random.normals(kRows * kK), w = random.normals(kN * kK), residual = random.normals(kRows * kN), norm(kN, 1.0f);
  for (const int32_t ranks : {2, 4}) {
    Ranks all(ranks);
    const int64_t k = kK / ranks;
    std::vector<Floats> ys(static_cast<size_t>(ranks), Floats(kRows * kN)), residuals(static_cast<size_t>(ranks), residual);
    std::vector<const Weight*> weights;
    for (int32_t r = 0; r < ranks; ++r) {
      TensorView v{.dtype = DType::kF32,
                   .shape = {kN, k},
                   .data = reinterpret_cast<const std::byte*>(w.data()),
                   .bytes = static_cast<size_t>(kN * k * 4)};
      v.blocks = {{r * k, kN, k, kK}};
      auto packed = all.backends[static_cast<size_t>(r)]->pack_weight(std::array{v});
      REQUIRE(packed.ok());
      weights.push_back(*packed);
    }
    on_ranks(ranks, [&](int32_t r) {
      const auto i = static_cast<size_t>(r);
      Floats input(static_cast<size_t>(kRows * k)), delta(kRows * kN), weight = norm;
      for (int64_t row = 0; row < kRows; ++row) std::copy_n(x.data() + row * kK + r * k, k, input.data() + row * k);
      all.backends[i]->linear_add_norm({.x = view(&input, kRows, k),
                                        .weight = weights[i],
                                        .delta = view(&delta, kRows, kN),
                                        .residual = view(&residuals[i], kRows, kN),
                                        .w = view(&weight, 1, kN),
                                        .y = view(&ys[i], kRows, kN),
                                        .across_ranks = true});
    });
    for (int64_t row = 0; row < kRows; ++row) {
      double square = 0;
      std::vector<double> sum(kN);
      for (int64_t n = 0; n < kN; ++n) {
        sum[n] = residual[row * kN + n];
        for (int64_t i = 0; i < kK; ++i) sum[n] += static_cast<double>(x[row * kK + i]) * w[n * kK + i];
        square += sum[n] * sum[n];
      }
      for (int64_t n = 0; n < kN; ++n) {
        REQUIRE(std::fabs(residuals[0][row * kN + n] - sum[n]) < 1e-4);
        REQUIRE(std::fabs(ys[0][row * kN + n] - sum[n] / std::sqrt(square / kN + 1e-6)) < 1e-4);
      }
    }
    for (const Floats& y : ys) REQUIRE(std::memcmp(y.data(), ys[0].data(), y.size() * 4) == 0);
  }
}

TEST_CASE("logits over a split vocabulary: every rank has the whole's choices", "[collectives]") {
  Random random(std::random_device{}());
  for (const int32_t ranks : {2, 3, 8})
    for (int round = 0; round < 20; ++round) {
      Ranks all(ranks);
      const int64_t vocab = ranks + random.below(60), real = 1 + random.below(vocab), rows = 1 + random.below(6);
      const auto top_k = static_cast<int32_t>(1 + random.below(std::min<int64_t>(real, 9)));
      Floats logits = random.normals(rows * vocab);
      for (float& l : logits)
        if (random.below(3) == 0) l = static_cast<float>(random.below(3));  // ties, across ranks too
      const bool broken = round % 5 == 4;
      if (broken) logits[static_cast<size_t>(vocab + random.below(real)) % logits.size()] = std::numeric_limits<float>::quiet_NaN();
      struct Result {
        std::vector<int32_t> best, top;
        std::vector<float> margin, log_prob;
        std::vector<uint8_t> bad;
        int32_t bad_row = -2;
      };
      const auto run = [&](cpu::CpuBackend* backend, int64_t first, int64_t count) {
        Floats mine;
        for (int64_t r = 0; r < rows; ++r)
          mine.insert(mine.end(), logits.begin() + r * vocab + first, logits.begin() + r * vocab + first + count);
        Result out{.best = std::vector<int32_t>(rows),
                   .top = std::vector<int32_t>(rows * top_k),
                   .margin = Floats(rows),
                   .log_prob = Floats(rows * top_k),
                   .bad = std::vector<uint8_t>(rows)};
        const int64_t own = std::clamp<int64_t>(real - first, 0, count);
        const auto id = static_cast<int32_t>(first);
        backend->best_two({.logits = view(&mine, rows, count),
                           .real_vocab = own,
                           .first_id = id,
                           .token = out.best.data(),
                           .margin = out.margin.data(),
                           .bad = out.bad.data()});
        backend->top_k_log_probs({.logits = view(&mine, rows, count),
                                  .real_vocab = own,
                                  .first_id = id,
                                  .top_k = top_k,
                                  .token = out.top.data(),
                                  .log_prob = out.log_prob.data(),
                                  .bad_row = &out.bad_row});
        return out;
      };
      const Result want = run(make_backend(nullptr, false, 1).get(), 0, vocab);
      std::vector<Result> got(static_cast<size_t>(ranks));
      on_ranks(ranks, [&](int32_t r) {
        const int64_t first = vocab * r / ranks;
        got[static_cast<size_t>(r)] = run(all.backends[static_cast<size_t>(r)].get(), first, vocab * (r + 1) / ranks - first);
      });
      for (const Result& g : got) {
        INFO(ranks << " ranks, vocabulary " << vocab << " of which " << real << " are real, top " << top_k);
        REQUIRE(g.bad == want.bad);
        REQUIRE(g.bad_row == want.bad_row);
        if (broken) continue;
        REQUIRE(g.best == want.best);
        REQUIRE(g.margin == want.margin);
        REQUIRE(g.top == want.top);
        REQUIRE(g.log_prob == got[0].log_prob);
        for (size_t i = 0; i < g.log_prob.size(); ++i) REQUIRE(std::fabs(g.log_prob[i] - want.log_prob[i]) < 1e-5f);
      }
    }
}

TEST_CASE("embed on ranks: zero where the id is another's, so that the sum is the row", "[collectives]") {
  Random random(3);
  constexpr int64_t kVocab = 50, kK = 32;
  const Floats w = random.normals(kVocab * kK);
  const std::vector<int32_t> tokens{0, 49, 16, 17, 33, 34, 5};
  Ranks all(3);
  std::vector<Floats> got(3, Floats(tokens.size() * kK, 9.0f));
  std::vector<const Weight*> weights;
  for (int32_t r = 0; r < 3; ++r) {
    const int64_t first = kVocab * r / 3, count = kVocab * (r + 1) / 3 - first;
    TensorView v{.dtype = DType::kF32,
                 .shape = {count, kK},
                 .data = reinterpret_cast<const std::byte*>(w.data()),
                 .bytes = static_cast<size_t>(count * kK * 4)};
    v.blocks = {{first * kK, count, kK, kK}};
    auto packed = all.backends[static_cast<size_t>(r)]->pack_weight(std::array{v});
    REQUIRE(packed.ok());
    weights.push_back(*packed);
  }
  on_ranks(3, [&](int32_t r) {
    const auto i = static_cast<size_t>(r);
    const Tensor y = view(&got[i], static_cast<int64_t>(tokens.size()), kK);
    all.backends[i]->embed({.token = tokens.data(),
                            .rows = static_cast<int32_t>(tokens.size()),
                            .weight = weights[i],
                            .y = y,
                            .first_id = static_cast<int32_t>(kVocab * r / 3)});
    all.backends[i]->all_reduce({.x = y, .keep_float32 = true});
  });
  for (const Floats& g : got)
    for (size_t t = 0; t < tokens.size(); ++t)
      for (int64_t i = 0; i < kK; ++i) REQUIRE(g[t * kK + static_cast<size_t>(i)] == w[static_cast<size_t>(tokens[t] * kK + i)]);
}

TEST_CASE("a rank that fails, or does not come, breaks the group with its name", "[collectives]") {
  SECTION("one that has gone with an error") {
    Ranks all(3);
    all.group.begin();
    on_ranks(3, [&](int32_t r) {
      if (r == 1) return all.group.leave(1, {Code::kEngineFault, "its card is gone"});
      Floats x(4, 1.0f);
      all.backends[static_cast<size_t>(r)]->all_reduce({.x = view(&x, 1, 4)});
      all.group.leave(r, all.backends[static_cast<size_t>(r)]->finish());
    });
    CHECK(all.group.status().message() == "rank 1 of 3: its card is gone");
    CHECK(all.group.status().code() == Code::kEngineFault);
    // It stays broken, and nobody waits any more.
    Floats x(4, 1.0f);
    all.backends[0]->all_reduce({.x = view(&x, 1, 4)});
    CHECK_FALSE(all.backends[0]->finish().ok());
  }
  SECTION("one that never comes") {
    Ranks all(2, 0.2);
    Floats x(4, 1.0f);
    all.backends[1]->all_reduce({.x = view(&x, 1, 4)});
    CHECK_THAT(all.backends[1]->finish().message(), ContainsSubstring("rank 0 of 2 did not come to a collective for 0.2 s"));
  }
  SECTION("all with their own errors: nobody waited, so nothing is broken") {
    Ranks all(2);
    all.group.begin();
    for (int32_t r = 0; r < 2; ++r) all.group.leave(r, {Code::kInvalidArgument, "the forest is wrong"});
    all.group.begin();
    std::vector<Floats> x(2, Floats(4, 1.0f));
    on_ranks(2, [&](int32_t r) { all.backends[static_cast<size_t>(r)]->all_reduce({.x = view(&x[static_cast<size_t>(r)], 1, 4)}); });
    CHECK(all.group.status().ok());
    CHECK(x[1] == Floats(4, 2.0f));
  }
}

}  // namespace ddtree::ops::test
