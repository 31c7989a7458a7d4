// Finds tool calls in an answer's content, piece by piece, and an answer's parser that puts both parsers together.
#pragma once

#include <functional>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "text/piece.h"
#include "text/reasoning_parser.h"

namespace ddtree {

enum class ToolFormat {
  kNone,        // no calls: tags are content
  kQwen3Coder,  // <tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>
  kHermes,      // <tool_call>{"name": NAME, "arguments": {...}}</tool_call>
};

// "qwen3_coder" (also "qwen3_xml"), "hermes" (also "qwen", "qwen25"), "none", "" (= none). Error: kUsage with the known names.
Result<ToolFormat> tool_format(std::string_view name);
// What follows the opening tag in a true call, for ReasoningOptions::call_start.
std::string_view call_start(ToolFormat format);

// As in the API's streamed `delta.tool_calls[]`: a call's first delta has id and name (arguments ""), later ones only a fragment of
// `arguments`; the fragments of one index joined are a JSON object once the call is complete.
struct ToolCallDelta {
  int index = 0;
  std::string id;
  std::string name;
  std::string arguments;
};

// A call that the answer's end interrupted. What was streamed of it stays as it is; a reply in one piece leaves call `index` out and
// appends `raw` (the text as generated) to the content.
struct UnfinishedCall {
  int index = 0;
  std::string raw;
};

struct AnswerDelta {
  std::string reasoning;
  std::string content;
  std::vector<ToolCallDelta> calls;
  std::optional<UnfinishedCall> unfinished;  // set by flush() only
  bool empty() const { return reasoning.empty() && content.empty() && calls.empty() && !unfinished; }
};

struct ToolOptions {
  ToolFormat format = ToolFormat::kQwen3Coder;
  TagTokens tags;
  std::function<std::string()> new_id;  // default: "call_" and 24 random hex digits
};

class ToolCallGrammar;  // one format's state machine (tool_parser.cpp)

// Feed pieces in order; the joined result does not depend on how the text was cut.
// A call begins once what follows <tool_call> can be nothing else (a function's name and its first parameter or end; a JSON object with
// its name); until then all is held, and as soon as it cannot become a call it is released as content: prose that mentions the tag arrives.
// White space between calls and next to them is dropped (two newlines before, all between and at the end); other text around is content.
class ToolParser {
 public:
  // `tools`: the request's tools (an array, or null): parameter values are converted by their schemas.
  ToolParser(ToolOptions options, const nlohmann::ordered_json& tools);
  ~ToolParser();
  ToolParser(ToolParser&&) noexcept;
  ToolParser& operator=(ToolParser&&) noexcept;

  void feed(const std::vector<TextPiece>& pieces, AnswerDelta& out);
  void flush(AnswerDelta& out);
  int calls() const;  // begun so far

 private:
  std::unique_ptr<ToolCallGrammar> grammar_;
};

struct AnswerOptions {
  ReasoningOptions reasoning;  // tags and call_start are filled in from the two below
  ToolOptions tools;
  bool keep_special = false;  // skip_special_tokens: false: special tokens' text is shown
};

// Reasoning first, then calls in what remains: what the server's routes use.
class AnswerParser {
 public:
  AnswerParser(AnswerOptions options, const nlohmann::ordered_json& tools);

  AnswerDelta feed(const std::vector<TextPiece>& pieces);
  AnswerDelta flush();
  bool in_reasoning() const { return reasoning_.in_reasoning(); }  // count ids fed while true, see ReasoningParser
  int calls() const { return tools_.calls(); }                     // > 0: finish_reason "stop" becomes "tool_calls"

 private:
  bool keep_special_;
  ReasoningParser reasoning_;
  ToolParser tools_;
};

}  // namespace ddtree
