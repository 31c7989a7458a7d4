// What each rank has of a model: heads by hand for Qwen3.6-27B, every element counted for smaller ones, and messages of what does not
// divide.
#include "model/shard.h"

#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <map>
#include <random>

#include "base/bf16.h"
#include "model/checkpoint.h"
#include "model/pair.h"
#include "support/target_views.h"

using namespace ddtree;
using Catch::Matchers::ContainsSubstring;

namespace {

ModelSpec small_spec() {
  ModelSpec s;
  s.vocab_size = 83;  // not even
  s.hidden_size = 12;
  s.intermediate_size = 24;
  s.layers = {LayerKind::kGatedDelta, LayerKind::kFullAttention};
  s.heads = 24, s.kv_heads = 4, s.head_dim = 2;
  s.key_heads = 4, s.value_heads = 24, s.key_dim = 2, s.value_dim = 3;
  s.mtp_layers = 1;
  return s;
}

// Names -> how many ranks have each element.
std::map<std::string, std::vector<int>> counted(const ModelSpec& spec, int ranks) {
  const auto checkpoint = Checkpoint::dummy("dummy:count", 1);
  ModelSpec s = spec;
  auto whole = bind_target(*checkpoint, &s);
  REQUIRE(whole.ok());
  std::map<std::string, std::vector<int>> counts;
  test::for_views(*whole, [&](const TensorView& v) { counts[std::string(v.name)].resize(static_cast<size_t>(v.elements())); });
  for (int r = 0; r < ranks; ++r) {
    const auto share = share_of(s, ranks, r);
    REQUIRE(share.status().message() == "");
    // Shapes of a rank's tensors are those of its spec: a checkpoint of the rank's own spec has the same.
    const TargetTensors mine = share_tensors(*whole, s, *share);
    const auto own = Checkpoint::dummy("dummy:own", 1);
    ModelSpec own_spec = share_spec(s, *share);
    auto expected = bind_target(*own, &own_spec);
    REQUIRE(expected.ok());
    std::map<std::string, std::vector<int64_t>> shapes;
    test::for_views(*expected, [&](const TensorView& v) { shapes[std::string(v.name)] = v.shape; });
    test::for_views(mine, [&](const TensorView& v) {
      INFO("rank " << r << " of " << ranks << ": " << v.name << " " << shape_text(v.shape));
      std::vector<int64_t> shape = shapes.at(std::string(v.name));
      if (v.name == "mtp.fc.weight") shape[1] /= ranks;  // its width follows from the hidden size, which no rank has a part of
      CHECK(v.shape == shape);
      int64_t elements = 1;
      for (const int64_t n : v.shape) elements *= n;
      CHECK(v.elements() == elements);
      std::vector<int>& count = counts.at(std::string(v.name));
      for_runs(v, 0, v.elements(), [&](int64_t at, int64_t n) {
        for (int64_t i = at; i < at + n; ++i) ++count.at(static_cast<size_t>(i));
      });
    });
  }
  return counts;
}

}  // namespace

TEST_CASE("shards: Qwen3.6-27B on 2, 4 and 8 ranks, by hand", "[shard]") {
  const auto specs = read_pair_specs("qwen3.6-27b");
  REQUIRE(specs.ok());
  const ModelSpec& s = specs->target;
  CHECK(possible_ranks(s) == "1, 2, 4 and 8");
  const auto two = share_of(s, 2, 1), four = share_of(s, 4, 2), eight = share_of(s, 8, 3);
  REQUIRE((two.ok() && four.ok() && eight.ok()));
  CHECK((two->heads == Share{12, 12}));
  CHECK((two->kv_heads == Share{2, 2}));
  CHECK((two->key_heads == Share{8, 8}));
  CHECK((two->value_heads == Share{24, 24}));
  CHECK((two->intermediate == Share{8704, 8704}));
  CHECK((two->vocab == Share{124160, 124160}));
  CHECK((two->fc == Share{5120, 5120}));
  CHECK((four->heads == Share{12, 6}));
  CHECK((four->kv_heads == Share{2, 1}));
  // Four K/V heads on eight ranks: two ranks have the same one, and their three query heads each are of its six.
  CHECK((eight->heads == Share{9, 3}));
  CHECK((eight->kv_heads == Share{1, 1}));
  CHECK((eight->key_heads == Share{6, 2}));
  CHECK((eight->value_heads == Share{18, 6}));
  CHECK((eight->intermediate == Share{6528, 2176}));
  CHECK((eight->vocab == Share{93120, 31040}));
  const ModelSpec mine = share_spec(s, *eight);
  CHECK(mine.conv_channels() == 2 * 2 * 128 + 6 * 128);
  CHECK(mine.hidden_size == 5120);
}

