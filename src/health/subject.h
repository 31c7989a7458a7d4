// What the smoke suite asks, and of whom: an engine in this process (health/engine_subject.h) or a server over HTTP
// (server/openai_subject.h). The suite knows nothing of either.
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/request.h"

namespace ddtree {

struct SmokeMessage {
  std::string role, content;
};

struct SmokeTool {
  struct Parameter {
    std::string name, type, description;  // type: of JSON Schema
  };
  std::string name, description;
  std::vector<Parameter> parameters;  // all required
};

// One greedy question.
struct SmokeQuestion {
  std::string id;                      // SmokeInput::id
  std::vector<SmokeMessage> messages;  // through the chat template, thinking off where it can be; empty: `text` as it is
  std::string text;
  std::vector<SmokeTool> tools;
  int32_t max_tokens = 64;
  std::vector<std::string> stop;
  std::optional<SpeculationMode> mode;  // unset: as configured
  std::optional<int32_t> budget;
  bool log_probs = false;  // of the tokens, where the subject gives them
};

struct SmokeLimit {
  double seconds = 120;                       // of one answer
  const std::atomic<bool>* cancel = nullptr;  // set from elsewhere: give up
};

enum class SmokeTrouble : uint8_t {
  kNone,
  kFault,        // the answer ended with an error, or broke off
  kTimeLimit,    // no end in time
  kNoRoom,       // other requests left no room: says nothing of the subject
  kStopped,      // the limit's cancel
  kRefused,      // the request's own fault, says the subject (400): mostly something that it cannot do
  kUnreachable,  // nobody there, or not ready yet
};

struct SmokeAnswer {
  SmokeTrouble trouble = SmokeTrouble::kNone;
  std::string error;  // trouble in words
  std::string text, reasoning;
  std::vector<std::pair<std::string, std::string>> calls;  // tool calls: name, arguments (JSON text)
  std::string finish;                                      // "stop", "length", "tool_calls"; empty: none was given
  std::string stop_string;                                 // that ended it, where the subject says so
  std::string longest_run;                             // of ordinary text between special tokens; stop strings are looked for in such runs
  std::vector<int32_t> ids;                            // empty where the subject gives none
  int32_t prompt_tokens = -1, completion_tokens = -1;  // usage; -1: not given
  std::optional<RequestStats> stats;                   // whole where `stats_whole`, else rounds, accepted and near_ties only
  bool stats_whole = false;
  std::string framing;         // first breach of the rules of streaming; empty: none
  std::vector<double> scores;  // log_probs: of the tokens and their alternatives; NaN where the subject wrote no number
  double milliseconds = 0, first_ms = 0, decode_ms = 0;  // decode_ms: after the first token
};

// What a subject can do; where it cannot, why, for the check that is skipped.
struct SmokeAbilities {
  bool chat = true;
  std::string no_tools;                // empty: tool calls can be asked for
  std::string no_modes;                // empty: a question's `mode` is obeyed
  std::vector<SpeculationMode> modes;  // that can be asked for, beside NONE
  bool streams_bytes = false;          // answers come as server-sent events, so framing is checked
  int32_t context = 0;                 // tokens of prompt and answer; 0: not known
};

class SmokeSubject {
 public:
  virtual ~SmokeSubject() = default;
  virtual const SmokeAbilities& abilities() const = 0;
  // Never throws. One question at a time.
  virtual SmokeAnswer ask(const SmokeQuestion& question, const SmokeLimit& limit) = 0;
  // Prompt tokens of a question; -1: only asking tells.
  virtual int64_t count_tokens(const SmokeQuestion&) { return -1; }
  // Other requests that run or wait now: a figure measured beside them says little. 0 where that cannot be told.
  virtual int others() const { return 0; }
};

}  // namespace ddtree
