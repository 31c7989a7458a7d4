// The suite's newer checks against a subject that answers from a script, and what stands around the suite: inputs, history, JUnit.
#include <algorithm>
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <cmath>
#include <functional>

#include "health/smoke.h"
#include "health/smoke_junit.h"

using namespace ddtree;

namespace {

class ScriptedSubject final : public SmokeSubject {
 public:
  SmokeAbilities can;
  std::function<SmokeAnswer(const SmokeQuestion&)> answer;
  std::vector<SmokeQuestion> asked;
  int beside = 0;

  const SmokeAbilities& abilities() const override { return can; }
  SmokeAnswer ask(const SmokeQuestion& q, const SmokeLimit&) override {
    asked.push_back(q);
    return answer ? answer(q) : sound(q);
  }
  int64_t count_tokens(const SmokeQuestion& q) override {
    int64_t n = 8;
    for (const SmokeMessage& m : q.messages) n += static_cast<int64_t>(m.content.size()) / 4;
    return n;
  }
  int others() const override { return beside; }

  static SmokeAnswer said(std::string text, const SmokeQuestion& q) {
    SmokeAnswer a;
    a.text = a.longest_run = std::move(text);
    a.finish = "stop", a.completion_tokens = static_cast<int32_t>(a.text.size() / 4) + 2, a.decode_ms = 10, a.milliseconds = 12;
    a.prompt_tokens = 8;
    for (const SmokeMessage& m : q.messages) a.prompt_tokens += static_cast<int32_t>(m.content.size()) / 4;
    return a;
  }
  static SmokeAnswer sound(const SmokeQuestion& q) {
    const std::string& user = q.messages.empty() ? q.text : q.messages.back().content;
    if (!q.tools.empty()) {
      SmokeAnswer a = said("", q);
      a.calls = {{"get_weather", "{\"city\": \"Paris\"}"}}, a.finish = "tool_calls";
      return a;
    }
    if (user.find("Count from") != std::string::npos)
      return said("1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20", q);
    if (const size_t at = user.find("north gate is "); at != std::string::npos) return said(user.substr(at + 14, 4), q);
    std::string text = "Air scatters blue light more than red light, so the sky looks blue by day.";
    if (!q.stop.empty()) text.resize(std::min(text.size(), text.find(q.stop.front())));
    return said(std::move(text), q);
  }
};

struct Bench {
  ScriptedSubject subject;
  SmokeSetup setup;
  SmokeOptions options;
  Bench() {
    subject.can.no_modes = "it cannot be asked for modes", subject.can.context = 8192;
    setup.subject = setup.api = &subject;
    setup.inputs = generic_smoke_inputs();
    setup.no_widths = "seen from inside only";
  }
  SmokeReport run() { return run_smoke(setup, options); }
};

const SmokeCheckResult& find(const SmokeReport& report, const std::string& name, const std::string& input = "") {
  for (const SmokeCheckResult& check : report.checks)
    if (check.name == name && (input.empty() || check.input_id == input)) return check;
  FAIL("no check " << name << " " << input);
  std::abort();
}

bool has(const std::string& text, const std::string& part) {
  UNSCOPED_INFO("\"" << part << "\" in: " << text);
  return text.find(part) != std::string::npos;
}

SmokeRun past(double speed, double rounds, const std::string& version = DDTREE_VERSION, const std::string& verdict = "pass") {
  SmokeRun run;
  run.run_id = 1, run.model = "m", run.mode = "DDTREE", run.version = version, run.verdict = verdict;
  run.tokens_per_second = speed, run.acceptance = rounds;
  return run;
}

}  // namespace

TEST_CASE("counting is judged by the numbers, not by their dress") {
  CHECK(counting_fault("1, 2, 3, 4", 1, 4).empty());
  CHECK(counting_fault("Sure! From 1 to 4:\n1\n2\n3\n4\nDone in 1 go.", 1, 4).empty());
  CHECK(counting_fault("**1** 2 - 3 (4) 5 6", 1, 4).empty());
  CHECK(has(counting_fault("1, 2, 4, 5", 1, 4), "from 1 to 2, then says 4; should go on to 4"));
  CHECK(has(counting_fault("1, 2, 3", 1, 4), "then ends"));
  CHECK(has(counting_fault("one, two", 1, 4), "no 1"));
  CHECK(has(counting_fault("4, 3, 2, 1", 1, 4), "from 1 to 1"));
  CHECK(numbers_in("a12b 007 12345678901 3") == std::vector<int64_t>{12, 7, 3});
}

