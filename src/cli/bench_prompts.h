// What `ddtree bench` asks: a few prompts of each kind, as chat requests. Kinds differ in how far a drafter can see ahead.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

namespace ddtree::cli {

struct BenchPrompt {
  const char* kind;  // "code", "sequence", "small talk", "story", "json"
  const char* user;
  bool tools;  // with the tools below
};
const std::vector<BenchPrompt>& bench_prompts();

// The body of a chat request, thinking off.
nlohmann::ordered_json bench_request(const BenchPrompt& prompt);

}  // namespace ddtree::cli
