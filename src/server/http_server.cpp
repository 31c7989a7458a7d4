#include "server/http_server.h"

#include <httplib.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <exception>
#include <thread>

#include "base/log.h"
#include "server/connection.h"
#include "server/errors.h"
#include "server/router.h"

namespace ddtree {

namespace {

// httplib's loop around one connection, over our own stream: the peer is watched, a reply can end the connection, and input that
// arrived with the request before is not lost.
class Listener final : public httplib::Server {
 public:
  Listener(PeerWatcher& watcher, const std::atomic<bool>& stopping, std::atomic<int>& crowded, const HttpServer::Options& options)
      : watcher_(watcher),
        stopping_(stopping),
        crowded_(crowded),
        keep_alive_seconds_(options.keep_alive_seconds),
        head_seconds_(options.head_seconds),
        limits_{std::chrono::seconds(options.head_seconds), std::chrono::seconds(options.body_grace_seconds), options.body_bytes_a_second} {
  }

  // httplib listens with a backlog of 5: the sixth of a burst of clients would wait a second for its second SYN. Listening again widens it.
  void widen_backlog() { ::listen(svr_sock_, SOMAXCONN); }

 private:
  bool process_and_close_socket(socket_t sock) override {
    std::string remote, local;
    int remote_port = 0, local_port = 0;
    {
      ConnectionStream stream(sock, watcher_, limits_);
      stream.get_remote_ip_and_port(remote, remote_port);
      stream.get_local_ip_and_port(local, local_port);
      ConnectionStream::current() = &stream;
      while (stream.wait_for_request(keep_alive_seconds_, stopping_, crowded_)) {
        const auto head = stream.read_head(stopping_);
        if (head == ConnectionStream::Head::kStopping) break;
        if (head == ConnectionStream::Head::kTooSlow || head == ConnectionStream::Head::kTooLarge) {
          refuse(stream, head);
          break;
        }
        bool closed = false;
        const bool ok = process_request(stream, remote, remote_port, local, local_port, stopping_, closed, nullptr);
        if (!ok || closed || stream.close_after || stopping_) break;
      }
      ConnectionStream::current() = nullptr;
      if (stream.close_after) stream.linger();
    }
    ::shutdown(sock, SHUT_RDWR);
    ::close(sock);
    return true;
  }

  // httplib has not seen the request.
  void refuse(ConnectionStream& stream, ConnectionStream::Head head) const;

  PeerWatcher& watcher_;
  const std::atomic<bool>& stopping_;
  std::atomic<int>& crowded_;
  const int keep_alive_seconds_, head_seconds_;
  const ConnectionStream::Limits limits_;
};

// The address, or why it cannot be listened on. httplib only says "no".
std::string bind_trouble(const std::string& host, int port) {
  addrinfo hints{}, *found = nullptr;
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE;
  if (const int rc = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found); rc != 0)
    return fmt::format("--host {}: {}; use an address of this machine, or 0.0.0.0 for all", host, gai_strerror(rc));
  int error = 0;
  for (addrinfo* a = found; a; a = a->ai_next) {
    const int fd = ::socket(a->ai_family, a->ai_socktype, a->ai_protocol);
    if (fd < 0) continue;
    const int yes = 1;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
    if (::bind(fd, a->ai_addr, a->ai_addrlen) != 0) error = errno;
    ::close(fd);
    if (error) break;
  }
  freeaddrinfo(found);
  if (error == EADDRINUSE)
    return fmt::format("{}:{} is in use by another program; stop it, or give another --port (0 picks a free one)", host, port);
  if (error == EACCES) return fmt::format("{}:{}: ports under 1024 need privileges; give a higher --port", host, port);
  if (error == EADDRNOTAVAIL) return fmt::format("--host {} is no address of this machine; 0.0.0.0 listens on all of them", host);
  return fmt::format("cannot listen on {}:{}: {}", host, port, error ? std::strerror(error) : "address could not be bound");
}

ApiError plain_error(int status, const std::string& message) {
  ApiError e;
  e.status = status;
  e.code = status == 413   ? "request_too_large"
           : status == 414 ? "uri_too_long"
           : status == 415 ? "unsupported_media_type"
           : status == 408 ? "request_timeout"
           : status == 431 ? "headers_too_large"
                           : "invalid_request";
  e.message = message;
  return e;
}

void Listener::refuse(ConnectionStream& stream, ConnectionStream::Head head) const {
  const ApiError e = head == ConnectionStream::Head::kTooSlow
                         ? plain_error(408, fmt::format("the request line and headers did not arrive within {} s", head_seconds_))
                         : plain_error(431, "the request line and headers are larger than 128 KiB");
  const std::string body = e.json();
  const std::string reply =
      fmt::format("HTTP/1.1 {} {}\r\nContent-Type: application/json\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{}", e.status,
                  httplib::status_message(e.status), body.size(), body);
  stream.write(reply.data(), reply.size());
  stream.close_after = true;
}

// Every byte of the given key is looked at, whatever it is: the time says nothing about where they differ.
bool same_key(const std::string& key, std::string_view given) {
  unsigned difference = given.size() == key.size() ? 0 : 1;
  for (size_t i = 0; i < given.size(); ++i)
    difference |= static_cast<unsigned>(static_cast<unsigned char>(given[i]) ^ static_cast<unsigned char>(key[i % key.size()]));
  return difference == 0;
}

}  // namespace

