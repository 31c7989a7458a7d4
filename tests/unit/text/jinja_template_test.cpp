// The engine's own contracts. Equality with jinja2 over thousands of templates is tests/clients/jinja-oracle.mjs.
#include <catch2/catch_test_macros.hpp>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "text/jinja.h"

using namespace ddtree;
using Json = nlohmann::ordered_json;
using Kind = jinja::Failure::Kind;

namespace {

std::string read(const std::string& path) {
  std::ifstream in(std::string(DDTREE_SOURCE_DIR) + "/" + path, std::ios::binary);
  REQUIRE(in.is_open());
  return {std::istreambuf_iterator<char>(in), {}};
}

jinja::Template parsed(const std::string& source, jinja::Limits limits = {}) {
  auto result = jinja::Template::parse(source, Json(), limits);
  if (const auto* failure = std::get_if<jinja::Failure>(&result)) FAIL(source << ": " << failure->message);
  return std::get<jinja::Template>(result);
}

std::string render(const std::string& source, const Json& variables = Json::object()) {
  auto result = parsed(source).render(variables);
  if (const auto* failure = std::get_if<jinja::Failure>(&result)) FAIL(source << ": " << failure->message);
  return std::get<std::string>(result);
}

jinja::Failure refused(const std::string& source, const Json& variables = Json::object(), jinja::Limits limits = {}) {
  auto result = jinja::Template::parse(source, Json(), limits);
  if (const auto* failure = std::get_if<jinja::Failure>(&result)) return *failure;
  auto rendered = std::get<jinja::Template>(result).render(variables);
  if (const auto* text = std::get_if<std::string>(&rendered)) FAIL("rendered: " << text->substr(0, 200));
  return std::get<jinja::Failure>(rendered);
}

std::string repeated(const std::string& text, int n) {
  std::string out;
  for (int i = 0; i < n; ++i) out += text;
  return out;
}

}  // namespace

TEST_CASE("the golden prompts come out of the tiny pair's template", "[jinja]") {
  const auto tiny = parsed(read("models/tiny/target/chat_template.jinja"));
  std::ifstream lines(std::string(DDTREE_SOURCE_DIR) + "/tests/data/golden/golden.jsonl");
  std::string line;
  int equal = 0, count = 0;
  while (std::getline(lines, line)) {
    const Json golden = Json::parse(line);
    const Json variables = {{"messages", golden["messages"]},
                            {"tools", golden["tools"]},
                            {"enable_thinking", golden["thinking"]},
                            {"add_generation_prompt", true}};
    const auto result = tiny.render(variables);
    REQUIRE(std::holds_alternative<std::string>(result));
    CHECK(std::get<std::string>(result) == golden["prompt"].get<std::string>());
    equal += std::get<std::string>(result) == golden["prompt"];
    ++count;
  }
  CHECK(count == 40);
  CHECK(equal == 40);
}

TEST_CASE("failures say what, where and of which kind", "[jinja]") {
  auto f = refused("a\n{% if x %}\nb");
  CHECK(f.kind == Kind::kSyntax);
  CHECK(f.line == 3);
  CHECK(f.message.find("endif") != std::string::npos);
  f = refused("{{ 1 }}\n\n{{ nope.x }}");
  CHECK(f.kind == Kind::kRuntime);
  CHECK(f.line == 3);
  CHECK(f.message == "'nope' is undefined");
  f = refused("\n{{ raise_exception('No ' ~ what) }}", {{"what", "way: é"}});
  CHECK(f.kind == Kind::kRaised);
  CHECK(f.message == "No way: é");
  CHECK(f.line == 2);
  CHECK(refused("{% include 'other' %}").kind == Kind::kSyntax);
  CHECK(refused("{% extends 'other' %}").message.find("extends") != std::string::npos);
  CHECK(refused("{{ x|random }}").message.find("chance") != std::string::npos);
  CHECK(refused("{{ x|nofilter }}").kind == Kind::kSyntax);
  CHECK(refused("{{ lipsum() }}").kind == Kind::kRuntime);
}

