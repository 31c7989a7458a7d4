// The recorded outputs of the tiny pair (tests/data/golden), as floats.
#pragma once

#include <catch2/catch_test_macros.hpp>
#include <cmath>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <string>
#include <vector>

#include "model/safetensors.h"
#include "model/tensor.h"

namespace ddtree::test {

class Recorded {
 public:
  explicit Recorded(const std::string& name) {
    const std::string path = std::string(DDTREE_SOURCE_DIR) + "/tests/data/golden/" + name;
    std::ifstream file(path, std::ios::binary);
    REQUIRE(file.good());
    bytes_.assign(std::istreambuf_iterator<char>(file), {});
    auto tensors = parse_safetensors(bytes_, path);
    REQUIRE(tensors.ok());
    for (const NamedTensor& t : *tensors) views_[t.name] = t.view;
  }

  std::vector<int64_t> shape(const std::string& name) const { return view(name).shape; }
  std::vector<float> floats(const std::string& name) const {
    std::vector<float> out(view(name).elements());
    to_float32(view(name), out.data());
    return out;
  }
  std::vector<int32_t> ids(const std::string& name) const {
    const TensorView& v = view(name);
    REQUIRE(v.dtype == DType::kI64);
    std::vector<int32_t> out(v.elements());
    for (size_t i = 0; i < out.size(); ++i) {
      int64_t id;
      std::memcpy(&id, v.data + 8 * i, 8);
      out[i] = static_cast<int32_t>(id);
    }
    return out;
  }

 private:
  const TensorView& view(const std::string& name) const {
    INFO(name);
    REQUIRE(views_.count(name) == 1);
    return views_.at(name);
  }
  std::string bytes_;
  std::map<std::string, TensorView> views_;
};

// Largest difference, relative to the row's root mean square: a measure that neither a lucky zero nor one large element can spoil.
inline double relative_error(const float* got, const float* want, int64_t n) {
  double square = 0.0, worst = 0.0;
  for (int64_t i = 0; i < n; ++i) {
    square += static_cast<double>(want[i]) * want[i];
    const double d = std::fabs(static_cast<double>(got[i]) - want[i]);
    worst = d > worst || std::isnan(d) ? d : worst;
    if (std::isnan(d)) return INFINITY;
  }
  return worst / (std::sqrt(square / static_cast<double>(n)) + 1e-12);
}

}  // namespace ddtree::test
