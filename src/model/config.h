// config.json and generation_config.json -> specs. Every field is checked here (present, typed, in range, divisible), so that shapes
// computed from a spec cannot overflow; what this build does not compute is refused with the key, the value and what is supported.
#pragma once

#include <string_view>

#include "base/status.h"
#include "model/spec.h"

namespace ddtree {

// `json` is the file's text, `file` its path for messages. All errors are kBadModel.
// Nested (text_config) or flat; rope_parameters or the older flat keys; layer_types or full_attention_interval.
Result<ModelSpec> parse_model_config(std::string_view json, std::string_view file);

// The DFlash drafter. mask_id stays -1 where the file gives none (the caller looks "<|MASK|>" up in the tokenizer), and
// num_target_layers 0 where it gives none; taps then come from target_layers (0: unknown, which is an error if they are needed).
Result<DrafterSpec> parse_drafter_config(std::string_view json, std::string_view file, int64_t target_layers = 0);

// Absent keys keep the defaults of GenerationDefaults. Ids must be below vocab_size.
Result<GenerationDefaults> parse_generation_config(std::string_view json, std::string_view file, int64_t vocab_size);

// target_layer_ids where a drafter's config has none: n = 1 -> [N / 2], else round(1 + i · (N - 4) / (n - 1)).
std::vector<int32_t> default_taps(int64_t target_layers, int64_t drafter_layers);

}  // namespace ddtree
