#include "health/smoke.h"

#include <fmt/core.h>

#include <algorithm>
#include <chrono>

#include "health/smoke_suite.h"

namespace ddtree {
namespace {

int64_t wall_ms() {
  return std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::system_clock::now().time_since_epoch()).count();
}

// Between the points by a straight line, beyond them as at the nearest.
double at(const CostPoints& curve, double size) {
  if (curve.size.empty() || curve.size.size() != curve.ms.size()) return 0;
  if (size <= curve.size.front()) return curve.ms.front();
  for (size_t i = 1; i < curve.size.size(); ++i) {
    if (size > curve.size[i]) continue;
    const double part = (size - curve.size[i - 1]) / std::max(1e-9, curve.size[i] - curve.size[i - 1]);
    return curve.ms[i - 1] + part * (curve.ms[i] - curve.ms[i - 1]);
  }
  return curve.ms.back();
}

}  // namespace

const char* smoke_verdict_name(SmokeVerdict verdict) {
  switch (verdict) {
    case SmokeVerdict::kPass: return "pass";
    case SmokeVerdict::kFail: return "fail";
    case SmokeVerdict::kSkip: return "skip";
    case SmokeVerdict::kWarn: return "warn";
  }
  return "";
}

double promised_speed(const EngineSnapshot& costs, double tokens_per_round, double rows, bool drafted) {
  const double ms = at(costs.verify_ms, rows) + at(costs.host_ms, 1) + (drafted ? at(costs.draft_ms, 1) : 0);
  return at(costs.verify_ms, rows) > 0 ? tokens_per_round * 1000 / ms : 0;
}

std::vector<SmokeCheckInfo> smoke_check_list() {
  return {{"feature-width", "the width of the features that the target hands over is that of the drafter's fc input"},
          {"coherent", "plain greedy answers to fixed prompts: no error, and the text is not degenerate"},
          {"counting", "the model counts from 1 to 20 in order"},
          {"finite-logits", "no logit was NaN or infinite (over HTTP: no log-probability, where the server gives them)"},
          {"equals-plain", "greedy answers of each speculation mode are the plain ones token for token, up to recorded near-ties"},
          {"accounting", "usage and acceptance counts agree with the tokens that came"},
          {"streaming",
           "server-sent events as clients expect them: every frame JSON, no character split, finish_reason, usage, then [DONE]; the text "
           "is the "
           "engine's"},
          {"stop-string", "a stop string ends the text before it"},
          {"tool-call", "a question that needs a tool is answered by calling it with the right argument"},
          {"needle", "a sentence in a long prompt is found again"},
          {"full-context", "--long: the same at several depths of a prompt that fills the advertised context"},
          {"prompt", "--prompts: the user's own prompts meet their expectations"},
          {"speed", "decoding is not under a tenth of what this machine's measured costs promise"},
          {"earlier-runs",
           "tokens/s, tokens a round and what only warns, against this machine's earlier runs; worse is degraded, not unready"}};
}

SmokeReport run_smoke(const SmokeSetup& setup, const SmokeOptions& options) {
  SmokeReport report;
  report.trigger = options.trigger;
  report.started_ms = wall_ms();
  report.mode = setup.configured ? mode_name(*setup.configured) : "";
  report.before = setup.before;
  smoke::Suite suite(setup, options, report);
  const SmokeInputs& in = setup.inputs;
  const auto inputs = static_cast<int>(in.coherent.size());
  const bool modes = suite.can_modes() && !setup.subject->abilities().modes.empty();
  suite.total = 1 + inputs + !in.counting.id.empty() + 1 +
                (modes ? inputs * static_cast<int>(setup.subject->abilities().modes.size()) : 1) + 3 + !in.tool.name.empty() +
                (in.needle_tokens > 0) + (options.fill_context ? static_cast<int>(in.long_depths.size()) : 0) +
                static_cast<int>(setup.prompts.size()) + 2;
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
    bool failed = false;
    for (size_t i = 0; i < report.checks.size(); ++i) {
      SmokeCheckResult& check = report.checks[i];
      if (check.verdict != SmokeVerdict::kFail) continue;
      if (until >= 0 && static_cast<int>(i) >= until) {
        check.verdict = SmokeVerdict::kSkip;
        continue;
      }
      if (failed) continue;
      failed = true;
      report.verdict = SmokeVerdict::kFail;
      report.message = check.name + (check.mode.empty() ? "" : ", " + check.mode) + (check.input_id.empty() ? "" : ", " + check.input_id) +
                       ": " + check.message;
    }
    if (report.verdict != SmokeVerdict::kPass) report.warning.clear();
    return report;
  };

  suite.feature_width();
  if (in.coherent.empty()) {
    suite.add(smoke::named("coherent", SmokeVerdict::kFail, "there are no inputs to run"));
    return finish();
  }
  suite.coherent();
  suite.counting();
  suite.finite_logits();
  if (modes)
    for (const SpeculationMode mode : setup.subject->abilities().modes) suite.equals_plain(mode);
  else
    suite.add(smoke::named("equals-plain", SmokeVerdict::kSkip,
                           suite.can_modes() ? "there is nothing to draft with" : setup.subject->abilities().no_modes));
  suite.accounting();
  suite.streaming();
  suite.stop_string();
  suite.tool_call();
  if (in.needle_tokens > 0) suite.needle();
  suite.full_context();
  suite.own_prompts();
  suite.speed();
  suite.earlier_runs();
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
  run.mode = report.mode, run.warning = report.warning, run.previous_version = report.before.previous_version;
  run.before_runs = report.before.runs;
  run.before_tokens_per_second = report.before.tokens_per_second, run.before_acceptance = report.before.acceptance;
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
