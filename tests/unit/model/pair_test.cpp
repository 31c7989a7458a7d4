// load_pair on folders: good ones in every layout, and one broken thing at a time, with the message a user sees.
#include "model/pair.h"

#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>

#include "model/describe.h"
#include "support/small_model.h"

using namespace ddtree;
using namespace ddtree::test;
using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::EndsWith;
using nlohmann::json;

namespace {

// The message of loading `model` (with `drafter`), "accepted" if it loads.
std::string error_of(const SmallModel& model, const SmallDrafter* drafter = nullptr, size_t shards = 1) {
  const TemporaryFolder folder;
  model.write(folder.path() / "target", shards);
  if (drafter != nullptr) drafter->write(folder.path() / "draft");
  Result<LoadedPair> r = load_pair(folder / "target", drafter != nullptr ? std::optional<std::string>(folder / "draft") : std::nullopt);
  if (r.ok()) return "accepted";
  CHECK(r.status().code() == Code::kBadModel);
  std::string message = r.status().message();  // the folder's name is random
  for (size_t at; (at = message.find(folder.path().string())) != std::string::npos;)
    message.replace(at, folder.path().string().size(), "DIR");
  return message;
}

const std::string kLayer0 = "model.language_model.layers.0.", kLayer1 = "model.language_model.layers.1.";

}  // namespace

TEST_CASE("a small model loads from one file, from shards, and under the flat prefix") {
  const TemporaryFolder folder;
  SmallModel model;
  model.write(folder.path() / "one");
  model.write(folder.path() / "three", 3);
  SmallModel flat;
  flat.tensors = small_tensors("model.");
  flat.config = model.config["text_config"];
  flat.config["architectures"] = {"Qwen3_5ForCausalLM"};
  flat.write(folder.path() / "flat");
  SmallDrafter().write(folder.path() / "draft");
  for (const char* name : {"one", "three", "flat"}) {
    INFO(name);
    Result<LoadedPair> r = load_pair(folder / name, folder / "draft");
    REQUIRE(r.status().message() == "");
    const LoadedPair p = std::move(*r);
    CHECK(p.spec.num_layers() == 3);
    CHECK(p.spec.rotary_dim == 4);
    CHECK(p.spec.conv_channels() == 56);
    CHECK_FALSE(p.tensors.tied_head);
    CHECK(p.tensors.lm_head.name == "lm_head.weight");
    CHECK(p.tensors.layers[0].delta.in_proj_qkv.shape == std::vector<int64_t>{56, 20});
    CHECK_FALSE(p.tensors.layers[0].attention.q_proj.present());
    CHECK(p.tensors.layers[1].attention.q_proj.shape == std::vector<int64_t>{192, 20});
    CHECK(p.has_mtp());
    CHECK(p.checkpoint->skipped() == 1);
    CHECK(p.checkpoint->find("model.visual.patch_embed.proj.weight") == nullptr);
    CHECK(p.chat_template == "{{ messages[0].content }}");
    CHECK(p.defaults.eos_ids == std::vector<int32_t>{80, 81});
    REQUIRE(p.drafter);
    CHECK(p.drafter->tensors.layers.size() == 2);
    CHECK(p.drafter->spec.taps == std::vector<int32_t>{0, 2});  // tap 2 is the last layer: legal
    CHECK_THAT(describe(p), ContainsSubstring("3 layers (2 gated-delta + 1 full), hidden 20"));
  }
}

TEST_CASE("weights may be BF16, F16 or F32, each tensor its own") {
  SmallModel model;
  model.tensors[kLayer0 + "linear_attn.A_log"].dtype = "F32";
  model.tensors[kLayer1 + "self_attn.k_proj.weight"].dtype = "F16";
  CHECK(error_of(model) == "accepted");
}

