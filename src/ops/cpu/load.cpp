// Weights of the CPU backend: through the same loader as a card's, into panels.
#include <fmt/core.h>

#include <algorithm>
#include <cstring>

#include "ops/cpu/cpu_backend.h"
#include "ops/cpu/layout.h"

namespace ddtree::ops::cpu {
namespace {

// Pieces of about what the second-level cache holds.
constexpr int64_t kBufferBytes = 1 << 20;

// A whole panel of BF16 from its 32 rows, K elements each. In steps of a cache line of every row, so that both sides stay in the
// first-level cache; a row at a time would touch K lines for two bytes each.
void pack_panel(const std::byte* rows, int64_t k, uint32_t* out) {
  constexpr int64_t kStep = 32;
  for (int64_t begin = 0; begin < k; begin += kStep) {
    const int64_t end = std::min(begin + kStep, k);
    for (int64_t column = 0; column < 16; ++column) {
      const std::byte *low = rows + column * k * 2, *high = rows + (column + 16) * k * 2;
      for (int64_t i = begin; i < end; ++i) {
        uint16_t l, h;
        std::memcpy(&l, low + i * 2, 2);
        std::memcpy(&h, high + i * 2, 2);
        out[i * 16 + column] = l | static_cast<uint32_t>(h) << 16;
      }
    }
  }
}

}  // namespace

struct CpuBackend::Sink final : LoadSink {
  explicit Sink(const std::vector<Place>& p) : places(p) {}

  Result<std::byte*> open(int count, int64_t bytes) override {
    if (!buffers.allocate(count * bytes))
      return Status(Code::kDoesNotFit, fmt::format("staging of weights: {} MiB could not be allocated", (count * bytes >> 20) + 1));
    return buffers.data();
  }
  void close() override { buffers = {}; }
  Status wait(int) override { return {}; }

  Status put(int, const std::byte* from, const LoadItem& item, int64_t first, int64_t count) override {
    const Place& place = places[item.place];
    if (place.values != nullptr) {
      std::memcpy(place.values + first, from, static_cast<size_t>(count) * sizeof(float));
      return {};
    }
    CpuWeight& w = *place.weight;
    const int64_t k = w.k();
    for (int64_t at = 0; at < count;) {
      const int64_t row = place.row + (first + at) / k, begin = (first + at) % k, n = std::min(k - begin, count - at);
      const int64_t panel = row / kPanelColumns, column = row % kPanelColumns;
      if (w.bf16 && column == 0 && begin == 0 && count - at >= kPanelColumns * k) {
        pack_panel(from + at * 2, k, w.pairs.data() + panel * k * 16);
        at += kPanelColumns * k;
        continue;
      }
      if (w.bf16) {
        // Two rows share a word, and two readers may have one each: halves are written, never words.
        auto* out = reinterpret_cast<std::byte*>(w.pairs.data() + (panel * k + begin) * 16 + column % 16) + (column < 16 ? 0 : 2);
        for (int64_t i = 0; i < n; ++i) std::memcpy(out + i * 64, from + (at + i) * 2, 2);
      } else {
        float* out = w.floats.data() + (panel * k + begin) * 32 + column;
        for (int64_t i = 0; i < n; ++i) std::memcpy(out + i * 32, from + (at + i) * 4, 4);
      }
      at += n;
    }
    return {};
  }

  const std::vector<Place>& places;
  Block<std::byte> buffers;
};

Status CpuBackend::finish_loading(const LoadOptions& options) {
  LoadOptions o = options;
  if (o.threads <= 0) o.threads = pool_.threads();
  if (o.buffer_bytes <= 0) o.buffer_bytes = kBufferBytes;
  if (o.buffers <= 0) o.buffers = o.threads;  // put() is done when it returns: more would stay empty
  Sink sink(places_);
  const Status status = loader_.run(&sink, o);
  places_.clear();
  loading_ = false;
  return status;
}

Result<const Weight*> CpuBackend::pack_weight(std::span<const TensorView> parts) {
  Result<PackedShape> shape = packed_shape(parts);
  if (!shape.ok()) return shape.status();
  const auto [n, k, bf16] = *shape;
  auto* w = keep<CpuWeight>(n, k, bf16);
  const int64_t words = layout::weight_words(n, k, bf16);
  if (!(bf16 ? w->pairs.allocate(words) : w->floats.allocate(words)))
    return Status(Code::kDoesNotFit, fmt::format("weights: {} MiB could not be allocated", (words >> 18) + 1));
  ledger_.book(MemoryUse::kWeights, layout::block_bytes(words, 4));
  int64_t row = 0;
  for (const TensorView& p : parts) {
    loader_.add({.from = p, .element = bf16 ? Element::kBfloat16 : Element::kFloat32, .place = static_cast<int64_t>(places_.size())});
    places_.push_back({.weight = w, .row = row});
    row += p.shape[0];
  }
  if (!loading_) DDTREE_RETURN_IF_ERROR(finish_loading({}));
  return static_cast<const Weight*>(w);
}

Result<Tensor> CpuBackend::norm_weight(const TensorView& weight, float add) {
  Result<Tensor> t = new_tensor(1, weight.elements(), MemoryUse::kWeights, "norms");
  if (!t.ok()) return t;
  loader_.add({.from = weight, .element = Element::kFloat32, .add = add, .place = static_cast<int64_t>(places_.size())});
  places_.push_back({.values = t->f32()});
  if (!loading_) DDTREE_RETURN_IF_ERROR(finish_loading({}));
  return t;
}

}  // namespace ddtree::ops::cpu
