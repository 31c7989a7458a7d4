// Text on its way out, held back only as long as it may still become a stop string.
#pragma once

#include <deque>
#include <string>
#include <vector>

#include "text/piece.h"

namespace ddtree {

// Visible text is what the client sees: special tokens' pieces are invisible while special tokens are skipped. A match may lie across
// tokens and pieces. The match that ends first wins (of two that end together, the one that begins first): so the result does not depend
// on where token borders or rounds fall.
class StopStrings {
 public:
  StopStrings() = default;
  StopStrings(std::vector<std::string> stops, bool include_in_text, bool special_visible);

  // Takes a piece. Returns the index of the stop string that it completes, or -1. After a match nothing more may be pushed.
  // armed = false (before min_tokens): completes nothing, but its end may be the beginning of a later match.
  int push(const TextPiece& piece, bool armed);
  // Moves out what can no longer become part of a stop string; after a match: everything up to the cut.
  void release(std::vector<TextPiece>* out);
  // The end without a match: everything.
  void flush(std::vector<TextPiece>* out);
  const std::string& stop(int index) const { return stops_[static_cast<size_t>(index)]; }

 private:
  bool visible(const TextPiece& piece) const { return special_visible_ || !piece.special; }
  void emit(size_t visible_bytes, std::vector<TextPiece>* out);

  std::vector<std::string> stops_;
  bool include_ = false, special_visible_ = false, matched_ = false;
  std::deque<TextPiece> pending_;
  std::string window_;  // visible text of pending_
  size_t safe_ = 0;     // bytes of window_ that may go
};

}  // namespace ddtree
