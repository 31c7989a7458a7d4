#include "text/tokenizer_added.h"

#include <algorithm>

#include "text/tokenizer.h"
#include "text/unicode.h"

namespace ddtree {

void AddedTokenMatcher::add(std::string_view pattern, const AddedToken* token) {
  if (pattern.empty()) return;
  starts_[static_cast<unsigned char>(pattern[0])] = true;
  tokens_.push_back(token);
  uint32_t node = 0;
  for (char c : pattern) {
    const uint64_t key = static_cast<uint64_t>(node) << 8 | static_cast<unsigned char>(c);
    const auto [it, fresh] = children_.emplace(key, static_cast<uint32_t>(node_token_.size()));
    if (fresh) node_token_.push_back(nullptr);
    node = it->second;
  }
  node_token_[node] = token;
}

AddedTokenMatcher::Match AddedTokenMatcher::longest_at(std::string_view text, size_t at) const {
  Match best;
  uint32_t node = 0;
  for (size_t i = at; i < text.size(); ++i) {
    const auto it = children_.find(static_cast<uint64_t>(node) << 8 | static_cast<unsigned char>(text[i]));
    if (it == children_.end()) break;
    node = it->second;
    if (node_token_[node] != nullptr) best = {i + 1 - at, node_token_[node]};
  }
  return best;
}

void AddedTokenMatcher::split(std::string_view text, std::vector<Span>* out) const {
  size_t done = 0;      // text before is in *out
  size_t stripped = 0;  // where the last rstrip ended
  const char* const data = text.data();
  for (size_t i = 0; i < text.size();) {
    if (!starts_[static_cast<unsigned char>(data[i])]) {
      ++i;
      continue;
    }
    const Match match = longest_at(text, i);
    if (match.token == nullptr) {
      ++i;
      continue;
    }
    size_t begin = i;
    size_t end = i = i + match.length;
    if (match.token->single_word) {
      int length = 0;
      const bool left = begin == 0 || !is_word_character(decode_utf8_before(data, data + begin));
      const bool right = end == text.size() || !is_word_character(decode_utf8(data + end, &length));
      if (!left || !right) continue;
    }
    if (match.token->lstrip) {
      size_t first = begin;
      while (first > done) {
        const char32_t c = decode_utf8_before(data, data + first);
        if (!is_white_space(c)) break;
        --first;
        while ((static_cast<unsigned char>(data[first]) & 0xC0) == 0x80) --first;
      }
      begin = std::max(first, done);
    }
    if (match.token->rstrip) {
      int length = 0;
      end = std::max(end, stripped);  // another token already found white space up to there
      while (end < text.size() && is_white_space(decode_utf8(data + end, &length))) end += static_cast<size_t>(length);
      stripped = end;
    }
    if (done < begin) out->push_back({done, begin, -1});
    out->push_back({begin, end, match.token->id});
    done = end;
  }
  if (done < text.size()) out->push_back({done, text.size(), -1});
}

}  // namespace ddtree
