#include "ops/cuda/blas_lt.h"

#include <dlfcn.h>
#include <fmt/core.h>

#include <map>
#include <tuple>
#include <vector>

#if __has_include(<cublasLt.h>)
#include <cublasLt.h>
#define DDTREE_HAS_BLAS_LT 1
#endif

#include "ops/cuda/layout.h"
#include "ops/driver.h"

namespace ddtree::ops::cuda {

#ifdef DDTREE_HAS_BLAS_LT

namespace {

constexpr int kMajor = CUDART_VERSION / 1000;

std::string version_text(size_t v) {  // 130100 = 13.1.0; up to CUDA 12 five digits less one
  return v >= 100000 ? fmt::format("{}.{}.{}", v / 10000, v / 100 % 100, v % 100)
                     : fmt::format("{}.{}.{}", v / 1000, v / 100 % 10, v % 100);
}

// The largest power of two up to 256 that the address and every row's distance are multiples of.
uint32_t alignment(const Tensor& t) {
  const uint64_t all = reinterpret_cast<uintptr_t>(t.data) | static_cast<uint64_t>(t.stride * t.size()) | 256;
  return static_cast<uint32_t>(all & (~all + 1));
}

}  // namespace

struct BlasLt::Plan {
  cublasLtMatmulAlgo_t algorithm{};
  cublasLtMatrixLayout_t a = nullptr, b = nullptr, d = nullptr;
  bool possible = false;
};

struct BlasLt::Library {
  void* handle = nullptr;
  cublasLtHandle_t context = nullptr;
  cublasLtMatmulDesc_t product = nullptr;
  decltype(&cublasLtCreate) create = nullptr;
  decltype(&cublasLtDestroy) destroy = nullptr;
  decltype(&cublasLtGetVersion) get_version = nullptr;
  decltype(&cublasLtGetCudartVersion) get_cudart_version = nullptr;
  decltype(&cublasLtMatmul) matmul = nullptr;
  decltype(&cublasLtMatmulDescCreate) product_create = nullptr;
  decltype(&cublasLtMatmulDescDestroy) product_destroy = nullptr;
  decltype(&cublasLtMatmulDescSetAttribute) product_set = nullptr;
  decltype(&cublasLtMatrixLayoutCreate) layout_create = nullptr;
  decltype(&cublasLtMatrixLayoutDestroy) layout_destroy = nullptr;
  decltype(&cublasLtMatrixLayoutSetAttribute) layout_set = nullptr;
  decltype(&cublasLtMatmulPreferenceCreate) preference_create = nullptr;
  decltype(&cublasLtMatmulPreferenceDestroy) preference_destroy = nullptr;
  decltype(&cublasLtMatmulPreferenceSetAttribute) preference_set = nullptr;
  decltype(&cublasLtMatmulAlgoGetHeuristic) heuristic = nullptr;
  // n, k, bucket of rows, strides and alignments of x and y, y's element
  using Key = std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t, uint32_t, uint32_t, Element>;
  std::map<Key, Plan> plans;

