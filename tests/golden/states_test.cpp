// The target against tests/data/golden/states.safetensors: every layer's output and the logits of one stream of 170 tokens, however the
// stream is cut into passes: one prefill, chunks of any size, single steps, tentative chains and trees with commits.
#include <catch2/catch_test_macros.hpp>
#include <memory>
#include <numeric>
#include <random>

#include "golden/recorded.h"
#include "model/pair.h"
#include "nn/pair_executor.h"
#include "ops/cpu/cpu_backend.h"

namespace ddtree {
namespace {

constexpr double kTolerance = 1e-4;

struct Stream {
  Stream() : recorded("states.safetensors"), tokens(recorded.ids("tokens")) {
    for (int i = 0; i <= 8; ++i) layers.push_back(recorded.floats("layer." + std::to_string(i)));
    logits = recorded.floats("logits");
  }
  test::Recorded recorded;
  std::vector<int32_t> tokens;
  std::vector<std::vector<float>> layers;  // 0: embedding, i: output of layer i - 1; the last is after the final norm
  std::vector<float> logits;
};

const Stream& stream() {
  static const Stream s;
  return s;
}
const LoadedPair& pair() {
  static const auto p = [] {
    auto loaded = load_pair("tiny");
    INFO(loaded.status().message());
    REQUIRE(loaded.ok());
    return std::make_unique<LoadedPair>(std::move(*loaded));
  }();
  return *p;
}

std::unique_ptr<nn::PairExecutor> make(Precision precision = Precision::kFloat32, const ops::cpu::Kernels* kernels = nullptr) {
  const auto layers = static_cast<int32_t>(pair().spec.num_layers());
  nn::Probe probe;
  probe.captures.resize(layers + 1);
  std::iota(probe.captures.begin(), probe.captures.end(), -1);  // the embedding, then every layer
  ExecutorOptions options;
  options.pages = 40;
  options.slots = 3;
  options.max_rows = 256;
  options.precision = precision;
  auto backend = std::make_unique<ops::cpu::CpuBackend>(
      ops::cpu::CpuOptions{.threads = 2, .bfloat16_boundaries = precision == Precision::kBfloat16Boundaries, .kernels = kernels});
  auto executor = nn::PairExecutor::create(std::move(backend), pair(), options, probe);
  INFO(executor.status().message());
  REQUIRE(executor.ok());
  return std::move(*executor);
}

// Compares row `row` of the last pass with position `position` of the stream; returns the worst error of all.
double check_row(const nn::PairExecutor& executor, const PassOutput& out, int32_t row, int32_t position, double tolerance = kTolerance) {
  const int64_t hidden = executor.target().hidden_size, vocab = executor.target().vocab_size, layers = executor.target().num_layers();
  const auto taps = static_cast<int64_t>(executor.drafter()->taps.size());
  double worst = 0.0;
  for (int64_t i = 0; i <= layers; ++i) {
    const float* got = i == layers ? executor.hidden().f32(row) : executor.features().f32(row) + (taps + i) * hidden;
    const double error = test::relative_error(got, stream().layers[i].data() + position * hidden, hidden);
    INFO("layer." << i << " position " << position << " row " << row << " error " << error);
    CHECK(error <= tolerance);
    worst = std::max(worst, error);
  }
  for (int64_t t = 0; t < taps; ++t) {  // tap id = output of that layer = layer.(id + 1)
    const double error = test::relative_error(executor.features().f32(row) + t * hidden,
                                              stream().layers[executor.drafter()->taps[t] + 1].data() + position * hidden, hidden);
    CHECK(error <= tolerance);
  }
  REQUIRE(out.logits_row[row] >= 0);
  const double error = test::relative_error(out.logits + out.logits_row[row] * vocab, stream().logits.data() + position * vocab, vocab);
  INFO("logits position " << position << " row " << row << " error " << error);
  CHECK(error <= tolerance);
  return std::max(worst, error);
}

// One sequence that runs along the recorded stream.
struct Runner {
  explicit Runner(nn::PairExecutor* e, int32_t slot_ = 0) : executor(e), slot(slot_) {
    executor->reset_slot(slot);
    pages.resize(6);
    std::iota(pages.begin(), pages.end(), slot * 6);
    std::reverse(pages.begin(), pages.end());  // tables need not ascend
  }
  int32_t left() const { return static_cast<int32_t>(stream().tokens.size()) - at; }

