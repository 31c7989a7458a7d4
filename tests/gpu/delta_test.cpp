// conv, delta_rule, gated_delta_mixer and delta_commit on a card. States and windows are read by passes of their own: see Mixer::probe.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "gpu/forests.h"
#include "gpu/support.h"

namespace ddtree::ops::gpu_test {
namespace {

constexpr double kConv = 2e-4;   // four products and the card's exp: some 1e-6 before the rounding
constexpr double kDelta = 2e-3;  // sums of up to 256 terms that build on each other, 1e-5; c may differ by a step in a few places

// Of the mixer, whose norm makes the small outputs of a head as large as any: their rounding to BF16 before it counts more.
constexpr double kMixer = 4e-3;

constexpr DeltaShape kTiny{.layers = 2, .key_heads = 2, .value_heads = 4, .key_dim = 128, .value_dim = 128, .conv_width = 4};
constexpr DeltaShape kLarge{.layers = 1, .key_heads = 16, .value_heads = 48, .key_dim = 128, .value_dim = 128, .conv_width = 4};
constexpr DeltaShape kEven{.layers = 2, .key_heads = 3, .value_heads = 3, .key_dim = 128, .value_dim = 128, .conv_width = 4};
constexpr DeltaShape kOther{.layers = 3, .key_heads = 1, .value_heads = 1, .key_dim = 64, .value_dim = 96, .conv_width = 3};

struct Inputs {
  Floats c, a, b;  // empty c: conv's output
};

class Mixer {
 public:
  // tentative: rows of a pass that the trace is made for; 0: all.
  Mixer(const Twins& twins, DeltaShape s, int32_t slots, int32_t rows, Random* random, float a_log_scale = 0.7f, int32_t tentative = 0)
      : shape(s), twins_(twins), slots_(slots), random_(random) {
    states_ = twins.make([&](Backend& b) { return b.make_state_pool(shape, slots); });
    trace_ = twins.make([&](Backend& b) { return b.make_delta_trace(shape, rows, tentative > 0 ? tentative : rows); });
    for (int32_t l = 0; l < shape.layers; ++l) {
      taps_.push_back(twins.constants(random->normals(shape.conv_width * shape.channels(), 0.5f), shape.conv_width, shape.channels()));
      a_log_.push_back(twins.constants(random->normals(shape.value_heads, a_log_scale), 1, shape.value_heads));
      dt_bias_.push_back(twins.constants(random->normals(shape.value_heads), 1, shape.value_heads));
    }
    norm_ = twins.constants(random->normals(shape.value_dim), 1, shape.value_dim);
    // Rows of a multiple of 16 bytes, as the models' are: the mixer's kernel for few rows takes no others.
    packed_ = twins.activations(rows, (width() + 7) / 8 * 8);
    c_ = twins.activations(rows, shape.channels());
  }
  int64_t values() const { return int64_t{shape.value_heads} * shape.value_dim; }
  int64_t keys() const { return int64_t{shape.key_heads} * shape.key_dim; }
  int64_t width() const { return shape.channels() + values() + 2 * shape.value_heads; }  // qkv | z | a | b
  void set_taps(const Floats& taps) {
    for (int32_t l = 0; l < shape.layers; ++l) taps_[static_cast<size_t>(l)] = twins_.constants(taps, shape.conv_width, shape.channels());
  }
  void set_gates(const Floats& a_log, const Floats& dt_bias) {
    for (int32_t l = 0; l < shape.layers; ++l) {
      a_log_[static_cast<size_t>(l)] = twins_.constants(a_log, 1, shape.value_heads);
      dt_bias_[static_cast<size_t>(l)] = twins_.constants(dt_bias, 1, shape.value_heads);
    }
  }

