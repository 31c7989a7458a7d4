// From the engine's forest to the rows that ops see: everything that could make an op read or write astray is refused here, by name.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "nn/executor.h"
#include "ops/backend.h"

namespace ddtree::nn {

struct ForestLimits {
  int32_t max_rows = 0, max_logit_rows = 0, max_tentative_rows = 0, slots = 0, pages = 0, page_size = 0;
  int64_t vocab = 0, max_positions = 0;
};

// kInvalidArgument naming segment, row and field, what was found and what would be right: rows that the segments do not tile, a parent
// that does not stand before its child in the same segment, a position that is not context + depth, a certain segment that is no chain,
// pages that do not cover the rows or are out of range, a slot used twice, a token outside the vocabulary, too many rows, tentative ones
// too far behind.
Status check_forest(const Forest& forest, const ForestLimits& limits);

// Page tables of drafts: kInvalidArgument as above.
Status check_pages(std::span<const int32_t> pages, int64_t positions, const ForestLimits& limits, const std::string& whose);

// What the launches of a pass are shaped by.
struct ForestShape {
  int32_t rows = 0, segments = 0, max_position = 0, max_segment_rows = 0, max_tree_rows = 0, max_certain_rows = 0;
  bool any_certain = false;
};

// The ops' view of a forest, on the host; stage() copies it to where ops can read it.
class ForestArrays {
 public:
  void clear();
  // Starts a segment; its rows follow by add_row().
  void add_segment(bool certain, int32_t slot, std::span<const int32_t> pages, int32_t context);
  void add_row(int32_t token, int32_t position, int32_t parent, int32_t page_size);
  // Further lists behind the page tables, for ops that take their place in Forest::pages. Returns the index of the first.
  int32_t add_list(std::span<const int32_t> values);
  ForestShape shape() const;  // of what was added, or what it was padded to
  // After the last row: padding (ops/forest.h) up to this shape, which must hold shape(). Where arrays are staged follows from it alone:
  // page tables stand last, places first (a commit reads them whatever the shape of its pass was).
  void pad(const ForestShape& to);
  // kEngineFault if the lane is too small (BackendLimits::staged_bytes).
  // rules: one a segment, staged with the rest; null: none.
  Status stage(ops::Backend* backend, ops::Lane lane, ops::Forest* view, std::vector<ops::SampleRule>* rules = nullptr,
               const ops::SampleRule** staged_rules = nullptr) const;

  int32_t rows() const { return static_cast<int32_t>(token_.size()); }
  static int64_t staged_bytes(int64_t rows, int64_t segments, int64_t pages);  // upper bound

 private:
  std::vector<ops::ForestSegment> segment_;
  std::vector<int32_t> segment_of_, token_, position_, parent_, place_, pages_;
  int32_t max_position_ = 0;
  std::optional<ForestShape> padded_;
};

}  // namespace ddtree::nn
