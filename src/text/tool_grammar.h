// What the tool-call formats share: finding the region behind <tool_call>, holding back what is not yet certain, releasing what turned
// out to be prose. Used by tool_parser.cpp only.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <string_view>

#include "text/tool_parser.h"

namespace ddtree {

// Declared types of a function's parameters, by name: the schema's "type" in lower case; "" where the schema says nothing simple.
using ParameterTypes = std::map<std::string, std::string, std::less<>>;

// A parameter's text as JSON, by its declared type; unknown types and unreadable values become strings.
std::string convert_value(std::string_view text, const ParameterTypes* types, std::string_view key);
bool is_text_type(const ParameterTypes* types, std::string_view key);
std::string json_string(std::string_view text);
size_t tag_overlap(std::string_view text, std::string_view tag);  // longest end of text that begins tag
std::string_view skip_space(std::string_view text);

class ToolCallGrammar {
 public:
  explicit ToolCallGrammar(ToolOptions options) : options_(std::move(options)) {}
  virtual ~ToolCallGrammar() = default;
  void feed(const TextPiece& piece, AnswerDelta& out);
  void flush(AnswerDelta& out);
  int calls() const { return calls_; }

 protected:
  enum class Step {
    kWait,      // more text is needed
    kAgain,     // something was taken from buffer_; go on
    kNotACall,  // what follows the tag is prose: release it (only before begin_call)
    kEnd,       // the region ends; what is left in buffer_ is outside
  };
  // Works on buffer_, the text inside the region. `end`: nothing more follows before an added token or the answer's end.
  virtual Step step(AnswerDelta& out) = 0;
  // The closing tag came as a token of its own. kNotACall, or kEnd.
  virtual Step closed(AnswerDelta& out) = 0;
  virtual void open() = 0;             // a region begins
  virtual bool call_open() const = 0;  // a call was begun and is not complete
  // Whether the tag inside a region is text of the call (a parameter's value, a JSON string) rather than a new region.
  virtual bool takes_tags_as_text() const = 0;

  void begin_call(std::string name, AnswerDelta& out);
  void fragment(std::string text, AnswerDelta& out);
  bool close_by_text() const { return options_.tags.call_close < 0; }

  std::string buffer_;

 private:
  void outside(bool end, AnswerDelta& out);
  void inside(AnswerDelta& out);
  void release(AnswerDelta& out);
  void content(std::string_view text, AnswerDelta& out);
  void enter(std::string tag);
  void leave();

  ToolOptions options_;
  bool in_region_ = false;
  bool begun_ = false;   // a call of this region was begun: nothing of it can be released any more
  bool at_edge_ = true;  // start of the answer or just after a call: white space is held
  std::string pending_;  // outside: text not yet judged
  std::string space_;    // outside: white space that goes if a call follows
  std::string raw_;      // the region's text so far, tag included
  size_t raw_call_ = 0;  // where in raw_ the current call begins
  int calls_ = 0;
};

std::unique_ptr<ToolCallGrammar> coder_grammar(ToolOptions options, std::map<std::string, ParameterTypes, std::less<>> functions);
std::unique_ptr<ToolCallGrammar> hermes_grammar(ToolOptions options);

}  // namespace ddtree
