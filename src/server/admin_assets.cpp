// The page and its files, from inside the executable.
#include <fmt/core.h>

#include <map>

#include "base/embedded.h"
#include "server/admin_parts.h"

namespace ddtree::admin {

namespace {

struct Asset {
  std::string_view bytes;
  std::string content_type, etag;
  bool hashed_name = false;  // the name changes with the content: a browser may keep it for ever
};

const char* content_type(std::string_view name) {
  const auto ends = [&](std::string_view e) { return name.ends_with(e); };
  if (ends(".html")) return "text/html; charset=utf-8";
  if (ends(".js")) return "text/javascript; charset=utf-8";
  if (ends(".css")) return "text/css; charset=utf-8";
  if (ends(".svg")) return "image/svg+xml";
  if (ends(".png")) return "image/png";
  if (ends(".json") || ends(".map")) return "application/json";
  return "application/octet-stream";
}

// FNV-1a, 64 bits: tells two builds of a file apart, guards nothing.
uint64_t fingerprint(std::string_view bytes) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (const char c : bytes) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  return hash;
}

bool names_etag(const std::string& header, const std::string& etag) {
  return header == "*" || header.find(etag) != std::string::npos;  // a list, maybe with W/ marks
}

void send(const HttpRequest& request, HttpResponse& response, const Asset& asset) {
  secure(response);
  response.set_header("ETag", asset.etag);
  response.set_header("Cache-Control", asset.hashed_name ? "public, max-age=31536000, immutable" : "no-cache");
  response.content_type = asset.content_type;
  if (names_etag(request.header("If-None-Match"), asset.etag)) response.status = 304;
  else response.body = std::string(asset.bytes);
}

}  // namespace

void register_assets(HttpServer& server) {
  std::map<std::string, Asset> assets;
  for (const std::string_view name : embedded_files("web/")) {
    const std::string_view bytes = *embedded_file(name);
    assets["/" + std::string(name.substr(4))] = {bytes, content_type(name), fmt::format("\"{:016x}\"", fingerprint(bytes)),
                                                 name.starts_with("web/assets/")};
  }
  const auto shared = std::make_shared<const std::map<std::string, Asset>>(std::move(assets));
  const auto page = [shared](const HttpRequest& request, HttpResponse& response) {
    const auto it = shared->find("/index.html");
    if (it == shared->end()) return send_not_found(response, "this build has no dashboard; the API is at /admin/api/");
    send(request, response, it->second);
  };
  const auto file = [shared](const HttpRequest& request, HttpResponse& response) {
    const auto it = shared->find(request.path);
    if (it == shared->end()) return send_not_found(response, fmt::format("{} is no file of the dashboard", request.path));
    send(request, response, it->second);
  };
  const auto to_page = [](const HttpRequest&, HttpResponse& response) {
    secure(response);
    response.status = 302;
    response.content_type = "text/plain; charset=utf-8";
    response.set_header("Location", "/");
    response.body = "The dashboard is at /\n";
  };
  server.route("GET", "/", Access::kOpen, page);
  server.route("GET", "/admin", Access::kOpen, to_page);
  server.route("GET", "/dashboard", Access::kOpen, to_page);
  // Each file by its own name: nothing else of the path space is taken.
  for (const auto& [path, asset] : *shared)
    if (!asset.hashed_name) server.route("GET", path, Access::kOpen, file);
  server.route("GET", "/assets/{name*}", Access::kOpen, file);
}

}  // namespace ddtree::admin
