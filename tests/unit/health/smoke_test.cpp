// The smoke suite against an engine that answers from a script: it passes on a sound one and names each fault of a broken one.
#include "health/smoke.h"

#include <fmt/core.h>

#include <algorithm>
#include <atomic>
#include <catch2/catch_test_macros.hpp>
#include <cmath>
#include <map>
#include <memory>
#include <optional>
#include <thread>

#include "health/engine_subject.h"
#include "health/smoke_junit.h"
#include "store/store.h"

using namespace ddtree;

namespace {

// Token ids are bytes. Prompts answer with the script's text; faults are switched on one by one.
class ScriptedEngine final : public Engine {
 public:
  EngineOptions engine_options{.mode = SpeculationMode::kDdtree};
  std::map<std::string, std::string> answers = {{"count", "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14"},
                                                {"capital", "The capital of France is Paris."}};
  EngineSnapshot costs;
  double decode_ms = 10;  // of every answer
  // Faults.
  std::optional<SpeculationMode> diverges;  // this mode says 'X' at token `step`
  size_t step = 5;
  std::vector<size_t> ties;  // steps that are near-ties in plain decoding
  std::optional<SpeculationMode> refuses;
  std::string error;    // every request ends with it
  bool silent = false;  // never answers
  int full_for = 0;     // so many submissions find the queue full
  float smallest_gap = 1;
  int64_t passes = 0;  // made since the snapshot before, for other requests
  bool ignores_stop_strings = false, stop_too_late = false, wrong_usage = false, wrong_histogram = false, wrong_mode = false;
  bool splits_characters = false;
  int others = 0;  // other requests that run

  int cancelled = 0, submitted = 0;

  Result<uint64_t> submit(Request request, DeltaSink sink) override {
    if (full_for > 0) return --full_for, Status(Code::kTemporary, "264 requests are running or waiting");
    ++submitted;
    const SpeculationMode mode = request.mode.value_or(engine_options.mode);
    if (refuses == mode) return Status(Code::kInvalidArgument, "mode: no drafter is loaded");
    if (silent) return uint64_t{1};
    std::string text = answers.at(std::string(request.prompt.begin(), request.prompt.end()));
    if (diverges == mode) text.resize(step), text += "XXXX";
    Delta last;
    last.finish = FinishReason::kStop;
    for (const std::string& stop : request.stop_strings) {
      const size_t at = text.find(stop);
      if (at == std::string::npos || ignores_stop_strings) continue;
      text.resize(at + (stop_too_late ? stop.size() : 0));
      last.stop_string = stop;
    }
    if (text.size() > static_cast<size_t>(request.max_tokens))
      text.resize(static_cast<size_t>(request.max_tokens)), last.finish = FinishReason::kLength;
    RequestStats& stats = last.stats;
    stats.mode = wrong_mode ? SpeculationMode::kNone : mode;
    stats.prompt_tokens = static_cast<int32_t>(request.prompt.size());
    stats.completion_tokens = static_cast<int32_t>(text.size()) + wrong_usage;
    const auto after_first = static_cast<int32_t>(text.size()) - 1;
    stats.rounds = mode == SpeculationMode::kNone ? after_first : (after_first + 3) / 4;  // three drafts a round
    stats.accepted = after_first - stats.rounds, stats.drafted = 8 * stats.rounds;
    stats.histogram.assign(4, 0);
    for (int32_t round = 0, left = after_first; round < stats.rounds; ++round) {
      const int32_t tokens = mode == SpeculationMode::kNone ? 1 : std::min(4, left);
      ++stats.histogram[static_cast<size_t>(tokens - 1)], left -= tokens;
    }
    if (wrong_histogram) ++stats.histogram[2];
    for (const size_t tie : ties) stats.near_ties += tie < text.size();
    stats.decode_ms = decode_ms;
    stats.smallest_gap = smallest_gap;
    for (size_t at = 0; at < text.size(); at += 3) {
      Delta delta;
      const std::string part = text.substr(at, 3);
      delta.ids.assign(part.begin(), part.end());
      delta.pieces = {{part}};
      if (splits_characters && at == 0) delta.pieces = {{"\xC3"}, {part}};
      sink(std::move(delta));
    }
    last.pieces = {{"<|im_end|>", 4088, true}};
    last.finished = true;
    if (!error.empty()) last.finish = FinishReason::kError, last.error = error;
    sink(std::move(last));
    return uint64_t{1};
  }
  void cancel(uint64_t) override { ++cancelled; }
  void drain(double) override {}
  void limit_mode(SpeculationMode) override {}
  void reset_drafts() override {}
  Status score(ScoreRequest, ScoreSink) override { return {Code::kUnavailable, "the script scores nothing"}; }
  EngineSnapshot snapshot() const override {
    EngineSnapshot s = costs;
    s.running = others;
    s.passes = all_passes += passes;
    return s;
  }
  const EngineOptions& options() const override { return engine_options; }

