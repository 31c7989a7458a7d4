// Weights on a card: the bytes there are the file's, whatever the packings, buffers and readers; and a file that changes meanwhile is an
// error, not a wrong weight. The pipeline itself is tested in unit/ops/load_test.cpp against a host's memory.
#include <array>
#include <cstring>
#include <filesystem>
#include <numeric>

#include "gpu/support.h"
#include "model/checkpoint.h"
#include "support/opened_checkpoint.h"
#include "support/safetensors_writer.h"

namespace ddtree::ops::gpu_test {
namespace {

using ddtree::test::open_checkpoint;
using ddtree::test::TemporaryFolder;
using ddtree::test::TestTensors;

// Rows [first, first + rows) of a packed weight, as the card's embed reads them: exact for BF16 and float32 weights alike, since the
// residual stream is float32.
Floats rows_of_weight(Backend& b, const Weight* w, int64_t first, int64_t rows) {
  std::vector<int32_t> ids(static_cast<size_t>(rows));
  std::iota(ids.begin(), ids.end(), static_cast<int32_t>(first));
  const auto y = b.make_tensor(rows, w->k(), Element::kFloat32);
  REQUIRE(y.ok());
  b.stage_begin(Lane::kPass);
  const int32_t* token = b.stage(Lane::kPass, std::span<const int32_t>(ids));
  REQUIRE(token != nullptr);
  b.embed({.token = token, .rows = static_cast<int32_t>(rows), .weight = w, .y = *y});
  const auto values = b.host_floats(*y);
  REQUIRE(values.ok());
  return Floats(*values, *values + rows * w->k());
}

}  // namespace

TEST_CASE("loading: the card holds what the files do", "[gpu][load]") {
  INFO(seed_text());
  Random random(seed());
  for (int round = 0; round < 6; ++round) {
    const Twins twins(512, 64, 1024);
    TemporaryFolder folder;
    TestTensors tensors;
    const int64_t k = 64 * (1 + random.below(12));
    const bool mixed = round % 3 == 2;
    for (int i = 0; i < 9; ++i) {
      auto& t = tensors["t" + std::to_string(i)];
      t.shape = {8 * (1 + random.below(20)), k};
      t.dtype = mixed ? std::array{"BF16", "F16", "F32"}[static_cast<size_t>(random.below(3))] : "BF16";
    }
    tensors["norm"].shape = {k};
    ddtree::test::write_sharded(folder.path(), tensors, 3);
    const auto checkpoint = open_checkpoint(folder);
    const LoadOptions options{
        .threads = 1 + random.below(8), .buffer_bytes = int64_t{1024} << random.below(8), .buffers = 1 + random.below(6)};
    INFO("threads " << options.threads << ", buffers " << options.buffers << " of " << options.buffer_bytes << ", K " << k);
    twins.each([&](Backend& b, size_t) {
      INFO(b.name());
      b.begin_loading();
      std::vector<std::pair<std::vector<TensorView>, const Weight*>> packs;
      for (int i = 0; i < 9; i += 3) {
        std::vector<TensorView> parts;
        for (int j = i; j < i + 3; ++j) parts.push_back(*checkpoint->find("t" + std::to_string(j)));
        const auto w = b.pack_weight(parts);
        REQUIRE(w.ok());
        packs.emplace_back(parts, *w);
      }
      const auto norm = b.norm_weight(*checkpoint->find("norm"), 1.0f);
      REQUIRE(norm.ok());
      const Status loaded = b.finish_loading(options);
      INFO(loaded.message());
      REQUIRE(loaded.ok());
      for (const auto& [parts, weight] : packs) {
        int64_t row = 0;
        for (const TensorView& part : parts) {
          Floats want(static_cast<size_t>(part.elements()));
          to_float32(part, want.data());
          REQUIRE(rows_of_weight(b, weight, row, part.shape[0]) == want);
          row += part.shape[0];
        }
      }
      Floats want(static_cast<size_t>(k));
      to_float32(*checkpoint->find("norm"), want.data());
      for (float& v : want) v += 1.0f;
      const auto got = b.host_floats(*norm);
      REQUIRE(got.ok());
      CHECK(Floats(*got, *got + k) == want);
    });
  }
}

TEST_CASE("loading: a file that is cut is an error on a card too", "[gpu][load]") {
  const Twins twins(64, 64, 512);
  twins.each([&](Backend& b, size_t) {
    INFO(b.name());
    TemporaryFolder folder;
    TestTensors tensors;
    tensors["w"].shape = {256, 512};
    ddtree::test::write_single(folder.path(), tensors);
    const auto checkpoint = open_checkpoint(folder);
    b.begin_loading();
    REQUIRE(b.pack_weight(std::array{*checkpoint->find("w")}).ok());
    const std::string path = folder / "model.safetensors";
    std::filesystem::resize_file(path, std::filesystem::file_size(path) - 1000);
    const Status s = b.finish_loading({.threads = 3});
    CHECK(s.code() == Code::kBadModel);
    CHECK(s.message().find(path) != std::string::npos);
  });
}

}  // namespace ddtree::ops::gpu_test
