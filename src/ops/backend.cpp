#include "ops/backend.h"

#include <fmt/core.h>

namespace ddtree::ops {

Result<PackedShape> packed_shape(std::span<const TensorView> parts) {
  PackedShape out;
  for (const TensorView& p : parts) {
    const int64_t rows = p.shape.empty() ? 0 : p.shape[0], cols = p.shape.size() > 1 ? p.shape[1] : 1;
    if (!p.present() || p.shape.size() > 2 || rows <= 0 || (out.k != 0 && cols != out.k))
      return Status(Code::kBadModel,
                    fmt::format("tensor {} {} cannot be packed under [{}, {}]", p.name, shape_text(p.shape), out.n, out.k));
    out.n += rows;
    out.k = cols;
    out.bf16 = out.bf16 && p.dtype == DType::kBf16;
  }
  return out;
}

void Backend::gated_delta_mixer(const GatedDeltaMixerArgs& args) {
  conv(conv_of(args));
  delta_rule(delta_rule_of(args));
  gated_rms_norm(gated_rms_norm_of(args));
}

}  // namespace ddtree::ops
