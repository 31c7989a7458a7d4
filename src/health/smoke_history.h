// What this machine's own earlier smoke runs say a new one should reach.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "store/records.h"

namespace ddtree {

struct SmokeThresholds {
  double slower = 0.30;   // tokens/s: this part below the median of earlier runs is worth a warning
  double shorter = 0.20;  // tokens a round, likewise
  int32_t runs = 9;       // newest earlier runs that count
  int32_t at_least = 3;   // fewer say nothing: start-up noise
};

struct SmokeBaseline {
  int32_t runs = 0;                              // 0: nothing to compare with
  std::string previous_version;                  // these are runs of that version, the one before this; "": of this major version
  double tokens_per_second = 0, acceptance = 0;  // medians; 0: not known
  double slowest = 0, shortest = 0;              // the least among them
  std::vector<std::pair<std::string, std::string>> passed;  // name and input id of checks that passed in the newest of them
};

// Which runs count: of the same subject, model, drafter and configured mode, passed.
struct SmokeKey {
  std::string subject, model, drafter, mode, version;
};

// `newest_first`: rows of the store. With previous_version those of that version count and one is enough (the first start after an
// upgrade); else those of version's major, and at least thresholds.at_least of them.
SmokeBaseline smoke_baseline(const std::vector<SmokeRun>& newest_first, const SmokeKey& key, const std::string& previous_version,
                             const SmokeThresholds& thresholds);

// The version that served before, if it is another than `version`: of the newest run of a server on this store. Empty: the same, or none.
std::string version_before(const std::vector<SmokeRun>& newest_first, const std::string& version);

}  // namespace ddtree
