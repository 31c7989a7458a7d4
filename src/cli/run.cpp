// ddtree run: one prompt, the answer as it comes, one line of figures.
#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <condition_variable>
#include <csignal>
#include <cstdio>
#include <iostream>
#include <iterator>
#include <mutex>
#include <nlohmann/json.hpp>
#include <string>

#include "base/log.h"
#include "cli/command.h"
#include "cli/local_engine.h"
#include "health/phases.h"
#include "server/serving_loader.h"
#include "text/chat_template.h"
#include "text/reasoning_parser.h"
#include "text/tokenizer.h"

namespace ddtree::cli {
namespace {

const char* const kHelp =
    "usage: ddtree run [options] PROMPT...      (no PROMPT, or -: standard input)\n\n"
    "Prints the answer as it comes, then one line on standard error: tokens, tok/s, rounds, tokens a round. Reasoning is dimmed on a\n"
    "terminal and goes to standard error where the answer is read by another program.\n\n"
    "  --system TEXT        system message\n"
    "  --think, --no-think  ask the chat template for a reasoning block, or for none (default: the template's)\n"
    "  --raw                the prompt as it is, without the chat template\n"
    "  --max-tokens N       (default: 1024, or what the context leaves)\n"
    "  --temperature X      0: greedy (default: the model's generation_config.json)\n"
    "  --top-p X, --top-k N, --min-p X, --seed N, --stop TEXT, --ignore-eos\n"
    "  --json               one JSON object instead of text: ids, text, reasoning, finish, statistics\n"
    "  --mode MODE          none, dflash, ddtree or nextn (= --speculative-algorithm)\n"
    "  --budget N|auto      nodes of a draft tree (= --speculative-ddtree-budget)\n"
    "  --draft DIR          drafter (= --speculative-draft-model-path)\n"
    "  --model-path DIR     target (default: the embedded pair)\n"
    "  --threads N          CPU threads (default: all cores)\n\n"
    "Other flags of ddtree serve that shape the engine mean the same here.\n";

std::atomic<bool> interrupted{false};

struct Options {
  std::string system;
  std::optional<bool> think;
  bool raw = false, json = false, ignore_eos = false;
  int32_t max_tokens = 0;
  std::optional<double> temperature, top_p, top_k, min_p, seed;
  std::vector<std::string> stop;
};

std::vector<OwnFlag> own_flags(Options& o) {
  const auto set = [](bool& target) {
    return [&target](const std::string&) {
      target = true;
      return Status();
    };
  };
  const auto number = [](const char* flag, std::optional<double>& target, double low, double high, bool whole) {
    return [=, &target](const std::string& value) -> Status {
      auto n = number_of(flag, value, low, high);
      if (!n) return n.status();
      if (whole && std::floor(*n) != *n) return {Code::kUsage, fmt::format("{} {}: must be a whole number", flag, value)};
      target = *n;
      return {};
    };
  };
  return {{"--system", true, [&o](const std::string& v) { return o.system = v, Status(); }},
          {"--think", false, [&o](const std::string&) { return o.think = true, Status(); }},
          {"--no-think", false, [&o](const std::string&) { return o.think = false, Status(); }},
          {"--raw", false, set(o.raw)},
          {"--json", false, set(o.json)},
          {"--ignore-eos", false, set(o.ignore_eos)},
          {"--max-tokens", true,
           [&o](const std::string& v) -> Status {
             auto n = number_of("--max-tokens", v, 1, 1e9);
             if (!n) return n.status();
             o.max_tokens = static_cast<int32_t>(*n);
             return {};
           }},
          {"--temperature", true, number("--temperature", o.temperature, 0, 100, false)},
          {"--top-p", true, number("--top-p", o.top_p, 0, 1, false)},
          {"--top-k", true, number("--top-k", o.top_k, 0, 1e9, true)},
          {"--min-p", true, number("--min-p", o.min_p, 0, 1, false)},
          {"--seed", true, number("--seed", o.seed, 0, 9007199254740992.0, true)},
          {"--stop", true, [&o](const std::string& v) { return o.stop.push_back(v), Status(); }}};
}

Result<RenderedChat> render(const Options& o, const Serving& serving, const std::string& text) {
  if (o.raw) return RenderedChat{text, false};
  if (serving.chat_template == nullptr)
    return Status(Code::kUsage, fmt::format("{} has no chat template; --raw gives the prompt as it is", serving.info.path));
  nlohmann::ordered_json request;
  request["messages"] = nlohmann::ordered_json::array();
  if (!o.system.empty()) request["messages"].push_back({{"role", "system"}, {"content", o.system}});
  request["messages"].push_back({{"role", "user"}, {"content", text}});
  if (o.think) request["chat_template_kwargs"] = {{"enable_thinking", *o.think}};
  return serving.chat_template->render_chat(request);
}

ReasoningParser parser_of(const Serving& serving, bool opens_reasoning) {
  const Tokenizer& t = *serving.tokenizer;
  ReasoningOptions options;
  options.format = reasoning_format(serving.reasoning_parser).ok() ? *reasoning_format(serving.reasoning_parser) : ReasoningFormat::kNone;
  const auto id = [&](const char* tag) {
    const auto found = t.id_of(tag);
    return found && t.added(*found) ? *found : -1;
  };
  options.tags = {id("<think>"), id("</think>"), id("<tool_call>"), id("</tool_call>")};
  options.starts_inside = opens_reasoning;
  return ReasoningParser(options);
}

// Writes the answer to standard output, and reasoning before it: dimmed where a terminal reads it, else to standard error, so that what
// reads a pipe gets the answer alone.
class Printer {
 public:
  explicit Printer(bool quiet) : quiet_(quiet), terminal_(isatty(STDOUT_FILENO) != 0), thoughts_(terminal_ ? stdout : stderr) {}
  void write(const std::string& reasoning, const std::vector<TextPiece>& rest) {
    std::string answer;
    for (const TextPiece& p : rest)
      if (!p.special) answer += p.text;
    reasoning_ += reasoning;
    answer_ += answer;
    if (quiet_) return;
    if (!reasoning.empty()) {
      if (terminal_ && !dim_) std::fputs("\033[2m", stdout);
      dim_ = true;
      std::fwrite(reasoning.data(), 1, reasoning.size(), thoughts_);
      std::fflush(thoughts_);
    }
    if (!answer.empty()) {
      leave_reasoning();
      std::fwrite(answer.data(), 1, answer.size(), stdout);
    }
    std::fflush(stdout);
  }
  void end() {
    if (quiet_) return;
    leave_reasoning();
    if (!answer_.empty() && answer_.back() != '\n') std::fputc('\n', stdout);
    std::fflush(stdout);
  }
  const std::string& reasoning() const { return reasoning_; }
  const std::string& answer() const { return answer_; }

