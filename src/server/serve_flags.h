// The command line of `ddtree serve`: our own flags and those that SGLang users' units contain.
#pragma once

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
  std::vector<std::string> notes;  // one line for each accepted flag that means nothing here: what happens instead
};

// args without the command's name. "--flag value" and "--flag=value". kUsage names the flag: unknown ones with the nearest known name,
// wrong values with what would be right, and flags that would change capacity or results and are not built with what works instead.
Result<ServeConfig> parse_serve_flags(const std::vector<std::string>& args);

std::string serve_help();

// The known flag with the smallest edit distance; empty where none is near.
std::string nearest_flag(const std::string& unknown);

}  // namespace ddtree
