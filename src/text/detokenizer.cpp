#include "text/detokenizer.h"

#include <string_view>
#include <utility>

#include "text/tokenizer.h"
#include "text/unicode.h"

namespace ddtree {

Detokenizer::Detokenizer(const Tokenizer& tokenizer, bool skip_special) : tokenizer_(&tokenizer), skip_special_(skip_special) {}

void Detokenizer::push(std::span<const int32_t> ids, std::vector<TextPiece>* out) {
  std::string run;  // text of the ordinary tokens since the last piece
  const auto end_run = [&](bool final) {
    const size_t used = append_lossy_utf8(held_, final, &run);
    held_.erase(0, used);
    if (!run.empty()) out->push_back({std::exchange(run, {}), -1, false});
  };
  for (int32_t id : ids) {
    const AddedToken* token = tokenizer_->added(id);
    const std::string_view bytes = tokenizer_->token_bytes(id);
    if (token != nullptr && token->special && skip_special_) continue;
    // An added token whose own bytes are broken could join its neighbours' (a content of letters that the GPT-2 alphabet uses
    // for high bytes); only as part of the run do all pieces together stay equal to decode().
    if (token == nullptr || !is_valid_utf8(bytes)) {
      held_.append(bytes);
      continue;
    }
    end_run(true);
    out->push_back({std::string(bytes), id, token->special});
  }
  end_run(false);
}

void Detokenizer::flush(std::vector<TextPiece>* out) {
  if (held_.empty()) return;
  std::string text;
  append_lossy_utf8(held_, true, &text);
  held_.clear();
  out->push_back({std::move(text), -1, false});
}

}  // namespace ddtree
