// Finds added tokens in text: leftmost first, the longest where several begin at one place.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace ddtree {

struct AddedToken;

class AddedTokenMatcher {
 public:
  struct Span {
    size_t begin, end;
    int32_t token = -1;  // id of the added token, or -1: text between them
  };

  // pattern is what is looked for: the token's content, normalised if the token says so. Neither may be empty.
  void add(std::string_view pattern, const AddedToken* token);
  bool empty() const { return tokens_.empty(); }

  // Cuts text (valid UTF-8) up, in order, without empty text spans. A token's span includes the white space that it strips.
  void split(std::string_view text, std::vector<Span>* out) const;

 private:
  struct Match {
    size_t length = 0;
    const AddedToken* token = nullptr;
  };
  Match longest_at(std::string_view text, size_t at) const;

  std::array<bool, 256> starts_{};
  std::vector<const AddedToken*> tokens_;
  std::vector<const AddedToken*> node_token_{nullptr};  // a trie over bytes; node 0 is the root
  std::unordered_map<uint64_t, uint32_t> children_;     // node << 8 | byte -> node
};

}  // namespace ddtree
