// Certain segments of the delta rule over whole chunks: what delta.cu needs to know of delta_chunk.cu.
#pragma once

#include "kernels/kernels.h"

namespace ddtree::kernels {

inline constexpr int kChunkedRows = 17;  // least rows of a certain segment that the chunked form takes

// Such segments belong to delta_chunks alone; which form a segment takes depends on nothing but itself.
__device__ __forceinline__ bool runs_by_chunks(const ops::ForestSegment& s) { return s.certain && s.row_count >= kChunkedRows; }

// Whether delta_chunks serves this pass: heads of 128, 16-byte rows of c, and room for a block's shared memory.
bool has_chunks(const ops::DeltaRuleArgs& a, const ops::DeltaShape& shape, const DeltaWork& work);
// All segments that run by chunks: o, and the slots' states advanced. Their rows leave nothing in the trace.
cudaError_t delta_chunks(cudaStream_t stream, const ops::DeltaRuleArgs& a, const DeltaStorage& states, const DeltaWork& work);

}  // namespace ddtree::kernels