TEST_CASE("what would change a list or dict is refused when it is called", "[jinja]") {
  const Json variables = {{"l", {1, 2}}, {"d", {{"a", 1}}}};
  for (const char* call :
       {"l.append(3)", "l.pop()", "l.sort()", "l.extend([1])", "l.insert(0, 1)", "l.remove(1)", "l.clear()", "l.reverse()", "d.update({})",
        "d.pop('a')", "d.clear()", "d.setdefault('b', 1)", "d.popitem()", "l['append'](1)"}) {
    INFO(call);
    const auto f = refused("{{ " + std::string(call) + " }}", variables);
    CHECK(f.kind == Kind::kRuntime);
    CHECK(f.message.find("is unsafe") != std::string::npos);
  }
  CHECK(render("[{{ l.append }}]", variables) == "[]");  // only the use is an error
  CHECK(render("{{ d.pop }}{{ d['pop'] }}", {{"d", {{"pop", 1}}}}) == "1");
}

TEST_CASE("numbers keep JSON's kinds, keys their order", "[jinja]") {
  const Json v =
      Json::parse(R"({"d": {"z": 1, "a": 1.0, "big": 18446744073709551615, "neg": -9223372036854775808, "e": 1e100, "s": "é\n\u0001/<"}})");
  CHECK(render("{{ d|tojson }}", v) ==
        R"({"z": 1, "a": 1.0, "big": 18446744073709551615, "neg": -9223372036854775808, "e": 1e+100, "s": "é\n\u0001/<"})");
  CHECK(render("{{ d.big + 1 }} {{ d.neg - 1 }} {{ d.z / 1 }} {{ 7 // 2 }} {{ 7.0 // 2 }}", v) ==
        "18446744073709551616 -9223372036854775809 1.0 3 3.0");
  CHECK(refused("{{ 2 ** 127 }}").message.find("127 bits") != std::string::npos);
}

