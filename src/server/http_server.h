// HTTP/1.1 over cpp-httplib, behind types of our own: handlers see neither sockets nor the library's header (10 s a file).
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/status.h"

namespace ddtree {

// The client's end of a request, for as long as its handler or stream runs.
class Peer {
 public:
  virtual ~Peer() = default;
  virtual bool closed() const = 0;  // the client went away (also when it closed only its sending half)

  // Calls back once, on another thread, as soon as the client goes away; at once if it already has. The callback must be quick. A
  // second call replaces the first; nullptr takes it back and returns only when no callback is running.
  virtual void on_close(std::function<void()> callback) = 0;
};

struct HttpRequest {
  std::string method, path;  // path without the query, percent-decoded
  std::string body;
  std::string remote;  // client address, for the store
  std::multimap<std::string, std::string> query;
  std::map<std::string, std::string> parameters;        // {name} parts of the route
  std::function<std::string(const char* name)> header;  // "" where absent; names are case-insensitive
  Peer* peer = nullptr;                                 // never null in a handler
  // Asked by this process itself (the smoke test), never over a socket: answered before the service is ready, in no client's books.
  bool own = false;

  std::string query_value(const std::string& name, const std::string& otherwise = "") const {
    const auto it = query.find(name);
    return it == query.end() ? otherwise : it->second;
  }
};

// Where a streaming reply writes. false: the client is gone, stop.
using BodyWriter = std::function<bool(std::string_view)>;

struct HttpResponse {
  int status = 200;
  std::string content_type = "application/json";
  std::string body;
  std::multimap<std::string, std::string> headers;
  // Set: the body is what this writes, chunked, after status and headers went out. Runs on the connection's thread.
  std::function<void(const BodyWriter&)> stream;

  void set_header(std::string name, std::string value) { headers.emplace(std::move(name), std::move(value)); }
};

// Who may call a route when --api-key is set.
enum class Access : uint8_t {
  kOpen,  // health probes, the dashboard's page and its files
  kKey,   // everything else: Authorization: Bearer KEY (or x-api-key: KEY), 401 otherwise
};

class HttpServer {
 public:
  struct Options {
    std::string host = "127.0.0.1";
    int port = 30000;             // 0: any free one
    std::string api_key;          // empty: no key is asked for
    std::string cors_origin;      // empty: no CORS headers
    size_t max_body = 32u << 20;  // bytes; more is a 413
    int max_connections = 512;    // one thread each while it is busy or kept alive; more wait, then are closed
    int keep_alive_seconds = 60;
  };
  using Handler = std::function<void(const HttpRequest&, HttpResponse&)>;

  explicit HttpServer(Options options);
  ~HttpServer();  // stops
  HttpServer(const HttpServer&) = delete;
  HttpServer& operator=(const HttpServer&) = delete;

  // Pattern: a literal path whose segments may be "{name}"; a last segment "{name*}" takes the rest of the path, slashes included.
  // Literal segments win over parameters. HEAD is answered by GET's handler without the body. Call before start().
  // A handler that throws is a 500 in OpenAI's error shape, and logged.
  void route(const char* method, const std::string& pattern, Access access, Handler handler);

  // Binds and begins to answer on threads of its own. kUnavailable: the address is in use or not this machine's.
  Status start();
  int port() const;  // the bound port, after start()
  const Options& options() const;
  bool key_matches(std::string_view given) const;  // in constant time; true where no key is set

  // Ends idle connections, lets running handlers and streams finish, joins. Streams that wait for an engine must have been ended before.
  void stop();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ddtree
