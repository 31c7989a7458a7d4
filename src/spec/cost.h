// What passes cost on this machine: measured at start-up, refined by every pass.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace ddtree {

// A positive, never falling function of a size, linear between knots, by its last slope beyond them.
class CostCurve {
 public:
  explicit CostCurve(std::vector<double> knots);  // rising sizes, at least two
  double operator()(double size) const;
  // A measured start value; also of the knots behind it until they are set, so go from the first to the last.
  void set(size_t knot, double milliseconds);
  // Moves the knots around `size` towards a measured value. An outlier (the machine was busy) counts no more than three times what
  // was expected.
  void observe(double size, double milliseconds, double rate = 0.1);
  const std::vector<double>& knots() const { return knots_; }
  const std::vector<double>& values() const { return values_; }

 private:
  size_t segment(double size) const;
  void smooth();
  std::vector<double> knots_;
  std::vector<double> raw_, weight_;  // as measured, and how far that is to be believed
  std::vector<double> values_;        // the never falling curve nearest to raw_
};

// Milliseconds. Rows are those of a whole forest pass; row_context is the sum of rows × their committed context. As many rows of more
// sequences cost more (each has a state and pages of its own): the curve is that of one sequence, and each further one adds its slope.
class CostModel {
 public:
  explicit CostModel(int32_t max_rows = 512, int32_t max_sequences = 64);

  double verify(double rows, double row_context, int32_t sequences) const { return verify_(rows) + beside_rows(row_context, sequences); }
  double draft(int32_t sequences) const { return sequences > 0 ? draft_(sequences) : 0; }
  double host(int32_t sequences) const { return host_(sequences); }          // sampling and bookkeeping of a round
  double commit(double rows) const { return rows > 0 ? commit_(rows) : 0; }  // folding that many accepted tentative rows into states

  CostCurve& verify_curve() { return verify_; }
  CostCurve& draft_curve() { return draft_; }
  CostCurve& commit_curve() { return commit_; }
  const CostCurve& verify_curve() const { return verify_; }
  const CostCurve& draft_curve() const { return draft_; }
  const CostCurve& host_curve() const { return host_; }
  const CostCurve& commit_curve() const { return commit_; }
  void set_context_slope(double slope) { context_slope_ = slope > 0 ? slope : 0; }
  double context_slope() const { return context_slope_; }
  void set_sequence_slope(double slope) { sequence_slope_ = slope > 0 ? slope : 0; }
  double sequence_slope() const { return sequence_slope_; }
  // What verify() adds to the curve of rows.
  double beside_rows(double row_context, int32_t sequences) const {
    return context_slope_ * row_context + sequence_slope_ * (sequences > 1 ? sequences - 1 : 0);
  }

  void observe_verify(double rows, double row_context, int32_t sequences, double ms) {
    verify_.observe(rows, ms - beside_rows(row_context, sequences));
  }
  void observe_draft(int32_t sequences, double ms) { draft_.observe(sequences, ms); }
  void observe_host(int32_t sequences, double ms) { host_.observe(sequences, ms); }
  void observe_commit(double rows, double ms) { commit_.observe(rows, ms); }

 private:
  CostCurve verify_, draft_, host_, commit_;
  double context_slope_ = 0, sequence_slope_ = 0;
};

}  // namespace ddtree