TEST_CASE("needles hide one sentence at the depth asked for") {
  const NeedleQuestion early = generic_needle(50, 0.1), late = generic_needle(50, 0.9);
  const std::string &a = early.question.messages[0].content, &b = late.question.messages[0].content;
  CHECK((a.find(early.expect) < a.size() / 4 && b.find(late.expect) > b.size() * 3 / 4));
  CHECK(early.expect != late.expect);  // an answer kept from the one before is wrong
  CHECK(has(a, "Record 10049"));
  const NeedleQuestion first = embedded_needle(8, 0), last = embedded_needle(8, 1);
  CHECK((first.question.messages.size() == 2 + 16 + 1 && first.question.messages[0].content == "My name is Iris."));
  CHECK(last.question.messages[16].content == "My name is Iris.");
}

TEST_CASE("a sound server passes, and what it cannot be asked is skipped with the reason") {
  Bench bench;
  const SmokeReport report = bench.run();
  INFO(report.message);
  CHECK(report.verdict == SmokeVerdict::kPass);
  for (const char* name : {"coherent", "counting", "accounting", "streaming", "stop-string", "tool-call", "needle", "speed"})
    CHECK(find(report, name).verdict == SmokeVerdict::kPass);
  CHECK(find(report, "feature-width").message == "seen from inside only");
  CHECK(find(report, "equals-plain").message == "it cannot be asked for modes");
  CHECK(find(report, "earlier-runs").verdict == SmokeVerdict::kSkip);
}

TEST_CASE("what blocks and what only warns depends on whether the model is known") {
  Bench bench;
  bench.setup.inputs.known = GENERATE(true, false);
  const SmokeVerdict bad = bench.setup.inputs.known ? SmokeVerdict::kFail : SmokeVerdict::kWarn;
  const auto with = [&](const std::function<bool(const SmokeQuestion&)>& which,
                        const std::function<SmokeAnswer(const SmokeQuestion&)>& what) {
    bench.subject.answer = [which, what](const SmokeQuestion& q) { return which(q) ? what(q) : ScriptedSubject::sound(q); };
    return bench.run();
  };
  const auto tools = [](const SmokeQuestion& q) { return !q.tools.empty(); };
  SECTION("no call") {
    const auto check =
        find(with(tools, [](const SmokeQuestion& q) { return ScriptedSubject::said("I cannot know the weather.", q); }), "tool-call");
    CHECK((check.verdict == bad && has(check.message, "was not called")));
  }
  SECTION("a call left in the text") {
    const auto check = find(
        with(tools, [](const SmokeQuestion& q) { return ScriptedSubject::said("<tool_call>\n<function=get_weather>\n", q); }), "tool-call");
    CHECK((check.verdict == bad && has(check.message, "parser")));
  }
  SECTION("another tool, other arguments, another finish_reason") {
    SmokeAnswer a = ScriptedSubject::sound({.tools = {{}}});
    a.calls[0].second = "{\"town\": \"Paris\"}";
    CHECK(has(find(with(tools, [&](const SmokeQuestion&) { return a; }), "tool-call").message, "town"));
    a = ScriptedSubject::sound({.tools = {{}}}), a.finish = "stop";
    const auto check = find(with(tools, [&](const SmokeQuestion&) { return a; }), "tool-call");
    CHECK((check.verdict == bad && has(check.message, "finish_reason is 'stop'")));
  }
  SECTION("a needle not found") {
    const auto is_needle = [](const SmokeQuestion& q) { return q.id.starts_with("needle"); };
    const auto check = find(with(is_needle, [](const SmokeQuestion& q) { return ScriptedSubject::said("I do not know.", q); }), "needle");
    CHECK((check.verdict == bad && has(check.message, "is not in the answer")));
  }
  SECTION("an answer to the needle that is no text at all blocks whatever the model") {
    const auto is_needle = [](const SmokeQuestion& q) { return q.id.starts_with("needle"); };
    CHECK(find(with(is_needle, [](const SmokeQuestion& q) { return ScriptedSubject::said("!!!!!!!!", q); }), "needle").verdict ==
          SmokeVerdict::kFail);
  }
  SECTION("wrong counting blocks whatever the model") {
    const SmokeReport report = with([](const SmokeQuestion& q) { return q.id == "count-1-20"; },
                                    [](const SmokeQuestion& q) { return ScriptedSubject::said("1, 2, 3, 5, 8, 13", q); });
    CHECK((report.verdict == SmokeVerdict::kFail && has(report.message, "counting") && has(report.message, "from 1 to 3, then says 5")));
  }
}

