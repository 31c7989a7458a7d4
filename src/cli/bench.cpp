// ddtree bench: every mode on the same prompts in one go, in changing order, as a table.
//
// A cell is (streams, kind of prompts, mode): the kind's prompts, `streams` of them at any time, from the first submission to the last
// token. Modes of one cell row run right after one another and in another order each time, so that what the machine does besides hits all
// alike. With
// --repeat a cell's time is the median of its runs.
#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstdio>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "base/log.h"
#include "cli/bench_load.h"
#include "cli/bench_prompts.h"
#include "cli/bench_stages.h"
#include "cli/command.h"
#include "cli/local_engine.h"
#include "health/phases.h"
#include "nn/synthetic_executor.h"
#include "server/serving_loader.h"
#include "spec/cost.h"
#include "text/chat_template.h"
#include "text/tokenizer.h"

namespace ddtree::cli {
namespace {

using Json = nlohmann::ordered_json;
using Clock = std::chrono::steady_clock;

const char* const kHelp =
    "usage: ddtree bench [options]\n\n"
    "Times NONE, DFLASH, DDTREE (several budgets and auto) and NEXTN on the same built-in prompts and prints, for each number of streams:\n"
    "tok/s, its ratio to NONE, tokens a round, time to first token (p50, p95), and tok/s by kind of prompt.\n\n"
    "  --modes LIST         as in none,dflash,ddtree:16,ddtree:auto,nextn (default: all that the pair can run)\n"
    "  --streams LIST       requests at a time (default: 1,4,8)\n"
    "  --kinds LIST         code, sequence, small talk, story, json (default: all)\n"
    "  --repeat N           times each cell is run; the median counts (default: 3)\n"
    "  --max-tokens N       of each answer (default: 128)\n"
    "  --temperature X      (default: 0, greedy)\n"
    "  --synthetic-acceptance MEAN  the target's choices are drawn so that a chain of a whole block emits MEAN tokens a round: speed with\n"
    "                       weights that mean nothing (--load-format dummy). The text is none; the figures are marked\n"
    "  --only modes|stages|load  (default: modes; on a card stages too)\n\n"
    "Stages of a round by themselves, beside the time of reading the weights: a plain step, a draft, a tree's verification by rows, a "
    "round; and the prompts, --chunked-prefill-size tokens a pass.\n\n"
    "  --contexts LIST      tokens committed before (default: 1024)\n"
    "  --batches LIST       sequences in a pass (default: 1)\n"
    "  --rows LIST          of one sequence's tree, the root included (default: 1,16,32,64,128)\n"
    "  --ops                each op by itself too\n\n"
    "Loading (--only load): a checkpoint is written, read, and loaded in turn.\n\n"
    "  --size GB            of the checkpoint (default: 10)\n"
    "  --dir DIR            where: empty, new, or one that --keep left (default: a folder of its own in $TMPDIR or /tmp)\n"
    "  --cold               drop the files from the page cache before each reading: the disk's speed\n"
    "  --keep               leave the checkpoint there\n"
    "  --readers N          threads of both (default: 8, or as many as there are cores)\n"
    "  --buffer MIB         of one staging buffer (default: the backend's choice)\n\n"
    "  --json               one JSON object on standard output\n"
    "  --model-path DIR, --draft DIR, --threads N and other flags of ddtree serve that shape the engine\n";

struct Options {
  std::vector<ModeChoice> modes;
  std::vector<int32_t> streams = {1, 4, 8};
  std::vector<std::string> kinds;
  int32_t repeat = 3, max_tokens = 128;
  float temperature = 0;
  double synthetic = 0;  // mean tokens a round; 0: the pair's own
  bool json = false;
  LoadBenchOptions load;
  std::string only;  // "modes", "stages", "load"; empty: modes, and on a card stages too
  StageOptions stages;
};

std::vector<std::string> split(const std::string& list) {
  std::vector<std::string> out(1);
  for (char c : list) {
    if (c == ',') out.emplace_back();
    else out.back() += c;
  }
  return out;
}

std::vector<OwnFlag> own_flags(Options& o) {
  const auto whole = [](const char* flag, int32_t low, int32_t high, int32_t& target) {
    return [=, &target](const std::string& v) -> Status {
      auto n = number_of(flag, v, low, high);
      if (!n) return n.status();
      if (std::floor(*n) != *n) return {Code::kUsage, fmt::format("{} {}: must be a whole number", flag, v)};
      target = static_cast<int32_t>(*n);
      return {};
    };
  };
  const auto numbers = [](const char* flag, int32_t low, int32_t high, std::vector<int32_t>& target) {
    return [=, &target](const std::string& v) -> Status {
      target.clear();
      for (const std::string& part : split(v)) {
        auto n = number_of(flag, part, low, high);
        if (!n) return n.status();
        target.push_back(static_cast<int32_t>(*n));
      }
      return {};
    };
  };
  return {{"--modes", true,
           [&o](const std::string& v) -> Status {
             for (const std::string& m : split(v)) {
               auto mode = mode_choice(m);
               if (!mode) return mode.status();
               o.modes.push_back(*mode);
             }
             return {};
           }},
          {"--streams", true,
           [&o](const std::string& v) -> Status {
             o.streams.clear();
             for (const std::string& s : split(v)) {
               auto n = number_of("--streams", s, 1, 256);
               if (!n) return n.status();
               o.streams.push_back(static_cast<int32_t>(*n));
             }
             return {};
           }},
          {"--kinds", true,
           [&o](const std::string& v) -> Status {
             o.kinds = split(v);
             for (const std::string& k : o.kinds)
               if (std::none_of(bench_prompts().begin(), bench_prompts().end(), [&](const BenchPrompt& p) { return k == p.kind; }))
                 return {Code::kUsage, fmt::format("--kinds {}: there are code, sequence, small talk, story and json", k)};
             return {};
           }},
          {"--repeat", true, whole("--repeat", 1, 1000, o.repeat)},
          {"--max-tokens", true, whole("--max-tokens", 1, 1000000, o.max_tokens)},
          {"--temperature", true,
           [&o](const std::string& v) -> Status {
             auto n = number_of("--temperature", v, 0, 100);
             if (!n) return n.status();
             o.temperature = static_cast<float>(*n);
             return {};
           }},
          {"--size", true,
           [&o](const std::string& v) -> Status {
             auto n = number_of("--size", v, 0.001, 10000);
             if (!n) return n.status();
             return o.load.bytes = static_cast<int64_t>(*n * 1e9), Status();
           }},
          {"--buffer", true,
           [&o](const std::string& v) -> Status {
             auto n = number_of("--buffer", v, 0.0625, 1024);
             if (!n) return n.status();
             return o.load.buffer_bytes = static_cast<int64_t>(*n * (1 << 20)), Status();
           }},
          {"--readers", true, whole("--readers", 1, 256, o.load.readers)},
          {"--dir", true, [&o](const std::string& v) { return o.load.folder = v, Status(); }},
          {"--cold", false, [&o](const std::string&) { return o.load.cold = true, Status(); }},
          {"--keep", false, [&o](const std::string&) { return o.load.keep = true, Status(); }},
          {"--synthetic-acceptance", true,
           [&o](const std::string& v) -> Status {
             auto n = number_of("--synthetic-acceptance", v, 1.01, 256);
             if (!n) return n.status();
             return o.synthetic = *n, Status();
           }},
          {"--only", true,
           [&o](const std::string& v) -> Status {
             if (v != "modes" && v != "stages" && v != "load")
               return {Code::kUsage, fmt::format("--only {}: must be modes, stages or load", v)};
             return o.only = v, Status();
           }},
          {"--contexts", true, numbers("--contexts", 1, 1 << 20, o.stages.contexts)},
          {"--batches", true, numbers("--batches", 1, 256, o.stages.batches)},
          {"--rows", true, numbers("--rows", 1, 257, o.stages.rows)},
          {"--ops", false, [&o](const std::string&) { return o.stages.ops = true, Status(); }},
          {"--json", false, [&o](const std::string&) { return o.json = true, Status(); }}};
}

struct Run {
  // While all streams were busy: until the first answer after which there was no further request. Behind it few sequences run, and the
  // more of them the less even answers' lengths in rounds are, which says nothing about a server that has work.
  double ms = 0;
  int64_t tokens = 0, rounds = 0, drafted = 0, round_tokens = 0, prompt_tokens = 0;
  std::vector<double> first_token_ms;
};

// `count` requests, `streams` at a time, each a prompt of the list in turn.
Result<Run> time_requests(Engine& engine, const std::vector<std::vector<int32_t>>& prompts, const ModeChoice& mode, const Options& o,
                          int32_t streams, int32_t count) {
  Run run;
  std::mutex mutex;
  std::condition_variable changed;
  int32_t open = 0, submitted = 0;
  enum { kBusy, kEnding, kOver } window = kBusy;
  std::string error;
  const auto begin = Clock::now();
  for (int32_t i = 0; i < count; ++i) {
    {
      std::unique_lock lock(mutex);
      changed.wait(lock, [&] { return open < streams; });
      ++open, ++submitted;
    }
    Request r;
    r.id = fmt::format("bench-{}", i);
    r.prompt = prompts[static_cast<size_t>(i) % prompts.size()];
    r.max_tokens = o.max_tokens;
    r.sampling.temperature = o.temperature;
    r.sampling.seed = static_cast<uint64_t>(i) + 1;
    r.sampling.seed_given = true;
    if (o.synthetic > 0) {
      r.ignore_eos = true;  // choices are drawn: an end would be chance
      // And they depend on the prompt's first token: each request of each kind has luck of its own, the same in every mode.
      auto luck = static_cast<uint32_t>(i);
      for (const int32_t id : r.prompt) luck = luck * 31 + static_cast<uint32_t>(id);
      r.prompt.front() = static_cast<int32_t>(luck % 256);
    }
    run.prompt_tokens += static_cast<int64_t>(r.prompt.size());
    r.mode = mode.mode;
    r.budget = mode.budget;
    const auto id = engine.submit(std::move(r), [&](Delta&& d) {
      std::lock_guard lock(mutex);
      // A pass delivers to those that go on before those that end: so these are of the same pass as long as none of the others comes
      // between.
      if (window == kEnding && !d.finished) window = kOver;
      if (window != kOver) run.tokens += static_cast<int64_t>(d.ids.size());
      if (!d.finished) return;
      if (window == kBusy && submitted == count) {
        window = kEnding;
        run.ms = std::chrono::duration<double, std::milli>(Clock::now() - begin).count();
      }
      const RequestStats& s = d.stats;
      run.rounds += s.rounds;
      run.round_tokens += s.completion_tokens - 1;
      run.drafted += s.drafted;
      run.first_token_ms.push_back(s.first_token_ms);
      if (d.finish == FinishReason::kError) error = d.error;
      --open;
      changed.notify_all();
    });
    if (!id) {
      std::unique_lock lock(mutex);
      --open;
      changed.wait(lock, [&] { return open == 0; });
      return id.status();
    }
  }
  std::unique_lock lock(mutex);
  changed.wait(lock, [&] { return open == 0; });
  if (!error.empty()) return Status(Code::kEngineFault, error);
  return run;
}

double percentile(std::vector<double> values, double p) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  return values[std::min(static_cast<size_t>(p * static_cast<double>(values.size())), values.size() - 1)];
}

struct Cell {
  std::vector<Run> runs;
  double ms() const {
    std::vector<double> all;
    for (const Run& r : runs) all.push_back(r.ms);
    return percentile(all, 0.5);
  }
  double tokens() const {
    double n = 0;
    for (const Run& r : runs) n += static_cast<double>(r.tokens);
    return n / static_cast<double>(std::max<size_t>(runs.size(), 1));
  }
};

// One mode at one number of streams, over all kinds.
struct Row {
  std::string mode;
  double tokens_per_second = 0, ratio = 0, tokens_per_round = 0, nodes_per_round = 0, ttft_p50 = 0, ttft_p95 = 0;
  double predicted_ratio = 0;             // by the engine's cost model from tokens and nodes a round
  std::map<std::string, double> by_kind;  // tok/s
};

double at_size(const CostPoints& points, double size) {
  if (points.size.size() < 2) return 0;
  CostCurve curve(points.size);
  for (size_t i = 0; i < points.ms.size(); ++i) curve.set(i, points.ms[i]);
  return curve(size);
}

Row summarise(const ModeChoice& mode, const std::map<std::string, Cell>& cells, int32_t streams, const EngineSnapshot& costs) {
  Row row;
  row.mode = mode.name;
  double ms = 0, tokens = 0;
  int64_t rounds = 0, round_tokens = 0, drafted = 0, prompt_tokens = 0, requests = 0;
  std::vector<double> first;
  for (const auto& [kind, cell] : cells) {
    ms += cell.ms();
    tokens += cell.tokens();
    row.by_kind[kind] = cell.tokens() / cell.ms() * 1e3;
    for (const Run& r : cell.runs) {
      rounds += r.rounds, round_tokens += r.round_tokens, drafted += r.drafted, prompt_tokens += r.prompt_tokens;
      requests += static_cast<int64_t>(r.first_token_ms.size());
      first.insert(first.end(), r.first_token_ms.begin(), r.first_token_ms.end());
    }
  }
  row.tokens_per_second = tokens / ms * 1e3;
  row.tokens_per_round = static_cast<double>(round_tokens) / static_cast<double>(std::max<int64_t>(rounds, 1));
  row.nodes_per_round = static_cast<double>(drafted) / static_cast<double>(std::max<int64_t>(rounds, 1));
  row.ttft_p50 = percentile(first, 0.5);
  row.ttft_p95 = percentile(first, 0.95);
  const double beside = (streams - 1) * costs.sequence_ms + at_size(costs.host_ms, streams),
               plain = at_size(costs.verify_ms, streams) + beside;
  const bool drafts = mode.mode == SpeculationMode::kDflash || mode.mode == SpeculationMode::kDdtree;
  const double round =
      at_size(costs.verify_ms, streams * (1 + row.nodes_per_round)) + beside + (drafts ? at_size(costs.draft_ms, streams) : 0);
  // Prompts cost every mode the same: a pass over `streams` of them serves them all.
  const auto n = static_cast<double>(std::max<int64_t>(requests, 1));
  const double prompts = n * at_size(costs.verify_ms, streams * static_cast<double>(prompt_tokens) / n);
  if (mode.mode != SpeculationMode::kNextn)  // the MTP head's cost is not in the model
    row.predicted_ratio = (static_cast<double>(round_tokens) * plain + prompts) / (static_cast<double>(rounds) * round + prompts);
  return row;
}

void print_table(const std::vector<Row>& rows, int32_t streams, const std::vector<std::string>& kinds) {
  fmt::print("\n{} stream{}\n  {:<12} {:>9} {:>7} {:>7} {:>8} {:>8} {:>9} {:>9}", streams, streams == 1 ? "" : "s", "mode", "tok/s",
             "x NONE", "model", "tok/rnd", "nodes", "TTFT p50", "p95 ms");
  for (const std::string& k : kinds) fmt::print(" {:>10}", k);
  fmt::print("\n");
  for (const Row& r : rows) {
    fmt::print("  {:<12} {:>9.1f} {:>7} {:>7} {:>8.2f} {:>8.1f} {:>9.1f} {:>9.1f}", r.mode, r.tokens_per_second,
               r.ratio > 0 ? fmt::format("{:.2f}", r.ratio) : "-", r.predicted_ratio > 0 ? fmt::format("{:.2f}", r.predicted_ratio) : "-",
               r.tokens_per_round, r.nodes_per_round, r.ttft_p50, r.ttft_p95);
    for (const std::string& k : kinds) fmt::print(" {:>10.1f}", r.by_kind.at(k));
    fmt::print("\n");
  }
  double best = 0, automatic = 0;
  std::string best_name;
  for (const Row& r : rows) {
    if (r.mode == "DDTREE auto") automatic = r.tokens_per_second;
    else if (r.tokens_per_second > best) best = r.tokens_per_second, best_name = r.mode;
  }
  if (automatic > 0 && best > 0) fmt::print("  auto is at {:.2f} of the best fixed mode ({})\n", automatic / best, best_name);
}

int bench(int argc, char** argv) {
  Options o;
  auto arguments = split_arguments(argc, argv, own_flags(o));
  if (!arguments) return fail("bench", arguments.status());
  if (arguments->help || arguments->config.help) return std::fputs(kHelp, stdout), 0;
  if (!arguments->words.empty())
    return fail("bench", {Code::kUsage, fmt::format("'{}' belongs to no flag (ddtree bench --help)", arguments->words[0])});
  log::set_level(std::max(arguments->config.log_level, log::Level::kWarn));
  ServiceOptions service = arguments->config.service;
  Json stages;
  if (o.only == "load") {
    Json load;
    o.load.repeat = o.repeat;
    if (Status s = bench_load(service, o.load, o.json ? &load : nullptr); !s.ok()) return fail("bench", s);
    if (o.json) fmt::print("{}\n", load.dump(2));
    return 0;
  }
  if (o.only == "stages" || (o.only.empty() && service.cuda_device >= 0)) {
    o.stages.repeat = std::max(o.repeat, 9);
    if (Status s = bench_stages(service, o.stages, o.json ? &stages : nullptr); !s.ok()) return fail("bench", s);
    if (o.only == "stages") return o.json ? (fmt::print("{}\n", stages.dump(2)), 0) : 0;
  }
  const int32_t widest = *std::max_element(o.streams.begin(), o.streams.end());
  service.engine.max_running = widest;
  service.engine.max_queue = std::max(service.engine.max_queue, widest);
  // Rows for the largest fixed budget on every stream: a mode that is cut for want of rows would be another mode.
  for (const ModeChoice& m : o.modes) service.engine.budget = std::max(service.engine.budget, m.budget);
  if (o.modes.empty()) service.engine.budget = 64;
  Status refused;
  if (o.synthetic > 0) {
    service.wrap_executor = [&](std::unique_ptr<Executor> inner) -> std::unique_ptr<Executor> {
      if (const double most = SyntheticExecutor::most(*inner); o.synthetic >= most) {
        refused = {Code::kUsage, fmt::format("--synthetic-acceptance {}: a block of this pair emits at most {} tokens; less is needed",
                                             o.synthetic, most)};
        return inner;
      }
      return std::make_unique<SyntheticExecutor>(std::move(inner), o.synthetic);
    };
  }
  PhaseMachine phases;
  auto loaded = load_serving(service, phases);
  if (!refused.ok()) return fail("bench", refused);
  if (!loaded) return fail("bench", loaded.status());
  const Serving& serving = **loaded;
  if (serving.chat_template == nullptr)
    return fail("bench", {Code::kUsage, serving.info.path + " has no chat template, which the prompts need"});
  if (o.modes.empty()) {
    std::vector<const char*> names = {"none"};
    if (serving.info.has_drafter)
      for (const char* m : {"dflash", "ddtree:15", "ddtree:32", "ddtree:64", "ddtree:auto"}) names.push_back(m);
    if (serving.info.has_mtp) names.push_back("nextn");
    for (const char* m : names) o.modes.push_back(*mode_choice(m));
  }

  std::vector<std::string> kinds;
  std::map<std::string, std::vector<std::vector<int32_t>>> prompts;
  for (const BenchPrompt& p : bench_prompts()) {
    if (!o.kinds.empty() && std::find(o.kinds.begin(), o.kinds.end(), p.kind) == o.kinds.end()) continue;
    auto rendered = serving.chat_template->render_chat(bench_request(p));
    if (!rendered) return fail("bench", rendered.status());
    if (kinds.empty() || kinds.back() != p.kind) kinds.emplace_back(p.kind);
    prompts[p.kind].push_back(serving.tokenizer->encode(rendered->prompt));
  }

  const bool terminal = isatty(STDERR_FILENO) != 0;
  const size_t total = static_cast<size_t>(o.repeat) * o.streams.size() * kinds.size() * o.modes.size();
  size_t done = 0;
  const auto progress = [&](const std::string& what) {
    if (terminal) fmt::print(stderr, "\r\033[K[{}/{}] {}", done, total, what), std::fflush(stderr);
    else if (done % 20 == 0) fmt::print(stderr, "[{}/{}] {}\n", done, total, what);
  };
  // A first look at everything: caches are warm and `auto` has seen some rounds, as in a server that has run for a minute.
  for (const ModeChoice& m : o.modes)
    for (const std::string& kind : kinds) {
      progress("warming up: " + m.name);
      auto run = time_requests(*serving.engine, prompts[kind], m, o, std::min(widest, 4), 4);
      if (!run) return fail("bench", run.status());
    }
  std::map<int32_t, std::map<size_t, std::map<std::string, Cell>>> cells;  // streams, mode, kind
  size_t turn = 0;
  for (int32_t repeat = 0; repeat < o.repeat; ++repeat)
    for (int32_t streams : o.streams)
      for (const std::string& kind : kinds) {
        ++turn;
        for (size_t i = 0; i < o.modes.size(); ++i) {
          // Forwards and backwards by turns, each time from another mode on.
          const size_t place = (i + turn) % o.modes.size(), m = turn % 2 ? place : o.modes.size() - 1 - place;
          progress(fmt::format("{} stream{}, {}, {}", streams, streams == 1 ? "" : "s", kind, o.modes[m].name));
          const auto& list = prompts[kind];
          auto run = time_requests(*serving.engine, list, o.modes[m], o, streams, std::max(static_cast<int32_t>(list.size()), 2 * streams));
          if (!run) return fail("bench", run.status());
          cells[streams][m][kind].runs.push_back(std::move(*run));
          ++done;
        }
      }
  if (terminal) fmt::print(stderr, "\r\033[K");

  const EngineSnapshot costs = serving.engine->snapshot();
  Json out = {{"version", DDTREE_VERSION},
              {"model", serving.info.name},
              {"drafter", serving.info.drafter},
              {"backend", serving.info.backend},
              {"temperature", o.temperature},
              {"max_tokens", o.max_tokens},
              {"synthetic_acceptance", o.synthetic > 0 ? Json(o.synthetic) : Json(nullptr)},
              {"repeat", o.repeat},
              {"streams", Json::array()}};
  size_t asked = 0;
  for (const auto& [kind, list] : prompts) asked += list.size();
  if (!o.json)
    fmt::print("{}{}, {} prompts of {} kinds, up to {} tokens each, T {}, median of {}\n", serving.info.path,
               serving.info.has_drafter ? " with drafter" : "", asked, kinds.size(), o.max_tokens, o.temperature, o.repeat);
  if (!o.json && o.synthetic > 0)
    fmt::print("SYNTHETIC ACCEPTANCE: the target's choices are drawn for {} tokens a round of a chain; only times are real\n", o.synthetic);
  for (int32_t streams : o.streams) {
    std::vector<Row> rows;
    for (size_t m = 0; m < o.modes.size(); ++m) rows.push_back(summarise(o.modes[m], cells[streams][m], streams, costs));
    for (size_t m = 0; m < o.modes.size(); ++m)
      if (o.modes[m].mode == SpeculationMode::kNone)
        for (Row& r : rows) r.ratio = r.tokens_per_second / rows[m].tokens_per_second;
    if (!o.json) print_table(rows, streams, kinds);
    Json list = Json::array();
    for (const Row& r : rows)
      list.push_back({{"mode", r.mode},
                      {"tokens_per_second", r.tokens_per_second},
                      {"ratio_to_none", r.ratio},
                      {"ratio_by_cost_model", r.predicted_ratio},
                      {"tokens_per_round", r.tokens_per_round},
                      {"nodes_per_round", r.nodes_per_round},
                      {"ttft_p50_ms", r.ttft_p50},
                      {"ttft_p95_ms", r.ttft_p95},
                      {"tokens_per_second_by_kind", r.by_kind}});
    out["streams"].push_back({{"streams", streams}, {"modes", std::move(list)}});
  }
  if (o.json) {
    if (!stages.is_null()) out["stages"] = stages;
    out["costs"] = {{"verify_rows", costs.verify_ms.size}, {"verify_ms", costs.verify_ms.ms},
                    {"sequence_ms", costs.sequence_ms},    {"draft_sequences", costs.draft_ms.size},
                    {"draft_ms", costs.draft_ms.ms},       {"host_sequences", costs.host_ms.size},
                    {"host_ms", costs.host_ms.ms}};
    fmt::print("{}\n", out.dump(2));
  } else {
    fmt::print(
        "\ntok/s: while all streams are busy. x NONE: tok/s over NONE's. model: the same by the engine's measured costs (prompts, passes, "
        "draft, host) and the tokens and "
        "nodes a round.\n");
  }
  return 0;
}

}  // namespace

DDTREE_COMMAND("bench", "time every mode on the same prompts", bench);

}  // namespace ddtree::cli