  Inputs inputs(int32_t rows, float gate_scale = 1.5f) const {
    return {{},
            random_->activations(int64_t{rows} * shape.value_heads, gate_scale),
            random_->activations(int64_t{rows} * shape.value_heads, 2)};
  }
  // Every layer: conv of random inputs, then the delta rule of `in`. Gives o of the last layer.
  Output pass(const std::string& what, const Plan& plan, const Inputs& in, int64_t together = 1) {
    const Each<Forest> forest = plan.stage(twins_);
    const int64_t rows = plan.rows(), channels = shape.channels();
    const size_t n = twins_.count();
    const Each<Tensor> packed = cols_of(rows_of(packed_, n, 0, rows), n, 0, width()), given = rows_of(c_, n, 0, rows);
    const Each<Tensor> x = cols_of(packed, n, 0, channels), a = cols_of(packed, n, channels + values(), shape.value_heads),
                       b = cols_of(packed, n, channels + values() + shape.value_heads, shape.value_heads);
    if (!in.c.empty()) twins_.upload(in.c, given);
    Output o;
    for (int32_t done = 0; done < shape.layers; ++done) {
      const int32_t layer = descending ? shape.layers - 1 - done : done;
      INFO("layer " << layer);
      const auto l = static_cast<size_t>(layer);
      twins_.upload(random_->activations(rows * width()), packed);
      twins_.upload(in.a, a);
      twins_.upload(in.b, b);
      const Output y = twins_.output(rows, channels);
      o = twins_.output(rows, values());
      twins_.each([&](Backend& k, size_t i) {
        k.conv(
            {.forest = &forest[i], .x = x[i], .w = taps_[l][i], .states = states_[i], .trace = trace_[i], .layer = layer, .y = y.view[i]});
        k.delta_rule({.forest = &forest[i],
                      .c = in.c.empty() ? y.view[i] : given[i],
                      .a = a[i],
                      .b = b[i],
                      .a_log = a_log_[l][i],
                      .dt_bias = dt_bias_[l][i],
                      .states = states_[i],
                      .trace = trace_[i],
                      .layer = layer,
                      .o = o.view[i]});
      });
      twins_.compare(what + ": conv", y, kConv);
      twins_.compare(what + ": delta_rule", o, kDelta, together);
    }
    plan.advance();
    return o;
  }
  // The same by gated_delta_mixer. x: q | k | v of the projection, and z; random where empty.
  Output mix(const std::string& what, const Plan& plan, const Floats& a, const Floats& b, const Floats& x = {}, const Floats& z = {}) {
    const Output o = mix(what, plan.stage(twins_), plan.rows(), a, b, x, z);
    plan.advance();
    return o;
  }
  // rows: of every forest at least; those that a forest has beside are padding.
  Output mix(const std::string& what, const Each<Forest>& forest, int64_t rows, const Floats& a, const Floats& b, const Floats& x = {},
             const Floats& z = {}) {
    const int64_t channels = shape.channels(), heads = shape.value_heads;
    const size_t n = twins_.count();
    Output o;
    for (int32_t layer = 0; layer < shape.layers; ++layer) {
      INFO("layer " << layer);
      const auto l = static_cast<size_t>(layer);
      const Each<Tensor> packed = cols_of(rows_of(packed_, n, 0, rows), n, 0, width());
      twins_.upload(random_->activations(rows * width()), packed);
      if (!x.empty()) twins_.upload(x, cols_of(packed, n, 0, channels));
      if (!z.empty()) twins_.upload(z, cols_of(packed, n, channels, values()));
      twins_.upload(a, cols_of(packed, n, channels + values(), heads));
      twins_.upload(b, cols_of(packed, n, channels + values() + heads, heads));
      o = twins_.output(rows, values());
      twins_.each([&](Backend& k, size_t i) {
        const Tensor all = packed_[i].row_range(0, forest[i].rows);
        Tensor out = o.view[i];
        out.rows = forest[i].rows;
        k.gated_delta_mixer({.forest = &forest[i],
                             .x = all.col_range(0, channels),
                             .z = all.col_range(channels, values()),
                             .a = all.col_range(channels + values(), heads),
                             .b = all.col_range(channels + values() + heads, heads),
                             .taps = taps_[l][i],
                             .a_log = a_log_[l][i],
                             .dt_bias = dt_bias_[l][i],
                             .norm = norm_[i],
                             .eps = 1e-6f,
                             .states = states_[i],
                             .trace = trace_[i],
                             .layer = layer,
                             .c = c_[i].row_range(0, forest[i].rows),
                             .o = out});
      });
      twins_.compare(what + ": gated_delta_mixer", o, kMixer);
    }
    return o;
  }
  Output mix(const std::string& what, const Plan& plan) {
    const Inputs in = inputs(plan.rows());
    return mix(what, plan, in.a, in.b);
  }
  void commit(const Accepted& accepted) {
    const Each<Paths> paths = accepted.stage(twins_);
    twins_.each([&](Backend& b, size_t i) { b.delta_commit({.paths = paths[i], .states = states_[i], .trace = trace_[i]}); });
  }
  void reset(int32_t slot) {
    twins_.each([&](Backend& b, size_t i) { b.reset_state(states_[i], slot); });
  }

  // Reads all states and windows: tentative rows that neither decay nor write, so that each o is S0ᵀq^ for a random q, more of them than
  // the state has rows; conv of their first row sees the whole window. Between a pass and its commit this would take the trace.
  Output probe(const std::string& what) {
    Plan plan(nullptr);
    std::vector<Sequence> s(static_cast<size_t>(slots_));
    for (int32_t i = 0; i < slots_; ++i)
      s[static_cast<size_t>(i)].slot = i, plan.add(Shape::kStar, shape.key_dim + 8, &s[static_cast<size_t>(i)], random_);
    Inputs in{random_->activations(int64_t{plan.rows()} * shape.channels()),
              Floats(static_cast<size_t>(plan.rows() * shape.value_heads), -40.0f),
              {}};
    in.b = in.a;
    // A state of a single row is k^ uᵀ: all of a q's output is gone where it happens to be at right angles to k^.
    return pass("state after " + what, plan, in, shape.key_dim + 8);
  }

  const DeltaShape shape;
  bool descending = false;  // pass(): the last layer first

