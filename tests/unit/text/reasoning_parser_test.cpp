#include "text/reasoning_parser.h"

#include <catch2/catch_test_macros.hpp>
#include <random>
#include <string>
#include <vector>

using namespace ddtree;

namespace {

struct Split {
  std::string reasoning, content;
  bool operator==(const Split&) const = default;
};

// Text with tags as pieces: "<think>" and the like become tokens of their own where `tokens` has an id, ordinary text is cut at `widths`.
std::vector<TextPiece> pieces_of(const std::string& text, const TagTokens& tokens, std::mt19937& random, int width) {
  std::vector<TextPiece> out;
  const std::pair<std::string, int> tags[] = {{"<think>", tokens.think_open},
                                              {"</think>", tokens.think_close},
                                              {"<tool_call>", tokens.call_open},
                                              {"</tool_call>", tokens.call_close}};
  std::string run;
  const auto flush = [&] {
    for (size_t i = 0; i < run.size();) {
      size_t n = width > 0 ? static_cast<size_t>(width) : 1 + random() % 16;
      while (i + n < run.size() && (static_cast<unsigned char>(run[i + n]) & 0xC0) == 0x80) ++n;  // never half a character
      out.push_back({run.substr(i, n), -1, false});
      i += n;
    }
    run.clear();
  };
  for (size_t i = 0; i < text.size();) {
    bool hit = false;
    for (const auto& [tag, id] : tags)
      if (id >= 0 && text.compare(i, tag.size(), tag) == 0) {
        flush();
        out.push_back({tag, id, false});
        i += tag.size();
        hit = true;
        break;
      }
    if (!hit) run += text[i++];
  }
  flush();
  return out;
}

Split parse(ReasoningOptions options, const std::vector<TextPiece>& pieces, size_t per_feed = 1) {
  ReasoningParser parser(options);
  Split out;
  std::vector<TextPiece> rest;
  for (size_t i = 0; i < pieces.size(); i += per_feed)
    parser.feed(
        {pieces.begin() + static_cast<ptrdiff_t>(i), pieces.begin() + static_cast<ptrdiff_t>(std::min(pieces.size(), i + per_feed))},
        out.reasoning, rest);
  parser.flush(out.reasoning, rest);
  for (const auto& piece : rest) out.content += piece.text;
  return out;
}

constexpr TagTokens kIds{1, 2, 3, 4};
constexpr TagTokens kNoIds{};

ReasoningOptions options(const TagTokens& tags, bool inside, std::string call_start = "<function=") {
  return {ReasoningFormat::kQwen3, tags, inside, std::move(call_start)};
}

Split whole(const TagTokens& tags, bool inside, const std::string& text, std::string call_start = "<function=") {
  std::mt19937 random(1);
  return parse(options(tags, inside, std::move(call_start)), pieces_of(text, tags, random, 1 << 20));
}

}  // namespace

TEST_CASE("a thinking answer splits at its closing tag", "[reasoning]") {
  for (const TagTokens& tags : {kIds, kNoIds}) {
    CHECK(whole(tags, true, "why\nso\n</think>\n\nThe answer\n") == Split{"why\nso", "The answer\n"});
    CHECK(whole(tags, true, "why</think>x") == Split{"why", "x"});
    CHECK(whole(tags, true, "\n</think>\n\nx") == Split{"", "x"});
    CHECK(whole(tags, true, "why\n\n</think>\n\n\nx") == Split{"why\n", "\nx"});  // only the template's newlines go
    CHECK(whole(tags, true, "never closed\n") == Split{"never closed\n", ""});
    CHECK(whole(tags, true, "<think>\nrepeated\n</think>\n\nx") == Split{"repeated", "x"});
    CHECK(whole(tags, true, "a <think> b\n</think>\n\nx </think> y") == Split{"a <think> b", "x </think> y"});
    CHECK(whole(tags, true, "half </thin") == Split{"half </thin", ""});
  }
}

