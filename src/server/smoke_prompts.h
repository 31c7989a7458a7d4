// The user's own prompts for the smoke suite: JSON lines, each with what the answer must and must not hold.
#pragma once

#include <string>
#include <vector>

#include "base/status.h"
#include "health/smoke_inputs.h"

namespace ddtree {

// kUsage, as in "prompts.jsonl:3: expect_regex: …", where a line is not as smoke_prompts_help() says; also for a file that cannot be read
// or holds no prompt.
Result<std::vector<SmokePrompt>> read_smoke_prompts(const std::string& path);

// The format, for --help.
const char* smoke_prompts_help();

}  // namespace ddtree
