#include "health/smoke.h"

#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>

#include "health/degeneracy.h"

namespace ddtree {
namespace {

using Clock = std::chrono::steady_clock;

double milliseconds_since(Clock::time_point begin) { return std::chrono::duration<double, std::milli>(Clock::now() - begin).count(); }
int64_t wall_ms() {
  return std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::system_clock::now().time_since_epoch()).count();
}

// What one generation came to.
struct Answer {
  std::string error;  // engine error, refusal or time limit; empty: it finished
  std::vector<int32_t> ids;
  std::string text;
  std::string longest_run;  // of ordinary text between added tokens: stop strings are looked for in such runs
  std::string run;          // the current one
  FinishReason finish = FinishReason::kNone;
  std::string stop_string;
  RequestStats stats;
  double milliseconds = 0;
};

// The sink's side: owned by both, since a late delta may come after the waiter gave up.
struct Pending {
  std::mutex mutex;
  std::condition_variable changed;
  Answer answer;
  bool finished = false;
};

struct Suite {
  const SmokeSubject& subject;
  const SmokeOptions& options;
  SmokeReport& report;
  Clock::time_point begin = Clock::now();
  int total = 0;
  std::vector<std::vector<int32_t>> prompts;  // [inputs]
  std::vector<Answer> plain;                  // [inputs] greedy, NONE
  // Checks done when the engine had no room for the suite beside its clients' requests; -1: it had. What comes after says nothing.
  mutable int no_room_after = -1;
  // Checks done when somebody stopped the suite; -1: nobody did. A check cut short is no fault of the engine.
  mutable int stopped_after = -1;

  double seconds_left() const { return options.total_seconds - milliseconds_since(begin) / 1000; }
  bool cancelled() const { return options.cancel != nullptr && options.cancel->load(); }
  std::string stopped() const {
    if (stopped_after < 0) stopped_after = static_cast<int>(report.checks.size());
    return "the smoke test was stopped";
  }

  Request greedy(size_t input, std::optional<SpeculationMode> mode) const {
    Request request;
    request.id = "smoke-" + subject.inputs[input].id;
    request.prompt = prompts[input];
    request.sampling.temperature = 0;
    request.max_tokens = subject.inputs[input].max_tokens;
    request.mode = mode;
    request.own = true;
    return request;
  }

  Answer generate(Request request) const {
    const Clock::time_point start = Clock::now();
    auto pending = std::make_shared<Pending>();
    const auto sink = [pending](Delta&& delta) {
      std::lock_guard lock(pending->mutex);
      Answer& answer = pending->answer;
      answer.ids.insert(answer.ids.end(), delta.ids.begin(), delta.ids.end());
      for (const TextPiece& piece : delta.pieces) {
        if (!piece.special) answer.text += piece.text;
        answer.run = piece.token < 0 ? answer.run + piece.text : std::string();
        if (answer.run.size() > answer.longest_run.size()) answer.longest_run = answer.run;
      }
      if (!delta.finished) return;
      answer.finish = delta.finish;
      answer.stop_string = delta.stop_string;
      answer.stats = std::move(delta.stats);
      if (delta.finish == FinishReason::kError)
        answer.error = delta.error.empty() ? "the engine ended the request with an error" : delta.error;
      pending->finished = true;
      pending->changed.notify_all();
    };
    Answer failed;
    if (cancelled()) return failed.error = stopped(), failed;
    if (seconds_left() <= 0)
      return failed.error = fmt::format("the smoke test's time of {:.0f} s is used up", options.total_seconds), failed;
    if (no_room_after >= 0) return failed.error = "not asked: the engine is busy", failed;
    const double limit = std::min(options.answer_seconds, seconds_left());
    const auto deadline = start + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(limit));
    const int64_t passes = subject.engine->snapshot().passes;
    auto id = subject.engine->submit(request, sink);
    // A full queue is no fault of what is tested here: the suite waits like everybody else.
    while (!id && id.status().code() == Code::kTemporary && Clock::now() < deadline && !cancelled()) {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      id = subject.engine->submit(request, sink);
    }
    if (!id) {
      if (cancelled()) return failed.error = stopped(), failed;
      if (id.status().code() == Code::kTemporary) no_room_after = static_cast<int>(report.checks.size());
      return failed.error = "the engine refused the request: " + id.status().message(), failed;
    }
    std::unique_lock lock(pending->mutex);
    while (!pending->finished && Clock::now() < deadline && !cancelled())
      pending->changed.wait_until(lock, std::min(deadline, Clock::now() + std::chrono::milliseconds(200)));
    const bool finished = pending->finished;
    Answer answer = pending->answer;
    lock.unlock();
    answer.milliseconds = milliseconds_since(start);
    if (!finished) {
      subject.engine->cancel(*id);
      // It waited behind others all the time, and they moved.
      if (!cancelled() && answer.ids.empty() && subject.engine->snapshot().passes > passes)
        no_room_after = static_cast<int>(report.checks.size());
      answer.error = cancelled() ? stopped()
                                 : fmt::format("no end within {:.1f} s: {} tokens came{}{}", limit, answer.ids.size(),
                                               answer.text.empty() ? "" : ": ", answer.text.substr(0, 80));
    } else if (answer.error.empty() && answer.finish == FinishReason::kCancelled) {
      answer.error = "the request was cancelled";
    }
    return answer;
  }

