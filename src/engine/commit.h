// The one commit point. What a round may add to a sequence is cut here, once; ids, text, usage, statistics, penalties, the next position of
// the RNG and what the executor keeps are all taken from the result. Prevents: text past a stop, usage that counts what the client never
// got, state that ran past the end (one of them forgets the cut, all the others are right, and the answer is wrong only under speculation).
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <unordered_set>
#include <vector>

#include "engine/request.h"
#include "engine/stop_strings.h"
#include "text/detokenizer.h"

namespace ddtree {

// The stop rules of one request and where its text stands.
class CommitPoint {
 public:
  // eos_ids: the model's; not used with ignore_eos.
  CommitPoint(const Request& request, std::span<const int32_t> eos_ids, const Tokenizer& tokenizer);

  struct Cut {
    std::vector<int32_t> ids;       // kept: a prefix of what was offered, never empty if something was
    std::vector<TextPiece> pieces;  // text that became certain
    FinishReason finish = FinishReason::kNone;
    int32_t stop_id = -1;
    std::string stop_string;
  };
  // Offers the tokens of an accepted run (draft tokens that the target confirmed, then its own). Token by token, the first that
  // applies ends it: a stop id, a stop string that this token completes, the length. So a stop inside a run beats the cap behind it. The id
  // of a stop is kept (it was generated and is counted), its text is not, except with include_stop_string.
  Cut offer(std::span<const int32_t> run);

  // The end from outside (cancelled, error): the text that is still held.
  std::vector<TextPiece> flush();

  int32_t count() const { return count_; }  // ids committed so far
  int32_t left() const { return max_tokens_ - count_; }
  // Ids that must not be chosen as the token number `index` of the answer (0-based): stop ids before min_tokens.
  std::span<const int32_t> banned(int32_t index) const;

 private:
  std::vector<int32_t> stop_list_;
  std::unordered_set<int32_t> stop_ids_;
  int32_t max_tokens_, min_tokens_;
  bool include_stop_;
  int32_t count_ = 0;
  Detokenizer detokenizer_;
  StopStrings stops_;
};

}  // namespace ddtree
