// cuBLASLt for products of many rows, loaded at run time: the binary needs no CUDA library to start, and one of another major version is
// never used. Without it the own kernels serve alone.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <string>

#include "base/status.h"
#include "ops/tensor.h"

namespace ddtree::ops::cuda {

class BlasLt {
 public:
  // libcublasLt.so of the CUDA runtime's major version, from the loader's path or the toolkit's usual places. kUnavailable with what was
  // looked for and what was found instead.
  static Result<std::unique_ptr<BlasLt>> open();
  ~BlasLt();

  const std::string& version() const { return version_; }  // "13.1.0"

  // y [R, N] = x [R, K] · Wᵀ, W [N, K] BF16 and contiguous, x BF16, y BF16 or float32; float32 accumulation. workspace: layout::kBlasWork
  // bytes. The algorithm is chosen once for a shape and a bucket of rows (multiples of kBucket), so that a row's bits do not depend on how
  // many others there are in its bucket. False where the library has no algorithm for this shape; kEngineFault where it fails.
  Result<bool> linear(cudaStream_t stream, const void* weight, int64_t n, int64_t k, const Tensor& x, const Tensor& y, void* workspace);

  static constexpr int64_t kBucket = 128;

 private:
  struct Library;
  struct Plan;
  BlasLt();
  Result<Plan*> plan(int64_t n, int64_t k, const Tensor& x, const Tensor& y);

  std::unique_ptr<Library> library_;
  std::string version_;
};

}  // namespace ddtree::ops::cuda