TEST_CASE("every tensor of the small model and drafter: missing, wrongly shaped, wrongly typed, truncated") {
  const SmallModel whole;
  for (const auto& [name, tensor] : whole.tensors) {
    if (name.starts_with("model.visual.")) continue;
    INFO(name);
    SmallModel model = whole;
    model.tensors.erase(name);
    // Without lm_head.weight only an untied model is broken; without any mtp.* tensor the model loads without MTP (below).
    CHECK_THAT(error_of(model), ContainsSubstring("DIR/target: tensor " + name + " is missing, expected " + shape_text(tensor.shape)));
    model = whole;
    model.tensors[name].shape.back() += 1;
    CHECK_THAT(error_of(model), ContainsSubstring("DIR/target/model.safetensors: tensor " + name + ": shape " +
                                                  shape_text(model.tensors[name].shape) + ", expected " + shape_text(tensor.shape)));
    model = whole;
    model.tensors[name].dtype = "F64";
    model.tensors[name].data.assign(static_cast<size_t>(element_count(tensor.shape)) * 8, '\0');
    CHECK_THAT(error_of(model),
               ContainsSubstring("DIR/target/model.safetensors: tensor " + name + ": dtype F64, expected BF16, F16 or F32"));
    model = whole;
    model.tensors[name].data.assign(static_cast<size_t>(element_count(tensor.shape)) * 2 - 2, '\0');
    CHECK_THAT(error_of(model),
               ContainsSubstring("DIR/target/model.safetensors: tensor " + name + ": ") && ContainsSubstring(" bytes of data, but BF16 "));
  }
  const SmallDrafter drafter_whole;
  for (const auto& [name, tensor] : drafter_whole.tensors) {
    INFO(name);
    SmallDrafter drafter = drafter_whole;
    drafter.tensors.erase(name);
    CHECK_THAT(error_of(whole, &drafter),
               ContainsSubstring("DIR/draft: tensor " + name + " is missing, expected " + shape_text(tensor.shape)));
    drafter = drafter_whole;
    drafter.tensors[name].shape[0] += 1;
    CHECK_THAT(error_of(whole, &drafter), ContainsSubstring("DIR/draft/model.safetensors: tensor " + name + ": shape "));
  }
}

TEST_CASE("a file that is cut anywhere is refused") {
  const TemporaryFolder folder;
  SmallModel().write(folder.path());
  const std::string bytes = read_file(folder.path() / "model.safetensors");
  for (size_t size = 0; size < bytes.size(); size += 1 + bytes.size() / 50) {
    write_file(folder.path() / "model.safetensors", std::string_view(bytes).substr(0, size));
    Result<LoadedPair> r = load_pair(folder.path().string());
    REQUIRE_FALSE(r.ok());
    CHECK_THAT(r.status().message(), ContainsSubstring("model.safetensors"));
  }
}

TEST_CASE("shards and index that do not fit each other") {
  const TemporaryFolder folder;
  const SmallModel model;
  model.write(folder.path(), 3);
  const std::filesystem::path index = folder.path() / "model.safetensors.index.json",
                              second = folder.path() / "model-00002-of-00003.safetensors";
  const json good = json::parse(read_file(index));
  const auto message = [&](const json& content) {
    write_file(index, content.dump());
    return load_pair(folder.path().string()).status().message();
  };
  CHECK(message(good).empty());

  json broken = good;
  broken["weight_map"]["lm_head.weight"] = "model-00009-of-00003.safetensors";
  CHECK_THAT(message(broken),
             ContainsSubstring("index.json: tensor lm_head.weight is in \"model-00009-of-00003.safetensors\", which is missing") &&
                 ContainsSubstring("model-00001-of-00003.safetensors"));
  broken["weight_map"]["lm_head.weight"] = "../../etc/passwd";
  CHECK_THAT(message(broken), ContainsSubstring("tensor lm_head.weight is in \"../../etc/passwd\", which is missing"));
  broken = good;
  broken["weight_map"]["model.language_model.layers.9.extra"] = "model-00001-of-00003.safetensors";
  CHECK_THAT(
      message(broken),
      ContainsSubstring(
          "tensor model.language_model.layers.9.extra should be in model-00001-of-00003.safetensors, but that file does not hold it"));
  broken = good;
  broken["weight_map"]["mtp.norm.weight"] = good["weight_map"]["mtp.norm.weight"] == "model-00001-of-00003.safetensors"
                                                ? "model-00002-of-00003.safetensors"
                                                : "model-00001-of-00003.safetensors";
  CHECK_THAT(message(broken), ContainsSubstring("tensor mtp.norm.weight should be in ") && ContainsSubstring(", but it is in "));
  CHECK_THAT(message({{"weight_map", 5}}), ContainsSubstring("no weight_map, expected an object from tensor names to file names"));
  CHECK_THAT(message({{"weight_map", json::object()}}), ContainsSubstring("weight_map names no text tensor"));
  broken = good;
  broken["weight_map"]["mtp.norm.weight"] = 3;
  CHECK_THAT(message(broken), ContainsSubstring("weight_map.mtp.norm.weight is 3, expected a file name"));

  const std::string shard = read_file(second);
  CHECK(message(good).empty());
  write_file(second, read_file(folder.path() / "model-00001-of-00003.safetensors"));
  CHECK_THAT(load_pair(folder.path().string()).status().message(),
             ContainsSubstring("is also in model-00001-of-00003.safetensors; it must be in one file only"));
  std::filesystem::remove(second);
  CHECK_THAT(load_pair(folder.path().string()).status().message(),
             ContainsSubstring("model-00002-of-00003.safetensors\", which is missing"));
}

