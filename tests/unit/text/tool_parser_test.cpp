#include "text/tool_parser.h"

#include <catch2/catch_test_macros.hpp>
#include <nlohmann/json.hpp>
#include <random>
#include <regex>
#include <string>
#include <vector>

using namespace ddtree;
using Json = nlohmann::ordered_json;

namespace {

constexpr TagTokens kIds{1, 2, 3, 4};
constexpr TagTokens kNoIds{};

const Json kTools = Json::parse(R"([
  {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {
     "s": {"type": "string"}, "i": {"type": "integer"}, "n": {"type": "number"}, "b": {"type": "boolean"}, "o": {"type": "object"},
     "a": {"type": "array"}, "u": {"type": ["string", "null"]}, "any": {"anyOf": [{"type": "integer"}]}}}}},
  {"name": "bare", "parameters": {"properties": {"i": {"type": "int"}}}}])");

struct Call {
  std::string name, arguments;
  bool operator==(const Call&) const = default;
};
struct Answer {
  std::string reasoning, content;
  std::vector<Call> calls;
  std::string unfinished;
  bool operator==(const Answer&) const = default;
};

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
      while (i + n < run.size() && (static_cast<unsigned char>(run[i + n]) & 0xC0) == 0x80) ++n;
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

void add(Answer& to, const AnswerDelta& delta) {
  to.reasoning += delta.reasoning;
  to.content += delta.content;
  for (const auto& call : delta.calls) {
    if (!call.id.empty()) {
      REQUIRE(call.index == static_cast<int>(to.calls.size()));
      to.calls.push_back({call.name, ""});
    }
    REQUIRE(call.index == static_cast<int>(to.calls.size()) - 1);
    to.calls.back().arguments += call.arguments;
  }
  if (delta.unfinished) to.unfinished = std::to_string(delta.unfinished->index) + ":" + delta.unfinished->raw;
}

Answer parse(ToolFormat format, const TagTokens& tags, bool inside, const std::vector<TextPiece>& pieces, size_t per_feed = 1,
             const Json& tools = kTools) {
  AnswerOptions options;
  options.reasoning.starts_inside = inside;
  options.tools = {format, tags, {}};
  AnswerParser parser(options, tools);
  Answer out;
  for (size_t i = 0; i < pieces.size(); i += per_feed)
    add(out, parser.feed({pieces.begin() + static_cast<ptrdiff_t>(i),
                          pieces.begin() + static_cast<ptrdiff_t>(std::min(pieces.size(), i + per_feed))}));
  add(out, parser.flush());
  CHECK(parser.calls() == static_cast<int>(out.calls.size()));
  return out;
}

Answer whole(ToolFormat format, const std::string& text, const TagTokens& tags, bool inside = false) {
  std::mt19937 random(1);
  return parse(format, tags, inside, pieces_of(text, tags, random, 1 << 20));
}

std::string call(const std::string& body) { return "<tool_call>\n" + body + "\n</tool_call>"; }

}  // namespace

TEST_CASE("qwen3_coder calls", "[tools]") {
  for (const TagTokens& tags : {kIds, kNoIds}) {
    const auto coder = [&](const std::string& text) { return whole(ToolFormat::kQwen3Coder, text, tags); };
    CHECK(coder(call("<function=f>\n<parameter=s>\nZürich\n</parameter>\n<parameter=i>\n3\n</parameter>\n</function>")) ==
          Answer{"", "", {{"f", R"({"s": "Zürich", "i": 3})"}}, ""});
    CHECK(coder("Let me look.\n\n" + call("<function=f>\n</function>") + "\n" +
                call("<function=bare>\n<parameter=i>\n1\n</parameter>\n</function>") + "\n") ==
          Answer{"", "Let me look.", {{"f", "{}"}, {"bare", R"({"i": 1})"}}, ""});
    CHECK(coder(call("<function=f></function>\n<function=g>\n</function>")) == Answer{"", "", {{"f", "{}"}, {"g", "{}"}}, ""});
    CHECK(coder(call("<function=f>\n</function>") + "\n\nDone.") == Answer{"", "\n\nDone.", {{"f", "{}"}}, ""});
    // Missing ends: of the parameter, of the function.
    CHECK(coder(call("<function=f>\n<parameter=s>\nx\n<parameter=i>\n2\n</function>")) ==
          Answer{"", "", {{"f", R"({"s": "x", "i": 2})"}}, ""});
    CHECK(coder(call("<function=f>\n<parameter=s>\nx\n</parameter>")) == Answer{"", "", {{"f", R"({"s": "x"})"}}, ""});
    CHECK(coder(call("<function=f>")) == Answer{"", "", {{"f", "{}"}}, ""});
    // Exactly one newline at either end is the tags'.
    CHECK(coder(call("<function=f>\n<parameter=s>\n\n  x\n\n</parameter>\n</function>")).calls[0].arguments == R"({"s": "\n  x\n"})");
    CHECK(coder(call("<function=f><parameter=s>a<b></parameter></function>")).calls[0].arguments == R"({"s": "a<b>"})");
  }
}

