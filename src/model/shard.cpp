#include "model/shard.h"

#include <fmt/core.h>

#include <vector>

namespace ddtree {
namespace {

// `field` of config.json does not divide; empty: all do.
struct Misfit {
  const char* field = "";
  int64_t value = 0;
  std::string why;
};

// Heads that others read: a rank has some of them, or several ranks have the same one.
bool shareable(int64_t heads, int64_t ranks) { return heads > 0 && (heads % ranks == 0 || ranks % heads == 0); }
Share share_heads(int64_t heads, int64_t ranks, int64_t rank) {
  if (ranks > heads) return {rank / (ranks / heads), 1};
  return {rank * (heads / ranks), heads / ranks};
}
Share share_equal(int64_t items, int64_t ranks, int64_t rank) { return {items / ranks * rank, items / ranks}; }

bool has(const ModelSpec& s, LayerKind kind) {
  for (const LayerKind k : s.layers)
    if (k == kind) return true;
  return kind == LayerKind::kFullAttention && s.mtp_layers > 0;
}

Misfit misfit(const ModelSpec& s, int64_t ranks) {
  const auto divides = [&](int64_t n) { return n % ranks == 0; };
  if (has(s, LayerKind::kFullAttention)) {
    if (!divides(s.heads)) return {"num_attention_heads", s.heads, "does not divide by it"};
    if (!shareable(s.kv_heads, ranks)) return {"num_key_value_heads", s.kv_heads, "neither divides by it nor divides it"};
  }
  if (has(s, LayerKind::kGatedDelta)) {
    if (!divides(s.value_heads)) return {"linear_num_value_heads", s.value_heads, "does not divide by it"};
    if (!shareable(s.key_heads, ranks)) return {"linear_num_key_heads", s.key_heads, "neither divides by it nor divides it"};
  }
  if (!divides(s.intermediate_size)) return {"intermediate_size", s.intermediate_size, "does not divide by it"};
  if (s.mtp_layers > 0 && !divides(2 * s.hidden_size))
    return {"hidden_size", s.hidden_size, "doubled (the MTP head's input) does not divide by it"};
  if (s.vocab_size < ranks) return {"vocab_size", s.vocab_size, "is less than one row a rank"};
  return {};
}

// --- views. Every one is of a whole tensor [n, k] (a vector counts as [n, 1]). ----------------------------------------------------------

int64_t row_size(const TensorView& t) {
  int64_t k = 1;
  for (size_t i = 1; i < t.shape.size(); ++i) k *= t.shape[i];
  return k;
}

TensorView part(const TensorView& t, std::vector<TensorBlock> blocks, int64_t rows, int64_t columns) {
  TensorView out = t;
  int64_t elements = 0;
  for (const TensorBlock& b : blocks) elements += b.rows * b.cols;
  out.blocks = std::move(blocks);
  out.bytes = static_cast<size_t>(elements) * dtype_size(t.dtype);
  out.shape[0] = rows;
  if (columns > 0) out.shape[1] = columns;
  return out;
}

TensorView rows_of(const TensorView& t, const std::vector<Share>& shares) {
  const int64_t k = row_size(t);
  std::vector<TensorBlock> blocks;
  int64_t rows = 0;
  for (const Share& s : shares) blocks.push_back({s.first * k, s.count, k, k}), rows += s.count;
  return part(t, std::move(blocks), rows, 0);
}
TensorView rows_of(const TensorView& t, int64_t first, int64_t count) { return rows_of(t, {{first, count}}); }

TensorView columns_of(const TensorView& t, int64_t first, int64_t count) {
  return part(t, {{first, t.shape[0], count, t.shape[1]}}, t.shape[0], count);
}

class Cutter {
 public:
  Cutter(const ModelSpec& spec, const RankShare& share) : s_(spec), r_(share) {}

  MlpTensors mlp(const MlpTensors& t) const {
    const auto [first, count] = r_.intermediate;
    return {rows_of(t.gate_proj, first, count), rows_of(t.up_proj, first, count), columns_of(t.down_proj, first, count)};
  }

  FullAttentionTensors attention(const FullAttentionTensors& t) const {
    const int64_t d = s_.head_dim, q = d * (s_.output_gate ? 2 : 1);  // a head's rows of q_proj: its query, then its gate
    FullAttentionTensors out = t;
    out.q_proj = rows_of(t.q_proj, r_.heads.first * q, r_.heads.count * q);
    out.k_proj = rows_of(t.k_proj, r_.kv_heads.first * d, r_.kv_heads.count * d);
    out.v_proj = rows_of(t.v_proj, r_.kv_heads.first * d, r_.kv_heads.count * d);
    out.o_proj = columns_of(t.o_proj, r_.heads.first * d, r_.heads.count * d);
    return out;
  }

