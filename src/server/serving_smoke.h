// A loaded service as what the smoke suite tests: used by the service itself and by `ddtree smoke`.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "health/engine_subject.h"
#include "health/smoke.h"
#include "server/openai_subject.h"
#include "server/service.h"

namespace ddtree {

struct ServingSmoke {
  std::shared_ptr<const Serving> serving;
  std::unique_ptr<SmokeSubject> engine;  // prompts through the chat template with thinking off; raw text without a template
  std::unique_ptr<SmokeSubject> api;     // the same through the service's chat route; null without a template
  SmokeSetup setup;                      // points into the two
};

// Messages through the chat template with thinking off, or the last one as it is where there is no template. Keeps `serving` alive.
EngineSubject::Encode smoke_encode(std::shared_ptr<const Serving> serving);
SmokeInputs smoke_inputs(const Serving& serving);

// The modes that the pair can run now (the fault ladder may have taken some away), and the inputs: known answers for the embedded pair,
// coherence rules for any other. `service` serves `serving`, ready or not, and outlives the result.
ServingSmoke serving_smoke(Service& service, std::shared_ptr<const Serving> serving);

// What the store's earlier runs say this one should reach, and whether it is the first start of another version.
struct SmokePast {
  std::string trigger;  // "upgrade" for a "start" of another version than the one before, else as given
  SmokeBaseline before;
};
SmokePast smoke_past(Store* store, const Serving& serving, const std::string& trigger, const SmokeThresholds& thresholds);

// The report as the store's row, with the model and drafter it was about.
SmokeRun smoke_row(const SmokeReport& report, const Serving& serving);

}  // namespace ddtree
