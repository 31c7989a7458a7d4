// The detector trips on what broken engines write, and leaves alone what people ask for.
#include "health/degeneracy.h"

#include <fmt/core.h>

#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <filesystem>
#include <fstream>
#include <random>

using namespace ddtree;

namespace {

std::string times(const std::string& unit, int count) {
  std::string text;
  for (int i = 0; i < count; ++i) text += unit;
  return text;
}

// Fed as one piece, by single bytes and in random pieces: the verdict must not depend on it by more than the check's stride.
std::string verdict(const std::string& text) {
  std::string reasons[3];
  std::mt19937 random(7);
  for (int way = 0; way < 3; ++way) {
    DegeneracyDetector detector;
    for (size_t at = 0; at < text.size();) {
      const size_t length = way == 0 ? text.size() : way == 1 ? 1 : 1 + random() % 20;
      if (detector.add(std::string_view(text).substr(at, length))) break;
      at += length;
    }
    reasons[way] = detector.reason();
  }
  CHECK(reasons[0].empty() == reasons[1].empty());
  CHECK(reasons[0].empty() == reasons[2].empty());
  return reasons[0];
}

const std::string kProse =
    "The gated delta rule keeps a matrix for each head and changes it with every token. First the state decays a little, then what it says "
    "about the new key is compared with the new value, and the difference is written back. So the state learns pairs and forgets slowly. ";

}  // namespace

TEST_CASE("broken text trips the detector, whatever stood before it") {
  const std::string before = GENERATE_COPY(std::string(), kProse + "\n\n```python\n");
  const std::pair<const char*, std::string> cases[] = {
      {"exclamation marks", times("!", 256)},
      {"zeros", times("0", 256)},
      {"a CJK character", times("\xE7\x9A\x84", 256)},
      {"a repeated word", times("the ", 256)},
      {"a repeated word on lines", times("def\n", 256)},
      {"a repeated sentence", times("I will now check the result again. ", 40)},
      {"a repeated three-line block", times("for item in items:\n    total += item.value\n    count += 1\n", 24)},
      {"a repeated paragraph", times(kProse, 14)},
      {"replacement characters", times("\xEF\xBF\xBD", 64)},
      {"replacement characters among letters", times("a\xEF\xBF\xBD"
                                                     "b",
                                                     100)},
      {"blank lines without end", times("\n", 4000)},
      {"spaces without end", times(" ", 4000)},
      {"a rule without end", times("-", 1000)},
      {"an empty table without end", times("| | |\n", 700)},
  };
  for (const auto& [name, text] : cases) {
    INFO(name);
    CHECK(verdict(before + text) != "");
  }
}

TEST_CASE("what people ask for leaves it alone") {
  std::string code, table, numbers, squares, multiplication, list, base64, yaml;
  for (int i = 0; i < 120; ++i) code += times("    ", 1 + i % 24) + fmt::format("if value_{} > {}:  # level {}\n", i % 7, i * 13 % 31, i);
  table = "| Name | Value | Note |\n|" + times("------------------------------|", 3) + "\n";
  for (int i = 0; i < 60; ++i) table += fmt::format("| row {} | {} |  |\n", i, i * i);
  for (int i = 1; i <= 300; ++i) numbers += fmt::format("{}, ", i);
  for (int i = 1; i <= 300; ++i) list += fmt::format("{}. {}\n", i, (i * 7919) % 1000);
  for (int i = 1; i <= 20; ++i)
    for (int j = 1; j <= 20; ++j) multiplication += fmt::format("{} x {} = {}\n", i, j, i * j);
  std::mt19937 random(11);
  const std::string alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  for (int i = 0; i < 4000; ++i) base64 += alphabet[random() % 64], base64 += i % 76 == 75 ? "\n" : "";
  for (int i = 0; i < 200; ++i) yaml += fmt::format("  - name: item-{}\n    enabled: true\n    tags: [a, b]\n", i);
  const std::pair<const char*, std::string> cases[] = {
      {"prose", kProse},
      {"a Markdown rule", "Above\n\n" + times("-", 120) + "\n\nbelow\n" + times("=", 80) + "\n" + times("* ", 40) + "\n"},
      {"a wide rule", times("\xE2\x94\x80", 200)},
      {"a table rule", "|" + times("-----|", 60) + "\n"},
      {"a table", table},
      {"an empty form", times("| | | |\n", 30)},
      {"deep indentation", code + times(" ", 200) + "return x\n"},
      {"a list of 300 numbers", numbers},
      {"a numbered list", list},
      {"a multiplication table", multiplication},
      {"base64", base64},
      {"ha ha ha", "You asked for it: " + times("ha ", 60) + "!"},
      {"hahaha", times("ha", 80)},
      {"a shout", "N" + times("o", 100) + times("!", 60)},
      {"a matrix of zeros", times(times("0 ", 12) + "\n", 12)},
      {"blank lines", "a" + times("\n", 40) + "b"},
      {"YAML items", yaml},
      {"a refrain", times("Row, row, row your boat, gently down the stream.\n", 8)},
      {"dots of a contents page", "Chapter 1 " + times(". ", 100) + "12\nChapter 2 " + times(".", 180) + " 34\n"},
  };
  for (const auto& [name, text] : cases) {
    INFO(name);
    CHECK(verdict(text) == "");
  }
}

