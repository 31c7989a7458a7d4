// ddtree smoke: the smoke suite on an engine of its own, for a machine or a checkpoint that serves nothing yet; or on any server that
// speaks OpenAI's API.
#include "health/smoke.h"

#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "base/log.h"
#include "cli/command.h"
#include "cli/terminal.h"
#include "health/phases.h"
#include "health/smoke_junit.h"
#include "server/openai_subject.h"
#include "server/serve_flags.h"
#include "server/serving_loader.h"
#include "server/serving_smoke.h"
#include "server/smoke_prompts.h"
#include "store/store.h"

namespace ddtree::cli {
namespace {

std::string help() {
  return fmt::format(
      "usage: ddtree smoke [options] [flags of ddtree serve]\n"
      "       ddtree smoke --url URL [options]\n\n"
      "Does it write sensible text? Asks fixed greedy questions and judges the answers: coherent, counting in order, every speculation "
      "mode\n"
      "equal to plain decoding, usage, streaming, stop string, tool call, a sentence found in a long prompt, speed. Without --url it loads "
      "a\n"
      "pair (the embedded one, or --model-path and --speculative-draft-model-path) and runs what `ddtree serve` runs before it is ready.\n"
      "With --url it asks a running server, ddtree or any other with OpenAI's API: before migrating, after an upgrade, from cron.\n\n"
      "Of a model that is not the embedded pair, what it may not have learnt (tool calls, finding the sentence) only warns.\n\n"
      "Whom to ask\n"
      "  --url URL                     http://HOST:PORT or …/v1\n"
      "  --api-key KEY                 the server's key (with --url; or DDTREE_API_KEY in the environment)\n"
      "  --model NAME                  with --url: which model (default: the first it lists)\n"
      "  --context-length N            with --url: for --long, where the server does not say\n\n"
      "What to ask\n"
      "  --long                        also fill the whole advertised context and find a sentence at several depths\n"
      "  --prompts FILE                also ask prompts of your own: one JSON object a line, see below\n"
      "  --list                        what is checked; asks nothing\n\n"
      "Limits\n"
      "  --answer-seconds N            of one answer (default: 120)\n"
      "  --total-seconds N             of all (default: 600; with --long 7200)\n"
      "  --min-tokens-per-second N     slower fails, where no measured costs promise more (default: 1)\n"
      "  --slower PERCENT              warn where it decodes so much slower than the median of earlier runs in --db (default: 30)\n"
      "  --lower-acceptance PERCENT    the same for tokens a round (default: 20)\n"
      "  --strict                      a warning fails, too\n\n"
      "Results\n"
      "  --json                        the report as one JSON object on standard output\n"
      "  --junit FILE                  JUnit XML for CI (- for standard output, in place of the table)\n"
      "  --db PATH                     keep the result in this history, and compare with its earlier runs (not while a server has it "
      "open)\n\n"
      "Exit codes: 0 passed; 70 a check failed; 75 the server cannot be reached, is not ready yet or has no room: try again; 64 flags, key "
      "or\n"
      "model name; 69 https without TLS in this build; 130 interrupted; and why a model could not be loaded, as with serve.\n\n"
      "Flags of serve that shape the engine mean the same here (without --url): --model-path, --speculative-draft-model-path,\n"
      "--speculative-algorithm, --speculative-ddtree-budget, --context-length, --max-running-requests … (ddtree serve --help).\n\n"
      "Lines of --prompts FILE:\n{}",
      smoke_prompts_help());
}

int fail(const Status& status) {
  std::fprintf(stderr, "ddtree smoke: %s\n", plain(status.message()).c_str());
  return exit_code(status.code() == Code::kInvalidArgument ? Code::kUsage : status.code());
}

struct Options {
  std::string url, api_key, model, prompts, junit, db;
  int32_t context_length = 0;
  bool json = false, list = false, strict = false, help = false;
  SmokeOptions smoke;
  bool total_given = false;
  std::vector<std::string> rest;  // of serve
};

std::atomic<bool> interrupted{false};

Result<double> number(const std::string& flag, const std::string& value, double low, double high) {
  char* end = nullptr;
  const double v = std::strtod(value.c_str(), &end);
  if (value.empty() || *end || !std::isfinite(v) || v < low || v > high)
    return Status(Code::kUsage, fmt::format("{} {}: must be a number from {:g} to {:g}", flag, value, low, high));
  return v;
}

Result<Options> parse(int argc, char** argv) {
  Options o;
  std::vector<std::string> args(argv + 1, argv + argc);
  // --url decides what --api-key, --model and --context-length mean, wherever it stands.
  const bool over_http =
      std::any_of(args.begin(), args.end(), [](const std::string& a) { return a == "--url" || a.starts_with("--url="); });
  for (size_t i = 0; i < args.size(); ++i) {
    const std::string& given = args[i];
    const size_t equals = given.find('=');
    const std::string flag = given.starts_with("--") ? given.substr(0, equals) : given;
    if (flag == "--help" || flag == "-h") return o.help = true, o;
    if (flag == "--json" || flag == "--list" || flag == "--strict" || flag == "--long") {
      if (equals != std::string::npos) return Status(Code::kUsage, flag + " takes no value");
      (flag == "--json" ? o.json : flag == "--list" ? o.list : flag == "--strict" ? o.strict : o.smoke.fill_context) = true;
      continue;
    }
    const bool ours = flag == "--url" || flag == "--prompts" || flag == "--junit" || flag == "--answer-seconds" ||
                      flag == "--total-seconds" || flag == "--min-tokens-per-second" || flag == "--slower" ||
                      flag == "--lower-acceptance" ||
                      (over_http && (flag == "--api-key" || flag == "--model" || flag == "--context-length" || flag == "--db"));
    if (!ours) {
      if (over_http) return Status(Code::kUsage, fmt::format("{}: not with --url, where no engine is loaded (ddtree smoke --help)", given));
      o.rest.push_back(given);
      continue;
    }
    std::string value;
    if (equals != std::string::npos) value = given.substr(equals + 1);
    else if (i + 1 < args.size()) value = args[++i];
    else return Status(Code::kUsage, flag + " needs a value");
    if (value.empty()) return Status(Code::kUsage, flag + " must not be empty");
    if (flag == "--url") o.url = value;
    else if (flag == "--prompts") o.prompts = value;
    else if (flag == "--junit") o.junit = value;
    else if (flag == "--api-key") o.api_key = value;
    else if (flag == "--model") o.model = value;
    else if (flag == "--db") o.db = value;
    else {
      const bool percent = flag == "--slower" || flag == "--lower-acceptance";
      auto n = flag == "--context-length" ? number(flag, value, 256, 1e8)
               : percent                  ? number(flag, value, 0.1, 100)
                                          : number(flag, value, 0.01, 1e6);
      if (!n) return n.status();
      if (flag == "--context-length") o.context_length = static_cast<int32_t>(*n);
      else if (flag == "--answer-seconds") o.smoke.answer_seconds = *n;
      else if (flag == "--total-seconds") o.smoke.total_seconds = *n, o.total_given = true;
      else if (flag == "--min-tokens-per-second") o.smoke.least_tokens_per_second = *n;
      else if (flag == "--slower") o.smoke.thresholds.slower = *n / 100;
      else o.smoke.thresholds.shorter = *n / 100;
    }
  }
  if (o.json && (o.list || o.junit == "-"))
    return Status(Code::kUsage, "--json excludes --list and --junit -: one thing on standard output");
  if (o.smoke.fill_context && !o.total_given) o.smoke.total_seconds = 7200;
  if (o.api_key.empty() && std::getenv("DDTREE_API_KEY")) o.api_key = std::getenv("DDTREE_API_KEY");
  o.smoke.trigger = "command";
  o.smoke.cancel = &interrupted;
  return o;
}

std::string figure_text(const SmokeCheckResult& check) {
  if (check.unit.empty()) return {};
  return check.figure >= 100 ? fmt::format("{:.0f} {}", check.figure, check.unit) : fmt::format("{:.2f} {}", check.figure, check.unit);
}

void print_check(const SmokeCheckResult& check) {
  fmt::print("{:<4}  {:<13}  {:<6}  {:<22}  {:>24}  {:>9}  {}\n", smoke_verdict_name(check.verdict), check.name, check.mode, check.input_id,
             figure_text(check), fmt::format("{:.0f} ms", check.milliseconds), plain(check.message));
  std::fflush(stdout);
}

nlohmann::ordered_json as_json(const SmokeReport& report, const SmokeRun& row) {
  nlohmann::ordered_json checks = nlohmann::ordered_json::array(), before;
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
  if (report.before.runs > 0)
    before = {{"runs", report.before.runs},
              {"tokens_per_second", report.before.tokens_per_second},
              {"tokens_per_round", report.before.acceptance}};
  return {{"verdict", smoke_verdict_name(report.verdict)},
          {"message", report.message},
          {"warning", report.warning},
          {"version", DDTREE_VERSION},
          {"subject", row.subject},
          {"model", row.model},
          {"drafter", row.drafter},
          {"mode", report.mode},
          {"started_ms", report.started_ms},
          {"finished_ms", report.finished_ms},
          {"tokens_per_second", report.tokens_per_second},
          {"tokens_per_round", report.acceptance},
          {"before", std::move(before)},
          {"checks", std::move(checks)}};
}

Status write_junit(const Options& o, const SmokeReport& report, const std::string& asked) {
  if (o.junit.empty()) return {};
  const std::string xml = smoke_junit(report, asked, o.strict);
  if (o.junit == "-") return fmt::print("{}", xml), Status();
  std::ofstream out(o.junit, std::ios::binary | std::ios::trunc);
  out << xml;
  out.close();
  return out ? Status() : Status(Code::kUsage, fmt::format("--junit {}: the file cannot be written", o.junit));
}

// What keeps the suite from being run at all. CI that reads the JUnit file alone must see that, too: one failed case.
int refuse(const Options& o, const std::string& asked, const Status& status) {
  SmokeReport report;
  report.started_ms = report.finished_ms =
      std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::system_clock::now().time_since_epoch()).count();
  report.message = status.message();
  SmokeCheckResult check;
  check.name = "begin";
  check.verdict = SmokeVerdict::kFail;
  check.message = status.message();
  report.checks.push_back(std::move(check));
  if (o.json) fmt::print("{}\n", as_json(report, SmokeRun{}).dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace));
  if (const Status written = write_junit(o, report, asked); !written.ok()) (void)fail(written);
  std::fflush(stdout);
  return fail(status);
}