 private:
  void leave_reasoning() {
    if (!dim_) return;
    std::fputs(terminal_ ? "\033[0m\n\n" : "\n\n", thoughts_);
    dim_ = false;
  }
  bool quiet_, terminal_, dim_ = false;
  FILE* thoughts_;
  std::string reasoning_, answer_;
};

std::string figures(const Delta& last, const Request& request, const Engine& engine) {
  const RequestStats& s = last.stats;
  const double decode = s.decode_ms > 0 ? (s.completion_tokens - 1) / s.decode_ms * 1e3 : 0;
  std::string mode = mode_name(s.mode);
  if (s.mode == SpeculationMode::kDdtree) {
    const int32_t budget = request.budget.value_or(engine.options().budget);
    mode += budget > 0 ? fmt::format(" {}", budget) : " auto";
  }
  std::string line = fmt::format("{} tokens, {:.1f} tok/s, {} rounds, {:.2f} tokens a round ({}, prompt {} in {:.0f} ms, {})",
                                 s.completion_tokens, decode, s.rounds, s.rounds > 0 ? (s.completion_tokens - 1.0) / s.rounds : 0.0, mode,
                                 s.prompt_tokens, s.prefill_ms, finish_name(last.finish));
  if (engine.options().shadow_linear) line += fmt::format("; the tree alone would have won {} tokens more", s.tree_gain);
  return line;
}

int run(int argc, char** argv) {
  Options o;
  auto arguments = split_arguments(argc, argv, own_flags(o));
  if (!arguments) return fail("run", arguments.status());
  if (arguments->help || arguments->config.help) return std::fputs(kHelp, stdout), 0;
  std::string text;
  for (const std::string& word : arguments->words) text += (text.empty() ? "" : " ") + word;
  if (arguments->words.empty() || text == "-") {
    if (isatty(STDIN_FILENO)) std::fputs("prompt, then Ctrl-D:\n", stderr);
    text.assign(std::istreambuf_iterator<char>(std::cin), {});
    if (text.empty())
      return fail("run", {Code::kUsage, "there is no prompt: give it as an argument or on standard input (ddtree run --help)"});
  }
  log::set_level(std::max(arguments->config.log_level, log::Level::kWarn));
  ServiceOptions service = arguments->config.service;
  service.engine.max_running = 1;
  PhaseMachine phases;
  auto loaded = load_serving(service, phases);
  if (!loaded) return fail("run", loaded.status());
  const Serving& serving = **loaded;
  Engine& engine = *serving.engine;

  auto prompt = render(o, serving, text);
  if (!prompt) return fail("run", prompt.status());
  Request request;
  request.id = "run";
  request.prompt = serving.tokenizer->encode(prompt->prompt);
  const GenerationDefaults& d = serving.defaults;
  SamplingParams& p = request.sampling;
  p.temperature = static_cast<float>(o.temperature.value_or(d.do_sample ? d.temperature : 0));
  p.top_p = static_cast<float>(o.top_p.value_or(d.top_p));
  p.top_k = static_cast<int32_t>(o.top_k.value_or(d.top_k));
  p.min_p = static_cast<float>(o.min_p.value_or(d.min_p));
  p.repetition_penalty = d.repetition_penalty;
  if (o.seed) p.seed = static_cast<uint64_t>(*o.seed), p.seed_given = true;
  const int32_t room = serving.info.context_length - static_cast<int32_t>(request.prompt.size());
  request.max_tokens = o.max_tokens > 0 ? o.max_tokens : std::clamp(room, 1, 1024);
  request.ignore_eos = o.ignore_eos;
  request.stop_strings = o.stop;

  Printer printer(o.json);
  ReasoningParser parser = parser_of(serving, prompt->opens_reasoning);
  std::mutex mutex;
  std::condition_variable done;
  std::optional<Delta> last;
  std::vector<int32_t> ids;
  std::signal(SIGINT, [](int) { interrupted = true; });
  const auto id = engine.submit(request, [&](Delta&& delta) {
    std::string reasoning;
    std::vector<TextPiece> rest;
    parser.feed(delta.pieces, reasoning, rest);
    if (delta.finished) parser.flush(reasoning, rest);
    printer.write(reasoning, rest);
    ids.insert(ids.end(), delta.ids.begin(), delta.ids.end());
    if (!delta.finished) return;
    std::lock_guard lock(mutex);
    last = std::move(delta);
    done.notify_all();
  });
  if (!id) return fail("run", id.status());
  {
    std::unique_lock lock(mutex);
    while (!done.wait_for(lock, std::chrono::milliseconds(50), [&] { return last.has_value(); }))
      if (interrupted) engine.cancel(*id);
  }
  printer.end();
  if (o.json) {
    const RequestStats& s = last->stats;
    const nlohmann::ordered_json out = {{"text", printer.answer()},
                                        {"reasoning", printer.reasoning()},
                                        {"ids", ids},
                                        {"finish", finish_name(last->finish)},
                                        {"mode", mode_name(s.mode)},
                                        {"prompt_tokens", s.prompt_tokens},
                                        {"completion_tokens", s.completion_tokens},
                                        {"rounds", s.rounds},
                                        {"drafted", s.drafted},
                                        {"accepted", s.accepted},
                                        {"acceptance_histogram", s.histogram},
                                        {"emitted", s.emitted},
                                        {"near_ties", s.near_ties},
                                        {"tree_gain", s.tree_gain},
                                        {"prefill_ms", s.prefill_ms},
                                        {"decode_ms", s.decode_ms},
                                        {"error", last->error}};
    fmt::print("{}\n", out.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace));
  } else {
    fmt::print(stderr, "{}\n", figures(*last, request, engine));
  }
  if (last->finish == FinishReason::kError) return fail("run", {Code::kEngineFault, last->error});
  return last->finish == FinishReason::kCancelled ? 130 : 0;
}

}  // namespace

DDTREE_COMMAND("run", "answer one prompt, as it comes", run);

}  // namespace ddtree::cli
