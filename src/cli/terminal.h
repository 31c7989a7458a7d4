// Text from elsewhere on a terminal.
#pragma once

#include <string>
#include <string_view>

namespace ddtree::cli {

// What came from outside (a server's words, a client's name) must not move the cursor, change colours or ring: control characters, C1 ones
// too, become blanks.
inline std::string plain(std::string_view text) {
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    const auto c = static_cast<unsigned char>(text[i]);
    const bool c1 = c == 0xC2 && i + 1 < text.size() && static_cast<unsigned char>(text[i + 1]) < 0xA0;
    out += c < 0x20 || c == 0x7F || c1 ? ' ' : text[i];
    i += c1 ? 1 : 0;
  }
  return out;
}

}  // namespace ddtree::cli
