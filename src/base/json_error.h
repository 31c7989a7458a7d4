// What nlohmann's JSON parser says about broken text, in our words.
#pragma once

#include <string>
#include <string_view>

namespace ddtree {

// `what`: the what() of one of its exceptions, "[json.exception.parse_error.101] parse error at line 1, column 2: syntax error while
// parsing value - invalid literal; last read: 'x'". Returns "line 1, column 2: invalid literal; last read: 'x'": no ids of the library's,
// printable ASCII, at most about 250 bytes (the parser quotes what it read, however long).
std::string json_error_text(std::string_view what);

}  // namespace ddtree
