#include "text/tokenizer.h"

#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "base/embedded.h"
#include "text/tokenizer_split.h"
#include "text/unicode.h"

using ddtree::Code;
using ddtree::Result;
using ddtree::Tokenizer;
using Json = nlohmann::json;

namespace {

std::string tiny_json() { return std::string(ddtree::embedded_file("models/tiny/target/tokenizer.json").value()); }

Tokenizer tiny() {
  auto loaded = Tokenizer::from_json(tiny_json(), "", "tokenizer.json");
  REQUIRE(loaded.ok());
  return std::move(loaded).value();
}

// A whole tokenizer.json, small enough to take apart: letters a, b, c, space and a few joined tokens.
Json small() {
  return Json::parse(R"({
    "version": "1.0", "truncation": null, "padding": null,
    "added_tokens": [{"id": 9, "content": "<x>", "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true}],
    "normalizer": {"type": "NFC"},
    "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
      {"type": "Split", "pattern": {"Regex": " ?\\p{L}+|\\s+"}, "behavior": "Isolated", "invert": false},
      {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false}]},
    "post_processor": null,
    "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
    "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null, "end_of_word_suffix": null,
      "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
      "vocab": {"a": 0, "b": 1, "c": 2, "Ġ": 3, "ab": 4, "bc": 5, "abc": 6, "Ġa": 7, "<": 8},
      "merges": ["b c", "a b", "a bc", "Ġ a"]}})");
}

Result<Tokenizer> load(const Json& json, const std::string& config = "") {
  return Tokenizer::from_json(json.dump(), config, "tokenizer.json");
}

std::vector<int32_t> ids(const Json& json, std::string_view text) {
  auto t = load(json);
  INFO(t.status().message());
  REQUIRE(t.ok());
  return t->encode(text);
}

using Ids = std::vector<int32_t>;

}  // namespace

TEST_CASE("every golden prompt gives its ids, and its answer's ids give the text") {
  const Tokenizer t = tiny();
  std::ifstream file(DDTREE_SOURCE_DIR "/tests/data/golden/golden.jsonl");
  int lines = 0;
  for (std::string line; std::getline(file, line); ++lines) {
    const Json golden = Json::parse(line);
    const auto prompt = golden.at("prompt").get<std::string>();
    const auto prompt_ids = golden.at("prompt_ids").get<Ids>();
    CHECK(t.encode(prompt) == prompt_ids);
    CHECK(t.decode(prompt_ids, false) == prompt);
    CHECK(t.decode(golden.at("greedy_ids").get<Ids>(), false) == golden.at("text").get<std::string>());
  }
  REQUIRE(lines == 40);
}

TEST_CASE("any valid text in normal form comes back from its ids") {
  const Tokenizer t = tiny();
  std::mt19937 random(20240607);
  for (int round = 0; round < 2000; ++round) {
    std::string text, normal;
    for (int n = std::uniform_int_distribution<>(0, 40)(random); n > 0; --n) {
      static constexpr char32_t kTops[] = {0x7F, 0x7F, 0x3FF, 0xFFFF, 0x10FFFF};
      char32_t c = std::uniform_int_distribution<uint32_t>(0, kTops[random() % 5])(random);
      if (c >= 0xD800 && c < 0xE000) c = '?';
      ddtree::append_utf8(c, &text);
    }
    if (!ddtree::normalize_utf8(text, ddtree::NormalForm::kNfc, &normal)) normal = text;
    REQUIRE(t.decode(t.encode(text, false), false) == normal);
    REQUIRE_FALSE(ddtree::normalize_utf8(normal, ddtree::NormalForm::kNfc, &text));
  }
}

TEST_CASE("added tokens are cut out only when asked for") {
  const Tokenizer t = tiny();
  const int32_t end = t.id_of("<|im_end|>").value();
  CHECK(t.encode("<|im_end|>") == Ids{end});
  const auto literal = t.encode("<|im_end|>", false);
  CHECK(literal.size() > 1);
  CHECK(t.decode(literal, true) == "<|im_end|>");
  CHECK(t.decode(Ids{end}, true).empty());
  CHECK(t.decode(Ids{end}, false) == "<|im_end|>");
  const int32_t think = t.id_of("<think>").value();
  REQUIRE(t.added(think) != nullptr);
  CHECK_FALSE(t.added(think)->special);
  CHECK(t.decode(Ids{think, end}, true) == "<think>");
  CHECK(t.added(0) == nullptr);
  CHECK(t.added(-1) == nullptr);
  CHECK(t.added(t.id_count()) == nullptr);
  CHECK(t.id_count() == 4096);
}