  // The first function that is missing; null: all are there.
  const char* resolve() {
    const char* missing = nullptr;
    const auto get = [&](auto& pointer, const char* name) {
      pointer = reinterpret_cast<std::remove_reference_t<decltype(pointer)>>(dlsym(handle, name));
      if (!pointer && !missing) missing = name;
    };
    get(create, "cublasLtCreate"), get(destroy, "cublasLtDestroy");
    get(get_version, "cublasLtGetVersion"), get(get_cudart_version, "cublasLtGetCudartVersion");
    get(matmul, "cublasLtMatmul");
    get(product_create, "cublasLtMatmulDescCreate"), get(product_destroy, "cublasLtMatmulDescDestroy");
    get(product_set, "cublasLtMatmulDescSetAttribute");
    get(layout_create, "cublasLtMatrixLayoutCreate"), get(layout_destroy, "cublasLtMatrixLayoutDestroy");
    get(layout_set, "cublasLtMatrixLayoutSetAttribute");
    get(preference_create, "cublasLtMatmulPreferenceCreate"), get(preference_destroy, "cublasLtMatmulPreferenceDestroy");
    get(preference_set, "cublasLtMatmulPreferenceSetAttribute"), get(heuristic, "cublasLtMatmulAlgoGetHeuristic");
    return missing;
  }
};

BlasLt::BlasLt() : library_(std::make_unique<Library>()) {}

BlasLt::~BlasLt() {
  Library& l = *library_;
  for (auto& [key, p] : l.plans)
    for (cublasLtMatrixLayout_t layout : {p.a, p.b, p.d})
      if (layout) l.layout_destroy(layout);
  if (l.product) l.product_destroy(l.product);
  if (l.context) l.destroy(l.context);
  // The library stays loaded: it keeps state of its own on the card, and a restarted engine opens it again.
}

Result<std::unique_ptr<BlasLt>> BlasLt::open() {
  std::unique_ptr<BlasLt> blas(new BlasLt());
  Library& l = *blas->library_;
  const std::string name = fmt::format("libcublasLt.so.{}", kMajor);
  std::string reason;
  for (const std::string& file : cublas_lt_files(CUDART_VERSION)) {
    l.handle = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (l.handle) break;
    if (const char* why = dlerror(); reason.empty() && why) reason = why;
  }
  if (!l.handle) return Status(Code::kUnavailable, fmt::format("{} cannot be loaded ({})", name, reason));
  if (const char* missing = l.resolve())
    return Status(Code::kUnavailable, fmt::format("{} has no {}: another version is needed", name, missing));
  const size_t version = l.get_version(), built_for = l.get_cudart_version();
  blas->version_ = version_text(version);
  if (built_for / 1000 != static_cast<size_t>(kMajor))
    return Status(Code::kUnavailable,
                  fmt::format("{} is {} for CUDA {}: this build needs one for CUDA {}", name, blas->version_, built_for / 1000, kMajor));
  cublasStatus_t s = l.create(&l.context);
  if (s == CUBLAS_STATUS_SUCCESS) s = l.product_create(&l.product, CUBLAS_COMPUTE_32F, CUDA_R_32F);
  const cublasOperation_t transposed = CUBLAS_OP_T;
  if (s == CUBLAS_STATUS_SUCCESS) s = l.product_set(l.product, CUBLASLT_MATMUL_DESC_TRANSA, &transposed, sizeof(transposed));
  if (s != CUBLAS_STATUS_SUCCESS)
    return Status(Code::kUnavailable, fmt::format("{} {} does not start (status {})", name, blas->version_, static_cast<int>(s)));
  return blas;
}

// Column by column, as the library counts, y is Wᵀᵀ · xᵀ: [N, R] = [K, N]ᵀ · [K, R].
Result<BlasLt::Plan*> BlasLt::plan(int64_t n, int64_t k, const Tensor& x, const Tensor& y) {
  Library& l = *library_;
  const int64_t bucket = (x.rows + kBucket - 1) / kBucket * kBucket;
  const uint32_t align_x = alignment(x), align_y = alignment(y);
  const auto [at, fresh] = l.plans.try_emplace({n, k, bucket, x.stride, y.stride, align_x, align_y, y.element});
  Plan& p = at->second;
  if (!fresh) return &p;
  cublasLtMatmulPreference_t preference = nullptr;
  cublasStatus_t s = l.layout_create(&p.a, CUDA_R_16BF, static_cast<uint64_t>(k), static_cast<uint64_t>(n), k);
  const auto then = [&](auto&& call) {
    if (s == CUBLAS_STATUS_SUCCESS) s = call();
  };
  const uint64_t columns = static_cast<uint64_t>(bucket), work = layout::kBlasWork;
  then([&] { return l.layout_create(&p.b, CUDA_R_16BF, static_cast<uint64_t>(k), columns, x.stride); });
  then([&] {
    return l.layout_create(&p.d, y.element == Element::kFloat32 ? CUDA_R_32F : CUDA_R_16BF, static_cast<uint64_t>(n), columns, y.stride);
  });
  then([&] { return l.preference_create(&preference); });
  const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t what, const auto& value) {
    then([&] { return l.preference_set(preference, what, &value, sizeof(value)); });
  };
  prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, work);
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, align_x);
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, align_y);
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, align_y);
  cublasLtMatmulHeuristicResult_t found{};
  int count = 0;
  if (s == CUBLAS_STATUS_SUCCESS) {
    const cublasStatus_t h = l.heuristic(l.context, l.product, p.a, p.b, p.d, p.d, preference, 1, &found, &count);
    if (h == CUBLAS_STATUS_NOT_SUPPORTED) count = 0;
    else s = h;
  }
  if (preference) l.preference_destroy(preference);
  if (s != CUBLAS_STATUS_SUCCESS)
    return Status(Code::kEngineFault,
                  fmt::format("cuBLASLt {}: no plan for [{}, {}] · [{}, {}]ᵀ (status {})", version_, x.rows, k, n, k, static_cast<int>(s)));
  p.possible = count > 0 && found.state == CUBLAS_STATUS_SUCCESS;
  p.algorithm = found.algo;
  return &p;
}

Result<bool> BlasLt::linear(cudaStream_t stream, const void* weight, int64_t n, int64_t k, const Tensor& x, const Tensor& y,
                            void* workspace) {
  Result<Plan*> planned = plan(n, k, x, y);
  if (!planned.ok()) return planned.status();
  Plan& p = **planned;
  if (!p.possible) return false;
  Library& l = *library_;
  const uint64_t rows = static_cast<uint64_t>(x.rows);
  const float one = 1.0f, zero = 0.0f;
  cublasStatus_t s = l.layout_set(p.b, CUBLASLT_MATRIX_LAYOUT_COLS, &rows, sizeof(rows));
  if (s == CUBLAS_STATUS_SUCCESS) s = l.layout_set(p.d, CUBLASLT_MATRIX_LAYOUT_COLS, &rows, sizeof(rows));
  if (s == CUBLAS_STATUS_SUCCESS)
    s = l.matmul(l.context, l.product, &one, weight, p.a, x.data, p.b, &zero, y.data, p.d, y.data, p.d, &p.algorithm, workspace,
                 static_cast<size_t>(layout::kBlasWork), stream);
  if (s == CUBLAS_STATUS_NOT_SUPPORTED) return false;
  if (s != CUBLAS_STATUS_SUCCESS)
    return Status(Code::kEngineFault,
                  fmt::format("cuBLASLt {}: [{}, {}] · [{}, {}]ᵀ failed (status {})", version_, x.rows, k, n, k, static_cast<int>(s)));
  return true;
}

#else  // a toolkit without the library's header

struct BlasLt::Plan {};
struct BlasLt::Library {};
BlasLt::BlasLt() = default;
BlasLt::~BlasLt() = default;
Result<std::unique_ptr<BlasLt>> BlasLt::open() {
  return Status(Code::kUnavailable, "this build was made without cublasLt.h (the toolkit's cuBLAS development package)");
}
Result<bool> BlasLt::linear(cudaStream_t, const void*, int64_t, int64_t, const Tensor&, const Tensor&, void*) { return false; }

#endif

}  // namespace ddtree::ops::cuda