  void add(SmokeCheckResult check) {
    if (check.output.size() > 2000) {
      size_t cut = 2000;
      while (cut > 0 && (static_cast<unsigned char>(check.output[cut]) & 0xC0) == 0x80) --cut;
      check.output.resize(cut);
    }
    report.checks.push_back(std::move(check));
    if (options.progress) options.progress(report.checks.back(), static_cast<int>(report.checks.size()), total);
  }

  SpeculationMode configured() const { return subject.engine->options().mode; }

  void feature_width();
  void coherent();
  void equals_plain(SpeculationMode mode);
  void accounting();
  void stop_string();
  void speed();
  std::string compare(size_t input, const Answer& other, int* ties) const;
};

SmokeCheckResult named(const char* name, SmokeVerdict verdict, std::string message = {}) {
  SmokeCheckResult check;
  check.name = name, check.verdict = verdict, check.message = std::move(message);
  return check;
}

void Suite::feature_width() {
  if (subject.fc_input_width == 0) return add(named("feature-width", SmokeVerdict::kSkip, "no drafter is loaded"));
  const bool same = subject.feature_width == subject.fc_input_width;
  auto check = named("feature-width", same ? SmokeVerdict::kPass : SmokeVerdict::kFail);
  check.figure = static_cast<double>(subject.feature_width), check.unit = "features";
  if (!same) {
    check.message = fmt::format(
        "the target hands over {} features (taps × hidden size), the drafter's fc takes {}: this drafter was made for another target",
        subject.feature_width, subject.fc_input_width);
  }
  add(std::move(check));
}

void Suite::coherent() {
  plain.resize(subject.inputs.size());
  for (size_t i = 0; i < subject.inputs.size(); ++i) {
    const SmokeInput& input = subject.inputs[i];
    plain[i] = generate(greedy(i, SpeculationMode::kNone));
    const Answer& answer = plain[i];
    auto check = named("coherent", SmokeVerdict::kPass);
    check.mode = mode_name(SpeculationMode::kNone), check.input_id = input.id, check.output = answer.text,
    check.milliseconds = answer.milliseconds;
    check.figure = measure_text(answer.text, answer.ids).distinct_4grams, check.unit = "distinct 4-grams";
    check.message = !answer.error.empty() ? answer.error : incoherence(answer.text, answer.ids);
    if (check.message.empty() && !input.expect.empty() && answer.text.find(input.expect) == std::string::npos) {
      check.message = fmt::format("'{}' is not in the answer", input.expect);
    }
    if (!check.message.empty()) check.verdict = SmokeVerdict::kFail;
    add(std::move(check));
  }
}

// Empty if other's ids are plain's, up to a near-tie that the engine recorded at the very step where they part. *ties counts those.
std::string Suite::compare(size_t input, const Answer& other, int* ties) const {
  const std::vector<int32_t>& a = plain[input].ids;
  const std::vector<int32_t>& b = other.ids;
  const auto step = static_cast<size_t>(std::mismatch(a.begin(), a.end(), b.begin(), b.end()).first - a.begin());
  if (step == a.size() && step == b.size()) return {};
  // Was that step a near-tie? Plain decoding cut after it, against plain decoding cut before it: the difference of the two counts.
  int counts[2] = {0, 0};
  for (int i = 0; i < 2; ++i) {
    Request request = greedy(input, SpeculationMode::kNone);
    request.max_tokens = static_cast<int32_t>(step) + i;
    if (request.max_tokens == 0) continue;
    const Answer again = generate(std::move(request));
    if (!again.error.empty()) return again.error;
    counts[i] = again.stats.near_ties;
  }
  if (counts[1] > counts[0]) return ++*ties, std::string();
  const auto id = [&](const std::vector<int32_t>& ids) { return step < ids.size() ? std::to_string(ids[step]) : "the end"; };
  return fmt::format("differs from plain decoding at token {}: plain {}, here {}; no near-tie there", step, id(a), id(b));
}

