// How CUDA lays out what tensor.h keeps opaque. All pointers are device memory, owned by the backend.
#pragma once

#include "kernels/kernels.h"
#include "ops/tensor.h"

namespace ddtree::ops::cuda {

struct CudaWeight final : Weight {
  CudaWeight(int64_t n, int64_t k, bool bf16_) : Weight(n, k), bf16(bf16_) {}
  bool bf16;
  void* data = nullptr;  // [N, K] row-major
  bool mapped = false;   // few-rows kernel: map is valid
  int tile = 0;
  CUtensorMap map{};
  bool paired = false;  // pairs is valid: the same weights as gate | up, for SiLU
  CUtensorMap pairs{};
};

struct CudaRope final : RopeTable {
  CudaRope(int64_t positions, int64_t rotary_dim) : RopeTable(positions, rotary_dim) {}
  kernels::Rope table;
};

struct CudaKvPool final : KvPool {
  CudaKvPool(KvShape s, int32_t pages, int32_t page_size) : KvPool(s, pages, page_size) {}
  kernels::KvStorage all;  // from layer 0
  CUtensorMap k_map{}, v_map{};
};

struct CudaKvScratch final : KvScratch {
  CudaKvScratch(KvShape s, int32_t rows) : KvScratch(s, rows) {}
  kernels::KvStorage all;
  CUtensorMap k_map{}, v_map{};
};

inline kernels::KvStorage layer_of(kernels::KvStorage s, int32_t layer) {
  s.k += layer * s.layer_stride;
  s.v += layer * s.layer_stride;
  s.map_row += static_cast<int>(layer * (s.layer_stride / (s.kv_heads * s.head_dim)));
  return s;
}

struct CudaStatePool final : StatePool {
  CudaStatePool(DeltaShape s, int32_t slots) : StatePool(s, slots) {}
  kernels::DeltaStorage storage;
};

struct CudaDeltaTrace final : DeltaTrace {
  CudaDeltaTrace(DeltaShape s, int32_t rows) : DeltaTrace(s, rows) {}
  kernels::TraceStorage storage;
  kernels::DeltaWork work;
};

}  // namespace ddtree::ops::cuda