TEST_CASE("shards: every element is on exactly one rank, and what is replicated on as many as planned", "[shard]") {
  const ModelSpec s = small_spec();
  for (const int ranks : {1, 2, 4, 8}) {
    const auto counts = counted(s, ranks);
    for (const auto& [name, count] : counts) {
      INFO(name << " on " << ranks << " ranks");
      const bool norm = name.find("norm") != std::string::npos;
      const bool kv = name.find("k_proj") != std::string::npos || name.find("v_proj") != std::string::npos;
      const bool mixed = name.find("in_proj_qkv") != std::string::npos || name.find("conv1d") != std::string::npos;
      const int64_t row = mixed ? static_cast<int64_t>(count.size()) / s.conv_channels() : 1;
      for (size_t i = 0; i < count.size(); ++i) {
        const bool key_row = mixed && static_cast<int64_t>(i) / row < 2 * s.key_heads * s.key_dim;
        // Four key/value heads and four key heads: on eight ranks, two have the same.
        const int want = norm ? ranks : (kv || key_row) && ranks == 8 ? 2 : 1;
        REQUIRE(count[i] == want);
      }
    }
  }
}

TEST_CASE("shards: a rank's heads read their own keys, values and columns", "[shard]") {
  ModelSpec s = small_spec();
  const auto checkpoint = Checkpoint::dummy("dummy:heads", 1);
  auto whole = bind_target(*checkpoint, &s);
  REQUIRE(whole.ok());
  const auto places = [](const TensorView& v) {
    std::vector<int64_t> out;
    for_runs(v, 0, v.elements(), [&](int64_t at, int64_t n) {
      for (int64_t i = at; i < at + n; ++i) out.push_back(i);
    });
    return out;
  };
  for (const int ranks : {2, 4, 8})
    for (int r = 0; r < ranks; ++r) {
      INFO("rank " << r << " of " << ranks);
      const auto share = share_of(s, ranks, r);
      REQUIRE(share.ok());
      const TargetTensors t = share_tensors(*whole, s, *share);
      const ModelSpec m = share_spec(s, *share);
      const auto q = places(t.layers[1].attention.q_proj), k = places(t.layers[1].attention.k_proj),
                 o = places(t.layers[1].attention.o_proj);
      for (int64_t h = 0; h < m.heads; ++h) {
        const int64_t global = r * m.heads + h;
        // The head's query and gate rows, and its columns of the output projection.
        for (int64_t i = 0; i < 2 * s.head_dim * s.hidden_size; ++i)
          REQUIRE(q[static_cast<size_t>(h * 2 * s.head_dim * s.hidden_size + i)] == global * 2 * s.head_dim * s.hidden_size + i);
        for (int64_t row = 0; row < s.hidden_size; ++row)
          for (int64_t d = 0; d < s.head_dim; ++d)
            REQUIRE(o[static_cast<size_t>((row * m.heads + h) * s.head_dim + d)] == (row * s.heads + global) * s.head_dim + d);
        // Its key/value head, by the rank's own ratio, is the one that the whole model gives it.
        const int64_t kv = h / (m.heads / m.kv_heads);
        REQUIRE(k[static_cast<size_t>(kv * s.head_dim * s.hidden_size)] == global / (s.heads / s.kv_heads) * s.head_dim * s.hidden_size);
      }
      const auto qkv = places(t.layers[0].delta.in_proj_qkv), out = places(t.layers[0].delta.out_proj),
                 a = places(t.layers[0].delta.in_proj_a), taps = places(t.layers[0].delta.conv1d);
      const int64_t keys = m.key_heads * s.key_dim, hidden = s.hidden_size;
      for (int64_t h = 0; h < m.value_heads; ++h) {
        const int64_t global = r * m.value_heads + h, key = h / (m.value_heads / m.key_heads);
        const int64_t global_key = global / (s.value_heads / s.key_heads), all_keys = s.key_heads * s.key_dim;
        REQUIRE(qkv[static_cast<size_t>(key * s.key_dim * hidden)] == global_key * s.key_dim * hidden);
        REQUIRE(qkv[static_cast<size_t>((keys + key * s.key_dim) * hidden)] == (all_keys + global_key * s.key_dim) * hidden);
        REQUIRE(qkv[static_cast<size_t>((2 * keys + h * s.value_dim) * hidden)] == (2 * all_keys + global * s.value_dim) * hidden);
        REQUIRE(taps[static_cast<size_t>((2 * keys + h * s.value_dim) * s.conv_width)] ==
                (2 * all_keys + global * s.value_dim) * s.conv_width);
        REQUIRE(a[static_cast<size_t>(h * hidden)] == global * hidden);
        REQUIRE(out[static_cast<size_t>(h * s.value_dim)] == global * s.value_dim);
      }
      CHECK(places(t.embed).front() == share->vocab.first * s.hidden_size);
    }
}

