// Server-sent events out of bytes, and the first breach of their rules. A client's view: what it forgives and what it does not.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace ddtree {

class SseReader {
 public:
  // The data of the events that these bytes completed ("[DONE]" is one); comments and other fields are passed over.
  std::vector<std::string> feed(std::string_view bytes);
  // The end of the stream: an event that was not ended by a blank line is a breach, and comes back.
  std::vector<std::string> finish();
  const std::string& breach() const { return breach_; }  // empty: none

 private:
  void line(std::string_view text, std::vector<std::string>* events);
  void wrong(std::string what);
  std::string pending_;  // an unfinished line
  std::string data_;
  bool has_data_ = false;
  std::string breach_;
};

// Whether these bytes are UTF-8 in the strict sense: no cut, overlong or surrogate code.
bool is_utf8(std::string_view text);

}  // namespace ddtree