TEST_CASE("a model without a chat template goes on counting; chat checks are skipped") {
  Bench bench;
  bench.subject.can.chat = false;
  bench.setup.no_tools = "without a chat template no tool can be offered";
  bench.subject.answer = [](const SmokeQuestion& q) {
    CHECK(q.messages.empty());
    if (q.id == "count-1-20") return ScriptedSubject::said(" 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22", q);
    return ScriptedSubject::sound(q);
  };
  const SmokeReport report = bench.run();
  INFO(report.message);
  CHECK(report.verdict == SmokeVerdict::kPass);
  CHECK(find(report, "needle").verdict == SmokeVerdict::kSkip);
  CHECK(find(report, "tool-call").message == bench.setup.no_tools);
}

TEST_CASE("framing, finish_reason and usage belong to streaming") {
  Bench bench;
  SmokeAnswer fault;
  const auto streaming = [&](const std::function<void(SmokeAnswer&)>& change) {
    bench.subject.answer = [=](const SmokeQuestion& q) {
      SmokeAnswer a = ScriptedSubject::sound(q);
      change(a);
      return a;
    };
    return find(bench.run(), "streaming");
  };
  CHECK(has(streaming([](SmokeAnswer& a) { a.framing = "the stream ended without data: [DONE]"; }).message, "[DONE]"));
  CHECK(has(streaming([](SmokeAnswer& a) { a.finish.clear(); }).message, "finish_reason"));
  const auto usage = streaming([](SmokeAnswer& a) { a.prompt_tokens = a.completion_tokens = -1; });
  CHECK((usage.verdict == SmokeVerdict::kFail && has(usage.message, "no usage")));
}

TEST_CASE("log-probabilities above 0 or without a number fail; none given is a skip") {
  Bench bench;
  bench.subject.can.streams_bytes = true;
  std::vector<double> scores;
  bench.subject.answer = [&](const SmokeQuestion& q) {
    SmokeAnswer a = ScriptedSubject::sound(q);
    if (q.log_probs) a.scores = scores;
    return a;
  };
  CHECK(find(bench.run(), "finite-logits").verdict == SmokeVerdict::kSkip);
  scores = {-0.1, -9999, 0};
  CHECK(find(bench.run(), "finite-logits").verdict == SmokeVerdict::kPass);
  scores = {-0.1, std::nan("")};
  CHECK(has(find(bench.run(), "finite-logits").message, "no number"));
  scores = {0.5};
  CHECK(find(bench.run(), "finite-logits").verdict == SmokeVerdict::kFail);
}

TEST_CASE("a time limit shows what came, and nothing more is asked") {
  Bench bench;
  bench.subject.answer = [](const SmokeQuestion& q) {
    SmokeAnswer a = ScriptedSubject::said("!!!!!!!!", q);
    a.trouble = SmokeTrouble::kTimeLimit, a.error = "no end within 10.0 s";
    return a;
  };
  const SmokeReport report = bench.run();
  CHECK((report.verdict == SmokeVerdict::kFail && has(report.message, "no end within 10.0 s: '!!!!!!!!'") &&
         has(report.message, "letters or digits")));
  CHECK(bench.subject.asked.size() == 1);
  CHECK(find(report, "speed").verdict == SmokeVerdict::kSkip);
}

TEST_CASE("a server that cannot be reached is not a failed check alone") {
  Bench bench;
  bench.subject.answer = [](const SmokeQuestion&) {
    SmokeAnswer a;
    a.trouble = SmokeTrouble::kUnreachable, a.error = "HTTP 503: loading";
    return a;
  };
  const SmokeReport report = bench.run();
  CHECK((report.unreachable && has(report.message, "503")));
  CHECK(bench.subject.asked.size() == 1);
}

