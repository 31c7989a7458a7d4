// Writes checkpoints for tests: whole model folders with random weights, and single files with any header.
#pragma once

#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <random>
#include <string>
#include <string_view>
#include <vector>

namespace ddtree::test {

struct TestTensor {
  std::string dtype = "BF16";
  std::vector<int64_t> shape;
  std::string data;  // raw bytes; empty: filled by element count with small BF16/F16/F32 numbers
};
using TestTensors = std::map<std::string, TestTensor>;

inline size_t element_size(const std::string& dtype) {
  if (dtype == "F32" || dtype == "I32") return 4;
  if (dtype == "F64" || dtype == "I64") return 8;
  return dtype == "BF16" || dtype == "F16" ? 2 : 1;
}

inline int64_t element_count(const std::vector<int64_t>& shape) {
  int64_t n = 1;
  for (const int64_t e : shape) n *= e;
  return n;
}

// Random bits whose exponents keep the numbers between about 2^-6 and 1, whatever of the three types they are read as.
inline std::string random_weights(const std::string& dtype, int64_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::string out(static_cast<size_t>(count) * element_size(dtype), '\0');
  for (int64_t i = 0; i < count; ++i) {
    const float value = (static_cast<float>(random() % 2001) - 1000.0f) / 1000.0f * 0.1f;
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    if (dtype == "F32") std::memcpy(&out[static_cast<size_t>(i) * 4], &bits, 4);
    else if (dtype == "BF16") {
      const uint16_t h = static_cast<uint16_t>(bits >> 16);
      std::memcpy(&out[static_cast<size_t>(i) * 2], &h, 2);
    } else if (dtype == "F16") {
      const uint16_t h = static_cast<uint16_t>(0x2c00u | (random() & 0x83ffu));
      std::memcpy(&out[static_cast<size_t>(i) * 2], &h, 2);
    }
  }
  return out;
}

// The file's bytes for a header given as text (which may be broken) and the data behind it.
inline std::string safetensors_bytes(std::string_view header, std::string_view data) {
  std::string out(8, '\0');
  const uint64_t size = header.size();
  for (int i = 0; i < 8; ++i) out[static_cast<size_t>(i)] = static_cast<char>(size >> (8 * i) & 0xff);
  return out.append(header).append(data);
}

inline std::string safetensors_bytes(const TestTensors& tensors) {
  std::string header = "{\"__metadata__\":{\"format\":\"pt\"}", data;
  uint32_t seed = 1;
  for (const auto& [name, t] : tensors) {
    const std::string bytes = t.data.empty() ? random_weights(t.dtype, element_count(t.shape), seed++) : t.data;
    header += ",\"" + name + "\":{\"dtype\":\"" + t.dtype + "\",\"shape\":[";
    for (size_t i = 0; i < t.shape.size(); ++i) header += (i ? "," : "") + std::to_string(t.shape[i]);
    header += "],\"data_offsets\":[" + std::to_string(data.size()) + "," + std::to_string(data.size() + bytes.size()) + "]}";
    data += bytes;
  }
  return safetensors_bytes(header + "}", data);
}

inline void write_file(const std::filesystem::path& path, std::string_view bytes) {
  std::filesystem::create_directories(path.parent_path());
  std::ofstream(path, std::ios::binary).write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
}

inline std::string read_file(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  return std::string(std::istreambuf_iterator<char>(in), {});
}

// One model.safetensors.
inline void write_single(const std::filesystem::path& folder, const TestTensors& tensors) {
  write_file(folder / "model.safetensors", safetensors_bytes(tensors));
}

// `shards` files, tensors dealt in turn, and the index.
inline void write_sharded(const std::filesystem::path& folder, const TestTensors& tensors, size_t shards) {
  std::vector<TestTensors> parts(shards);
  std::vector<std::string> names;
  for (size_t i = 0; i < shards; ++i) {
    char name[64];
    std::snprintf(name, sizeof name, "model-%05zu-of-%05zu.safetensors", i + 1, shards);
    names.emplace_back(name);
  }
  std::string index = "{\"metadata\":{},\"weight_map\":{";
  size_t at = 0;
  for (const auto& [name, t] : tensors) {
    index += std::string(at ? "," : "") + "\"" + name + "\":\"" + names[at % shards] + "\"";
    parts[at++ % shards][name] = t;
  }
  for (size_t i = 0; i < shards; ++i) write_file(folder / names[i], safetensors_bytes(parts[i]));
  write_file(folder / "model.safetensors.index.json", index + "}}");
}

// A folder that disappears with the object.
class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string pattern = (std::filesystem::temp_directory_path() / "ddtree-test-XXXXXX").string();
    path_ = mkdtemp(pattern.data());
  }
  ~TemporaryFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  const std::filesystem::path& path() const { return path_; }
  std::string operator/(std::string_view name) const { return (path_ / name).string(); }

 private:
  std::filesystem::path path_;
};

}  // namespace ddtree::test
