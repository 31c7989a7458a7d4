// Is a request one that this engine can finish? Every refusal names the field, what was found and what would be right.
#pragma once

#include "base/status.h"
#include "engine/engine.h"
#include "engine/request.h"
#include "nn/executor.h"

namespace ddtree {

// kInvalidArgument, or kDoesNotFit where the page pool could never hold the request.
Status validate_request(const Request& request, const EngineOptions& options, const Executor& executor);

// kInvalidArgument where these options cannot work with that executor.
Status validate_options(const EngineOptions& options, const Executor& executor);

// Why the loaded pair cannot run a mode; kOk if it can.
Status check_mode(SpeculationMode mode, const Executor& executor);

// What limit_mode(most) makes of a mode.
SpeculationMode limited_mode(SpeculationMode mode, SpeculationMode most);
// kInvalidArgument as validate_request(), and where the answer or `from` cannot be.
Status validate_score(const ScoreRequest& score, const EngineOptions& options, const Executor& executor);

SpeculationMode effective_mode(const Request& request, const EngineOptions& options);
int32_t effective_budget(const Request& request, const EngineOptions& options);
// Positions beyond prompt + max_tokens that a mode's drafting may write to pages.
int32_t draft_overshoot(SpeculationMode mode, const EngineOptions& options);

}  // namespace ddtree
