#include "model/source.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <fmt/ranges.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <optional>

#include "base/embedded.h"
#include "model/open_file.h"

namespace ddtree {
namespace {

namespace fs = std::filesystem;

std::string list_text(const std::vector<std::string>& names) {
  constexpr size_t kShown = 12;
  if (names.empty()) return "nothing";
  const std::vector<std::string> shown(names.begin(), names.begin() + static_cast<std::ptrdiff_t>(std::min(kShown, names.size())));
  std::string text = fmt::format("{}", fmt::join(shown, ", "));
  if (names.size() > kShown) text += fmt::format(" and {} more", names.size() - kShown);
  return text;
}

Status no_file(const ModelSource& source, std::string_view name) {
  return Status(Code::kBadModel, fmt::format("{} has no {:.200}; found: {}", source.location(), name, list_text(source.names())));
}

// Entries of a folder, sorted; empty where it cannot be read.
std::vector<std::string> entries(const fs::path& folder, bool files, bool folders) {
  std::vector<std::string> out;
  std::error_code error;
  for (fs::directory_iterator it(folder, error), end; !error && it != end; it.increment(error)) {
    std::error_code kind;
    if ((files && it->is_regular_file(kind)) || (folders && it->is_directory(kind)))
      out.push_back(it->path().filename().string() + (files && folders && it->is_directory(kind) ? "/" : ""));
  }
  std::sort(out.begin(), out.end());
  return out;
}

struct Mapping {
  void* address;
  size_t size;
  ~Mapping() { munmap(address, size); }
};

class FolderSource : public ModelSource {
 public:
  explicit FolderSource(std::string folder) : folder_(std::move(folder)), names_(entries(folder_, true, false)) {}
  const std::string& location() const override { return folder_; }
  std::vector<std::string> names() const override { return names_; }
  bool has(std::string_view name) const override { return std::binary_search(names_.begin(), names_.end(), name); }

  Result<FileView> open(std::string_view name) const override {
    if (!has(name)) return no_file(*this, name);  // also whatever is no plain name: "../x", "a/b"
    FileView view;
    view.path = folder_ + "/" + std::string(name);
    const auto failed = [&] { return Status(Code::kBadModel, fmt::format("{}: cannot be read: {}", view.path, std::strerror(errno))); };
    const int fd = ::open(view.path.c_str(), O_RDONLY | O_CLOEXEC);
    if (fd < 0) return failed();
    struct stat info {};
    if (fstat(fd, &info) != 0) {
      const Status status = failed();
      close(fd);
      return status;
    }
    const size_t size = static_cast<size_t>(info.st_size);
    if (size == 0) {  // mmap refuses an empty range
      close(fd);
      return view;
    }
    void* address = mmap(nullptr, size, PROT_READ, MAP_PRIVATE, fd, 0);
    if (address == MAP_FAILED) {
      const Status status = failed();
      close(fd);
      return status;
    }
    view.owner = std::make_shared<Mapping>(address, size);
    view.bytes = std::string_view(static_cast<const char*>(address), size);
    view.on_disk = std::make_shared<OpenFile>(view.path, fd, size, int64_t{info.st_mtim.tv_sec} * 1'000'000'000 + info.st_mtim.tv_nsec);
    return view;
  }

 private:
  std::string folder_;
  std::vector<std::string> names_;
};

class EmbeddedSource : public ModelSource {
 public:
  explicit EmbeddedSource(std::string prefix) : prefix_(std::move(prefix)), location_("embedded:" + prefix_) {
    if (location_.ends_with('/')) location_.pop_back();
    for (const std::string_view name : embedded_files(prefix_)) {
      const std::string_view rest = name.substr(prefix_.size());
      if (rest.find('/') == std::string_view::npos) names_.emplace_back(rest);
    }
    std::sort(names_.begin(), names_.end());
  }
  const std::string& location() const override { return location_; }
  std::vector<std::string> names() const override { return names_; }
  bool has(std::string_view name) const override { return std::binary_search(names_.begin(), names_.end(), name); }

  Result<FileView> open(std::string_view name) const override {
    const std::optional<std::string_view> bytes = has(name) ? embedded_file(prefix_ + std::string(name)) : std::nullopt;
    if (!bytes) return no_file(*this, name);
    return FileView{fmt::format("{}/{}", location_, name), *bytes, nullptr};
  }