// Runs the suite and says, writes and keeps what came of it. `row`: subject, model and drafter.
int run(const Options& o, SmokeSetup& setup, SmokeRun row, Store* store, const std::string& title, const OpenAiSubject* asked) {
  SmokeOptions options = o.smoke;
  const bool table = !o.json && o.junit != "-";
  if (table) {
    fmt::print("{}\n\n", plain(title));
    options.progress = [](const SmokeCheckResult& check, int, int) { print_check(check); };
  }
  if (!o.prompts.empty()) {
    auto prompts = read_smoke_prompts(o.prompts);
    if (!prompts) return fail({prompts.status().code(), "--prompts " + prompts.status().message()});
    setup.prompts = std::move(*prompts);
  }
  if (store != nullptr) {
    const auto page = store->smoke_runs({.limit = 100});
    if (!page) return fail(page.status());
    const SmokeKey key{row.subject, row.model, row.drafter, setup.configured ? mode_name(*setup.configured) : "", DDTREE_VERSION};
    setup.before = smoke_baseline(page->rows, key, "", options.thresholds);
  }
  const SmokeReport report = run_smoke(setup, options);
  SmokeRun full = smoke_record(report);
  full.subject = row.subject, full.model = row.model, full.drafter = row.drafter;
  if (store != nullptr) {
    store->add_smoke_run(full);
    if (Status status = store->flush(30); !status.ok()) return fail(status);
  }
  if (Status status = write_junit(o, report, row.subject.empty() ? row.model : row.subject); !status.ok()) return fail(status);
  const auto count = [&](SmokeVerdict v) {
    return std::count_if(report.checks.begin(), report.checks.end(), [&](const auto& c) { return c.verdict == v; });
  };
  if (o.json) {
    fmt::print("{}\n", as_json(report, full).dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace));
  } else if (table) {
    fmt::print("\n{}: {} checks passed, {} failed, {} warned, {} skipped", smoke_verdict_name(report.verdict), count(SmokeVerdict::kPass),
               count(SmokeVerdict::kFail), count(SmokeVerdict::kWarn), count(SmokeVerdict::kSkip));
    if (report.tokens_per_second > 0) fmt::print("; {:.0f} tokens/s", report.tokens_per_second);
    if (report.acceptance > 0) fmt::print(", {:.2f} tokens a round", report.acceptance);
    fmt::print("\n");
    if (!report.message.empty()) fmt::print("{}\n", plain(report.message));
    if (!report.warning.empty()) fmt::print("warning: {}\n", plain(report.warning));
  }
  std::fflush(stdout);
  if (interrupted) return 130;
  if (asked != nullptr && !asked->misuse().ok()) return fail(asked->misuse());
  if (report.unreachable || report.verdict == SmokeVerdict::kSkip) return exit_code(Code::kTemporary);
  if (report.verdict == SmokeVerdict::kFail || (o.strict && count(SmokeVerdict::kWarn) > 0)) return exit_code(Code::kEngineFault);
  return 0;
}