void Suite::equals_plain(SpeculationMode mode) {
  for (size_t i = 0; i < subject.inputs.size(); ++i) {
    auto check = named("equals-plain", SmokeVerdict::kPass);
    check.mode = mode_name(mode), check.input_id = subject.inputs[i].id;
    if (!plain[i].error.empty()) {
      check.verdict = SmokeVerdict::kFail, check.message = "plain decoding failed, so there is nothing to compare with";
      add(std::move(check));
      continue;
    }
    const Clock::time_point start = Clock::now();
    Request request = greedy(i, mode);
    // `auto` may find that no tree pays on this machine; what is proved here is the tree.
    if (mode == SpeculationMode::kDdtree && subject.engine->options().budget == 0) request.budget = 16;
    const Answer answer = generate(std::move(request));
    int ties = 0;
    check.message = answer.error.empty() ? compare(i, answer, &ties) : answer.error;
    if (check.message.empty() && answer.stats.mode != mode) check.message = fmt::format("it ran in mode {}", mode_name(answer.stats.mode));
    if (!check.message.empty()) check.verdict = SmokeVerdict::kFail;
    else if (ties > 0) check.message = "equal up to a near-tie";
    check.milliseconds = milliseconds_since(start), check.output = answer.text;
    if (answer.stats.rounds > 0) {
      check.figure = 1.0 + static_cast<double>(answer.stats.accepted) / answer.stats.rounds, check.unit = "tokens a round";
    }
    add(std::move(check));
  }
}

void Suite::accounting() {
  auto check = named("accounting", SmokeVerdict::kPass);
  check.mode = mode_name(configured()), check.input_id = subject.inputs[0].id;
  const Answer answer = generate(greedy(0, std::nullopt));
  check.milliseconds = answer.milliseconds, check.output = answer.text;
  const RequestStats& stats = answer.stats;
  int64_t rounds = 0, accepted = 0;
  for (size_t i = 0; i < stats.histogram.size(); ++i)
    rounds += stats.histogram[i], accepted += static_cast<int64_t>(i) * stats.histogram[i];
  if (!answer.error.empty()) check.message = answer.error;
  else if (stats.completion_tokens != static_cast<int64_t>(answer.ids.size()))
    check.message = fmt::format("{} tokens came, the usage says {}", answer.ids.size(), stats.completion_tokens);
  else if (stats.prompt_tokens != static_cast<int64_t>(prompts[0].size()))
    check.message = fmt::format("the prompt has {} tokens, the usage says {}", prompts[0].size(), stats.prompt_tokens);
  else if (configured() != SpeculationMode::kNone && (rounds != stats.rounds || accepted != stats.accepted))
    check.message = fmt::format("the acceptance histogram holds {} rounds and {} accepted, the counts say {} and {}", rounds, accepted,
                                stats.rounds, stats.accepted);
  else if (const int64_t most = stats.accepted + stats.rounds + 1; stats.completion_tokens > most || stats.completion_tokens < most - 1)
    // One token from the prefill and one a round beside the drafts; the last round may be cut before its own.
    check.message = fmt::format("{} tokens from {} rounds and {} accepted drafts", stats.completion_tokens, stats.rounds, stats.accepted);
  else if (stats.accepted > stats.drafted)
    check.message = fmt::format("{} draft tokens accepted of {} drafted", stats.accepted, stats.drafted);
  if (!check.message.empty()) check.verdict = SmokeVerdict::kFail;
  add(std::move(check));
}

