// The tokenizer: text <-> token ids, as Hugging Face's tokenizer.json describes it. Byte-level BPE (the model type of the whole
// Qwen family): added tokens are cut out first, then each piece between them is normalised (NFC), split by the file's regular
// expression, and merged byte by byte.
//
// Ids are the same as Hugging Face's `tokenizers` library gives (encode with add_special_tokens = false). A file that asks for
// something this class does not do is refused with the field's name: wrong ids would be a silent loss of quality.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace ddtree {

// A token that is matched in text as a whole, before anything else (`<|im_end|>`, `<think>`, …).
struct AddedToken {
  int32_t id = -1;
  std::string content;       // as matched in the text, UTF-8, never empty
  bool special = false;      // hidden by skip_special
  bool lstrip = false;       // also takes the white space before it
  bool rstrip = false;       // also takes the white space after it
  bool single_word = false;  // matches only where no word character touches it
  bool normalized = false;   // matched after the normaliser ran, not in the raw text
};

// Immutable after loading; every const member may be called from any number of threads at once.
class Tokenizer {
 public:
  // tokenizer_config_json may be empty; its `added_tokens_decoder` completes tokenizer.json's `added_tokens`. Errors are
  // Code::kBadModel and begin with file_name (or, for the second file, "tokenizer_config.json") and the field.
  static Result<Tokenizer> from_json(std::string_view tokenizer_json, std::string_view tokenizer_config_json, std::string_view file_name);

  // path is a tokenizer.json, or a folder that holds one; a tokenizer_config.json beside it is read too.
  static Result<Tokenizer> load(const std::string& path);

  Tokenizer(Tokenizer&&) noexcept;
  Tokenizer& operator=(Tokenizer&&) noexcept;
  ~Tokenizer();

  // Ids of text. No BOS or other token is added. Invalid UTF-8 is read as U+FFFD, one for each maximal broken sequence.
  // parse_added_tokens = false takes the text literally: `<|im_end|>` becomes the ordinary tokens that spell it.
  // Time is O(n log n) whatever the text.
  std::vector<int32_t> encode(std::string_view text, bool parse_added_tokens = true) const;

  // Text of ids: their bytes put together, then broken UTF-8 replaced by U+FFFD. Ids without a token are left out, and so are
  // special tokens if skip_special.
  std::string decode(std::span<const int32_t> ids, bool skip_special) const;

  // Addressable ids are 0 … id_count() - 1 (largest id + 1; there may be holes). A model's matrix may have more rows (padding).
  int32_t id_count() const;

  // The added token of that id, or null. Valid as long as this object.
  const AddedToken* added(int32_t id) const;
  std::span<const AddedToken> added_tokens() const;  // by rising id

  // The id of an added token's content, or of a vocabulary entry as tokenizer.json spells it (bytes in the GPT-2 alphabet: "Ġthe").
  std::optional<int32_t> id_of(std::string_view token) const;

  // The bytes that decode() puts in for this id; they need not be whole characters. Empty where there is no such token.
  std::string_view token_bytes(int32_t id) const;
  bool has_token(int32_t id) const;

  struct Impl;  // tokenizer_impl.h; named here for the loader

 private:
  explicit Tokenizer(std::unique_ptr<const Impl> impl);
  std::unique_ptr<const Impl> impl_;
};

}  // namespace ddtree
