#include "text/detokenizer.h"

#include <algorithm>
#include <catch2/catch_test_macros.hpp>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <vector>

#include "base/embedded.h"
#include "text/tokenizer.h"
#include "text/unicode.h"

using ddtree::Detokenizer;
using ddtree::TextPiece;
using ddtree::Tokenizer;

namespace {

Tokenizer tiny(const std::string& config = "") {
  auto loaded = Tokenizer::from_json(ddtree::embedded_file("models/tiny/target/tokenizer.json").value(), config, "tokenizer.json");
  REQUIRE(loaded.ok());
  return std::move(loaded).value();
}

// Ids of single bytes, found through the tokenizer itself.
std::vector<int32_t> byte_ids(const Tokenizer& t) {
  std::vector<int32_t> ids(256, -1);
  for (int32_t id = 0; id < t.id_count(); ++id)
    if (t.added(id) == nullptr && t.token_bytes(id).size() == 1) ids[static_cast<unsigned char>(t.token_bytes(id)[0])] = id;
  return ids;
}

std::string join(const std::vector<TextPiece>& pieces) {
  std::string text;
  for (const auto& p : pieces) text += p.text;
  return text;
}

}  // namespace

TEST_CASE("pieces are whole characters, added tokens alone, and together the decoded text") {
  // One added token that is not valid UTF-8 by itself: its letters stand for high bytes.
  const Tokenizer t = tiny(
      R"({"added_tokens_decoder": {"4100": {"content": "\u00e9\u00a9", "special": false}, "4101": {"content": "\u4f60", "special": true}}})");
  REQUIRE(t.id_count() == 4102);
  const auto bytes = byte_ids(t);
  REQUIRE(std::count(bytes.begin(), bytes.end(), -1) == 0);
  const unsigned seed = std::random_device{}();
  INFO("seed " << seed);
  std::mt19937 random(seed);
  std::vector<int32_t> special;
  for (const auto& token : t.added_tokens()) special.push_back(token.id);
  const std::string lively = "a\xC3\xA9\xE4\xBD\xA0\xF0\x9F\x98\x80\xC0\xED\xA0\xF4\x90\xE0\x80\xFF";
  for (int round = 0; round < 20000; ++round) {
    std::vector<int32_t> ids;
    for (int n = static_cast<int>(random() % 24); n > 0; --n) {
      const auto kind = random() % 8;
      if (kind < 3) ids.push_back(bytes[static_cast<unsigned char>(lively[random() % lively.size()])]);
      else if (kind == 3) ids.push_back(bytes[random() % 256]);
      else if (kind == 4) ids.push_back(special[random() % special.size()]);
      else if (kind == 5) ids.push_back(static_cast<int32_t>(random() % 5000) - 100);  // some without a token
      else
        for (int32_t id : t.encode("\xF0\x9F\x91\xA8\xE2\x80\x8D \xE4\xBD\xA0\xE5\xA5\xBD")) ids.push_back(id);
    }
    for (bool skip : {false, true}) {
      Detokenizer stream(t, skip);
      std::vector<TextPiece> pieces;
      for (size_t i = 0; i < ids.size();) {
        const size_t n = std::min(ids.size() - i, random() % 5);
        const size_t before = pieces.size();
        stream.push(std::span(ids).subspan(i, n), &pieces);
        for (size_t k = before + 1; k < pieces.size(); ++k)
          REQUIRE((pieces[k].token >= 0 || pieces[k - 1].token >= 0));  // ordinary runs are merged
        i += n;
      }
      stream.flush(&pieces);
      REQUIRE_FALSE(stream.holds_bytes());
      REQUIRE(join(pieces) == t.decode(ids, skip));
      std::vector<int32_t> seen;
      for (const auto& p : pieces) {
        REQUIRE_FALSE(p.text.empty());
        REQUIRE(ddtree::is_valid_utf8(p.text));
        if (p.token < 0) {
          REQUIRE_FALSE(p.special);
          continue;
        }
        REQUIRE(t.added(p.token) != nullptr);
        REQUIRE(p.special == t.added(p.token)->special);
        REQUIRE(p.text == t.decode(std::vector<int32_t>{p.token}, false));
        seen.push_back(p.token);
      }
      std::vector<int32_t> expected;
      for (int32_t id : ids)
        if (t.added(id) != nullptr && id != 4100 && !(skip && t.added(id)->special)) expected.push_back(id);
      REQUIRE(seen == expected);
    }
  }
}

TEST_CASE("bytes are held exactly as long as they can still become a character") {
  const Tokenizer t = tiny();
  const auto bytes = byte_ids(t);
  Detokenizer stream(t);
  std::vector<TextPiece> out;
  const auto push = [&](unsigned char b) {
    out.clear();
    stream.push(bytes[b], &out);
    return join(out);
  };
  const std::string r = "\xEF\xBF\xBD";
  CHECK(push(0xF0).empty());
  CHECK(push(0x9F).empty());
  CHECK(push(0x98).empty());
  CHECK(push(0x80) == "\xF0\x9F\x98\x80");
  CHECK(push(0xFF) == r);  // never valid: at once
  CHECK(push(0xED).empty());
  CHECK(push(0xA0) == r + r);  // would be a surrogate
  CHECK(push(0xE4).empty());
  CHECK(push('a') == r + "a");
  CHECK(push(0xE4).empty());
  CHECK(push(0xC3) == r);  // the first is lost, the second may go on
  CHECK(push(0xA9) == "\xC3\xA9");
  CHECK(push(0xE4).empty());
  CHECK(stream.holds_bytes());
  out.clear();
  stream.push(t.id_of("<think>").value(), &out);
  REQUIRE(out.size() == 2);
  CHECK(out[0].text == r);
  CHECK(out[1].text == "<think>");
  CHECK(out[1].token == t.id_of("<think>").value());
  CHECK(push(0xE4).empty());
  out.clear();
  stream.flush(&out);
  CHECK(join(out) == r);
  out.clear();
  stream.flush(&out);
  CHECK(out.empty());
}
