// Token ids -> text, as they come. The pieces of any sequence of pushes, put together, are Tokenizer::decode of all the ids with
// skip_special = false; leaving out the pieces with `special` gives skip_special = true where no special token interrupts a
// character (decode() would join the halves; a stream reports the break as U+FFFD).
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "text/piece.h"

namespace ddtree {

class Tokenizer;

// Not thread-safe; one for each stream. The tokenizer must outlive it.
class Detokenizer {
 public:
  // skip_special: special tokens give no piece and do not interrupt a character, as in decode(ids, true).
  explicit Detokenizer(const Tokenizer& tokenizer, bool skip_special = false);

  // Appends what ids complete. Ordinary tokens in a row become one piece per push; each added token is a piece of its own.
  // The last bytes are held back as long as they may still become a valid character (at most 3 bytes).
  // Ids without a token are ignored.
  void push(std::span<const int32_t> ids, std::vector<TextPiece>* out);
  void push(int32_t id, std::vector<TextPiece>* out) { push(std::span<const int32_t>(&id, 1), out); }

  // The end of the stream: bytes still held become U+FFFD. The object may then be used for another stream.
  void flush(std::vector<TextPiece>* out);

  bool holds_bytes() const { return !held_.empty(); }  // part of a character is waiting for its rest

 private:
  const Tokenizer* tokenizer_;
  bool skip_special_;
  std::string held_;  // an incomplete, so far valid UTF-8 sequence
};

}  // namespace ddtree
