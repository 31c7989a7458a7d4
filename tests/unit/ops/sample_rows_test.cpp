// The CPU's sample_rows: every row of a pass as ops::sample chooses alone, with the path and history that the pass describes.
#include <cmath>
#include <limits>

#include "support/sample_cases.h"
#include "unit/ops/support.h"

namespace ddtree::ops {
namespace {

using namespace test;     // NOLINT(google-build-using-namespace)
using namespace testing;  // NOLINT(google-build-using-namespace)

struct Chosen {
  std::vector<int32_t> token;
  Floats margin;
  std::vector<uint8_t> bad;
};
Chosen run(cpu::CpuBackend* backend, const SamplePass& pass, const Tensor& logits, int64_t real, const std::vector<int32_t>* rows) {
  const auto n = static_cast<size_t>(logits.rows);
  Chosen out{std::vector<int32_t>(n, -7), Floats(n, -7), std::vector<uint8_t>(n, 7)};
  const Forest f = pass.view();
  backend->sample_rows({.forest = &f,
                        .logits = logits,
                        .row = rows ? rows->data() : nullptr,
                        .rule = pass.rule.data(),
                        .real_vocab = real,
                        .token = out.token.data(),
                        .margin = out.margin.data(),
                        .bad = out.bad.data()});
  return out;
}

TEST_CASE("sample_rows: every row as ops::sample has it, in trees with penalties and bans", "[ops]") {
  Random random(11);
  const auto backend = make_backend();
  int32_t paths = 0;
  for (int round = 0; round < 40; ++round) {
    const int64_t real = round % 3 == 0 ? 37 : 500, cols = real + 5;
    SamplePass pass;
    Floats x;
    std::vector<int32_t> likely;
    while (pass.rows() < 30) {
      const int32_t count = 1 + random.below(9);
      Floats rows(static_cast<size_t>(count * cols), 1e9f);  // padding must not be seen
      for (int32_t i = 0; i < count; ++i) fill_logits(static_cast<LogitKind>(random.below(5)), &random, rows.data() + i * cols, real);
      likely = largest(rows.data(), real, 8);
      pass.add(&random, count, real, random_params(&random, real), likely);
      x.insert(x.end(), rows.begin(), rows.end());
    }
    const Chosen all = run(backend.get(), pass, put(backend.get(), x, pass.rows(), cols), real, nullptr);
    for (int32_t r = 0; r < pass.rows(); ++r) {
      INFO("round " << round << ", row " << r);
      const Sampled want = pass.expected(r, std::span(x).subspan(static_cast<size_t>(r * cols), static_cast<size_t>(real)));
      const auto at = static_cast<size_t>(r);
      CHECK(all.bad[at] == 0);
      CHECK((all.token[at] == want.token && all.margin[at] == want.margin));
      paths += pass.parent[at] >= 0 && pass.rule[static_cast<size_t>(pass.segment_of[at])].params.penalised();
    }
    // Some rows, named, in another order, with padding and a fault between them.
    std::vector<int32_t> rows{pass.rows() - 1, -1, 0, 7, 3};
    Floats some;
    for (const int32_t r : rows) {
      const int32_t from = std::max(r, 0);
      some.insert(some.end(), x.begin() + from * cols, x.begin() + (from + 1) * cols);
    }
    some[static_cast<size_t>(3 * cols + real - 1)] = round % 2 ? INFINITY : NAN;
    const Chosen named = run(backend.get(), pass, put(backend.get(), some, 5, cols), real, &rows);
    for (size_t i = 0; i < rows.size(); ++i) {
      CHECK(named.bad[i] == (i == 3));
      if (rows[i] < 0 || i == 3) continue;
      CHECK((named.token[i] == all.token[static_cast<size_t>(rows[i])] && named.margin[i] == all.margin[static_cast<size_t>(rows[i])]));
    }
  }
  CHECK(paths > 100);
}

}  // namespace
}  // namespace ddtree::ops
