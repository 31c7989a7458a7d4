#include "model/safetensors.h"

#include <fmt/core.h>

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>

#include "model/json_reader.h"

namespace ddtree {
namespace {

using nlohmann::json;

constexpr uint64_t kMaxHeader = 100'000'000;  // as the reference implementation: a longer one is an attack or a wrong file
constexpr size_t kMaxRank = 8, kMaxName = 512;

const DType kDTypes[] = {DType::kBf16, DType::kF16, DType::kF32, DType::kF64, DType::kF8E4M3, DType::kF8E5M2, DType::kBool, DType::kU8,
                         DType::kI8,   DType::kU16, DType::kI16, DType::kU32, DType::kI32,    DType::kU64,    DType::kI64};

std::optional<DType> dtype_of(std::string_view name) {
  for (const DType d : kDTypes)
    if (name == dtype_name(d)) return d;
  return std::nullopt;
}

// A tensor's bytes, or nothing where the product leaves 64 bits.
std::optional<uint64_t> size_of(const std::vector<int64_t>& shape, DType dtype) {
  uint64_t n = dtype_size(dtype);
  for (const int64_t extent : shape)
    if (__builtin_mul_overflow(n, static_cast<uint64_t>(extent), &n)) return std::nullopt;
  return n;
}

Status bad(std::string_view file, std::string_view tensor, const std::string& what) {
  return Status(Code::kBadModel, fmt::format("{}: tensor {}: {}", file, tensor, what));
}

Status read_entry(const json& entry, std::string_view file, const std::string& name, std::string_view data, TensorView* view) {
  if (!entry.is_object()) return bad(file, name, fmt::format("its header entry is {}, expected an object", json_text(entry)));
  const auto dtype = entry.find("dtype"), shape = entry.find("shape"), offsets = entry.find("data_offsets");
  if (dtype == entry.end() || !dtype->is_string()) return bad(file, name, "no dtype in its header entry, expected a name such as \"BF16\"");
  const std::optional<DType> type = dtype_of(dtype->get_ref<const std::string&>());
  if (!type) return bad(file, name, fmt::format("unknown dtype {}, expected BF16, F16 or F32", json_text(*dtype)));
  view->dtype = *type;

  if (shape == entry.end() || !shape->is_array()) return bad(file, name, "no shape in its header entry, expected a list of extents");
  if (shape->size() > kMaxRank)
    return bad(file, name, fmt::format("shape with {} extents, at most {} are possible", shape->size(), kMaxRank));
  for (const json& extent : *shape) {
    if (!extent.is_number_unsigned() || extent.get<uint64_t>() > static_cast<uint64_t>(INT64_MAX))
      return bad(file, name, fmt::format("shape {} with {}, expected non-negative integers", json_text(*shape), json_text(extent)));
    view->shape.push_back(extent.get<int64_t>());
  }

  if (offsets == entry.end() || !offsets->is_array() || offsets->size() != 2 || !(*offsets)[0].is_number_unsigned() ||
      !(*offsets)[1].is_number_unsigned())
    return bad(file, name, fmt::format("data_offsets {}, expected [begin, end]", offsets == entry.end() ? "missing" : json_text(*offsets)));
  const uint64_t begin = (*offsets)[0].get<uint64_t>(), end = (*offsets)[1].get<uint64_t>();
  if (begin > end) return bad(file, name, fmt::format("data_offsets [{}, {}]: it ends before it begins", begin, end));
  if (end > data.size())
    return bad(file, name,
               fmt::format("truncated: its bytes end at {} of the data, but the file holds {} bytes of data", end, data.size()));
  const std::optional<uint64_t> expected = size_of(view->shape, *type);
  if (!expected) return bad(file, name, fmt::format("shape {} needs more than 2^64 bytes", shape_text(view->shape)));
  if (*expected != end - begin)
    return bad(file, name,
               fmt::format("{} bytes of data, but {} {} needs {}", end - begin, dtype_name(*type), shape_text(view->shape), *expected));
  view->data = reinterpret_cast<const std::byte*>(data.data()) + begin;
  view->bytes = end - begin;
  return {};
}

// The format forbids bytes that no tensor owns and bytes that two own: either means a header of another file, an interrupted write or
// something appended. The reference implementation refuses them too, so no published checkpoint has them.
Status check_cover(std::string_view file, const std::vector<NamedTensor>& tensors, std::string_view data) {
  struct Span {
    uint64_t begin, end;
    const std::string* name;
  };
  std::vector<Span> spans;
  spans.reserve(tensors.size());
  for (const NamedTensor& t : tensors) {
    const auto begin = static_cast<uint64_t>(t.view.data - reinterpret_cast<const std::byte*>(data.data()));
    spans.push_back({begin, begin + t.view.bytes, &t.name});
  }
  std::sort(spans.begin(), spans.end(),
            [](const Span& a, const Span& b) { return a.begin != b.begin ? a.begin < b.begin : a.end < b.end; });
  uint64_t covered = 0;
  const std::string* before = nullptr;
  for (const Span& s : spans) {
    if (s.begin < covered)
      return bad(file, *s.name,
                 fmt::format("its bytes begin at {} of the data, but those up to {} belong to {}", s.begin, covered, *before));
    if (s.begin > covered)
      return bad(file, *s.name,
                 fmt::format("its bytes begin at {} of the data, but the tensors before it end at {}: {} bytes belong to no tensor",
                             s.begin, covered, s.begin - covered));
    covered = s.end;
    before = s.name;
  }
  if (covered == data.size()) return {};
  return {Code::kBadModel,
          fmt::format("{}: {} bytes of data, but its tensors end at {}: {} bytes after the last one belong to no tensor; the header is of "
                      "another file, or something was appended",
                      file, data.size(), covered, data.size() - covered)};
}

}  // namespace

Result<std::vector<NamedTensor>> parse_safetensors(std::string_view bytes, std::string_view file) {
  const auto broken = [&](const std::string& what) { return Status(Code::kBadModel, fmt::format("{}: {}", file, what)); };
  if (bytes.size() < 8) return broken(fmt::format("{} bytes long, a safetensors file has at least 8", bytes.size()));
  uint64_t length = 0;  // little-endian
  for (int i = 7; i >= 0; --i) length = length << 8 | static_cast<unsigned char>(bytes[static_cast<size_t>(i)]);
  // A file that git-lfs or a failed download left behind is text, and its first 8 bytes are an absurd length.
  if (bytes.starts_with("version https://git-lfs"))
    return broken("a git-lfs pointer, not the file itself: run `git lfs pull` in that folder");
  if (length > kMaxHeader)
    return broken(fmt::format("header length {}, at most {} is possible: not a safetensors file", length, kMaxHeader));
  if (length > bytes.size() - 8)
    return broken(fmt::format("truncated: header of {} bytes, but the file has {} bytes", length, bytes.size()));
  const std::string_view header = bytes.substr(8, length), data = bytes.substr(8 + length);

  Result<json> parsed = parse_json(header, fmt::format("{} (header)", file), DuplicateKeys::kRefuse);
  if (!parsed.ok()) return parsed.status();
  if (!parsed->is_object()) return broken(fmt::format("its header is {}, expected an object", json_text(*parsed)));
  std::vector<NamedTensor> out;
  out.reserve(parsed->size());
  for (const auto& [name, entry] : parsed->items()) {
    if (name == "__metadata__") continue;
    if (name.size() > kMaxName) return broken(fmt::format("a tensor name of {} bytes, at most {} are possible", name.size(), kMaxName));
    NamedTensor tensor{name, {}};
    DDTREE_RETURN_IF_ERROR(read_entry(entry, file, name, data, &tensor.view));
    out.push_back(std::move(tensor));
  }
  DDTREE_RETURN_IF_ERROR(check_cover(file, out, data));
  return out;
}

}  // namespace ddtree
