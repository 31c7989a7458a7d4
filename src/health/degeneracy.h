// Is this text what a broken engine writes? One character, word, sentence or block repeated without end, n-gram loops, replacement
// characters. Works on text, so it needs no tokenizer; token ids, where given, add the distinct n-gram measure.
//
// The thresholds leave alone what people ask for: Markdown rules and tables, code indentation, base64, multiplication tables, long lists
// of numbers, "ha ha ha".
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace ddtree {

struct DegeneracyFigures {
  int64_t characters = 0;
  int64_t longest_run = 0;     // the same character in a row, white space not counted
  int64_t replacement = 0;     // U+FFFD
  int64_t tail_period = 0;     // bytes of the unit that the text's end repeats; 0: none
  int64_t tail_repeats = 0;    // whole repeats of it at the end
  int64_t tail_bytes = 0;      // length of the repeating end
  double distinct_4grams = 1;  // distinct over all 4-grams of token ids (of words, where no ids are given); 1 with fewer than 8
};
DegeneracyFigures measure_text(std::string_view text, std::span<const int32_t> ids = {});

// For a short answer to a known prompt, where strictness is cheap: the reason why it is not coherent, or empty. Coherent means: not
// empty, letters or digits in it, no replacement characters, not mostly one character or one short unit repeated.
std::string incoherence(std::string_view text, std::span<const int32_t> ids = {});

// For a stream of unknown content. Feed what was committed; once tripped it stays tripped.
class DegeneracyDetector {
 public:
  struct Limits {
    int64_t run = 192;             // the same character in a row
    int64_t rule_run = 512;        // … of those that draw rules (- = _ * # . ~ ─ ═ …)
    int64_t blank_run = 2048;      // white space
    int64_t replacement = 24;      // of the last 256 characters
    int64_t min_loop_bytes = 320;  // a loop is at least this long
    int64_t max_period = 1024;     // bytes
    int64_t window_tokens = 1024;
    double distinct_4grams = 0.06;  // under this, over a full window of tokens
  };
  DegeneracyDetector() = default;
  explicit DegeneracyDetector(const Limits& limits) : limits_(limits) {}

  // Returns true from the call on that trips it.
  bool add(std::string_view text, std::span<const int32_t> ids = {});
  bool tripped() const { return !reason_.empty(); }
  const std::string& reason() const { return reason_; }  // "the same character '!' 192 times in a row"

 private:
  void check();
  size_t tail_bytes() const;  // how much of the end is looked at
  Limits limits_;
  std::string tail_;          // last bytes, bounded
  std::vector<int32_t> ids_;  // last ids, bounded
  size_t unchecked_ = 0, unchecked_ids_ = 0;
  std::string reason_;
};

}  // namespace ddtree
