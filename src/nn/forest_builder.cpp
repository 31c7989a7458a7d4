#include "nn/forest_builder.h"

#include <fmt/core.h>

#include <algorithm>

namespace ddtree::nn {
namespace {

Status invalid(std::string message) { return {Code::kInvalidArgument, std::move(message)}; }

}  // namespace

Status check_pages(std::span<const int32_t> pages, int64_t positions, const ForestLimits& limits, const std::string& whose) {
  const int64_t covered = static_cast<int64_t>(pages.size()) * limits.page_size;
  if (covered < positions) {
    return invalid(
        fmt::format("{}: {} pages of {} cover {} positions, {} are needed", whose, pages.size(), limits.page_size, covered, positions));
  }
  for (size_t i = 0; i < pages.size(); ++i) {
    if (pages[i] < 0 || pages[i] >= limits.pages) {
      return invalid(fmt::format("{}: page {} of its table is {}, the pool has 0 to {}", whose, i, pages[i], limits.pages - 1));
    }
  }
  return {};
}

Status check_forest(const Forest& forest, const ForestLimits& limits) {
  const auto rows = static_cast<int64_t>(forest.token.size());
  if (rows == 0 || rows > limits.max_rows) {
    return invalid(fmt::format("forest of {} rows: 1 to {} are possible (max_rows)", rows, limits.max_rows));
  }
  const auto sized = [&](const char* name, size_t size) {
    if (static_cast<int64_t>(size) == rows) return Status();
    return invalid(fmt::format("forest: {} has {} entries for {} rows", name, size, rows));
  };
  DDTREE_RETURN_IF_ERROR(sized("position", forest.position.size()));
  DDTREE_RETURN_IF_ERROR(sized("parent", forest.parent.size()));
  DDTREE_RETURN_IF_ERROR(sized("wants_logits", forest.wants_logits.size()));
  const int64_t wanted = rows - std::count(forest.wants_logits.begin(), forest.wants_logits.end(), uint8_t{0});
  if (wanted > limits.max_logit_rows) {
    return invalid(fmt::format("forest: {} rows want logits, at most {} can (max_logit_rows)", wanted, limits.max_logit_rows));
  }
  int64_t next = 0;
  std::vector<uint8_t> slot_used(limits.slots, 0);
  for (size_t s = 0; s < forest.segments.size(); ++s) {
    const Segment& segment = forest.segments[s];
    if (segment.first_row != next || segment.row_count <= 0 || segment.first_row + int64_t{segment.row_count} > rows) {
      return invalid(
          fmt::format("segment {}: rows {} + {} do not continue at row {} of {}", s, segment.first_row, segment.row_count, next, rows));
    }
    next += segment.row_count;
    // What a commit needs of a row further back would be written over another layer's.
    if (!segment.certain && next > limits.max_tentative_rows) {
      return invalid(fmt::format("segment {}: tentative rows {} to {}, only the first {} of a forest can be (max_tentative_rows)", s,
                                 segment.first_row, next - 1, limits.max_tentative_rows));
    }
    if (segment.slot < 0 || segment.slot >= limits.slots) {
      return invalid(fmt::format("segment {}: slot {} of {}", s, segment.slot, limits.slots));
    }
    if (slot_used[segment.slot]++) return invalid(fmt::format("segment {}: slot {} is another segment's too", s, segment.slot));
    if (segment.context < 0) return invalid(fmt::format("segment {}: context is {}", s, segment.context));
    int64_t last = 0;
    for (int32_t r = segment.first_row; r < segment.first_row + segment.row_count; ++r) {
      const int32_t parent = forest.parent[r];
      const bool root = parent == -1;
      if (!root && (parent < segment.first_row || parent >= r)) {
        return invalid(fmt::format("row {}: parent is {}, must be -1 or in [{}, {})", r, parent, segment.first_row, r));
      }
      if (segment.certain && parent != (r == segment.first_row ? -1 : r - 1)) {
        return invalid(fmt::format("row {}: parent is {} in a certain segment, which must be a chain", r, parent));
      }
      const int64_t position = root ? segment.context : int64_t{forest.position[parent]} + 1;
      if (forest.position[r] != position) {
        return invalid(fmt::format("row {}: position is {}, context and depth make {}", r, forest.position[r], position));
      }
      if (forest.token[r] < 0 || forest.token[r] >= limits.vocab) {
        return invalid(fmt::format("row {}: token {} is outside the vocabulary of {}", r, forest.token[r], limits.vocab));
      }
      last = std::max(last, position);
    }
    if (last >= limits.max_positions) {
      return invalid(fmt::format("segment {}: position {} is past the last one, {}", s, last, limits.max_positions - 1));
    }
    DDTREE_RETURN_IF_ERROR(check_pages(segment.pages, last + 1, limits, fmt::format("segment {}", s)));
  }
  if (next != rows) return invalid(fmt::format("forest: segments cover {} of {} rows", next, rows));
  return {};
}

void ForestArrays::clear() {
  segment_.clear();
  for (auto* v : {&segment_of_, &token_, &position_, &parent_, &place_, &pages_}) v->clear();
  max_position_ = 0;
  padded_.reset();
}

void ForestArrays::add_segment(bool certain, int32_t slot, std::span<const int32_t> pages, int32_t context) {
  segment_.push_back({.first_row = rows(),
                      .row_count = 0,
                      .certain = certain ? 1 : 0,
                      .slot = slot,
                      .context = context,
                      .first_page = static_cast<int32_t>(pages_.size())});
  pages_.insert(pages_.end(), pages.begin(), pages.end());
}

void ForestArrays::add_row(int32_t token, int32_t position, int32_t parent, int32_t page_size) {
  ops::ForestSegment& segment = segment_.back();
  ++segment.row_count;
  segment_of_.push_back(static_cast<int32_t>(segment_.size()) - 1);
  token_.push_back(token);
  position_.push_back(position);
  parent_.push_back(parent);
  // A row past its page table (a draft's: it is never stored) has no place.
  const size_t index = segment.first_page + static_cast<size_t>(position / page_size);
  place_.push_back(index < pages_.size() ? pages_[index] * page_size + position % page_size : -1);
  max_position_ = std::max(max_position_, position);
}

int32_t ForestArrays::add_list(std::span<const int32_t> values) {
  const auto first = static_cast<int32_t>(pages_.size());
  pages_.insert(pages_.end(), values.begin(), values.end());
  return first;
}

int64_t ForestArrays::staged_bytes(int64_t rows, int64_t segments, int64_t pages) {
  return segments * static_cast<int64_t>(sizeof(ops::ForestSegment) + sizeof(ops::SampleRule)) + (5 * rows + pages) * 4 + 8 * 16;
}

ForestShape ForestArrays::shape() const {
  if (padded_) return *padded_;
  ForestShape s{.rows = rows(), .segments = static_cast<int32_t>(segment_.size()), .max_position = max_position_};
  for (const ops::ForestSegment& segment : segment_) {
    s.max_segment_rows = std::max(s.max_segment_rows, segment.row_count);
    if (segment.certain) s.any_certain = true, s.max_certain_rows = std::max(s.max_certain_rows, segment.row_count);
    else s.max_tree_rows = std::max(s.max_tree_rows, segment.row_count);
  }
  return s;
}

void ForestArrays::pad(const ForestShape& to) {
  padded_ = to;
  const auto rows = static_cast<size_t>(to.rows);
  token_.resize(rows, 0), position_.resize(rows, 0);
  for (auto* v : {&segment_of_, &parent_, &place_}) v->resize(rows, -1);
  segment_.resize(static_cast<size_t>(to.segments));
}

Status ForestArrays::stage(ops::Backend* backend, ops::Lane lane, ops::Forest* view, std::vector<ops::SampleRule>* rules,
                           const ops::SampleRule** staged_rules) const {
  const ForestShape s = shape();
  view->rows = s.rows, view->segments = s.segments, view->max_position = s.max_position;
  view->max_segment_rows = s.max_segment_rows, view->max_tree_rows = s.max_tree_rows, view->max_certain_rows = s.max_certain_rows;
  view->any_certain = s.any_certain;
  view->place = backend->stage<int32_t>(lane, place_);
  view->segment = backend->stage<ops::ForestSegment>(lane, segment_);
  view->segment_of = backend->stage<int32_t>(lane, segment_of_);
  view->token = backend->stage<int32_t>(lane, token_);
  view->position = backend->stage<int32_t>(lane, position_);
  view->parent = backend->stage<int32_t>(lane, parent_);
  bool complete = true;
  if (rules) {
    rules->resize(segment_.size());
    *staged_rules = backend->stage<ops::SampleRule>(lane, *rules);
    complete = *staged_rules != nullptr;
  }
  view->pages = backend->stage<int32_t>(lane, pages_);
  if (!view->segment || !view->segment_of || !view->token || !view->position || !view->parent || !view->place || !view->pages ||
      !complete) {
    return {Code::kEngineFault,
            fmt::format("the arrays of {} rows, {} pages and list entries do not fit their staging lane", rows(), pages_.size())};
  }
  return {};
}

}  // namespace ddtree::nn
