// All tensors of one checkpoint: model.safetensors, or the shards that model.safetensors.index.json names.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "model/source.h"
#include "model/tensor.h"

namespace ddtree {

class Checkpoint {
 public:
  // Maps the files and checks every header against its file (safetensors.h). Tensors of the vision tower (visual.*, model.visual.*)
  // are not listed, and a shard that holds nothing else is not opened. kBadModel: no checkpoint, an index that names a missing shard or a
  // tensor its shard has not, a tensor in two shards, a broken header.
  static Result<std::shared_ptr<const Checkpoint>> open(std::shared_ptr<const ModelSource> source);

  // One without files, for speed and memory measured without them: every tensor that is asked for by make() exists, with seeded random
  // values (Fill) around those of a trained model's kind, so that 64 layers stay finite.
  static std::shared_ptr<const Checkpoint> dummy(std::string location, uint32_t seed);
  bool is_dummy() const { return seed_ != 0; }
  TensorView make(const std::string& name, const std::vector<int64_t>& shape) const;  // is_dummy() only

  Checkpoint(const Checkpoint&) = delete;  // views point into it
  Checkpoint& operator=(const Checkpoint&) = delete;

  const TensorView* find(std::string_view name) const;  // null: no such tensor. Valid as long as the checkpoint
  const std::map<std::string, TensorView, std::less<>>& tensors() const { return tensors_; }
  const std::string& location() const { return source_ ? source_->location() : location_; }
  size_t bytes() const { return bytes_; }      // of all listed tensors
  size_t skipped() const { return skipped_; }  // tensors of the vision tower

 private:
  Checkpoint() = default;
  Status read_file(const std::string& name);
  Status read_index();

  std::shared_ptr<const ModelSource> source_;
  std::map<std::string, FileView, std::less<>> files_;              // by name; the views' `file` points at these keys
  mutable std::map<std::string, TensorView, std::less<>> tensors_;  // mutable: a dummy's are made when asked for
  mutable size_t bytes_ = 0;
  size_t skipped_ = 0;
  std::string location_;
  uint32_t seed_ = 0;
};

}  // namespace ddtree
