// The one way JSON is read and written here, so that no input can crash the server and no invalid UTF-8 leaves it. Heavy: .cpp files only.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace ddtree {

using Json = nlohmann::ordered_json;  // members keep the client's order: templates print tools as they came

// Bytes that are no UTF-8 become U+FFFD.
inline std::string dump_json(const Json& value) { return value.dump(-1, ' ', false, Json::error_handler_t::replace); }

// Parses text that must be a JSON object. Invalid JSON, invalid UTF-8, numbers beyond double and nesting beyond 128 are refused, with
// the reason in *error (empty on success); `what` begins it.
Json parse_json_object(std::string_view text, std::string* error, const std::string& what = "the body");

}  // namespace ddtree
