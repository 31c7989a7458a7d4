// How the CPU lays out what tensor.h keeps opaque.
#pragma once

#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>

#include "ops/cpu/kernels.h"
#include "ops/cpu/layout.h"
#include "ops/tensor.h"

namespace ddtree::ops::cpu {

// Zeroed memory on a cache line. Large blocks are pages of their own, never of the heap: untouched zero pages cost nothing, so a big pool
// takes memory as it is used, and all of it goes back when the engine does. From the heap a second engine would get recycled pieces (the
// allocator's threshold for mapping rises with what was freed), which calloc clears by writing: its pools would then be resident from the
// start, 40 to 130 MiB more after a restart.
template <class T>
class Block {
 public:
  Block() = default;
  bool allocate(int64_t count) {
    if (count < 0 || static_cast<uint64_t>(count) > (SIZE_MAX - 64) / sizeof(T)) return false;
    const auto bytes = static_cast<size_t>(layout::block_bytes(count, sizeof(T)));
    void* memory;
    if (bytes >= kOwnPages) {
      memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      if (memory == MAP_FAILED) memory = nullptr;
    } else {
      memory = std::calloc(bytes, 1);
    }
    memory_ = std::unique_ptr<void, Free>(memory, Free{bytes});
    if (!memory) return false;
    const auto address = reinterpret_cast<uintptr_t>(memory);
    data_ = reinterpret_cast<T*>((address + 63) / 64 * 64);
    count_ = count;
    return true;
  }
  T* data() const { return data_; }
  int64_t count() const { return count_; }

 private:
  static constexpr size_t kOwnPages = 256 << 10;
  struct Free {
    size_t bytes = 0;
    void operator()(void* p) const {
      if (bytes >= kOwnPages) munmap(p, bytes);
      else std::free(p);
    }
  };
  std::unique_ptr<void, Free> memory_;
  T* data_ = nullptr;
  int64_t count_ = 0;
};

// Panels of 32 columns (rows of W), k-major: [panel][k][32]. BF16 as 16 words a line: low half column j, high half column 16 + j, so that
// one load expands to both halves with a shift and a mask. Columns past N are zero.
struct CpuWeight final : Weight {
  CpuWeight(int64_t n, int64_t k, bool is_bf16) : Weight(n, k), bf16(is_bf16) {}
  int64_t panels() const { return (n() + kPanelColumns - 1) / kPanelColumns; }
  bool bf16;
  Block<uint32_t> pairs;  // [panels][K][16]
  Block<float> floats;    // [panels][K][32]
};

struct CpuRope final : RopeTable {
  using RopeTable::RopeTable;
  CpuRope(int64_t positions, int64_t rotary_dim) : RopeTable(positions, rotary_dim) {}
  const float* at(int64_t position) const { return table.data() + position * rotary_dim(); }  // half cosines, then half sines
  Block<float> table;
};

// K of a page is stored with positions innermost, so that scores of a page are one matrix tile; V with dimensions innermost.
struct CpuKvPool final : KvPool {
  CpuKvPool(KvShape s, int32_t pages, int32_t page_size) : KvPool(s, pages, page_size) {}
  int64_t page_floats() const { return int64_t{page_size()} * shape().head_dim; }
  int64_t index(int32_t layer, int32_t page, int32_t head) const {
    return ((int64_t{layer} * pages() + page) * shape().kv_heads + head) * page_floats();
  }
  float* k_page(int32_t layer, int32_t page, int32_t head) const { return k.data() + index(layer, page, head); }  // [D][page_size]
  float* v_page(int32_t layer, int32_t page, int32_t head) const { return v.data() + index(layer, page, head); }  // [page_size][D]
  void write(int32_t layer, int32_t place, int32_t head, const float* key, const float* value) const {
    const int32_t page = place / page_size(), offset = place % page_size();
    float* kp = k_page(layer, page, head) + offset;
    for (int32_t d = 0; d < shape().head_dim; ++d) kp[int64_t{d} * page_size()] = key[d];
    std::memcpy(v_page(layer, page, head) + int64_t{offset} * shape().head_dim, value, sizeof(float) * shape().head_dim);
  }
  Block<float> k, v;
};

struct CpuKvScratch final : KvScratch {
  static constexpr int32_t kPanel = layout::kScratchPanel;  // rows of one K panel
  CpuKvScratch(KvShape s, int32_t rows) : KvScratch(s, rows) {}
  int64_t panels() const { return (rows() + kPanel - 1) / kPanel; }
  float* k_panel(int32_t layer, int32_t head, int64_t panel) const {  // [D][32]
    return k.data() + ((int64_t{layer} * shape().kv_heads + head) * panels() + panel) * shape().head_dim * kPanel;
  }
  float* v_rows(int32_t layer, int32_t head) const {  // [rows][D]
    return v.data() + (int64_t{layer} * shape().kv_heads + head) * rows() * shape().head_dim;
  }
  void write(int32_t layer, int32_t row, int32_t head, const float* key, const float* value) const {
    float* kp = k_panel(layer, head, row / kPanel) + row % kPanel;
    for (int32_t d = 0; d < shape().head_dim; ++d) kp[int64_t{d} * kPanel] = key[d];
    std::memcpy(v_rows(layer, head) + int64_t{row} * shape().head_dim, value, sizeof(float) * shape().head_dim);
  }
  Block<float> k, v;
};

struct CpuStatePool final : StatePool {
  CpuStatePool(DeltaShape s, int32_t slots) : StatePool(s, slots) {}
  int64_t matrix() const { return int64_t{shape().key_dim} * shape().value_dim; }
  int64_t layer_state() const { return shape().value_heads * matrix(); }
  int64_t layer_window() const { return int64_t{shape().conv_width - 1} * shape().channels(); }
  float* state(int32_t slot, int32_t layer, int32_t head) const {  // [key_dim][value_dim]
    return states.data() + (int64_t{slot} * shape().layers + layer) * layer_state() + head * matrix();
  }
  float* window(int32_t slot, int32_t layer) const {  // [conv_width - 1][channels], oldest first
    return windows.data() + (int64_t{slot} * shape().layers + layer) * layer_window();
  }
  Block<float> states, windows;
};

struct CpuDeltaTrace final : DeltaTrace {
  CpuDeltaTrace(DeltaShape s, int32_t rows) : DeltaTrace(s, rows) {}
  int64_t key_width() const { return int64_t{shape().key_heads} * shape().key_dim; }
  int64_t value_width() const { return int64_t{shape().value_heads} * shape().value_dim; }
  float* input(int32_t layer, int32_t row) const { return inputs.data() + (int64_t{layer} * rows() + row) * shape().channels(); }
  float* key(int32_t layer, int32_t row) const { return keys.data() + (int64_t{layer} * rows() + row) * key_width(); }
  float* update(int32_t layer, int32_t row) const { return updates.data() + (int64_t{layer} * rows() + row) * value_width(); }
  double* prefix(int32_t layer, int32_t row) const { return prefixes.data() + (int64_t{layer} * rows() + row) * shape().value_heads; }
  Block<float> inputs, keys, updates;
  Block<double> prefixes;
  Block<float> queries, betas;  // of the layer at work: [rows][key width], [rows][value heads]
};

}  // namespace ddtree::ops::cpu
