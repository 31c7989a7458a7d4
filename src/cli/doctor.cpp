// ddtree doctor: what this machine has, and what to do about what is missing.
#include "health/doctor.h"

#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <string>

#include "cli/command.h"
#include "cli/local_engine.h"
#include "store/store.h"

namespace ddtree::cli {
namespace {

using Json = nlohmann::ordered_json;

const char* const kHelp =
    "usage: ddtree doctor [options]\n\n"
    "Looks at driver, CUDA libraries, cards, links between them, CPU, limits, disks, clock and the systemd unit. Each line is ok, warn or\n"
    "fail, with what was found, what would be right, and the cure. Changes nothing and loads no model.\n\n"
    "  --json               one JSON object on standard output\n"
    "  --device cpu|cuda    with cuda, a machine without a usable card is a failure, not a remark\n"
    "  --model-path DIR     also look at that folder's disk\n"
    "  --db FILE            of the history (default: in the user's state folder)\n"
    "  --unit NAME          the systemd unit to ask for (default: ddtree.service)\n\n"
    "Exit code: 0 without a failure; 69 with one; 75 where all failures pass by themselves or with a restart of the machine.\n";

int doctor(int argc, char** argv) {
  DoctorOptions o;
  bool json = false;
  for (int i = 1; i < argc; ++i) {
    std::string flag = argv[i], value;
    if (flag == "--help" || flag == "-h") return std::fputs(kHelp, stdout), 0;
    if (flag == "--json") {
      json = true;
      continue;
    }
    const size_t equals = flag.find('=');
    if (equals != std::string::npos) value = flag.substr(equals + 1), flag.resize(equals);
    const bool known = flag == "--device" || flag == "--model-path" || flag == "--db" || flag == "--unit";
    if (!known) return fail("doctor", {Code::kUsage, fmt::format("'{}' belongs to no flag (ddtree doctor --help)", argv[i])});
    if (equals == std::string::npos) {
      if (i + 1 >= argc) return fail("doctor", {Code::kUsage, flag + " needs a value"});
      value = argv[++i];
    }
    if (flag == "--device") {
      if (value != "cpu" && value != "cuda" && value.rfind("cuda:", 0) != 0)
        return fail("doctor", {Code::kUsage, fmt::format("--device {}: must be cpu, cuda or cuda:N", value)});
      o.needs_card = value != "cpu";
    } else if (flag == "--model-path") {
      o.model_path = value;
    } else if (flag == "--db") {
      o.store_path = value;
    } else {
      o.unit = value.find('.') == std::string::npos ? value + ".service" : value;
    }
  }
  if (o.store_path.empty())
    if (auto standard = default_store_path()) o.store_path = *standard;
  const std::vector<DoctorLine> findings = examine(inspect_machine(o), o);
  const int code = exit_code_of(findings);
  int warnings = 0, failures = 0;
  for (const DoctorLine& f : findings) warnings += f.verdict == Verdict::kWarn, failures += f.verdict == Verdict::kFail;
  if (json) {
    Json list = Json::array();
    for (const DoctorLine& f : findings)
      list.push_back({{"check", f.check},
                      {"verdict", verdict_name(f.verdict)},
                      {"found", f.found},
                      {"wanted", f.wanted},
                      {"cure", f.cure},
                      {"temporary", f.temporary}});
    fmt::print(
        "{}\n",
        Json{{"version", DDTREE_VERSION}, {"exit_code", code}, {"warnings", warnings}, {"failures", failures}, {"checks", list}}.dump(
            2, ' ', false, Json::error_handler_t::replace));
    return code;
  }
  size_t width = 0;
  for (const DoctorLine& f : findings) width = std::max(width, f.check.size());
  for (const DoctorLine& f : findings) {
    fmt::print("{:<4}  {:<{}}  {}\n", verdict_name(f.verdict), f.check, width, f.found);
    if (!f.wanted.empty()) fmt::print("{:<{}}  wanted: {}\n", "", width + 6, f.wanted);
    if (!f.cure.empty()) fmt::print("{:<{}}  cure:   {}\n", "", width + 6, f.cure);
  }
  const auto plural = [](int n, const char* what) { return n == 1 ? fmt::format("1 {}", what) : fmt::format("{} {}s", n, what); };
  fmt::print("\n{}, {}\n", plural(failures, "failure"), plural(warnings, "warning"));
  return code;
}

}  // namespace

DDTREE_COMMAND("doctor", "look at driver, cards, libraries, limits and disks, with cures", doctor);

}  // namespace ddtree::cli
