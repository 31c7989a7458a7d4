// A chat or completion request as this server understands it: every field's type and range checked, defaults filled in. .cpp files
// only (json).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "engine/request.h"
#include "model/spec.h"
#include "server/errors.h"
#include "server/json.h"

namespace ddtree {

// What both endpoints share.
struct GenerationFields {
  std::string model;  // "" where the request names none
  bool stream = false;
  bool include_usage = false;     // stream_options
  bool continuous_usage = false;  // stream_options.continuous_usage_stats: usage in every chunk
  bool return_token_ids = false;
  int32_t max_tokens = 0;  // 0: fill the context
  // Sampling, stops and extensions; prompt, id and max_tokens are filled in later. A seed that the request does not give is drawn here.
  Request engine;
  std::vector<std::string> ignored;  // unknown members
};

struct ChatFields : GenerationFields {
  Json body;                        // for the template: the request, cleaned (see parse_chat)
  Json tools;                       // null: none, or tool_choice "none"
  bool separate_reasoning = true;   // false: reasoning stays in content, tags included
  bool include_reasoning = true;    // false: reasoning is dropped from the reply
  bool parallel_tool_calls = true;  // false: only the first call is given
};

struct CompletionFields : GenerationFields {
  std::vector<std::variant<std::string, std::vector<int32_t>>> prompts;  // one choice each
};

struct FieldLimits {
  int64_t id_count = INT32_MAX;  // token ids must be below
  GenerationDefaults defaults;
  int32_t max_prompts = 64;  // choices of one /v1/completions request
};

// nullopt: fine.
std::optional<ApiError> parse_chat(Json body, const FieldLimits& limits, ChatFields* out);
std::optional<ApiError> parse_completion(const Json& body, const FieldLimits& limits, CompletionFields* out);

}  // namespace ddtree
