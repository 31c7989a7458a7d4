// The one entry to model files, used by serve, run and bench: everything about a target and its drafter, checked.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "model/checkpoint.h"
#include "model/roles.h"
#include "model/source.h"
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

// A pair of published shapes without its files (--model-config NAME --load-format dummy): seeded random weights, the tokenizer and
// template of `text_path` (a model path; its ids must be among the config's). `config`: a name of known_model_configs() or the path of a
// config.json; the drafter's likewise, "" = the one that belongs to a known name (none: no drafter), "none" = none. Text from such a pair
// means nothing; speed and memory are those of the shapes.
Result<LoadedPair> load_dummy_pair(const std::string& config, const std::string& draft_config = "",
                                   std::string_view text_path = kEmbeddedPair, uint32_t seed = 1);

// "qwen3.6-27b", …: targets whose config.json is inside the executable, sorted.
std::vector<std::string> known_model_configs();
// Specs alone, for plans: as above.
struct PairSpecs {
  std::string name, drafter_name;  // drafter_name empty: none
  ModelSpec target;
  std::optional<DrafterSpec> drafter;
};
Result<PairSpecs> read_pair_specs(const std::string& config, const std::string& draft_config = "");

}  // namespace ddtree
