#include "engine/commit.h"

#include <algorithm>

namespace ddtree {

CommitPoint::CommitPoint(const Request& request, std::span<const int32_t> eos_ids, const Tokenizer& tokenizer)
    : stop_list_(request.stop_ids),
      max_tokens_(request.max_tokens),
      min_tokens_(request.min_tokens),
      include_stop_(request.include_stop_string),
      detokenizer_(tokenizer),
      stops_(request.stop_strings, request.include_stop_string, !request.skip_special_tokens) {
  if (!request.ignore_eos) stop_list_.insert(stop_list_.end(), eos_ids.begin(), eos_ids.end());
  std::sort(stop_list_.begin(), stop_list_.end());
  stop_list_.erase(std::unique(stop_list_.begin(), stop_list_.end()), stop_list_.end());
  stop_ids_.insert(stop_list_.begin(), stop_list_.end());
}

std::span<const int32_t> CommitPoint::banned(int32_t index) const {
  if (index >= min_tokens_) return {};
  return stop_list_;
}

CommitPoint::Cut CommitPoint::offer(std::span<const int32_t> run) {
  Cut cut;
  std::vector<TextPiece> fresh;
  int match = -1;
  // A stop string must end behind the first min_tokens tokens; it may begin among them.
  const auto take = [&](std::vector<TextPiece>& pieces) {
    for (const TextPiece& piece : pieces)
      if (match < 0) match = stops_.push(piece, count_ > min_tokens_);
    pieces.clear();
  };
  for (int32_t id : run) {
    if (cut.finish != FinishReason::kNone) break;
    cut.ids.push_back(id);
    ++count_;
    const bool stop = stop_ids_.contains(id) && count_ > min_tokens_;
    if (!stop || include_stop_) {
      detokenizer_.push(id, &fresh);
      take(fresh);
    }
    if (stop) {
      cut.finish = FinishReason::kStop;
      cut.stop_id = id;
    } else if (match >= 0) {
      cut.finish = FinishReason::kStop;
    } else if (count_ >= max_tokens_) {
      cut.finish = FinishReason::kLength;
    }
  }
  if (cut.finish != FinishReason::kNone && match < 0) {
    detokenizer_.flush(&fresh);
    take(fresh);
  }
  if (match >= 0) {
    cut.finish = FinishReason::kStop;
    cut.stop_string = stops_.stop(match);
  }
  if (cut.finish == FinishReason::kNone) stops_.release(&cut.pieces);
  else stops_.flush(&cut.pieces);
  return cut;
}

std::vector<TextPiece> CommitPoint::flush() {
  std::vector<TextPiece> out, fresh;
  detokenizer_.flush(&fresh);
  for (const TextPiece& piece : fresh) stops_.push(piece, false);
  stops_.flush(&out);
  return out;
}

}  // namespace ddtree