struct HttpServer::Impl {
  Options options;
  Router router;
  std::atomic<bool> stopping{false};
  std::atomic<int> crowded{0};  // connections that wait for a thread
  PeerWatcher watcher;
  std::unique_ptr<Listener> listener;
  std::thread accepter;
  int port = 0;

  void handle(const httplib::Request& in, httplib::Response& out, const httplib::ContentReader* reader);
  bool read_body(const httplib::Request& in, const httplib::ContentReader& reader, std::string* body, ApiError* error);
  void send(const HttpRequest& request, HttpResponse&& reply, httplib::Response& out);
};

HttpServer::HttpServer(Options options) : impl_(std::make_unique<Impl>()) { impl_->options = std::move(options); }
HttpServer::~HttpServer() { stop(); }
const HttpServer::Options& HttpServer::options() const { return impl_->options; }
int HttpServer::port() const { return impl_->port; }

void HttpServer::route(const char* method, const std::string& pattern, Access access, Handler handler) {
  impl_->router.add(method, pattern, access, std::move(handler));
}

bool HttpServer::key_matches(std::string_view given) const {
  const std::string& key = impl_->options.api_key;
  if (key.empty()) return true;
  // Every byte of the given key is looked at, whatever it is: the time says nothing about where they differ.
  unsigned difference = given.size() == key.size() ? 0 : 1;
  for (size_t i = 0; i < given.size(); ++i)
    difference |= static_cast<unsigned char>(given[i]) ^ static_cast<unsigned char>(key[i % key.size()]);
  return difference == 0;
}

bool HttpServer::Impl::read_body(const httplib::Request& in, const httplib::ContentReader& reader, std::string* body, ApiError* error) {
  ConnectionStream* stream = ConnectionStream::current();
  const auto too_large = [&] {
    *error = plain_error(413, fmt::format("the body is larger than {} bytes (--max-body-size)", options.max_body));
    error->code = "request_too_large";
    stream->close_after = true;  // the rest of the body is still on its way
  };
  const bool chunked = in.get_header_value("Transfer-Encoding").find("chunked") != std::string::npos;
  const std::string length = in.get_header_value("Content-Length");
  if (!chunked && length.empty()) return true;  // no body
  if (in.get_header_value_count("Content-Length") > (chunked ? 0U : 1U)) {
    // A proxy before us may have read another length: what follows would be its next client's request to it and a body to us, or the
    // reverse.
    *error = plain_error(400, chunked ? "Content-Length beside Transfer-Encoding: chunked; a body has one length, so send one of them"
                                      : "more than one Content-Length; a body has one length");
    stream->close_after = true;
    return false;
  }
  if (!chunked) {
    if (length.size() > 18 || length.find_first_not_of("0123456789") != std::string::npos) {
      *error = plain_error(400, "Content-Length is no number of bytes: " + length.substr(0, 40));
      stream->close_after = true;
      return false;
    }
    if (std::stoull(length) > options.max_body) return too_large(), false;
  }
  if (in.is_multipart_form_data()) {
    *error = plain_error(415, "multipart bodies are not read; send application/json");
    stream->close_after = true;
    return false;
  }
  bool over = false;
  const bool ok = reader([&](const char* data, size_t n) {
    if (body->size() + n > options.max_body) return over = true, false;
    body->append(data, n);
    return true;
  });
  if (over) return too_large(), false;
  if (!ok && stream->body_too_slow()) {
    *error = plain_error(408, fmt::format("the body came too slowly: {} s and a second more for each {} bytes are allowed",
                                          options.body_grace_seconds, options.body_bytes_a_second));
    stream->close_after = true;
    return false;
  }
  if (!ok) {
    *error = plain_error(400, "the body ended early or is not encoded as its headers say");
    stream->close_after = true;
    return false;
  }
  return true;
}

