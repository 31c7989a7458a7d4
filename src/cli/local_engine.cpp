#include "cli/local_engine.h"

#include <fmt/core.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cmath>
#include <cstdio>

namespace ddtree::cli {

int fail(const char* command, const Status& status) {
  fmt::print(stderr, "ddtree {}: {}\n", command, status.message());
  return exit_code(status.code() == Code::kInvalidArgument ? Code::kUsage : status.code());
}

Result<double> number_of(const std::string& flag, const std::string& value, double low, double high) {
  double n = 0;
  const char* end = value.data() + value.size();
  const auto [p, ec] = std::from_chars(value.data(), end, n);
  if (ec != std::errc() || p != end || !std::isfinite(n) || n < low || n > high)
    return Status(Code::kUsage, fmt::format("{} {}: must be a number from {} to {}", flag, value, low, high));
  return n;
}

Result<ModeChoice> mode_choice(const std::string& text) {
  std::string lower;
  for (char c : text) lower += static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  if (lower == "none") return ModeChoice{SpeculationMode::kNone, 0, "NONE"};
  if (lower == "dflash") return ModeChoice{SpeculationMode::kDflash, 0, "DFLASH"};
  if (lower == "nextn") return ModeChoice{SpeculationMode::kNextn, 0, "NEXTN"};
  if (lower == "ddtree" || lower == "ddtree:auto") return ModeChoice{SpeculationMode::kDdtree, 0, "DDTREE auto"};
  if (lower.rfind("ddtree:", 0) == 0) {
    auto budget = number_of("mode", lower.substr(7), 1, 256);
    if (budget && std::floor(*budget) == *budget)
      return ModeChoice{SpeculationMode::kDdtree, static_cast<int32_t>(*budget), fmt::format("DDTREE {}", *budget)};
  }
  return Status(Code::kUsage,
                fmt::format("mode '{}' is not known; none, dflash, nextn, ddtree (auto) and ddtree:N with N from 1 to 256 are", text));
}

Result<SplitArguments> split_arguments(int argc, char** argv, const std::vector<OwnFlag>& own) {
  SplitArguments out;
  std::vector<std::string> rest, own_names = {"--mode", "--budget", "--draft"};
  for (const OwnFlag& f : own) own_names.emplace_back(f.name);
  for (int i = 1; i < argc; ++i) {
    std::string argument = argv[i];
    if (argument == "--") {  // everything behind it is text
      for (++i; i < argc; ++i) out.words.emplace_back(argv[i]);
      break;
    }
    if (argument.size() < 2 || argument[0] != '-') {
      out.words.push_back(argument);
      continue;
    }
    if (argument == "--help" || argument == "-h") {
      out.help = true;
      return out;
    }
    std::string name = argument, value;
    const size_t equals = argument.find('=');
    const bool attached = argument.rfind("--", 0) == 0 && equals != std::string::npos;
    if (attached) name = argument.substr(0, equals), value = argument.substr(equals + 1);
    const auto mine = std::find_if(own.begin(), own.end(), [&](const OwnFlag& f) { return name == f.name; });
    if (mine != own.end()) {
      if (mine->takes_value && !attached) {
        if (i + 1 >= argc) return Status(Code::kUsage, fmt::format("{} needs a value", name));
        value = argv[++i];
      } else if (!mine->takes_value && attached) {
        return Status(Code::kUsage, fmt::format("{} takes no value", name));
      }
      DDTREE_RETURN_IF_ERROR(mine->take(value));
      continue;
    }
    if (name == "--mode") name = "--speculative-algorithm";
    if (name == "--budget") name = "--speculative-ddtree-budget";
    if (name == "--draft") name = "--speculative-draft-model-path";
    if (attached) {
      rest.push_back(name + "=" + value);
    } else {
      rest.push_back(name);
      // A flag of serve that is complete alone is a switch; any other takes the next argument.
      if (!parse_serve_flags({name}).ok() && i + 1 < argc) rest.emplace_back(argv[++i]);
    }
  }
  auto config = parse_serve_flags(rest, argv[0], own_names);
  if (!config) return config.status();
  out.config = std::move(*config);
  return out;
}

}  // namespace ddtree::cli
