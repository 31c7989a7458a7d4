#include "server/router.h"

#include <set>

namespace ddtree {

namespace {

std::vector<std::string> split(const std::string& path) {
  std::vector<std::string> parts;
  size_t at = 0;
  while (at < path.size()) {
    const size_t end = path.find('/', at + 1);
    parts.push_back(path.substr(at + (path[at] == '/'), (end == std::string::npos ? path.size() : end) - at - (path[at] == '/')));
    if (end == std::string::npos) break;
    at = end;
  }
  return parts;
}

bool is_parameter(const std::string& segment) { return segment.size() > 2 && segment.front() == '{' && segment.back() == '}'; }
bool is_rest(const std::string& segment) { return is_parameter(segment) && segment[segment.size() - 2] == '*'; }

// How well a route fits: literal segments win, left to right. -1: not at all.
int score(const Route& route, const std::vector<std::string>& path, std::map<std::string, std::string>* parameters) {
  int total = 0;
  size_t i = 0;
  for (; i < route.segments.size(); ++i) {
    const std::string& s = route.segments[i];
    if (is_rest(s)) {
      std::string rest;
      for (size_t j = i; j < path.size(); ++j) rest += (j > i ? "/" : "") + path[j];
      if (rest.empty()) return -1;
      (*parameters)[s.substr(1, s.size() - 3)] = rest;
      return total * 4 + 1;
    }
    if (i >= path.size()) return -1;
    if (is_parameter(s)) {
      if (path[i].empty()) return -1;
      (*parameters)[s.substr(1, s.size() - 2)] = path[i];
      total = total * 4 + 2;
    } else {
      if (s != path[i]) return -1;
      total = total * 4 + 3;
    }
  }
  return i == path.size() ? total : -1;
}

}  // namespace

void Router::add(const char* method, const std::string& pattern, Access access, HttpServer::Handler handler) {
  routes_.push_back({method, split(pattern), access, std::move(handler)});
}

const Route* Router::find(const std::string& method, const std::string& path, std::map<std::string, std::string>* parameters,
                          std::string* allowed) const {
  std::vector<std::string> parts = split(path);
  if (parts.size() > 1 && parts.back().empty()) parts.pop_back();  // "/v1/models/" is "/v1/models"
  const Route* best = nullptr;
  int best_score = -1;
  std::set<std::string> methods;
  for (const Route& route : routes_) {
    std::map<std::string, std::string> found;
    const int s = score(route, parts, &found);
    if (s < 0) continue;
    methods.insert(route.method);
    if (route.method != method || s <= best_score) continue;
    best = &route;
    best_score = s;
    *parameters = std::move(found);
  }
  allowed->clear();
  if (!best)
    for (const std::string& m : methods) *allowed += (allowed->empty() ? "" : ", ") + m;
  return best;
}

}  // namespace ddtree
