// Convolution, delta rule and commit against the recurrence itself, with a state copied for every row, in float64.
#include <catch2/catch_test_macros.hpp>

#include "unit/ops/support.h"

namespace ddtree::ops {
namespace {

using namespace test;  // NOLINT(google-build-using-namespace)
using Doubles = std::vector<double>;

double silu(double x) { return x / (1.0 + std::exp(-x)); }

struct Mixer {
  Mixer(const cpu::Kernels* kernels, DeltaShape s, int32_t rows, uint32_t seed, int threads = 2)
      : shape(s), random(seed), backend(make_backend(kernels, false, threads)) {
    states = *backend->make_state_pool(shape, 6);
    trace = *backend->make_delta_trace(shape, rows, rows);
    a_log = random.normals(shape.value_heads, 0.7f);
    dt_bias = random.normals(shape.value_heads);
    taps = random.normals(shape.conv_width * shape.channels(), 0.5f);
    t_a_log = put(backend.get(), a_log, 1, shape.value_heads);
    t_dt_bias = put(backend.get(), dt_bias, 1, shape.value_heads);
    t_taps = put(backend.get(), taps, shape.conv_width, shape.channels());
    state.assign(6, Doubles(int64_t{shape.value_heads} * shape.key_dim * shape.value_dim, 0.0));
    window.assign(6, Doubles(int64_t{shape.conv_width - 1} * shape.channels(), 0.0));
  }
  cpu::CpuStatePool& pool() const { return static_cast<cpu::CpuStatePool&>(*states); }

  // Random states and windows in every slot, the same for op and oracle.
  void fill() {
    for (int32_t slot = 0; slot < 6; ++slot) {
      float* s = pool().state(slot, layer, 0);
      for (size_t i = 0; i < state[slot].size(); ++i) state[slot][i] = s[i] = random.normal(0.3f);
      float* w = pool().window(slot, layer);
      for (size_t i = 0; i < window[slot].size(); ++i) window[slot][i] = w[i] = random.normal();
    }
  }

  // conv by the definition, from x and the oracle's windows.
  Doubles expect_conv(const Trees& trees, const Floats& x, int32_t row) const {
    const int64_t channels = shape.channels();
    const std::vector<int32_t> path = trees.path(row);
    const Doubles& w = window[trees.segments[trees.segment_of[row]].slot];
    Doubles out(channels);
    for (int64_t ch = 0; ch < channels; ++ch) {
      for (int32_t t = 0; t < shape.conv_width; ++t) {
        const auto at = static_cast<int32_t>(path.size()) - shape.conv_width + t;
        const double m = at >= 0 ? x[path[at] * channels + ch] : w[(shape.conv_width - 1 + at) * channels + ch];
        out[ch] += taps[t * channels + ch] * m;
      }
      out[ch] = silu(out[ch]);
    }
    return out;
  }

  // The recurrence: o of `row` and its state, from its parent's state (its slot's where it has none).
  void step(const float* c, const float* a, const float* b, Doubles* s, Doubles* o) const {
    const int32_t dk = shape.key_dim, dv = shape.value_dim, keys = shape.key_heads * dk;
    o->assign(int64_t{shape.value_heads} * dv, 0.0);
    for (int32_t h = 0; h < shape.value_heads; ++h) {
      const int32_t kh = h / (shape.value_heads / shape.key_heads);
      Doubles q(dk), k(dk);
      double qq = 1e-6, kk = 1e-6;
      for (int i = 0; i < dk; ++i) {
        q[i] = c[kh * dk + i];
        k[i] = c[keys + kh * dk + i];
        qq += q[i] * q[i];
        kk += k[i] * k[i];
      }
      for (int i = 0; i < dk; ++i) {
        q[i] /= std::sqrt(qq) * std::sqrt(static_cast<double>(dk));
        k[i] /= std::sqrt(kk);
      }
      const double x = static_cast<double>(a[h]) + dt_bias[h], g = -std::exp(static_cast<double>(a_log[h])) * std::log1p(std::exp(x));
      const double beta = 1.0 / (1.0 + std::exp(-static_cast<double>(b[h])));
      double* m = s->data() + int64_t{h} * dk * dv;
      for (int i = 0; i < dk * dv; ++i) m[i] *= std::exp(g);
      for (int j = 0; j < dv; ++j) {
        double read = 0.0;
        for (int i = 0; i < dk; ++i) read += m[i * dv + j] * k[i];
        const double u = beta * (c[2 * keys + h * dv + j] - read);
        for (int i = 0; i < dk; ++i) {
          m[i * dv + j] += k[i] * u;
          (*o)[h * dv + j] += m[i * dv + j] * q[i];
        }
      }
    }
  }