TEST_CASE("broken UTF-8 is read as U+FFFD, one for each maximal broken sequence") {
  const Tokenizer t = tiny();
  const std::string r = "\xEF\xBF\xBD";
  const std::pair<std::string, std::string> cases[] = {
      {"\xFF", r},
      {"a\x80z", "a" + r + "z"},
      {"\xE4\xBD", r},  // the beginning of a character, cut off
      {"\xE4\xBD"
       "a",
       r + "a"},
      {"\xF0\x9F\x98", r},
      {"\xF0\x9F\x98\xF0\x9F\x98\x80", r + "\xF0\x9F\x98\x80"},
      {"\xC0\xAF", r + r},  // overlong
      {"\xE0\x80\x80", r + r + r},
      {"\xED\xA0\x80", r + r + r},          // a surrogate
      {"\xF4\x90\x80\x80", r + r + r + r},  // past U+10FFFF
  };
  for (const auto& [bytes, text] : cases) CHECK(t.encode(bytes) == t.encode(text));
}

TEST_CASE("merges are applied by rank, then from the left, in both spellings") {
  Json json = small();
  CHECK(ids(json, "abc") == Ids{6});  // bc first, then a bc
  CHECK(ids(json, "aab") == Ids{0, 4});
  CHECK(ids(json, "ab abc a<") == Ids{4, 3, 6, 7, 8});
  CHECK(ids(json, "a<x>b") == Ids{0, 9, 1});
  Json pairs = json;
  for (Json& m : pairs["model"]["merges"]) {
    const auto line = m.get<std::string>();
    m = {line.substr(0, line.find(' ')), line.substr(line.find(' ') + 1)};
  }
  CHECK(ids(pairs, "ab abc a<") == Ids{4, 3, 6, 7, 8});
  CHECK(ids(json, "axb") == Ids{4});  // without an id for x, nor an unk_token, x is not there
  json["model"]["unk_token"] = "<";
  CHECK(ids(json, "axyb") == Ids{0, 8, 8, 1});
  json["model"]["fuse_unk"] = true;
  CHECK(ids(json, "axyb") == Ids{0, 8, 1});
}

TEST_CASE("ignore_merges takes a whole word from the vocabulary") {
  Json json = small();
  json["model"]["vocab"]["cab"] = 10;
  CHECK(ids(json, "cab") == Ids{2, 4});
  json["model"]["ignore_merges"] = true;
  CHECK(ids(json, "cab") == Ids{10});
  CHECK(ids(json, "cabc") == Ids{2, 6});
}

TEST_CASE("the second file completes the added tokens") {
  const Json json = small();
  const std::string config = R"({"added_tokens_decoder": {
      "12": {"content": "<late>", "special": true}, "9": {"content": "<x>", "special": false, "rstrip": true}}})";
  auto t = load(json, config);
  REQUIRE(t.ok());
  CHECK(t->encode("<late>a") == Ids{12, 0});
  CHECK(t->id_count() == 13);
  CHECK_FALSE(t->has_token(10));
  CHECK(t->has_token(12));
  CHECK(t->encode("<x>  a") == Ids{9, 0});  // its flags win
  CHECK(t->decode(Ids{9, 10, 12}, true) == "<x>");
}

