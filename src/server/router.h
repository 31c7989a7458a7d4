// Paths to handlers.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "server/http_server.h"

namespace ddtree {

struct Route {
  std::string method;
  std::vector<std::string> segments;
  Access access = Access::kKey;
  HttpServer::Handler handler;
};

class Router {
 public:
  void add(const char* method, const std::string& pattern, Access access, HttpServer::Handler handler);

  // Null where nothing matches; *allowed then lists the methods that the path does take ("GET, POST"), empty if none.
  const Route* find(const std::string& method, const std::string& path, std::map<std::string, std::string>* parameters,
                    std::string* allowed) const;

 private:
  std::vector<Route> routes_;
};

}  // namespace ddtree