  void add_certain(Forest* forest, int32_t rows) const {
    forest->segments.push_back({static_cast<int32_t>(forest->token.size()), rows, true, slot, pages, at});
    for (int32_t i = 0; i < rows; ++i)
      add_row(forest, stream().tokens[at + i], at + i, i == 0 ? -1 : static_cast<int32_t>(forest->token.size()) - 1);
  }
  // A random tree of `rows` rows that holds the stream's next `depth` tokens as one path (in random places); returns that path.
  std::vector<int32_t> add_tree(Forest* forest, int32_t rows, int32_t depth, std::mt19937* random) const {
    const auto first = static_cast<int32_t>(forest->token.size());
    forest->segments.push_back({first, rows, false, slot, pages, at});
    std::vector<int32_t> path;
    for (int32_t i = 0; i < rows; ++i) {
      const int32_t remaining = rows - i, missing = depth - static_cast<int32_t>(path.size());
      const bool on_path = i == 0 || (missing > 0 && (remaining <= missing || (*random)() % 2 == 0));
      if (on_path) {
        add_row(forest, stream().tokens[at + path.size()], at + static_cast<int32_t>(path.size()), path.empty() ? -1 : path.back());
        path.push_back(first + i);
      } else {
        const int32_t parent = first + static_cast<int32_t>((*random)() % i);
        add_row(forest, static_cast<int32_t>((*random)() % 4000), forest->position[parent] + 1, parent);
      }
    }
    return path;
  }
  static void add_row(Forest* forest, int32_t token, int32_t position, int32_t parent) {
    forest->token.push_back(token);
    forest->position.push_back(position);
    forest->parent.push_back(parent);
    forest->wants_logits.push_back(1);
  }

