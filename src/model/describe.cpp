#include "model/describe.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>

namespace ddtree {
namespace {

std::string count_text(int64_t n) {
  const double d = static_cast<double>(n);
  if (d >= 1e9) return fmt::format("{:.2f} G", d / 1e9);
  if (d >= 1e6) return fmt::format("{:.1f} M", d / 1e6);
  return fmt::format("{:.1f} k", d / 1e3);
}

// The type that holds the most bytes of a checkpoint.
const char* main_dtype(const Checkpoint& checkpoint) {
  std::array<size_t, 256> bytes{};
  for (const auto& [name, t] : checkpoint.tensors()) bytes[static_cast<size_t>(t.dtype)] += t.bytes;
  return dtype_name(static_cast<DType>(std::max_element(bytes.begin(), bytes.end()) - bytes.begin()));
}

}  // namespace

int64_t parameter_count(const ModelSpec& s) {
  const int64_t values = s.value_heads * s.value_dim;
  const int64_t delta = s.conv_channels() * (s.hidden_size + s.conv_width) + 2 * values * s.hidden_size +
                        2 * s.value_heads * (s.hidden_size + 1) + s.value_dim;
  const int64_t attention = ((s.output_gate ? 3 : 2) * s.heads + 2 * s.kv_heads) * s.head_dim * s.hidden_size + 2 * s.head_dim;
  int64_t n = (s.tied_head ? 1 : 2) * s.vocab_size * s.hidden_size + s.hidden_size;
  for (const LayerKind kind : s.layers)
    n += (kind == LayerKind::kGatedDelta ? delta : attention) + 3 * s.hidden_size * s.intermediate_size + 2 * s.hidden_size;
  return n;
}

int64_t parameter_count(const DrafterSpec& s) {
  const int64_t attention = 2 * (s.heads + s.kv_heads) * s.head_dim * s.hidden_size + 2 * s.head_dim;
  const int64_t layer = attention + 3 * s.hidden_size * s.intermediate_size + 2 * s.hidden_size;
  return static_cast<int64_t>(s.taps.size()) * s.hidden_size * s.hidden_size + 2 * s.hidden_size +
         static_cast<int64_t>(s.layers.size()) * layer;
}

std::string describe(const LoadedPair& pair) {
  const ModelSpec& s = pair.spec;
  const int64_t full = std::count(s.layers.begin(), s.layers.end(), LayerKind::kFullAttention);
  std::string text = fmt::format("Qwen3.5, {} layers ({} gated-delta + {} full), hidden {}, {} parameters, {}", s.num_layers(),
                                 s.num_layers() - full, full, s.hidden_size, count_text(parameter_count(s)), main_dtype(*pair.checkpoint));
  text += pair.has_mtp() ? "; MTP head" : "; no MTP head";
  if (!pair.drafter) return text + "; no drafter";
  const DrafterSpec& d = pair.drafter->spec;
  const int64_t sliding = std::count_if(d.layers.begin(), d.layers.end(), [](const auto& l) { return l.sliding; });
  text += fmt::format("; drafter DFlash, {} layers", d.layers.size());
  if (sliding > 0) text += fmt::format(" ({} sliding, window {})", sliding, d.window);
  return text + fmt::format(", block {}, {} taps, {} parameters, {}", d.block_size, d.taps.size(), count_text(parameter_count(d)),
                            main_dtype(*pair.drafter->checkpoint));
}

}  // namespace ddtree