 private:
  mutable int64_t all_passes = 0;
};

struct Bench {
  std::unique_ptr<EngineSubject> subject;
  SmokeSetup setup;
  operator const SmokeSetup&() const { return setup; }
};

std::vector<int32_t> bytes(const SmokeQuestion& q) {
  const std::string& text = q.messages.empty() ? q.text : q.messages.back().content;
  return {text.begin(), text.end()};
}

// Two inputs and no more: what a test is about is added by it.
Bench subject_of(
    ScriptedEngine& engine, std::vector<SpeculationMode> modes = smoke_modes(true, true),
    EngineSubject::Encode encode = [](const SmokeQuestion& q) -> Result<std::vector<int32_t>> { return bytes(q); }) {
  Bench bench;
  bench.subject = std::make_unique<EngineSubject>(engine, std::move(encode), std::move(modes));
  bench.setup.subject = bench.subject.get();
  bench.setup.inputs.coherent = {{"count-1", "count", "", 64}, {"capital", "capital", "Paris", 48}};
  bench.setup.inputs.needle_tokens = 0;
  bench.setup.configured = engine.engine_options.mode;
  bench.setup.feature_width = bench.setup.fc_input_width = 768;
  return bench;
}

// The one check that failed.
SmokeCheckResult only_failure(const SmokeReport& report) {
  CHECK(report.verdict == SmokeVerdict::kFail);
  std::vector<SmokeCheckResult> failed;
  for (const auto& check : report.checks)
    if (check.verdict == SmokeVerdict::kFail) failed.push_back(check);
  REQUIRE(failed.size() >= 1);
  INFO(failed[0].message);
  CHECK(report.message.find(failed[0].message) != std::string::npos);
  return failed[0];
}

bool has(const std::string& text, const std::string& part) {
  UNSCOPED_INFO("\"" << part << "\" in: " << text);
  return text.find(part) != std::string::npos;
}

}  // namespace

TEST_CASE("a sound engine passes, with figures") {
  ScriptedEngine engine;
  std::vector<std::string> order;
  SmokeOptions options;
  options.trigger = "dashboard";
  options.progress = [&](const SmokeCheckResult& check, int done, int total) {
    order.push_back(check.name);
    CHECK(done == static_cast<int>(order.size()));
    CHECK(total == 15);
  };
  const SmokeReport report = run_smoke(subject_of(engine), options);
  INFO(report.message);
  CHECK(report.verdict == SmokeVerdict::kPass);
  CHECK(order == std::vector<std::string>{"feature-width", "coherent", "coherent", "finite-logits", "equals-plain", "equals-plain",
                                          "equals-plain", "equals-plain", "equals-plain", "equals-plain", "accounting", "streaming",
                                          "stop-string", "speed", "earlier-runs"});
  for (const auto& check : report.checks)
    CHECK(check.verdict == (check.name == "earlier-runs" ? SmokeVerdict::kSkip : SmokeVerdict::kPass));
  CHECK(report.acceptance > 3);
  // 46 and 31 tokens, less the two that come from prefills, in twice 10 ms.
  const auto tokens = static_cast<double>(engine.answers["count"].size() + engine.answers["capital"].size() - 2);
  CHECK(report.tokens_per_second == tokens / 0.020);
  CHECK(report.checks[1].output == engine.answers["count"]);
  CHECK((report.checks[4].mode == "DFLASH" && report.checks[6].mode == "DDTREE" && report.checks[8].mode == "NEXTN"));
  CHECK((report.finished_ms >= report.started_ms && report.started_ms > 0 && report.trigger == "dashboard"));
  for (const auto& name : order) {
    const auto list = smoke_check_list();
    CHECK(std::any_of(list.begin(), list.end(), [&](const auto& info) { return info.name == name; }));
  }
}

TEST_CASE("without a drafter only what applies runs; a skip is no failure") {
  ScriptedEngine engine;
  engine.engine_options.mode = SpeculationMode::kNone;
  Bench bench = subject_of(engine, smoke_modes(false, false));
  SmokeSetup& setup = bench.setup;
  setup.feature_width = setup.fc_input_width = 0;
  const SmokeReport report = run_smoke(setup);
  INFO(report.message);
  CHECK(report.verdict == SmokeVerdict::kPass);
  CHECK(report.checks[0].verdict == SmokeVerdict::kSkip);
  CHECK(report.acceptance == 1);
}