  nn::PairExecutor* executor;
  int32_t slot, at = 0;
  std::vector<int32_t> pages;
};

Accepted keep(int32_t segment, std::vector<int32_t> rows) {
  Accepted a;
  a.segment = segment;
  a.rows = std::move(rows);
  return a;
}

void run(nn::PairExecutor* executor, const Forest& forest, PassOutput* out) {
  const Status s = executor->forward(forest, out);
  INFO(s.message());
  REQUIRE(s.ok());
}

std::vector<int32_t> range(int32_t first, int32_t count) {
  std::vector<int32_t> v(count);
  std::iota(v.begin(), v.end(), first);
  return v;
}

double run_certain_chunks(nn::PairExecutor* executor, const std::vector<int32_t>& sizes) {
  Runner runner(executor);
  double worst = 0.0;
  for (size_t i = 0; runner.left() > 0; ++i) {
    const int32_t rows = std::min(sizes[i % sizes.size()], runner.left());
    Forest forest;
    runner.add_certain(&forest, rows);
    PassOutput out;
    run(executor, forest, &out);
    for (int32_t r = 0; r < rows; ++r) worst = std::max(worst, check_row(*executor, out, r, runner.at + r));
    REQUIRE(executor->commit(forest, std::vector{keep(0, range(0, rows))}).ok());
    runner.at += rows;
  }
  return worst;
}

TEST_CASE("states: one prefill of the whole stream", "[golden]") {
  const double worst = run_certain_chunks(make().get(), {170});
  INFO("worst relative error " << worst);
  CHECK(worst < 3e-5);
}

TEST_CASE("states: the prefill may be cut anywhere", "[golden]") {
  const auto executor = make();
  for (const std::vector<int32_t>& sizes :
       {std::vector<int32_t>{1}, {2}, {3}, {1, 2, 3}, {64}, {65}, {63, 1}, {7, 31, 2, 50}, {128, 1, 1, 40}}) {
    CAPTURE(sizes);
    run_certain_chunks(executor.get(), sizes);
  }
  std::mt19937 random(7);
  for (int trial = 0; trial < 4; ++trial) {
    std::vector<int32_t> sizes;
    for (int i = 0; i < 12; ++i) sizes.push_back(1 + static_cast<int32_t>(random() % (trial % 2 ? 40 : 4)));
    CAPTURE(sizes);
    run_certain_chunks(executor.get(), sizes);
  }
}

TEST_CASE("states: tentative chains and trees with commits at random points", "[golden]") {
  const auto executor = make();
  std::mt19937 random(11);
  for (int trial = 0; trial < 8; ++trial) {
    Runner runner(executor.get());
    while (runner.left() > 0) {
      const bool chain = trial % 2 == 0;
      const auto depth = static_cast<int32_t>(1 + random() % std::min<uint32_t>(runner.left(), trial < 6 ? 17 : 100));
      const auto rows = chain ? depth : depth + static_cast<int32_t>(random() % 100);
      Forest forest;
      const std::vector<int32_t> path = runner.add_tree(&forest, rows, depth, &random);
      PassOutput out;
      run(executor.get(), forest, &out);
      for (int32_t i = 0; i < depth; ++i) check_row(*executor, out, path[i], runner.at + i);
      // Keep less than what was right: what is dropped must leave no trace.
      const auto kept = static_cast<int32_t>(1 + random() % depth);
      REQUIRE(executor->commit(forest, std::vector{keep(0, {path.begin(), path.begin() + kept})}).ok());
      runner.at += kept;
    }
  }
}

TEST_CASE("states: certain and tentative sequences share passes", "[golden]") {
  const auto executor = make();
  std::mt19937 random(13);
  std::vector<Runner> runners{Runner(executor.get(), 0), Runner(executor.get(), 1), Runner(executor.get(), 2)};
  while (runners[0].left() > 0 || runners[1].left() > 0 || runners[2].left() > 0) {
    Forest forest;
    std::vector<std::vector<int32_t>> paths;
    std::vector<Runner*> owner;
    std::vector<int32_t> kept;
    for (Runner& r : runners) {
      if (r.left() == 0 || random() % 4 == 0) continue;
      const auto depth = static_cast<int32_t>(1 + random() % std::min(r.left(), 20));
      const auto first = static_cast<int32_t>(forest.token.size());
      if (random() % 2 == 0) {
        r.add_certain(&forest, depth);
        paths.push_back(range(first, depth));
        kept.push_back(depth);
      } else {
        paths.push_back(r.add_tree(&forest, depth + static_cast<int32_t>(random() % 40), depth, &random));
        kept.push_back(static_cast<int32_t>(random() % (depth + 1)));
      }
      owner.push_back(&r);
    }
    if (owner.empty()) continue;
    PassOutput out;
    run(executor.get(), forest, &out);
    std::vector<Accepted> accepted;
    for (size_t i = 0; i < owner.size(); ++i) {
      for (size_t j = 0; j < paths[i].size(); ++j) check_row(*executor, out, paths[i][j], owner[i]->at + static_cast<int32_t>(j));
      if (kept[i] > 0) accepted.push_back(keep(static_cast<int32_t>(i), {paths[i].begin(), paths[i].begin() + kept[i]}));
      owner[i]->at += kept[i];
    }
    REQUIRE(executor->commit(forest, accepted).ok());
  }
}

TEST_CASE("states: the other instruction sets compute the same model", "[golden]") {
  for (const ops::cpu::Kernels* k : {&ops::cpu::portable_kernels(), ops::cpu::avx2_kernels(), ops::cpu::avx512_kernels()}) {
    if (!k) continue;
    CAPTURE(k->name);
    run_certain_chunks(make(Precision::kFloat32, k).get(), {100, 1, 69});
  }
}

TEST_CASE("states: BF16 boundaries stay near float32, and are not float32", "[golden]") {
  const auto executor = make(Precision::kBfloat16Boundaries);
  Runner runner(executor.get());
  Forest forest;
  runner.add_certain(&forest, 170);
  PassOutput out;
  run(executor.get(), forest, &out);
  const int64_t vocab = executor->target().vocab_size;
  double mean = 0.0;
  for (int32_t r = 0; r < 170; ++r) mean += test::relative_error(out.logits + r * vocab, stream().logits.data() + r * vocab, vocab) / 170;
  INFO("mean of the rows' worst logit errors " << mean);
  CHECK(mean < 0.2);
  CHECK(mean > 1e-3);
}

}  // namespace
}  // namespace ddtree