Result<std::unique_ptr<Store>> open_store(const std::string& path) {
  if (path.empty()) return std::unique_ptr<Store>();
  return Store::open(path);
}

int over_http(const Options& o) {
  auto transport = http_transport(o.url, o.api_key);
  if (!transport) return refuse(o, o.url, transport.status());
  auto store = open_store(o.db);
  if (!store) return refuse(o, o.url, store.status());
  OpenAiSubject subject(std::move(*transport), {o.model, o.context_length});
  if (Status status = subject.connect({o.smoke.answer_seconds, &interrupted}); !status.ok()) return refuse(o, o.url, status);
  SmokeSetup setup;
  setup.subject = setup.api = &subject;
  setup.inputs = subject.embedded_pair() ? embedded_smoke_inputs() : generic_smoke_inputs();
  setup.no_widths = "seen from inside only";
  SmokeRun row;
  row.subject = o.url, row.model = subject.model();
  return run(o, setup, row, store->get(), fmt::format("{}, model {}", o.url, subject.model().empty() ? "(unnamed)" : subject.model()),
             &subject);
}

std::vector<std::string> own_names() {
  return {"--url",    "--prompts",          "--junit", "--answer-seconds", "--total-seconds", "--min-tokens-per-second",
          "--slower", "--lower-acceptance", "--json",  "--list",           "--strict",        "--long"};
}

