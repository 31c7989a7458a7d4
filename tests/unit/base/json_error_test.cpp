// The parser's words, turned into ours. What it really says is tested where it is called.
#include "base/json_error.h"

#include <catch2/catch_test_macros.hpp>
#include <nlohmann/json.hpp>

using ddtree::json_error_text;

namespace {

std::string said_of(const std::string& text) {
  try {
    return "accepted: " + nlohmann::json::parse(text).dump();
  } catch (const std::exception& e) {
    return json_error_text(e.what());
  }
}

}  // namespace

TEST_CASE("a parse error is its place and what is wrong there") {
  CHECK(said_of("{oops") == "line 1, column 2: invalid literal; last read: '{o'; expected string literal");
  CHECK(said_of("[1,\n 2") == "line 2, column 3: unexpected end of input; expected ']'");
  CHECK(said_of("") == "line 1, column 1: unexpected end of input; expected '[', '{', or a literal");
}

TEST_CASE("none of the library's ids, nothing unprintable, nothing long") {
  const std::string broken[] = {"{\"a\": \"\xff\xfe\"}",      "1e999", "[1,]", "{\"a\" 1}", "\"\n\"", "\"\\ud800\"", "nul", "[[[",
                                "\"" + std::string(5000, 'x')};
  for (const std::string& text : broken) {
    const std::string said = said_of(text);
    INFO(said);
    CHECK_FALSE(said.starts_with("accepted"));
    CHECK(said.find("json.exception") == std::string::npos);
    CHECK(said.find("parse error") == std::string::npos);
    CHECK(said.find("while parsing") == std::string::npos);
    CHECK(said.size() < 260);
    for (const char c : said) CHECK((c >= 0x20 && c < 0x7f));
  }
  CHECK(json_error_text("something else") == "something else");
  CHECK(json_error_text("") == "");
}
