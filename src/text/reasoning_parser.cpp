#include "text/reasoning_parser.h"

#include <fmt/core.h>

#include <algorithm>
#include <utility>

namespace ddtree {
namespace {

constexpr std::string_view kThinkOpen = "<think>", kThinkClose = "</think>", kCallOpen = "<tool_call>";

std::string_view skip_space(std::string_view text) {
  const size_t at = text.find_first_not_of(" \t\r\n");
  return at == std::string_view::npos ? std::string_view() : text.substr(at);
}

// Length of the longest end of `text` that begins `tag` without being all of it.
size_t overlap(std::string_view text, std::string_view tag) {
  for (size_t n = std::min(text.size(), tag.size() - 1); n > 0; --n)
    if (text.ends_with(tag.substr(0, n))) return n;
  return 0;
}

void add_text(std::string_view text, std::vector<TextPiece>& rest) {
  if (!text.empty()) rest.push_back({std::string(text), -1, false});
}

}  // namespace

Result<ReasoningFormat> reasoning_format(std::string_view name) {
  if (name == "qwen3" || name == "qwen3-thinking" || name == "deepseek-r1" || name == "deepseek-v3") return ReasoningFormat::kQwen3;
  if (name.empty() || name == "none") return ReasoningFormat::kNone;
  return Status(Code::kUsage,
                fmt::format("no reasoning parser '{}'; known: qwen3 (also qwen3-thinking, deepseek-r1, deepseek-v3), none", name));
}

ReasoningParser::ReasoningParser(ReasoningOptions options) : options_(std::move(options)) {
  if (options_.format == ReasoningFormat::kNone) state_ = State::kRest;
  else if (options_.starts_inside) state_ = State::kInside;
}

void ReasoningParser::emit_reasoning(std::string_view text, std::string& reasoning) {
  if (drop_newlines_ > 0 && !text.empty()) {
    drop_newlines_ = 0;
    if (text.front() == '\n') text.remove_prefix(1);
  }
  if (text.empty()) return;
  seen_any_ = true;
  reasoning += std::exchange(newline_, "");
  if (text.back() == '\n') {
    newline_ = "\n";
    text.remove_suffix(1);
  }
  reasoning += text;
}

// The block ends here; the newline that belongs to the closing tag goes.
void ReasoningParser::close(std::string&) {
  newline_.clear();
  state_ = State::kAfter;
  drop_newlines_ = 2;
}

void ReasoningParser::drain(bool end, std::string& reasoning, std::vector<TextPiece>& rest) {
  for (;;) {
    switch (state_) {
      case State::kStart: {
        const std::string_view text = skip_space(pending_);
        if (!end && text.empty()) return;
        if (options_.tags.think_open < 0) {
          if (text.starts_with(kThinkOpen)) {
            pending_ = std::string(text.substr(kThinkOpen.size()));
            state_ = State::kInside;
            drop_newlines_ = 1;
            continue;
          }
          if (!end && kThinkOpen.starts_with(text)) return;
        }
        state_ = State::kRest;
        continue;
      }
      case State::kInside: {
        if (options_.starts_inside && !seen_any_ && newline_.empty() &&
            options_.tags.think_open < 0) {  // the model repeats the prompt's tag
          if (std::string_view(pending_).starts_with(kThinkOpen)) {
            pending_.erase(0, kThinkOpen.size());
            drop_newlines_ = 1;
            continue;
          }
          if (!end && kThinkOpen.starts_with(pending_)) return;
        }
        const size_t close_at = options_.tags.think_close < 0 ? pending_.find(kThinkClose) : std::string::npos;
        const size_t call_at = call_tags_by_text() ? pending_.find(kCallOpen) : std::string::npos;
        const size_t at = std::min(close_at, call_at);
        if (at != std::string::npos) {
          emit_reasoning(std::string_view(pending_).substr(0, at), reasoning);
          if (at == close_at) {
            pending_.erase(0, at + kThinkClose.size());
            close(reasoning);
          } else {
            pending_.erase(0, at + kCallOpen.size());
            call_tag_ = {std::string(kCallOpen), -1, false};
            state_ = State::kMaybeCall;
          }
          continue;
        }
        size_t keep = 0;
        if (!end && options_.tags.think_close < 0) keep = overlap(pending_, kThinkClose);
        if (!end && call_tags_by_text()) keep = std::max(keep, overlap(pending_, kCallOpen));
        emit_reasoning(std::string_view(pending_).substr(0, pending_.size() - keep), reasoning);
        pending_.erase(0, pending_.size() - keep);
        return;
      }
      case State::kMaybeCall: {
        const std::string_view text = skip_space(pending_);
        if (text.starts_with(options_.call_start)) {
          close(reasoning);
          state_ = State::kRest;
          rest.push_back(std::move(call_tag_));
          continue;
        }
        if (!end && std::string_view(options_.call_start).starts_with(text)) return;
        emit_reasoning(call_tag_.text, reasoning);  // a mention
        state_ = State::kInside;
        continue;
      }
      case State::kAfter: {
        while (drop_newlines_ > 0 && !pending_.empty() && pending_.front() == '\n') {
          pending_.erase(0, 1);
          --drop_newlines_;
        }
        if (pending_.empty()) return;
        state_ = State::kRest;
        continue;
      }
      case State::kRest:
        add_text(pending_, rest);
        pending_.clear();
        return;
    }
  }
}

void ReasoningParser::text(std::string_view text, std::string& reasoning, std::vector<TextPiece>& rest) {
  pending_ += text;
  drain(false, reasoning, rest);
}

// A piece that is one added token.
void ReasoningParser::tag(const TextPiece& piece, std::string& reasoning, std::vector<TextPiece>& rest) {
  drain(true, reasoning, rest);  // nothing that was held can go on across a token of its own
  switch (state_) {
    case State::kStart: break;  // not reached: draining decides
    case State::kInside:
      if (piece.token == options_.tags.think_close) return close(reasoning);
      if (piece.token == options_.tags.think_open && !seen_any_ && newline_.empty()) {
        drop_newlines_ = 1;
        return;
      }
      if (piece.token == options_.tags.call_open && !options_.call_start.empty()) {
        call_tag_ = piece;
        state_ = State::kMaybeCall;
        return;
      }
      return text(piece.text, reasoning, rest);
    case State::kMaybeCall: break;  // not reached: draining decides
    case State::kAfter: state_ = State::kRest; break;
    case State::kRest: break;
  }
  rest.push_back(piece);
}

void ReasoningParser::feed(const std::vector<TextPiece>& pieces, std::string& reasoning, std::vector<TextPiece>& rest) {
  for (const TextPiece& piece : pieces) {
    if (piece.token < 0) {
      text(piece.text, reasoning, rest);
    } else if (state_ == State::kRest) {
      rest.push_back(piece);
    } else if (state_ == State::kStart && piece.token == options_.tags.think_open && skip_space(pending_).empty()) {
      pending_.clear();
      state_ = State::kInside;
      drop_newlines_ = 1;
    } else {
      tag(piece, reasoning, rest);
    }
  }
}

void ReasoningParser::flush(std::string& reasoning, std::vector<TextPiece>& rest) {
  drain(true, reasoning, rest);
  reasoning += std::exchange(newline_, "");
}

}  // namespace ddtree
