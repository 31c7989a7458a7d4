// Where a model's files come from: a folder on disk (mapped read-only) or a prefix of the files inside the executable.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace ddtree {

class OpenFile;

// The bytes of one file. Copies share the mapping, which lives until the last copy goes.
struct FileView {
  std::string path;  // for messages: the path on disk, or "embedded:…"
  std::string_view bytes;
  std::shared_ptr<const void> owner;        // null for embedded files, which live as long as the process
  std::shared_ptr<const OpenFile> on_disk;  // the same file for reading without the mapping; null for embedded files and empty ones
};

class ModelSource {
 public:
  virtual ~ModelSource() = default;

  virtual const std::string& location() const = 0;     // "/models/x", "embedded:models/tiny/target"
  virtual std::vector<std::string> names() const = 0;  // plain file names, sorted; no folders
  virtual bool has(std::string_view name) const = 0;

  // kBadModel: no such file (saying what is there), not a plain name, or unreadable (with the system's reason).
  // The mapping reads the file as it is: a file that is truncated while served ends the process (SIGBUS), as with any mmap.
  virtual Result<FileView> open(std::string_view name) const = 0;
};

enum class ModelPart { kTarget, kDrafter };

inline constexpr std::string_view kEmbeddedPair = "tiny";  // also "embedded:tiny"
bool names_embedded_pair(std::string_view path);

// `path` is, in this order: "tiny" or "embedded:tiny" (that part of the pair inside the executable); a folder; a Hugging Face id
// "ORG/NAME" whose snapshot is in the local cache ($HF_HUB_CACHE, $HF_HOME/hub, $XDG_CACHE_HOME/huggingface/hub or
// ~/.cache/huggingface/hub). Nothing is ever downloaded. kBadModel with what was found and what would work.
Result<std::shared_ptr<const ModelSource>> open_model_source(std::string_view path, ModelPart part);

// The files under a prefix of the embedded ones ("models/tiny/target/"). For tests; open_model_source is for users.
std::shared_ptr<const ModelSource> embedded_source(std::string prefix);

}  // namespace ddtree