  GatedDeltaTensors delta(const GatedDeltaTensors& t) const {
    const int64_t dk = s_.key_dim, dv = s_.value_dim, keys = s_.key_heads * dk;
    const Share q{r_.key_heads.first * dk, r_.key_heads.count * dk}, k{keys + q.first, q.count};
    const Share values{r_.value_heads.first * dv, r_.value_heads.count * dv}, v{2 * keys + values.first, values.count};
    const auto per_head = [&](const TensorView& of) { return rows_of(of, r_.value_heads.first, r_.value_heads.count); };
    GatedDeltaTensors out = t;
    out.in_proj_qkv = rows_of(t.in_proj_qkv, {q, k, v});
    out.in_proj_z = rows_of(t.in_proj_z, values.first, values.count);
    out.in_proj_a = per_head(t.in_proj_a), out.in_proj_b = per_head(t.in_proj_b);
    out.conv1d = rows_of(t.conv1d, {q, k, v});
    out.a_log = per_head(t.a_log), out.dt_bias = per_head(t.dt_bias);
    out.out_proj = columns_of(t.out_proj, values.first, values.count);
    return out;
  }

  TargetLayer layer(const TargetLayer& t) const {
    TargetLayer out = t;
    if (t.kind == LayerKind::kGatedDelta) out.delta = delta(t.delta);
    else out.attention = attention(t.attention);
    out.mlp = mlp(t.mlp);
    return out;
  }

 private:
  const ModelSpec& s_;
  const RankShare& r_;
};

}  // namespace

Share share_rows(int64_t rows, int32_t ranks, int32_t rank) {
  const int64_t first = rows * rank / ranks;
  return {first, rows * (rank + 1) / ranks - first};
}

std::string possible_ranks(const ModelSpec& spec) {
  std::vector<int> all;
  for (int n = 1; n <= 8; ++n)
    if (misfit(spec, n).value == 0) all.push_back(n);
  std::string out;
  for (size_t i = 0; i < all.size(); ++i) out += fmt::format("{}{}", i == 0 ? "" : i + 1 == all.size() ? " and " : ", ", all[i]);
  return out;
}

Result<RankShare> share_of(const ModelSpec& s, int32_t ranks, int32_t rank) {
  if (ranks < 1 || rank < 0 || rank >= ranks)
    return Status(Code::kUsage, fmt::format("rank {} of {}: ranks count from 0, and there is at least one", rank, ranks));
  if (const Misfit m = misfit(s, ranks); m.value != 0)
    return Status(Code::kUsage,
                  fmt::format("{} ranks cannot share this model: its {} {} {}; {} can", ranks, m.field, m.value, m.why, possible_ranks(s)));
  RankShare out{.rank = rank, .ranks = ranks};
  out.heads = share_equal(s.heads, ranks, rank);
  out.kv_heads = share_heads(s.kv_heads, ranks, rank);
  out.key_heads = share_heads(s.key_heads, ranks, rank);
  out.value_heads = share_equal(s.value_heads, ranks, rank);
  out.intermediate = share_equal(s.intermediate_size, ranks, rank);
  out.vocab = share_rows(s.vocab_size, ranks, rank);
  out.fc = share_equal(2 * s.hidden_size, ranks, rank);
  return out;
}

ModelSpec share_spec(const ModelSpec& spec, const RankShare& share) {
  ModelSpec out = spec;
  out.heads = share.heads.count, out.kv_heads = share.kv_heads.count;
  out.key_heads = share.key_heads.count, out.value_heads = share.value_heads.count;
  out.intermediate_size = share.intermediate.count;
  out.vocab_size = share.vocab.count;
  return out;
}

TargetTensors share_tensors(const TargetTensors& tensors, const ModelSpec& spec, const RankShare& share) {
  if (share.ranks == 1) return tensors;
  const Cutter cut(spec, share);
  TargetTensors out = tensors;
  out.embed = rows_of(tensors.embed, share.vocab.first, share.vocab.count);
  out.lm_head = rows_of(tensors.lm_head, share.vocab.first, share.vocab.count);
  for (TargetLayer& layer : out.layers) layer = cut.layer(layer);
  if (out.mtp) {
    out.mtp->fc = columns_of(tensors.mtp->fc, share.fc.first, share.fc.count);
    out.mtp->layer = cut.layer(tensors.mtp->layer);
  }
  return out;
}

}  // namespace ddtree