void Suite::stop_string() {
  // A piece from the middle of a known answer, so that the text must end before it, whatever the model.
  for (size_t i = 0; i < subject.inputs.size(); ++i) {
    const std::string &text = plain[i].text, &run = plain[i].longest_run;
    const auto boundary = [&](size_t at) {
      while (at < run.size() && (static_cast<unsigned char>(run[at]) & 0xC0) == 0x80) ++at;
      return at;
    };
    const size_t at = boundary(run.size() / 2), end = boundary(std::min(at + 4, run.size()));
    if (!plain[i].error.empty() || at < 4 || end - at < 4) continue;
    const std::string stop = run.substr(at, end - at), expected = text.substr(0, text.find(stop));
    Request request = greedy(i, std::nullopt);
    request.stop_strings = {stop};
    const Answer answer = generate(std::move(request));
    auto check = named("stop-string", SmokeVerdict::kPass);
    check.mode = mode_name(configured()), check.input_id = subject.inputs[i].id, check.output = answer.text,
    check.milliseconds = answer.milliseconds;
    if (!answer.error.empty()) {
      check.message = answer.error;
    } else if (answer.text.find(stop) != std::string::npos) {
      check.message = fmt::format("the stop string '{}' is in the text", stop);
    } else if (answer.finish != FinishReason::kStop || answer.stop_string != stop) {
      check.message = fmt::format("ended with '{}' and stop string '{}' instead of 'stop' and '{}'", finish_name(answer.finish),
                                  answer.stop_string, stop);
    } else if (answer.text != expected && plain[i].stats.near_ties == 0) {
      check.message = fmt::format("the text should end before '{}', as '{}'", stop, expected);
    }
    if (!check.message.empty()) check.verdict = SmokeVerdict::kFail;
    return add(std::move(check));
  }
  add(named("stop-string", SmokeVerdict::kSkip, "no answer is long enough to put a stop string into"));
}

void Suite::speed() {
  int64_t tokens = 0, rounds = 0, accepted = 0;
  double decode_ms = 0, total_ms = 0;
  auto check = named("speed", SmokeVerdict::kPass);
  check.mode = mode_name(configured());
  for (size_t i = 0; i < subject.inputs.size() && check.message.empty(); ++i) {
    const Answer answer = generate(greedy(i, std::nullopt));
    check.message = answer.error;
    total_ms += answer.milliseconds;
    if (!answer.error.empty() || answer.stats.decode_ms <= 0) continue;
    tokens += std::max(0, answer.stats.completion_tokens - 1);  // the first comes from the prefill
    decode_ms += answer.stats.decode_ms;
    rounds += answer.stats.rounds, accepted += answer.stats.accepted;
  }
  check.milliseconds = total_ms;
  if (!check.message.empty()) check.verdict = SmokeVerdict::kFail;
  else if (tokens == 0) check.verdict = SmokeVerdict::kSkip, check.message = "the answers are too short to measure";
  report.tokens_per_second = decode_ms > 0 ? static_cast<double>(tokens) * 1000 / decode_ms : 0;
  report.acceptance = rounds > 0 ? 1.0 + static_cast<double>(accepted) / static_cast<double>(rounds) : 0;
  check.figure = report.tokens_per_second, check.unit = "tokens/s";
  if (check.verdict == SmokeVerdict::kPass && rounds > 0) check.message = fmt::format("{:.2f} tokens a round", report.acceptance);
  add(std::move(check));
}

}  // namespace

const char* smoke_verdict_name(SmokeVerdict verdict) {
  switch (verdict) {
    case SmokeVerdict::kPass: return "pass";
    case SmokeVerdict::kFail: return "fail";
    case SmokeVerdict::kSkip: return "skip";
  }
  return "";
}

std::vector<SmokeInput> generic_smoke_inputs() {
  return {{"count-1-20", "Count from 1 to 20, separated by commas.", "", 64},
          {"capital-of-france", "What is the capital of France?", "", 48}};
}

std::vector<SmokeInput> embedded_smoke_inputs() {
  return {{"numbers-35-61", "List the numbers from 35 to 61.", "57, 58, 59, 60, 61", 160},
          {"capital-of-morocco", "What is the capital of Morocco?", "Rabat", 48},
          {"reverse-string", "I need a Python function called reverse_string that returns text with its characters reversed.", "text[::-1]",
           96}};
}

std::vector<SpeculationMode> smoke_modes(bool has_drafter, bool has_mtp) {
  std::vector<SpeculationMode> modes;
  if (has_drafter) modes = {SpeculationMode::kDflash, SpeculationMode::kDdtree};
  if (has_mtp) modes.push_back(SpeculationMode::kNextn);
  return modes;
}

