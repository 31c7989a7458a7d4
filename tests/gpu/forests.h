// Random forests for the op tests: sequences with scattered pages, segments of every kind over them, and the root paths that a commit
// keeps.
#pragma once

#include <algorithm>
#include <queue>
#include <span>
#include <vector>

#include "gpu/support.h"
#include "nn/forest_builder.h"

namespace ddtree::ops::gpu_test {

struct Sequence {
  int32_t slot = -1, context = 0;
  std::vector<int32_t> pages;
};

class PageBook {  // hands out the pages of a pool in random order
 public:
  PageBook(int32_t pages, int32_t page_size_, Random* random) : page_size(page_size_) {
    for (int32_t i = 0; i < pages; ++i) {
      free_.push_back(i);
      std::swap(free_.back(), free_[static_cast<size_t>(random->below(i + 1))]);
    }
  }
  void cover(Sequence* sequence, int32_t positions) {
    while (static_cast<int64_t>(sequence->pages.size()) * page_size < positions) {
      REQUIRE(!free_.empty());
      sequence->pages.push_back(free_.back());
      free_.pop_back();
    }
  }
  int32_t place(const Sequence& s, int32_t position) const {
    return s.pages[static_cast<size_t>(position / page_size)] * page_size + position % page_size;
  }
  const int32_t page_size;

 private:
  std::vector<int32_t> free_;
};

enum class Shape { kCertain, kChain, kStar, kRandom, kBestFirst };
inline constexpr Shape kTrees[] = {Shape::kChain, Shape::kStar, Shape::kRandom, Shape::kBestFirst};
inline const char* name_of(Shape s) {
  constexpr const char* kNames[] = {"certain", "chain", "star", "random", "best-first"};
  return kNames[static_cast<int>(s)];
}

// Parents by row, -1: the committed end. Best-first: the most probable node first, each with a first child and a next sibling to come.
inline std::vector<int32_t> parents(Shape shape, int32_t rows, Random* random) {
  struct Open {
    float log_prob;
    int32_t parent;
    bool operator<(const Open& o) const { return log_prob < o.log_prob; }
  };
  std::vector<int32_t> up{-1};
  std::priority_queue<Open> open;
  open.push({0.0f, 0});
  for (int32_t r = 1; r < rows; ++r) {
    switch (shape) {
      case Shape::kCertain:
      case Shape::kChain: up.push_back(r - 1); break;
      case Shape::kStar: up.push_back(0); break;
      case Shape::kRandom: up.push_back(random->below(r + 1) - 1); break;
      case Shape::kBestFirst: {
        const Open best = open.top();
        open.pop();
        up.push_back(best.parent);
        open.push({best.log_prob - 0.4f * std::abs(random->normal()), r});
        open.push({best.log_prob - 1.2f * std::abs(random->normal()), best.parent});
      }
    }
  }
  return up;
}

// Root paths of a commit, one a tentative segment.
struct Accepted {
  std::vector<int32_t> offset{0}, row, slot;
  Each<Paths> stage(const Twins& twins) const {
    Each<Paths> staged;
    twins.each([&](Backend& b, size_t) {
      b.stage_begin(Lane::kCommit);
      const Paths p{.count = static_cast<int32_t>(slot.size()),
                    .rows = static_cast<int32_t>(row.size()),
                    .offset = b.stage<int32_t>(Lane::kCommit, offset),
                    .row = b.stage<int32_t>(Lane::kCommit, row),
                    .slot = b.stage<int32_t>(Lane::kCommit, slot)};
      REQUIRE((p.offset && p.row && p.slot));
      staged.push_back(p);
    });
    return staged;
  }
};

// The rows of one pass.
class Plan {
 public:
  explicit Plan(PageBook* book) : book_(book) {}  // null: no pages (a model without attention)

  // Rows of `sequence` behind its context. `stored`: the rows get pages too; else only what is committed has some, as in a draft.
  Plan& add(Shape shape, int32_t rows, Sequence* sequence, Random* random, bool stored = true) {
    const std::vector<int32_t> up = parents(shape, rows, random);
    if (book_) book_->cover(sequence, sequence->context + (stored ? rows : 0));
    const auto first = this->rows();
    pieces_.push_back({shape, first, rows, sequence});
    arrays_.add_segment(shape == Shape::kCertain, sequence->slot, sequence->pages, sequence->context);
    for (int32_t i = 0; i < rows; ++i) {
      const int32_t parent = up[static_cast<size_t>(i)] < 0 ? -1 : first + up[static_cast<size_t>(i)];
      parent_.push_back(parent);
      position_.push_back(parent < 0 ? sequence->context : position_[static_cast<size_t>(parent)] + 1);
      arrays_.add_row(0, position_.back(), parent, book_ ? book_->page_size : 16);
    }
    return *this;
  }
  int32_t rows() const { return static_cast<int32_t>(parent_.size()); }

