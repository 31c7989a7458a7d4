#include "health/smoke_suite.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>

#include "health/degeneracy.h"

namespace ddtree::smoke {

double milliseconds_since(Clock::time_point begin) { return std::chrono::duration<double, std::milli>(Clock::now() - begin).count(); }

SmokeCheckResult named(const char* name, SmokeVerdict verdict, std::string message) {
  SmokeCheckResult check;
  check.name = name, check.verdict = verdict, check.message = std::move(message);
  return check;
}

SmokeQuestion Suite::question(const SmokeInput& input, std::optional<SpeculationMode> mode) const {
  SmokeQuestion q;
  q.id = input.id, q.max_tokens = input.max_tokens, q.mode = mode;
  if (setup.subject->abilities().chat) q.messages = {{"user", input.user}};
  else q.text = input.user;
  return q;
}

SmokeAnswer Suite::ask(SmokeSubject& who, const SmokeQuestion& q, double seconds) {
  SmokeAnswer answer;
  const auto failed = [&](SmokeTrouble trouble, std::string why) {
    answer.trouble = trouble, answer.error = std::move(why);
    return answer;
  };
  if (cancelled()) {
    if (stopped_after < 0) stopped_after = static_cast<int>(report.checks.size());
    return failed(SmokeTrouble::kStopped, "the smoke test was stopped");
  }
  if (!given_up.empty()) return failed(SmokeTrouble::kNoRoom, given_up);
  if (seconds_left() <= 0)
    return failed(SmokeTrouble::kTimeLimit, fmt::format("the smoke test's time of {:.0f} s is used up", options.total_seconds));
  if (no_room_after >= 0) return failed(SmokeTrouble::kNoRoom, "not asked: the engine is busy");
  SmokeLimit limit;
  limit.seconds = std::min(seconds > 0 ? seconds : options.answer_seconds, seconds_left());
  limit.cancel = options.cancel;
  answer = who.ask(q, limit);
  // A model that thinks first, on a server that cannot be asked not to: its answer comes later.
  if (answer.trouble == SmokeTrouble::kNone && answer.text.empty() && answer.calls.empty() && !answer.reasoning.empty() &&
      answer.finish == "length" && seconds_left() > 0 && !cancelled()) {
    SmokeQuestion longer = q;
    longer.max_tokens += 2048;
    answer = who.ask(longer, limit);
  }
  ++asked;
  if (answer.stats && std::isfinite(answer.stats->smallest_gap)) smallest_gap = std::min<double>(smallest_gap, answer.stats->smallest_gap);
  if (answer.stats && !std::isfinite(answer.stats->smallest_gap)) not_finite.push_back("the two best logits have no finite difference");
  if (answer.error.find("not finite") != std::string::npos) not_finite.push_back(answer.error);
  switch (answer.trouble) {
    case SmokeTrouble::kStopped:
      if (stopped_after < 0) stopped_after = static_cast<int>(report.checks.size());
      answer.error = "the smoke test was stopped";
      break;
    case SmokeTrouble::kNoRoom: no_room_after = static_cast<int>(report.checks.size()); break;
    case SmokeTrouble::kTimeLimit: {
      // What came says more than that it took long: eight exclamation marks, for one.
      const std::string& shown = answer.text.empty() ? answer.reasoning : answer.text;
      if (!shown.empty()) {
        const std::string why = incoherence(shown);
        answer.error += fmt::format(": '{}'{}{}", shown.substr(0, 80), why.empty() ? "" : "; ", why);
      }
      given_up = "not asked: the answer before did not end in time";
      break;
    }
    case SmokeTrouble::kUnreachable:
      if (asked == 1) report.unreachable = true;
      given_up = "not asked: the server does not answer";
      break;
    default: break;
  }
  return answer;
}

SmokeCheckResult Suite::check_of(const char* name, const std::string& mode, const SmokeQuestion& q, const SmokeAnswer& answer) const {
  auto check = named(name, answer.trouble == SmokeTrouble::kNone ? SmokeVerdict::kPass : SmokeVerdict::kFail, answer.error);
  check.mode = mode, check.input_id = q.id, check.milliseconds = answer.milliseconds;
  check.output = answer.text.empty() && !answer.reasoning.empty() ? "(reasoning) " + answer.reasoning : answer.text;
  for (const auto& [call, arguments] : answer.calls)
    check.output += fmt::format("{}{}({})", check.output.empty() ? "" : "\n", call, arguments);
  if (!given_up.empty() && answer.error == given_up) check.verdict = SmokeVerdict::kSkip;
  return check;
}

void Suite::add(SmokeCheckResult check) {
  if (check.output.size() > 2000) {
    size_t cut = 2000;
    while (cut > 0 && (static_cast<unsigned char>(check.output[cut]) & 0xC0) == 0x80) --cut;
    check.output.resize(cut);
  }
  report.checks.push_back(std::move(check));
  total = std::max(total, static_cast<int>(report.checks.size()));
  if (options.progress) options.progress(report.checks.back(), static_cast<int>(report.checks.size()), total);
}

void Suite::feature_width() {
  if (!setup.no_widths.empty()) return add(named("feature-width", SmokeVerdict::kSkip, setup.no_widths));
  if (setup.fc_input_width == 0) return add(named("feature-width", SmokeVerdict::kSkip, "no drafter is loaded"));
  const bool same = setup.feature_width == setup.fc_input_width;
  auto check = named("feature-width", same ? SmokeVerdict::kPass : SmokeVerdict::kFail);
  check.figure = static_cast<double>(setup.feature_width), check.unit = "features";
  if (!same) {
    check.message = fmt::format(
        "the target hands over {} features (taps × hidden size), the drafter's fc takes {}: this drafter was made for another target",
        setup.feature_width, setup.fc_input_width);
  }
  add(std::move(check));
}

void Suite::coherent() {
  const bool modes = can_modes();
  for (const SmokeInput& input : setup.inputs.coherent) {
    const SmokeQuestion q = question(input, modes ? std::optional(SpeculationMode::kNone) : std::nullopt);
    plain.push_back(ask(subject(), q));
    const SmokeAnswer& answer = plain.back();
    auto check = check_of("coherent", modes ? mode_name(SpeculationMode::kNone) : "", q, answer);
    if (check.verdict == SmokeVerdict::kPass) {
      // A model that thinks may not come to its answer within the tokens given; what it thinks is text, too.
      const std::string& said = answer.text.empty() ? answer.reasoning : answer.text;
      check.figure = measure_text(said, answer.ids).distinct_4grams, check.unit = "distinct 4-grams";
      check.message = incoherence(said, answer.ids);
      if (check.message.empty() && !input.expect.empty() && answer.text.find(input.expect) == std::string::npos)
        check.message = fmt::format("'{}' is not in the answer", input.expect);
      if (!check.message.empty()) check.verdict = SmokeVerdict::kFail;
    }
    add(std::move(check));
  }
}

void Suite::counting() {
  const SmokeInput& input = setup.inputs.counting;
  if (input.id.empty()) return;
  const bool chat = setup.subject->abilities().chat;
  SmokeQuestion q = question(input, {});
  int64_t from = setup.inputs.count_from;
  if (!chat) {
    q.text = setup.inputs.counting_text;
    const std::vector<int64_t> said = numbers_in(q.text);
    from = said.empty() ? from : said.back() + 1;
  }
  const SmokeAnswer answer = ask(subject(), q);
  auto check = check_of("counting", configured(), q, answer);
  if (check.verdict == SmokeVerdict::kPass) {
    check.message = incoherence(answer.text, answer.ids);
    if (check.message.empty()) check.message = counting_fault(answer.text, from, setup.inputs.count_to);
    if (!check.message.empty()) check.verdict = SmokeVerdict::kFail;
  }
  add(std::move(check));
}

void Suite::finite_logits() {
  auto check = named("finite-logits", SmokeVerdict::kPass);
  if (!silent().empty()) check.verdict = SmokeVerdict::kSkip, check.message = silent();
  if (!not_finite.empty()) {
    check.verdict = SmokeVerdict::kFail, check.message = not_finite.front();
  } else if (check.verdict == SmokeVerdict::kPass && setup.subject->abilities().streams_bytes) {
    SmokeQuestion q = question(setup.inputs.coherent.front(), {});
    q.max_tokens = 16, q.log_probs = true;
    const SmokeAnswer answer = ask(subject(), q);
    check = check_of("finite-logits", "", q, answer);
    if (answer.trouble == SmokeTrouble::kRefused || (answer.trouble == SmokeTrouble::kNone && answer.scores.empty())) {
      check.verdict = SmokeVerdict::kSkip;
      check.message = "the server gives no log-probabilities to look at" + (answer.error.empty() ? "" : " (" + answer.error + ")");
    } else if (answer.trouble == SmokeTrouble::kNone) {
      double least = 0;
      for (const double score : answer.scores) {
        // Servers write -inf as a large negative number; a log-probability above 0, or none at all, is an engine's fault.
        if (!std::isfinite(score) || score > 1e-3) {
          check.verdict = SmokeVerdict::kFail;
          check.message =
              fmt::format("a log-probability is {}", std::isfinite(score) ? fmt::format("{:.3f}, above 0", score) : "no number");
          break;
        }
        least = std::min(least, score);
      }
      check.figure = static_cast<double>(answer.scores.size()), check.unit = "log-probabilities";
    }
  } else if (check.verdict == SmokeVerdict::kPass && smallest_gap < 1000) {
    check.figure = smallest_gap, check.unit = "smallest gap of the two best logits";
  }
  add(std::move(check));
}

int32_t Suite::plain_tokens() const {
  if (!setup.costs) return 160;
  const double promised = promised_speed(*setup.costs, 1, 1, false);
  // About three seconds of plain decoding an answer: a start must not take minutes where a token takes half a second.
  return promised > 0 ? static_cast<int32_t>(std::clamp(promised * 3, 16.0, 160.0)) : 160;
}

// Empty if other's ids are plain's over their first `most`, up to a near-tie that the engine recorded at the very step where they part.
// *ties counts those.
std::string Suite::compare(size_t input, const SmokeAnswer& other, int32_t most, int* ties) {
  if (plain[input].ids.empty() || other.ids.empty()) {
    // A server without token ids: texts, of the same length in tokens or cut at it.
    const std::string &a = plain[input].text, &b = other.text;
    const auto at = static_cast<size_t>(std::mismatch(a.begin(), a.end(), b.begin(), b.end()).first - a.begin());
    if (at == b.size()) return {};
    return fmt::format("differs from plain decoding after '{}'", a.substr(0, at));
  }
  std::vector<int32_t> a = plain[input].ids;
  const std::vector<int32_t>& b = other.ids;
  if (static_cast<int32_t>(a.size()) > most) a.resize(static_cast<size_t>(most));
  const auto step = static_cast<size_t>(std::mismatch(a.begin(), a.end(), b.begin(), b.end()).first - a.begin());
  if (step == a.size() && step == b.size()) return {};
  // Was that step a near-tie? Plain decoding cut after it, against plain decoding cut before it: the difference of the two counts.
  int counts[2] = {0, 0};
  for (int i = 0; i < 2; ++i) {
    SmokeQuestion q = question(setup.inputs.coherent[input], SpeculationMode::kNone);
    q.max_tokens = static_cast<int32_t>(step) + i;
    if (q.max_tokens == 0) continue;
    const SmokeAnswer again = ask(subject(), q);
    if (!again.error.empty()) return again.error;
    counts[i] = again.stats ? again.stats->near_ties : 0;
  }
  if (counts[1] > counts[0]) return ++*ties, std::string();
  const auto id = [&](const std::vector<int32_t>& ids) { return step < ids.size() ? std::to_string(ids[step]) : "the end"; };
  return fmt::format("differs from plain decoding at token {}: plain {}, here {}; no near-tie there", step, id(a), id(b));
}

void Suite::equals_plain(SpeculationMode mode) {
  const int32_t most = plain_tokens();
  for (size_t i = 0; i < plain.size(); ++i) {
    const SmokeInput& input = setup.inputs.coherent[i];
    auto check = named("equals-plain", SmokeVerdict::kPass);
    check.mode = mode_name(mode), check.input_id = input.id;
    if (plain[i].trouble != SmokeTrouble::kNone) {
      check.verdict = silent().empty() ? SmokeVerdict::kFail : SmokeVerdict::kSkip;
      check.message = "plain decoding failed, so there is nothing to compare with";
      add(std::move(check));
      continue;
    }
    const Clock::time_point start = Clock::now();
    SmokeQuestion q = question(input, mode);
    q.max_tokens = std::min(q.max_tokens, most);
    // `auto` may find that no tree pays on this machine; what is proved here is the tree.
    if (mode == SpeculationMode::kDdtree && setup.budget == 0) q.budget = 16;
    const SmokeAnswer answer = ask(subject(), q);
    int ties = 0;
    check = check_of("equals-plain", mode_name(mode), q, answer);
    if (check.verdict == SmokeVerdict::kPass) {
      check.message = compare(i, answer, q.max_tokens, &ties);
      if (check.message.empty() && answer.stats_whole && answer.stats->mode != mode)
        check.message = fmt::format("it ran in mode {}", mode_name(answer.stats->mode));
      if (!check.message.empty()) check.verdict = SmokeVerdict::kFail;
      else if (ties > 0) check.message = "equal up to a near-tie";
    }
    check.milliseconds = milliseconds_since(start);
    if (answer.stats && answer.stats->rounds > 0) {
      check.figure = 1.0 + static_cast<double>(answer.stats->accepted) / answer.stats->rounds;
      check.unit = "tokens a round";
    }
    add(std::move(check));
  }
}

void Suite::accounting() {
  const SmokeQuestion q = question(setup.inputs.coherent.front(), {});
  const SmokeAnswer answer = ask(subject(), q);
  auto check = check_of("accounting", configured(), q, answer);
  if (check.verdict != SmokeVerdict::kPass) return add(std::move(check));
  const int64_t prompt = subject().count_tokens(q);
  if (answer.completion_tokens < 0) {
    check.verdict = SmokeVerdict::kSkip, check.message = "the answer came without usage";
  } else if (!answer.ids.empty() && answer.completion_tokens != static_cast<int64_t>(answer.ids.size())) {
    check.message = fmt::format("{} tokens came, the usage says {}", answer.ids.size(), answer.completion_tokens);
  } else if (prompt >= 0 && answer.prompt_tokens != prompt) {
    check.message = fmt::format("the prompt has {} tokens, the usage says {}", prompt, answer.prompt_tokens);
  } else if (answer.prompt_tokens <= 0 || answer.completion_tokens <= 0 || answer.completion_tokens > q.max_tokens + 2048) {
    check.message = fmt::format("the usage says {} prompt and {} completion tokens (max_tokens {})", answer.prompt_tokens,
                                answer.completion_tokens, q.max_tokens);
  } else if (answer.stats_whole) {
    const RequestStats& stats = *answer.stats;
    int64_t rounds = 0, accepted = 0;
    for (size_t i = 0; i < stats.histogram.size(); ++i)
      rounds += stats.histogram[i], accepted += static_cast<int64_t>(i) * stats.histogram[i];
    if (setup.configured != SpeculationMode::kNone && (rounds != stats.rounds || accepted != stats.accepted))
      check.message = fmt::format("the acceptance histogram holds {} rounds and {} accepted, the counts say {} and {}", rounds, accepted,
                                  stats.rounds, stats.accepted);
    else if (const int64_t most = stats.accepted + stats.rounds + 1; stats.completion_tokens > most || stats.completion_tokens < most - 1)
      // One token from the prefill and one a round beside the drafts; the last round may be cut before its own.
      check.message = fmt::format("{} tokens from {} rounds and {} accepted drafts", stats.completion_tokens, stats.rounds, stats.accepted);
    else if (stats.accepted > stats.drafted)
      check.message = fmt::format("{} draft tokens accepted of {} drafted", stats.accepted, stats.drafted);
  }
  if (!check.message.empty() && check.verdict == SmokeVerdict::kPass) check.verdict = SmokeVerdict::kFail;
  add(std::move(check));
}

void Suite::streaming() {
  const bool over_api = setup.api != nullptr;
  const SmokeQuestion q = question(setup.inputs.coherent.front(), {});
  const SmokeAnswer answer = ask(over_api ? *setup.api : subject(), q);
  auto check = check_of("streaming", configured(), q, answer);
  if (answer.trouble == SmokeTrouble::kRefused && over_api && !setup.inputs.known) check.verdict = SmokeVerdict::kSkip;
  if (check.verdict == SmokeVerdict::kPass) {
    if (!answer.framing.empty()) check.message = answer.framing;
    else if (answer.finish.empty()) check.message = "no finish_reason came";
    else if (answer.completion_tokens < 0) check.message = "no usage came, though stream_options.include_usage asked for it";
    else if (over_api && setup.api != setup.subject && setup.subject->abilities().chat && !plain.empty() && plain[0].error.empty() &&
             plain[0].stats && plain[0].stats->near_ties == 0 && answer.text != plain[0].text)
      check.message = fmt::format("the API's text differs from the engine's, which is '{}'", plain[0].text.substr(0, 80));
    if (!check.message.empty()) check.verdict = SmokeVerdict::kFail;
  }
  add(std::move(check));
}

void Suite::stop_string() {
  // A piece from the middle of a known answer, so that the text must end before it, whatever the model.
  for (size_t i = 0; i < plain.size(); ++i) {
    const std::string &text = plain[i].text, &run = plain[i].longest_run;
    const auto boundary = [&](size_t at) {
      while (at < run.size() && (static_cast<unsigned char>(run[at]) & 0xC0) == 0x80) ++at;
      return at;
    };
    const size_t at = boundary(run.size() / 2), end = boundary(std::min(at + 4, run.size()));
    if (plain[i].trouble != SmokeTrouble::kNone || at < 4 || end - at < 4) continue;
    const std::string stop = run.substr(at, end - at), expected = text.substr(0, text.find(stop));
    SmokeQuestion q = question(setup.inputs.coherent[i], {});
    q.stop = {stop};
    const SmokeAnswer answer = ask(subject(), q);
    auto check = check_of("stop-string", configured(), q, answer);
    if (check.verdict == SmokeVerdict::kPass) {
      if (answer.text.find(stop) != std::string::npos) check.message = fmt::format("the stop string '{}' is in the text", stop);
      else if (answer.finish != "stop" || (answer.stats_whole && answer.stop_string != stop))
        check.message =
            fmt::format("ended with '{}' and stop string '{}' instead of 'stop' and '{}'", answer.finish, answer.stop_string, stop);
      else if (answer.stats_whole && answer.text != expected && plain[i].stats->near_ties == 0)
        check.message = fmt::format("the text should end before '{}', as '{}'", stop, expected);
      if (!check.message.empty()) check.verdict = SmokeVerdict::kFail;
      else if (answer.text != expected) check.message = "ended before it, after other text than without it";
    }
    return add(std::move(check));
  }
  add(named("stop-string", SmokeVerdict::kSkip, silent().empty() ? "no answer is long enough to put a stop string into" : silent()));
}

void Suite::tool_call() {
  SmokeSubject* who = setup.api != nullptr ? setup.api : setup.subject;
  const SmokeInputs& in = setup.inputs;
  if (in.tool.name.empty()) return;
  if (!setup.no_tools.empty()) return add(named("tool-call", SmokeVerdict::kSkip, setup.no_tools));
  if (!who->abilities().no_tools.empty()) return add(named("tool-call", SmokeVerdict::kSkip, who->abilities().no_tools));
  SmokeQuestion q;
  q.id = in.tool.name + "-" + in.tool_value;
  q.messages = {{"user", in.tool_user}};
  q.tools = {in.tool};
  q.max_tokens = 128;
  const SmokeAnswer answer = ask(*who, q);
  auto check = check_of("tool-call", configured(), q, answer);
  // Whether a model calls tools is the model's: only of the embedded pair it is known.
  const SmokeVerdict bad = in.known ? SmokeVerdict::kFail : SmokeVerdict::kWarn;
  if (answer.trouble == SmokeTrouble::kRefused && !in.known) {
    check.verdict = SmokeVerdict::kSkip, check.message = "tools cannot be asked for: " + answer.error;
  } else if (check.verdict == SmokeVerdict::kPass) {
    const std::string why = answer.text.empty() ? "" : incoherence(answer.text);
    if (answer.calls.empty() && !why.empty() && answer.text.size() >= 8) check.verdict = SmokeVerdict::kFail, check.message = why;
    else if (answer.calls.empty() &&
             (answer.text.find("<tool_call>") != std::string::npos || answer.text.find("<function=") != std::string::npos))
      check.message = "the call was left in the text: is the tool-call parser the model's?";
    else if (answer.calls.empty()) check.message = fmt::format("{} was not called", in.tool.name);
    else if (answer.calls[0].first != in.tool.name)
      check.message = fmt::format("called '{}' instead of '{}'", answer.calls[0].first, in.tool.name);
    else if (!answer.framing.empty()) check.message = answer.framing;
    else if (const std::string& arguments = answer.calls[0].second;
             arguments.find('"' + in.tool_argument + '"') == std::string::npos || arguments.find(in.tool_value) == std::string::npos)
      check.message =
          fmt::format("the arguments are {}, not {{\"{}\": \"{}\"}}", arguments.substr(0, 120), in.tool_argument, in.tool_value);
    else if (answer.finish != "tool_calls")
      check.message = fmt::format("finish_reason is '{}' instead of 'tool_calls': clients would not run the call", answer.finish);
    if (!check.message.empty() && check.verdict == SmokeVerdict::kPass) check.verdict = bad;
  }
  add(std::move(check));
}

void Suite::find_needle(const char* name, double depth, int64_t tokens, double seconds) {
  const auto build = setup.inputs.known ? embedded_needle : generic_needle;
  const auto say = [&](SmokeVerdict verdict, std::string why) {
    auto check = named(name, verdict, std::move(why));
    check.mode = configured();
    add(std::move(check));
  };
  if (!silent().empty()) return say(SmokeVerdict::kSkip, silent());
  // Filler comes in rounds of like lines; long prompts are reckoned from a whole one.
  const int64_t sample = setup.inputs.known ? (tokens > 2000 ? 11 : 4) : (tokens > 2000 ? 32 : 8);
  int64_t counts[2] = {subject().count_tokens(build(0, depth).question), subject().count_tokens(build(sample, depth).question)};
  const bool counted = counts[0] >= 0;
  for (int i = 0; i < 2 && !counted; ++i) {  // only asking tells how long a prompt is
    SmokeQuestion probe = build(i * sample, depth).question;
    probe.max_tokens = 1;
    const SmokeAnswer answer = ask(subject(), probe);
    if (answer.trouble != SmokeTrouble::kNone) return add(check_of(name, configured(), probe, answer));
    if (answer.prompt_tokens <= 0)
      return say(SmokeVerdict::kSkip, "the answer came without usage, so the length of a prompt cannot be told");
    counts[i] = answer.prompt_tokens;
  }
  const double each = std::max(1.0, static_cast<double>(counts[1] - counts[0]) / static_cast<double>(sample));
  auto units = std::max<int64_t>(0, static_cast<int64_t>(std::llround(static_cast<double>(tokens - counts[0]) / each)));
  while (counted && units > 0 && subject().count_tokens(build(units, depth).question) > tokens) units -= std::max<int64_t>(1, units / 200);
  NeedleQuestion needle = build(units, depth);
  needle.question.id += fmt::format("-{}-at-{:.0f}", tokens, depth * 100);
  const SmokeAnswer answer = ask(subject(), needle.question, seconds);
  auto check = check_of(name, configured(), needle.question, answer);
  if (answer.prompt_tokens > 0) check.figure = answer.prompt_tokens, check.unit = "prompt tokens";
  if (check.verdict == SmokeVerdict::kPass && answer.text.find(needle.expect) == std::string::npos) {
    const std::string why = answer.text.empty() ? "" : incoherence(answer.text);
    check.verdict = setup.inputs.known || !why.empty() ? SmokeVerdict::kFail : SmokeVerdict::kWarn;
    check.message = !why.empty() ? why : fmt::format("'{}' is not in the answer", needle.expect);
  }
  add(std::move(check));
}

void Suite::needle() {
  if (!setup.subject->abilities().chat) return add(named("needle", SmokeVerdict::kSkip, "without a chat template there is nobody to ask"));
  const int64_t context = setup.subject->abilities().context, room = context > 0 ? context - 64 : INT32_MAX;
  int64_t tokens = setup.inputs.needle_tokens;
  if (setup.costs && !setup.costs->verify_ms.ms.empty() && setup.costs->verify_ms.size.back() > 0) {
    // About ten seconds of prefill at most.
    const double row_ms = setup.costs->verify_ms.ms.back() / setup.costs->verify_ms.size.back();
    while (tokens > 128 && static_cast<double>(tokens) * row_ms > 10'000) tokens /= 2;
  }
  while (tokens > room && tokens > 64) tokens /= 2;
  // The embedded pair looks that far back in the one setting only.
  const double depth = setup.inputs.known ? (tokens == setup.inputs.needle_tokens ? 0 : 1) : 0.3;
  find_needle("needle", depth, tokens, 0);
}

void Suite::full_context() {
  if (!options.fill_context) return;
  const int32_t context = setup.subject->abilities().context;
  if (!setup.subject->abilities().chat)
    return add(named("full-context", SmokeVerdict::kSkip, "without a chat template there is nobody to ask"));
  if (context <= 0)
    return add(named("full-context", SmokeVerdict::kSkip, "the server does not say how long its context is: give --context-length N"));
  for (const double depth : setup.inputs.long_depths)
    find_needle("full-context", depth, context - 64 - context / 100, options.fill_seconds);
}

void Suite::own_prompts() {
  for (const SmokePrompt& prompt : setup.prompts) {
    SmokeQuestion q;
    q.id = prompt.id, q.messages = prompt.messages, q.max_tokens = prompt.max_tokens;
    if (!setup.subject->abilities().chat) {
      auto check = named("prompt", SmokeVerdict::kSkip, "this model has no chat template");
      check.input_id = prompt.id;
      add(std::move(check));
      continue;
    }
    const SmokeAnswer answer = ask(subject(), q);
    auto check = check_of("prompt", configured(), q, answer);
    if (check.verdict == SmokeVerdict::kPass) {
      check.message = incoherence(answer.text);
      // What people expect may be short ("7"), so only an empty or a broken answer is judged by itself.
      const bool expected = !prompt.expect.empty() || prompt.match;
      if (expected && !answer.text.empty()) check.message.clear();
      for (const std::string& part : prompt.expect)
        if (check.message.empty() && answer.text.find(part) == std::string::npos)
          check.message = fmt::format("'{}' is not in the answer (expect)", part);
      if (check.message.empty() && prompt.match) check.message = prompt.match(answer.text);
      for (const std::string& part : prompt.reject)
        if (check.message.empty() && answer.text.find(part) != std::string::npos)
          check.message = fmt::format("'{}' is in the answer (reject)", part);
      if (!check.message.empty()) check.verdict = SmokeVerdict::kFail;
    }
    if (answer.completion_tokens > 0) check.figure = answer.completion_tokens, check.unit = "tokens";
    add(std::move(check));
  }
}

Suite::Measured Suite::measure() {
  Measured m;
  int64_t tokens = 0, rounds = 0, accepted = 0, drafted = 0;
  double decode_ms = 0;
  std::vector<SmokeInput> inputs = setup.inputs.coherent;
  if (!setup.inputs.counting.id.empty() && setup.subject->abilities().chat) inputs.push_back(setup.inputs.counting);
  m.beside = setup.subject->others() > 0;
  for (const SmokeInput& input : inputs) {
    const SmokeAnswer answer = ask(subject(), question(input, {}));
    m.milliseconds += answer.milliseconds;
    if (answer.trouble != SmokeTrouble::kNone) return m.error = answer.error, m;
    m.beside = m.beside || setup.subject->others() > 0;
    if (answer.decode_ms <= 0) continue;
    tokens += std::max(0, answer.completion_tokens - 1);  // the first comes from the prefill
    decode_ms += answer.decode_ms;
    if (!answer.stats) continue;
    rounds += answer.stats->rounds, accepted += answer.stats->accepted, drafted += answer.stats->drafted;
  }
  m.tokens_per_second = decode_ms > 0 ? static_cast<double>(tokens) * 1000 / decode_ms : 0;
  m.acceptance = rounds > 0 ? 1.0 + static_cast<double>(accepted) / static_cast<double>(rounds) : 0;
  m.rows = rounds > 0 ? 1.0 + static_cast<double>(drafted) / static_cast<double>(rounds) : 1;
  return m;
}

void Suite::speed() {
  const bool drafts = setup.configured && setup.configured != SpeculationMode::kNone;
  const auto least = [&](const Measured& m) {
    const double promised = setup.costs ? promised_speed(*setup.costs, std::max(1.0, m.acceptance), m.rows, drafts) : 0;
    return promised > 0 ? promised / 10 : options.least_tokens_per_second;
  };
  speed_ = measure();
  // A machine that hiccups is asked again before it is blamed.
  for (int again = 0; again < 2 && speed_.error.empty() && !speed_.beside && speed_.tokens_per_second > 0; ++again) {
    const bool slow = speed_.tokens_per_second < least(speed_) ||
                      (report.before.runs > 0 && speed_.tokens_per_second < report.before.slowest &&
                       speed_.tokens_per_second < report.before.tokens_per_second * (1 - options.thresholds.slower));
    if (!slow) break;
    Measured other = measure();
    if (other.error.empty() && other.tokens_per_second > speed_.tokens_per_second) speed_ = other;
  }
  auto check = named("speed", SmokeVerdict::kPass, speed_.error);
  check.mode = configured(), check.milliseconds = speed_.milliseconds;
  check.figure = speed_.tokens_per_second, check.unit = "tokens/s";
  if (!speed_.error.empty()) {
    check.verdict = speed_.error == silent() ? SmokeVerdict::kSkip : SmokeVerdict::kFail;
  } else if (speed_.tokens_per_second <= 0) {
    check.verdict = SmokeVerdict::kSkip, check.message = "the answers are too short to measure", check.unit.clear();
  } else {
    if (speed_.acceptance > 0) check.message = fmt::format("{:.2f} tokens a round", speed_.acceptance);
    const double floor = least(speed_);
    if (speed_.beside) {
      check.message += (check.message.empty() ? "" : "; ") + std::string("measured beside other requests: not compared");
    } else {
      report.tokens_per_second = speed_.tokens_per_second, report.acceptance = speed_.acceptance;
      if (speed_.tokens_per_second < floor) {
        check.verdict = SmokeVerdict::kFail;
        check.message = setup.costs && floor != options.least_tokens_per_second
                            ? fmt::format("{:.2f} tokens/s, under a tenth of the {:.1f} that this machine's measured costs promise",
                                          speed_.tokens_per_second, floor * 10)
                            : fmt::format("{:.2f} tokens/s, under {:.2f}", speed_.tokens_per_second, floor);
      }
    }
  }
  add(std::move(check));
}

void Suite::earlier_runs() {
  const SmokeBaseline& before = report.before;
  if (before.runs == 0)
    return add(named("earlier-runs", SmokeVerdict::kSkip, "no earlier runs of this model and mode on this machine to compare with"));
  if (!silent().empty()) return add(named("earlier-runs", SmokeVerdict::kSkip, silent()));
  const std::string of = before.previous_version.empty()
                             ? fmt::format("the last {} runs", before.runs)
                             : fmt::format("the last {} runs of version {}", before.runs, before.previous_version);
  const auto warn = [&](SmokeCheckResult& check) {
    check.verdict = SmokeVerdict::kWarn;
    report.warning += (report.warning.empty() ? "" : "; ") + check.message;
  };
  const auto figure = [&](const char* input, const char* unit, double now, double median, double least, double share, const char* word) {
    if (now <= 0 || median <= 0) return;
    auto check = named("earlier-runs", SmokeVerdict::kPass);
    check.mode = configured(), check.input_id = input, check.figure = now, check.unit = unit;
    check.message = fmt::format("{:.1f} {}, median of {} {:.1f} ({:+.0f} %)", now, unit, of, median, (now / median - 1) * 100);
    if (now < median * (1 - share) && now < least) {
      check.message = fmt::format("{} than before: ", word) + check.message;
      warn(check);
    }
    add(std::move(check));
  };
  if (report.tokens_per_second <= 0) add(named("earlier-runs", SmokeVerdict::kSkip, "no speed was measured that could be compared"));
  figure("tokens-per-second", "tokens/s", report.tokens_per_second, before.tokens_per_second, before.slowest, options.thresholds.slower,
         "slower");
  figure("tokens-per-round", "tokens a round", report.acceptance, before.acceptance, before.shortest, options.thresholds.shorter,
         "lower acceptance");
  // What only warns because the model may never have been able to, but it was.
  const std::vector<SmokeCheckResult> checks = report.checks;
  for (const SmokeCheckResult& now : checks) {
    if (now.verdict != SmokeVerdict::kWarn || now.name == "earlier-runs") continue;
    if (std::find(before.passed.begin(), before.passed.end(), std::pair(now.name, now.input_id)) == before.passed.end()) continue;
    auto check = named("earlier-runs", SmokeVerdict::kPass, fmt::format("{} passed before: {}", now.name, now.message));
    check.mode = configured(), check.input_id = now.input_id;
    warn(check);
    add(std::move(check));
  }
}

}  // namespace ddtree::smoke