TEST_CASE("tied and untied heads follow the checkpoint") {
  SmallModel model;
  model.tensors.erase("lm_head.weight");
  CHECK_THAT(error_of(model),
             ContainsSubstring("tensor lm_head.weight is missing, expected [96, 20] because config.json says tie_word_embeddings false"));
  model.config["tie_word_embeddings"] = true;  // at the outer level only, as some exports have it
  CHECK(error_of(model) == "accepted");
  model.config.erase("tie_word_embeddings");
  model.text().erase("tie_word_embeddings");
  CHECK(error_of(model) == "accepted");
  const TemporaryFolder folder;
  SmallModel both;
  both.config["tie_word_embeddings"] = both.text()["tie_word_embeddings"] = true;
  both.write(folder.path());
  Result<LoadedPair> r = load_pair(folder.path().string());
  REQUIRE(r.ok());
  CHECK_FALSE(r->spec.tied_head);  // its own head is used although the config says tied
  CHECK(r->tensors.lm_head.data != r->tensors.embed.data);
}

TEST_CASE("a re-export without MTP tensors loads without MTP; one with some of them does not load") {
  SmallModel model;
  std::erase_if(model.tensors, [](const auto& t) { return t.first.starts_with("mtp."); });
  const TemporaryFolder folder;
  model.write(folder.path());
  Result<LoadedPair> r = load_pair(folder.path().string());
  REQUIRE(r.status().message() == "");
  CHECK_FALSE(r->has_mtp());
  CHECK(r->spec.mtp_layers == 0);
  CHECK_THAT(describe(*r), ContainsSubstring("no MTP head"));
  model = SmallModel();
  model.text()["mtp_num_hidden_layers"] = 0;  // tensors that the config does not want are left alone
  CHECK(error_of(model) == "accepted");
}

TEST_CASE("tensors that would change the output are not ignored") {
  SmallModel model;
  model.tensors[kLayer1 + "self_attn.q_proj.bias"].shape = {192};
  CHECK(error_of(model) ==
        "DIR/target/model.safetensors: tensor model.language_model.layers.1.self_attn.q_proj.bias (BF16 [192]) has no place in the model "
        "that config.json "
        "describes; leaving it out would change the output");
  model = SmallModel();
  model.tensors[kLayer0 + "mlp.up_proj.weight_scale_inv"].shape = {1, 1};
  CHECK_THAT(error_of(model), ContainsSubstring("mlp.up_proj.weight_scale_inv"));
  model = SmallModel();
  model.text()["num_hidden_layers"] = 2;
  model.text()["layer_types"] = {"linear_attention", "full_attention"};
  CHECK_THAT(error_of(model), ContainsSubstring("model.language_model.layers.2.") && ContainsSubstring("has no place"));
  model = SmallModel();
  model.tensors[kLayer1 + "self_attn.rotary_emb.inv_freq"].shape = {2};
  model.tensors["some.other.head"].shape = {2};
  CHECK(error_of(model) == "accepted");
  SmallDrafter drafter;
  drafter.tensors["candidate_selector.hidden_projection.weight"].shape = {4, 20};
  CHECK_THAT(error_of(SmallModel(), &drafter),
             ContainsSubstring("tensor candidate_selector.hidden_projection.weight (BF16 [4, 20]) has no place"));
  drafter = SmallDrafter();
  drafter.tensors["embed_tokens.weight"].shape = {96, 20};
  CHECK(error_of(SmallModel(), &drafter) == "accepted");
  model = SmallModel();
  model.tensors[kLayer0 + "mlp.up_proj.weight"].dtype = "F8_E4M3";
  model.tensors[kLayer0 + "mlp.up_proj.weight"].data.assign(28 * 20, '\0');
  CHECK_THAT(error_of(model), ContainsSubstring("dtype F8_E4M3, expected BF16, F16 or F32 (a quantised checkpoint?"));
}

