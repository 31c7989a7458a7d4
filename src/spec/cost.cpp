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

CostCurve::CostCurve(std::vector<double> knots) : knots_(std::move(knots)), values_(knots_.size(), 1.0) {}

double CostCurve::value(size_t knot) const {
  return *std::max_element(values_.begin(), values_.begin() + static_cast<std::ptrdiff_t>(knot) + 1);
}

size_t CostCurve::segment(double size) const {
  const auto above = std::upper_bound(knots_.begin() + 1, knots_.end() - 1, size);
  return static_cast<size_t>(above - knots_.begin()) - 1;
}

double CostCurve::operator()(double size) const {
  const size_t i = segment(size);
  const double t = (size - knots_[i]) / (knots_[i + 1] - knots_[i]);
  const double low = value(i), high = value(i + 1);
  return std::max(low + std::max(t, 0.0) * (high - low), 1e-6);
}

void CostCurve::set(size_t knot, double milliseconds) { values_[knot] = std::max(milliseconds, 1e-6); }

void CostCurve::observe(double size, double milliseconds, double rate) {
  const size_t i = segment(size);
  const double t = std::clamp((size - knots_[i]) / (knots_[i + 1] - knots_[i]), 0.0, 1.0);
  const double expected = (*this)(size);
  const double error = std::clamp(milliseconds, expected / 3, expected * 3) - expected;
  const double low = 1 - t, high = t, norm = low * low + high * high;
  values_[i] = std::max(values_[i] + rate * low / norm * error, 1e-6);
  values_[i + 1] = std::max(values_[i + 1] + rate * high / norm * error, 1e-6);
}

CostModel::CostModel(int32_t max_rows, int32_t max_sequences)
    : verify_(row_knots(max_rows)), draft_(row_knots(max_sequences)), host_(row_knots(max_sequences)) {
  for (size_t i = 0; i < host_.knots().size(); ++i) host_.set(i, 0.01 * host_.knots()[i]);
}

}  // namespace ddtree
