#include "engine/commit.h"

#include <catch2/catch_test_macros.hpp>
#include <random>

#include "support/tiny.h"

using namespace ddtree;
using namespace ddtree::testing;

namespace {

Request request_of(int32_t max_tokens, std::vector<std::string> stops = {}) {
  Request r;
  r.prompt = {1};
  r.max_tokens = max_tokens;
  r.stop_strings = std::move(stops);
  return r;
}

std::string text_of(const std::vector<TextPiece>& pieces) {
  std::string out;
  for (const auto& p : pieces)
    if (!p.special) out += p.text;
  return out;
}

const std::vector<int32_t> kEos = {4088, 4086};

}  // namespace

TEST_CASE("a stop inside an accepted run beats the cap behind it, and a cap before it the stop") {
  const Tokenizer& t = tiny_tokenizer();
  CommitPoint a(request_of(5), kEos, t);
  auto cut = a.offer(std::vector<int32_t>{10, 11, 4088, 20, 21, 22});
  CHECK(cut.ids == std::vector<int32_t>{10, 11, 4088});
  CHECK(cut.finish == FinishReason::kStop);
  CHECK(cut.stop_id == 4088);
  CHECK(text_of(cut.pieces) == t.decode(std::vector<int32_t>{10, 11}, true));

  CommitPoint b(request_of(10), kEos, t);
  b.offer(std::vector<int32_t>{10, 11, 12, 13, 14, 15, 16, 17});
  cut = b.offer(std::vector<int32_t>{4086, 20, 21});
  CHECK(b.count() == 9);
  CHECK(cut.ids == std::vector<int32_t>{4086});
  CHECK(cut.finish == FinishReason::kStop);

  CommitPoint c(request_of(5), kEos, t);
  cut = c.offer(std::vector<int32_t>{10, 11, 12, 13, 14, 4088});
  CHECK(cut.ids.size() == 5);
  CHECK(cut.finish == FinishReason::kLength);
  CHECK(cut.stop_id == -1);

  CommitPoint d(request_of(3), kEos, t);  // both at once: the stop
  cut = d.offer(std::vector<int32_t>{10, 11, 4088});
  CHECK(cut.finish == FinishReason::kStop);
}

TEST_CASE("ignore_eos goes on, a request's own stop ids still stop; their text stays out unless asked for") {
  const Tokenizer& t = tiny_tokenizer();
  Request r = request_of(10);
  r.ignore_eos = true;
  r.stop_ids = {15};
  CommitPoint a(r, kEos, t);
  auto cut = a.offer(std::vector<int32_t>{10, 4088, 15, 16});
  CHECK(cut.ids == std::vector<int32_t>{10, 4088, 15});
  CHECK(cut.stop_id == 15);
  CHECK(text_of(cut.pieces) == t.decode(std::vector<int32_t>{10}, true));
  r.include_stop_string = true;
  CommitPoint b(r, kEos, t);
  CHECK(text_of(b.offer(std::vector<int32_t>{10, 4088, 15, 16}).pieces) == t.decode(std::vector<int32_t>{10, 15}, true));
}

TEST_CASE("min_tokens: stop ids are banned and stop strings do not count until then") {
  const Tokenizer& t = tiny_tokenizer();
  Request r = request_of(40, {"ab"});
  r.min_tokens = 3;
  CommitPoint c(r, kEos, t);
  CHECK(c.banned(0).size() == 2);
  CHECK(c.banned(2).size() == 2);
  CHECK(c.banned(3).empty());
  const auto a = t.encode("a"), b = t.encode("b");
  REQUIRE(a.size() == 1);
  REQUIRE(b.size() == 1);
  auto cut = c.offer(std::vector<int32_t>{a[0], b[0], a[0]});
  CHECK(cut.finish == FinishReason::kNone);
  cut = c.offer(std::vector<int32_t>{b[0], a[0]});
  CHECK(cut.finish == FinishReason::kStop);
  CHECK(c.count() == 4);
  CHECK(text_of(cut.pieces).empty());
}

