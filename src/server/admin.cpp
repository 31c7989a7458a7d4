#include "server/admin.h"

#include <fmt/core.h>

#include <algorithm>
#include <charconv>

#include "server/admin_parts.h"
#include "server/history_keeper.h"

namespace ddtree {

namespace admin {

void secure(HttpResponse& response) {
  response.set_header("Content-Security-Policy",
                      "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; base-uri 'none'; "
                      "frame-ancestors 'none'; form-action 'none'");
  response.set_header("X-Content-Type-Options", "nosniff");
  response.set_header("X-Frame-Options", "DENY");
  response.set_header("Referrer-Policy", "no-referrer");
  response.set_header("Cross-Origin-Opener-Policy", "same-origin");
  response.set_header("Cross-Origin-Resource-Policy", "same-origin");
}

void send_json(HttpResponse& response, const Json& body) {
  secure(response);
  response.set_header("Cache-Control", "no-store");
  response.body = dump_json(body);
}

void send_not_found(HttpResponse& response, const std::string& what) {
  ApiError error;
  error.status = 404;
  error.code = "not_found";
  error.message = what;
  secure(response);
  send_error(response, error);
}

ApiError no_store(Service& service) {
  ApiError error;
  error.status = 503;
  error.type = "server_error";
  error.code = "no_history";
  const bool wanted = service.history().wanted();
  error.message = wanted ? "the history cannot be opened now: " + service.history().health().message : "this server keeps no history";
  error.retry_after = wanted ? 5 : 0;
  return error;
}

bool read_int(const HttpRequest& request, const char* name, int64_t low, int64_t high, int64_t otherwise, int64_t* value, ApiError* error) {
  const std::string text = request.query_value(name);
  *value = otherwise;
  if (text.empty()) return true;
  const auto [end, code] = std::from_chars(text.data(), text.data() + text.size(), *value);
  if (code == std::errc() && end == text.data() + text.size() && *value >= low && *value <= high) return true;
  *error = invalid_value(name, fmt::format("{} is \"{}\", but must be a whole number from {} to {}", name, text, low, high));
  return false;
}

const Parameters kPaging = {"limit", "offset"};
const Parameters kFilter = {"finish", "mode", "error",        "stream",     "thinking", "run",  "client",
                            "from",   "to",   "context_from", "context_to", "sort",     "order"};
Parameters operator+(Parameters a, const Parameters& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

void route(HttpServer& server, const char* method, const std::string& pattern, Parameters takes, HttpServer::Handler handler) {
  server.route(method, pattern, Access::kKey,
               [takes = std::move(takes), handler = std::move(handler)](const HttpRequest& request, HttpResponse& response) {
                 const std::string* before = nullptr;
                 for (const auto& [name, value] : request.query) {  // sorted by name
                   if (name.empty() && value.empty()) continue;     // of "a=1&" and "?"
                   std::string message;
                   if (std::none_of(takes.begin(), takes.end(), [&](const char* t) { return name == t; })) {
                     std::string list;
                     for (const char* t : takes) list += (list.empty() ? "" : ", ") + std::string(t);
                     message = fmt::format("\"{}\" is no parameter of {}; it takes {}", name, request.path, list.empty() ? "none" : list);
                   } else if (before && *before == name && name != "ids" && name != "finish" && name != "mode") {
                     message = fmt::format("{} is given more than once; it takes one value", name);
                   }
                   if (!message.empty()) {
                     secure(response);
                     return send_error(response, invalid_value(name, message));
                   }
                   before = &name;
                 }
                 handler(request, response);
               });
}

bool read_paging(const HttpRequest& request, int32_t otherwise, Paging* paging, ApiError* error, int32_t most) {
  int64_t limit = 0;
  if (!read_int(request, "limit", 1, most, otherwise, &limit, error)) return false;
  if (!read_int(request, "offset", 0, int64_t{1} << 40, 0, &paging->offset, error)) return false;
  paging->limit = static_cast<int32_t>(limit);
  return true;
}

std::vector<std::string> read_list(const HttpRequest& request, const std::string& name) {
  std::vector<std::string> values;
  const auto [begin, end] = request.query.equal_range(name);
  for (auto it = begin; it != end; ++it) {
    if (it->second.empty()) continue;  // name= is as good as not given
    for (size_t at = 0; at <= it->second.size();) {
      const size_t comma = std::min(it->second.find(',', at), it->second.size());
      values.push_back(it->second.substr(at, comma - at));
      at = comma + 1;
    }
  }
  return values;
}

bool read_ids(const HttpRequest& request, const char* name, size_t least, size_t most, std::vector<int64_t>* ids, ApiError* error) {
  bool good = true;
  for (const std::string& text : read_list(request, name)) {
    int64_t id = 0;
    const auto [end, code] = std::from_chars(text.data(), text.data() + text.size(), id);
    good =
        good && code == std::errc() && end == text.data() + text.size() && id > 0 && std::find(ids->begin(), ids->end(), id) == ids->end();
    ids->push_back(id);
  }
  if (good && ids->size() >= least && ids->size() <= most) return true;
  *error = invalid_value(name, fmt::format("{} is \"{}\", but must be {} to {} different numbers with commas, as in {}=4,3", name,
                                           request.query_value(name), least, most, name));
  return false;
}

namespace {

bool read_flag(const HttpRequest& request, const char* name, std::optional<bool>* value, ApiError* error) {
  const std::string text = request.query_value(name);
  if (text.empty()) return true;
  if (text == "1" || text == "true") {
    *value = true;
  } else if (text == "0" || text == "false") {
    *value = false;
  } else {
    *error = invalid_value(name, fmt::format("{} is \"{}\", but must be 1, 0, true or false", name, text));
    return false;
  }
  return true;
}

bool one_of(const char* name, const std::vector<std::string>& values, std::initializer_list<const char*> right, ApiError* error) {
  for (const std::string& value : values) {
    if (std::any_of(right.begin(), right.end(), [&](const char* r) { return value == r; })) continue;
    std::string list;
    for (const char* r : right) list += (list.empty() ? "" : ", ") + std::string(r);
    *error = invalid_value(name, fmt::format("{} is \"{}\", but must be one of {}", name, value, list));
    return false;
  }
  return true;
}

}  // namespace

bool read_filter(const HttpRequest& request, RequestFilter* filter, ApiError* error) {
  filter->finish = read_list(request, "finish");
  filter->mode = read_list(request, "mode");
  filter->client = request.query_value("client");
  const std::string sort = request.query_value("sort", "newest"), order = request.query_value("order");
  constexpr int64_t forever = int64_t{1} << 60;
  if (!one_of("finish", filter->finish, {"stop", "length", "tool_calls", "cancelled", "error"}, error) ||
      !one_of("mode", filter->mode, {"NONE", "DFLASH", "DDTREE", "NEXTN"}, error) ||
      !one_of("sort", {sort}, {"newest", "oldest", "slowest", "first_token", "tokens", "acceptance", "speed", "context"}, error) ||
      !one_of("order", {order}, {"", "falling", "rising"}, error) ||
      !read_int(request, "context_from", 0, forever, 0, &filter->context_from, error) ||
      !read_int(request, "context_to", 0, forever, 0, &filter->context_to, error) || !read_flag(request, "error", &filter->error, error) ||
      !read_flag(request, "stream", &filter->stream, error) || !read_flag(request, "thinking", &filter->thinking, error) ||
      !read_int(request, "run", 0, forever, 0, &filter->run_id, error) ||
      !read_int(request, "from", 0, forever, 0, &filter->from_ms, error) || !read_int(request, "to", 0, forever, 0, &filter->to_ms, error))
    return false;
  filter->sort = sort == "oldest"        ? RequestSort::kOldest
                 : sort == "slowest"     ? RequestSort::kSlowest
                 : sort == "first_token" ? RequestSort::kFirstToken
                 : sort == "tokens"      ? RequestSort::kTokens
                 : sort == "acceptance"  ? RequestSort::kAcceptance
                 : sort == "speed"       ? RequestSort::kSpeed
                 : sort == "context"     ? RequestSort::kContext
                                         : RequestSort::kNewest;
  // Orders fall by themselves, all but "oldest".
  filter->reversed = !order.empty() && (order == "rising") != (filter->sort == RequestSort::kOldest);
  return true;
}

}  // namespace admin

void register_admin_routes(HttpServer& server, Service& service) {
  const auto state = std::make_shared<admin::Admin>(service);
  admin::register_assets(server);
  admin::register_live_routes(server, state);
  admin::register_history_routes(server, state);
  admin::register_figure_routes(server, state);
  admin::register_smoke_admin_routes(server, state);
  server.route("GET", "/admin/api/{rest*}", Access::kKey, [](const HttpRequest& request, HttpResponse& response) {
    admin::send_not_found(response, fmt::format("{} is no route of the dashboard's API; docs/admin-api.md lists them", request.path));
  });
}

}  // namespace ddtree