std::vector<SmokeCheckInfo> smoke_check_list() {
  return {{"feature-width", "the width of the features that the target hands over is that of the drafter's fc input"},
          {"coherent", "plain greedy answers to fixed prompts: the engine reports no error (logits finite), the text is not degenerate"},
          {"equals-plain", "greedy answers of each speculation mode are the plain ones token for token, up to recorded near-ties"},
          {"accounting", "usage and acceptance counts agree with the tokens that came"},
          {"stop-string", "a stop string ends the text before it"},
          {"speed", "decoding speed and tokens a round in the configured mode; recorded"}};
}

SmokeReport run_smoke(const SmokeSubject& subject, const SmokeOptions& options) {
  SmokeReport report;
  report.trigger = options.trigger;
  report.started_ms = wall_ms();
  Suite suite{subject, options, report};
  const auto inputs = static_cast<int>(subject.inputs.size());
  suite.total = 1 + inputs * (1 + static_cast<int>(subject.modes.size())) + 3;
  const auto finish = [&] {
    report.finished_ms = wall_ms();
    // From here on the checks say nothing of the engine.
    const int until = suite.no_room_after < 0   ? suite.stopped_after
                      : suite.stopped_after < 0 ? suite.no_room_after
                                                : std::min(suite.no_room_after, suite.stopped_after);
    report.verdict = until < 0 ? SmokeVerdict::kPass : SmokeVerdict::kSkip;
    if (suite.stopped_after >= 0) report.message = fmt::format("stopped after {} of {} checks", suite.stopped_after, suite.total);
    else if (suite.no_room_after >= 0)
      report.message = fmt::format("not completed: other requests left no room within {:.0f} s; ask again when there are fewer",
                                   std::min(options.answer_seconds, options.total_seconds));
    for (size_t i = 0; i < report.checks.size(); ++i) {
      SmokeCheckResult& check = report.checks[i];
      if (check.verdict != SmokeVerdict::kFail) continue;
      if (until >= 0 && static_cast<int>(i) >= until) {
        check.verdict = SmokeVerdict::kSkip;
        continue;
      }
      report.verdict = SmokeVerdict::kFail;
      report.message = check.name + (check.mode.empty() ? "" : ", " + check.mode) + (check.input_id.empty() ? "" : ", " + check.input_id) +
                       ": " + check.message;
      break;
    }
    return report;
  };

  suite.feature_width();
  if (subject.inputs.empty()) {
    suite.add(named("coherent", SmokeVerdict::kFail, "there are no inputs to run"));
    return finish();
  }
  for (const SmokeInput& input : subject.inputs) {
    auto ids = subject.encode(input.user);
    if (!ids || ids->empty()) {
      auto check = named("coherent", SmokeVerdict::kFail, ids ? "the prompt has no tokens" : ids.status().message());
      check.input_id = input.id;
      suite.add(std::move(check));
      return finish();
    }
    suite.prompts.push_back(std::move(*ids));
  }
  suite.coherent();
  for (const SpeculationMode mode : subject.modes) suite.equals_plain(mode);
  suite.accounting();
  suite.stop_string();
  suite.speed();
  return finish();
}

SmokeReport skipped_smoke(const std::string& trigger, const std::string& why) {
  SmokeReport report;
  report.verdict = SmokeVerdict::kSkip, report.trigger = trigger, report.message = why;
  report.started_ms = report.finished_ms = wall_ms();
  return report;
}

SmokeRun smoke_record(const SmokeReport& report) {
  SmokeRun run;
  run.started_ms = report.started_ms, run.finished_ms = report.finished_ms, run.trigger = report.trigger, run.message = report.message;
  // A suite that did not run is "skipped"; a single check that does not apply is "skip".
  run.verdict = report.verdict == SmokeVerdict::kSkip ? "skipped" : smoke_verdict_name(report.verdict);
  run.version = DDTREE_VERSION;
  run.tokens_per_second = report.tokens_per_second, run.acceptance = report.acceptance;
  for (const SmokeCheckResult& result : report.checks) {
    SmokeCheck check;
    check.name = result.name, check.mode = result.mode, check.verdict = smoke_verdict_name(result.verdict),
    check.input_id = result.input_id;
    check.output = result.output, check.figure = result.figure, check.unit = result.unit, check.ms = result.milliseconds,
    check.message = result.message;
    run.checks.push_back(std::move(check));
  }
  return run;
}

}  // namespace ddtree
