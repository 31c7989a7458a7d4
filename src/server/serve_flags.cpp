#include "server/serve_flags.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <functional>

#include "server/help_text.h"
#include "server/serve_flags_compat.h"

namespace ddtree {

namespace {

// What a flag's handler sees: the value (empty for a switch) and how to complain.
struct Given {
  const std::string& flag;
  const std::string& value;
  Status wrong(const std::string& right) const { return {Code::kUsage, fmt::format("{} {}: {}", flag, value, right)}; }
};

struct Flag {
  std::vector<const char*> names;  // the first is the flag's own, the others are what other servers call it
  const char* group;
  const char* value;  // placeholder; "": a switch
  const char* help;
  std::function<Status(const Given&, ServeConfig&, struct Pending&)> take;
};

// Flags whose meaning depends on others.
struct Pending {
  std::string algorithm;
  int num_steps = 0, draft_tokens = 0, block_size = 0, eagle_topk = 0;
  std::string load_format;
  bool budget_given = false, chunk_given = false, help = false, on_cpu = false;
  std::string ranks_flag;  // as given
};

Status integer(const Given& g, int64_t low, int64_t high, int64_t* out) {
  int64_t n = 0;
  const char* end = g.value.data() + g.value.size();
  const auto [p, ec] = std::from_chars(g.value.data(), end, n);
  const bool too_large = p == end && (ec == std::errc::result_out_of_range || n > high);
  if (ec != std::errc() || p != end || n < low || n > high)
    return g.wrong(high == INT32_MAX && !too_large ? fmt::format("must be a whole number of at least {}", low)
                                                   : fmt::format("must be a whole number from {} to {}", low, high));
  *out = n;
  return {};
}

template <class T>
auto whole(int64_t low, int64_t high, T ServeConfig::*part, auto T::*member) {
  return [=](const Given& g, ServeConfig& c, Pending&) -> Status {
    int64_t n = 0;
    DDTREE_RETURN_IF_ERROR(integer(g, low, high, &n));
    (c.*part).*member = static_cast<std::remove_reference_t<decltype((c.*part).*member)>>(n);
    return {};
  };
}

auto engine_whole(int64_t low, int64_t high, int32_t EngineOptions::*member) {
  return [=](const Given& g, ServeConfig& c, Pending&) -> Status {
    int64_t n = 0;
    DDTREE_RETURN_IF_ERROR(integer(g, low, high, &n));
    c.service.engine.*member = static_cast<int32_t>(n);
    return {};
  };
}

auto pending_whole(int64_t low, int64_t high, int Pending::*member) {
  return [=](const Given& g, ServeConfig&, Pending& p) -> Status {
    int64_t n = 0;
    DDTREE_RETURN_IF_ERROR(integer(g, low, high, &n));
    p.*member = static_cast<int>(n);
    return {};
  };
}

template <class T>
auto text(T ServeConfig::*part, std::string T::*member) {
  return [=](const Given& g, ServeConfig& c, Pending&) -> Status {
    if (g.value.empty()) return g.wrong("must not be empty");
    (c.*part).*member = g.value;
    return {};
  };
}

template <class T>
auto on(T ServeConfig::*part, bool T::*member) {
  return [=](const Given&, ServeConfig& c, Pending&) -> Status {
    (c.*part).*member = true;
    return {};
  };
}

// "33554432", "32MiB", "1G": binary multiples.
bool read_bytes(std::string digits, int64_t least, int64_t* bytes) {
  int shift = 0;
  for (const auto& [suffix, s] : {std::pair<const char*, int>{"KiB", 10}, {"MiB", 20}, {"GiB", 30}, {"K", 10}, {"M", 20}, {"G", 30}})
    if (digits.size() > std::char_traits<char>::length(suffix) && digits.ends_with(suffix)) {
      digits.resize(digits.size() - std::char_traits<char>::length(suffix));
      shift = s;
      break;
    }
  if (!integer({"", digits}, least, INT64_MAX >> 31, bytes).ok()) return false;
  *bytes <<= shift;
  return true;
}

Status take_bytes(const Given& g, ServeConfig& c, Pending&) {
  int64_t n = 0;
  if (!read_bytes(g.value, 1, &n)) return g.wrong("must be a number of bytes, as in 33554432 or 32MiB");
  c.http.max_body = static_cast<size_t>(n);
  return {};
}

Status take_retain_size(const Given& g, ServeConfig& c, Pending&) {
  if (!read_bytes(g.value, 0, &c.service.retain_bytes))
    return g.wrong("must be a number of bytes, as in 512MiB or 1GiB, or 0 for no limit");
  // An empty history has a dozen pages of tables: below this every request would go at once.
  if (c.service.retain_bytes != 0 && c.service.retain_bytes < (1 << 20)) return g.wrong("must be at least 1MiB, or 0 for no limit");
  return {};
}

Status take_seconds(const Given& g, ServeConfig& c, Pending&) {
  char* end = nullptr;
  const double v = std::strtod(g.value.c_str(), &end);
  if (g.value.empty() || *end || !std::isfinite(v) || v < 0 || v > 86400) return g.wrong("must be a number of seconds from 0 to 86400");
  c.service.drain_seconds = v;
  return {};
}

// Seconds, or another figure, from low to high.
template <class P>
auto real(double low, double high, P ServiceOptions::*part, double P::*member) {
  return [=](const Given& g, ServeConfig& c, Pending&) -> Status {
    char* end = nullptr;
    const double v = std::strtod(g.value.c_str(), &end);
    if (g.value.empty() || *end || !std::isfinite(v) || v < low || v > high)
      return g.wrong(fmt::format("must be a number from {} to {}", low, high));
    (c.service.*part).*member = v;
    return {};
  };
}

template <class P>
auto count(int64_t low, int64_t high, P ServiceOptions::*part, int64_t P::*member) {
  return [=](const Given& g, ServeConfig& c, Pending&) -> Status { return integer(g, low, high, &((c.service.*part).*member)); };
}

Status take_percent(const Given& g, double* out) {
  char* end = nullptr;
  const double v = std::strtod(g.value.c_str(), &end);
  if (g.value.empty() || *end || !std::isfinite(v) || v <= 0 || v > 100) return g.wrong("must be a number of percent above 0, up to 100");
  *out = v / 100;
  return {};
}

Status take_log_level(const Given& g, ServeConfig& c, Pending&) {
  if (g.value == "debug") c.log_level = log::Level::kDebug;
  else if (g.value == "info") c.log_level = log::Level::kInfo;
  else if (g.value == "warning" || g.value == "warn") c.log_level = log::Level::kWarn;
  else if (g.value == "error" || g.value == "critical") c.log_level = log::Level::kError;
  else return g.wrong("must be debug, info, warning or error");
  return {};
}

Status take_algorithm(const Given& g, ServeConfig&, Pending& p) {
  std::string upper = g.value;
  for (char& ch : upper) ch = static_cast<char>(std::toupper(static_cast<unsigned char>(ch)));
  if (upper == "EAGLE3" || upper == "STANDALONE" || upper == "NGRAM" || upper == "DSPARK" || upper == "MULTI_LAYER_EAGLE")
    return g.wrong("is not built; DDTREE and DFLASH work with a DFlash drafter, NEXTN with the checkpoint's MTP head, NONE always");
  if (upper != "DDTREE" && upper != "DFLASH" && upper != "NEXTN" && upper != "NONE" && upper != "EAGLE")
    return g.wrong("must be DDTREE, DFLASH, NEXTN or NONE");
  p.algorithm = upper;
  return {};
}

Status take_budget(const Given& g, ServeConfig& c, Pending& p) {
  p.budget_given = true;
  if (g.value == "auto") return c.service.engine.budget = 0, Status();
  int64_t n = 0;
  if (!integer(g, 1, 256, &n).ok()) return g.wrong("must be auto or a number of nodes from 1 to 256");
  c.service.engine.budget = static_cast<int32_t>(n);
  return {};
}

// A card's chunks: what sequences that decode wait for, and while none does (docs/performance.md, prompts).
constexpr int32_t kCudaChunk = 512, kLoneChunk = 1024;

Status take_chunk(const Given& g, ServeConfig& c, Pending& p) {
  constexpr int kMost = 4096;
  p.chunk_given = true;
  int64_t n = 0;
  DDTREE_RETURN_IF_ERROR(integer(g, -1, INT32_MAX, &n));
  if (n == 0) return g.wrong("must be at least 1, or -1 for the largest chunk");
  if (n < 0 || n > kMost)
    c.notes.push_back(fmt::format("{} {}: a pass takes at most {} prompt tokens here; that is used", g.flag, g.value, kMost));
  c.service.engine.prefill_chunk = static_cast<int32_t>(n < 0 || n > kMost ? kMost : n);
  return {};
}

Status take_load_format(const Given& g, ServeConfig&, Pending& p) {
  if (g.value != "auto" && g.value != "safetensors" && g.value != "dummy") return g.wrong("must be auto, safetensors or dummy");
  p.load_format = g.value;
  return {};
}

Status take_device(const Given& g, ServeConfig& c, Pending& p) {
  p.on_cpu = g.value == "cpu";
  if (g.value == "cpu" || g.value == "auto") return c.service.cuda_device = -1, Status();
  if (g.value == "cuda") return c.service.cuda_device = 0, Status();
  if (g.value.starts_with("cuda:") && g.value.size() > 5 && g.value.size() < 8 &&
      g.value.find_first_not_of("0123456789", 5) == std::string::npos) {
    c.service.cuda_device = std::stoi(g.value.substr(5));
    return {};
  }
  return g.wrong("must be cpu, cuda or cuda:N with a card's number");
}

Status take_ranks(const Given& g, ServeConfig& c, Pending& p) {
  int64_t n = 0;
  if (!integer(g, 1, kMostRanks, &n).ok()) return g.wrong(fmt::format("must be a number of ranks, at least 1, at most {}", kMostRanks));
  c.service.tp_size = static_cast<int32_t>(n);
  p.ranks_flag = g.flag;
  return {};
}

// Ranks on the CPU help nobody who has cards: only who says --device cpu gets them.
Status refuse_ranks(const ServeConfig& c, const Pending& p) {
  if (c.service.tp_size == 1 || (p.on_cpu && c.service.cuda_device < 0)) return {};
  return {Code::kUsage,
          fmt::format("{} {} is not built for CUDA cards: this build has no collectives between them. Leave it out (or give 1) and "
                      "serve a model that fits one card; --device cpu runs the ranks in this process, for tests",
                      p.ranks_flag, c.service.tp_size)};
}

Status take_page_size(const Given& g, ServeConfig& c, Pending&) {
  int64_t n = 0;
  if (!integer(g, 1, 1024, &n).ok()) return g.wrong("must be a whole number from 1 to 1024; multiples of 16 are used as they are");
  // Attention reads keys in lanes of 16. Published units have 1, which elsewhere lets prefixes be shared token by token; answers do not
  // depend on it.
  c.service.page_size = static_cast<int32_t>((n + 15) / 16 * 16);
  if (n != c.service.page_size)
    c.notes.push_back(fmt::format("{} {}: a page holds a multiple of 16 tokens here; {} is used", g.flag, g.value, c.service.page_size));
  return {};
}

Status take_total_tokens(const Given& g, ServeConfig& c, Pending&) {
  int64_t n = 0;
  DDTREE_RETURN_IF_ERROR(integer(g, 1, INT32_MAX, &n));
  c.service.pages = -static_cast<int32_t>(n);  // tokens, turned into pages when the page size is known
  return {};
}

// Elsewhere it bounds weights and K/V only, and what passes need comes on top.
Status take_fraction(const Given& g, ServeConfig& c, Pending&) {
  double v = 0;
  const char* end = g.value.data() + g.value.size();
  const auto [p, ec] = std::from_chars(g.value.data(), end, v);
  if (ec != std::errc() || p != end || !(v > 0 && v <= 1)) return g.wrong("must be a number above 0 and at most 1");
  c.service.mem_fraction = v;
  if (g.flag == "--mem-fraction-static")
    c.notes.push_back(fmt::format("{} {}: it bounds all memory of this server here, not weights and K/V alone", g.flag, g.value));
  return {};
}

Status take_names(const Given& g, ServeConfig& c, Pending&) {
  if (g.value.empty()) return g.wrong("must not be empty");
  c.service.served_names.push_back(g.value);
  return {};
}

Status take_shadow(const Given& g, ServeConfig& c, Pending&) {
  if (g.value != "linear") return g.wrong("must be linear: commit what the chain alone would, record what the tree would have gained");
  c.service.engine.shadow_linear = true;
  return {};
}

const std::vector<Flag>& own_flags() {
  using C = ServeConfig;
  static const std::vector<Flag> flags = {
      {{"--model-path", "--model"},
       "Model",
       "PATH",
       "folder of a Qwen3.5-family checkpoint, or ORG/NAME in the local Hugging Face cache (default: the embedded pair, tiny)",
       text(&C::service, &ServiceOptions::model_path)},
      {{"--served-model-name"},
       "Model",
       "NAME",
       "name in the API, may be given more than once (default: the --model-path string)",
       take_names},
      {{"--chat-template"},
       "Model",
       "FILE",
       "Jinja file in place of the checkpoint's own",
       text(&C::service, &ServiceOptions::chat_template_path)},
      {{"--reasoning-parser"},
       "Model",
       "NAME",
       "qwen3 or none (default: by the tokenizer)",
       text(&C::service, &ServiceOptions::reasoning_parser)},
      {{"--tool-call-parser"},
       "Model",
       "NAME",
       "qwen3_coder, hermes or none (default: by the template)",
       text(&C::service, &ServiceOptions::tool_parser)},

      {{"--speculative-algorithm", "--speculative-algo"},
       "Speculation",
       "NAME",
       "DDTREE, DFLASH, NEXTN or NONE (default: DDTREE where there is a drafter, else NONE)",
       take_algorithm},
      {{"--speculative-draft-model-path", "--speculative-draft-model"},
       "Speculation",
       "PATH",
       "the DFlash drafter",
       text(&C::service, &ServiceOptions::draft_path)},
      {{"--speculative-ddtree-budget"},
       "Speculation",
       "N|auto",
       "nodes a tree (1 to 256), or by measured cost (default: auto)",
       take_budget},
      {{"--speculative-ddtree-shadow"},
       "Speculation",
       "linear",
       "commit what the chain alone would, record what the tree would have gained",
       take_shadow},
      {{"--speculative-ddtree-seed-chain"},
       "Speculation",
       "",
       "the whole greedy chain goes into the tree first",
       [](const Given&, C& c, Pending&) {
         c.service.engine.seed_chain = true;
         return Status();
       }},
      {{"--speculative-dflash-block-size"},
       "Speculation",
       "N",
       "anchor and drafted positions a block (default: the drafter's own)",
       pending_whole(2, 1024, &Pending::block_size)},
      {{"--speculative-num-draft-tokens"},
       "Speculation",
       "N",
       "DFLASH, DDTREE: as --speculative-dflash-block-size; NEXTN: drafts + 1",
       pending_whole(1, 1024, &Pending::draft_tokens)},
      {{"--speculative-num-steps"}, "Speculation", "N", "NEXTN: drafts a round (default: 3)", pending_whole(1, 64, &Pending::num_steps)},
      {{"--speculative-eagle-topk"}, "Speculation", "N", "accepted; NEXTN drafts a chain (1)", pending_whole(1, 64, &Pending::eagle_topk)},

      {{"--context-length", "--max-model-len"},
       "Capacity",
       "N",
       "tokens of prompt and answer together (default: the model's own)",
       engine_whole(16, INT32_MAX, &EngineOptions::context_length)},
      {{"--max-running-requests", "--max-num-seqs"},
       "Capacity",
       "N",
       "sequences in one batch (default: 8)",
       engine_whole(1, 256, &EngineOptions::max_running)},
      {{"--max-queued-requests"},
       "Capacity",
       "N",
       "requests that may wait; one more is a 429 (default: 256)",
       engine_whole(0, 100000, &EngineOptions::max_queue)},
      {{"--chunked-prefill-size"}, "Capacity", "N", "prompt tokens a pass (default: 256; cards: 512, or 1024 if none decodes)", take_chunk},
      {{"--page-size"}, "Capacity", "N", "tokens a KV page, up to 1024; rounded up to a multiple of 16 (default: 32)", take_page_size},
      {{"--max-total-tokens"},
       "Capacity",
       "N",
       "tokens in all KV pages (default: as many as fit, at most --max-running-requests times the context)",
       take_total_tokens},
      {{"--mem-fraction-static", "--gpu-memory-utilization"},
       "Capacity",
       "SHARE",
       "of the device's memory that the memory plan may come to, all of it (default: 0.95; ddtree plan shows it)",
       take_fraction},
      {{"--kv-pages"}, "Capacity", "N", "--max-total-tokens in pages", whole(1, INT32_MAX, &C::service, &ServiceOptions::pages)},
      {{"--device"}, "Capacity", "cpu|cuda[:N]", "where the engine runs (default: cpu)", take_device},
      {{"--tp-size", "--tp", "--tensor-parallel-size"},
       "Capacity",
       "N",
       "ranks that share the target's weights; with --device cpu only, in this process, for tests (ddtree plan: any device; default: 1)",
       take_ranks},
      {{"--disable-cuda-graph"}, "Capacity", "", "launch kernels one by one; same answers", on(&C::service, &ServiceOptions::no_graphs)},
      {{"--load-format"},
       "Model",
       "auto|safetensors|dummy",
       "dummy: seeded random weights of --model-config's shapes, for measuring without files",
       take_load_format},
      {{"--model-config"},
       "Model",
       "NAME|FILE",
       "with --load-format dummy: a known model (qwen3.6-27b, …) or a config.json",
       text(&C::service, &ServiceOptions::model_config)},
      {{"--draft-config"},
       "Model",
       "NAME|FILE|none",
       "its drafter's (default: the one that belongs to a known name)",
       text(&C::service, &ServiceOptions::draft_config)},
      {{"--threads"}, "Capacity", "N", "CPU threads (default: all cores)", whole(1, 1024, &C::service, &ServiceOptions::threads)},

      {{"--host"}, "Server", "ADDRESS", "address to listen on (default: 127.0.0.1)", text(&C::http, &HttpServer::Options::host)},
      {{"--port"}, "Server", "N", "port (default: 30000; 0: any free one)", whole(0, 65535, &C::http, &HttpServer::Options::port)},
      {{"--api-key"}, "Server", "KEY", "ask for this key; health probes stay open", text(&C::http, &HttpServer::Options::api_key)},
      {{"--cors-origin"},
       "Server",
       "ORIGIN",
       "let pages of this origin (or *) call the API (default: none)",
       text(&C::http, &HttpServer::Options::cors_origin)},
      {{"--max-body-size"}, "Server", "BYTES", "largest request body, as in 32MiB (the default)", take_bytes},
      {{"--always-include-usage"},
       "Server",
       "",
       "end every stream with a usage chunk, asked for or not",
       on(&C::service, &ServiceOptions::always_include_usage)},
      {{"--drain-timeout"}, "Server", "SECONDS", "on SIGTERM, how long running requests may finish (default: 30)", take_seconds},
      {{"--log-level"}, "Server", "LEVEL", "debug, info, warning or error (default: info)", take_log_level},

      {{"--stuck-seconds"},
       "Watch",
       "SECONDS",
       "requests run and no pass ends for so long: /livez and /readyz are 503, systemd hears no WATCHDOG=1 (default: 30)",
       real(0.1, 86400, &ServiceOptions::watch, &WatchLimits::stuck_seconds)},
      {{"--stuck-exit-seconds"},
       "Watch",
       "SECONDS",
       "and for so long: exit 70 (default: 55; 0: never)",
       real(0, 86400, &ServiceOptions::watch, &WatchLimits::stuck_exit_seconds)},
      {{"--canary-interval"},
       "Watch",
       "SECONDS",
       "between canaries when idle; four times that under load; 0: only after faults (default: 300)",
       real(0, 86400, &ServiceOptions::watch, &WatchLimits::canary_seconds)},
      {{"--ladder-settle"},
       "Watch",
       "SECONDS",
       "after a step down, faults belong to what it was taken for, and then a canary shows whether it helped (default: 5)",
       real(0, 3600, &ServiceOptions::ladder, &Ladder::Limits::settle_seconds)},
      {{"--ladder-proof"},
       "Watch",
       "SECONDS",
       "without a fault, and then a canary that passes, until a step up; doubles where one did not hold (default: 300)",
       real(0, 86400, &ServiceOptions::ladder, &Ladder::Limits::proof_seconds)},
      {{"--acceptance-alarm"},
       "Watch",
       "SHARE",
       "accepted drafts a round over the last 64, of the mean before, under which the canary is asked; 0: off (default: 0.2)",
       real(0, 1, &ServiceOptions::watch, &WatchLimits::acceptance_share)},
      {{"--slow-alarm"},
       "Watch",
       "FACTOR",
       "times the costs measured at start that passes may take (default: 10)",
       real(1, 1e9, &ServiceOptions::watch, &WatchLimits::slow_factor)},
      {{"--degeneracy-run"},
       "Watch",
       "N",
       "the same character so often in a row makes a text suspicious; 0: texts are not watched (default: 192)",
       count(0, 100000, &ServiceOptions::degeneracy, &DegeneracyDetector::Limits::run)},
      {{"--degeneracy-rule-run"},
       "Watch",
       "N",
       "and those that draw rules, as - and = (default: 512)",
       count(1, 100000, &ServiceOptions::degeneracy, &DegeneracyDetector::Limits::rule_run)},
      {{"--degeneracy-loop"},
       "Watch",
       "BYTES",
       "a repeated word, sentence or block is suspicious from this length on (default: 320)",
       count(16, 100000, &ServiceOptions::degeneracy, &DegeneracyDetector::Limits::min_loop_bytes)},

      {{"--db"},
       "History",
       "FILE",
       "the SQLite history (default: in the user's state folder)",
       text(&C::service, &ServiceOptions::db_path)},
      {{"--retain-days"},
       "History",
       "N",
       "days that history is kept (default: 90; 0: for ever)",
       whole(0, 36500, &C::service, &ServiceOptions::retain_days)},
      {{"--retain-size"},
       "History",
       "BYTES",
       "size of the history above which the oldest requests go, as in 512MiB (default: 1GiB; 0: no limit)",
       take_retain_size},
      {{"--store-text"}, "History", "", "keep prompts and answers too", on(&C::service, &ServiceOptions::store_text)},
      {{"--recent-trees"},
       "History",
       "N",
       "requests whose draft trees are kept in memory (default: 64)",
       whole(0, 10000, &C::service, &ServiceOptions::recent_trees)},
      {{"--smoke-prompts"},
       "History",
       "FILE",
       "prompts of your own that the smoke test asks, too, with what must come (ddtree smoke --help has the format)",
       text(&C::service, &ServiceOptions::smoke_prompts_path)},
      {{"--smoke-slower"},
       "History",
       "PERCENT",
       "degraded where the smoke test decodes so much slower than the median of this machine's earlier runs (default: 30)",
       [](const Given& g, C& c, Pending&) { return take_percent(g, &c.service.smoke_thresholds.slower); }},
      {{"--smoke-lower-acceptance"},
       "History",
       "PERCENT",
       "the same for tokens a round (default: 20)",
       [](const Given& g, C& c, Pending&) { return take_percent(g, &c.service.smoke_thresholds.shorter); }},
      {{"--skip-smoke"},
       "History",
       "",
       "be ready without the smoke test, for models that cannot pass (random weights); shown wherever readiness is",
       on(&C::service, &ServiceOptions::skip_smoke)},
      {{"--help", "-h"},
       "History",
       "",
       "this text",
       [](const Given&, C& c, Pending&) {
         c.help = true;
         return Status();
       }},
  };
  return flags;
}

const Flag* find_own(const std::string& name) {
  for (const Flag& f : own_flags())
    for (const char* n : f.names)
      if (name == n) return &f;
  return nullptr;
}

std::vector<ExtraFlag>& extra_flags() {
  static std::vector<ExtraFlag> flags;
  return flags;
}

const ExtraFlag* find_extra(const std::string& name) {
  for (const ExtraFlag& f : extra_flags())
    if (name == f.name) return &f;
  return nullptr;
}

// Settles what several flags say together.
Status settle(ServeConfig& c, const Pending& p) {
  EngineOptions& e = c.service.engine;
  DDTREE_RETURN_IF_ERROR(refuse_ranks(c, p));
  if (!p.chunk_given && c.service.cuda_device >= 0) e.prefill_chunk = kCudaChunk, e.lone_chunk = kLoneChunk;
  std::string algorithm = p.algorithm;
  if (algorithm == "EAGLE") {
    c.notes.push_back("--speculative-algorithm EAGLE: with this model family that is its MTP head; NEXTN is used");
    algorithm = "NEXTN";
  }
  c.service.mode_given = !algorithm.empty();
  const WatchLimits& watch = c.service.watch;
  if (watch.stuck_exit_seconds > 0 && watch.stuck_exit_seconds < watch.stuck_seconds)
    return {Code::kUsage,
            fmt::format("--stuck-exit-seconds {:g} comes before --stuck-seconds {:g}, when a round counts as stuck: give at least that, "
                        "or 0 for never",
                        watch.stuck_exit_seconds, watch.stuck_seconds)};
  if ((p.load_format == "dummy") != !c.service.model_config.empty())
    return {Code::kUsage, c.service.model_config.empty()
                              ? "--load-format dummy needs the shapes: give --model-config NAME or FILE"
                              : "--model-config is for --load-format dummy; a checkpoint brings its own config.json"};
  if (!c.service.draft_config.empty() && c.service.model_config.empty())
    return {Code::kUsage, "--draft-config is for --load-format dummy; a drafter goes after --speculative-draft-model-path"};
  for (const SpeculationMode mode : {SpeculationMode::kNone, SpeculationMode::kDflash, SpeculationMode::kDdtree, SpeculationMode::kNextn})
    if (algorithm == mode_name(mode)) e.mode = mode;
  // Without the flag the pair decides, and the same flags are read as those of a drafter.
  const bool blocks = !c.service.mode_given || e.mode == SpeculationMode::kDflash || e.mode == SpeculationMode::kDdtree;
  if (blocks) {
    if (p.block_size && p.draft_tokens && p.block_size != p.draft_tokens)
      return {Code::kUsage,
              fmt::format(
                  "--speculative-dflash-block-size {} and --speculative-num-draft-tokens {} are the same figure; give one, or both alike",
                  p.block_size, p.draft_tokens)};
    e.block_size = p.block_size ? p.block_size : p.draft_tokens;
    if (e.block_size == 1)
      return {Code::kUsage,
              "a block of 1 (--speculative-dflash-block-size, --speculative-num-draft-tokens): it holds the anchor and at least one draft, "
              "so at least 2 (--speculative-algorithm "
              "NONE drafts nothing)"};
    if (p.num_steps > 1)
      c.notes.push_back(
          fmt::format("--speculative-num-steps {}: a DFlash drafter drafts its whole block in one pass; nothing changes", p.num_steps));
  } else if (e.mode == SpeculationMode::kNextn) {
    if (p.num_steps) e.nextn_steps = p.num_steps;
    else if (p.draft_tokens == 1)
      return {Code::kUsage,
              "--speculative-num-draft-tokens 1: NEXTN counts the anchor, so at least 2 (--speculative-algorithm NONE drafts nothing)"};
    else if (p.draft_tokens > 1) e.nextn_steps = p.draft_tokens - 1;
    if (p.num_steps && p.draft_tokens && p.draft_tokens != p.num_steps + 1)
      c.notes.push_back(fmt::format("--speculative-num-draft-tokens {}: NEXTN drafts a chain of --speculative-num-steps {}; that is used",
                                    p.draft_tokens, p.num_steps));
    if (p.block_size)
      c.notes.push_back(fmt::format("--speculative-dflash-block-size {}: NEXTN has no block; nothing changes", p.block_size));
  }
  if (p.eagle_topk > 1)
    c.notes.push_back(fmt::format("--speculative-eagle-topk {}: {}", p.eagle_topk,
                                  e.mode == SpeculationMode::kNextn ? "NEXTN drafts a chain (1); the text is the same"
                                                                    : "the tree's shape comes from --speculative-ddtree-budget"));
  if (p.budget_given && c.service.mode_given && e.mode != SpeculationMode::kDdtree)
    c.notes.push_back(fmt::format("--speculative-ddtree-budget: {} grows no tree; nothing changes", mode_name(e.mode)));
  if (e.shadow_linear && c.service.mode_given && e.mode != SpeculationMode::kDdtree)
    return {Code::kUsage,
            fmt::format("--speculative-ddtree-shadow compares a tree with its chain: it needs --speculative-algorithm DDTREE, not {}",
                        mode_name(e.mode))};
  if (c.service.pages < 0) c.service.pages = std::max(1, -c.service.pages / c.service.page_size);
  // A place in the pages is a 32-bit number.
  if (int64_t{c.service.pages} * c.service.page_size > INT32_MAX)
    return {Code::kUsage,
            fmt::format("--kv-pages {} of --page-size {} hold {} tokens, at most {} are possible; give at most {}", c.service.pages,
                        c.service.page_size, int64_t{c.service.pages} * c.service.page_size, INT32_MAX, INT32_MAX / c.service.page_size)};
  return {};
}

}  // namespace

void add_serve_flag(ExtraFlag flag) { extra_flags().push_back(std::move(flag)); }

std::string nearest_flag(const std::string& unknown, const std::vector<std::string>& own) {
  std::vector<std::string> names = own;
  for (std::string& name : compat_flag_names()) names.push_back(std::move(name));
  for (const Flag& f : own_flags()) names.insert(names.end(), f.names.begin(), f.names.end());
  std::string best;
  size_t distance = std::max<size_t>(3, unknown.size() / 3) + 1;
  for (const std::string& name : names)
    if (const size_t d = edit_distance(unknown, name); d < distance) {
      distance = d;
      best = name;
    }
  if (!best.empty()) return best;
  // A flag cut short: --speculative-draft.
  for (const std::string& name : names)
    if (unknown.size() > 6 && name.rfind(unknown, 0) == 0) return name;
  return {};
}

namespace {

// Whose command line it is, for what is said about an unknown flag.
struct Asker {
  const std::string& command;
  const std::vector<std::string>& own;
};

// Takes the flag at args[i], says in `verdict` what became of it, and moves i past it and its values. It does so where it fails too, so
// that what comes after can still be judged.
Status take_flag(const std::vector<std::string>& args, const Asker& asker, size_t& i, ServeConfig& c, Pending& pending,
                 FlagVerdict& verdict) {
  const size_t begin = i++;
  std::string name = args[begin], value;
  const bool has_value = name.rfind("--", 0) == 0 && name.find('=') != std::string::npos;
  if (has_value) {
    value = name.substr(name.find('=') + 1);
    name.resize(name.find('='));
  }
  const auto end = [&](FlagVerdict::Kind kind, std::string reason) {
    verdict.kind = kind;
    verdict.words.assign(args.begin() + static_cast<std::ptrdiff_t>(begin), args.begin() + static_cast<std::ptrdiff_t>(i));
    verdict.reason = std::move(reason);
  };
  const auto fail = [&](FlagVerdict::Kind kind, std::string message) {
    end(kind, message);
    return Status(Code::kUsage, std::move(message));
  };
  if (name.empty() || name[0] != '-')
    return fail(FlagVerdict::kUnknown, fmt::format("'{}' is no flag; the model goes after --model-path", name));
  // A value may begin with a dash only where it is a number.
  const auto next_is_value = [&] {
    return i < args.size() && (args[i].empty() || args[i][0] != '-' ||
                               (args[i].size() > 1 && (std::isdigit(static_cast<unsigned char>(args[i][1])) || args[i][1] == '.')));
  };
  verdict.name = name;
  if (const ExtraFlag* extra = find_extra(name)) {
    verdict.own = true;
    if (!has_value) {
      if (!next_is_value()) return fail(FlagVerdict::kRefused, fmt::format("{} needs a value: {}", name, extra->value));
      value = args[i++];
    }
    if (const Status taken = extra->take(value, c); !taken.ok()) return fail(FlagVerdict::kRefused, taken.message());
    end(FlagVerdict::kKept, "");
    c.service.flags.emplace_back(name, value);
    return {};
  }
  if (const Flag* flag = find_own(name)) {
    verdict.own = true;
    if (!*flag->value && has_value) return fail(FlagVerdict::kRefused, fmt::format("{} takes no value, found {}", name, value));
    if (*flag->value && !has_value) {
      if (!next_is_value()) return fail(FlagVerdict::kRefused, fmt::format("{} needs a value: {}", name, flag->value));
      value = args[i++];
    }
    const size_t notes = c.notes.size();
    Status taken = flag->take({name, value}, c, pending);
    // Several names after one flag, as vLLM's units have them.
    while (taken.ok() && name == "--served-model-name" && !has_value && next_is_value()) taken = flag->take({name, args[i++]}, c, pending);
    if (!taken.ok()) return fail(FlagVerdict::kRefused, taken.message());
    end(c.notes.size() > notes ? FlagVerdict::kChanged : FlagVerdict::kKept, c.notes.size() > notes ? c.notes.back() : "");
    c.service.flags.emplace_back(name, value);
    return {};
  }
  const CompatFlag* flag = find_compat(name);
  if (!flag) {
    while (next_is_value()) ++i;  // its values, whatever they mean
    const std::string near = nearest_flag(name, asker.own);
    return fail(FlagVerdict::kUnknown,
                fmt::format("{} is no flag of ddtree {}; ", name, asker.command) +
                    (near.empty() ? fmt::format("ddtree {} --help lists them", asker.command) : fmt::format("did you mean {}?", near)));
  }
  if (flag->arity != CompatFlag::kSwitch && !has_value) {
    if (!next_is_value()) return fail(FlagVerdict::kRefused, fmt::format("{} needs a value", name));
    value = args[i++];
    while (flag->arity == CompatFlag::kList && next_is_value()) value += " " + args[i++];
  }
  if (flag->arity == CompatFlag::kSwitch && has_value)
    return fail(FlagVerdict::kRefused, fmt::format("{} takes no value, found {}", name, value));
  if (const std::string right = flag->wrong(value); !right.empty())
    return fail(FlagVerdict::kRefused, fmt::format("{} {}: must be {}", name, value, right));
  const std::string shown = value.empty() ? name : name + " " + value;
  c.service.flags.emplace_back(name, value);
  for (const char* n : flag->neutral)
    if (value == n) return end(FlagVerdict::kDropped, "asks for what happens anyway"), Status();
  if (flag->refuse) return fail(FlagVerdict::kRefused, fmt::format("{} is not built: {}", shown, flag->instead));
  end(FlagVerdict::kDropped, flag->instead);
  c.notes.push_back(fmt::format("{}: {}", shown, flag->instead));
  return {};
}

}  // namespace

Result<ServeConfig> parse_serve_flags(const std::vector<std::string>& args, const std::string& command,
                                      const std::vector<std::string>& own) {
  ServeConfig c;
  Pending pending;
  for (size_t i = 0; i < args.size();) {
    FlagVerdict verdict;
    DDTREE_RETURN_IF_ERROR(take_flag(args, {command, own}, i, c, pending, verdict));
  }
  DDTREE_RETURN_IF_ERROR(settle(c, pending));
  return c;
}

FlagJudgement judge_serve_flags(const std::vector<std::string>& args) {
  const std::string command = "serve";
  const std::vector<std::string> none;
  FlagJudgement out;
  ServeConfig c;
  Pending pending;
  for (size_t i = 0; i < args.size();) {
    FlagVerdict verdict;
    (void)take_flag(args, {command, none}, i, c, pending, verdict);  // the verdict holds the trouble
    out.flags.push_back(std::move(verdict));
  }
  // One flag's fault, though it takes others to know it: it may be left out by itself.
  if (const Status refused = refuse_ranks(c, pending); !refused.ok()) {
    for (FlagVerdict& verdict : out.flags)
      if (verdict.name == pending.ranks_flag) verdict.kind = FlagVerdict::kRefused, verdict.reason = refused.message();
    c.service.tp_size = 1;
  }
  const size_t notes = c.notes.size();
  if (Status settled = settle(c, pending); !settled.ok()) out.together = settled.message();
  // What settle() remarks begins with the flag that it is about.
  for (size_t n = notes; n < c.notes.size(); ++n)
    for (FlagVerdict& verdict : out.flags)
      if (verdict.kind == FlagVerdict::kKept && c.notes[n].find_first_of(" :") == verdict.name.size() &&
          c.notes[n].starts_with(verdict.name)) {
        verdict.kind = FlagVerdict::kChanged;
        verdict.reason = c.notes[n];
      }
  return out;
}

std::string serve_help() {
  std::string out =
      "usage: ddtree serve [flags]\n\nServes a Qwen3.5-family model over the OpenAI API, with draft trees. Without flags: the embedded "
      "pair on 127.0.0.1:30000.\n";
  std::vector<HelpEntry> entries;
  for (const Flag& f : own_flags()) entries.push_back({f.group, fmt::format("  {} {}", fmt::join(f.names, ", "), f.value), f.help});
  out += help_by_group(std::move(entries));
  for (const ExtraFlag& f : extra_flags()) out += fmt::format("\n  {} {}\n      {}\n", f.name, f.value, f.help);
  out += "\nOther flags of SGLang's launch_server are accepted, with a line that says what happens instead, or refused, with what works:\n";
  out += help_names(compat_flag_names()) +
         "\nExit codes: 0 asked to stop; 64 flags; 65 model files; 69 address, device or library missing; 70 engine fault or failed "
         "smoke test;\n71 does not fit in memory; 75 would work later.\n";
  return out;
}

}  // namespace ddtree
