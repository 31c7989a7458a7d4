// Where files come from: folders, the Hugging Face cache, the executable; and what a wrong path is told.
#include "model/source.h"

#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <cstdlib>
#include <optional>

#include "support/safetensors_writer.h"

using namespace ddtree;
using namespace ddtree::test;
using Catch::Matchers::ContainsSubstring;

namespace {

class Environment {  // sets a variable, restores it afterwards
 public:
  Environment(const char* name, const char* value) : name_(name) {
    if (const char* old = std::getenv(name)) old_ = old;
    if (value != nullptr) setenv(name, value, 1);
    else unsetenv(name);
  }
  ~Environment() {
    if (old_) setenv(name_, old_->c_str(), 1);
    else unsetenv(name_);
  }

 private:
  const char* name_;
  std::optional<std::string> old_;
};

std::string error_of(const std::string& path, ModelPart part = ModelPart::kTarget) {
  Result<std::shared_ptr<const ModelSource>> r = open_model_source(path, part);
  if (!r.ok()) CHECK(r.status().code() == Code::kBadModel);
  return r.ok() ? "accepted" : r.status().message();
}

}  // namespace

TEST_CASE("a folder: names, bytes that outlive the source, empty files, what is not there") {
  const TemporaryFolder folder;
  write_file(folder.path() / "config.json", "{}");
  write_file(folder.path() / "empty", "");
  write_file(folder.path() / "sub/hidden", "x");
  Result<std::shared_ptr<const ModelSource>> source = open_model_source(folder.path().string() + "//", ModelPart::kTarget);
  REQUIRE(source.ok());
  CHECK((*source)->location() == folder.path().string());
  CHECK((*source)->names() == std::vector<std::string>{"config.json", "empty"});
  FileView view = *(*source)->open("config.json");
  CHECK((*source)->open("empty")->bytes.empty());
  for (const char* name : {"sub", "sub/hidden", "../config.json", "", "nothing"}) {
    INFO(name);
    CHECK_FALSE((*source)->has(name));
    CHECK((*source)->open(name).status().message() == folder.path().string() + " has no " + name + "; found: config.json, empty");
  }
  source = Result<std::shared_ptr<const ModelSource>>(std::shared_ptr<const ModelSource>());
  std::filesystem::remove(folder.path() / "config.json");
  CHECK(view.bytes == "{}");
}

TEST_CASE("paths that are no model are told why") {
  const TemporaryFolder folder;
  write_file(folder.path() / "pair/target/config.json", "{}");
  write_file(folder.path() / "pair/draft/config.json", "{}");
  write_file(folder.path() / "gguf/model.gguf", "");
  write_file(folder.path() / "file", "");
  CHECK_THAT(error_of(""), ContainsSubstring("the model path is empty"));
  CHECK(error_of(folder / "missing") == folder / "missing" + ": no such folder; " + folder.path().string() + " holds: file, gguf/, pair/");
  CHECK_THAT(error_of(folder / "no/such/place"), ContainsSubstring("no/such does not exist either"));
  CHECK_THAT(error_of(folder / "file"), ContainsSubstring("a file, not a folder"));
  CHECK_THAT(error_of(folder / "pair"),
             ContainsSubstring("has no config.json; found: draft/, target/; did you mean " + folder / "pair/target" + "?"));
  CHECK_THAT(error_of(folder / "pair", ModelPart::kDrafter), ContainsSubstring("did you mean " + folder / "pair/draft" + "?"));
  CHECK_THAT(error_of(folder / "gguf"), ContainsSubstring("GGUF files are not read"));
  std::filesystem::create_symlink("nowhere", folder.path() / "link");
  CHECK_THAT(error_of(folder / "link"), ContainsSubstring("a link to something that is not there"));
  CHECK_THAT(error_of(std::string("a\0b", 3)), ContainsSubstring("zero byte"));
}

TEST_CASE("a hub id is looked up in the local cache, through refs/main, and never downloaded") {
  const TemporaryFolder home;
  const Environment a("HF_HUB_CACHE", nullptr), b("HUGGINGFACE_HUB_CACHE", nullptr), c("HF_HOME", nullptr), d("XDG_CACHE_HOME", nullptr);
  const Environment e("HOME", home.path().c_str());
  const std::string id = "Qwen/Qwen3.6-27B";
  CHECK_THAT(error_of(id), ContainsSubstring(id + ": no such folder, and not in the local Hugging Face cache (" +
                                             home / ".cache/huggingface/hub" + ")") &&
                               ContainsSubstring("does not download models: run `huggingface-cli download " + id + "`"));

  const std::filesystem::path model = home.path() / ".cache/huggingface/hub/models--Qwen--Qwen3.6-27B";
  // The cache's snapshots are links into blobs/.
  write_file(model / "blobs/cafe", "{\"x\":1}");
  std::filesystem::create_directories(model / "snapshots/6a9e13bd");
  std::filesystem::create_symlink("../../blobs/cafe", model / "snapshots/6a9e13bd/config.json");
  Result<std::shared_ptr<const ModelSource>> source = open_model_source(id, ModelPart::kTarget);
  REQUIRE(source.status().message() == "");  // one snapshot, no refs/main
  CHECK((*source)->open("config.json")->bytes == "{\"x\":1}");

  write_file(model / "snapshots/0123abcd/config.json", "{}");
  CHECK_THAT(error_of(id), ContainsSubstring("names no revision in refs/main; snapshots found: 0123abcd, 6a9e13bd"));
  write_file(model / "refs/main", "0123abcd\n");
  CHECK((*open_model_source(id, ModelPart::kTarget))->location() == (model / "snapshots/0123abcd").string());
  write_file(model / "refs/main", "ffff");
  CHECK_THAT(error_of(id), ContainsSubstring("wants snapshot ffff, which is not there; snapshots found: 0123abcd, 6a9e13bd"));
  write_file(model / "refs/main", "../../../..");
  CHECK_THAT(error_of(id), ContainsSubstring("names no revision in refs/main"));

  write_file(model / "refs/main", "0123abcd");
  const TemporaryFolder other;
  {
    const Environment f("HF_HOME", other.path().c_str());
    CHECK_THAT(error_of(id), ContainsSubstring("(" + other / "hub" + ")"));
    const Environment g("HF_HUB_CACHE", (home / ".cache/huggingface/hub").c_str());
    CHECK(error_of(id) == "accepted");
  }
  CHECK_THAT(error_of("Qwen/Qwen3/6"), ContainsSubstring("no such folder; Qwen/Qwen3 does not exist either"));
  CHECK_THAT(error_of("../x"), ContainsSubstring("no such folder"));
}

TEST_CASE("the embedded pair") {
  for (const char* name : {"tiny", "embedded:tiny"}) {
    CHECK((*open_model_source(name, ModelPart::kTarget))->has("tokenizer.json"));
    CHECK((*open_model_source(name, ModelPart::kDrafter))->has("model.safetensors"));
  }
  const std::shared_ptr<const ModelSource> none = embedded_source("models/none/");
  CHECK(none->names().empty());
  CHECK_THAT(none->open("config.json").status().message(), ContainsSubstring("embedded:models/none has no config.json; found: nothing"));
}
