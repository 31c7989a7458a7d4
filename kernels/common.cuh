// What every kernel file shares: element access, reductions, launches with programmatic dependent launch.
//
// Every kernel begins with pdl_begin(): it lets the next kernel of the stream start its prologue at once and then waits until the one
// before has finished and its writes are visible. A kernel that skipped the wait would break the chain for its successors too.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "ops/tensor.h"

namespace ddtree::kernels {

using bf16 = __nv_bfloat16;

__device__ __forceinline__ void pdl_release() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ __forceinline__ void pdl_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void pdl_begin() {
  pdl_release();
  pdl_wait();
}

__device__ __forceinline__ float to_float(float v) { return v; }
__device__ __forceinline__ float to_float(bf16 v) { return __bfloat162float(v); }
template <class T>
__device__ __forceinline__ T from_float(float v);
template <>
__device__ __forceinline__ float from_float<float>(float v) {
  return v;
}
template <>
__device__ __forceinline__ bf16 from_float<bf16>(float v) {
  return __float2bfloat16_rn(v);
}

// Without the division's refinement and its slow path: two ulps, and their code, unrolled over a thread's values, took longer to fetch than
// to run.
__device__ __forceinline__ float silu(float x) { return __fdividef(x, 1.0f + __expf(-x)); }
__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }

__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
  for (int o = 16; o > 0; o >>= 1) v += __shfl_xor_sync(0xffffffffu, v, o);
  return v;
}
__device__ __forceinline__ float warp_max(float v) {
#pragma unroll
  for (int o = 16; o > 0; o >>= 1) v = fmaxf(v, __shfl_xor_sync(0xffffffffu, v, o));
  return v;
}
// Sum over the block, the same bits in every thread; fixed order for a fixed block size. scratch: 32 floats of shared memory.
__device__ __forceinline__ float block_sum(float v, float* scratch) {
  v = warp_sum(v);
  const int warp = threadIdx.x / 32, warps = blockDim.x / 32;
  if (threadIdx.x % 32 == 0) scratch[warp] = v;
  __syncthreads();
  v = threadIdx.x % 32 < warps ? scratch[threadIdx.x % 32] : 0.0f;
  v = warp_sum(v);
  __syncthreads();
  return v;
}

// A launch whose prologue may overlap the kernel before it, in clusters of so many blocks along x (above 1: from 9.0 on). Errors are
// collected by the backend (cudaGetLastError after enqueueing).
template <class... P, class... A>
inline cudaError_t launch_clusters(void (*kernel)(P...), dim3 grid, dim3 block, unsigned cluster, size_t shared, cudaStream_t stream,
                                   A&&... args) {
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {cluster, 1, 1};
  config.attrs = attributes;
  config.numAttrs = cluster > 1 ? 2 : 1;
  return cudaLaunchKernelEx(&config, kernel, static_cast<P>(args)...);
}
template <class... P, class... A>
inline cudaError_t launch(void (*kernel)(P...), dim3 grid, dim3 block, size_t shared, cudaStream_t stream, A&&... args) {
  return launch_clusters(kernel, grid, block, 1, shared, stream, static_cast<A&&>(args)...);
}

inline const bf16* as_bf16(const ops::Tensor& t) { return static_cast<const bf16*>(t.data); }
inline bf16* as_bf16_out(const ops::Tensor& t) { return static_cast<bf16*>(t.data); }
inline float* as_f32(const ops::Tensor& t) { return static_cast<float*>(t.data); }

}  // namespace ddtree::kernels
