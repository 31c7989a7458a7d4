// Unit files and start scripts, read as systemd and the shell read them.
#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <random>

#include "server/units/shell_script.h"
#include "server/units/unit_file.h"

using namespace ddtree;
using Catch::Matchers::ContainsSubstring;
using Words = std::vector<std::string>;

namespace {

Words split(const std::string& text) {
  auto words = split_unit_words(text);
  INFO(text);
  REQUIRE(words);
  return *words;
}

std::vector<ShellCommand> shell(const std::string& text, const Variables& unit = {}) {
  auto commands = parse_shell_script(text, "start.sh", [&](const std::string& name) { return find_variable(unit, name); });
  INFO(text << ": " << (commands ? "" : commands.status().message()));
  REQUIRE(commands);
  return *commands;
}

std::string shell_error(const std::string& text) {
  auto commands = parse_shell_script(text, "start.sh", [](const std::string&) { return std::nullopt; });
  INFO(text);
  REQUIRE_FALSE(commands);
  CHECK(commands.status().code() == Code::kUsage);
  return commands.status().message();
}

}  // namespace

TEST_CASE("unit files: sections, continued lines, comments between them, resets, drop-ins", "[units]") {
  auto unit = UnitFile::parse(
      "# top\n[Unit]\nDescription = a server \nAfter=a.target\n\n[Service]\nExecStart=/bin/a \\\n  --one \\\n# not this\n; nor this\n  "
      "--two\r\n"
      "Environment=A=1\nEnvironment=B=2\nEnvironment=\nEnvironment=C=3\nLast=no newline",
      "a.service");
  REQUIRE(unit);
  CHECK(unit->value("Unit", "Description") == "a server");
  CHECK(split(unit->value("Service", "ExecStart")) == Words{"/bin/a", "--one", "--two"});
  CHECK(unit->values("Service", "ExecStart")[0].line == 7);
  REQUIRE(unit->values("Service", "Environment").size() == 1);
  CHECK(unit->value("Service", "Environment") == "C=3");
  CHECK(unit->value("Service", "Last") == "no newline");
  CHECK(unit->value("Install", "WantedBy").empty());
  auto drop_in = UnitFile::parse("[Service]\nExecStart=\nExecStart=/bin/b\n", "a.service.d/x.conf");
  REQUIRE(drop_in);
  unit->add(*drop_in);
  REQUIRE(unit->values("Service", "ExecStart").size() == 1);
  CHECK(unit->values("Service", "ExecStart")[0].path == "a.service.d/x.conf");
}

TEST_CASE("unit files: what is none is named by file and line", "[units]") {
  const auto error = [](const char* text) {
    auto unit = UnitFile::parse(text, "u.service");
    REQUIRE_FALSE(unit);
    return unit.status().message();
  };
  CHECK_THAT(error("ExecStart=/bin/a\n"), ContainsSubstring("u.service:1: ExecStart stands before any [Section]"));
  CHECK_THAT(error("[Service]\n\nhello\n"), ContainsSubstring("u.service:3: found 'hello'"));
  CHECK_THAT(error("[Service\n"), ContainsSubstring("ends with ]"));
}

TEST_CASE("command lines: quotes, escapes, specifiers and variables as systemd.syntax(7) has them", "[units]") {
  CHECK(split("  a\tb  ") == Words{"a", "b"});
  CHECK(split("'a b' \"c 'd'\" e\"f g\"h") == Words{"a b", "c 'd'", "ef gh"});
  CHECK(split(R"(a\x20b \"q\" c\sd \101 "" '')") == Words{"a b", "\"q\"", "c d", "A", "", ""});
  CHECK(split("--port 3000%i ${A} $B $$C %%") == Words{"--port", "3000%i", "${A}", "$B", "$$C", "%%"});
  CHECK(split(R"(grep '\.x\d')") == Words{"grep", "\\.x\\d"});  // no escapes of systemd's: left alone, with a warning
  CHECK_FALSE(split_unit_words("'open"));
  CHECK_FALSE(split_unit_words("end\\"));
}

TEST_CASE("command lines: every word survives being written and read again", "[units]") {
  std::mt19937 random(std::random_device{}());
  const uint32_t seed = random();
  random.seed(seed);
  INFO("seed " << seed);
  const std::string alphabet = "ab \t\n\"'\\$%;#=-{}äß";
  for (int round = 0; round < 2000; ++round) {
    Words words;
    std::string line;
    for (uint32_t n = random() % 5; n-- > 0;) {
      std::string word;
      for (uint32_t k = random() % 8; k-- > 0;) word += alphabet[random() % alphabet.size()];
      line += (line.empty() ? "" : " ") + quote_unit_word(word);
      words.push_back(std::move(word));
    }
    INFO(line);
    CHECK(line.find('\n') == std::string::npos);
    REQUIRE(split(line) == words);
  }
  CHECK(quote_unit_word("--plain=/a/b") == "--plain=/a/b");
}