  struct Inputs {
    Floats c, a, b;
  };
  Inputs random_inputs(int32_t rows, float gate_scale = 1.5f) {
    Inputs in{random.normals(rows * int64_t{shape.channels()}), random.normals(rows * int64_t{shape.value_heads}, gate_scale),
              random.normals(rows * int64_t{shape.value_heads}, 2.0f)};
    return in;
  }
  Tensor run(Trees* trees, const Inputs& in) {
    const Forest& f = trees->view();
    const Tensor o = zeros(backend.get(), f.rows, int64_t{shape.value_heads} * shape.value_dim);
    backend->delta_rule({.forest = &f,
                         .c = put(backend.get(), in.c, f.rows, shape.channels()),
                         .a = put(backend.get(), in.a, f.rows, shape.value_heads),
                         .b = put(backend.get(), in.b, f.rows, shape.value_heads),
                         .a_log = t_a_log,
                         .dt_bias = t_dt_bias,
                         .states = states,
                         .trace = trace,
                         .layer = layer,
                         .o = o});
    return o;
  }
  // Outputs of all rows and the oracle's state after each.
  void oracle(const Trees& trees, const Inputs& in, std::vector<Doubles>* out, std::vector<Doubles>* after) const {
    const auto rows = static_cast<int32_t>(trees.token.size());
    out->resize(rows);
    after->resize(rows);
    for (int32_t r = 0; r < rows; ++r) {
      (*after)[r] = trees.parent[r] < 0 ? state[trees.segments[trees.segment_of[r]].slot] : (*after)[trees.parent[r]];
      step(in.c.data() + r * shape.channels(), in.a.data() + r * shape.value_heads, in.b.data() + r * shape.value_heads, &(*after)[r],
           &(*out)[r]);
    }
  }
  double state_error(int32_t slot, const Doubles& want) const {
    const float* s = pool().state(slot, layer, 0);
    return error(Floats(s, s + want.size()), want);
  }

