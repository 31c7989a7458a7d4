#include "server/json.h"

#include <exception>

#include "base/json_error.h"

namespace ddtree {

namespace {
// Deeper JSON would recurse in the parser's destructor and in templates; nothing real comes near it.
constexpr int kMaxDepth = 128;
}  // namespace

Json parse_json_object(std::string_view text, std::string* error, const std::string& what) {
  error->clear();
  // Depth is checked on the bytes first: a million brackets must not become a million nested objects.
  int depth = 0;
  bool in_string = false, escaped = false;
  for (const char c : text) {
    if (in_string) {
      if (escaped) escaped = false;
      else if (c == '\\') escaped = true;
      else if (c == '"') in_string = false;
      continue;
    }
    if (c == '"') in_string = true;
    if (c == '[' || c == '{') {
      if (++depth > kMaxDepth) {
        *error = what + " is nested more than " + std::to_string(kMaxDepth) + " levels deep";
        return {};
      }
    }
    if (c == ']' || c == '}') --depth;
  }
  if (text.find('\0') != std::string_view::npos) {
    *error = what + " holds a NUL byte";  // the parser would take it for the end
    return {};
  }
  try {
    Json value = Json::parse(text);
    if (!value.is_object()) {
      *error = what + " must be a JSON object, found " + value.type_name();
      return {};
    }
    return value;
  } catch (const std::exception& e) {
    *error = text.find_first_not_of(" \t\r\n") == std::string_view::npos ? what + " is empty; a JSON object was expected"
                                                                         : what + " is not valid JSON: " + json_error_text(e.what());
    return {};
  }
}

}  // namespace ddtree
