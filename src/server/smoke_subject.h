// A loaded service as what the smoke suite tests: used by the service itself and by `ddtree smoke`.
#pragma once

#include <memory>

#include "health/smoke.h"
#include "server/service.h"

namespace ddtree {

// The engine, prompts through the chat template with thinking off (raw text where the checkpoint has no template), the modes that the
// pair can run, and the inputs: known answers for the embedded pair, coherence rules for any other. Keeps `serving` alive.
SmokeSubject smoke_subject(std::shared_ptr<const Serving> serving);

// The report as the store's row, with the model and drafter it was about.
SmokeRun smoke_row(const SmokeReport& report, const Serving& serving);

}  // namespace ddtree
