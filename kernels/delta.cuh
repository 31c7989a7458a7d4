// What the kernels of the gated-delta mixer share: the gates of a row, and which segments the kernel for few rows serves.
#pragma once

#include "kernels/common.cuh"
#include "ops/forest.h"

namespace ddtree::kernels {

constexpr int kFewRows = 64;  // most rows of a segment in the kernel for few rows (delta_few.cu)

// Chosen by the segment alone, never by the rest of the pass, so that its bits are the same in any company.
__device__ __forceinline__ bool has_few_rows(const ops::ForestSegment& s) {
  return s.row_count == 1 || (s.certain == 0 && s.row_count > 0 && s.row_count <= kFewRows);
}

// The logarithm of a row's decay.
__device__ __forceinline__ float log_gate(float a, float a_log, float dt_bias) {
  const float x = a + dt_bias, softplus = x > 20.0f ? x : log1pf(expf(x));
  return -expf(a_log) * softplus;
}
__device__ __forceinline__ float update_rate(float b) { return 1.0f / (1.0f + expf(-b)); }  // beta

}  // namespace ddtree::kernels