TEST_CASE("what is not supported or broken is refused by name") {
  const auto refused = [](const Json& json, const std::string& field) {
    const auto t = load(json);
    REQUIRE_FALSE(t.ok());
    CHECK(t.status().code() == Code::kBadModel);
    INFO(t.status().message());
    CHECK(t.status().message().starts_with("tokenizer.json: "));
    CHECK(t.status().message().find(field) != std::string::npos);
  };
  const auto change = [](const char* pointer, const Json& value) {
    Json json = small();
    json[Json::json_pointer(pointer)] = value;
    return json;
  };
  refused(change("/model/type", "Unigram"), "model.type: \"Unigram\"");
  refused(change("/model/byte_fallback", true), "model.byte_fallback");
  refused(change("/model/dropout", 0.1), "model.dropout");
  refused(change("/model/end_of_word_suffix", "</w>"), "model.end_of_word_suffix");
  refused(change("/model/unk_token", "<unk>"), "model.unk_token");
  refused(change("/model/vocab/ab", -1), "model.vocab[\"ab\"]");
  refused(change("/model/vocab/ab", 1e9), "model.vocab[\"ab\"]");
  refused(change("/model/vocab/ab", 4000000000), "model.vocab[\"ab\"]");
  refused(change("/model/vocab/ab", 0), "id 0 belongs to both");
  refused(change("/model/vocab", Json::object()), "model.vocab");
  refused(change("/model/merges/1", "a"), "model.merges[1]");
  refused(change("/model/merges/1", "a b c"), "model.merges[1]");
  refused(change("/model/merges/1", {"a", 1}), "model.merges[1]");
  refused(change("/model/merges/1", "a c"), "\"ac\" is not in model.vocab");
  refused(change("/normalizer", {{"type", "Lowercase"}}), "normalizer.type: \"Lowercase\"");
  refused(change("/pre_tokenizer", {{"type", "Metaspace"}}), "pre_tokenizer.type: \"Metaspace\"");
  refused(change("/pre_tokenizer", nullptr), "pre_tokenizer");
  refused(change("/pre_tokenizer/pretokenizers/0/pattern/Regex", "(a"), "pre_tokenizer.pretokenizers[0].pattern");
  refused(change("/pre_tokenizer/pretokenizers/0/pattern/Regex", "[a&&[^b]]"), "&&");
  refused(change("/pre_tokenizer/pretokenizers/0/behavior", "Sometimes"), "behavior: found \"Sometimes\"");
  refused(change("/decoder", nullptr), "decoder");
  refused(change("/decoder", {{"type", "WordPiece"}}), "decoder.type: \"WordPiece\"");
  refused(change("/added_tokens/0/id", "9"), "added_tokens[0].id");
  refused(change("/added_tokens/0/content", 9), "added_tokens[0].content");
  refused(change("/added_tokens/0/special", 1), "added_tokens[0].special");
  refused(change("/added_tokens/0/content", "ab"), "added_tokens[0].id");  // is 4 in the vocabulary
  refused(Json::array(), "expected a JSON object");
  const auto text = Tokenizer::from_json("{", "", "some/tokenizer.json");
  REQUIRE_FALSE(text.ok());
  CHECK(text.status().message().starts_with("some/tokenizer.json: not valid JSON"));
  const auto config = load(small(), R"({"added_tokens_decoder": {"x": {"content": "y"}}})");
  REQUIRE_FALSE(config.ok());
  CHECK(config.status().message().starts_with("tokenizer_config.json: added_tokens_decoder[\"x\"]"));
  CHECK(Tokenizer::load("/nonexistent/tokenizer.json").status().code() == Code::kBadModel);
}

TEST_CASE("nesting without end is refused") {
  const std::string deep = std::string(1 << 17, '[') + std::string(1 << 17, ']');
  for (const char* field : {"model", "normalizer", "added_tokens"}) {
    Json json = small();
    json[field] = "HERE";
    std::string text = json.dump();
    text.replace(text.find("\"HERE\""), 6, deep);
    const auto t = Tokenizer::from_json(text, deep, "tokenizer.json");
    REQUIRE_FALSE(t.ok());
    CHECK(t.status().code() == Code::kBadModel);
  }
}

