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

  // kHalf: the client closed its sending half. It may still read, which is legal, or be gone for good: only something written to it can
  // tell (see ask()). kGone: it is gone; nothing can be written any more.
  enum class Close : uint8_t { kHalf, kGone };
  // Calls back on another thread as soon as either happens, at once if it already has: kHalf at most once, kGone at most once and last.
  // The callback must be quick. A second call replaces the first; nullptr takes it back and returns only when no callback is running.
  virtual void on_close(std::function<void(Close)> callback) = 0;

  // After kHalf: writes a little to the client, which one that is gone answers with a reset, and kGone follows.
  enum class Ask : uint8_t {
    kAsked,   // an interim reply (100 Continue) went out; clients skip it
    kWrite,   // the reply has begun: whatever its stream writes next asks; an SSE comment will do
    kCannot,  // the client speaks HTTP/1.0, which has no interim replies, or the write failed: take it for gone
  };
  virtual Ask ask() = 0;
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
    int head_seconds = 30;               // for a request's line and headers, all together; more is a 408
    int body_grace_seconds = 30;         // a body may take so long, and a second more
    int64_t body_bytes_a_second = 4096;  // for each so many bytes that came; more is a 408
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
