// Pairs without files: shapes of the published models, the same values in every backend's hands, and a pair that runs.
#include <algorithm>
#include <catch2/catch_test_macros.hpp>
#include <cmath>

#include "base/bf16.h"
#include "model/describe.h"
#include "model/pair.h"

using namespace ddtree;

TEST_CASE("known configs: sizes are those of the published checkpoints") {
  const auto known = known_model_configs();
  REQUIRE(std::find(known.begin(), known.end(), "qwen3.6-27b") != known.end());
  for (const std::string& name : known) {
    INFO(name);
    const auto specs = read_pair_specs(name);
    INFO(specs.status().message());
    REQUIRE(specs.ok());
  }
  const auto specs = read_pair_specs("qwen3.6-27b");
  // 26.896 G parameters of text model with both vocabulary matrices; the drafter's 1.730 G.
  CHECK(std::fabs(static_cast<double>(parameter_count(specs->target)) / 26.896e9 - 1) < 0.001);
  REQUIRE(specs->drafter.has_value());
  CHECK(std::fabs(static_cast<double>(parameter_count(*specs->drafter)) / 1.730e9 - 1) < 0.001);
  CHECK((specs->target.heads == 24 && specs->target.kv_heads == 4 && specs->target.value_heads / specs->target.key_heads == 3));
  CHECK(specs->drafter->taps == std::vector<int32_t>{1, 16, 31, 46, 61});
}

TEST_CASE("a dummy pair has the bytes of the real one and finite, seeded values") {
  const auto pair = load_dummy_pair("qwen3.6-27b");
  INFO(pair.status().message());
  REQUIRE(pair.ok());
  CHECK(pair->has_mtp());
  CHECK(std::fabs(static_cast<double>(pair->drafter->checkpoint->bytes()) / 3.460e9 - 1) < 0.001);
  CHECK(std::fabs(static_cast<double>(pair->checkpoint->bytes()) / (2 * (26.896e9 + 0.425e9)) - 1) < 0.001);
  const TensorView& w = pair->tensors.layers[0].mlp.down_proj;
  CHECK(w.shape == std::vector<int64_t>{5120, 17408});
  double sum = 0, squares = 0;
  constexpr int64_t kCount = 100000;
  std::vector<float> values(kCount);
  to_float32(w, 1000, kCount, values.data());
  for (int64_t i = 0; i < kCount; ++i) {
    sum += values[i], squares += double{values[i]} * values[i];
    REQUIRE(values[i] == bf16_to_float(bf16_at(w, 1000 + i)));
  }
  CHECK(std::fabs(sum / kCount) < 3e-4);
  CHECK(std::fabs(std::sqrt(squares / kCount) - 0.02) < 3e-4);
  // Another tensor, another seed: other values; the same seed: the same.
  const auto again = load_dummy_pair("qwen3.6-27b"), other = load_dummy_pair("qwen3.6-27b", "", kEmbeddedPair, 2);
  CHECK(bf16_at(again->tensors.layers[0].mlp.down_proj, 5) == bf16_at(w, 5));
  int differ = 0;
  for (int64_t i = 0; i < 100; ++i) differ += bf16_at(other->tensors.layers[0].mlp.down_proj, i) != bf16_at(w, i);
  CHECK(differ > 80);
  CHECK(bf16_at(pair->tensors.final_norm, 0) != bf16_at(pair->tensors.final_norm, 1));
}

TEST_CASE("errors name the flag and what is known") {
  const auto none = read_pair_specs("qwen9-1t");
  REQUIRE(!none.ok());
  CHECK(none.status().message().find("--model-config qwen9-1t") != std::string::npos);
  CHECK(none.status().message().find("qwen3.6-27b") != std::string::npos);
  const auto wrong = read_pair_specs("qwen3.6-27b", "qwen3.5-4b-dflash");
  REQUIRE(!wrong.ok());
  CHECK(wrong.status().message().find("2560") != std::string::npos);
  CHECK(read_pair_specs("qwen3.6-27b", "none")->drafter == std::nullopt);
}
