// What the two forms of attention share (attention.cu: plain; attention_tiles.cu: tensor cores).
#pragma once

#include <cuda_bf16.h>

#include "kernels/kernels.h"

namespace ddtree::kernels {

struct AttentionArgsDevice {
  const ops::ForestSegment* segment;
  const int32_t *segment_of, *position, *parent, *pages, *row;
  const __nv_bfloat16 *q, *scratch_k, *scratch_v, *pool_k, *pool_v, *gate;
  int64_t q_stride, gate_stride, o_stride;
  __nv_bfloat16* o;
  float* partial;  // [rows, heads, splits, dim + 2]: sums, largest score (natural units), sum of exponentials
  int segments, heads, kv_heads, dim, page_size, group, groups, splits, window;
  bool bidirectional;
  float scale;
};

// o of `rows` rows from their partial results.
cudaError_t attention_join(cudaStream_t stream, const AttentionArgsDevice& a, int rows);

// cudaErrorNotSupported where this form does not take the shape: row lists, other head sizes, trees past 512 rows.
cudaError_t attention_tiles(cudaStream_t stream, const AttentionArgsDevice& a, const ops::Forest& forest, int64_t partial_floats,
                            int multiprocessors, size_t shared_limit);

}  // namespace ddtree::kernels
