#include "engine/stop_strings.h"

#include <algorithm>

namespace ddtree {

StopStrings::StopStrings(std::vector<std::string> stops, bool include_in_text, bool special_visible)
    : stops_(std::move(stops)), include_(include_in_text), special_visible_(special_visible) {}

int StopStrings::push(const TextPiece& piece, bool armed) {
  const size_t old = window_.size();
  pending_.push_back(piece);
  if (!visible(piece)) return -1;
  window_ += piece.text;
  if (stops_.empty()) {
    safe_ = window_.size();
    return -1;
  }
  int found = -1;
  size_t found_begin = 0, found_end = 0;
  for (size_t s = 0; armed && s < stops_.size(); ++s) {
    const std::string& stop = stops_[s];
    if (stop.empty()) continue;
    // A match ends in the new text, so it begins at most size - 1 bytes before it.
    const size_t begin = window_.find(stop, old >= stop.size() ? old - stop.size() + 1 : 0);
    if (begin == std::string::npos) continue;
    const size_t end = begin + stop.size();
    if (found < 0 || end < found_end || (end == found_end && begin < found_begin))
      found = static_cast<int>(s), found_begin = begin, found_end = end;
  }
  if (found >= 0) {
    matched_ = true;
    safe_ = include_ ? found_end : found_begin;
    return found;
  }
  // Hold back the longest end of the text that some stop string begins with.
  size_t held = 0;
  for (const std::string& stop : stops_)
    for (size_t n = std::min(stop.size() - (stop.empty() ? 0 : 1), window_.size()); n > held; --n)
      if (window_.compare(window_.size() - n, n, stop, 0, n) == 0) {
        held = n;
        break;
      }
  safe_ = window_.size() - held;
  return -1;
}

void StopStrings::emit(size_t bytes, std::vector<TextPiece>* out) {
  size_t left = bytes;
  while (!pending_.empty()) {
    TextPiece& piece = pending_.front();
    if (!visible(piece)) {
      if (matched_ && left == 0) break;  // past the cut
      out->push_back(std::move(piece));
    } else if (piece.text.size() <= left) {
      if (matched_ && left == 0) break;
      left -= piece.text.size();
      out->push_back(std::move(piece));
    } else {
      if (left == 0) break;
      if (piece.token >= 0 && !matched_) break;  // an added token's text goes whole
      out->push_back({piece.text.substr(0, left), -1, false});
      piece.text.erase(0, left);
      left = 0;
      break;
    }
    pending_.pop_front();
  }
  window_.erase(0, bytes - left);
  safe_ -= bytes - left;
}

void StopStrings::release(std::vector<TextPiece>* out) {
  emit(safe_, out);
  if (matched_) pending_.clear(), window_.clear(), safe_ = 0;
}

void StopStrings::flush(std::vector<TextPiece>* out) {
  if (!matched_) safe_ = window_.size();
  release(out);
}

}  // namespace ddtree
