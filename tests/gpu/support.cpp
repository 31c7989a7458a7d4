#include "gpu/support.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <random>

#include "ops/cpu/cpu_backend.h"
#ifdef DDTREE_HAS_CUDA
#include "ops/cuda/cuda_backend.h"
#endif

namespace ddtree::ops::gpu_test {
namespace {

constexpr float kPoison = 0x1p100f;  // a BF16 value that no op gives
constexpr int64_t kMargin = 8;       // columns on both sides of an output; 16 bytes of BF16, as nn's views are aligned

std::vector<std::unique_ptr<Backend>> make_cards() {
  std::vector<std::unique_ptr<Backend>> cards;
#ifdef DDTREE_HAS_CUDA
  // As it is served; Hopper's kernels alone; the portable ones alone.
  for (const auto& [portable, library] : {std::pair{false, true}, {false, false}, {true, false}}) {
    auto card = cuda::CudaBackend::create({.device = 0, .portable_kernels = portable, .library = library});
    if (!card.ok() && card.status().code() == Code::kUnavailable) SKIP(card.status().message());
    INFO(card.status().message());
    REQUIRE(card.ok());
    if (portable || library || (*card)->device().hopper) cards.push_back(*std::move(card));  // elsewhere both kinds are the portable one
  }
#else
  SKIP("this build has no CUDA engine");
#endif
  return cards;
}

struct Difference {
  double error = 0, norm = 0;  // squared
  void add(float got, float want) {
    const double d = static_cast<double>(got) - want;
    error += d * d, norm += static_cast<double>(want) * want;
  }
  double relative() const { return error == 0 ? 0 : std::sqrt(error / norm); }
};

}  // namespace

uint64_t seed() {
  static const uint64_t value = [] {
    if (const char* text = std::getenv("DDTREE_SEED")) return static_cast<uint64_t>(std::strtoull(text, nullptr, 10));
    return uint64_t{std::random_device{}()};
  }();
  return value;
}
std::string seed_text() { return fmt::format("DDTREE_SEED={}", seed()); }

Twins::Twins(int64_t max_rows, int64_t max_positions, int64_t max_linear_inputs) {
  std::vector<std::unique_ptr<Backend>> cards = make_cards();
  backends_.push_back(std::make_unique<cpu::CpuBackend>(cpu::CpuOptions{.bfloat16_boundaries = true}));
  for (auto& card : cards) backends_.push_back(std::move(card));
  each([&](Backend& b, size_t) {
    const Status s = b.set_limits(
        {.max_rows = max_rows, .max_positions = max_positions, .max_linear_inputs = max_linear_inputs, .staged_bytes = 1 << 20});
    INFO(b.name() << ": " << s.message());
    REQUIRE(s.ok());
  });
}

Twins::~Twins() = default;

Each<Tensor> Twins::activations(int64_t rows, int64_t cols) const {
  return make([&](Backend& b) { return b.make_tensor(rows, cols, b.activation()); });
}

Each<Tensor> Twins::activations(const Floats& values, int64_t rows, int64_t cols) const {
  Each<Tensor> t = activations(rows, cols);
  upload(values, t);
  return t;
}

Each<Tensor> Twins::constants(const Floats& values, int64_t rows, int64_t cols) const {
  return make([&](Backend& b) { return b.constant(values, rows, cols); });
}

void Twins::upload(const Floats& values, const Each<Tensor>& to) const {
  each([&](Backend& b, size_t i) {
    REQUIRE(static_cast<int64_t>(values.size()) == to[i].rows * to[i].cols);
    b.upload(values, to[i]);
  });
}

Output Twins::output(int64_t rows, int64_t cols, bool float32) const {
  Output out{.rows = rows, .cols = cols, .float32 = float32, .whole = {}, .view = {}};
  const int64_t width = cols + 2 * kMargin;
  out.whole = make([&](Backend& b) { return b.make_tensor(rows + 1, width, float32 ? Element::kFloat32 : b.activation()); });
  upload(Floats(static_cast<size_t>((rows + 1) * width), kPoison), out.whole);
  each([&](Backend&, size_t i) { out.view.push_back(out.whole[i].row_range(0, rows).col_range(kMargin, cols)); });
  return out;
}

Floats Twins::read(const std::string& what, const Output& out, size_t i) const {
  const auto all = at(i).host_floats(out.whole[i]);
  INFO(what << " on " << at(i).name() << ": " << all.status().message());
  REQUIRE(all.ok());
  Floats values(static_cast<size_t>(out.rows * out.cols));
  const int64_t width = out.cols + 2 * kMargin;
  int64_t left = 0, beside = 0, wild = 0, first = -1;
  for (int64_t r = 0; r <= out.rows; ++r) {
    for (int64_t c = 0; c < width; ++c) {
      const float v = (*all)[r * width + c];
      if (r == out.rows || c < kMargin || c >= kMargin + out.cols) {
        beside += v != kPoison;
        continue;
      }
      values[static_cast<size_t>(r * out.cols + c - kMargin)] = v;
      left += v == kPoison;
      wild += !std::isfinite(v);
      if (first < 0 && (v == kPoison || !std::isfinite(v))) first = r * out.cols + c - kMargin;
    }
  }
  INFO("[" << out.rows << ", " << out.cols << "]: never written " << left << ", not finite " << wild << ", written beside the output "
           << beside << "; the first at row " << first / std::max<int64_t>(out.cols, 1) << ", column "
           << first % std::max<int64_t>(out.cols, 1));
  REQUIRE((left == 0 && wild == 0 && beside == 0));
  return values;
}

void Twins::compare(const std::string& what, const Output& out, double limit, int64_t together) const {
  const Floats want = read(what, out, 0);
  for (size_t i = 1; i < count(); ++i) {
    const Floats got = read(what, out, i);
    const bool rounds = limit > 0 && !out.float32;
    const auto allowed = [&](double times, int64_t n) {
      return times * limit + (rounds ? 0x1p-5 / std::sqrt(static_cast<double>(n)) : 0.0);
    };
    Difference all;
    double worst = -1;
    int64_t worst_row = 0;
    std::vector<Difference> rows(static_cast<size_t>(out.rows));
    for (int64_t r = 0; r < out.rows; ++r) {
      Difference& row = rows[static_cast<size_t>(r)];
      for (int64_t c = 0; c < out.cols; ++c) {
        const auto at = static_cast<size_t>(r * out.cols + c);
        row.add(got[at], want[at]);
      }
      all.error += row.error, all.norm += row.norm;
    }
    for (int64_t r = 0; r < out.rows; ++r) {
      const int64_t first = r / together * together, last = std::min(first + together, out.rows);
      Difference row{.error = rows[static_cast<size_t>(r)].error};
      for (int64_t k = first; k < last; ++k) row.norm += rows[static_cast<size_t>(k)].norm / static_cast<double>(last - first);
      if (row.relative() > worst) worst = row.relative(), worst_row = r;
    }
    INFO(what << " [" << out.rows << ", " << out.cols << "] on " << at(i).name() << ": relative error " << all.relative() << " (at most "
              << allowed(1, out.rows * out.cols) << "), of row " << worst_row << " " << worst << " (at most " << allowed(2, out.cols)
              << ")");
    CHECK(all.relative() <= allowed(1, out.rows * out.cols));
    CHECK(worst <= allowed(2, out.cols));
  }
}

}  // namespace ddtree::ops::gpu_test
