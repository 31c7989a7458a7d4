// embed, copy_rows, the norms and silu_mul on a card.
#include <array>
#include <utility>
#include <vector>

#include "gpu/support.h"

namespace ddtree::ops::gpu_test {
namespace {

// Sums of squares in another order, rsqrt and exp of the card: a few 1e-7 before the rounding.
constexpr double kRowwise = 1e-4;
constexpr int64_t kRowCounts[] = {1, 2, 7, 16, 33, 64, 65, 128, 171, 200, 256};

Each<const int32_t*> stage(const Twins& twins, const std::vector<int32_t>& values) {
  Each<const int32_t*> staged;
  twins.each([&](Backend& b, size_t) { staged.push_back(b.stage<int32_t>(Lane::kPass, values)); });
  return staged;
}
void stage_begin(const Twins& twins) {
  twins.each([](Backend& b, size_t) { b.stage_begin(Lane::kPass); });
}
std::vector<int32_t> some(int64_t count, int64_t below, Random* random) {
  std::vector<int32_t> v(static_cast<size_t>(count));
  for (int32_t& x : v) x = random->below(below);
  return v;
}
// `count` different numbers below `below`.
std::vector<int32_t> distinct(int64_t count, int64_t below, Random* random) {
  std::vector<int32_t> v(static_cast<size_t>(below));
  for (int32_t i = 0; i < below; ++i) {
    v[static_cast<size_t>(i)] = i;
    std::swap(v[static_cast<size_t>(i)], v[static_cast<size_t>(random->below(i + 1))]);
  }
  v.resize(static_cast<size_t>(count));
  return v;
}

TEST_CASE("gpu: embed is exact, from BF16, float32 and mixed weights") {
  INFO(seed_text());
  Random random(seed());
  const Twins twins(256);
  for (const int64_t width : {256, 5120}) {
    const int64_t vocab = 1003;
    const HostWeight a(random.normals(vocab * width), vocab, width, true), b(random.normals(20 * width), 20, width, false);
    const auto narrow = twins.make([&](Backend& x) { return x.pack_weight(std::array{a.view}); });
    const auto wide = twins.make([&](Backend& x) { return x.pack_weight(std::array{b.view}); });
    const auto mixed = twins.make([&](Backend& x) { return x.pack_weight(std::array{a.view, b.view}); });
    for (const auto* weight : {&narrow, &wide, &mixed}) {
      for (const int64_t rows : {1, 7, 65, 256}) {
        stage_begin(twins);
        std::vector<int32_t> ids = some(rows, (*weight)[0]->n(), &random);
        ids.back() = static_cast<int32_t>((*weight)[0]->n() - 1);
        const auto token = stage(twins, ids);
        const Output y = twins.output(rows, width, true);
        twins.each([&](Backend& x, size_t i) {
          x.embed({.token = token[i], .rows = static_cast<int32_t>(rows), .weight = (*weight)[i], .y = y.view[i]});
        });
        twins.compare("embed", y, 0);
      }
    }
  }
}

TEST_CASE("gpu: copy_rows is exact between activations and float32, through row lists and strided views") {
  INFO(seed_text());
  Random random(seed());
  const Twins twins(300);
  const int64_t cols = 5120, all = 300;
  const Floats values = random.activations(all * cols);  // BF16 values: then the copy is exact whatever the two views hold
  const auto narrow = twins.activations(values, all, cols), wide = twins.constants(values, all, cols);
  for (const int32_t count : {1, 7, 33, 256}) {
    for (const bool from_float : {false, true}) {
      for (const bool to_float : {false, true}) {
        for (const bool lists : {false, true}) {
          INFO("count " << count << ", float32 from " << from_float << " to " << to_float << ", lists " << lists);
          stage_begin(twins);
          const auto from = stage(twins, some(count, all, &random)), to = stage(twins, distinct(count, count, &random));
          const Output y = twins.output(count, cols - 32, to_float);
          const auto x = cols_of(from_float ? wide : narrow, twins.count(), 16, cols - 32);
          twins.each([&](Backend& b, size_t i) {
            b.copy_rows({.count = count, .x = x[i], .from = lists ? from[i] : nullptr, .y = y.view[i], .to = lists ? to[i] : nullptr});
          });
          twins.compare("copy_rows", y, 0);
        }
      }
    }
  }
  // float32 values that BF16 does not hold are rounded to the nearest, ties to even.
  Floats sharp = random.normals(16 * cols);
  sharp[0] = 1.00390625f, sharp[1] = 1.01171875f;  // ties
  const auto x = twins.constants(sharp, 16, cols);
  const Output y = twins.output(16, cols);
  twins.each([&](Backend& b, size_t i) { b.copy_rows({.count = 16, .x = x[i], .y = y.view[i]}); });
  for (size_t i = 1; i < twins.count(); ++i) {
    const Floats got = twins.read("copy_rows", y, i);
    int64_t wrong = 0;
    for (size_t k = 0; k < got.size(); ++k) wrong += got[k] != round_to_bf16(sharp[k]);
    CHECK(wrong == 0);
  }
}

TEST_CASE("gpu: norm_weight adds one in float32") {
  INFO(seed_text());
  Random random(seed());
  const Twins twins(8);
  for (const bool bf16 : {true, false}) {
    HostWeight w(random.normals(5120, 0.1f), 5120, 1, bf16);
    w.view.shape = {5120};
    const auto norm = twins.make([&](Backend& b) { return b.norm_weight(w.view, 1.0f); });
    for (size_t i = 0; i < twins.count(); ++i) {
      const auto values = twins.at(i).host_floats(norm[i]);
      REQUIRE(values.ok());
      int64_t wrong = 0;
      for (size_t k = 0; k < w.values.size(); ++k) wrong += (*values)[k] != w.values[k] + 1.0f;
      CHECK(wrong == 0);
    }
  }
}

TEST_CASE("gpu: rms_norm of float32 and activation rows, into halves of a concatenation") {
  INFO(seed_text());
  Random random(seed());
  const Twins twins(256);
  for (const int64_t width : {48, 256, 5120}) {
    const auto w = twins.constants(random.normals(width), 1, width);
    for (const int64_t rows : kRowCounts) {
      for (const float scale : {1.0f, 1e-4f, 300.0f}) {  // 1e-4: below the root of eps
        INFO("width " << width << " scale " << scale);
        const Floats values = random.activations(rows * width, scale);
        const Output y = twins.output(rows, 2 * width);
        const auto narrow = twins.activations(values, rows, width),
                   wide = twins.constants(random.normals(rows * width, scale), rows, width);
        twins.each([&](Backend& b, size_t i) {
          b.rms_norm({.x = narrow[i], .w = w[i], .eps = 1e-6f, .y = y.view[i].col_range(0, width)});
          b.rms_norm({.x = wide[i], .w = w[i], .eps = 1e-6f, .y = y.view[i].col_range(width, width)});
        });
        twins.compare("rms_norm", y, kRowwise);
      }
    }
  }
}

TEST_CASE("gpu: add_rms_norm updates the residual exactly and taps it") {
  INFO(seed_text());
  Random random(seed());
  const Twins twins(256);
  for (const int64_t width : {256, 5120}) {
    const auto w = twins.constants(random.normals(width), 1, width);
    for (const int64_t rows : kRowCounts) {
      for (const bool tapped : {false, true}) {
        INFO("width " << width << " tapped " << tapped);
        const Output x = twins.output(rows, width, true), y = twins.output(rows, width), taps = twins.output(rows, 2 * width);
        twins.upload(random.normals(rows * width, 3.0f), x.view);
        twins.upload(random.activations(2 * rows * width), taps.view);
        const auto delta = twins.activations(random.activations(rows * width), rows, width);
        twins.each([&](Backend& b, size_t i) {
          b.add_rms_norm({.x = x.view[i],
                          .delta = delta[i],
                          .w = w[i],
                          .eps = 1e-6f,
                          .y = y.view[i],
                          .tap = tapped ? taps.view[i].col_range(width, width) : Tensor{}});
        });
        twins.compare("residual", x, 0);
        twins.compare("tap and what stands beside it", taps, 0);
        twins.compare("add_rms_norm", y, kRowwise);
      }
    }
  }
}

TEST_CASE("gpu: gated_rms_norm norms each head, then gates, in place too") {
  INFO(seed_text());
  Random random(seed());
  const Twins twins(256);
  for (const auto& [heads, dim] : {std::pair<int32_t, int64_t>{4, 128}, {48, 128}, {3, 64}}) {
    const int64_t width = heads * dim, packed = 2 * width + 2 * heads + 8;
    const auto w = twins.constants(random.normals(dim), 1, dim);
    for (const int64_t rows : kRowCounts) {
      for (const bool in_place : {false, true}) {
        INFO("heads " << heads << " of " << dim << ", in place " << in_place);
        const Floats values = random.activations(rows * width);
        const auto o = twins.activations(values, rows, width);
        const auto z = cols_of(twins.activations(random.activations(rows * packed, 3.0f), rows, packed), twins.count(), width, width);
        const Output y = twins.output(rows, width);
        if (in_place) twins.upload(values, y.view);
        twins.each([&](Backend& b, size_t i) {
          b.gated_rms_norm({.o = in_place ? y.view[i] : o[i], .z = z[i], .w = w[i], .heads = heads, .eps = 1e-6f, .y = y.view[i]});
        });
        twins.compare("gated_rms_norm", y, 2 * kRowwise);
      }
    }
  }
}

TEST_CASE("gpu: silu_mul, large gates of both signs included") {
  INFO(seed_text());
  Random random(seed());
  const Twins twins(256);
  for (const int64_t width : {640, 17408}) {
    for (const int64_t rows : kRowCounts) {
      if (width > 10000 && rows > 65) continue;
      for (const float scale : {1.0f, 40.0f}) {
        INFO("width " << width << " scale " << scale);
        const auto x = twins.activations(random.activations(rows * 2 * width, scale), rows, 2 * width);
        const Output y = twins.output(rows, width);
        twins.each([&](Backend& b, size_t i) { b.silu_mul({.x = x[i], .y = y.view[i]}); });
        twins.compare("silu_mul", y, kRowwise);
      }
    }
  }
}

}  // namespace
}  // namespace ddtree::ops::gpu_test
