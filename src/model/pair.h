// The one entry to model files, used by serve, run and bench: everything about a target and its drafter, checked.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "base/status.h"
#include "model/checkpoint.h"
#include "model/roles.h"
#include "model/spec.h"

namespace ddtree {

struct LoadedDrafter {
  std::string name;      // as given
  std::string location;  // where it was found
  DrafterSpec spec;
  DrafterTensors tensors;
  std::shared_ptr<const Checkpoint> checkpoint;  // keeps the mapping that `tensors` points into
};

struct LoadedPair {
  std::string name;      // the model path as given: the model's default served name
  std::string location;  // where it was found
  ModelSpec spec;
  TargetTensors tensors;
  std::shared_ptr<const Checkpoint> checkpoint;  // keeps the mapping that `tensors` points into
  std::optional<LoadedDrafter> drafter;
  GenerationDefaults defaults;        // generation_config.json; eos_ids is never empty unless the files name none
  std::string tokenizer_json;         // text of tokenizer.json
  std::string tokenizer_config_json;  // text of tokenizer_config.json; "{}" where there is none
  std::string chat_template;          // chat_template.jinja, chat_template.json or tokenizer_config.json's; "" where there is none

  bool has_mtp() const { return tensors.mtp.has_value(); }
  size_t bytes() const;  // of the mapped tensors of both
};

// draft_path: nullopt = the embedded pair's own drafter where model_path names that pair, otherwise none; "" = none;
// else as open_model_source. Views are movable with the pair. Errors are kBadModel and name file, key or tensor, found and expected.
Result<LoadedPair> load_pair(std::string_view model_path, std::optional<std::string> draft_path = std::nullopt);

}  // namespace ddtree