TEST_CASE("a stop string across tokens cuts text exactly, ids at the token that completes it, and nothing runs ahead") {
  const Tokenizer& t = tiny_tokenizer();
  const std::string text = "def f(x):\n    return x  # the answer is 42, of course\n\nprint(f(1))\n naïve 日本語 🙂 done";
  const auto ids = t.encode(text);
  std::mt19937 rng(7);
  for (int round = 0; round < 400; ++round) {
    // A stop string taken from the text, or one that never comes.
    std::vector<std::string> stops;
    for (unsigned i = 0; i < 1 + rng() % 3; ++i) {
      size_t begin = rng() % text.size(), length = 1 + rng() % 12;
      while (begin > 0 && (static_cast<unsigned char>(text[begin]) & 0xC0) == 0x80) --begin;
      size_t end = std::min(begin + length, text.size());
      while (end < text.size() && (static_cast<unsigned char>(text[end]) & 0xC0) == 0x80) ++end;
      stops.push_back(rng() % 4 == 0 ? "return y" : text.substr(begin, end - begin));
    }
    const bool include = rng() % 2 == 0;
    // By definition: the match that ends first, of those the one that begins first.
    size_t best_end = std::string::npos, best_begin = 0;
    for (const auto& s : stops)
      if (const size_t at = text.find(s);
          at != std::string::npos && (at + s.size() < best_end || (at + s.size() == best_end && at < best_begin)))
        best_end = at + s.size(), best_begin = at;
    const std::string expected = best_end == std::string::npos ? text : text.substr(0, include ? best_end : best_begin);

    Request r = request_of(1000, stops);
    r.include_stop_string = include;
    CommitPoint c(r, kEos, t);
    std::string got;
    std::vector<int32_t> kept;
    FinishReason finish = FinishReason::kNone;
    for (size_t i = 0; i < ids.size() && finish == FinishReason::kNone;) {
      const size_t n = std::min<size_t>(1 + rng() % 6, ids.size() - i);
      auto cut = c.offer(std::span(ids).subspan(i, n));
      got += text_of(cut.pieces);
      REQUIRE(expected.compare(0, got.size(), got) == 0);  // what is out was right to go out
      kept.insert(kept.end(), cut.ids.begin(), cut.ids.end());
      finish = cut.finish;
      i += n;
    }
    if (best_end == std::string::npos) {
      REQUIRE(finish == FinishReason::kNone);
      got += text_of(c.flush());
      REQUIRE(got == text);
    } else {
      REQUIRE(finish == FinishReason::kStop);
      REQUIRE(got == expected);
      // ids end at the token that completes the match
      std::string all;
      size_t need = 0;
      while (all.size() < best_end) all += t.token_bytes(ids[need++]);
      REQUIRE(kept.size() == need);
      REQUIRE(std::equal(kept.begin(), kept.end(), ids.begin()));
    }
  }
}

TEST_CASE("added tokens keep their pieces while stop strings hold text back") {
  const Tokenizer& t = tiny_tokenizer();
  const auto ids = t.encode("a<think>b");
  CommitPoint c(request_of(100, {"bc"}), kEos, t);
  auto cut = c.offer(ids);
  REQUIRE(cut.pieces.size() == 2);
  CHECK(cut.pieces[0].text == "a");
  CHECK(cut.pieces[1].text == "<think>");
  CHECK(cut.pieces[1].token >= 0);
  const auto rest = c.flush();
  REQUIRE(rest.size() == 1);
  CHECK(rest[0].text == "b");
}

TEST_CASE("the length flushes what was held") {
  const Tokenizer& t = tiny_tokenizer();
  const auto ids = t.encode("hello wor");
  CommitPoint c(request_of(static_cast<int32_t>(ids.size()), {"world"}), kEos, t);
  const auto cut = c.offer(ids);
  CHECK(cut.finish == FinishReason::kLength);
  CHECK(text_of(cut.pieces) == "hello wor");
}