TEST_CASE("no template runs away", "[jinja]") {
  CHECK(refused("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}").kind == Kind::kLimit);
  CHECK(refused("{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}").kind == Kind::kLimit);
  CHECK(
      refused(
          "{% macro a(k) %}{{ caller(k) }}{% endmacro %}{% macro b(k) %}{% call(k) a(k) %}{{ b(k) }}{% endcall %}{% endmacro %}{{ b(1) }}")
          .kind == Kind::kLimit);
  CHECK(refused("{% for a in range(100000) %}{% for b in range(100000) %}{% for c in range(9) %}{% endfor %}{% endfor %}{% endfor %}",
                Json::object(), {1 << 20, 200'000, 150})
            .kind == Kind::kLimit);
  CHECK(refused("{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}").kind == Kind::kLimit);
  CHECK(refused("{% set ns = namespace(s=[1]) %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}").kind == Kind::kLimit);
  CHECK(refused("{{ 'x' * 10 ** 12 }}").kind == Kind::kLimit);
  CHECK(refused("{{ [0] * 10 ** 12 }}").kind == Kind::kLimit);
  CHECK(refused("{{ 'x'.center(10 ** 11) }}").kind == Kind::kLimit);
  CHECK(refused("{{ 'ab'.replace('', 'x' * 10 ** 6) ~ 'y' * 10 ** 8 }}").kind == Kind::kLimit);
  CHECK(refused("{% for i in range(100000) %}{{ 'x' * 10000 }}{% endfor %}").kind == Kind::kLimit);
  CHECK(refused("{{ range(10 ** 9) }}").message.find("MAX_RANGE") != std::string::npos);
  CHECK(refused("{{ '%1000000000d' % 1 }}").kind == Kind::kRuntime);
  CHECK(refused("{% set ns = namespace() %}{% set ns.x = [ns] %}{{ ns }}").kind == Kind::kLimit);
}

TEST_CASE("deep nesting is refused, not a crash", "[jinja]") {
  for (const int n : {1000, 100'000}) {
    CHECK(refused("{{ " + repeated("(", n) + "1" + repeated(")", n) + " }}").kind == Kind::kSyntax);
    CHECK(refused("{{ " + repeated("[", n) + repeated("]", n) + " }}").kind == Kind::kSyntax);
    CHECK(refused("{{ " + repeated("not ", n) + "1 }}").kind == Kind::kSyntax);
    CHECK(refused("{{ " + repeated("-", n) + "1 }}").kind == Kind::kSyntax);
    CHECK(refused("{{ 1" + repeated(" + 1", n) + " }}").kind == Kind::kSyntax);
    CHECK(refused("{{ 1" + repeated("|abs", n) + " }}").kind == Kind::kSyntax);
    CHECK(refused("{{ x" + repeated(".x", n) + " }}").kind == Kind::kSyntax);
    CHECK(refused("{{ 1" + repeated(" if 1 else 1", n) + " }}").kind == Kind::kSyntax);
    CHECK(refused("{{ 1" + repeated(" ** 1", n) + " }}").kind == Kind::kSyntax);
    CHECK(refused(repeated("{% if 1 %}", n) + repeated("{% endif %}", n)).kind == Kind::kSyntax);
    CHECK(refused("{% if 1 %}" + repeated("{% elif 1 %}", n) + "{% endif %}").kind == Kind::kSyntax);
  }
  Json deep = 1;
  for (int i = 0; i < 1000; ++i) deep = Json::array({std::move(deep)});
  CHECK(refused("{{ x }}", {{"x", deep}}).kind == Kind::kLimit);
  CHECK(render("{{ 1" + repeated(" ~ 1", 3000) + " }}") == repeated("1", 3001));  // flat, so any length goes
  CHECK(render("{{ 1" + repeated(" + 1", 500) + " }}") == "501");
}

TEST_CASE("broken templates of every length are refused or rendered", "[jinja]") {
  const std::string source = read("tests/data/templates/community-qwen.jinja");
  const Json request = {{"messages", {{{"role", "user"}, {"content", "hi"}}}}, {"add_generation_prompt", true}};
  int refusals = 0;
  for (size_t n = 1; n < source.size(); n += 97) {
    auto result = jinja::Template::parse(source.substr(0, n), Json());
    if (const auto* failure = std::get_if<jinja::Failure>(&result)) {
      CHECK(failure->kind == Kind::kSyntax);
      CHECK(failure->line > 0);
      ++refusals;
    } else {
      (void)std::get<jinja::Template>(result).render(request);
    }
  }
  CHECK(refusals > 50);
}

TEST_CASE("one template renders on many threads", "[jinja]") {
  const auto shared = parsed(read("tests/data/templates/qwen3.6.jinja"));
  const auto request = [](int i) {
    return Json{{"messages", {{{"role", "user"}, {"content", "n" + std::to_string(i)}}}}, {"add_generation_prompt", true}};
  };
  std::vector<std::string> out(4);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&, t] {
      for (int i = 0; i < 50; ++i) {
        const auto result = shared.render(request(t));
        if (const auto* text = std::get_if<std::string>(&result)) out[static_cast<size_t>(t)] = *text;
      }
    });
  for (auto& thread : threads) thread.join();
  for (int t = 0; t < 4; ++t)
    CHECK(out[static_cast<size_t>(t)] == "<|im_start|>user\nn" + std::to_string(t) + "<|im_end|>\n<|im_start|>assistant\n<think>\n");
}

TEST_CASE("python literals", "[jinja]") {
  Json out;
  REQUIRE(jinja::parse_python_literal("{'a': [1, -2.5, True, None], 'b': ('x', \"y\")}", out));
  CHECK(out.dump() == R"({"a":[1,-2.5,true,null],"b":["x","y"]})");
  for (const char* no : {"f(1)", "a", "1 + 2", "", "[1", "x.y", "'a' if 1 else 'b'", "1|abs"}) {
    INFO(no);
    CHECK_FALSE(jinja::parse_python_literal(no, out));
  }
}
