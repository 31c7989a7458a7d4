// One line about what was loaded, for logs and the dashboard.
#pragma once

#include <cstdint>
#include <string>

#include "model/pair.h"

namespace ddtree {

int64_t parameter_count(const ModelSpec& spec);  // text model with its LM head (a tied one once), without the MTP head
int64_t parameter_count(const DrafterSpec& spec);

// "Qwen3.5, 8 layers (6 gated-delta + 2 full), hidden 256, 10.3 M parameters, BF16; MTP head; drafter DFlash, 2 layers …"
std::string describe(const LoadedPair& pair);

}  // namespace ddtree
