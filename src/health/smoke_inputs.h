// What the smoke suite asks: fixed questions with stable ids, so that histories can be compared by them.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "health/subject.h"

namespace ddtree {

struct SmokeInput {
  std::string id;      // stable over versions
  std::string user;    // the user's message
  std::string expect;  // must be in the answer; empty: plain coherence rules only
  int32_t max_tokens = 64;
};

// A question of the user's own (`--prompts FILE`, see server/smoke_prompts.h).
struct SmokePrompt {
  std::string id;
  std::vector<SmokeMessage> messages;
  int32_t max_tokens = 256;
  std::vector<std::string> expect;  // each must be in the answer
  std::string expect_regex;         // for people; match() is what runs
  std::vector<std::string> reject;  // none may be
  // The expectation on the regular expression: empty if it holds, else why not. Null: there is none.
  std::function<std::string(const std::string& answer)> match;
};

struct SmokeInputs {
  // The answers of the embedded pair are known, so each of them blocks. Of any other model counting and coherence do; what it may not
  // have learnt (tool calls, finding a needle) only warns.
  bool known = false;
  std::vector<SmokeInput> coherent;
  SmokeInput counting;
  int32_t count_from = 1, count_to = 20;
  std::string counting_text;  // for a model without a chat template: goes on from count_from
  SmokeTool tool;
  std::string tool_user, tool_argument, tool_value;
  int32_t needle_tokens = 2048;     // length of the needle's prompt at a start
  std::vector<double> long_depths;  // where in a full context the needle lies with --long
};
SmokeInputs generic_smoke_inputs();
// For the embedded pair. It counts, knows capitals and writes the calls of its training's tools. What it can look up far back is narrow
// (it was trained on short chats): a name told 1,063 tokens before in one known setting, and near the end of any context.
SmokeInputs embedded_smoke_inputs();

struct NeedleQuestion {
  SmokeQuestion question;
  std::string expect;
};
// A prompt of about `units` pieces of filler with the needle after depth × units of them (0: first, 1: right before the question).
NeedleQuestion generic_needle(int64_t units, double depth);
NeedleQuestion embedded_needle(int64_t units, double depth);

// The whole numbers in a text, in order; more than nine digits in a row are no number.
std::vector<int64_t> numbers_in(std::string_view text);
// Empty if the text counts from `from` to `to` in order (other numbers may come before and after), else what it does instead.
std::string counting_fault(std::string_view text, int64_t from, int64_t to);

}  // namespace ddtree
