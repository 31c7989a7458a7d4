// sample_rows on a card against the CPU, which calls ops::sample: the same tokens and margins, but where a margin says that rounding
// decides.
#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>

#include "gpu/support.h"
#include "support/sample_cases.h"

namespace ddtree::ops::gpu_test {
namespace {

using testing::LogitKind;
using testing::SamplePass;

struct Chosen {
  std::vector<int32_t> token;
  Floats margin;
  std::vector<uint8_t> bad;
};

// Stages a pass on one backend and chooses. The op may change the logits.
Chosen choose(Backend& b, const SamplePass& pass, const Tensor& logits, int64_t real, const std::vector<int32_t>* rows = nullptr,
              int repeats = 1) {
  const auto n = static_cast<size_t>(logits.rows);
  Chosen out{std::vector<int32_t>(n, -7), Floats(n, -7), std::vector<uint8_t>(n, 7)};
  b.stage_begin(Lane::kPass);
  Forest f = pass.view();
  f.segment = b.stage<ForestSegment>(Lane::kPass, pass.segment);
  f.segment_of = b.stage<int32_t>(Lane::kPass, pass.segment_of);
  f.token = b.stage<int32_t>(Lane::kPass, pass.token);
  f.position = b.stage<int32_t>(Lane::kPass, pass.position);
  f.parent = b.stage<int32_t>(Lane::kPass, pass.parent);
  const SampleRule* rule = b.stage<SampleRule>(Lane::kPass, pass.rule);
  const int32_t* row = rows ? b.stage<int32_t>(Lane::kPass, *rows) : nullptr;
  f.pages = b.stage<int32_t>(Lane::kPass, pass.lists);
  REQUIRE((f.segment && f.segment_of && f.token && f.position && f.parent && f.pages && rule && (row || !rows)));
  for (int i = 0; i < repeats; ++i) {
    b.sample_rows({.forest = &f,
                   .logits = logits,
                   .row = row,
                   .rule = rule,
                   .real_vocab = real,
                   .token = out.token.data(),
                   .margin = out.margin.data(),
                   .bad = out.bad.data()});
    const Status s = b.finish();
    INFO(b.name() << ": " << s.message());
    REQUIRE(s.ok());
  }
  return out;
}

struct Made {
  SamplePass pass;
  Floats logits;
  std::vector<LogitKind> kind;  // [rows]
};

// Rows of equals by the thousand are for small vocabularies: at a filter's edge they are beyond the card's lists.
Made make(Random* random, int32_t rows, int64_t cols, int64_t real) {
  Made m;
  while (m.pass.rows() < rows) {
    const int32_t count = std::min(1 + random->below(12), rows - m.pass.rows());
    Floats x(static_cast<size_t>(count * cols), 1e9f);  // padding must not be seen
    for (int32_t i = 0; i < count; ++i) {
      m.kind.push_back(static_cast<LogitKind>(random->below(real > 2000 ? 3 : 5)));
      testing::fill_logits(m.kind.back(), random, x.data() + i * cols, real);
    }
    m.pass.add(random, count, real, testing::random_params(random, real), testing::largest(x.data(), real, 8));
    m.logits.insert(m.logits.end(), x.begin(), x.end());
  }
  return m;
}

struct Tally {
  int64_t rows = 0, other = 0, margins = 0, left = 0;
};

void compare(const Twins& twins, const Made& m, const std::vector<Chosen>& got, Tally* tally) {
  for (size_t i = 1; i < twins.count(); ++i)
    for (size_t r = 0; r < m.kind.size(); ++r) {
      const SampleParams& p = m.pass.rule[static_cast<size_t>(m.pass.segment_of[r])].params;
      INFO(
          twins.at(i).name() << fmt::format(
              ", row {} of {} (logits {}): T {} top_k {} top_p {} min_p {} presence {} frequency {} repetition {}; token {} margin {}, the "
              "CPU's {} margin {}",
              r, m.kind.size(), static_cast<int>(m.kind[r]), p.temperature, p.top_k, p.top_p, p.min_p, p.presence_penalty,
              p.frequency_penalty, p.repetition_penalty, got[i].token[r], got[i].margin[r], got[0].token[r], got[0].margin[r]));
      CHECK(got[i].bad[r] == 0);
      ++tally->rows;
      const float mine = got[i].margin[r], want = got[0].margin[r];
      if (got[i].token[r] == -1) {
        CHECK(m.kind[r] >= LogitKind::kSteps);
        ++tally->left;
      } else if (got[i].token[r] != got[0].token[r]) {
        CHECK((mine < 3e-3f && want < 3e-3f));
        ++tally->other;
      } else if (!(std::fabs(mine - want) <= 1e-5f * (1 + std::fabs(want)))) {
        ++tally->margins;  // a hair's own edge; or more than eight equals behind top_k, of which the CPU looks at eight
        if (m.kind[r] < LogitKind::kSteps) CHECK((mine < 3e-3f || want < 3e-3f || mine < want));
      }
    }
}

std::vector<Chosen> choose_all(const Twins& twins, const Made& m, const Each<Tensor>& t, int64_t real) {
  std::vector<Chosen> all;
  twins.each([&](Backend& b, size_t i) { all.push_back(choose(b, m.pass, t[i], real)); });
  return all;
}

struct Vocab {
  int64_t cols, real;
  int32_t rows, passes;
};

TEST_CASE("gpu: sample_rows, the CPU's tokens and margins over every kind of logits and rules", "[gpu][sample]") {
  INFO(seed_text());
  Random random(seed());
  Tally small, tally;
  for (const Vocab& v : {Vocab{40, 37, 64, 24}, {515, 500, 64, 12}, {4096, 4090, 64, 10}, {8193, 8193, 48, 4}, {24576, 16384, 32, 3}}) {
    const Twins twins(256);
    for (int pass = 0; pass < v.passes; ++pass) {
      INFO("vocabulary " << v.real << " of " << v.cols << ", pass " << pass);
      const Made m = make(&random, v.rows, v.cols, v.real);
      compare(twins, m, choose_all(twins, m, twins.constants(m.logits, v.rows, v.cols), v.real), v.real > 2000 ? &tally : &small);
    }
  }
  for (const Tally* t : {&small, &tally}) {
    WARN(fmt::format("{} rows: {} other tokens, {} other margins, {} left to the host", t->rows, t->other, t->margins, t->left));
    CHECK(t->other * 200 <= t->rows);
  }
  CHECK(tally.margins * 50 <= tally.rows);
  CHECK(tally.left == 0);
}

TEST_CASE("gpu: sample_rows over a vocabulary of 248,320", "[gpu][sample]") {
  INFO(seed_text());
  Random random(seed());
  Tally tally;
  const Twins twins(256);
  const int64_t cols = 248320, real = 248077;
  const Made m = make(&random, 40, cols, real);
  const std::vector<Chosen> all = choose_all(twins, m, twins.constants(m.logits, 40, cols), real);
  compare(twins, m, all, &tally);
  WARN(fmt::format("{} rows: {} other tokens, {} other margins", tally.rows, tally.other, tally.margins));
  CHECK(tally.other * 50 <= tally.rows);
  CHECK(tally.margins * 20 <= tally.rows);
}

TEST_CASE("gpu: sample_rows, a row alone and among others, named and in place: the same bits", "[gpu][sample]") {
  INFO(seed_text());
  Random random(seed());
  const Twins twins(256);
  const int64_t cols = 4096, real = 4090;
  const Made m = make(&random, 150, cols, real);  // more than the kernels take at a time
  const auto t = twins.constants(m.logits, 150, cols);
  const std::vector<Chosen> all = choose_all(twins, m, t, real);
  for (int n = 0; n < 24; ++n) {
    const std::vector<int32_t> row{random.below(150)};
    const auto at = static_cast<size_t>(row[0]);
    // Fresh logits: penalties were applied in place.
    const auto own = twins.constants({m.logits.begin() + row[0] * cols, m.logits.begin() + (row[0] + 1) * cols}, 1, cols);
    twins.each([&](Backend& b, size_t i) {
      const Chosen one = choose(b, m.pass, own[i], real, &row);
      INFO(b.name() << ", row " << row[0]);
      CHECK((one.token[0] == all[i].token[at] && one.margin[0] == all[i].margin[at]));
    });
  }
}

TEST_CASE("gpu: sample_rows names rows with a NaN or an infinity and skips padding", "[gpu][sample]") {
  INFO(seed_text());
  Random random(seed());
  const Twins twins(64);
  const int64_t cols = 10000, real = 9990;
  Made m = make(&random, 20, cols, real);
  constexpr float kPoison[] = {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
                               -std::numeric_limits<float>::infinity()};
  std::vector<uint8_t> want(20, 0);
  for (int n = 0; n < 6; ++n) {
    const int32_t r = random.below(20);
    m.logits[static_cast<size_t>(r * cols + random.below(real))] = kPoison[n % 3];
    want[static_cast<size_t>(r)] = 1;
  }
  const auto t = twins.constants(m.logits, 20, cols);
  std::vector<int32_t> rows(20);
  for (int32_t r = 0; r < 20; ++r) rows[static_cast<size_t>(r)] = r;
  rows[4] = rows[19] = -1, want[4] = want[19] = 0;
  std::vector<Chosen> all;
  twins.each([&](Backend& b, size_t i) {
    all.push_back(choose(b, m.pass, t[i], real, &rows));
    INFO(b.name());
    CHECK(all[i].bad == want);
    for (size_t r = 0; r < 20; ++r)
      if (!want[r]) CHECK((all[i].token[r] == all[0].token[r] || all[i].margin[r] < 3e-3f));
  });
}

TEST_CASE("gpu: sample_rows, draws over many seeds fit the distribution", "[gpu][sample]") {
  const Twins twins(512);
  const int64_t real = 60;
  Random random(77);  // fixed: the bound is of one draw
  const Floats row = random.normals(real, 1.5f);
  constexpr int kRows = 512, kPasses = 40;
  Floats logits;
  for (int r = 0; r < kRows; ++r) logits.insert(logits.end(), row.begin(), row.end());
  // By definition: temperature, then the fewest largest that make top_p.
  const double temperature = 0.8, top_p = 0.95;
  std::vector<int32_t> order = testing::largest(row.data(), real, static_cast<int32_t>(real));
  std::map<int32_t, double> expected;
  double total = 0, sum = 0;
  for (const float x : row) total += std::exp(static_cast<double>(x) / temperature);
  for (const int32_t id : order) {
    if (sum >= top_p * total) break;
    sum += expected[id] = std::exp(static_cast<double>(row[static_cast<size_t>(id)]) / temperature);
  }
  twins.each([&](Backend& b, size_t) {
    std::map<int32_t, int> counts;
    for (int pass = 0; pass < kPasses; ++pass) {
      SamplePass p;
      for (int r = 0; r < kRows; ++r) {
        const SampleParams params{.temperature = 0.8f, .top_p = 0.95f, .seed = static_cast<uint64_t>(pass * kRows + r + 1)};
        p.add(&random, 1, real, params, order);
        p.rule.back().banned = 0, p.rule.back().banned_end = 0;
      }
      const auto t = b.constant(logits, kRows, real);
      REQUIRE(t.ok());
      for (const int32_t token : choose(b, p, *t, real).token) ++counts[token];
    }
    double chi = 0;
    int cells = 0;
    for (const auto& [id, weight] : expected) {
      const double e = weight / sum * kRows * kPasses;
      if (e >= 5) chi += std::pow(counts[id] - e, 2) / e, ++cells;
    }
    for (const auto& [id, n] : counts) CHECK(expected.contains(id));
    INFO(b.name() << ": chi-square " << chi << " of " << cells - 1 << " degrees");
    CHECK(cells > 15);
    CHECK(chi < cells + 5 * std::sqrt(2.0 * cells));
  });
}

// Figures for docs/performance.md: `test_gpu "[sample-speed]"`.
TEST_CASE("gpu: sample_rows, how long it takes", "[.sample-speed]") {
  Random random(3);
  const Twins twins(256);
  const int64_t cols = 248320, real = 248077;
  struct Kind {
    const char* name;
    SampleParams params;
  };
  const Kind kinds[] = {{"greedy", {.temperature = 0}},
                        {"T 1", {.temperature = 1}},
                        {"T 0.7, top_k 20, top_p 0.95", {.temperature = 0.7f, .top_p = 0.95f, .top_k = 20}},
                        {"the same, presence 1.5", {.temperature = 0.7f, .top_p = 0.95f, .top_k = 20, .presence_penalty = 1.5f}},
                        {"T 1, presence 1.5, repetition 1.1", {.temperature = 1, .presence_penalty = 1.5f, .repetition_penalty = 1.1f}},
                        {"T 1, top_p 0.95", {.temperature = 1, .top_p = 0.95f}},
                        {"T 1, min_p 0.05", {.temperature = 1, .min_p = 0.05f}},
                        {"T 1, top_k 5000", {.temperature = 1, .top_k = 5000}}};
  for (const int32_t rows : {1, 16, 64}) {
    Floats x(static_cast<size_t>(rows * cols), 0.0f);
    for (int32_t r = 0; r < rows; ++r)
      testing::fill_logits(r % 2 ? LogitKind::kPeaked : LogitKind::kNormal, &random, x.data() + r * cols, real);
    const auto t = twins.constants(x, rows, cols);
    for (const Kind& k : kinds) {
      SamplePass p;
      SampleParams params = k.params;
      params.seed = 5;
      p.add(&random, rows, real, params, {1, 2, 3, 4, 5, 6, 7, 8});
      p.rule[0].banned = 0;
      if (params.penalised()) {  // a long conversation
        p.rule[0].first_seen = static_cast<int32_t>(p.lists.size()), p.rule[0].seen = 4000;
        for (int32_t i = 0; i < 4000; ++i) p.lists.push_back(i * 60 + 1), p.lists.push_back(i % 3);
      }
      for (size_t i = 1; i < twins.count(); ++i) {
        Backend& b = twins.at(i);
        choose(b, p, t[i], real);
        b.time_ops(true);
        choose(b, p, t[i], real, nullptr, 21);  // of the first, the staged arrays' copy is timed instead
        for (const OpTime& o : b.op_times())
          if (o.op == "sample_rows")
            WARN(fmt::format("{}: {} rows, {}: {:.1f} us", b.name(), rows, k.name, o.ms * 1e3 / static_cast<double>(o.calls)));
        b.time_ops(false);
      }
    }
  }
}

}  // namespace
}  // namespace ddtree::ops::gpu_test
