// finish_logits, top_k_log_probs and best_two on a card.
#include <cmath>
#include <limits>
#include <vector>

#include "gpu/support.h"

namespace ddtree::ops::gpu_test {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

struct Vocab {
  int64_t cols, real;
};
// Slices of the card's kernels end at 8192: sizes around that, the tiny pair's and one that ends in a large tail of padding.
constexpr Vocab kVocabs[] = {{4096, 4090}, {8192, 8192}, {8193, 8193}, {24576, 16384}, {128, 100}, {151936, 151669}};

// Normal logits; row 1 full of ties, row 2 all equal, row 3 with its best at both ends, row 4 with one giant. Padding is larger than all.
Floats logits(int64_t rows, const Vocab& v, Random* random) {
  Floats x = random->normals(rows * v.cols, 5.0f);
  for (int64_t r = 0; r < rows; ++r) {
    float* row = x.data() + r * v.cols;
    for (int64_t i = 0; i < v.cols && (r == 1 || r == 2); ++i) row[i] = r == 1 ? static_cast<float>(random->below(4)) : 1.5f;
    if (r == 3) row[0] = row[v.real - 1] = 30.0f;
    if (r == 4) row[random->below(v.real)] = 1e30f;
    for (int64_t i = v.real; i < v.cols; ++i) row[i] = r % 2 ? 1e9f : kNaN;
  }
  return x;
}

struct TopK {
  std::vector<int32_t> token;
  Floats log_prob;
  int32_t bad_row = 7;
};
std::vector<TopK> top_k(const Twins& twins, const Each<Tensor>& t, int64_t real, int32_t k) {
  std::vector<TopK> all;
  twins.each([&](Backend& b, size_t i) {
    TopK out{std::vector<int32_t>(static_cast<size_t>(t[i].rows * k), -7), Floats(static_cast<size_t>(t[i].rows * k), kNaN)};
    b.top_k_log_probs({.logits = t[i],
                       .real_vocab = real,
                       .top_k = k,
                       .token = out.token.data(),
                       .log_prob = out.log_prob.data(),
                       .bad_row = &out.bad_row});
    REQUIRE(b.finish().ok());
    all.push_back(out);
  });
  return all;
}

struct Best {
  std::vector<int32_t> token;
  Floats margin;
  std::vector<uint8_t> bad;
};
std::vector<Best> best_two(const Twins& twins, const Each<Tensor>& t, int64_t real) {
  std::vector<Best> all;
  twins.each([&](Backend& b, size_t i) {
    const auto rows = static_cast<size_t>(t[i].rows);
    Best out{std::vector<int32_t>(rows, -7), Floats(rows, kNaN), std::vector<uint8_t>(rows, 7)};
    b.best_two({.logits = t[i], .real_vocab = real, .token = out.token.data(), .margin = out.margin.data(), .bad = out.bad.data()});
    REQUIRE(b.finish().ok());
    all.push_back(out);
  });
  return all;
}

TEST_CASE("gpu: top_k_log_probs, the same tokens with ties by the smaller id, true log-probabilities") {
  INFO(seed_text());
  Random random(seed());
  const Twins twins(256);
  for (const Vocab& v : kVocabs) {
    for (const int64_t rows : {5, 33}) {
      if (v.cols * rows > 2000000) continue;
      const auto t = twins.constants(logits(rows, v, &random), rows, v.cols);
      for (const int32_t k : {1, 2, 16, 32, 64, 65, 100}) {
        const std::vector<TopK> got = top_k(twins, t, v.real, k);
        for (size_t i = 1; i < twins.count(); ++i) {
          INFO(twins.at(i).name() << ", vocabulary " << v.real << " of " << v.cols << ", rows " << rows << ", top " << k);
          CHECK(got[i].bad_row == -1);
          CHECK(got[i].token == got[0].token);  // of the same logits: exactly
          double worst = 0;
          for (size_t j = 0; j < got[i].log_prob.size(); ++j) {
            const double want = got[0].log_prob[j], difference = std::fabs(got[i].log_prob[j] - want);
            const double scaled = difference == 0 ? 0 : difference / (1.0 + std::fabs(want));
            worst = std::isnan(scaled) ? INFINITY : std::max(worst, scaled);
          }
          CHECK(worst < 5e-6);  // the sum of exponentials: the card's exp is good to some 1e-6
        }
      }
    }
  }
}

TEST_CASE("gpu: top_k_log_probs and best_two of several calls before one finish") {
  INFO(seed_text());
  Random random(seed());
  const Twins twins(64);
  const Vocab v{4096, 4090};
  const auto a = twins.constants(logits(16, v, &random), 16, v.cols), b = twins.constants(logits(7, v, &random), 7, v.cols);
  std::vector<std::vector<int32_t>> token(twins.count());
  twins.each([&](Backend& x, size_t i) {
    std::vector<int32_t> k16(16 * 16, -7), k100(7 * 100, -7), best(16, -7);
    Floats p16(k16.size(), kNaN), p100(k100.size(), kNaN), margin(16, kNaN);
    std::vector<uint8_t> bad(16, 7);
    int32_t first = 7, second = 7;
    x.top_k_log_probs({.logits = a[i], .real_vocab = v.real, .top_k = 16, .token = k16.data(), .log_prob = p16.data(), .bad_row = &first});
    x.top_k_log_probs(
        {.logits = b[i], .real_vocab = v.real, .top_k = 100, .token = k100.data(), .log_prob = p100.data(), .bad_row = &second});
    x.best_two({.logits = a[i], .real_vocab = v.real, .token = best.data(), .margin = margin.data(), .bad = bad.data()});
    REQUIRE(x.finish().ok());
    CHECK((first == -1 && second == -1));
    for (size_t r = 0; r < 16; ++r) CHECK((best[r] == k16[r * 16] && bad[r] == 0));
    token[i] = k16;
    token[i].insert(token[i].end(), k100.begin(), k100.end());
  });
  for (size_t i = 1; i < twins.count(); ++i) CHECK(token[i] == token[0]);
}

TEST_CASE("gpu: top_k_log_probs names the first row with a NaN or +inf, wherever it stands") {
  INFO(seed_text());
  Random random(seed());
  const Twins twins(64);
  for (const Vocab& v : kVocabs) {
    for (const float poison : {kNaN, kInfinity}) {
      const int64_t rows = 9, first = random.below(rows - 1), later = first + 1;
      Floats x = random.normals(rows * v.cols);
      for (const int64_t place : {int64_t{0}, v.real - 1, int64_t{random.below(v.real)}}) {
        Floats p = x;
        p[static_cast<size_t>(first * v.cols + place)] = poison;
        p[static_cast<size_t>(later * v.cols)] = poison;
        const auto t = twins.constants(p, rows, v.cols);
        for (const int32_t k : {1, 16, 64, 100}) {
          const std::vector<TopK> got = top_k(twins, t, v.real, k);
          for (size_t i = 0; i < twins.count(); ++i) {
            INFO(twins.at(i).name() << ", " << poison << " at row " << first << ", column " << place << " of " << v.real << ", top " << k);
            CHECK(got[i].bad_row == first);
            bool rest = true;  // rows that are well keep their results
            for (size_t j = 0; j < got[i].token.size(); ++j) {
              const auto row = static_cast<int64_t>(j) / k;
              rest = rest && (row == first || row == later || got[i].token[j] == got[0].token[j]);
            }
            CHECK(rest);
          }
        }
      }
    }
  }
}

// "A row with a non-finite sum": a logit of -inf has probability 0 and leaves the sum finite.
TEST_CASE("gpu: top_k_log_probs takes a logit of -inf as a probability of 0") {
  INFO(seed_text());
  Random random(seed());
  const Twins twins(64);
  const Vocab v{4096, 4090};
  Floats x = random.normals(4 * v.cols);
  for (int i = 0; i < 100; ++i) x[static_cast<size_t>(2 * v.cols + random.below(v.real))] = -kInfinity;
  const auto t = twins.constants(x, 4, v.cols);
  for (const int32_t k : {1, 16, 100}) {
    const std::vector<TopK> got = top_k(twins, t, v.real, k);
    for (size_t i = 0; i < twins.count(); ++i) {
      INFO(twins.at(i).name() << ", top " << k);
      CHECK(got[i].bad_row == -1);
      CHECK(got[i].token == got[0].token);
    }
  }
}

TEST_CASE("gpu: best_two, exact tokens and margins with ties, and rows with NaN or an infinity are told") {
  INFO(seed_text());
  Random random(seed());
  const Twins twins(256);
  for (const Vocab& v : kVocabs) {
    for (const int64_t rows : {1, 5, 64, 256}) {
      if (v.cols * rows > 2000000) continue;
      Floats x = logits(rows, v, &random);
      std::vector<uint8_t> want(static_cast<size_t>(rows), 0);
      for (int64_t r = 5; r < rows; r += 3) {
        x[static_cast<size_t>(r * v.cols + random.below(v.real))] = std::vector<float>{kNaN, kInfinity, -kInfinity}[random.below(3)];
        want[static_cast<size_t>(r)] = 1;
      }
      const std::vector<Best> got = best_two(twins, twins.constants(x, rows, v.cols), v.real);
      for (size_t i = 0; i < twins.count(); ++i) {
        INFO(twins.at(i).name() << ", vocabulary " << v.real << " of " << v.cols << ", rows " << rows);
        CHECK(got[i].bad == want);
        for (size_t r = 0; r < static_cast<size_t>(rows); ++r) {
          if (want[r]) continue;
          INFO("row " << r << ": token " << got[i].token[r] << " and " << got[0].token[r]);
          CHECK((got[i].token[r] == got[0].token[r] && got[i].margin[r] == got[0].margin[r]));
        }
      }
    }
  }
  // One column only: nothing is behind it.
  const std::vector<Best> one = best_two(twins, twins.constants(Floats{2.0f, 9.0f, -1.0f, 9.0f}, 2, 2), 1);
  for (const Best& b : one) CHECK((b.token == std::vector<int32_t>{0, 0} && b.margin == Floats{kInfinity, kInfinity}));
}

TEST_CASE("gpu: finish_logits, padding becomes -inf, the rest stays, the first bad row is named") {
  INFO(seed_text());
  Random random(seed());
  const Twins twins(64);
  for (const Vocab& v : kVocabs) {
    const int64_t rows = 12;
    for (const float poison : {0.0f, kNaN, kInfinity, -kInfinity}) {
      Floats x = logits(rows, v, &random);
      if (poison != 0) x[static_cast<size_t>(7 * v.cols + v.real - 1)] = x[static_cast<size_t>(9 * v.cols)] = poison;
      const auto t = twins.constants(x, rows, v.cols);
      twins.each([&](Backend& b, size_t i) {
        INFO(b.name() << ", vocabulary " << v.real << " of " << v.cols << ", poison " << poison);
        int32_t bad = 5;
        b.finish_logits({.logits = t[i], .real_vocab = v.real, .bad_row = &bad});
        REQUIRE(b.finish().ok());
        CHECK(bad == (poison == 0 ? -1 : 7));
        const auto values = b.host_floats(t[i]);
        REQUIRE(values.ok());
        int64_t wrong = 0;
        for (int64_t j = 0; j < rows * v.cols; ++j) {
          const float got = (*values)[j], want = j % v.cols < v.real ? x[static_cast<size_t>(j)] : -kInfinity;
          wrong += !(got == want || (std::isnan(got) && std::isnan(want)));
        }
        CHECK(wrong == 0);
      });
    }
  }
}

}  // namespace
}  // namespace ddtree::ops::gpu_test