 private:
  std::string prefix_, location_;
  std::vector<std::string> names_;
};

// "ORG/NAME" as the hub allows it. "./x", "/x" and "a/b/c" are paths, never ids.
bool is_hub_id(std::string_view path) {
  const size_t slash = path.find('/');
  if (slash == std::string_view::npos || slash == 0 || slash + 1 == path.size()) return false;
  for (size_t i = 0; i < path.size(); ++i) {
    const char c = path[i];
    const bool alnum = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9');
    if (i != slash && !alnum && c != '-' && c != '_' && c != '.') return false;
  }
  return path.front() != '.' && path[slash + 1] != '.';
}

std::string environment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

// The hub's cache, by the same variables and in the same order as its own library.
fs::path hub_cache() {
  for (const char* name : {"HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"})
    if (std::string v = environment(name); !v.empty()) return v;
  if (std::string v = environment("HF_HOME"); !v.empty()) return fs::path(v) / "hub";
  if (std::string v = environment("XDG_CACHE_HOME"); !v.empty()) return fs::path(v) / "huggingface/hub";
  return fs::path(environment("HOME")) / ".cache/huggingface/hub";
}

// The revision in refs/main; empty where there is none. It is one path component, whatever the file says.
std::string main_revision(const fs::path& refs_main) {
  std::FILE* file = std::fopen(refs_main.c_str(), "r");
  if (file == nullptr) return "";
  char text[129] = {};
  const size_t size = std::fread(text, 1, sizeof text - 1, file);
  std::fclose(file);
  std::string revision(text, size);
  while (!revision.empty() && std::isspace(static_cast<unsigned char>(revision.back()))) revision.pop_back();
  const bool plain = std::all_of(revision.begin(), revision.end(), [](unsigned char c) { return std::isalnum(c) || c == '-' || c == '_'; });
  return plain ? revision : "";
}

Result<std::string> cached_snapshot(std::string_view id) {
  std::string folder = "models--" + std::string(id);
  folder.replace(folder.find('/'), 1, "--");
  const fs::path model = hub_cache() / folder;
  std::error_code error;
  if (!fs::is_directory(model / "snapshots", error))
    return Status(Code::kBadModel,
                  fmt::format("{}: no such folder, and not in the local Hugging Face cache ({}). ddtree does not download models: run "
                              "`huggingface-cli download {}` first, or give the path of a folder that holds config.json, tokenizer.json "
                              "and the safetensors files",
                              id, hub_cache().string(), id));
  const std::vector<std::string> snapshots = entries(model / "snapshots", false, true);
  std::string revision = main_revision(model / "refs/main");
  if (revision.empty() && snapshots.size() == 1) revision = snapshots[0];  // downloaded with --revision: no refs/main
  if (revision.empty())
    return Status(Code::kBadModel, fmt::format("{}: {} names no revision in refs/main; snapshots found: {}. Give the path of one of them",
                                               id, model.string(), list_text(snapshots)));
  if (!std::binary_search(snapshots.begin(), snapshots.end(), revision))
    return Status(Code::kBadModel,
                  fmt::format("{}: {} wants snapshot {}, which is not there; snapshots found: {}. Run `huggingface-cli download {}` again",
                              id, (model / "refs/main").string(), revision, list_text(snapshots), id));
  return (model / "snapshots" / revision).string();
}

}  // namespace

bool names_embedded_pair(std::string_view path) { return path == kEmbeddedPair || path == "embedded:tiny"; }

std::shared_ptr<const ModelSource> embedded_source(std::string prefix) { return std::make_shared<EmbeddedSource>(std::move(prefix)); }

Result<std::shared_ptr<const ModelSource>> open_model_source(std::string_view path, ModelPart part) {
  if (path.empty())
    return Status(Code::kBadModel, "the model path is empty; give a folder, ORG/NAME from the local Hugging Face cache, or tiny");
  if (path.find('\0') != std::string_view::npos) return Status(Code::kBadModel, "the model path holds a zero byte; give a folder");
  if (names_embedded_pair(path)) {
    auto source = embedded_source(part == ModelPart::kTarget ? "models/tiny/target/" : "models/tiny/draft/");
    if (source->names().empty())
      return Status(Code::kBadModel,
                    fmt::format("{}: this executable was built without the embedded pair (DDTREE_EMBED_PAIR=OFF); give a folder", path));
    return source;
  }
  std::string folder(path);
  if (path.starts_with("~/")) folder = environment("HOME") + folder.substr(1);
  while (folder.size() > 1 && folder.ends_with('/')) folder.pop_back();
  std::error_code error;
  const fs::file_status status = fs::status(folder, error);
  if (!fs::exists(status)) {
    if (fs::is_symlink(fs::symlink_status(folder, error)))
      return Status(Code::kBadModel, fmt::format("{}: a link to something that is not there", path));
    if (is_hub_id(path)) {
      Result<std::string> snapshot = cached_snapshot(path);
      if (!snapshot.ok()) return snapshot.status();
      folder = *snapshot;
    } else {
      const fs::path parent = fs::path(folder).has_parent_path() ? fs::path(folder).parent_path() : fs::path(".");
      const bool there = fs::is_directory(parent, error);
      return Status(Code::kBadModel, fmt::format("{}: no such folder; {} {}", path, parent.string(),
                                                 there ? "holds: " + list_text(entries(parent, true, true)) : "does not exist either"));
    }
  } else if (!fs::is_directory(status)) {
    return Status(
        Code::kBadModel,
        fmt::format("{}: a file, not a folder; give the folder that holds config.json, tokenizer.json and the safetensors files", path));
  }
  auto source = std::make_shared<FolderSource>(folder);
  if (!source->has("config.json")) {
    std::string hint;
    if (const fs::path inside = fs::path(folder) / (part == ModelPart::kTarget ? "target" : "draft");
        fs::exists(inside / "config.json", error))
      hint = fmt::format("; did you mean {}?", inside.string());
    else if (const std::vector<std::string> names = source->names();
             std::any_of(names.begin(), names.end(), [](const std::string& n) { return n.ends_with(".gguf"); }))
      hint = "; GGUF files are not read, the safetensors checkpoint is";
    return Status(Code::kBadModel, fmt::format("{} has no config.json; found: {}{}", folder, list_text(entries(folder, true, true)), hint));
  }
  return std::shared_ptr<const ModelSource>(std::move(source));
}

}  // namespace ddtree