TEST_CASE("shards: what does not divide is named, with what would", "[shard]") {
  const auto refused = [](const ModelSpec& s, int ranks) {
    const auto share = share_of(s, ranks, 0);
    REQUIRE_FALSE(share.ok());
    CHECK(share.status().code() == Code::kUsage);
    return share.status().message();
  };
  ModelSpec s = small_spec();
  CHECK(refused(s, 3) ==
        "3 ranks cannot share this model: its num_key_value_heads 4 neither divides by it nor divides it; 1, 2, 4 and 8 can");
  CHECK_THAT(refused(s, 5), ContainsSubstring("num_attention_heads 24 does not divide"));
  s.intermediate_size = 20;
  CHECK(refused(s, 8) == "8 ranks cannot share this model: its intermediate_size 20 does not divide by it; 1, 2 and 4 can");
  s = small_spec();
  s.value_heads = 4;
  CHECK_THAT(refused(s, 8), ContainsSubstring("linear_num_value_heads 4 does not divide"));
  s = small_spec();
  s.vocab_size = 6;
  CHECK_THAT(refused(s, 8), ContainsSubstring("vocab_size 6 is less than one row a rank"));
  s = small_spec();
  s.layers = {LayerKind::kFullAttention}, s.mtp_layers = 0, s.value_heads = 7;
  CHECK(share_of(s, 8, 7).ok());  // no such layer: its heads do not matter
  CHECK_FALSE(share_of(s, 2, 2).ok());
  // The tiny pair: two key heads shared by four ranks, four heads not by eight.
  const auto tiny = load_pair(kEmbeddedPair);
  if (tiny.ok()) {
    CHECK(share_of(tiny->spec, 4, 3).ok());
    CHECK_THAT(refused(tiny->spec, 8), ContainsSubstring("num_attention_heads 4"));
  }
}

TEST_CASE("views of parts: any range of them reads as the elements it names", "[shard]") {
  std::mt19937 random(std::random_device{}());
  const auto below = [&](int64_t n) { return static_cast<int64_t>(random() % static_cast<uint64_t>(n)); };
  for (int round = 0; round < 200; ++round) {
    const int64_t rows = 4 + below(9), cols = 1 + below(9);
    std::vector<uint16_t> values(static_cast<size_t>(rows * cols));
    for (uint16_t& v : values) v = static_cast<uint16_t>(random() & 0x7f7f);
    TensorView v{.dtype = DType::kBf16, .shape = {rows, cols}, .data = reinterpret_cast<const std::byte*>(values.data())};
    if (round % 3 == 0) v.fill = {.seed = 7, .centre = 0, .spread = 1};
    std::vector<int64_t> want;
    for (int64_t blocks = 1 + below(3); blocks > 0; --blocks) {
      const int64_t r = below(rows), c = below(cols), n = 1 + below(rows - r), m = 1 + below(cols - c);
      v.blocks.push_back({r * cols + c, n, m, cols});
      for (int64_t i = 0; i < n; ++i)
        for (int64_t j = 0; j < m; ++j) want.push_back((r + i) * cols + c + j);
    }
    v.bytes = want.size() * 2;
    const int64_t first = below(static_cast<int64_t>(want.size())), count = 1 + below(static_cast<int64_t>(want.size()) - first);
    std::vector<float> floats(static_cast<size_t>(count));
    std::vector<uint16_t> bits(floats.size());
    to_float32(v, first, count, floats.data());
    REQUIRE(read_bytes(v, first * 2, count * 2, reinterpret_cast<std::byte*>(bits.data())).ok());
    for (int64_t i = 0; i < count; ++i) {
      const int64_t at = want[static_cast<size_t>(first + i)];
      const uint16_t b = v.fill.seed != 0 ? fill_bf16(v.fill, at) : values[static_cast<size_t>(at)];
      REQUIRE(bits[static_cast<size_t>(i)] == b);
      REQUIRE(floats[static_cast<size_t>(i)] == bf16_to_float(b));
      REQUIRE(bf16_at(v, first + i) == b);
    }
  }
}