TEST_CASE("thinking that leaves no room for the answer is given more") {
  Bench bench;
  int longer = 0;
  bench.subject.answer = [&](const SmokeQuestion& q) {
    if (q.max_tokens > 2048) return ++longer, ScriptedSubject::sound(q);
    SmokeAnswer a = ScriptedSubject::said("", q);
    a.reasoning = "The user wants to know something.", a.finish = "length";
    return a;
  };
  CHECK(bench.run().verdict == SmokeVerdict::kPass);
  CHECK(longer > 5);
}

TEST_CASE("speed under a tenth of what the costs promise fails, after a second look") {
  Bench bench;
  EngineSnapshot costs;
  costs.verify_ms = {{1, 16}, {2, 8}}, costs.draft_ms = {{1}, {4}}, costs.host_ms = {{1}, {1}};
  CHECK(promised_speed(costs, 1, 1, false) == 1000.0 / 3);
  CHECK(promised_speed(costs, 4, 16, true) == 4000.0 / 13);
  CHECK(promised_speed({}, 1, 1, false) == 0);
  bench.setup.costs = costs;
  double decode_ms = 5000;
  int slow_answers = 1'000'000;
  bench.subject.answer = [&](const SmokeQuestion& q) {
    SmokeAnswer a = ScriptedSubject::sound(q);
    a.decode_ms = slow_answers-- > 0 ? decode_ms : 20;
    return a;
  };
  SECTION("slow for good") {
    const auto check = find(bench.run(), "speed");
    CHECK((check.verdict == SmokeVerdict::kFail && has(check.message, "under a tenth of the 333.3")));
  }
  SECTION("slow once") {
    SmokeReport calm = bench.run();
    const auto before_speed = static_cast<int>(bench.subject.asked.size()) - 9;  // three looks at three answers
    slow_answers = before_speed + 2;
    CHECK(find(bench.run(), "speed").verdict == SmokeVerdict::kPass);
  }
  SECTION("beside other requests nothing is judged") {
    bench.subject.beside = 2;
    const SmokeReport report = bench.run();
    CHECK((find(report, "speed").verdict == SmokeVerdict::kPass && report.tokens_per_second == 0));
    CHECK(has(find(report, "speed").message, "beside other requests"));
  }
  SECTION("without costs the least is a flag") {
    bench.setup.costs.reset();
    bench.options.least_tokens_per_second = 50;
    CHECK(has(find(bench.run(), "speed").message, "under 50.00"));
  }
}

TEST_CASE("the baseline is the median of like runs of this major version") {
  const SmokeKey key{"", "m", "", "DDTREE", DDTREE_VERSION};
  SmokeThresholds thresholds;
  std::vector<SmokeRun> runs = {past(100, 4), past(300, 5), past(110, 4.2)};
  const SmokeBaseline before = smoke_baseline(runs, key, "", thresholds);
  CHECK((before.runs == 3 && before.tokens_per_second == 110 && before.acceptance == 4.2 && before.slowest == 100 && before.shortest == 4));
  SECTION("two say nothing") {
    runs.pop_back();
    CHECK(smoke_baseline(runs, key, "", thresholds).runs == 0);
  }
  SECTION("others do not count") {
    runs[0].mode = "NONE", runs[1].model = "n", runs[2].subject = "http://x";
    runs.push_back(past(1, 1, DDTREE_VERSION, "fail"));
    runs.push_back(past(0, 1));
    runs.push_back(past(1, 1, "999.1.0"));
    CHECK(smoke_baseline(runs, key, "", thresholds).runs == 0);
  }
  SECTION("only the newest count") {
    for (int i = 0; i < 20; ++i) runs.push_back(past(1, 1));
    CHECK((smoke_baseline(runs, key, "", thresholds).runs == thresholds.runs));
  }
  SECTION("after an upgrade those of the version before, and one is enough") {
    runs.push_back(past(500, 6, "999.1.0"));
    const SmokeBaseline old = smoke_baseline(runs, key, "999.1.0", thresholds);
    CHECK((old.runs == 1 && old.tokens_per_second == 500 && old.previous_version == "999.1.0"));
    CHECK(smoke_baseline(runs, key, "3.0.0", thresholds).previous_version == "3.0.0");
  }
  SECTION("which version served before") {
    CHECK(version_before(runs, DDTREE_VERSION).empty());
    CHECK(version_before(runs, "9.9.9") == DDTREE_VERSION);
    runs.insert(runs.begin(), past(1, 1, "7.0.0"));
    runs[0].run_id = 0;  // by hand
    CHECK(version_before(runs, DDTREE_VERSION).empty());
    CHECK(version_before({}, DDTREE_VERSION).empty());
  }
}

