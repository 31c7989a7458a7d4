// What ops read and write: views of matrices in the backend's memory, and opaque handles of what a backend lays out in its own way.
#pragma once

#include <cstdint>

namespace ddtree::ops {

enum class Element : uint8_t { kFloat32, kBfloat16 };

// A row-major matrix view; `data` may be device memory. Row r begins at element r · stride. A view never owns.
struct Tensor {
  void* data = nullptr;
  Element element = Element::kFloat32;
  int64_t rows = 0, cols = 0, stride = 0;

  bool present() const { return data != nullptr; }
  float* f32(int64_t row = 0) const { return static_cast<float*>(data) + row * stride; }  // element must be kFloat32
  Tensor row_range(int64_t first, int64_t count) const {
    Tensor t = *this;
    t.data = static_cast<char*>(data) + first * stride * size();
    t.rows = count;
    return t;
  }
  Tensor col_range(int64_t first, int64_t count) const {
    Tensor t = *this;
    t.data = static_cast<char*>(data) + first * size();
    t.cols = count;
    return t;
  }
  int64_t size() const { return element == Element::kFloat32 ? 4 : 2; }  // bytes an element
};

// Handles: made by Backend, owned by it, live as long as it does. Each backend derives its own layout from these.
class Weight {  // a matrix [N, K], packed for linear() and embed()
 public:
  int64_t n() const { return n_; }
  int64_t k() const { return k_; }

 protected:
  Weight(int64_t n, int64_t k) : n_(n), k_(k) {}
  ~Weight() = default;

 private:
  int64_t n_, k_;
};

class RopeTable {  // cos and sin of position · theta^(-2i/rotary_dim), i < rotary_dim / 2
 public:
  int64_t positions() const { return positions_; }
  int64_t rotary_dim() const { return rotary_dim_; }

 protected:
  RopeTable(int64_t positions, int64_t rotary_dim) : positions_(positions), rotary_dim_(rotary_dim) {}
  ~RopeTable() = default;

 private:
  int64_t positions_, rotary_dim_;
};

struct KvShape {
  int32_t layers = 0, kv_heads = 0, head_dim = 0;
};

// K (normed, rotated) and V of committed tokens, of several layers. Append-only: a token's place is written once, then only read, so pages
// may be shared. A place is page · page_size + offset.
class KvPool {
 public:
  const KvShape& shape() const { return shape_; }
  int32_t pages() const { return pages_; }
  int32_t page_size() const { return page_size_; }

 protected:
  KvPool(KvShape shape, int32_t pages, int32_t page_size) : shape_(shape), pages_(pages), page_size_(page_size) {}
  ~KvPool() = default;

 private:
  KvShape shape_;
  int32_t pages_, page_size_;
};

// K and V of the rows of one pass, by row.
class KvScratch {
 public:
  const KvShape& shape() const { return shape_; }
  int32_t rows() const { return rows_; }

 protected:
  KvScratch(KvShape shape, int32_t rows) : shape_(shape), rows_(rows) {}
  ~KvScratch() = default;

 private:
  KvShape shape_;
  int32_t rows_;
};

struct DeltaShape {
  int32_t layers = 0, key_heads = 0, value_heads = 0, key_dim = 0, value_dim = 0, conv_width = 0;
  int32_t channels() const { return 2 * key_heads * key_dim + value_heads * value_dim; }
};

// Recurrent state of every slot and gated-delta layer: S [value_heads, key_dim, value_dim] float32 and the last conv_width - 1 inputs of
// the convolution.
class StatePool {
 public:
  const DeltaShape& shape() const { return shape_; }
  int32_t slots() const { return slots_; }

 protected:
  StatePool(DeltaShape shape, int32_t slots) : shape_(shape), slots_(slots) {}
  ~StatePool() = default;

 private:
  DeltaShape shape_;
  int32_t slots_;
};

// What a commit needs of every row of a pass, by layer: k^, u, the cumulated gate along the row's path, the convolution's input.
class DeltaTrace {
 public:
  const DeltaShape& shape() const { return shape_; }
  int32_t rows() const { return rows_; }

 protected:
  DeltaTrace(DeltaShape shape, int32_t rows) : shape_(shape), rows_(rows) {}
  ~DeltaTrace() = default;

 private:
  DeltaShape shape_;
  int32_t rows_;
};

}  // namespace ddtree::ops
