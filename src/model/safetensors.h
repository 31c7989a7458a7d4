// The header of one safetensors file: 8 bytes little-endian length, that many bytes of JSON, then the data.
#pragma once

#include <string_view>
#include <vector>

#include "base/status.h"
#include "model/tensor.h"

namespace ddtree {

// The tensors of `file`, whose whole contents are `bytes`, in the header's order of names. `name` of each view is empty: the caller owns
// the names (second). kBadModel naming file and tensor: a header that does not fit the file or is not JSON, a name that comes twice, an
// unknown dtype, a shape with a negative, huge or overflowing extent, offsets outside the data, a size that is not shape × dtype.
struct NamedTensor {
  std::string name;
  TensorView view;
};
Result<std::vector<NamedTensor>> parse_safetensors(std::string_view bytes, std::string_view file);

}  // namespace ddtree