  DeltaShape shape;
  Random random;
  std::unique_ptr<cpu::CpuBackend> backend;
  StatePool* states;
  DeltaTrace* trace;
  int32_t layer = 1;
  Floats a_log, dt_bias, taps;
  Tensor t_a_log, t_dt_bias, t_taps;
  std::vector<Doubles> state, window;
};

const std::vector<DeltaShape> kShapes{
    {.layers = 2, .key_heads = 2, .value_heads = 4, .key_dim = 128, .value_dim = 128, .conv_width = 4},  // the tiny pair
    {.layers = 2, .key_heads = 1, .value_heads = 3, .key_dim = 16, .value_dim = 32, .conv_width = 4},
    {.layers = 2, .key_heads = 3, .value_heads = 3, .key_dim = 48, .value_dim = 16, .conv_width = 3},
    {.layers = 2, .key_heads = 2, .value_heads = 6, .key_dim = 32, .value_dim = 80, .conv_width = 2},
};

TEST_CASE("conv: taps follow parents, then the window; certain rows advance it", "[ops]") {
  uint32_t seed = 1;
  for (const cpu::Kernels* kernels : all_kernels()) {
    for (const DeltaShape& shape : kShapes) {
      Mixer mixer(kernels, shape, 300, ++seed);
      mixer.fill();
      Trees trees;
      trees.add('t', 40, 9, 0, &mixer.random);
      trees.add('c', 1, 9, 1, &mixer.random);  // fewer rows than the window
      trees.add('c', 2, 9, 2, &mixer.random);
      trees.add('c', 30, 0, 3, &mixer.random);
      trees.add('l', 5, 3, 4, &mixer.random);
      const Forest& f = trees.view();
      const int64_t channels = shape.channels();
      const Floats x = mixer.random.normals(f.rows * channels);
      // As in nn: the input is a part of a wider projection.
      const Tensor wide = zeros(mixer.backend.get(), f.rows, channels + 9);
      for (int32_t r = 0; r < f.rows; ++r) std::copy_n(x.data() + r * channels, channels, wide.f32(r));
      const Tensor y = zeros(mixer.backend.get(), f.rows, channels);
      mixer.backend->conv({.forest = &f,
                           .x = wide.col_range(0, channels),
                           .w = mixer.t_taps,
                           .states = mixer.states,
                           .trace = mixer.trace,
                           .layer = mixer.layer,
                           .y = y});
      INFO(kernels->name);
      for (int32_t r = 0; r < f.rows; ++r) {
        INFO("row " << r);
        CHECK(error(get(y.row_range(r, 1)), mixer.expect_conv(trees, x, r)) < 2e-6);
      }
      for (const ForestSegment& s : trees.segments) {
        Doubles inputs = mixer.window[s.slot];
        if (s.certain) inputs.insert(inputs.end(), x.begin() + s.first_row * channels, x.begin() + (s.first_row + s.row_count) * channels);
        inputs.erase(inputs.begin(), inputs.end() - (shape.conv_width - 1) * channels);
        const float* w = mixer.pool().window(s.slot, mixer.layer);
        CHECK(error(Floats(w, w + inputs.size()), inputs) < 1e-7);
      }
    }
  }
}

TEST_CASE("delta_rule: trees, chains, single rows and prompts against the recurrence", "[ops]") {
  uint32_t seed = 100;
  for (const cpu::Kernels* kernels : all_kernels()) {
    for (const DeltaShape& shape : kShapes) {
      Mixer mixer(kernels, shape, 300, ++seed);
      mixer.fill();
      Trees trees;
      trees.add('c', 1, 5, 3, &mixer.random);
      trees.add('t', 50, 9, 0, &mixer.random);
      trees.add('c', kernels == &cpu::portable_kernels() ? 70 : 150, 0, 1, &mixer.random);
      trees.add('l', 20, 9, 2, &mixer.random);
      trees.add('c', 64, 9, 5, &mixer.random);
      const Mixer::Inputs in = mixer.random_inputs(trees.view().rows);
      const Tensor o = mixer.run(&trees, in);
      std::vector<Doubles> want, after;
      mixer.oracle(trees, in, &want, &after);
      double worst = 0.0;
      for (int32_t r = 0; r < o.rows; ++r) worst = std::max(worst, error(get(o.row_range(r, 1)), want[r]));
      INFO(kernels->name << " value dim " << shape.value_dim << " worst " << worst);
      CHECK(worst < 1e-5);
      for (const ForestSegment& s : trees.segments) {
        INFO("slot " << s.slot);
        CHECK(mixer.state_error(s.slot, s.certain ? after[s.first_row + s.row_count - 1] : mixer.state[s.slot]) <
              (s.certain ? 5e-6 : 0.0 + 1e-30));
      }
      CHECK(mixer.state_error(4, mixer.state[4]) == 0.0);  // nobody's slot
    }
  }
}

TEST_CASE("delta_rule: random trees of 1 to 256 rows, and a commit of a random path", "[ops]") {
  const DeltaShape shape{.layers = 2, .key_heads = 1, .value_heads = 2, .key_dim = 32, .value_dim = 32, .conv_width = 4};
  Mixer mixer(nullptr, shape, 300, 7);
  for (const int32_t rows : {1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 256}) {
    for (int trial = 0; trial < 3; ++trial) {
      mixer.fill();
      Trees trees;
      trees.add(trial == 0 ? 'l' : 't', rows, 9, 2, &mixer.random);
      const Forest& f = trees.view();
      const Floats x = mixer.random.normals(f.rows * shape.channels());
      const Tensor y = zeros(mixer.backend.get(), f.rows, shape.channels());
      mixer.backend->conv({.forest = &f,
                           .x = put(mixer.backend.get(), x, f.rows, shape.channels()),
                           .w = mixer.t_taps,
                           .states = mixer.states,
                           .trace = mixer.trace,
                           .layer = 1,
                           .y = y});
      const Mixer::Inputs in = mixer.random_inputs(rows);
      const Tensor o = mixer.run(&trees, in);
      std::vector<Doubles> want, after;
      mixer.oracle(trees, in, &want, &after);
      double worst = 0.0;
      for (int32_t r = 0; r < rows; ++r) worst = std::max(worst, error(get(o.row_range(r, 1)), want[r]));
      INFO("rows " << rows << " worst " << worst);
      CHECK(worst < 1e-5);
      // Commit in layer 1; layer 0's trace is zero, with which its state stays what it was.
      const std::vector<int32_t> path = trees.path(mixer.random.below(rows)), slot{2}, offset{0, static_cast<int32_t>(path.size())};
      mixer.backend->delta_commit(
          {.paths =
               {.count = 1, .rows = static_cast<int32_t>(path.size()), .offset = offset.data(), .row = path.data(), .slot = slot.data()},
           .states = mixer.states,
           .trace = mixer.trace});
      CHECK(mixer.state_error(2, after[path.back()]) < 5e-6);
      Doubles inputs = mixer.window[2];
      for (const int32_t r : path) inputs.insert(inputs.end(), x.begin() + r * shape.channels(), x.begin() + (r + 1) * shape.channels());
      inputs.erase(inputs.begin(), inputs.end() - 3 * shape.channels());
      const float* w = mixer.pool().window(2, 1);
      CHECK(error(Floats(w, w + inputs.size()), inputs) < 1e-7);
      for (const int32_t other : {0, 1, 3, 4, 5}) CHECK(mixer.state_error(other, mixer.state[other]) == 0.0);
    }
  }
}

// (I + A)^-1 by powers of A is exact on paper and off by 1e9 here.
TEST_CASE("delta_rule: one key repeated 64 times keeps its digits", "[ops]") {
  for (const char kind : {'c', 'l'}) {
    const DeltaShape shape{.layers = 2, .key_heads = 1, .value_heads = 1, .key_dim = 64, .value_dim = 64, .conv_width = 4};
    Mixer mixer(nullptr, shape, 300, 31);
    mixer.fill();
    Trees trees;
    trees.add(kind, 64, 0, 0, &mixer.random);
    Mixer::Inputs in = mixer.random_inputs(64);
    for (int32_t r = 1; r < 64; ++r) std::copy_n(in.c.begin() + 64, 64, in.c.begin() + r * shape.channels() + 64);  // k of row 0
    std::fill(in.b.begin(), in.b.end(), 2.944f);                                                                    // beta 0.95
    std::fill(in.a.begin(), in.a.end(), -20.0f);                                                                    // no decay
    const Tensor o = mixer.run(&trees, in);
    std::vector<Doubles> want, after;
    mixer.oracle(trees, in, &want, &after);
    double worst = 0.0;
    for (int32_t r = 0; r < 64; ++r) worst = std::max(worst, error(get(o.row_range(r, 1)), want[r]));
    INFO(kind << " worst " << worst);
    CHECK(worst < 3e-6);
    if (kind == 'c') CHECK(mixer.state_error(0, after[63]) < 3e-6);
  }
}

// Gates of −20 a row: the cumulated gate reaches −5000, whose float32 spacing would already be 5e-4.
TEST_CASE("delta_rule: large gates do not cancel", "[ops]") {
  const DeltaShape shape{.layers = 2, .key_heads = 1, .value_heads = 2, .key_dim = 32, .value_dim = 32, .conv_width = 4};
  Mixer mixer(nullptr, shape, 300, 33);
  mixer.a_log = {3.0f, 2.0f};
  mixer.t_a_log = put(mixer.backend.get(), mixer.a_log, 1, 2);
  for (const char kind : {'c', 'l', 't'}) {
    mixer.fill();
    Trees trees;
    trees.add(kind, 256, 0, 0, &mixer.random);
    Mixer::Inputs in = mixer.random_inputs(256, 0.1f);
    for (int32_t r = 0; r < 256; ++r) {
      if (r % 4) in.a[2 * r] = in.a[2 * r + 1] = -9.0f;  // mostly slow, now and then a large drop
    }
    const Tensor o = mixer.run(&trees, in);
    std::vector<Doubles> want, after;
    mixer.oracle(trees, in, &want, &after);
    double worst = 0.0;
    for (int32_t r = 0; r < 256; ++r) worst = std::max(worst, error(get(o.row_range(r, 1)), want[r]));
    INFO(kind << " worst " << worst);
    CHECK(worst < 5e-6);
  }
}

TEST_CASE("delta_rule: a single row is the same bits certain and tentative, and so is its commit", "[ops]") {
  const DeltaShape& shape = kShapes[0];
  Mixer mixer(nullptr, shape, 300, 44);
  mixer.fill();
  const int64_t size = static_cast<int64_t>(mixer.state[0].size());
  std::copy_n(mixer.pool().state(0, 1, 0), size, mixer.pool().state(1, 1, 0));
  std::fill_n(mixer.pool().state(0, 0, 0), 4, 0.0f);
  const Mixer::Inputs in = mixer.random_inputs(1);
  Trees certain, tentative;
  certain.add('c', 1, 9, 0, &mixer.random);
  tentative.add('l', 1, 9, 1, &mixer.random);
  const Tensor a = mixer.run(&certain, in), b = mixer.run(&tentative, in);
  CHECK(same_bits(a.f32(), b.f32(), a.cols));
  const std::vector<int32_t> row{0}, slot{1}, offset{0, 1};
  mixer.backend->delta_commit({.paths = {.count = 1, .rows = 1, .offset = offset.data(), .row = row.data(), .slot = slot.data()},
                               .states = mixer.states,
                               .trace = mixer.trace});
  CHECK(same_bits(mixer.pool().state(0, 1, 0), mixer.pool().state(1, 1, 0), size));
}

TEST_CASE("delta_rule: rows do not depend on what else is in the pass", "[ops]") {
  const DeltaShape& shape = kShapes[0];
  Mixer mixer(nullptr, shape, 300, 45);
  mixer.fill();
  Trees alone, batch;
  alone.add('t', 37, 9, 3, &mixer.random);
  batch.add('l', 11, 9, 0, &mixer.random);
  batch.add('t', 37, 9, 3, &mixer.random);
  batch.add('t', 70, 9, 1, &mixer.random);
  for (int32_t i = 0; i < 37; ++i) {
    batch.parent[11 + i] = alone.parent[i] < 0 ? -1 : alone.parent[i] + 11;
    batch.position[11 + i] = alone.position[i];
  }
  const Mixer::Inputs in = mixer.random_inputs(118);
  Mixer::Inputs mine;
  mine.c.assign(in.c.begin() + 11 * shape.channels(), in.c.begin() + 48 * shape.channels());
  mine.a.assign(in.a.begin() + 11 * shape.value_heads, in.a.begin() + 48 * shape.value_heads);
  mine.b.assign(in.b.begin() + 11 * shape.value_heads, in.b.begin() + 48 * shape.value_heads);
  const Tensor a = mixer.run(&alone, mine), b = mixer.run(&batch, in);
  CHECK(same_bits(a.f32(), b.f32(11), 37 * a.cols));
}

// States decay far below float32's normal range. Loops in the pool treat denormals as zero; so must what is too small for the pool.
TEST_CASE("delta_rule: vanishing states give the same bits with any number of threads", "[ops]") {
  Floats out[2], state[2];
  for (const int threads : {1, 2}) {
    Mixer mixer(nullptr, kShapes[0], 300, 47, threads);
    float* s = mixer.pool().state(0, 1, 0);
    for (size_t i = 0; i < mixer.state[0].size(); ++i) s[i] = mixer.random.normal(2e-38f);
    Trees trees;
    trees.add('c', 40, 9, 0, &mixer.random);
    Mixer::Inputs in = mixer.random_inputs(40);
    for (float& x : in.c) x *= 1e-19f;  // keys stay whole, updates vanish
    out[threads - 1] = get(mixer.run(&trees, in));
    state[threads - 1] = Floats(s, s + mixer.state[0].size());
  }
  CHECK(same_bits(out[0].data(), out[1].data(), static_cast<int64_t>(out[0].size())));
  CHECK(same_bits(state[0].data(), state[1].data(), static_cast<int64_t>(state[0].size())));
  CHECK(std::none_of(state[0].begin(), state[0].end(), [](float x) { return x != 0.0f && std::fabs(x) < 1.1754944e-38f; }));
}

TEST_CASE("reset_state empties one slot in every layer", "[ops]") {
  Mixer mixer(nullptr, kShapes[1], 10, 46);
  for (mixer.layer = 0; mixer.layer < 2; ++mixer.layer) mixer.fill();
  mixer.backend->reset_state(mixer.states, 2);
  for (int32_t l = 0; l < 2; ++l) {
    for (int32_t slot = 0; slot < 6; ++slot) {
      const float *s = mixer.pool().state(slot, l, 0), *w = mixer.pool().window(slot, l);
      const bool empty = std::all_of(s, s + mixer.state[0].size(), [](float x) { return x == 0.0f; }) &&
                         std::all_of(w, w + mixer.window[0].size(), [](float x) { return x == 0.0f; });
      CHECK(empty == (slot == 2));
    }
  }
}

TEST_CASE("gated_delta_mixer: conv, delta rule and gated norm one after another", "[ops]") {
  for (const DeltaShape& shape : kShapes) {
    Mixer mixer(nullptr, shape, 100, 77);
    Mixer parts(nullptr, shape, 100, 77);  // the same values
    mixer.fill(), parts.fill();
    Trees trees;
    trees.add('t', 40, 9, 0, &mixer.random);
    trees.add('c', 1, 9, 1, &mixer.random);
    trees.add('c', 30, 0, 2, &mixer.random);
    trees.add('l', 1, 3, 3, &mixer.random);
    const Forest& f = trees.view();
    const int64_t channels = shape.channels(), values = int64_t{shape.value_heads} * shape.value_dim;
    const Mixer::Inputs in = mixer.random_inputs(f.rows);
    const Floats z = mixer.random.normals(f.rows * values), norm = mixer.random.normals(shape.value_dim);
    const auto args = [&](Mixer& m) {
      return GatedDeltaMixerArgs{.forest = &f,
                                 .x = put(m.backend.get(), in.c, f.rows, channels),
                                 .z = put(m.backend.get(), z, f.rows, values),
                                 .a = put(m.backend.get(), in.a, f.rows, shape.value_heads),
                                 .b = put(m.backend.get(), in.b, f.rows, shape.value_heads),
                                 .taps = m.t_taps,
                                 .a_log = m.t_a_log,
                                 .dt_bias = m.t_dt_bias,
                                 .norm = put(m.backend.get(), norm, 1, shape.value_dim),
                                 .states = m.states,
                                 .trace = m.trace,
                                 .layer = m.layer,
                                 .c = zeros(m.backend.get(), f.rows, channels),
                                 .o = zeros(m.backend.get(), f.rows, values)};
    };
    const GatedDeltaMixerArgs whole = args(mixer), each = args(parts);
    mixer.backend->gated_delta_mixer(whole);
    const Tensor o = zeros(parts.backend.get(), f.rows, values);
    parts.backend->conv({.forest = &f, .x = each.x, .w = each.taps, .states = each.states, .trace = each.trace, .layer = 1, .y = each.c});
    parts.backend->delta_rule({.forest = &f,
                               .c = each.c,
                               .a = each.a,
                               .b = each.b,
                               .a_log = each.a_log,
                               .dt_bias = each.dt_bias,
                               .states = each.states,
                               .trace = each.trace,
                               .layer = 1,
                               .o = o});
    parts.backend->gated_rms_norm({.o = o, .z = each.z, .w = each.norm, .heads = shape.value_heads, .eps = each.eps, .y = each.o});
    CHECK(get(whole.o) == get(each.o));
    for (const ForestSegment& segment : trees.segments) {
      const float *s = mixer.pool().state(segment.slot, 1, 0), *w = mixer.pool().window(segment.slot, 1);
      CHECK(std::equal(s, s + values * shape.key_dim, parts.pool().state(segment.slot, 1, 0)));
      CHECK(std::equal(w, w + channels * (shape.conv_width - 1), parts.pool().window(segment.slot, 1)));
    }
  }
}

}  // namespace
}  // namespace ddtree::ops
