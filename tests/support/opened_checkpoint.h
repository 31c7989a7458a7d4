// A checkpoint that a test wrote into a folder, opened.
#pragma once

#include <catch2/catch_test_macros.hpp>
#include <memory>

#include "model/checkpoint.h"
#include "model/source.h"
#include "support/safetensors_writer.h"

namespace ddtree::test {

// open_model_source wants a config.json: the folder gets an empty one.
inline std::shared_ptr<const Checkpoint> open_checkpoint(const TemporaryFolder& folder) {
  write_file(folder / "config.json", "{}");
  auto source = open_model_source(folder.path().string(), ModelPart::kTarget);
  REQUIRE(source.ok());
  auto checkpoint = Checkpoint::open(*source);
  INFO(checkpoint.status().message());
  REQUIRE(checkpoint.ok());
  return *checkpoint;
}

}  // namespace ddtree::test
