#include "model/tensor.h"

#include <fmt/core.h>
#include <fmt/ranges.h>

#include <cmath>
#include <cstring>

#include "base/bf16.h"
#include "model/open_file.h"

namespace ddtree {

const char* dtype_name(DType dtype) {
  switch (dtype) {
    case DType::kBf16: return "BF16";
    case DType::kF16: return "F16";
    case DType::kF32: return "F32";
    case DType::kF64: return "F64";
    case DType::kF8E4M3: return "F8_E4M3";
    case DType::kF8E5M2: return "F8_E5M2";
    case DType::kBool: return "BOOL";
    case DType::kU8: return "U8";
    case DType::kI8: return "I8";
    case DType::kU16: return "U16";
    case DType::kI16: return "I16";
    case DType::kU32: return "U32";
    case DType::kI32: return "I32";
    case DType::kU64: return "U64";
    case DType::kI64: return "I64";
  }
  return "?";
}

size_t dtype_size(DType dtype) {
  switch (dtype) {
    case DType::kF8E4M3:
    case DType::kF8E5M2:
    case DType::kBool:
    case DType::kU8:
    case DType::kI8: return 1;
    case DType::kBf16:
    case DType::kF16:
    case DType::kU16:
    case DType::kI16: return 2;
    case DType::kF32:
    case DType::kU32:
    case DType::kI32: return 4;
    case DType::kF64:
    case DType::kU64:
    case DType::kI64: return 8;
  }
  return 1;
}

int64_t TensorView::elements() const { return static_cast<int64_t>(bytes / dtype_size(dtype)); }

std::string shape_text(const std::vector<int64_t>& shape) { return fmt::format("[{}]", fmt::join(shape, ", ")); }

// The finaliser of MurmurHash3 over index and seed; kernels/measure.cu has the same lines.
uint16_t fill_bf16(const Fill& fill, int64_t index) {
  uint32_t h = static_cast<uint32_t>(index) * 0x9E3779B1u ^ static_cast<uint32_t>(index >> 32) * 0x85EBCA77u ^ fill.seed;
  h = (h ^ h >> 16) * 0x85EBCA6Bu;
  h = (h ^ h >> 13) * 0xC2B2AE35u;
  h ^= h >> 16;
  const float u = static_cast<float>(static_cast<int32_t>(h >> 8) - (1 << 23)) * (1.0f / static_cast<float>(1 << 23));
  return float_to_bf16(std::fma(fill.spread, u, fill.centre));
}

uint16_t bf16_at(const TensorView& tensor, int64_t index) {
  uint16_t bits = 0;
  for_runs(tensor, index, 1, [&](int64_t at, int64_t) {
    if (tensor.fill.seed != 0) bits = fill_bf16(tensor.fill, at);
    else std::memcpy(&bits, tensor.data + 2 * at, sizeof bits);
  });
  return bits;
}

void to_float32(const TensorView& tensor, float* out) { to_float32(tensor, 0, tensor.elements(), out); }

void to_float32(const TensorView& tensor, int64_t first, int64_t count, float* out) {
  for_runs(tensor, first, count, [&](int64_t at, int64_t n) {
    if (tensor.fill.seed != 0) {
      for (int64_t i = 0; i < n; ++i) out[i] = bf16_to_float(fill_bf16(tensor.fill, at + i));
    } else {
      widen(tensor.dtype, tensor.data + at * static_cast<int64_t>(dtype_size(tensor.dtype)), n, out);
    }
    out += n;
  });
}

void widen(DType dtype, const std::byte* in, int64_t count, float* out) {
  if (dtype == DType::kF32) {
    if (count > 0) std::memcpy(out, in, static_cast<size_t>(count) * sizeof(float));
    return;
  }
  // memcpy of each element: a header of odd length leaves the data unaligned.
  for (int64_t i = 0; i < count; ++i) {
    uint16_t bits;
    std::memcpy(&bits, in + 2 * i, sizeof bits);
    out[i] = dtype == DType::kBf16 ? bf16_to_float(bits) : f16_to_float(bits);
  }
}

Status read_bytes(const TensorView& tensor, int64_t first, int64_t bytes, std::byte* to) {
  const auto size = static_cast<int64_t>(dtype_size(tensor.dtype));
  Status status;
  if (tensor.on_disk != nullptr && !tensor.blocks.empty()) {
    // The runs lie apart: told what comes, the system fetches them together and not one by one as they are read.
    int64_t begin = 0, end = 0;
    for_runs(tensor, first / size, bytes / size, [&](int64_t at, int64_t n) { begin = end == 0 ? at : begin, end = at + n; });
    tensor.on_disk->will_read(tensor.offset + static_cast<uint64_t>(begin * size), static_cast<size_t>((end - begin) * size));
  }
  for_runs(tensor, first / size, bytes / size, [&](int64_t at, int64_t n) {
    if (!status.ok()) return;
    if (tensor.fill.seed != 0) {
      for (int64_t i = 0; i < n; ++i) {
        const uint16_t bits = fill_bf16(tensor.fill, at + i);
        std::memcpy(to + 2 * i, &bits, sizeof bits);
      }
    } else if (tensor.on_disk != nullptr) {
      status = tensor.on_disk->read(tensor.offset + static_cast<uint64_t>(at * size), static_cast<size_t>(n * size), to, tensor.name);
    } else if (n > 0) {
      std::memcpy(to, tensor.data + at * size, static_cast<size_t>(n * size));
    }
    to += n * size;
  });
  return status;
}

Result<std::vector<float>> read_float32(const TensorView& tensor) {
  std::vector<std::byte> raw(tensor.bytes);
  DDTREE_RETURN_IF_ERROR(read_bytes(tensor, 0, static_cast<int64_t>(raw.size()), raw.data()));
  std::vector<float> values(static_cast<size_t>(tensor.elements()));
  widen(tensor.dtype, raw.data(), tensor.elements(), values.data());
  return values;
}

}  // namespace ddtree