TEST_CASE("values are converted by the schema", "[tools]") {
  const auto value = [](const std::string& key, const std::string& text) {
    const Answer out =
        whole(ToolFormat::kQwen3Coder, call("<function=f>\n<parameter=" + key + ">\n" + text + "\n</parameter>\n</function>"), kIds);
    REQUIRE(out.calls.size() == 1);
    const std::string& arguments = out.calls[0].arguments;
    INFO(arguments);
    REQUIRE(Json::accept(arguments));
    return arguments.substr(arguments.find(": ") + 2, arguments.size() - arguments.find(": ") - 3);
  };
  CHECK(value("s", "5") == "\"5\"");
  CHECK(value("s", "null") == "null");
  CHECK(value("s", "nullable") == "\"nullable\"");
  CHECK(value("s", "NULL") == "null");
  CHECK(value("s", "\"q\" \\ \t\x01") == R"("\"q\" \\ \t\u0001")");
  CHECK(value("s", "") == "\"\"");
  CHECK(value("i", "-07") == "-7");
  CHECK(value("i", "x") == "\"x\"");
  CHECK(value("i", "1.5") == "\"1.5\"");
  CHECK(value("i", "Null") == "null");
  CHECK(value("i", "123456789012345678901234567890") == "123456789012345678901234567890");
  CHECK(value("n", "3") == "3");
  CHECK(value("n", "3.0") == "3.0");
  CHECK(value("n", "1e5") == "100000.0");
  CHECK(value("n", "nan") == "\"nan\"");
  CHECK(value("b", "True") == "true");
  CHECK(value("b", "yes") == "false");
  CHECK(value("o", R"({"k": [1, "é"]})") == R"({"k": [1, "é"]})");
  CHECK(value("o", "{'k': True, 'l': None}") == R"({"k": true, "l": null})");
  CHECK(value("o", "{oops") == "\"{oops\"");
  CHECK(value("a", "[1,2]") == "[1, 2]");
  CHECK(value("u", "5") == "5");  // a list of types: read as a literal if it is one
  CHECK(value("u", "five") == "\"five\"");
  CHECK(value("any", "5") == "\"5\"");  // no simple type: text
  CHECK(value("unknown", "5") == "\"5\"");
}

TEST_CASE("text values arrive while they are generated", "[tools]") {
  ToolParser parser({ToolFormat::kQwen3Coder, kIds, {}}, kTools);
  AnswerDelta out;
  parser.feed({{"<tool_call>", 3, false}, {"\n<function=f>\n<parameter=s>\nlong text", -1, false}}, out);
  REQUIRE(out.calls.size() == 2);
  CHECK(std::regex_match(out.calls[0].id, std::regex("call_[0-9a-f]{24}")));
  CHECK(out.calls[0].name == "f");
  CHECK(out.calls[1].arguments == R"({"s": "long text)");
}

TEST_CASE("a tag that opens no call is prose and arrives", "[tools]") {
  for (const TagTokens& tags : {kIds, kNoIds})
    for (const ToolFormat format : {ToolFormat::kQwen3Coder, ToolFormat::kHermes}) {
      const std::string prose =
          "The tag <tool_call> opens a call; <tool_call>\n<function=> and <tool_call>{no} too. </tool_call> closes it.";
      CHECK(whole(format, prose, tags) == Answer{"", prose, {}, ""});
      ToolParser parser({format, tags, {}}, kTools);
      AnswerDelta out;
      std::mt19937 random(3);
      parser.feed(pieces_of("Say <tool_call> and go on", tags, random, 3), out);
      CHECK(out.content == "Say <tool_call> and go on");  // at once, not at the end
      CHECK(whole(format, "ends with <tool_call>", tags) == Answer{"", "ends with <tool_call>", {}, ""});
    }
  CHECK(whole(ToolFormat::kQwen3Coder, "<tool_call><function=f> is how it starts", kIds).content ==
        "<tool_call><function=f> is how it starts");
  for (const TagTokens& tags : {kIds, kNoIds})
    CHECK(whole(ToolFormat::kQwen3Coder, "<tool_call> no\n" + call("<function=f>\n</function>"), tags) ==
          Answer{"", "<tool_call> no", {{"f", "{}"}}, ""});
}