TEST_CASE("each fault fails its check and is named") {
  ScriptedEngine engine;
  Bench bench = subject_of(engine);
  SmokeSetup& setup = bench.setup;
  SECTION("exclamation marks") {
    engine.answers["count"] = std::string(8, '!');
    const auto check = only_failure(run_smoke(setup));
    CHECK((check.name == "coherent" && check.input_id == "count-1" && check.output == "!!!!!!!!"));
    CHECK(has(check.message, "letters or digits"));
  }
  SECTION("a loop") {
    engine.answers["count"] = "the the the the the the the the the the the the";
    CHECK(only_failure(run_smoke(setup)).name == "coherent");
  }
  SECTION("an unexpected answer") {
    engine.answers["capital"] = "The capital of France is Lyon.";
    const auto check = only_failure(run_smoke(setup));
    CHECK((check.input_id == "capital" && has(check.message, "'Paris' is not in the answer")));
  }
  SECTION("logits that are not finite") {
    engine.error = "logits of row 0 are not finite";
    const auto check = only_failure(run_smoke(setup));
    CHECK((check.name == "coherent" && check.message == engine.error));
  }
  SECTION("speculation says something else") {
    engine.diverges = SpeculationMode::kNextn;
    const auto check = only_failure(run_smoke(setup));
    CHECK((check.name == "equals-plain" && check.mode == "NEXTN"));
    CHECK(has(check.message, "at token 5"));
  }
  SECTION("a near-tie elsewhere does not excuse it") {
    engine.diverges = SpeculationMode::kDflash;
    engine.ties = {4, 6, 7};
    CHECK(only_failure(run_smoke(setup)).name == "equals-plain");
  }
  SECTION("an answer cut short is a difference") {
    engine.diverges = SpeculationMode::kDflash;
    engine.answers["count"] = "1, 2, 3, 4XXXX", engine.step = 10;
    const SmokeReport report = run_smoke(setup);
    CHECK(report.checks[4].verdict == SmokeVerdict::kPass);  // by chance the same text
    CHECK(report.checks[5].verdict == SmokeVerdict::kFail);
  }
  SECTION("a mode that is refused") {
    engine.refuses = SpeculationMode::kDdtree;
    const auto check = only_failure(run_smoke(setup));
    CHECK((check.mode == "DDTREE" && has(check.message, "no drafter is loaded")));
  }
  SECTION("another mode ran") {
    engine.wrong_mode = true;
    CHECK(has(only_failure(run_smoke(setup)).message, "ran in mode NONE"));
  }
  SECTION("feature widths") {
    setup.feature_width = 512;
    const auto check = only_failure(run_smoke(setup));
    CHECK((check.name == "feature-width" && has(check.message, "512") && has(check.message, "768")));
  }
  SECTION("stop strings ignored") {
    engine.ignores_stop_strings = true;
    CHECK(only_failure(run_smoke(setup)).name == "stop-string");
  }
  SECTION("stop string left in the text") {
    engine.stop_too_late = true;
    const auto check = only_failure(run_smoke(setup));
    CHECK((check.name == "stop-string" && has(check.message, "is in the text")));
  }
  SECTION("usage") {
    engine.wrong_usage = true;
    CHECK(only_failure(run_smoke(setup)).name == "accounting");
  }
  SECTION("histogram") {
    engine.wrong_histogram = true;
    CHECK(has(only_failure(run_smoke(setup)).message, "histogram"));
  }
  SECTION("a logit gap that is no number") {
    engine.smallest_gap = std::nanf("");
    CHECK(only_failure(run_smoke(setup)).name == "finite-logits");
  }
  SECTION("a piece that ends inside a character") {
    engine.splits_characters = true;
    const SmokeReport report = run_smoke(setup);
    for (const auto& check : report.checks)
      if (check.name == "streaming") CHECK((check.verdict == SmokeVerdict::kFail && has(check.message, "inside a character")));
  }
  SECTION("a template that fails") {
    const Bench refusing = subject_of(engine, smoke_modes(true, true), [](const SmokeQuestion&) -> Result<std::vector<int32_t>> {
      return Status(Code::kInvalidArgument, "chat_template.jinja:3: no");
    });
    CHECK(has(only_failure(run_smoke(refusing)).message, "chat_template.jinja:3"));
  }
}

TEST_CASE("a difference at a recorded near-tie is allowed and said") {
  ScriptedEngine engine;
  engine.diverges = SpeculationMode::kDflash;
  engine.ties = {5};
  Bench bench = subject_of(engine, {SpeculationMode::kDflash});
  SmokeSetup& setup = bench.setup;
  const SmokeReport report = run_smoke(setup);
  INFO(report.message);
  CHECK(report.verdict == SmokeVerdict::kPass);
  CHECK(report.checks[4].message == "equal up to a near-tie");
}

