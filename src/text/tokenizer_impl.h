// The tokenizer's inside: shared by tokenizer.cpp (what it does) and tokenizer_json.cpp (how it is loaded).
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "text/tokenizer.h"
#include "text/tokenizer_added.h"
#include "text/tokenizer_bpe.h"
#include "text/tokenizer_split.h"
#include "text/unicode.h"

namespace ddtree {

// One step of the pre-tokenizer.
struct SplitStep {
  std::optional<SplitPattern> pattern;  // none: the step does not split
  SplitBehavior behavior = SplitBehavior::kIsolated;
  bool invert = false;
  bool add_prefix_space = false;  // before splitting, where the text does not begin with a space
};

struct Tokenizer::Impl {
  // What encode() needs to write on; one call uses one at a time.
  struct Scratch {
    explicit Scratch(const Impl& impl) : encoder(impl.merges), ranges(impl.steps.size()) {}
    BpeEncoder encoder;
    SplitPattern::Scratch pattern;
    std::vector<std::vector<SplitRange>> ranges;  // one list a step
    std::vector<AddedTokenMatcher::Span> raw_spans, normal_spans;
  };
  class Lease;

  void encode_text(std::string_view text, Scratch* scratch, std::vector<int32_t>* out) const;
  // classes has text's bytes but for characters that the matcher would misjudge (unicode.h).
  void encode_step(size_t step, std::string_view text, std::string_view classes, Scratch* scratch, std::vector<int32_t>* out) const;

  std::vector<NormalForm> normalizers;
  std::vector<SplitStep> steps;
  BpeMerges merges;
  bool ignore_merges = false;  // a word that is in the vocabulary as it stands is that token

  std::vector<AddedToken> added;                             // by rising id
  std::vector<int32_t> added_index;                          // id -> index in `added`, or -1
  AddedTokenMatcher raw_matcher;                             // tokens with normalized = false
  AddedTokenMatcher normal_matcher;                          // tokens with normalized = true, in normalised spelling
  std::string spelling;                                      // all vocabulary strings; vocabulary's keys point in here
  std::unordered_map<std::string_view, int32_t> vocabulary;  // as spelled in tokenizer.json
  std::string word_bytes;                                    // for ignore_merges: the same vocabulary by the bytes it stands for
  std::unordered_map<std::string_view, int32_t> words;       // keys point into word_bytes
  std::string bytes;                                         // of all ids
  std::vector<uint32_t> byte_offsets;                        // [id_count + 1] into bytes
  std::vector<bool> present;                                 // [id_count]

  // Scratch objects at rest. A few are kept; a burst of threads makes more and lets them go.
  mutable std::mutex mutex;
  mutable std::vector<std::unique_ptr<Scratch>> idle;
};

}  // namespace ddtree
