// The rows of one pass as ops see them. Arrays are staged: Backend::stage() has put them where ops can read them.
#pragma once

#include <cstdint>

namespace ddtree::ops {

struct ForestSegment {
  int32_t first_row = 0, row_count = 0;
  int32_t certain = 0;     // 1: rows are a chain and advance pages, state and window in the pass
  int32_t slot = -1;       // recurrent-state slot; -1 where the pass has no such layer
  int32_t context = 0;     // committed length: every row sees positions [0, context)
  int32_t first_page = 0;  // index into pages
};

// Where a backend has fixed shapes, a pass may be padded: rows with segment_of, parent and place -1, token and position 0, and segments
// with no rows and slot -1, behind the others; in lists of rows, slots and places -1 is padding too, and offsets repeat the last. Ops write
// nothing that lasts for padding (no page, window or state; its rows of activations hold anything), and the host values below may be
// larger than what is there.
//
// Rows of a segment are contiguous, a parent stands before its children, position = context + depth: so the ancestors of a row have
// consecutive positions, and a row's path is one sequence of positions 0 … position whatever the shape of the tree.
struct Forest {
  int32_t rows = 0, segments = 0;
  const ForestSegment* segment = nullptr;  // [segments]
  const int32_t* segment_of = nullptr;     // [rows]
  const int32_t* token = nullptr;          // [rows]
  const int32_t* position = nullptr;       // [rows]
  const int32_t* parent = nullptr;         // [rows] row, or -1: the segment's committed end
  const int32_t* place = nullptr;          // [rows] where the row's position lives in every KvPool
  const int32_t* pages = nullptr;          // page tables of all segments, one behind another
  // Host values, for choosing kernels and workspace.
  int32_t max_position = 0;      // largest position of any row
  int32_t max_segment_rows = 0;  // rows of the largest segment; 0: not known
  int32_t max_tree_rows = 0;     // of the largest tentative one
  int32_t max_certain_rows = 0;  // of the largest certain one; 0: none is
  bool any_certain = true;       // false: no segment is certain
};

// Root paths that a commit keeps.
struct Paths {
  int32_t count = 0, rows = 0;
  const int32_t* offset = nullptr;  // [count + 1] into row
  const int32_t* row = nullptr;     // [rows] forest rows, root first
  const int32_t* slot = nullptr;    // [count]
};

}  // namespace ddtree::ops
