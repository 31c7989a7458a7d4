// Text as the detokenizer hands it on: never half a character.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace ddtree {

// A run of text from ordinary tokens (token == -1), or exactly one added token (`<think>`, `</tool_call>`, …): parsers must tell
// a tag that the model emitted as its own token from the same letters spelled by ordinary ones.
struct TextPiece {
  std::string text;      // valid UTF-8
  int32_t token = -1;    // id of the added token whose text this is
  bool special = false;  // a special token (hidden from text unless skip_special_tokens is off)
};

}  // namespace ddtree