 private:
  const Twins& twins_;
  const int32_t slots_;
  Random* random_;
  Each<StatePool*> states_;
  Each<DeltaTrace*> trace_;
  std::vector<Each<Tensor>> taps_, a_log_, dt_bias_;
  Each<Tensor> norm_, packed_, c_;
};

std::vector<Sequence> slots(int32_t n) {
  std::vector<Sequence> s(static_cast<size_t>(n));
  for (int32_t i = 0; i < n; ++i) s[static_cast<size_t>(i)].slot = i;
  return s;
}

void everything(const DeltaShape& shape) {
  INFO(seed_text());
  INFO("heads " << shape.key_heads << "/" << shape.value_heads << " of " << shape.key_dim << "/" << shape.value_dim);
  Random random(seed());
  const Twins twins(900);
  Mixer mixer(twins, shape, 6, 900, &random);
  std::vector<Sequence> s = slots(6);
  {
    Plan plan(nullptr);  // prompts: pieces that end before, at and after chunks
    plan.add(Shape::kCertain, 200, &s[0], &random).add(Shape::kCertain, 64, &s[1], &random).add(Shape::kCertain, 65, &s[2], &random);
    plan.add(Shape::kCertain, 1, &s[3], &random).add(Shape::kCertain, 2, &s[4], &random);
    mixer.pass("prompts", plan, mixer.inputs(plan.rows()));
    mixer.probe("prompts");
  }
  {
    Plan plan(nullptr);
    plan.add(Shape::kBestFirst, 64, &s[0], &random).add(Shape::kCertain, 130, &s[3], &random).add(Shape::kStar, 7, &s[1], &random);
    plan.add(Shape::kChain, 16, &s[2], &random).add(Shape::kCertain, 1, &s[4], &random).add(Shape::kRandom, 33, &s[5], &random);
    mixer.pass("trees", plan, mixer.inputs(plan.rows()));
    mixer.commit(plan.accept(&random));
    mixer.probe("the commit");
  }
  {
    Plan plan(nullptr);  // trees that nobody commits leave everything as it was; slot 5 is in no pass
    for (size_t i = 0; i < 5; ++i) plan.add(kTrees[i % 4], std::vector<int32_t>{1, 2, 65, 128, 100}[i], &s[i], &random);
    mixer.pass("trees left", plan, mixer.inputs(plan.rows()));
    mixer.probe("trees that were left");
  }
  mixer.reset(1);
  mixer.reset(4);
  {
    Plan plan(nullptr);
    plan.add(Shape::kCertain, 63, &s[1], &random).add(Shape::kRandom, 200, &s[4], &random).add(Shape::kBestFirst, 256, &s[0], &random);
    plan.add(Shape::kCertain, 1, &s[5], &random);
    mixer.pass("after the reset", plan, mixer.inputs(plan.rows()));
    mixer.commit(plan.accept(&random));
    mixer.probe("the reset");
  }
}

TEST_CASE("gpu: conv and delta_rule, prompts, trees, commits and resets, the tiny pair's shape") { everything(kTiny); }
TEST_CASE("gpu: conv and delta_rule, prompts, trees, commits and resets, Qwen3.6-27B's shape") { everything(kLarge); }
TEST_CASE("gpu: conv and delta_rule, prompts, trees, commits and resets, an odd shape") { everything(kOther); }

TEST_CASE("gpu: delta_rule, segments of 1 to 256 rows of every kind, each committed") {
  INFO(seed_text());
  Random random(seed());
  const Twins twins(300);
  Mixer mixer(twins, {.layers = 1, .key_heads = 1, .value_heads = 2, .key_dim = 128, .value_dim = 128, .conv_width = 4}, 1, 300, &random);
  std::vector<Sequence> s = slots(1);
  for (const int32_t rows : {1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 192, 200, 256}) {
    for (const Shape shape : {Shape::kCertain, Shape::kChain, Shape::kStar, Shape::kRandom, Shape::kBestFirst}) {
      INFO(rows << " rows, " << name_of(shape));
      Plan plan(nullptr);
      plan.add(shape, rows, &s[0], &random);
      mixer.pass("pass", plan, mixer.inputs(rows));
      mixer.commit(plan.accept(&random));
      mixer.probe("it");
    }
  }
}

// A budget of 256 nodes, and the root.
TEST_CASE("gpu: delta_rule, trees of more than 256 rows") {
  INFO(seed_text());
  Random random(seed());
  const Twins twins(600);
  Mixer mixer(twins, kTiny, 2, 600, &random);
  std::vector<Sequence> s = slots(2);
  for (const int32_t rows : {257, 300, 320}) {
    for (const Shape shape : {Shape::kStar, Shape::kRandom, Shape::kBestFirst}) {
      INFO(rows << " rows, " << name_of(shape));
      Plan plan(nullptr);
      plan.add(Shape::kCertain, 40, &s[0], &random).add(shape, rows, &s[1], &random);
      mixer.pass("pass", plan, mixer.inputs(plan.rows()));
      mixer.commit(plan.accept(&random));
      mixer.probe("it");
    }
  }
}

// (I + A)^-1 by powers of A is exact on paper and off by many orders here.
TEST_CASE("gpu: delta_rule, one key repeated keeps its digits") {
  INFO(seed_text());
  Random random(seed());
  const Twins twins(300);
  Mixer mixer(twins, kTiny, 2, 300, &random);
  mixer.set_gates(Floats(4, 0.0f), Floats(4, 0.0f));
  for (const float beta : {2.944f, 8.0f}) {  // 0.95 and nearly 1
    for (const Shape shape : {Shape::kCertain, Shape::kChain, Shape::kRandom, Shape::kBestFirst}) {
      for (const int32_t rows : {64, 200}) {
        INFO(rows << " rows, " << name_of(shape) << ", beta sigmoid(" << beta << ")");
        std::vector<Sequence> s = slots(2);
        mixer.reset(0);
        mixer.reset(1);
        Plan start(nullptr);
        start.add(Shape::kCertain, 50, &s[0], &random);
        mixer.pass("start", start, mixer.inputs(50));
        Plan plan(nullptr);
        plan.add(shape, rows, &s[0], &random);
        Inputs in = mixer.inputs(rows);
        const int64_t channels = mixer.shape.channels(), keys = mixer.keys();
        in.c = random.activations(rows * channels);
        for (int32_t r = 1; r < rows; ++r) std::copy_n(in.c.begin() + keys, keys, in.c.begin() + r * channels + keys);  // k of row 0
        std::fill(in.b.begin(), in.b.end(), beta);
        std::fill(in.a.begin(), in.a.end(), -20.0f);  // no decay
        mixer.pass("repeated", plan, in);
        mixer.commit(plan.accept(&random));
        mixer.probe("it");
      }
    }
  }
}

// Three rows of four decay by 5 %, the fourth by e^-2000: P reaches -128,000, whose float32 spacing is 0.008, and the differences that
// count lie between neighbours.
TEST_CASE("gpu: delta_rule, large gates do not cancel") {
  INFO(seed_text());
  Random random(seed());
  const Twins twins(300);
  Mixer mixer(twins, kTiny, 2, 300, &random);
  mixer.set_gates(Floats(4, 6.0f), Floats(4, 0.0f));
  for (const Shape shape : {Shape::kCertain, Shape::kChain, Shape::kRandom, Shape::kBestFirst}) {
    INFO(name_of(shape));
    std::vector<Sequence> s = slots(2);
    for (int32_t i = 0; i < 2; ++i) mixer.reset(i);
    Plan plan(nullptr);
    plan.add(shape, 256, &s[0], &random);
    Inputs in = mixer.inputs(256);
    for (size_t r = 0; r < 256; ++r)
      for (size_t h = 0; h < 4; ++h) in.a[r * 4 + h] = r % 4 == 1 ? 5.0f : -9.0f;
    mixer.pass("large gates", plan, in);
    mixer.commit(plan.accept(&random));
    mixer.probe("it");
  }
  // And gates of ordinary size that add up to hundreds along the path.
  mixer.set_gates(Floats{0.5f, 1.0f, -1.0f, 1.5f}, Floats(4, 0.5f));
  for (const Shape shape : {Shape::kCertain, Shape::kChain, Shape::kBestFirst}) {
    INFO(name_of(shape));
    std::vector<Sequence> s = slots(2);
    Plan plan(nullptr);
    plan.add(shape, 256, &s[1], &random);
    mixer.pass("sums of hundreds", plan, mixer.inputs(256));
    mixer.commit(plan.accept(&random));
    mixer.probe("it");
  }
}

TEST_CASE("gpu: delta_rule, rows of a segment have the same bits whatever else is in the pass") {
  INFO(seed_text());
  Random random(seed());
  const Twins twins(400);
  for (const Shape shape : {Shape::kBestFirst, Shape::kCertain}) {
    const int32_t rows = 70;
    const uint64_t tree = random.bits();
    // The same mixer twice: alone, and between others. The segment's inputs and tree are the same.
    Floats c = random.activations(rows * int64_t{kTiny.channels()}), a = random.activations(rows * 4), b = random.activations(rows * 4);
    std::vector<Floats> first;
    for (const bool batch : {false, true}) {
      Random same(tree), other(random.bits());
      Mixer mixer(twins, {.layers = 1, .key_heads = 2, .value_heads = 4, .key_dim = 128, .value_dim = 128, .conv_width = 4}, 3, 400,
                  &other);
      mixer.set_gates(Floats{0.5f, 0.0f, -1.0f, 1.0f}, Floats(4, 0.1f));
      std::vector<Sequence> s = slots(3);
      {
        Plan plan(nullptr);  // a state for slot 1
        plan.add(Shape::kCertain, 64, &s[1], &same);
        mixer.pass("start", plan, {same.activations(64 * int64_t{kTiny.channels()}), same.activations(64 * 4), same.activations(64 * 4)});
      }
      Plan plan(nullptr);
      Inputs in = {{}, {}, {}};
      const auto more = [&](int32_t count) {
        const Floats extra = other.activations(count * int64_t{kTiny.channels()}), gates = other.activations(count * 4);
        in.c.insert(in.c.end(), extra.begin(), extra.end());
        in.a.insert(in.a.end(), gates.begin(), gates.end());
        in.b.insert(in.b.end(), gates.begin(), gates.end());
      };
      if (batch) plan.add(Shape::kChain, 11, &s[0], &other), more(11);
      const int64_t at = plan.rows();
      plan.add(shape, rows, &s[1], &same);
      in.c.insert(in.c.end(), c.begin(), c.end());
      in.a.insert(in.a.end(), a.begin(), a.end());
      in.b.insert(in.b.end(), b.begin(), b.end());
      if (batch) plan.add(Shape::kCertain, 100, &s[2], &other), more(100);
      const Output o = mixer.pass("pass", plan, in);
      for (size_t i = 0; i < twins.count(); ++i) {
        Floats mine = twins.read("o", o, i);
        mine = Floats(mine.begin() + at * o.cols, mine.begin() + (at + rows) * o.cols);
        if (!batch) {
          first.push_back(mine);
        } else {
          INFO(twins.at(i).name() << ", " << name_of(shape));
          CHECK(std::memcmp(mine.data(), first[i].data(), mine.size() * sizeof(float)) == 0);
        }
      }
    }
  }
}

TEST_CASE("gpu: delta_rule, a single row is the same certain and tentative, and leaves the same state (on the CPU to the bit)") {
  INFO(seed_text());
  Random random(seed());
  const Twins twins(400);
  Mixer mixer(twins, {.layers = 1, .key_heads = 2, .value_heads = 4, .key_dim = 128, .value_dim = 128, .conv_width = 4}, 2, 400, &random);
  std::vector<Sequence> s = slots(2);
  const auto twice = [](const Floats& v) {
    Floats both = v;
    both.insert(both.end(), v.begin(), v.end());
    return both;
  };
  const auto run = [&](int32_t rows, Shape first, Shape second) {
    Plan plan(nullptr);
    plan.add(first, rows, &s[0], &random).add(second, rows, &s[1], &random);
    const Output o = mixer.pass("pass", plan,
                                {twice(random.activations(rows * int64_t{mixer.shape.channels()})), twice(random.activations(rows * 4)),
                                 twice(random.activations(rows * 4))});
    mixer.commit(plan.accept(&random));
    for (size_t i = 0; i < twins.count(); ++i) {
      const Floats v = twins.read("o", o, i);
      INFO(twins.at(i).name() << ", " << name_of(first) << " and " << name_of(second));
      if (std::string_view(twins.at(i).name()).starts_with("cpu")) {
        CHECK(std::memcmp(v.data(), v.data() + rows * o.cols, static_cast<size_t>(rows * o.cols) * sizeof(float)) == 0);
        continue;
      }
      // A commit's fold rounds otherwise than a chunk's: outputs may differ in their last BF16 bit here and there.
      double difference = 0, norm = 0;
      for (int64_t k = 0; k < rows * o.cols; ++k) {
        const double x = v[static_cast<size_t>(k)], y = v[static_cast<size_t>(rows * o.cols + k)];
        difference += (x - y) * (x - y), norm += y * y;
      }
      CHECK(difference < 1e-6 * norm);
    }
  };
  run(40, Shape::kCertain, Shape::kCertain);
  for (int i = 0; i < 3; ++i) {
    run(1, Shape::kCertain, Shape::kChain);
    run(5, Shape::kCertain, Shape::kCertain);  // reads the states that the row left
  }
}

// Segments of one row, trees, and all that the three ops serve, alone and together.
void mix_everything(const DeltaShape& shape) {
  INFO(seed_text());
  INFO("heads " << shape.key_heads << "/" << shape.value_heads << " of " << shape.key_dim << "/" << shape.value_dim);
  Random random(seed());
  const Twins twins(900);
  Mixer mixer(twins, shape, 6, 900, &random);
  std::vector<Sequence> s = slots(6);
  for (int step = 0; step < 5; ++step) {  // plain decoding, from a new sequence on; slot 5 is in no pass
    Plan plan(nullptr);
    for (size_t i = 0; i < 5; ++i) plan.add(Shape::kCertain, 1, &s[i], &random);
    mixer.mix("single rows", plan);
  }
  mixer.probe("single rows");
  for (int step = 0; step < 2; ++step) {
    Plan plan(nullptr);
    for (size_t i = 0; i < 4; ++i) plan.add(i % 2 ? Shape::kChain : Shape::kCertain, 1, &s[i], &random);
    mixer.mix("single rows, two of them tentative", plan);
    if (step == 1) mixer.commit(plan.accept(&random));
  }
  mixer.probe("single tentative rows, left and committed");
  for (int step = 0; step < 2; ++step) {
    Plan plan(nullptr);
    for (size_t i = 0; i < 5; ++i) plan.add(kTrees[i % 4], std::vector<int32_t>{64, 2, 17, 33, 1}[i], &s[i], &random);
    mixer.mix("trees", plan);
    if (step == 1) mixer.commit(plan.accept(&random));
  }
  mixer.probe("trees, left and committed");
  {
    Plan plan(nullptr);
    plan.add(Shape::kCertain, 130, &s[0], &random).add(Shape::kBestFirst, 64, &s[1], &random).add(Shape::kCertain, 1, &s[2], &random);
    plan.add(Shape::kRandom, 100, &s[3], &random).add(Shape::kCertain, 2, &s[4], &random).add(Shape::kChain, 1, &s[5], &random);
    mixer.mix("every kind", plan);
    mixer.commit(plan.accept(&random));
    mixer.probe("every kind");
  }
  {
    Plan plan(nullptr);
    plan.add(Shape::kCertain, 1, &s[0], &random).add(Shape::kBestFirst, 40, &s[1], &random).add(Shape::kCertain, 1, &s[2], &random);
    mixer.mix("single rows beside a tree", plan);
    mixer.commit(plan.accept(&random));
    mixer.probe("single rows beside a tree");
  }
  Plan prompt(nullptr);
  prompt.add(Shape::kCertain, 100, &s[5], &random);
  mixer.mix("a prompt", prompt);
  mixer.probe("a prompt");
}

TEST_CASE("gpu: gated_delta_mixer, rows, trees, prompts and commits, the tiny pair's shape") { mix_everything(kTiny); }
TEST_CASE("gpu: gated_delta_mixer, rows, trees, prompts and commits, Qwen3.6-27B's shape") { mix_everything(kLarge); }
TEST_CASE("gpu: gated_delta_mixer, rows, trees, prompts and commits, as many key as value heads") { mix_everything(kEven); }
TEST_CASE("gpu: gated_delta_mixer, rows, trees, prompts and commits, an odd shape") { mix_everything(kOther); }

TEST_CASE("gpu: gated_delta_mixer, trees of 1 to 65 rows of every kind, each committed") {
  INFO(seed_text());
  Random random(seed());
  const Twins twins(300);
  Mixer mixer(twins, {.layers = 1, .key_heads = 1, .value_heads = 3, .key_dim = 128, .value_dim = 128, .conv_width = 4}, 1, 300, &random);
  std::vector<Sequence> s = slots(1);
  for (const int32_t rows : {1, 2, 3, 4, 5, 7, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65}) {
    for (const Shape shape : kTrees) {
      INFO(rows << " rows, " << name_of(shape));
      Plan plan(nullptr);
      plan.add(shape, rows, &s[0], &random);
      mixer.mix("pass", plan);
      mixer.commit(plan.accept(&random));
      mixer.probe("it");
    }
  }
}

TEST_CASE("gpu: gated_delta_mixer, one key repeated and large gates keep their digits") {
  INFO(seed_text());
  Random random(seed());
  const Twins twins(300);
  Mixer mixer(twins, kTiny, 2, 300, &random);
  const int64_t channels = kTiny.channels();
  Floats own(static_cast<size_t>(4 * channels), 0.0f);  // taps: the row itself alone
  std::fill(own.end() - channels, own.end(), 1.0f);
  mixer.set_taps(own);
  for (const Shape shape : kTrees) {
    for (const float beta : {2.944f, 8.0f}) {  // 0.95 and nearly 1
      INFO(name_of(shape) << ", beta sigmoid(" << beta << ")");
      mixer.set_gates(Floats(4, 0.0f), Floats(4, 0.0f));
      std::vector<Sequence> s = slots(2);
      Plan start(nullptr);
      start.add(Shape::kCertain, 50, &s[0], &random).add(Shape::kCertain, 1, &s[1], &random);
      mixer.mix("start", start);
      Plan plan(nullptr);
      plan.add(shape, 64, &s[0], &random).add(shape, 9, &s[1], &random);
      const int32_t rows = plan.rows();
      Floats x = random.activations(rows * channels);
      for (int32_t r = 1; r < rows; ++r) std::copy_n(x.begin() + mixer.keys(), mixer.keys(), x.begin() + r * channels + mixer.keys());
      mixer.mix("repeated", plan, Floats(static_cast<size_t>(rows * 4), -20.0f), Floats(static_cast<size_t>(rows * 4), beta), x);
      mixer.commit(plan.accept(&random));
      mixer.probe("repeated keys");
    }
    INFO(name_of(shape));
    // As in delta_rule's test: three rows of four decay by 5 %, the fourth by e^-2000.
    mixer.set_gates(Floats(4, 6.0f), Floats(4, 0.0f));
    std::vector<Sequence> s = slots(2);
    Plan plan(nullptr);
    plan.add(shape, 64, &s[0], &random).add(Shape::kCertain, 1, &s[1], &random);
    Inputs in = mixer.inputs(65);
    for (size_t r = 0; r < 65; ++r)
      for (size_t h = 0; h < 4; ++h) in.a[r * 4 + h] = r % 4 == 1 ? 5.0f : -9.0f;
    mixer.mix("large gates", plan, in.a, in.b);
    mixer.commit(plan.accept(&random));
    mixer.probe("large gates");
    // And some 20 a row.
    mixer.set_gates(Floats{2.0f, 1.0f, 3.0f, 2.5f}, Floats(4, 1.0f));
    mixer.reset(1);
    Plan deep(nullptr);
    deep.add(shape, 33, &s[1], &random);
    mixer.mix("sums of hundreds", deep);
    mixer.commit(deep.accept(&random));
    mixer.probe("sums of hundreds");
  }
}

TEST_CASE("gpu: gated_delta_mixer, rows of a segment have the same bits whatever else is in the pass") {
  INFO(seed_text());
  Random random(seed());
  const Twins twins(500);
  const DeltaShape shape{.layers = 1, .key_heads = 1, .value_heads = 3, .key_dim = 128, .value_dim = 128, .conv_width = 4};
  struct Mine {
    Shape shape;
    int32_t rows;
  };
  for (const Mine mine : {Mine{Shape::kCertain, 1}, Mine{Shape::kChain, 1}, Mine{Shape::kBestFirst, 20}, Mine{Shape::kRandom, 64}}) {
    INFO(name_of(mine.shape) << " of " << mine.rows << " rows");
    const uint64_t tree = random.bits();
    const Floats x = random.activations(mine.rows * int64_t{shape.channels()}), a = random.activations(mine.rows * 3),
                 b = random.activations(mine.rows * 3), z = random.activations(mine.rows * 3 * 128);
    std::vector<Floats> alone(twins.count());
    for (int company = 0; company < 4; ++company) {  // none; a single row; trees; a prompt and trees of any size
      INFO("company " << company);
      Random same(tree), other(random.bits());
      Mixer mixer(twins, shape, 5, 500, &same);
      std::vector<Sequence> s = slots(5);
      Plan start(nullptr);
      start.add(Shape::kCertain, 30, &s[1], &same);
      mixer.mix("start", start);
      Plan plan(nullptr);
      if (company > 0) plan.add(Shape::kCertain, 1, &s[0], &other);
      if (company == 3) plan.add(Shape::kCertain, 90, &s[2], &other);
      const int64_t at = plan.rows();
      Random again(tree + 1);
      plan.add(mine.shape, mine.rows, &s[1], &again);
      if (company > 1) plan.add(Shape::kRandom, 50, &s[3], &other);
      if (company == 3) plan.add(Shape::kStar, 80, &s[4], &other);
      const auto among = [&](const Floats& values, int64_t width) {
        Floats all = other.activations(plan.rows() * width);
        std::copy(values.begin(), values.end(), all.begin() + at * width);
        return all;
      };
      const Output o = mixer.mix("pass", plan, among(a, 3), among(b, 3), among(x, shape.channels()), among(z, 3 * 128));
      for (size_t i = 0; i < twins.count(); ++i) {
        Floats got = twins.read("o", o, i);
        got = Floats(got.begin() + at * o.cols, got.begin() + (at + mine.rows) * o.cols);
        INFO(twins.at(i).name());
        if (company == 0) {
          alone[i] = got;
        } else {
          CHECK(std::memcmp(got.data(), alone[i].data(), got.size() * sizeof(float)) == 0);
        }
      }
    }
  }
}

// Graphs are captured for buckets of rows and segments: what a pass has fewer of is padding, which no kernel may read or write.
TEST_CASE("gpu: gated_delta_mixer leaves padding rows and segments alone") {
  INFO(seed_text());
  Random random(seed());
  const Twins twins(600);
  Mixer mixer(twins, kTiny, 4, 600, &random);
  for (const bool single : {true, false}) {
    const std::vector<int32_t> counts = single ? std::vector<int32_t>{1, 1, 1} : std::vector<int32_t>{1, 33, 16};
    std::vector<ForestSegment> segment;
    std::vector<int32_t> segment_of, token, position, up, place;
    for (size_t i = 0; i < counts.size(); ++i) {
      const auto first = static_cast<int32_t>(up.size());
      segment.push_back({.first_row = first, .row_count = counts[i], .certain = single && i == 0, .slot = static_cast<int32_t>(i)});
      for (const int32_t parent : parents(Shape::kRandom, counts[i], &random)) {
        position.push_back(parent < 0 ? 0 : position[static_cast<size_t>(first + parent)] + 1);
        up.push_back(parent < 0 ? -1 : first + parent), segment_of.push_back(static_cast<int32_t>(i)), token.push_back(0),
            place.push_back(-1);
      }
    }
    const auto rows = static_cast<int32_t>(up.size()), segments = static_cast<int32_t>(segment.size());
    for (int pad = 0; pad < 9; ++pad)
      up.push_back(-1), segment_of.push_back(-1), token.push_back(0), position.push_back(0), place.push_back(-1);
    for (int pad = 0; pad < 3; ++pad) segment.push_back({.slot = -1});
    Each<Forest> forest;
    twins.each([&](Backend& b, size_t i) {
      b.stage_begin(Lane::kPass);
      const bool padded = i > 0;  // the CPU runs what is there
      forest.push_back({.rows = padded ? rows + 9 : rows,
                        .segments = padded ? segments + 3 : segments,
                        .segment = b.stage<ForestSegment>(Lane::kPass, segment),
                        .segment_of = b.stage<int32_t>(Lane::kPass, segment_of),
                        .token = b.stage<int32_t>(Lane::kPass, token),
                        .position = b.stage<int32_t>(Lane::kPass, position),
                        .parent = b.stage<int32_t>(Lane::kPass, up),
                        .place = b.stage<int32_t>(Lane::kPass, place),
                        .max_position = 64,
                        .max_segment_rows = *std::max_element(counts.begin(), counts.end()),
                        .max_tree_rows = *std::max_element(counts.begin(), counts.end()),
                        .any_certain = single});
    });
    const Inputs in = mixer.inputs(rows);
    mixer.mix("padded", forest, rows, in.a, in.b);
    mixer.probe("padding");
  }
}

// By chunks on a card from 17 rows on.
TEST_CASE("gpu: delta_rule, prompts of 1 to 600 rows around the edges of chunks, one pass upon the other") {
  INFO(seed_text());
  Random random(seed());
  const Twins twins(640);
  Mixer mixer(twins, {.layers = 1, .key_heads = 2, .value_heads = 4, .key_dim = 128, .value_dim = 128, .conv_width = 4}, 1, 640, &random);
  std::vector<Sequence> s = slots(1);
  for (const int32_t rows : {600, 1, 2, 16, 17, 18, 33, 63, 64, 65, 80, 81, 127, 128, 129, 191, 192, 193, 255, 512, 513, 575, 577}) {
    INFO(rows << " rows");
    Plan plan(nullptr);
    plan.add(Shape::kCertain, rows, &s[0], &random);
    mixer.pass("pass", plan, mixer.inputs(rows));
    mixer.probe("it");
  }
}

// More chunks than are computed together: one prompt's stand in both parts.
TEST_CASE("gpu: delta_rule, many prompts in a pass, and trees between them") {
  INFO(seed_text());
  Random random(seed());
  const Twins twins(1500);
  Mixer mixer(twins, kTiny, 10, 1500, &random);
  std::vector<Sequence> s = slots(10);
  for (const bool trees : {false, true}) {
    Plan plan(nullptr);
    size_t i = 0;
    for (const int32_t rows : {17, 65, 130, 64, 600, 18, 100, 1}) {
      plan.add(Shape::kCertain, rows, &s[i++], &random);
      if (trees && i == 3) plan.add(Shape::kBestFirst, 33, &s[8], &random);
    }
    if (trees) plan.add(Shape::kRandom, 150, &s[9], &random);
    mixer.pass("pass", plan, mixer.inputs(plan.rows()));
    mixer.commit(plan.accept(&random));
    mixer.probe("it");
  }
}

// A certain row's factors, were they written, would lie among another layer's: the last layer runs first, so that they would stay there.
TEST_CASE("gpu: delta_rule, a trace for the first rows of a pass is not touched by certain rows behind them") {
  INFO(seed_text());
  Random random(seed());
  const Twins twins(900);
  for (const DeltaShape& shape : {kTiny, kEven, kOther}) {
    const int32_t slots_used = 3, tentative = slots_used * (shape.key_dim + 8);  // probe() takes as many
    Mixer mixer(twins, shape, slots_used, 900, &random, 0.7f, tentative);
    mixer.descending = true;
    std::vector<Sequence> s = slots(slots_used);
    for (const int32_t rows : {1, 33, 64, 100}) {
      INFO("heads of " << shape.key_dim << ", a tree of " << rows << " rows");
      Plan plan(nullptr);
      plan.add(Shape::kRandom, rows, &s[0], &random).add(Shape::kCertain, 14, &s[1], &random).add(Shape::kCertain, 777, &s[2], &random);
      mixer.pass("pass", plan, mixer.inputs(plan.rows()));
      mixer.commit(plan.accept(&random));
      mixer.probe("the commit");
    }
  }
}

TEST_CASE("gpu: delta_rule, prompts whose gates reach -285 within 13 rows, and such that hardly decay") {
  INFO(seed_text());
  Random random(seed());
  const Twins twins(640);
  Mixer mixer(twins, kTiny, 1, 640, &random);
  // Heads of -22 a row, of -22 in some rows and about 0 in others, of ordinary size, and of about 0.
  mixer.set_gates(Floats{3.0f, 3.0f, 0.0f, -6.0f}, Floats{0.7f, -3.0f, 0.0f, 0.0f});
  std::vector<Sequence> s = slots(1);
  for (const float scale : {0.01f, 4.0f})
    for (const int32_t rows : {13, 100, 600}) {
      INFO(rows << " rows, gates by " << scale);
      Plan plan(nullptr);
      plan.add(Shape::kCertain, rows, &s[0], &random);
      mixer.pass("pass", plan, mixer.inputs(rows, scale));
      mixer.probe("it");
    }
}

}  // namespace
}  // namespace ddtree::ops::gpu_test
