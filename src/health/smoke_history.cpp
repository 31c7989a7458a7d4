#include "health/smoke_history.h"

#include <algorithm>

namespace ddtree {
namespace {

std::string major_of(const std::string& version) { return version.substr(0, version.find('.')); }

double median(std::vector<double> values) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  const size_t half = values.size() / 2;
  return values.size() % 2 ? values[half] : (values[half - 1] + values[half]) / 2;
}

double least(const std::vector<double>& values) { return values.empty() ? 0 : *std::min_element(values.begin(), values.end()); }

}  // namespace

SmokeBaseline smoke_baseline(const std::vector<SmokeRun>& newest_first, const SmokeKey& key, const std::string& previous_version,
                             const SmokeThresholds& thresholds) {
  SmokeBaseline before;
  std::vector<double> speeds, rounds;
  for (const SmokeRun& run : newest_first) {
    if (before.runs >= thresholds.runs) break;
    if (run.verdict != "pass" || run.subject != key.subject || run.model != key.model || run.drafter != key.drafter || run.mode != key.mode)
      continue;
    if (previous_version.empty() ? major_of(run.version) != major_of(key.version) : run.version != previous_version) continue;
    // Measured beside other requests: no figure to compare with.
    if (run.tokens_per_second <= 0) continue;
    if (before.runs++ == 0) {
      for (const SmokeCheck& check : run.checks)
        if (check.verdict == "pass") before.passed.emplace_back(check.name, check.input_id);
    }
    speeds.push_back(run.tokens_per_second);
    if (run.acceptance > 0) rounds.push_back(run.acceptance);
  }
  if (before.runs < (previous_version.empty() ? thresholds.at_least : 1)) before = {};
  before.previous_version = previous_version;  // said also where none of its runs can be compared with
  before.tokens_per_second = median(speeds), before.acceptance = median(rounds);
  before.slowest = least(speeds), before.shortest = least(rounds);
  return before;
}

std::string version_before(const std::vector<SmokeRun>& newest_first, const std::string& version) {
  for (const SmokeRun& run : newest_first)
    if (run.run_id > 0 && !run.version.empty()) return run.version == version ? std::string() : run.version;
  return {};
}

}  // namespace ddtree
