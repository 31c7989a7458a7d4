#include "spec/cost.h"

#include <algorithm>

namespace ddtree {
namespace {

std::vector<double> row_knots(int32_t limit) {
  std::vector<double> knots;
  for (double k : {1., 2., 4., 8., 12., 16., 24., 32., 48., 64., 96., 128., 192., 256., 384., 512., 768., 1024., 1536., 2048.})
    if (k < limit || knots.size() < 2) knots.push_back(k);
  if (knots.back() < limit) knots.push_back(limit);
  return knots;
}

}  // namespace

CostCurve::CostCurve(std::vector<double> knots)
    : knots_(std::move(knots)), raw_(knots_.size(), 1.0), weight_(knots_.size(), 1.0), values_(knots_.size(), 1.0) {}

size_t CostCurve::segment(double size) const {
  const auto above = std::upper_bound(knots_.begin() + 1, knots_.end() - 1, size);
  return static_cast<size_t>(above - knots_.begin()) - 1;
}

// Pool adjacent violators: where a knot lies above its successor, both take their weighted mean.
void CostCurve::smooth() {
  struct Block {
    double mean, weight;
    size_t count;
  };
  std::vector<Block> blocks;
  for (size_t i = 0; i < raw_.size(); ++i) {
    blocks.push_back({raw_[i], weight_[i], 1});
    while (blocks.size() > 1 && blocks[blocks.size() - 2].mean > blocks.back().mean) {
      const Block last = blocks.back();
      blocks.pop_back();
      Block& b = blocks.back();
      b.mean = (b.mean * b.weight + last.mean * last.weight) / (b.weight + last.weight);
      b.weight += last.weight;
      b.count += last.count;
    }
  }
  size_t i = 0;
  for (const Block& b : blocks)
    for (size_t n = 0; n < b.count; ++n) values_[i++] = b.mean;
}

double CostCurve::operator()(double size) const {
  const size_t i = segment(size);
  const double t = (size - knots_[i]) / (knots_[i + 1] - knots_[i]);
  return std::max(values_[i] + std::max(t, 0.0) * (values_[i + 1] - values_[i]), 1e-6);
}

void CostCurve::set(size_t knot, double milliseconds) {
  std::fill(raw_.begin() + static_cast<std::ptrdiff_t>(knot), raw_.end(), std::max(milliseconds, 1e-6));
  smooth();
}

void CostCurve::observe(double size, double milliseconds, double rate) {
  const size_t i = segment(size);
  const double t = std::clamp((size - knots_[i]) / (knots_[i + 1] - knots_[i]), 0.0, 1.0);
  const double expected = (1 - t) * raw_[i] + t * raw_[i + 1];
  const double error = std::clamp(milliseconds, expected / 3, expected * 3) - expected;
  const double low = 1 - t, high = t, norm = low * low + high * high;
  raw_[i] = std::max(raw_[i] + rate * low / norm * error, 1e-6);
  raw_[i + 1] = std::max(raw_[i + 1] + rate * high / norm * error, 1e-6);
  constexpr double kMostWeight = 20;
  weight_[i] = std::min(weight_[i] + low, kMostWeight);
  weight_[i + 1] = std::min(weight_[i + 1] + high, kMostWeight);
  smooth();
}

CostModel::CostModel(int32_t max_rows, int32_t max_sequences)
    : verify_(row_knots(max_rows)), draft_(row_knots(max_sequences)), host_(row_knots(max_sequences)), commit_(row_knots(max_rows)) {
  for (size_t i = 0; i < host_.knots().size(); ++i) host_.set(i, 0.01 * host_.knots()[i]);
  for (size_t i = 0; i < commit_.knots().size(); ++i) commit_.set(i, 0.05 * commit_.knots()[i]);
}

}  // namespace ddtree