TEST_CASE("worse than before is a warning with figures, never a failure") {
  Bench bench;
  SmokeBaseline& before = bench.setup.before;
  before.runs = 5, before.tokens_per_second = 1e6, before.slowest = 9e5;
  SECTION("slower") {
    const SmokeReport report = bench.run();
    CHECK(report.verdict == SmokeVerdict::kPass);
    CHECK((has(report.warning, "slower than before") && has(report.warning, "median of the last 5 runs 1000000.0")));
    CHECK(find(report, "earlier-runs", "tokens-per-second").verdict == SmokeVerdict::kWarn);
    CHECK(smoke_record(report).warning == report.warning);
  }
  SECTION("one earlier run was as slow: that is this machine's noise") {
    before.slowest = 1;
    CHECK(bench.run().warning.empty());
  }
  SECTION("within the threshold") {
    before.tokens_per_second = 2200, before.slowest = 2000;
    CHECK(bench.run().warning.empty());
  }
  SECTION("something that worked is lost") {
    before.tokens_per_second = 1, before.slowest = 1;
    before.passed = {{"tool-call", "get_weather-Paris"}};
    bench.subject.answer = [](const SmokeQuestion& q) {
      return q.tools.empty() ? ScriptedSubject::sound(q) : ScriptedSubject::said("It may rain there.", q);
    };
    CHECK(has(bench.run().warning, "tool-call passed before"));
    before.passed.clear();
    CHECK(bench.run().warning.empty());
  }
}

TEST_CASE("the user's own prompts block") {
  Bench bench;
  SmokePrompt prompt{"sky", {{"user", "Why?"}}, 64, {"scatters"}, "", {"purple"}, nullptr};
  bench.setup.prompts = {prompt};
  CHECK(bench.run().verdict == SmokeVerdict::kPass);
  bench.setup.prompts[0].reject = {"blue"};
  CHECK(has(bench.run().message, "'blue' is in the answer (reject)"));
  bench.setup.prompts[0].expect = {"scatters", "ozone"};
  CHECK(has(bench.run().message, "'ozone' is not in the answer (expect)"));
  bench.setup.prompts[0] = prompt;
  bench.setup.prompts[0].match = [](const std::string&) { return std::string("the answer does not match ^x"); };
  CHECK(has(bench.run().message, "does not match ^x"));
}

TEST_CASE("--long asks at several depths of the advertised context") {
  Bench bench;
  bench.options.fill_context = true;
  const SmokeReport report = bench.run();
  int depths = 0;
  for (const SmokeCheckResult& check : report.checks) {
    if (check.name != "full-context") continue;
    ++depths;
    CHECK((check.verdict == SmokeVerdict::kPass && check.figure > 7700 && check.figure < 8192));
  }
  CHECK(depths == 3);
  bench.subject.can.context = 0;
  CHECK(has(find(bench.run(), "full-context").message, "--context-length"));
}

TEST_CASE("JUnit is XML whatever the model wrote") {
  SmokeReport report;
  report.verdict = SmokeVerdict::kFail;
  SmokeCheckResult check;
  check.name = "coherent", check.input_id = "a<b>&\"c", check.output = std::string("x\0y]]>\x1b\xff\xed\xa0\x80 \xF0\x9F\x98\x80", 16),
  check.message = "line\nbreak";
  report.checks = {check};
  check.verdict = SmokeVerdict::kWarn, check.output = "fine";
  report.checks.push_back(check);
  const std::string xml = smoke_junit(report, "http://x/?a&b");
  CHECK((has(xml, "tests=\"2\" failures=\"1\"") && has(xml, "a&lt;b&gt;&amp;&quot;c") && has(xml, "line&#10;break") &&
         has(xml, "http://x/?a&amp;b")));
  CHECK(has(xml, "\xF0\x9F\x98\x80"));
  for (const char c : xml) CHECK((static_cast<unsigned char>(c) >= 0x20 || c == '\n' || c == '\t'));
  CHECK(xml.find("\xff") == std::string::npos);
  CHECK(xml.find("\xed\xa0") == std::string::npos);
  CHECK(has(smoke_junit(report, "x", true), "failures=\"2\""));
}
