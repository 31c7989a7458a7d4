// The pre-tokenizer's splitting: a regular expression in the dialect of tokenizer.json (Oniguruma's Ruby syntax), run by PCRE2.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace ddtree {

// What becomes of the matches (the delimiters) of a Split; the names are tokenizer.json's.
enum class SplitBehavior { kRemoved, kIsolated, kMergedWithPrevious, kMergedWithNext, kContiguous };

struct SplitRange {
  size_t begin, end;
};

// A compiled pattern. Immutable; split() may be called from any number of threads, each with its own Scratch.
class SplitPattern {
 public:
  // Working memory of the matcher; reusable with any pattern, by one thread at a time.
  class Scratch {
   public:
    Scratch();
    ~Scratch();
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;

   private:
    friend class SplitPattern;
    struct Impl;
    std::unique_ptr<Impl> impl_;
  };

  // The error says what in the pattern is not supported and where (Code::kBadModel).
  static Result<SplitPattern> compile(std::string_view onig_pattern);
  // A pattern that matches this text and nothing else.
  static Result<SplitPattern> literal(std::string_view text);

  SplitPattern(SplitPattern&&) noexcept;
  SplitPattern& operator=(SplitPattern&&) noexcept;
  ~SplitPattern();

  // The parts of text (valid UTF-8), none empty, as Hugging Face's Split would give them. Where PCRE2 gives up (a pattern that
  // backtracks without end), what is left of text becomes one part and a warning is logged once: a worse split beats a hang.
  void split(std::string_view text, SplitBehavior behavior, bool invert, Scratch* scratch, std::vector<SplitRange>* out) const;

 private:
  struct Impl;
  explicit SplitPattern(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// The same pattern in PCRE2's syntax, or why it cannot be said there. Exposed for tests.
Result<std::string> translate_onig_pattern(std::string_view pattern);

}  // namespace ddtree
