#include "server/serving_loader.h"

#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <optional>
#include <sstream>

#include "base/log.h"
#include "health/phases.h"
#include "model/describe.h"
#include "model/pair.h"
#include "nn/cpu_executor.h"
#include "nn/cuda_executor.h"
#include "server/json.h"
#include "server/serving_plan.h"
#include "text/chat_template.h"
#include "text/tokenizer.h"
#include "text/tool_parser.h"

namespace ddtree {

namespace {

// Destroyed from the bottom up: the engine before what it runs on.
struct Parts {
  std::optional<Tokenizer> tokenizer;
  std::optional<ChatTemplate> chat_template;
  std::unique_ptr<Executor> executor;
  std::unique_ptr<Engine> engine;
};

constexpr double kTellSeconds = 5;  // between lines of the log while weights are read

std::string gigabytes(int64_t bytes) {
  return bytes < 1'000'000'000 ? fmt::format("{:.0f} MB", static_cast<double>(bytes) * 1e-6)
                               : fmt::format("{:.1f} GB", static_cast<double>(bytes) * 1e-9);
}
std::string rate(const ops::LoadProgress& p) { return fmt::format("{:.1f} GB/s", p.bytes_per_second() * 1e-9); }

// bos_token and its like, as templates expect them.
Json template_globals(const std::string& tokenizer_config) {
  Json globals = Json::object();
  std::string trouble;
  const Json config = parse_json_object(tokenizer_config, &trouble);
  if (!trouble.empty()) return globals;  // the tokenizer has read the same text and said what is wrong
  for (const char* name : {"bos_token", "eos_token", "pad_token", "unk_token"}) {
    const auto it = config.find(name);
    if (it == config.end()) continue;
    if (it->is_string()) globals[name] = *it;
    if (it->is_object() && it->contains("content")) globals[name] = (*it)["content"];
  }
  return globals;
}

Result<std::string> read_text(const std::string& path) {
  std::error_code none;
  if (std::filesystem::is_directory(path, none))
    return {Code::kBadModel, fmt::format("--chat-template {}: a folder; give the template's file", path)};
  std::ifstream in(path, std::ios::binary);
  std::ostringstream text;
  text << in.rdbuf();
  if (!in) return {Code::kBadModel, fmt::format("--chat-template {}: the file cannot be read", path)};
  if (text.str().empty()) return {Code::kBadModel, fmt::format("--chat-template {}: the file is empty", path)};
  return text.str();
}

}  // namespace

std::vector<std::string> served_names(const ServiceOptions& options) {
  if (!options.served_names.empty()) return options.served_names;
  if (!options.model_config.empty()) return {options.model_config};
  return {options.model_path.empty() ? "tiny" : options.model_path};
}

Result<std::shared_ptr<const Serving>> load_serving(const ServiceOptions& options, PhaseMachine& phases) {
  DDTREE_RETURN_IF_ERROR(
      phases.enter(Phase::kDevices, options.cuda_device < 0 ? "the CPU" : fmt::format("CUDA card {}", options.cuda_device)));
  // Before any file: who has no usable driver need not wait for a checkpoint's headers, nor mend its path first.
  auto device = plan_device(options);
  if (!device) return device.status();
  const std::string path = options.model_path.empty() ? std::string(kEmbeddedPair) : options.model_path;
  DDTREE_RETURN_IF_ERROR(phases.enter(Phase::kWeights, "reading " + path));
  auto pair = !options.model_config.empty()
                  ? load_dummy_pair(options.model_config, options.draft_config, path)
                  : load_pair(path, options.draft_path.empty() ? std::nullopt : std::optional<std::string>(options.draft_path));
  if (!pair) return pair.status();
  log::info("{}: {}", pair->name, describe(*pair));
  if (options.tp_size > 1)
    log::info("tensor parallel: {} ranks in this process share the CPU's {} threads, the drafter whole on each: for tests, not for speed",
              options.tp_size, threads_of_rank(options.threads, 1));
  phases.progress(Phase::kWeights, 0, "reading the tokenizer");

  auto parts = std::make_shared<Parts>();
  auto tokenizer = Tokenizer::from_json(pair->tokenizer_json, pair->tokenizer_config_json, pair->location + "/tokenizer.json");
  if (!tokenizer) return tokenizer.status();
  parts->tokenizer.emplace(std::move(*tokenizer));
  const bool own_template = !options.chat_template_path.empty();
  std::string source = pair->chat_template;
  if (own_template) {
    auto text = read_text(options.chat_template_path);
    if (!text) return text.status();
    source = std::move(*text);
  }
  if (!source.empty()) {
    auto parsed = ChatTemplate::parse(source, template_globals(pair->tokenizer_config_json),
                                      own_template ? options.chat_template_path : "chat_template.jinja");
    if (!parsed) return parsed.status();
    parts->chat_template.emplace(std::move(*parsed));
  }

  EngineOptions engine = options.engine;
  DDTREE_RETURN_IF_ERROR(settle_mode(options, pair->drafter ? &pair->drafter->spec : nullptr, pair->has_mtp(), pair->name, &engine));
  engine.eos_ids = pair->defaults.eos_ids;
  auto footprint = footprint_of(*pair, options, device->kind);
  if (!footprint) return footprint.status();
  auto planned = plan_memory(*footprint, memory_request(options, engine, *device));
  if (!planned) return planned.status();
  for (const std::string& line : plan_table(*planned)) log::info("  {}", line);
  if (const Status s = refusal(*planned); !s.ok()) return Status(s.code(), fmt::format("{} {}", pair->name, s.message()));
  const auto plan = std::make_shared<const MemoryPlan>(std::move(*planned));
  engine.context_length = plan->request.engine.context_length;

  phases.progress(Phase::kWeights, 0, "taking memory: " + plan_sentence(*plan));
  ExecutorOptions executor = plan->executor;
  executor.threads = options.threads;
  executor.tp_size = options.tp_size;
  executor.graphs = !options.no_graphs;
  executor.real_vocab = parts->tokenizer->id_count();
  executor.loading.progress = [&phases, told = 0.0](const ops::LoadProgress& p) mutable {
    if (p.bytes == p.total) {
      log::info("weights: {} loaded in {:.1f} s, {}", gigabytes(p.total), p.seconds, rate(p));
    } else if (p.seconds - told >= kTellSeconds) {
      told = p.seconds;
      log::info("weights: {:.0f} %, {} of {}, {}", 100.0 * static_cast<double>(p.bytes) / static_cast<double>(p.total), gigabytes(p.bytes),
                gigabytes(p.total), rate(p));
    }
    // False where another phase was entered meanwhile: asked to stop.
    return phases.progress(Phase::kWeights, p.total > 0 ? static_cast<double>(p.bytes) / static_cast<double>(p.total) : 1,
                           fmt::format("{} of {}, {}", gigabytes(p.bytes), gigabytes(p.total), rate(p)));
  };
  auto made = options.cuda_device < 0 ? make_cpu_executor(*pair, executor) : make_cuda_executor(*pair, executor, options.cuda_device);
  if (!made) return made.status();
  parts->executor = options.wrap_executor ? options.wrap_executor(std::move(*made)) : std::move(*made);

  DDTREE_RETURN_IF_ERROR(phases.enter(Phase::kGraphs, "measuring what passes cost on this machine"));
  auto started = Engine::start(*parts->executor, *parts->tokenizer, engine);
  if (!started) return started.status();
  parts->engine = std::move(*started);

  auto serving = std::make_shared<Serving>();
  ModelInfo& info = serving->info;
  info.names = served_names(options);
  info.name = info.names.front();
  info.path = options.model_config.empty() && names_embedded_pair(path) ? "embedded:tiny" : pair->location;
  info.architecture = pair->spec.architecture;
  info.backend = options.cuda_device < 0 ? "cpu" : fmt::format("cuda:{}", options.cuda_device);
  if (options.tp_size > 1) info.backend += fmt::format(", {} ranks in one process", options.tp_size);
  info.created = std::chrono::duration_cast<std::chrono::seconds>(std::chrono::system_clock::now().time_since_epoch()).count();
  info.context_length = parts->engine->options().context_length;
  info.vocab_size = pair->spec.vocab_size;
  info.hidden_size = pair->spec.hidden_size;
  info.layers = pair->spec.num_layers();
  info.parameters = parameter_count(pair->spec);
  info.has_drafter = pair->drafter.has_value();
  info.has_mtp = pair->has_mtp();
  if (pair->drafter) {
    info.drafter = pair->drafter->location;
    info.block_size = pair->drafter->spec.block_size;
    serving->feature_width = static_cast<int64_t>(pair->drafter->spec.taps.size()) * pair->spec.hidden_size;
    serving->fc_input_width = pair->drafter->tensors.fc.shape.size() == 2 ? pair->drafter->tensors.fc.shape[1] : 0;
  }
  serving->defaults = pair->defaults;
  serving->engine = parts->engine.get();
  serving->tokenizer = &*parts->tokenizer;
  serving->chat_template = parts->chat_template ? &*parts->chat_template : nullptr;
  // Without a flag the text decides: a tokenizer that has the tags as tokens of their own writes them with that meaning.
  const auto has = [&](const char* tag) { return parts->tokenizer->id_of(tag).has_value(); };
  serving->reasoning_parser = !options.reasoning_parser.empty() ? options.reasoning_parser : has("</think>") ? "qwen3" : "none";
  serving->tool_parser = !options.tool_parser.empty()                     ? options.tool_parser
                         : source.find("<function=") != std::string::npos ? "qwen3_coder"
                         : has("<tool_call>")                             ? "hermes"
                                                                          : "none";
  if (auto f = reasoning_format(serving->reasoning_parser); !f) return Status(Code::kUsage, "--reasoning-parser: " + f.status().message());
  if (auto f = tool_format(serving->tool_parser); !f) return Status(Code::kUsage, "--tool-call-parser: " + f.status().message());
  serving->always_include_usage = options.always_include_usage;
  serving->plan = plan;
  serving->owned = parts;
  return std::shared_ptr<const Serving>(std::move(serving));
}

}  // namespace ddtree