int own_engine(const Options& o) {
  auto parsed = parse_serve_flags(o.rest, "smoke", own_names());
  if (!parsed) return refuse(o, "", parsed.status());
  const ServiceOptions& options = parsed->service;
  const std::string asked = served_names(options).front();
  if (options.skip_smoke) return refuse(o, asked, {Code::kUsage, "--skip-smoke leaves nothing to do here; without it the checks run"});
  log::set_level(std::max(parsed->log_level, log::Level::kWarn));
  // First, so that a history that cannot be written is known before minutes of loading.
  auto store = open_store(options.db_path);
  if (!store) return refuse(o, asked, store.status());
  PhaseMachine phases;
  auto serving = load_serving(options, phases);
  if (!serving) return refuse(o, asked, serving.status());
  const ModelInfo& info = (*serving)->info;
  Service service(options);
  service.adopt(*serving);
  ServingSmoke bench = serving_smoke(service, *serving);
  SmokeRun row;
  row.model = info.name, row.drafter = info.has_drafter ? info.drafter : "";
  return run(o, bench.setup, row, store->get(),
             fmt::format("{}{}, mode {}", info.path, info.has_drafter ? " with drafter " + info.drafter : ", no drafter",
                         mode_name((*serving)->engine->options().mode)),
             nullptr);
}

int smoke(int argc, char** argv) {
  auto options = parse(argc, argv);
  if (!options) return fail(options.status());
  if (options->help) return std::fputs(help().c_str(), stdout), 0;
  if (!options->prompts.empty()) {  // before minutes of loading
    if (auto prompts = read_smoke_prompts(options->prompts); !prompts)
      return refuse(*options, options->url, {prompts.status().code(), "--prompts " + prompts.status().message()});
  }
  if (options->list) {
    if (options->url.empty())
      if (auto parsed = parse_serve_flags(options->rest, "smoke", own_names()); !parsed) return fail(parsed.status());
    for (const SmokeCheckInfo& check : smoke_check_list()) fmt::print("{:<13}  {}\n", check.name, check.what);
    return 0;
  }
  std::signal(SIGINT, [](int) { interrupted = true; });
  std::signal(SIGTERM, [](int) { interrupted = true; });
  return options->url.empty() ? own_engine(*options) : over_http(*options);
}

}  // namespace

DDTREE_COMMAND("smoke", "does this engine, or the server at --url, write sensible text, and is speculation's text the plain one's?", smoke);

}  // namespace ddtree::cli
