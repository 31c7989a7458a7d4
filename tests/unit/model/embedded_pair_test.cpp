// The pair inside the executable loads, is what it should be, and equals the same files on disk.
#include <catch2/catch_test_macros.hpp>
#include <cmath>
#include <cstring>

#include "model/describe.h"
#include "model/pair.h"

using namespace ddtree;

TEST_CASE("the embedded pair loads with its drafter, MTP head, template and stop ids") {
  Result<LoadedPair> loaded = load_pair("tiny");
  REQUIRE(loaded.status().message() == "");
  const LoadedPair& p = *loaded;
  CHECK(p.name == "tiny");
  CHECK(p.location == "embedded:models/tiny/target");
  CHECK(p.spec.num_layers() == 8);
  CHECK(p.spec.layers[3] == LayerKind::kFullAttention);
  CHECK(p.spec.layers[4] == LayerKind::kGatedDelta);
  CHECK(p.spec.rotary_dim == 64);
  CHECK(p.spec.tied_head);
  CHECK(p.tensors.tied_head);
  CHECK(p.tensors.lm_head.data == p.tensors.embed.data);
  CHECK(p.has_mtp());
  CHECK(p.defaults.eos_ids == std::vector<int32_t>{4088, 4086});
  CHECK(p.defaults.do_sample);
  CHECK(p.defaults.temperature == 0.6f);
  CHECK(p.defaults.top_k == 20);
  CHECK(p.chat_template.find("<|im_start|>") != std::string::npos);
  CHECK(p.tokenizer_json.size() > 200000);
  REQUIRE(p.drafter);
  CHECK(p.drafter->spec.block_size == 16);
  CHECK(p.drafter->spec.mask_id == 4089);
  CHECK(p.drafter->spec.taps == std::vector<int32_t>{1, 3, 5});
  CHECK(p.drafter->spec.window == 128);
  CHECK(p.drafter->spec.layers[0].sliding);
  CHECK(p.drafter->spec.layers[0].causal);
  CHECK_FALSE(p.drafter->spec.layers[1].sliding);
  CHECK_FALSE(p.drafter->spec.layers[1].causal);
  CHECK(p.bytes() == 23879264 + 3936256);  // total_size of the index; the drafter's data section
  // 10.27 M parameters and 1.97 M in the drafter, as the files count them: MTP apart, norms and biases included.
  int64_t target = 0, mtp = 0, drafter = 0;
  for (const auto& [name, t] : p.checkpoint->tensors()) (name.starts_with("mtp.") ? mtp : target) += t.elements();
  for (const auto& [name, t] : p.drafter->checkpoint->tensors()) drafter += t.elements();
  CHECK(parameter_count(p.spec) == target);
  CHECK(parameter_count(p.drafter->spec) == drafter);
  CHECK(describe(p) ==
        "Qwen3.5, 8 layers (6 gated-delta + 2 full), hidden 256, 10.3 M parameters, BF16; MTP head; drafter DFlash, 2 layers (1 sliding, "
        "window 128), "
        "block 16, 3 taps, 2.0 M parameters, BF16");
}

TEST_CASE("the embedded pair without a drafter, and the same files on disk") {
  Result<LoadedPair> alone = load_pair("embedded:tiny", "");
  REQUIRE(alone.ok());
  CHECK_FALSE(alone->drafter);
  CHECK(describe(*alone).ends_with("; no drafter"));

  const std::string folder = DDTREE_SOURCE_DIR "/models/tiny";
  Result<LoadedPair> disk = load_pair(folder + "/target/", folder + "/draft");
  REQUIRE(disk.status().message() == "");
  LoadedPair moved = std::move(*disk);  // views must survive a move
  CHECK(moved.name == folder + "/target/");
  REQUIRE(moved.drafter);
  for (const auto& [name, t] : alone->checkpoint->tensors()) {
    const TensorView* same = moved.checkpoint->find(name);
    REQUIRE(same != nullptr);
    REQUIRE(same->bytes == t.bytes);
    CHECK(std::memcmp(same->data, t.data, t.bytes) == 0);
  }
  CHECK(moved.tensors.layers[0].delta.conv1d.name == "model.language_model.layers.0.linear_attn.conv1d.weight");
  CHECK(moved.tensors.layers[0].delta.conv1d.file == "model-00001-of-00002.safetensors");
  std::vector<float> embed(static_cast<size_t>(moved.tensors.embed.elements()));
  to_float32(moved.tensors.embed, embed.data());
  double sum = 0;
  for (const float f : embed) sum += std::abs(f);
  CHECK(std::isfinite(sum));
  CHECK(sum > 1.0);
}