TEST_CASE("variables: Environment= words and EnvironmentFile= lines", "[units]") {
  auto set = parse_environment(R"("A=b c" D=e "F=\"g\"")");
  REQUIRE(set);
  CHECK(*set == Variables{{"A", "b c"}, {"D", "e"}, {"F", "\"g\""}});
  CHECK_FALSE(parse_environment("A=b c"));
  CHECK_FALSE(parse_environment("1A=b"));
  CHECK(parse_environment_file("# x\nA=b c\n;B=1\n C = \"d e\" \nD='f'g\\\nh\nno assignment\nE=\n") ==
        Variables{{"A", "b c"}, {"C", "d e"}, {"D", "fgh"}, {"E", ""}});
  CHECK(find_variable({{"A", "1"}, {"A", "2"}}, "A") == "2");
}

TEST_CASE("scripts: commands, variables, quotes, redirections", "[units]") {
  auto c = shell(
      "#!/bin/bash\nset -euo pipefail\nMODEL=/m  # here\nPORT=${PORT:-31000}; cd /srv || exit 1\nA=1 exec \\\n  python -m s \"$MODEL\" "
      "'$x' a\\ b >>/var/log/x 2>&1\n");
  REQUIRE(c.size() == 6);
  CHECK(c[0].words == Words{"set", "-euo", "pipefail"});
  CHECK(c[1].assignments[0].second == "/m");
  CHECK(c[3].words == Words{"cd", "/srv"});
  CHECK(c[4].fallback);
  CHECK(c[5].words == Words{"exec", "python", "-m", "s", "/m", "$$x", "a b"});
  CHECK(c[5].assignments[0].first == "A");
  CHECK(c[5].redirections == Words{">>/var/log/x", "2>&1"});
  CHECK(c[5].line == 5);
}

TEST_CASE("scripts: a unit's variable stays one, except where the shell would split it", "[units]") {
  const Variables unit = {{"KEY", "s3cret"}, {"EXTRA", "--a 1  --b"}, {"NONE", ""}};
  CHECK(shell("x --k $KEY \"${KEY}\" -$KEY-", unit)[0].words == Words{"x", "--k", "${KEY}", "${KEY}", "-${KEY}-"});
  CHECK(shell("x $EXTRA y", unit)[0].words == Words{"x", "--a", "1", "--b", "y"});
  CHECK(shell("x \"$EXTRA\" $NONE \"$NONE\"", unit)[0].words == Words{"x", "${EXTRA}", ""});
  CHECK(shell("x $OTHER ${OTHER:-d} $@", unit)[0].words == Words{"x", "${OTHER}", "d"});
  CHECK(shell("export A=1\nA=$A/2\nx $A")[2].words == Words{"x", "1/2"});
}

TEST_CASE("scripts: what needs a shell is refused by name and line, or left as it is", "[units]") {
  CHECK_THAT(shell_error("a\nb | tee x"), ContainsSubstring("start.sh:2: a pipe"));
  CHECK_THAT(shell_error("if true; then a; fi"), ContainsSubstring("'if' needs a shell"));
  CHECK_THAT(shell_error("while :; do a; done"), ContainsSubstring("'while'"));
  CHECK_THAT(shell_error("a &"), ContainsSubstring("background"));
  CHECK_THAT(shell_error("(a)"), ContainsSubstring("subshell"));
  CHECK_THAT(shell_error("cat <<EOF\nx\nEOF"), ContainsSubstring("here-document"));
  CHECK_THAT(shell_error("a 'open"), ContainsSubstring("' is open"));
  CHECK_THAT(shell_error("a ${b#c}"), ContainsSubstring("${b"));
  // Only who uses that word has to refuse it.
  CHECK(shell("eval \"$(conda shell.bash hook)\"; x `date`")[1].words == Words{"x", "`date`"});
}

TEST_CASE("scripts: broken ones end in words, never in a crash", "[units]") {
  std::mt19937 random(std::random_device{}());
  const uint32_t seed = random();
  random.seed(seed);
  INFO("seed " << seed);
  const std::string alphabet = "ab=$\"'\\{}()|&;<>`#-:@ \n\t0";
  for (int round = 0; round < 20000; ++round) {
    std::string text;
    for (uint32_t k = random() % 24; k-- > 0;) text += alphabet[random() % alphabet.size()];
    auto commands = parse_shell_script(
        text, "s", [](const std::string& name) { return name == "a" ? std::optional<std::string>("v w") : std::nullopt; });
    if (!commands) CHECK_FALSE(commands.status().message().empty());
    auto unit = UnitFile::parse("[S]\nX=" + text, "u");
    if (!unit) CHECK_FALSE(unit.status().message().empty());
  }
}

TEST_CASE("a byte order mark is skipped, a NUL byte refused with its line", "[units]") {
  auto marked = UnitFile::parse("\xEF\xBB\xBF[Service]\nExecStart=/bin/true\n", "x.service");
  REQUIRE(marked);
  CHECK(marked->value("Service", "ExecStart") == "/bin/true");
  auto cut = UnitFile::parse(std::string("[Service]\n# fine\nExecStart=/bin/a\0b\n", 36), "x.service");
  REQUIRE_FALSE(cut);
  CHECK(cut.status().message() == "x.service:3: holds a NUL byte, which ends the line for systemd");
}