TEST_CASE("without thinking the answer is content", "[reasoning]") {
  for (const TagTokens& tags : {kIds, kNoIds}) {
    CHECK(whole(tags, false, "The answer") == Split{"", "The answer"});
    CHECK(whole(tags, false, "\n\n  x</think>y") == Split{"", "\n\n  x</think>y"});
    CHECK(whole(tags, false, "<think>\nown\n</think>\n\nx") == Split{"own", "x"});  // the model opens a block by itself
    CHECK(whole(tags, false, "say <think> then") == Split{"", "say <think> then"});
    CHECK(whole(tags, false, "") == Split{"", ""});
    CHECK(whole(tags, false, " ") == Split{"", " "});
    CHECK(whole(tags, false, "<thi") == Split{"", "<thi"});
  }
}

TEST_CASE("a call inside the block ends it, a mention does not", "[reasoning]") {
  for (const TagTokens& tags : {kIds, kNoIds}) {
    CHECK(whole(tags, true, "look\n<tool_call>\n<function=f>\n") == Split{"look", "<tool_call>\n<function=f>\n"});
    CHECK(whole(tags, true, "use <tool_call> here\n</think>\n\nx") == Split{"use <tool_call> here", "x"});
    CHECK(whole(tags, true, "use <tool_call></think>x") == Split{"use <tool_call>", "x"});
    CHECK(whole(tags, true, "use <tool_call>\n<tool_call>\n<function=f>") == Split{"use <tool_call>", "<tool_call>\n<function=f>"});
    CHECK(whole(tags, true, "use <tool_call>\n<func") == Split{"use <tool_call>\n<func", ""});
    CHECK(whole(tags, true, "use <tool_call>\n<function=f>", "") == Split{"use <tool_call>\n<function=f>", ""});  // no tools
    CHECK(whole(tags, true, "go\n<tool_call>\n{\"name\"", "{") == Split{"go", "<tool_call>\n{\"name\""});
  }
}

TEST_CASE("a tag with an id counts by its id only", "[reasoning]") {
  ReasoningParser parser(options(kIds, true));
  std::string reasoning;
  std::vector<TextPiece> rest;
  parser.feed({{"spelled </think> and <tool_call>\n<function=f>", -1, false}}, reasoning, rest);
  CHECK(parser.in_reasoning());
  CHECK(rest.empty());
  CHECK(reasoning == "spelled </think> and <tool_call>\n<function=f>");
  parser.feed({{"</think>", 2, false}}, reasoning, rest);
  CHECK_FALSE(parser.in_reasoning());
}

TEST_CASE("nothing certain is held back", "[reasoning]") {
  ReasoningParser parser(options(kNoIds, true));
  std::string reasoning;
  std::vector<TextPiece> rest;
  parser.feed({{"abc </th", -1, false}}, reasoning, rest);
  CHECK(reasoning == "abc ");
  parser.feed({{"umb", -1, false}}, reasoning, rest);
  CHECK(reasoning == "abc </thumb");
}

TEST_CASE("reasoning does not depend on the cut", "[reasoning]") {
  const char* texts[] = {"why\nso\n</think>\n\nThe answer\n",
                         "use <tool_call> é漢 <tool_ca\n</think>\n\n\nx",
                         "look\n\n<tool_call>\n<function=f>\n</function>",
                         "<think>\n\n</think>\n\nab</think>",
                         "a\n\n\n</thin</think></think>\n",
                         "<think><think>x</think>",
                         "<tool_call><tool_call>  <function=x",
                         "\n\n\n"};
  std::mt19937 random(7);
  for (const TagTokens& tags : {kIds, kNoIds})
    for (const bool inside : {true, false})
      for (const char* text : texts) {
        const Split expected = whole(tags, inside, text);
        for (int round = 0; round < 60; ++round) {
          INFO(text << " round " << round);
          const auto pieces = pieces_of(text, tags, random, round < 17 ? round : 0);
          CHECK(parse(options(tags, inside), pieces, 1 + random() % 5) == expected);
        }
      }
}

TEST_CASE("reasoning formats by name", "[reasoning]") {
  CHECK(*reasoning_format("qwen3") == ReasoningFormat::kQwen3);
  CHECK(*reasoning_format("deepseek-r1") == ReasoningFormat::kQwen3);
  CHECK(*reasoning_format("none") == ReasoningFormat::kNone);
  CHECK(reasoning_format("kimi").status().code() == Code::kUsage);
  std::mt19937 random(1);
  CHECK(parse({ReasoningFormat::kNone, kIds, true, ""}, pieces_of("a</think>b", kIds, random, 0)) == Split{"", "a</think>b"});
}
