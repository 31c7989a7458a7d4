// Pairs and specs from config.json alone.
#include <fmt/core.h>
#include <fmt/ranges.h>

#include <filesystem>
#include <fstream>
#include <sstream>

#include "base/embedded.h"
#include "model/config.h"
#include "model/pair.h"

namespace ddtree {
namespace {

constexpr std::string_view kPrefix = "models/configs/", kSuffix = ".json", kDrafter = "-dflash";

struct ConfigText {
  std::string name, file, text;
};

Result<ConfigText> read_config(const std::string& flag, const std::string& config) {
  if (const auto known = embedded_file(fmt::format("{}{}{}", kPrefix, config, kSuffix)))
    return ConfigText{config, "embedded:" + config, std::string(*known)};
  std::string path = config;
  std::error_code none;
  if (std::filesystem::is_directory(path, none)) path += "/config.json";
  std::ifstream in(path, std::ios::binary);
  std::ostringstream text;
  text << in.rdbuf();
  if (!in || text.str().empty())
    return Status(Code::kUsage, fmt::format("{} {}: neither a known model ({}) nor a readable config.json", flag, config,
                                            fmt::join(known_model_configs(), ", ")));
  return ConfigText{config, path, text.str()};
}

}  // namespace

std::vector<std::string> known_model_configs() {
  std::vector<std::string> out;
  for (std::string_view name : embedded_files(kPrefix)) {
    name.remove_prefix(kPrefix.size());
    if (!name.ends_with(kSuffix)) continue;
    name.remove_suffix(kSuffix.size());
    if (!name.ends_with(kDrafter)) out.emplace_back(name);
  }
  return out;
}

Result<PairSpecs> read_pair_specs(const std::string& config, const std::string& draft_config) {
  Result<ConfigText> target = read_config("--model-config", config);
  if (!target.ok()) return target.status();
  Result<ModelSpec> spec = parse_model_config(target->text, target->file);
  if (!spec.ok()) return spec.status();
  PairSpecs out{target->name, "", std::move(*spec), std::nullopt};
  std::string draft = draft_config;
  if (draft.empty() && embedded_file(fmt::format("{}{}{}{}", kPrefix, config, kDrafter, kSuffix))) draft = config + std::string(kDrafter);
  if (draft.empty() || draft == "none") return out;
  Result<ConfigText> drafter = read_config("--draft-config", draft);
  if (!drafter.ok()) return drafter.status();
  Result<DrafterSpec> of = parse_drafter_config(drafter->text, drafter->file, out.target.num_layers());
  if (!of.ok()) return of.status();
  if (of->num_target_layers == 0) of->num_target_layers = out.target.num_layers();
  if (Status s = check_pair(out.target, *of); !s.ok()) return Status(s.code(), fmt::format("{}: {}", drafter->file, s.message()));
  out.drafter_name = drafter->name, out.drafter = std::move(*of);
  return out;
}

Result<LoadedPair> load_dummy_pair(const std::string& config, const std::string& draft_config, std::string_view text_path, uint32_t seed) {
  Result<PairSpecs> specs = read_pair_specs(config, draft_config);
  if (!specs.ok()) return specs.status();
  Result<LoadedPair> text = load_pair(text_path, "");
  if (!text.ok()) return text.status();
  LoadedPair pair = std::move(*text);
  if (pair.spec.vocab_size > specs->target.vocab_size)
    return Status(Code::kBadModel, fmt::format("{}: vocab_size {} is less than the {} ids of the tokenizer of {}", config,
                                               specs->target.vocab_size, pair.spec.vocab_size, text_path));
  pair.name = specs->name;
  pair.location = "dummy:" + specs->name;
  pair.spec = specs->target;
  pair.checkpoint = Checkpoint::dummy(pair.location, seed);
  Result<TargetTensors> tensors = bind_target(*pair.checkpoint, &pair.spec);
  if (!tensors.ok()) return tensors.status();
  pair.tensors = std::move(*tensors);
  if (specs->drafter) {
    LoadedDrafter drafter;
    drafter.name = specs->drafter_name;
    drafter.location = "dummy:" + specs->drafter_name;
    drafter.spec = *specs->drafter;
    drafter.checkpoint = Checkpoint::dummy(drafter.location + (drafter.name.ends_with(kDrafter) ? "" : "-dflash"), seed);
    Result<DrafterTensors> of = bind_drafter(*drafter.checkpoint, drafter.spec);
    if (!of.ok()) return of.status();
    drafter.tensors = std::move(*of);
    pair.drafter = std::move(drafter);
  }
  return pair;
}

}  // namespace ddtree
