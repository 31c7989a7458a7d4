// Model files to a running engine, phase by phase.
#pragma once

#include <memory>

#include "base/status.h"
#include "server/service.h"

namespace ddtree {

class PhaseMachine;

// kUsage: options that the loaded pair cannot do, naming the flag and what works.
Result<std::shared_ptr<const Serving>> load_serving(const ServiceOptions& options, PhaseMachine& phases);

// The embedded or given model's name where no --served-model-name is set: the --model-path string.
std::vector<std::string> served_names(const ServiceOptions& options);

}  // namespace ddtree
