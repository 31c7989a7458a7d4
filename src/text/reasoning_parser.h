// Splits an answer into reasoning and the rest, piece by piece.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "text/piece.h"

namespace ddtree {

// The tags' ids where the tokenizer has them as added tokens, else -1. A tag with an id is recognised by that id only (the same letters
// spelled by ordinary tokens are the model's prose); a tag without one by its text.
struct TagTokens {
  int32_t think_open = -1;
  int32_t think_close = -1;
  int32_t call_open = -1;
  int32_t call_close = -1;
};

enum class ReasoningFormat {
  kNone,   // everything is content, tags included
  kQwen3,  // <think> ... </think>
};

// "qwen3" (also "qwen3-thinking", "deepseek-r1", "deepseek-v3": the same tags), "none", "" (= none). Error: kUsage with the known names.
Result<ReasoningFormat> reasoning_format(std::string_view name);

struct ReasoningOptions {
  ReasoningFormat format = ReasoningFormat::kQwen3;
  TagTokens tags;
  // The prompt left <think> open (opens_reasoning()). Otherwise a reasoning block exists only where the answer begins with <think>.
  bool starts_inside = false;
  // What follows <tool_call> in a true call: "<function=" or "{". A call opened inside the block then ends it (models do forget the closing
  // tag); a mere mention of the tag does not. Empty: <tool_call> means nothing here (no tools in the request).
  std::string call_start;
};

// Feed pieces in order; the result does not depend on how the text was cut. Of the newlines around the block exactly those that the
// template writes are dropped (one after <think>, one before </think>, two after it), so that re-rendered history equals what was
// generated. Held back: what may be the beginning of a tag, and newlines that may belong to one.
class ReasoningParser {
 public:
  explicit ReasoningParser(ReasoningOptions options);

  // Appends the reasoning text that is certain to `reasoning`, and everything else (text and tags of tool calls) to `rest`.
  void feed(const std::vector<TextPiece>& pieces, std::string& reasoning, std::vector<TextPiece>& rest);
  // End of the answer: what was held back comes out. A block that was never closed stays reasoning.
  void flush(std::string& reasoning, std::vector<TextPiece>& rest);

  // True from the start of the block until its closing tag was fed: the caller counts the ids fed meanwhile as
  // usage.completion_tokens_details.reasoning_tokens (pieces carry no ids of ordinary tokens).
  bool in_reasoning() const { return state_ == State::kInside || state_ == State::kMaybeCall; }

 private:
  enum class State { kStart, kInside, kMaybeCall, kAfter, kRest };
  void text(std::string_view text, std::string& reasoning, std::vector<TextPiece>& rest);
  void drain(bool end, std::string& reasoning, std::vector<TextPiece>& rest);
  void tag(const TextPiece& piece, std::string& reasoning, std::vector<TextPiece>& rest);
  void emit_reasoning(std::string_view text, std::string& reasoning);
  void close(std::string& reasoning);
  bool call_tags_by_text() const { return !options_.call_start.empty() && options_.tags.call_open < 0; }

  ReasoningOptions options_;
  State state_ = State::kStart;
  std::string pending_;    // text not yet judged
  std::string newline_;    // reasoning's last newline, dropped if the closing tag follows
  TextPiece call_tag_;     // kMaybeCall: the tag that opened it
  int drop_newlines_ = 0;  // newlines still to be dropped at the head of what comes next
  bool seen_any_ = false;  // reasoning text was emitted (its leading newline is dropped before)
};

}  // namespace ddtree
