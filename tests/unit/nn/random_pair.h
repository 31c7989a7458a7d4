// A pair with random weights of any shape, in memory: proves that shapes come from the spec.
#pragma once

#include <cmath>
#include <cstring>
#include <deque>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "base/bf16.h"
#include "model/pair.h"

namespace ddtree::test {

struct RandomPair {
  LoadedPair pair;
  std::deque<std::vector<std::byte>> storage;  // what the views point into
};

class PairBuilder {
 public:
  PairBuilder(RandomPair* out, DType dtype, uint32_t seed) : out_(out), dtype_(dtype), random_(seed) {}

  TensorView tensor(std::vector<int64_t> shape, float scale, float mean = 0.0f) {
    TensorView v;
    v.shape = std::move(shape);
    v.dtype = dtype_;
    int64_t n = 1;
    for (const int64_t extent : v.shape) n *= extent;
    v.bytes = static_cast<size_t>(n) * dtype_size(dtype_);
    auto& bytes = out_->storage.emplace_back(v.bytes);
    std::normal_distribution<float> normal(mean, scale);
    for (int64_t i = 0; i < n; ++i) {
      const float x = normal(random_);
      if (dtype_ == DType::kF32) {
        std::memcpy(bytes.data() + 4 * i, &x, 4);
      } else {  // small BF16 numbers; read as F16 they are other small numbers
        const uint16_t bits = dtype_ == DType::kBf16 ? float_to_bf16(x) : half(x);
        std::memcpy(bytes.data() + 2 * i, &bits, 2);
      }
    }
    v.data = bytes.data();
    v.file = "random";
    v.name = "random";
    return v;
  }
  TensorView linear(int64_t n, int64_t k) { return tensor({n, k}, 1.0f / std::sqrt(static_cast<float>(k))); }
  TensorView norm(int64_t n, bool zero_centred) { return tensor({n}, 0.2f, zero_centred ? 0.0f : 1.0f); }

  MlpTensors mlp(int64_t hidden, int64_t intermediate) {
    return {linear(intermediate, hidden), linear(intermediate, hidden), linear(hidden, intermediate)};
  }
  FullAttentionTensors attention(int64_t hidden, int64_t heads, int64_t kv_heads, int64_t dim, bool gate, bool zero_centred) {
    return {linear(heads * dim * (gate ? 2 : 1), hidden),
            linear(kv_heads * dim, hidden),
            linear(kv_heads * dim, hidden),
            linear(hidden, heads * dim),
            norm(dim, zero_centred),
            norm(dim, zero_centred)};
  }
  TargetLayer layer(const ModelSpec& s, LayerKind kind) {
    TargetLayer l;
    l.kind = kind;
    l.input_norm = norm(s.hidden_size, true);
    l.post_attention_norm = norm(s.hidden_size, true);
    if (kind == LayerKind::kGatedDelta) {
      const int64_t values = s.value_heads * s.value_dim;
      l.delta.in_proj_qkv = linear(s.conv_channels(), s.hidden_size);
      l.delta.in_proj_z = linear(values, s.hidden_size);
      l.delta.in_proj_a = linear(s.value_heads, s.hidden_size);
      l.delta.in_proj_b = linear(s.value_heads, s.hidden_size);
      l.delta.conv1d = tensor({s.conv_channels(), 1, s.conv_width}, 0.6f);
      l.delta.a_log = tensor({s.value_heads}, 0.8f);
      l.delta.dt_bias = tensor({s.value_heads}, 1.0f);
      l.delta.norm = norm(s.value_dim, false);
      l.delta.out_proj = linear(s.hidden_size, values);
    } else {
      l.attention = attention(s.hidden_size, s.heads, s.kv_heads, s.head_dim, s.output_gate, true);
    }
    l.mlp = mlp(s.hidden_size, s.intermediate_size);
    return l;
  }

 private:
  static uint16_t half(float x) {  // round toward zero; any half will do
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    const auto exponent = static_cast<int32_t>((bits >> 23) & 0xff) - 112;
    const uint32_t sign = bits >> 16 & 0x8000u;
    if (exponent <= 0) return static_cast<uint16_t>(sign);
    return static_cast<uint16_t>(sign | static_cast<uint32_t>(exponent) << 10 | (bits >> 13 & 0x3ffu));
  }
  RandomPair* out_;
  DType dtype_;
  std::mt19937 random_;
};

inline std::unique_ptr<RandomPair> make_random_pair(const ModelSpec& spec, const DrafterSpec* drafter, DType dtype, uint32_t seed) {
  auto out = std::make_unique<RandomPair>();
  PairBuilder b(out.get(), dtype, seed);
  out->pair.spec = spec;
  TargetTensors& t = out->pair.tensors;
  t.embed = b.tensor({spec.vocab_size, spec.hidden_size}, 1.0f);
  t.final_norm = b.norm(spec.hidden_size, true);
  t.tied_head = spec.tied_head;
  t.lm_head = spec.tied_head ? t.embed : b.linear(spec.vocab_size, spec.hidden_size);
  for (const LayerKind kind : spec.layers) t.layers.push_back(b.layer(spec, kind));
  if (spec.mtp_layers > 0) {
    t.mtp.emplace();
    t.mtp->fc = b.linear(spec.hidden_size, 2 * spec.hidden_size);
    t.mtp->pre_norm_embedding = b.norm(spec.hidden_size, true);
    t.mtp->pre_norm_hidden = b.norm(spec.hidden_size, true);
    t.mtp->norm = b.norm(spec.hidden_size, true);
    t.mtp->layer = b.layer(spec, LayerKind::kFullAttention);
  }
  if (drafter) {
    LoadedDrafter& d = out->pair.drafter.emplace();
    d.spec = *drafter;
    d.tensors.fc = b.linear(drafter->hidden_size, static_cast<int64_t>(drafter->taps.size()) * spec.hidden_size);
    d.tensors.hidden_norm = b.norm(drafter->hidden_size, false);
    d.tensors.norm = b.norm(drafter->hidden_size, false);
    for (size_t i = 0; i < drafter->layers.size(); ++i) {
      d.tensors.layers.push_back({b.norm(drafter->hidden_size, false), b.norm(drafter->hidden_size, false),
                                  b.attention(drafter->hidden_size, drafter->heads, drafter->kv_heads, drafter->head_dim, false, false),
                                  b.mlp(drafter->hidden_size, drafter->intermediate_size)});
    }
  }
  return out;
}

}  // namespace ddtree::test
