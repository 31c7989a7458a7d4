#include "model/pair.h"

#include <fmt/core.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "base/log.h"
#include "model/config.h"
#include "model/json_reader.h"

namespace ddtree {
namespace {

using nlohmann::json;

// A text file of a model, copied (the mapping need not stay). No model has a larger one.
constexpr size_t kMaxText = size_t{256} << 20;

Result<std::string> read_text(const ModelSource& source, std::string_view name) {
  Result<FileView> view = source.open(name);
  if (!view.ok()) return view.status();
  if (view->bytes.size() > kMaxText)
    return Status(Code::kBadModel, fmt::format("{}: {} bytes, at most {} are possible", view->path, view->bytes.size(), kMaxText));
  return std::string(view->bytes);
}

std::string path_of(const ModelSource& source, std::string_view name) { return fmt::format("{}/{}", source.location(), name); }

// The id of a token by its exact text, from tokenizer.json's added tokens and vocabulary; -1: none.
Result<int32_t> token_id(const std::string& tokenizer_json, std::string_view file, const std::string& token, int64_t vocab_size) {
  Result<json> parsed = parse_json(tokenizer_json, file);
  if (!parsed.ok()) return parsed.status();
  const auto in_range = [&](const json& id) -> int32_t {
    return id.is_number_unsigned() && id.get<uint64_t>() < static_cast<uint64_t>(vocab_size) ? static_cast<int32_t>(id.get<uint64_t>())
                                                                                             : -1;
  };
  if (!parsed->is_object()) return -1;
  if (const auto added = parsed->find("added_tokens"); added != parsed->end() && added->is_array())
    for (const json& t : *added)
      if (t.is_object() && t.contains("content") && t.contains("id") && t["content"] == token) return in_range(t["id"]);
  if (const auto model = parsed->find("model"); model != parsed->end() && model->is_object())
    if (const auto vocab = model->find("vocab"); vocab != model->end() && vocab->is_object())
      if (const auto it = vocab->find(token); it != vocab->end()) return in_range(*it);
  return -1;
}

// chat_template may be a string or a list of {name, template}; of several, the one that is called "default".
std::string template_in(const json& value) {
  if (value.is_string()) return value.get<std::string>();
  if (value.is_array())
    for (const json& t : value)
      if (t.is_object() && t.contains("name") && t["name"] == "default" && t.contains("template") && t["template"].is_string())
        return t["template"].get<std::string>();
  return "";
}

Status read_template(const ModelSource& source, const json& tokenizer_config, std::string* out) {
  if (source.has("chat_template.jinja")) {
    Result<std::string> text = read_text(source, "chat_template.jinja");
    if (!text.ok()) return text.status();
    *out = std::move(*text);
    return {};
  }
  if (source.has("chat_template.json")) {  // processors of multimodal models keep it there
    Result<std::string> text = read_text(source, "chat_template.json");
    if (!text.ok()) return text.status();
    Result<json> parsed = parse_json(*text, path_of(source, "chat_template.json"));
    if (!parsed.ok()) return parsed.status();
    if (parsed->is_object() && parsed->contains("chat_template")) *out = template_in((*parsed)["chat_template"]);
    if (!out->empty()) return {};
  }
  if (tokenizer_config.contains("chat_template")) *out = template_in(tokenizer_config["chat_template"]);
  return {};
}

// The stop ids in force. config.json's own eos is the end of a document, which never comes in chat; without a generation_config.json the
// tokenizer's eos_token is the better word.
Status read_defaults(const ModelSource& source, const json& tokenizer_config, LoadedPair* pair) {
  if (source.has("generation_config.json")) {
    Result<std::string> text = read_text(source, "generation_config.json");
    if (!text.ok()) return text.status();
    Result<GenerationDefaults> defaults = parse_generation_config(*text, path_of(source, "generation_config.json"), pair->spec.vocab_size);
    if (!defaults.ok()) return defaults.status();
    pair->defaults = std::move(*defaults);
  }
  if (!pair->defaults.eos_ids.empty()) return {};
  if (const auto it = tokenizer_config.find("eos_token"); it != tokenizer_config.end()) {
    const json& token = it->is_object() && it->contains("content") ? (*it)["content"] : *it;
    if (token.is_string()) {
      Result<int32_t> id =
          token_id(pair->tokenizer_json, path_of(source, "tokenizer.json"), token.get<std::string>(), pair->spec.vocab_size);
      if (!id.ok()) return id.status();
      if (*id >= 0) pair->defaults.eos_ids.push_back(*id);
    }
  }
  for (const int32_t id : pair->spec.eos_ids)
    if (std::find(pair->defaults.eos_ids.begin(), pair->defaults.eos_ids.end(), id) == pair->defaults.eos_ids.end())
      pair->defaults.eos_ids.push_back(id);
  log::warn("{}: no eos_token_id in generation_config.json; stop ids come from tokenizer_config.json and config.json: {} found",
            source.location(), pair->defaults.eos_ids.size());
  return {};
}

Result<LoadedDrafter> load_drafter(const std::string& path, const LoadedPair& pair) {
  Result<std::shared_ptr<const ModelSource>> source = open_model_source(path, ModelPart::kDrafter);
  if (!source.ok()) return source.status();
  LoadedDrafter out;
  out.name = path;
  out.location = (*source)->location();
  Result<std::string> config = read_text(**source, "config.json");
  if (!config.ok()) return config.status();
  Result<DrafterSpec> spec = parse_drafter_config(*config, path_of(**source, "config.json"), pair.spec.num_layers());
  if (!spec.ok()) return spec.status();
  out.spec = std::move(*spec);
  if (out.spec.num_target_layers == 0) out.spec.num_target_layers = pair.spec.num_layers();
  if (out.spec.mask_id < 0) {
    Result<int32_t> id = token_id(pair.tokenizer_json, pair.location + "/tokenizer.json", "<|MASK|>", pair.spec.vocab_size);
    if (!id.ok()) return id.status();
    if (*id < 0)
      return Status(Code::kBadModel, fmt::format("{}: dflash_config.mask_token_id is missing, and the target's tokenizer has no <|MASK|> "
                                                 "token; it must be an id of the target",
                                                 path_of(**source, "config.json")));
    out.spec.mask_id = *id;
  }
  if (Status s = check_pair(pair.spec, out.spec); !s.ok())
    return Status(s.code(), fmt::format("{}: {}", path_of(**source, "config.json"), s.message()));
  Result<std::shared_ptr<const Checkpoint>> checkpoint = Checkpoint::open(*source);
  if (!checkpoint.ok()) return checkpoint.status();
  out.checkpoint = std::move(*checkpoint);
  Result<DrafterTensors> tensors = bind_drafter(*out.checkpoint, out.spec);
  if (!tensors.ok()) return tensors.status();
  out.tensors = std::move(*tensors);
  return out;
}

}  // namespace

size_t LoadedPair::bytes() const { return (checkpoint ? checkpoint->bytes() : 0) + (drafter ? drafter->checkpoint->bytes() : 0); }

Result<LoadedPair> load_pair(std::string_view model_path, std::optional<std::string> draft_path) {
  Result<std::shared_ptr<const ModelSource>> opened = open_model_source(model_path, ModelPart::kTarget);
  if (!opened.ok()) return opened.status();
  const ModelSource& source = **opened;
  LoadedPair pair;
  pair.name = std::string(model_path);
  pair.location = source.location();

  Result<std::string> config = read_text(source, "config.json");
  if (!config.ok()) return config.status();
  Result<ModelSpec> spec = parse_model_config(*config, path_of(source, "config.json"));
  if (!spec.ok()) return spec.status();
  pair.spec = std::move(*spec);

  Result<std::string> tokenizer = read_text(source, "tokenizer.json");
  if (!tokenizer.ok()) return tokenizer.status();
  pair.tokenizer_json = std::move(*tokenizer);
  pair.tokenizer_config_json = "{}";
  if (source.has("tokenizer_config.json")) {
    Result<std::string> text = read_text(source, "tokenizer_config.json");
    if (!text.ok()) return text.status();
    pair.tokenizer_config_json = std::move(*text);
  }
  const std::string tokenizer_config_path = path_of(source, "tokenizer_config.json");
  Result<json> tokenizer_config = parse_json(pair.tokenizer_config_json, tokenizer_config_path);
  if (!tokenizer_config.ok()) return tokenizer_config.status();
  if (!tokenizer_config->is_object())
    return Status(Code::kBadModel, fmt::format("{}: it is {}, expected an object", tokenizer_config_path, json_text(*tokenizer_config)));
  DDTREE_RETURN_IF_ERROR(read_template(source, *tokenizer_config, &pair.chat_template));
  DDTREE_RETURN_IF_ERROR(read_defaults(source, *tokenizer_config, &pair));

  Result<std::shared_ptr<const Checkpoint>> checkpoint = Checkpoint::open(*opened);
  if (!checkpoint.ok()) return checkpoint.status();
  pair.checkpoint = std::move(*checkpoint);
  Result<TargetTensors> tensors = bind_target(*pair.checkpoint, &pair.spec);
  if (!tensors.ok()) return tensors.status();
  pair.tensors = std::move(*tensors);

  if (!draft_path && names_embedded_pair(model_path)) draft_path = std::string(kEmbeddedPair);
  if (draft_path && !draft_path->empty()) {
    Result<LoadedDrafter> drafter = load_drafter(*draft_path, pair);
    if (!drafter.ok()) return drafter.status();
    pair.drafter = std::move(*drafter);
  }
  return pair;
}

}  // namespace ddtree