TEST_CASE("once tripped it stays tripped, and says why") {
  DegeneracyDetector detector;
  CHECK_FALSE(detector.add(kProse));
  CHECK(detector.add(times("!", 300)));
  CHECK(detector.reason().find("'!'") != std::string::npos);
  const std::string reason = detector.reason();
  CHECK(detector.add("and now something sensible"));
  CHECK(detector.reason() == reason);
}

TEST_CASE("token ids that circle without equal text are seen by their 4-grams") {
  DegeneracyDetector circling, varied;
  std::mt19937 random(3);
  std::vector<int32_t> loop(2048), free(2048);
  for (size_t i = 0; i < loop.size(); ++i) loop[i] = static_cast<int32_t>(i % 7), free[i] = static_cast<int32_t>(random() % 500);
  CHECK(circling.add("", loop));
  CHECK(circling.reason().find("4-grams") != std::string::npos);
  CHECK_FALSE(varied.add("", free));
}

TEST_CASE("figures") {
  const DegeneracyFigures loop = measure_text("start " + times("abc ", 5));
  CHECK(loop.tail_period == 4);
  CHECK(loop.tail_repeats == 5);
  CHECK(measure_text("aaaab").longest_run == 4);
  CHECK(measure_text("a    b").longest_run == 1);
  CHECK(measure_text("a\xEF\xBF\xBD").replacement == 1);
  CHECK(measure_text(kProse).distinct_4grams == 1);
  CHECK(measure_text(times("x ", 100)).distinct_4grams < 0.02);
  const std::vector<int32_t> ids = {1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4};
  CHECK(measure_text("", ids).distinct_4grams == 4.0 / 9);
  CHECK(measure_text("").characters == 0);
}

TEST_CASE("coherence of short answers") {
  for (const char* good :
       {"Paris", "4", "The capital of France is Paris.", "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20",
        "\xE5\xB7\xB4\xE9\xBB\x8E", "```python\ndef reverse_string(text):\n    return text[::-1]\n```",
        "1 x 2 = 2\n2 x 2 = 4\n3 x 2 = 6\n4 x 2 = 8", "Whoooo, hello!"}) {
    INFO(good);
    CHECK(incoherence(good) == "");
  }
  for (const char* bad : {"", "  \n ", "!!!!!!!!", "!", "00000000", "the the the the the the", "a\xEF\xBF\xBD", "~~~###;;;!!!",
                          "\xE7\x9A\x84\xE7\x9A\x84\xE7\x9A\x84\xE7\x9A\x84\xE7\x9A\x84\xE7\x9A\x84\xE7\x9A\x84\xE7\x9A\x84",
                          "The answer is is is is is is is is is is is is is is is is is is is"}) {
    INFO(bad);
    CHECK(incoherence(bad) != "");
  }
  const std::vector<int32_t> circling(64, 5);
  CHECK(incoherence("different words but always the same token id behind them", circling) != "");
}

TEST_CASE("sources of this repository never trip it") {
  int files = 0;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(DDTREE_SOURCE_DIR "/src")) {
    const std::string extension = entry.path().extension().string();
    if (extension != ".cpp" && extension != ".h") continue;
    if (entry.path().filename().string().find("tables") != std::string::npos) continue;  // generated tables are no text
    std::ifstream in(entry.path(), std::ios::binary);
    const std::string text(std::istreambuf_iterator<char>(in), {});
    DegeneracyDetector detector;
    detector.add(text);
    INFO(entry.path().string() << ": " << detector.reason());
    CHECK_FALSE(detector.tripped());
    ++files;
  }
  CHECK(files > 20);
}