  Each<Forest> stage(const Twins& twins) const {
    Each<Forest> staged;
    twins.each([&](Backend& b, size_t) {
      b.stage_begin(Lane::kPass);
      Forest f;
      const Status s = arrays_.stage(&b, Lane::kPass, &f);
      INFO(s.message());
      REQUIRE(s.ok());
      staged.push_back(f);
    });
    return staged;
  }

  // As a captured graph runs the pass: `rows` and `segments` of a bucket, what is past the pass's own only fills it, and the host's figures
  // are bounds of the bucket.
  Each<Forest> stage_padded(const Twins& twins, int32_t rows, int32_t segments, int32_t max_position) const {
    REQUIRE((rows >= this->rows() && segments >= static_cast<int32_t>(pieces_.size()) && book_));
    std::vector<ForestSegment> segment;
    std::vector<int32_t> segment_of, place, pages;
    for (const Piece& p : pieces_) {
      ForestSegment s{p.first, p.rows, p.shape == Shape::kCertain ? 1 : 0, p.sequence->slot, p.sequence->context, 0};
      s.first_page = static_cast<int32_t>(pages.size());
      pages.insert(pages.end(), p.sequence->pages.begin(), p.sequence->pages.end());
      for (int32_t r = p.first; r < p.first + p.rows; ++r) {
        segment_of.push_back(static_cast<int32_t>(segment.size()));
        place.push_back(book_->place(*p.sequence, position_[static_cast<size_t>(r)]));
      }
      segment.push_back(s);
    }
    std::vector<int32_t> position = position_, parent = parent_;
    const auto n = static_cast<size_t>(rows);
    segment.resize(static_cast<size_t>(segments), ForestSegment{});
    segment_of.resize(n, -1), place.resize(n, -1), position.resize(n, 0), parent.resize(n, -1);
    const std::vector<int32_t> token(n, 0);
    Each<Forest> staged;
    twins.each([&](Backend& b, size_t) {
      b.stage_begin(Lane::kPass);
      Forest f{.rows = rows, .segments = segments, .max_position = max_position, .max_segment_rows = rows, .max_tree_rows = rows};
      f.segment = b.stage<ForestSegment>(Lane::kPass, segment);
      f.segment_of = b.stage<int32_t>(Lane::kPass, segment_of), f.token = b.stage<int32_t>(Lane::kPass, token);
      f.position = b.stage<int32_t>(Lane::kPass, position), f.parent = b.stage<int32_t>(Lane::kPass, parent);
      f.place = b.stage<int32_t>(Lane::kPass, place), f.pages = b.stage<int32_t>(Lane::kPass, pages);
      REQUIRE((f.segment && f.segment_of && f.token && f.position && f.parent && f.place && f.pages));
      staged.push_back(f);
    });
    return staged;
  }

  // After the pass: certain rows are context now.
  void advance() const {
    for (const Piece& p : pieces_)
      if (p.shape == Shape::kCertain) p.sequence->context += p.rows;
  }
  // A random root path of every tentative segment, which becomes context.
  Accepted accept(Random* random) const {
    Accepted a;
    for (const Piece& p : pieces_) {
      if (p.shape == Shape::kCertain) continue;
      std::vector<int32_t> path;
      for (int32_t r = p.first + random->below(p.rows); r >= 0; r = parent_[static_cast<size_t>(r)]) path.push_back(r);
      a.row.insert(a.row.end(), path.rbegin(), path.rend());
      a.offset.push_back(static_cast<int32_t>(a.row.size()));
      a.slot.push_back(p.sequence->slot);
      p.sequence->context += static_cast<int32_t>(path.size());
    }
    return a;
  }

 private:
  struct Piece {
    Shape shape;
    int32_t first, rows;
    Sequence* sequence;
  };
  PageBook* book_;
  nn::ForestArrays arrays_;
  std::vector<Piece> pieces_;
  std::vector<int32_t> parent_, position_;
};

}  // namespace ddtree::ops::gpu_test
