// silu_mul: y[r, i] = silu(g[r, i]) · u[r, i], where x = g | u. float32 inside. BF16 boundaries: y is rounded once.
#pragma once

#include "ops/tensor.h"

namespace ddtree::ops {

struct SiluMulArgs {
  Tensor x;  // [R, 2·I] gate | up
  Tensor y;  // [R, I]
};

}  // namespace ddtree::ops