void HttpServer::Impl::handle(const httplib::Request& in, httplib::Response& out, const httplib::ContentReader* reader) {
  HttpRequest request;
  request.method = in.method;
  request.path = in.path;
  request.remote = in.remote_addr;
  for (const auto& [name, value] : in.params) request.query.emplace(name, value);
  request.header = [&in](const char* name) { return in.get_header_value(name); };
  request.peer = ConnectionStream::current();
  HttpResponse reply;
  const auto finish = [&](const ApiError& error) {
    send_error(reply, error);
    send(request, std::move(reply), out);
  };
  std::string allowed;
  const Route* route = router.find(in.method == "HEAD" ? "GET" : in.method, in.path, &request.parameters, &allowed);
  if (in.method == "OPTIONS" && !options.cors_origin.empty()) {
    reply.status = 204;
    reply.set_header("Access-Control-Allow-Methods", "GET, POST, OPTIONS");
    reply.set_header("Access-Control-Allow-Headers", "Authorization, Content-Type, X-API-Key");
    reply.set_header("Access-Control-Max-Age", "86400");
    return send(request, std::move(reply), out);
  }
  std::string body;
  ApiError error;
  if (reader && !read_body(in, *reader, &body, &error)) return finish(error);
  request.body = std::move(body);
  if (!route) {
    if (allowed.empty()) {
      ApiError e = plain_error(404, fmt::format("there is no {} here", in.path.substr(0, 200)));
      e.code = "not_found";
      return finish(e);
    }
    reply.set_header("Allow", allowed);
    ApiError e = plain_error(405, fmt::format("{} is not for {}; it takes {}", in.method, in.path, allowed));
    e.code = "method_not_allowed";
    return finish(e);
  }
  if (route->access == Access::kKey && !options.api_key.empty()) {
    std::string given = in.get_header_value("x-api-key");
    const std::string authorization = in.get_header_value("Authorization");
    if (authorization.size() > 7 && strncasecmp(authorization.c_str(), "Bearer ", 7) == 0) given = authorization.substr(7);
    if (!same_key(options.api_key, given)) {
      ApiError e = plain_error(401, given.empty() ? "this server asks for an API key: send Authorization: Bearer KEY"
                                                  : "the API key is not the one this server was started with");
      e.type = "authentication_error";
      e.code = "invalid_api_key";
      return finish(e);
    }
  }
  try {
    route->handler(request, reply);
  } catch (const std::exception& e) {
    log::error("{} {}: {}", in.method, in.path, e.what());
    ApiError fault = plain_error(500, "the server failed on this request; its log says more");
    fault.type = "server_error";
    fault.code = "internal_error";
    return finish(fault);
  }
  send(request, std::move(reply), out);
}