TEST_CASE("an engine that never answers fails within the limit, and its request is cancelled") {
  ScriptedEngine engine;
  engine.silent = true;
  Bench bench = subject_of(engine);
  SmokeSetup& setup = bench.setup;
  SmokeOptions options;
  options.answer_seconds = 0.05, options.total_seconds = 0.12;
  const auto check = only_failure(run_smoke(setup, options));
  CHECK(has(check.message, "no end within"));
  CHECK(engine.cancelled == engine.submitted);
  CHECK(engine.submitted == 1);  // an engine that is stuck is not asked again and again
}

TEST_CASE("a full queue is waited for; a suite that gets no room is skipped, not failed") {
  ScriptedEngine engine;
  SmokeOptions options;
  SECTION("full for a while") {
    engine.full_for = 3;
    CHECK(run_smoke(subject_of(engine), options).verdict == SmokeVerdict::kPass);
    CHECK(engine.full_for == 0);
  }
  SECTION("full all the time") {
    engine.full_for = 1'000'000;
    options.answer_seconds = 0.05;
    const SmokeReport report = run_smoke(subject_of(engine), options);
    CHECK(report.verdict == SmokeVerdict::kSkip);
    CHECK(has(report.message, "no room"));
    CHECK(engine.submitted == 0);
    for (const auto& check : report.checks) CHECK(check.verdict != SmokeVerdict::kFail);
  }
  SECTION("queued behind others that move") {
    engine.silent = true, engine.passes = 5;
    options.answer_seconds = 0.05;
    CHECK(run_smoke(subject_of(engine), options).verdict == SmokeVerdict::kSkip);
    CHECK(engine.cancelled == 1);
  }
  SECTION("what failed before counts") {
    Bench bench = subject_of(engine);
    SmokeSetup& setup = bench.setup;
    setup.feature_width = 512;
    engine.full_for = 1'000'000;
    options.answer_seconds = 0.05;
    CHECK(only_failure(run_smoke(setup, options)).name == "feature-width");
  }
}

TEST_CASE("a suite can be stopped") {
  ScriptedEngine engine;
  engine.silent = true;
  std::atomic<bool> stop{false};
  SmokeOptions options;
  options.cancel = &stop;
  std::thread later([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(30));
    stop = true;
  });
  const SmokeReport report = run_smoke(subject_of(engine), options);
  later.join();
  // Being stopped is nobody's failure: not the suite's, not a check's.
  CHECK((report.verdict == SmokeVerdict::kSkip && has(report.message, "stopped after 1 of")));
  for (const SmokeCheckResult& check : report.checks) CHECK(check.verdict != SmokeVerdict::kFail);
}

TEST_CASE("what failed before a suite was stopped counts") {
  ScriptedEngine engine;
  std::atomic<bool> stop{true};
  SmokeOptions options;
  options.cancel = &stop;
  Bench bench = subject_of(engine);
  SmokeSetup& setup = bench.setup;
  setup.feature_width = 512;
  CHECK(only_failure(run_smoke(setup, options)).name == "feature-width");
}

TEST_CASE("reports become rows; a skipped suite is a row too") {
  ScriptedEngine engine;
  engine.answers["capital"] = "Lyon, I think.";
  const SmokeReport report = run_smoke(subject_of(engine));
  const SmokeRun run = smoke_record(report);
  CHECK((run.verdict == "fail" && run.message == report.message && run.checks.size() == report.checks.size() &&
         run.version == DDTREE_VERSION));
  CHECK((run.checks[2].verdict == "fail" && run.checks[2].output == "Lyon, I think." && run.checks[2].input_id == "capital"));
  const SmokeRun skipped = smoke_record(skipped_smoke("start"));
  CHECK((skipped.verdict == "skipped" && skipped.trigger == "start" && skipped.checks.empty()));
  CHECK(has(skipped.message, "--skip-smoke"));
}

TEST_CASE("long outputs are cut between characters") {
  ScriptedEngine engine;
  std::string text = "a";
  for (int i = 0; i < 700; ++i) text += fmt::format("\xE2\x82\xAC{}", i);
  engine.answers["count"] = text;
  Bench bench = subject_of(engine);
  SmokeSetup& setup = bench.setup;
  setup.inputs.coherent[0].max_tokens = 100'000;
  const SmokeReport report = run_smoke(setup);
  REQUIRE(report.checks[1].output.size() <= 2000);
  CHECK(report.checks[1].output.size() > 1990);
  CHECK(text.compare(0, report.checks[1].output.size(), report.checks[1].output) == 0);
  CHECK((text[report.checks[1].output.size()] & 0xC0) != 0x80);
}
