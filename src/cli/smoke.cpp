// ddtree smoke: the smoke suite on an engine of its own, for a machine or a checkpoint that serves nothing yet.
#include "health/smoke.h"

#include <fmt/core.h>

#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "base/log.h"
#include "cli/command.h"
#include "health/phases.h"
#include "server/serve_flags.h"
#include "server/serving_loader.h"
#include "server/smoke_subject.h"
#include "store/store.h"

namespace ddtree::cli {
namespace {

const char* const kHelp =
    "usage: ddtree smoke [--json | --list] [--db PATH] [flags of ddtree serve]\n\n"
    "Loads the pair (the embedded one, or --model-path and --speculative-draft-model-path) and runs the checks that `ddtree serve` runs\n"
    "before it is ready. Exit code 0: all passed; 70: a check failed; otherwise why the model could not be loaded, as with serve.\n\n"
    "  --json      the report as one JSON object on standard output\n"
    "  --list      what is checked; loads nothing\n"
    "  --db PATH   also keep the result in this history (not while a server has it open)\n\n"
    "Flags of serve that shape the engine mean the same here: --model-path, --speculative-draft-model-path, --speculative-algorithm,\n"
    "--speculative-ddtree-budget, --context-length, --max-running-requests … (ddtree serve --help).\n";

int fail(const Status& status) {
  std::fprintf(stderr, "ddtree smoke: %s\n", status.message().c_str());
  return exit_code(status.code() == Code::kInvalidArgument ? Code::kUsage : status.code());
}

std::string figure_text(const SmokeCheckResult& check) {
  if (check.unit.empty()) return {};
  return check.figure >= 100 ? fmt::format("{:.0f} {}", check.figure, check.unit) : fmt::format("{:.2f} {}", check.figure, check.unit);
}

void print_check(const SmokeCheckResult& check) {
  fmt::print("{:<4}  {:<13}  {:<6}  {:<18}  {:>24}  {:>9}  {}\n", smoke_verdict_name(check.verdict), check.name, check.mode, check.input_id,
             figure_text(check), fmt::format("{:.0f} ms", check.milliseconds), check.message);
  std::fflush(stdout);
}

nlohmann::ordered_json as_json(const SmokeReport& report, const Serving& serving) {
  nlohmann::ordered_json checks = nlohmann::ordered_json::array();
  for (const SmokeCheckResult& check : report.checks) {
    checks.push_back({{"name", check.name},
                      {"mode", check.mode},
                      {"verdict", smoke_verdict_name(check.verdict)},
                      {"input_id", check.input_id},
                      {"output", check.output},
                      {"figure", check.figure},
                      {"unit", check.unit},
                      {"milliseconds", check.milliseconds},
                      {"message", check.message}});
  }
  return {{"verdict", smoke_verdict_name(report.verdict)},
          {"message", report.message},
          {"version", DDTREE_VERSION},
          {"model", serving.info.name},
          {"drafter", serving.info.drafter},
          {"mode", mode_name(serving.engine->options().mode)},
          {"started_ms", report.started_ms},
          {"finished_ms", report.finished_ms},
          {"tokens_per_second", report.tokens_per_second},
          {"tokens_per_round", report.acceptance},
          {"checks", std::move(checks)}};
}

int smoke(int argc, char** argv) {
  bool json = false, list = false;
  std::vector<std::string> flags;
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    if (flag == "--help" || flag == "-h") return std::fputs(kHelp, stdout), 0;
    if (flag == "--json") json = true;
    else if (flag == "--list") list = true;
    else flags.push_back(flag);
  }
  if (json && list) return fail({Code::kUsage, "--json and --list exclude each other"});
  auto parsed = parse_serve_flags(flags);
  if (!parsed) return fail(parsed.status());
  if (list) {
    for (const SmokeCheckInfo& check : smoke_check_list()) fmt::print("{:<13}  {}\n", check.name, check.what);
    return 0;
  }
  const ServiceOptions& options = parsed->service;
  if (options.skip_smoke) return fail({Code::kUsage, "--skip-smoke leaves nothing to do here; without it the checks run"});
  log::set_level(std::max(parsed->log_level, log::Level::kWarn));

  // First, so that a history that cannot be written is known before minutes of loading.
  std::unique_ptr<Store> store;
  if (!options.db_path.empty()) {
    auto opened = Store::open(options.db_path);
    if (!opened) return fail(opened.status());
    store = std::move(*opened);
  }
  PhaseMachine phases;
  auto serving = load_serving(options, phases);
  if (!serving) return fail(serving.status());
  const ModelInfo& info = (*serving)->info;
  if (!json) {
    fmt::print("{}{}, mode {}\n\n", info.path, info.has_drafter ? " with drafter " + info.drafter : ", no drafter",
               mode_name((*serving)->engine->options().mode));
  }

  SmokeOptions smoke_options;
  smoke_options.trigger = "command";
  if (!json) smoke_options.progress = [](const SmokeCheckResult& check, int, int) { print_check(check); };
  const SmokeReport report = run_smoke(smoke_subject(*serving), smoke_options);
  if (store) {
    store->add_smoke_run(smoke_row(report, **serving));
    if (Status status = store->flush(30); !status.ok()) return fail(status);
  }
  if (json) {
    fmt::print("{}\n", as_json(report, **serving).dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace));
  } else {
    const auto passed =
        std::count_if(report.checks.begin(), report.checks.end(), [](const auto& c) { return c.verdict == SmokeVerdict::kPass; });
    fmt::print("\n{}: {} of {} checks passed; {:.0f} tokens/s, {:.2f} tokens a round\n", smoke_verdict_name(report.verdict), passed,
               report.checks.size(), report.tokens_per_second, report.acceptance);
  }
  return report.verdict == SmokeVerdict::kPass ? 0 : exit_code(Code::kEngineFault);
}

}  // namespace

DDTREE_COMMAND("smoke", "does this engine write sensible text, and is speculation's text the plain one's?", smoke);

}  // namespace ddtree::cli
