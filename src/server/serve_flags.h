// The command line of `ddtree serve`: our own flags and those that SGLang users' units contain.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "base/log.h"
#include "base/status.h"
#include "server/http_server.h"
#include "server/service.h"

namespace ddtree {

struct ServeConfig {
  ServiceOptions service;
  HttpServer::Options http;
  log::Level log_level = log::Level::kInfo;
  bool help = false;
  std::function<void(Service&)> started;  // for whoever registered a flag: called once the service is there, before it loads
  std::vector<std::string> notes;         // one line for each accepted flag that means nothing here: what happens instead
};

// A flag with a value that another executable than `ddtree` brings along: the tests' ddtree-inject registers one before main().
struct ExtraFlag {
  const char* name;
  const char* value;  // placeholder
  const char* help;
  std::function<Status(const std::string& value, ServeConfig& config)> take;
};
void add_serve_flag(ExtraFlag flag);

// args without the command's name. "--flag value" and "--flag=value". kUsage names the flag: unknown ones with the nearest known name,
// wrong values with what would be right, and flags that would change capacity or results and are not built with what works instead.
// Other commands take the same flags beside their own: `command` and the names of `own` are for what is said about an unknown one.
Result<ServeConfig> parse_serve_flags(const std::vector<std::string>& args, const std::string& command = "serve",
                                      const std::vector<std::string>& own = {});

// What becomes of one flag of somebody else's command line.
struct FlagVerdict {
  enum Kind {
    kKept,     // ours too, same meaning
    kChanged,  // taken, but the reason says what is different
    kDropped,  // means nothing here, or asks for what happens anyway: the reason says which
    kRefused,  // wrong, or not built and it would change capacity or results
    kUnknown,  // no flag that is known here
  };
  Kind kind = kUnknown;
  bool own = false;                // one of ddtree serve's own flags
  std::string name;                // without its value; empty where the word is no flag
  std::vector<std::string> words;  // the flag and its values as they were written
  std::string reason;
};
struct FlagJudgement {
  std::vector<FlagVerdict> flags;  // in order
  std::string together;            // flags that contradict each other; empty: none do
};
// By the rules and in the words of parse_serve_flags, but of every flag, whatever the ones before it were.
FlagJudgement judge_serve_flags(const std::vector<std::string>& args);

std::string serve_help();

// The known flag (or one of `own`) with the smallest edit distance; empty where none is near.
std::string nearest_flag(const std::string& unknown, const std::vector<std::string>& own = {});

}  // namespace ddtree
