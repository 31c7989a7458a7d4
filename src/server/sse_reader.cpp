#include "server/sse_reader.h"

#include <fmt/core.h>

#include <algorithm>
#include <utility>

namespace ddtree {

bool is_utf8(std::string_view text) {
  for (size_t i = 0; i < text.size();) {
    const auto byte = [&](size_t at) { return static_cast<unsigned char>(text[at]); };
    const unsigned char lead = byte(i);
    const size_t length = lead < 0x80 ? 1 : lead < 0xC2 ? 0 : lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : lead < 0xF5 ? 4 : 0;
    if (length == 0 || i + length > text.size()) return false;
    for (size_t j = 1; j < length; ++j)
      if ((byte(i + j) & 0xC0) != 0x80) return false;
    if (length > 2) {
      const unsigned char second = byte(i + 1);
      if ((lead == 0xE0 && second < 0xA0) || (lead == 0xED && second > 0x9F) || (lead == 0xF0 && second < 0x90) ||
          (lead == 0xF4 && second > 0x8F))
        return false;
    }
    i += length;
  }
  return true;
}

void SseReader::wrong(std::string what) {
  if (breach_.empty()) breach_ = std::move(what);
}

void SseReader::line(std::string_view text, std::vector<std::string>* events) {
  if (text.empty()) {
    if (has_data_) events->push_back(std::exchange(data_, {}));
    has_data_ = false;
    return;
  }
  if (text.front() == ':') return;
  const size_t colon = text.find(':');
  const std::string_view field = text.substr(0, colon);
  if (field == "data") {
    std::string_view value = colon == std::string_view::npos ? std::string_view() : text.substr(colon + 1);
    if (!value.empty() && value.front() == ' ') value.remove_prefix(1);
    // Clients of this API read one data line an event.
    if (has_data_) wrong("two data lines in one event: is the blank line between events missing?"), data_ += '\n';
    data_ += value;
    has_data_ = true;
    return;
  }
  if (field == "event" || field == "id" || field == "retry") return;
  const std::string shown(text.substr(0, 60));
  wrong(fmt::format("a line that is no field of server-sent events: '{}'", is_utf8(shown) ? shown : "(no UTF-8)"));
}

std::vector<std::string> SseReader::feed(std::string_view bytes) {
  std::vector<std::string> events;
  pending_ += bytes;
  size_t begin = 0;
  for (size_t end = pending_.find('\n'); end != std::string::npos; end = pending_.find('\n', begin)) {
    std::string_view text(pending_.data() + begin, end - begin);
    if (!text.empty() && text.back() == '\r') text.remove_suffix(1);
    line(text, &events);
    begin = end + 1;
  }
  pending_.erase(0, begin);
  return events;
}

std::vector<std::string> SseReader::finish() {
  std::vector<std::string> events;
  if (!pending_.empty()) line(std::exchange(pending_, {}), &events);
  if (has_data_) {
    wrong("the last event is not ended by a blank line");
    line({}, &events);
  }
  return events;
}

}  // namespace ddtree
