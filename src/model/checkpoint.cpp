#include "model/checkpoint.h"

#include <fmt/core.h>

#include <algorithm>
#include <functional>
#include <nlohmann/json.hpp>
#include <set>

#include "model/json_reader.h"
#include "model/safetensors.h"

namespace ddtree {
namespace {

constexpr std::string_view kSingle = "model.safetensors", kIndex = "model.safetensors.index.json";

bool is_vision(std::string_view name) { return name.starts_with("model.visual.") || name.starts_with("visual."); }

}  // namespace

Status Checkpoint::read_file(const std::string& name) {
  Result<FileView> opened = source_->open(name);
  if (!opened.ok()) return opened.status();
  const auto file = files_.emplace(name, std::move(*opened)).first;
  Result<std::vector<NamedTensor>> parsed = parse_safetensors(file->second.bytes, file->second.path);
  if (!parsed.ok()) return parsed.status();
  for (NamedTensor& t : *parsed) {
    if (is_vision(t.name)) {
      ++skipped_;
      continue;
    }
    const auto [entry, added] = tensors_.emplace(std::move(t.name), std::move(t.view));
    if (!added)
      return Status(Code::kBadModel, fmt::format("{}: tensor {} is also in {}; it must be in one file only", file->second.path,
                                                 entry->first, entry->second.file));
    entry->second.file = file->first;
    entry->second.name = entry->first;
    entry->second.on_disk = file->second.on_disk.get();
    entry->second.offset = static_cast<uint64_t>(entry->second.data - reinterpret_cast<const std::byte*>(file->second.bytes.data()));
    bytes_ += entry->second.bytes;
  }
  return {};
}

Status Checkpoint::read_index() {
  Result<FileView> opened = source_->open(kIndex);
  if (!opened.ok()) return opened.status();
  const std::string& path = opened->path;
  Result<nlohmann::json> index = parse_json(opened->bytes, path);
  if (!index.ok()) return index.status();
  const auto map = index->is_object() ? index->find("weight_map") : index->end();
  if (!index->is_object() || map == index->end() || !map->is_object())
    return Status(Code::kBadModel, fmt::format("{}: no weight_map, expected an object from tensor names to file names", path));
  std::map<std::string, std::string> shard_of;
  std::set<std::string> shards;
  for (const auto& [tensor, shard] : map->items()) {
    if (!shard.is_string())
      return Status(Code::kBadModel, fmt::format("{}: weight_map.{:.512} is {}, expected a file name", path, tensor, json_text(shard)));
    if (is_vision(tensor)) continue;
    if (tensor.size() > 512)
      return Status(Code::kBadModel, fmt::format("{}: a tensor name of {} bytes, at most 512 are possible", path, tensor.size()));
    const std::string& name = shard.get_ref<const std::string&>();
    if (!source_->has(name)) {
      // The message of open() lists what is there; the index says who wants it.
      return Status(Code::kBadModel, fmt::format("{}: tensor {} is in {}, which is missing: {}", path, tensor, json_text(shard),
                                                 source_->open(name).status().message()));
    }
    shard_of.emplace(tensor, name);
    shards.insert(name);
  }
  if (shards.empty()) return Status(Code::kBadModel, fmt::format("{}: weight_map names no text tensor", path));
  for (const std::string& shard : shards) DDTREE_RETURN_IF_ERROR(read_file(shard));
  for (const auto& [tensor, shard] : shard_of) {
    const TensorView* view = find(tensor);
    if (view == nullptr)
      return Status(Code::kBadModel, fmt::format("{}: tensor {} should be in {}, but that file does not hold it", path, tensor, shard));
    if (view->file != shard)
      return Status(Code::kBadModel, fmt::format("{}: tensor {} should be in {}, but it is in {}", path, tensor, shard, view->file));
  }
  return {};
}

Result<std::shared_ptr<const Checkpoint>> Checkpoint::open(std::shared_ptr<const ModelSource> source) {
  std::shared_ptr<Checkpoint> checkpoint(new Checkpoint);
  checkpoint->source_ = std::move(source);
  const ModelSource& files = *checkpoint->source_;
  // With both, the index wins, as in the serving engines people come from: the single file may be a leftover of a conversion.
  if (files.has(kIndex)) {
    DDTREE_RETURN_IF_ERROR(checkpoint->read_index());
  } else if (files.has(kSingle)) {
    DDTREE_RETURN_IF_ERROR(checkpoint->read_file(std::string(kSingle)));
  } else {
    const Status status = files.open(kSingle).status();
    return Status(Code::kBadModel, fmt::format("{} (nor {})", status.message(), kIndex));
  }
  return std::shared_ptr<const Checkpoint>(std::move(checkpoint));
}

std::shared_ptr<const Checkpoint> Checkpoint::dummy(std::string location, uint32_t seed) {
  std::shared_ptr<Checkpoint> checkpoint(new Checkpoint);
  checkpoint->location_ = std::move(location);
  checkpoint->seed_ = std::max(seed, uint32_t{1});
  return checkpoint;
}

TensorView Checkpoint::make(const std::string& name, const std::vector<int64_t>& shape) const {
  static constexpr std::byte kNothing{};
  const auto [entry, added] = tensors_.emplace(name, TensorView{});
  TensorView& view = entry->second;
  if (!added) return view;
  int64_t elements = 1;
  for (const int64_t n : shape) elements *= n;
  view.shape = shape;
  view.data = &kNothing;
  view.bytes = static_cast<size_t>(elements) * 2;
  view.file = "dummy", view.name = entry->first;
  const auto has = [&](std::string_view part) { return name.find(part) != std::string::npos; };
  Fill& fill = view.fill;
  fill.seed = std::max(static_cast<uint32_t>(std::hash<std::string>()(name)) ^ seed_, uint32_t{1});
  // Norms that are used as they stand are near 1, zero-centred ones near 0; decays of a tenth to a half a token; the rest as initialised
  // (a standard deviation of 0.02).
  const bool plain = has("linear_attn.norm") || location_.ends_with("-dflash") || name == "hidden_norm.weight";
  if (has("norm")) fill.centre = plain ? 1.0f : 0.0f, fill.spread = 0.1f;
  else if (has("A_log")) fill.centre = -1.0f, fill.spread = 1.0f;
  else if (has("dt_bias")) fill.centre = -1.0f, fill.spread = 1.0f;
  else if (has("conv1d")) fill.spread = 0.5f;
  else fill.spread = 0.0346f;
  bytes_ += view.bytes;
  return view;
}

const TensorView* Checkpoint::find(std::string_view name) const {
  const auto it = tensors_.find(name);
  return it == tensors_.end() ? nullptr : &it->second;
}

}  // namespace ddtree
