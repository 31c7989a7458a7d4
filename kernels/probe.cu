// Which code of this build the card runs.
#include "kernels/common.cuh"
#include "kernels/kernels.h"

namespace ddtree::kernels {
namespace {

__global__ void probe_kernel(int* hopper) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  *hopper = 1;
#else
  *hopper = 0;
#endif
}

}  // namespace

int binary_version() {
  cudaFuncAttributes a{};
  if (cudaFuncGetAttributes(&a, probe_kernel) != cudaSuccess) {
    cudaGetLastError();
    return -1;
  }
  return a.binaryVersion;
}

bool has_hopper_code() {
  int *device = nullptr, host = 0;
  if (cudaMalloc(&device, sizeof(int)) != cudaSuccess) return false;
  probe_kernel<<<1, 1>>>(device);
  const bool ok = cudaMemcpy(&host, device, sizeof(int), cudaMemcpyDeviceToHost) == cudaSuccess && host == 1;
  cudaFree(device);
  return ok;
}

}  // namespace ddtree::kernels