void HttpServer::Impl::send(const HttpRequest& request, HttpResponse&& reply, httplib::Response& out) {
  out.status = reply.status;
  // 499 is a word for books and logs, no status that HTTP knows: who it is about gets an end without a reply.
  if (reply.status == 499) ConnectionStream::current()->mute = ConnectionStream::current()->close_after = true;
  for (const auto& [name, value] : reply.headers) out.set_header(name, value);
  if (!options.cors_origin.empty()) {
    out.set_header("Access-Control-Allow-Origin", options.cors_origin);
    out.set_header("Access-Control-Expose-Headers", "Retry-After, x-ignored-fields, x-request-id");
  }
  if (ConnectionStream::current()->close_after) out.set_header("Connection", "close");
  if (request.method == "HEAD") out.set_header("Accept-Ranges", "none");  // httplib would promise bytes; see read_head
  if (!reply.stream) {
    if (!reply.body.empty()) out.set_content(std::move(reply.body), reply.content_type);
    return;
  }
  if (request.method == "HEAD") return;
  out.set_chunked_content_provider(reply.content_type, [stream = std::move(reply.stream)](size_t, httplib::DataSink& sink) {
    bool alive = true;
    try {
      stream([&](std::string_view text) {
        // An empty write would end httplib's chunked body.
        if (alive && !text.empty()) alive = sink.write(text.data(), text.size());
        return alive;
      });
    } catch (const std::exception& e) {
      log::error("stream: {}", e.what());
      return false;
    }
    if (alive) sink.done();
    return alive;
  });
}

Status HttpServer::start() {
  Impl& m = *impl_;
  m.listener = std::make_unique<Listener>(m.watcher, m.stopping, m.crowded, m.options);
  Listener& s = *m.listener;
  s.set_tcp_nodelay(true);  // without it a kept-alive reply waits 40 ms for the client's acknowledgement
  // Not SO_REUSEPORT, httplib's default: a second server on the same port must be told so, not share its clients.
  s.set_socket_options([](socket_t sock) {
    const int yes = 1;
    setsockopt(sock, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
  });
  s.new_task_queue = [&m] { return new ElasticPool(m.options.max_connections, m.crowded); };
  s.set_keep_alive_timeout(m.options.keep_alive_seconds);
  s.set_keep_alive_max_count(1u << 30);
  const auto plain = [this](const httplib::Request& in, httplib::Response& out) { impl_->handle(in, out, nullptr); };
  const auto with_body = [this](const httplib::Request& in, httplib::Response& out, const httplib::ContentReader& reader) {
    impl_->handle(in, out, &reader);
  };
  s.Get(".*", plain);
  s.Options(".*", plain);
  s.Post(".*", with_body);
  s.Put(".*", with_body);
  s.Patch(".*", with_body);
  s.Delete(".*", with_body);
  // httplib reads the body of a GET by itself, a chunked one without end. Nobody here wants one: short ones are let pass.
  s.set_payload_max_length(m.options.max_body);
  s.set_pre_routing_handler([](const httplib::Request& in, httplib::Response& out) {
    const bool takes_body = in.method == "POST" || in.method == "PUT" || in.method == "PATCH" || in.method == "DELETE";
    if (takes_body || !(in.has_header("Transfer-Encoding") || in.get_header_value("Content-Length").size() > 4))
      return httplib::Server::HandlerResponse::Unhandled;
    ConnectionStream::current()->close_after = true;
    out.status = 413;
    ApiError e = plain_error(413, in.method + " takes no body");
    e.code = "request_too_large";
    out.set_content(e.json(), "application/json");
    return httplib::Server::HandlerResponse::Handled;
  });
  s.set_error_handler([](const httplib::Request&, httplib::Response& out) {
    // Only what httplib refused before a handler ran has no body yet: a broken request line or headers.
    if (!out.body.empty() || out.content_provider_ || out.content_length_ > 0) return httplib::Server::HandlerResponse::Unhandled;
    if (ConnectionStream::current()) ConnectionStream::current()->close_after = true;
    out.set_content(plain_error(out.status, std::string("the request could not be read: ") + httplib::status_message(out.status)).json(),
                    "application/json");
    return httplib::Server::HandlerResponse::Handled;
  });
  if (m.options.port == 0) {
    m.port = s.bind_to_any_port(m.options.host);
    if (m.port < 0) return {Code::kUnavailable, bind_trouble(m.options.host, 0)};
  } else {
    if (!s.bind_to_port(m.options.host, m.options.port)) return {Code::kUnavailable, bind_trouble(m.options.host, m.options.port)};
    m.port = m.options.port;
  }
  s.widen_backlog();
  m.accepter = std::thread([&s] { s.listen_after_bind(); });
  s.wait_until_ready();
  return {};
}

void HttpServer::stop() {
  Impl& m = *impl_;
  if (!m.accepter.joinable()) return;
  m.stopping = true;
  m.listener->stop();
  m.accepter.join();
}

}  // namespace ddtree