TEST_CASE("a drafter of another target is refused with both figures and the likely cause") {
  const SmallModel model;
  const auto message = [&](const std::function<void(SmallDrafter&)>& change) {
    SmallDrafter drafter;
    change(drafter);
    return error_of(model, &drafter);
  };
  CHECK(message([](SmallDrafter&) {}) == "accepted");
  CHECK(message([](SmallDrafter& d) {
          d.tensors["fc.weight"].shape = {20, 60};
        }) ==
        "DIR/draft/model.safetensors: tensor fc.weight takes features of width 60 (shape [20, 60]), but 2 taps × hidden 20 = 40; likely "
        "cause: it was trained on "
        "3 taps, and target_layer_ids in config.json has 2");
  CHECK_THAT(message([](SmallDrafter& d) { d.config["dflash_config"]["target_layer_ids"] = {1}; }),
             ContainsSubstring(
                 "takes features of width 40 (shape [20, 40]), but 1 taps × hidden 20 = 20; likely cause: it was trained on 2 taps"));
  CHECK_THAT(message([](SmallDrafter& d) {
               d.tensors["fc.weight"].shape = {20, 41};
             }),
             ContainsSubstring("config.json and the checkpoint are of different drafters"));
  CHECK(message([](SmallDrafter& d) { d.config["hidden_size"] = 24; }) ==
        "DIR/draft/config.json: the drafter was made for another target: its hidden_size is 24, the target's is 20; likely cause: a "
        "drafter of another model size");
  CHECK_THAT(message([](SmallDrafter& d) { d.config["vocab_size"] = 128; }),
             ContainsSubstring("its vocab_size is 128, the target's is 96; likely cause: a drafter of another model generation"));
  CHECK_THAT(message([](SmallDrafter& d) { d.config["num_target_layers"] = 36; }),
             ContainsSubstring("its num_target_layers is 36, the target's is 3"));
  CHECK(message([](SmallDrafter& d) { d.config.erase("num_target_layers"); }) == "accepted");
  CHECK_THAT(message([](SmallDrafter& d) {
               d.config.erase("num_target_layers");
               d.config["dflash_config"]["target_layer_ids"] = {0, 3};
             }),
             ContainsSubstring("target_layer_ids is [0,3] with 3; it must be an integer from 0 to 2"));
}

TEST_CASE("the mask id falls back to the tokenizer's <|MASK|>") {
  const TemporaryFolder folder;
  SmallModel().write(folder.path() / "target");
  SmallDrafter drafter;
  drafter.config["dflash_config"].erase("mask_token_id");
  drafter.write(folder.path() / "draft");
  Result<LoadedPair> r = load_pair(folder / "target", folder / "draft");
  REQUIRE(r.status().message() == "");
  CHECK(r->drafter->spec.mask_id == 91);
  json tokenizer = small_tokenizer();
  tokenizer["added_tokens"].erase(2);
  write_file(folder.path() / "target/tokenizer.json", tokenizer.dump());
  CHECK_THAT(
      load_pair(folder / "target", folder / "draft").status().message(),
      ContainsSubstring("draft/config.json: dflash_config.mask_token_id is missing, and the target's tokenizer has no <|MASK|> token"));
}

TEST_CASE("stop ids without generation_config.json come from the tokenizer and config.json") {
  const TemporaryFolder folder;
  SmallModel model;
  model.generation = nullptr;
  model.write(folder.path());
  Result<LoadedPair> r = load_pair(folder.path().string());
  REQUIRE(r.ok());
  CHECK(r->defaults.eos_ids == std::vector<int32_t>{80, 5});  // <|im_end|>, then config.json's
  CHECK_FALSE(r->defaults.do_sample);
}

TEST_CASE("where the chat template comes from") {
  const TemporaryFolder folder;
  SmallModel().write(folder.path());
  const auto loaded = [&] { return load_pair(folder.path().string())->chat_template; };
  write_file(folder.path() / "tokenizer_config.json",
             R"({"chat_template":[{"name":"tool_use","template":"T"},{"name":"default","template":"D"}]})");
  CHECK(loaded() == "D");
  write_file(folder.path() / "chat_template.json", R"({"chat_template":"J"})");
  CHECK(loaded() == "J");
  write_file(folder.path() / "chat_template.jinja", "X");
  CHECK(loaded() == "X");
  std::filesystem::remove(folder.path() / "chat_template.jinja");
  std::filesystem::remove(folder.path() / "chat_template.json");
  std::filesystem::remove(folder.path() / "tokenizer_config.json");
  CHECK(loaded().empty());
  write_file(folder.path() / "tokenizer_config.json", "[1]");
  CHECK_THAT(load_pair(folder.path().string()).status().message(), EndsWith("tokenizer_config.json: it is [1], expected an object"));
}

TEST_CASE("a model without one of its files names it and lists the rest") {
  for (const char* name : {"config.json", "tokenizer.json", "model.safetensors"}) {
    const TemporaryFolder folder;
    SmallModel().write(folder.path());
    std::filesystem::remove(folder.path() / name);
    Result<LoadedPair> r = load_pair(folder.path().string());
    REQUIRE_FALSE(r.ok());
    CHECK_THAT(r.status().message(),
               ContainsSubstring(std::string("has no ") + name + "; found: ") && ContainsSubstring("tokenizer_config.json"));
  }
}