TEST_CASE("mutated files are refused or work, and never crash") {
  const std::string good = small().dump();
  const unsigned seed = std::random_device{}();
  INFO("seed " << seed);
  std::mt19937 random(seed);
  const std::string_view scraps[] = {"null",     "true",   "-1", "1e99", "\"\"", "[]",     "{}",      "\\",   "\"",      "\xFF",
                                     "99999999", "\\p{L}", "(",  "[",    "*",    "{9999}", "\\ud800", "type", "Sequence"};
  int accepted = 0;
  for (int round = 0; round < 6000; ++round) {
    std::string text = good;
    for (int n = 1 + static_cast<int>(random() % 4); n > 0 && !text.empty(); --n) {
      const size_t at = random() % text.size();
      const size_t length = std::min(text.size() - at, size_t{1} + random() % 30);
      switch (random() % 5) {
        case 0: text[at] = static_cast<char>(random()); break;
        case 1: text.erase(at, length); break;
        case 2: text.insert(at, text.substr(random() % text.size(), length)); break;
        case 3: text.insert(at, scraps[random() % std::size(scraps)]); break;
        default: text.resize(at); break;
      }
    }
    const auto t = Tokenizer::from_json(text, round % 3 == 0 ? text : "", "tokenizer.json");
    if (t.ok()) {
      ++accepted;
      const auto out = t->encode("abc <x> abab \xCC\x81 ca\n\nb <x");
      for (int32_t id : out) REQUIRE(t->has_token(id));
      (void)t->decode(out, true);
    } else {
      REQUIRE(t.status().code() == Code::kBadModel);
      REQUIRE_FALSE(t.status().message().empty());
    }
  }
  CHECK(accepted > 0);  // otherwise the mutations are too rough to reach anything
}

TEST_CASE("endless runs take no more than proportional time") {
  // No clock decides: a quadratic step would take hours here.
  const Tokenizer t = tiny();
  for (std::string_view unit :
       {"a", " ", "\n", " \n", "-", "\xCC\x81\xCC\xA7", "\xE4\xB8\x80", "\xF0\x9F\x98\x80", "<", "<|im_end|", "\xFF", "\xE1\x85\xA1"}) {
    std::string text;
    while (text.size() < (1u << 20)) text += unit;
    text += "x";
    CHECK(!t.encode(text).empty());
  }
}

TEST_CASE("a pattern that backtracks without end gives a split, not a hang") {
  Json json = small();
  json["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = "(a+)+b|(a|aa)+c";
  const std::string text(5000, 'a');
  CHECK(ids(json, text).size() == 5000);
}

TEST_CASE("many threads encode at once and agree") {
  const Tokenizer t = tiny();
  std::vector<std::string> texts;
  std::mt19937 random(7);
  for (int i = 0; i < 200; ++i) {
    std::string s;
    for (int n = 0; n < 60; ++n) s += "the cat sat on 12 mats, didn't it?\n"[random() % 36];
    texts.push_back(s);
  }
  std::vector<Ids> expected;
  for (const auto& s : texts) expected.push_back(t.encode(s));
  std::vector<int> wrong(8, 0);
  std::vector<std::thread> threads;
  for (int k = 0; k < 8; ++k)
    threads.emplace_back([&, k] {
      for (int round = 0; round < 5; ++round)
        for (size_t i = 0; i < texts.size(); ++i) wrong[static_cast<size_t>(k)] += t.encode(texts[i]) != expected[i];
    });
  for (auto& thread : threads) thread.join();
  for (int w : wrong) CHECK(w == 0);
}

TEST_CASE("patterns are read in Ruby's dialect") {
  const auto split = [](std::string_view pattern, std::string_view text) {
    auto compiled = ddtree::SplitPattern::compile(pattern);
    INFO(compiled.status().message());
    REQUIRE(compiled.ok());
    ddtree::SplitPattern::Scratch scratch;
    std::vector<ddtree::SplitRange> ranges;
    compiled->split(text, ddtree::SplitBehavior::kIsolated, false, &scratch, &ranges);
    std::vector<std::string> parts;
    for (const auto& r : ranges) parts.emplace_back(text.substr(r.begin, r.end - r.begin));
    return parts;
  };
  using Parts = std::vector<std::string>;
  CHECK(split("\\h+", "xaf y") == Parts{"x", "af", " y"});        // hex digits, not blanks
  CHECK(split("^b", "a\nb\nb") == Parts{"a\n", "b", "\n", "b"});  // ^ at every line
  CHECK(split("\\u0062", "abc") == Parts{"a", "b", "c"});
  CHECK(split("[\\w]+", "a_\xCC\x81-b") == Parts{"a_\xCC\x81", "-", "b"});
  for (std::string_view pattern :
       {"\\b", "\\K", "\\R", "\\X", "\\1", "(?m:a)", "(*UCP)a", "[a[b]]", "[a&&b]", "\\", "[\\W]", "\\u12", "(?<n>a)\\g<n>"})
    CHECK_FALSE(ddtree::SplitPattern::compile(pattern).ok());
}