TEST_CASE("a delimiter with an id counts by its id only", "[tools]") {
  const std::string text = call("<function=f>\n</function>");
  for (const ToolFormat format : {ToolFormat::kQwen3Coder, ToolFormat::kHermes}) {
    const Answer out = parse(format, kIds, false, {{text, -1, false}});  // spelled by ordinary tokens
    CHECK(out == Answer{"", text, {}, ""});
  }
}

TEST_CASE("hermes calls", "[tools]") {
  for (const TagTokens& tags : {kIds, kNoIds}) {
    const auto hermes = [&](const std::string& text) { return whole(ToolFormat::kHermes, text, tags); };
    CHECK(hermes(call(R"({"name": "f", "arguments": {"s": "</tool>", "o": {"k": [1, {}]}}})")) ==
          Answer{"", "", {{"f", R"({"s": "</tool>", "o": {"k": [1, {}]}})"}}, ""});
    CHECK(hermes("Hm.\n" + call(R"({"name": "f", "arguments": {}})") + "\n" + call(R"({"arguments": {"i": 1}, "name": "g"})")) ==
          Answer{"", "Hm.", {{"f", "{}"}, {"g", R"({"i":1})"}}, ""});
    CHECK(hermes(call(R"({"name": "f"})")).calls == std::vector<Call>{{"f", "{}"}});
    CHECK(hermes(call(R"({"name": "f", "arguments": "{\"i\": 2}"})")).calls == std::vector<Call>{{"f", R"({"i":2})"}});
    CHECK(Json::parse(hermes(call("{\"name\": \"f\", \"arguments\": {\"s\": \"a\nb\"}}")).calls.at(0).arguments)["s"] == "a\nb");
    CHECK(hermes(call(R"({"nome": "f"})")).calls.empty());
    CHECK(hermes(call(R"({"nome": "f"})")).content == call(R"({"nome": "f"})"));
  }
}

TEST_CASE("an interrupted call", "[tools]") {
  const std::string coder = "x\n\n<tool_call>\n<function=f>\n<parameter=s>\nhal";
  CHECK(whole(ToolFormat::kQwen3Coder, coder, kIds) ==
        Answer{"", "x", {{"f", R"({"s": "hal)"}}, "0:<tool_call>\n<function=f>\n<parameter=s>\nhal"});
  CHECK(whole(ToolFormat::kQwen3Coder, "<tool_call>\n<function=f", kIds) == Answer{"", "<tool_call>\n<function=f", {}, ""});
  CHECK(whole(ToolFormat::kQwen3Coder, "<tool_call>\n<function=f>\n</function>", kIds) ==
        Answer{"", "", {{"f", "{}"}}, ""});  // only the closing tag is missing
  const Answer second =
      whole(ToolFormat::kQwen3Coder, call("<function=f>\n</function>") + "\n<tool_call>\n<function=f>\n<parameter=i>\n1", kIds);
  CHECK(second.unfinished == "1:<tool_call>\n<function=f>\n<parameter=i>\n1");
  CHECK(whole(ToolFormat::kHermes, R"(<tool_call>{"name": "f", "arguments": {"a": [1)", kIds).unfinished ==
        R"(0:<tool_call>{"name": "f", "arguments": {"a": [1)");
}

TEST_CASE("reasoning, then calls; a call inside the block", "[tools]") {
  for (const TagTokens& tags : {kIds, kNoIds}) {
    const std::string body = call("<function=f>\n</function>");
    CHECK(whole(ToolFormat::kQwen3Coder, "why\n</think>\n\n" + body, tags, true) == Answer{"why", "", {{"f", "{}"}}, ""});
    CHECK(whole(ToolFormat::kQwen3Coder, "why\n</think>\n\nText\n\n" + body, tags, true) == Answer{"why", "Text", {{"f", "{}"}}, ""});
    CHECK(whole(ToolFormat::kQwen3Coder, "why\n" + body, tags, true) == Answer{"why", "", {{"f", "{}"}}, ""});
    CHECK(whole(ToolFormat::kQwen3Coder, "why <tool_call> so\n</think>\n\nx", tags, true) == Answer{"why <tool_call> so", "x", {}, ""});
  }
  std::mt19937 random(1);
  const std::string text = "a\n</think>\n\n" + call("<function=f>\n</function>");
  CHECK(parse(ToolFormat::kQwen3Coder, kIds, true, pieces_of(text, kIds, random, 4), 1, Json()) ==
        Answer{"a", call("<function=f>\n</function>"), {}, ""});  // no tools in the request
}

TEST_CASE("special tokens are hidden unless asked for", "[tools]") {
  AnswerParser hidden({}, Json()), shown({{}, {}, true}, Json());
  const std::vector<TextPiece> pieces = {{"a", -1, false}, {"<|im_end|>", 9, true}};
  Answer one, two;
  add(one, hidden.feed(pieces));
  add(one, hidden.flush());
  add(two, shown.feed(pieces));
  add(two, shown.flush());
  CHECK(one.content == "a");
  CHECK(two.content == "a<|im_end|>");
}

TEST_CASE("answers do not depend on the cut", "[tools]") {
  const std::string two =
      call("<function=f>\n<parameter=s>\nZü \"x\" </parameter <b>\n\n</parameter>\n<parameter=o>\n{\"k\": 1}\n</parameter>\n</function>") +
      "\n" + call("<function=bare>\n</function>");
  const std::string texts[] = {
      "why\n</think>\n\nText\n\n" + two + "\n\nafter\n",
      "why\n" + two,
      "prose <tool_call> and <tool_call>\n<function=f> "
      "not\n</think>\n\n<tool_call>\n<function=f>\n<parameter=s>\nnull\n</parameter>\nprose",
      "x</think>" + call(R"({"name": "f", "arguments": {"s": "a\"}{", "n": -1.5e3}})") + "  " + call(R"({"arguments": {}, "name": "g"})"),
      "x</think><tool_call>{\"name\": \"f\", \"arguments\": {\"a\": tru",
      "x</think><tool_call><tool_call>\n<function=f></function>\n<function=g><parameter=s>1</function></tool_call></tool_call>\n",
      "</think>\n\n\n\n",
      "</think>a\n\n\n<tool_call>\n<function=f>\n<parameter=s>\nnul"};
  std::mt19937 random(11);
  for (const TagTokens& tags : {kIds, kNoIds})
    for (const ToolFormat format : {ToolFormat::kQwen3Coder, ToolFormat::kHermes})
      for (const std::string& text : texts) {
        const Answer expected = whole(format, text, tags, true);
        for (int round = 0; round < 60; ++round) {
          INFO(text << "\nround " << round);
          const Answer got = parse(format, tags, true, pieces_of(text, tags, random, round < 17 ? round : 0), 1 + random() % 7);
          CHECK(got == expected);
          if (got != expected) return;
        }
      }
}

TEST_CASE("random tag soup neither crashes nor loses text without calls", "[tools]") {
  const char* bits[] = {"<tool_call>",
                        "</tool_call>",
                        "<function=f>",
                        "<function=",
                        "</function>",
                        "<parameter=s>",
                        "<parameter=o>",
                        "</parameter>",
                        "<think>",
                        "</think>",
                        "\n",
                        " ",
                        "x",
                        "{",
                        "\"name\"",
                        ":",
                        "\"f\"",
                        ",",
                        "}",
                        "é",
                        "<",
                        ">",
                        "\"arguments\"",
                        "null",
                        "1"};
  std::mt19937 random(5);
  for (int round = 0; round < 3000; ++round) {
    std::string text;
    for (int n = static_cast<int>(random() % 24); n > 0; --n) text += bits[random() % std::size(bits)];
    for (const TagTokens& tags : {kIds, kNoIds})
      for (const ToolFormat format : {ToolFormat::kQwen3Coder, ToolFormat::kHermes}) {
        const Answer one = whole(format, text, tags);
        const Answer other = parse(format, tags, false, pieces_of(text, tags, random, 0), 1 + random() % 4);
        INFO(text);
        REQUIRE(one == other);
        for (size_t i = 0; i < one.calls.size(); ++i)
          if (one.unfinished.empty() || i + 1 < one.calls.size()) {
            INFO(one.calls[i].arguments);
            if (format == ToolFormat::kQwen3Coder) REQUIRE(Json::accept(one.calls[i].arguments));
          }
        if (one.calls.empty() && one.reasoning.empty() && text.find("think>") == std::string::npos) REQUIRE(one.content == text);
      }
  }
}

TEST_CASE("tool formats by name", "[tools]") {
  CHECK(*tool_format("qwen3_coder") == ToolFormat::kQwen3Coder);
  CHECK(*tool_format("qwen25") == ToolFormat::kHermes);
  CHECK(*tool_format("hermes") == ToolFormat::kHermes);
  CHECK(*tool_format("") == ToolFormat::kNone);
  CHECK(tool_format("mistral").status().message().find("qwen3_coder") != std::string::npos);
}
