// A tensor of a checkpoint, where it lies in its file: no copy is made.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace ddtree {

class OpenFile;

// Every element type that a safetensors header can name; weights may be kBf16, kF16 or kF32.
enum class DType : uint8_t { kBf16, kF16, kF32, kF64, kF8E4M3, kF8E5M2, kBool, kU8, kI8, kU16, kI16, kU32, kI32, kU64, kI64 };

const char* dtype_name(DType dtype);  // as safetensors spells it: "BF16", "F8_E4M3", …
size_t dtype_size(DType dtype);       // bytes an element

// Values without a file behind them (--load-format dummy): centre + spread · u with u uniform in [-1, 1), a function of (seed, index)
// alone, rounded to BF16. Every backend draws the same ones.
struct Fill {
  uint32_t seed = 0;  // 0: the tensor has bytes
  float centre = 0, spread = 0;
};
uint16_t fill_bf16(const Fill& fill, int64_t index);

// A rectangle of a tensor: `rows` runs of `cols` elements, the first at element `first`, each `stride` elements after the one before.
struct TensorBlock {
  int64_t first = 0, rows = 0, cols = 0, stride = 0;
  bool operator==(const TensorBlock&) const = default;
};

struct TensorView {
  DType dtype = DType::kBf16;
  std::vector<int64_t> shape;       // row-major; empty: a scalar
  const std::byte* data = nullptr;  // in the mapped file, NOT necessarily aligned to the element; null: no such tensor
  size_t bytes = 0;                 // = elements() · dtype_size(dtype)
  // A part of a tensor (a rank's, model/shard.h): these of its elements, one block behind another; `shape` and `bytes` are the part's,
  // `data` and `offset` the whole tensor's. Empty: the whole tensor.
  std::vector<TensorBlock> blocks;
  Fill fill;                          // not of a file: `data` is then a place of `bytes` zeros that nobody need read
  std::string_view file, name;        // of the checkpoint, which must outlive this view (LoadedPair keeps it)
  const OpenFile* on_disk = nullptr;  // the checkpoint's open file, where it has one; else `data` is memory that may simply be read
  uint64_t offset = 0;                // of the tensor's bytes in that file

  bool present() const { return data != nullptr; }
  int64_t elements() const;  // product of shape
};

uint16_t bf16_at(const TensorView& tensor, int64_t index);  // of a kBf16 tensor

std::string shape_text(const std::vector<int64_t>& shape);  // "[256, 768]"

// The contiguous runs that elements [first, first + count) of a view consist of, in order: f(element of the whole tensor, elements).
template <class F>
void for_runs(const TensorView& tensor, int64_t first, int64_t count, F&& f) {
  if (tensor.blocks.empty()) return f(first, count);
  for (const TensorBlock& b : tensor.blocks) {
    const int64_t in_block = b.rows * b.cols;
    if (first >= in_block) {
      first -= in_block;
      continue;
    }
    while (count > 0 && first < in_block) {
      const int64_t row = first / b.cols, col = first % b.cols;
      const int64_t n = std::min(count, b.stride == b.cols ? in_block - first : b.cols - col);
      f(b.first + row * b.stride + col, n);
      first += n, count -= n;
    }
    first = 0;
    if (count <= 0) return;
  }
}

// Bytes [first, first + bytes) of the view, whole elements, as the file holds them (a Fill: as BF16), read from the file where there is one
// and not through the mapping; of a part, no byte beside it is taken. What loading uses: see OpenFile::read for errors and reasons.
Status read_bytes(const TensorView& tensor, int64_t first, int64_t bytes, std::byte* to);
// The whole tensor as float32, the same way; for small ones. dtype as below.
Result<std::vector<float>> read_float32(const TensorView& tensor);
// `count` elements at `in` (which need not be aligned) as float32. Exact. dtype must be kBf16, kF16 or kF32.
void widen(DType dtype, const std::byte* in, int64_t count, float* out);

// Writes elements() floats. dtype must be kBf16, kF16 or kF32 (what roles.h has checked). Exact.
void to_float32(const TensorView& tensor, float* out);

// The same for elements [first, first + count): a rank's or a thread's share.
void to_float32(const TensorView& tensor, int64_t first, int64_t count, float* out);

}  // namespace ddtree
