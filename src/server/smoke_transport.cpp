// Where the smoke suite's questions go: over a socket, or straight into this process's own chat route.
#include <arpa/inet.h>
#include <fmt/core.h>
#include <httplib.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <utility>

#include "server/openai_subject.h"
#include "server/routes.h"

namespace ddtree {
namespace {

// Calls `stop` once, when the limit's time is over or somebody cancels. A server that writes a byte now and then would outlast any
// time limit on single reads.
class Watchdog {
 public:
  Watchdog(const SmokeLimit& limit, std::function<void()> stop)
      : thread_([this, limit, stop = std::move(stop)] {
          const auto deadline = std::chrono::steady_clock::now() + std::chrono::duration<double>(limit.seconds);
          std::unique_lock lock(mutex_);
          while (!over_) {
            const bool cancelled = limit.cancel != nullptr && limit.cancel->load();
            if (cancelled || std::chrono::steady_clock::now() >= deadline) {
              (cancelled ? cancelled_ : timed_out_) = true;
              lock.unlock();
              stop();
              return;
            }
            changed_.wait_for(lock, std::chrono::milliseconds(50));
          }
        }) {}
  ~Watchdog() { end(); }
  void end() {
    {
      std::lock_guard lock(mutex_);
      over_ = true;
    }
    changed_.notify_all();
    if (thread_.joinable()) thread_.join();
  }
  bool timed_out() const { return timed_out_; }  // after end()
  bool cancelled() const { return cancelled_; }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool over_ = false, timed_out_ = false, cancelled_ = false;
  std::thread thread_;
};

std::string media_type(const std::string& header) {
  std::string type = header.substr(0, header.find(';'));
  while (!type.empty() && type.back() == ' ') type.pop_back();
  std::transform(type.begin(), type.end(), type.begin(), [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return type;
}

class HttpTransport final : public SmokeTransport {
 public:
  HttpTransport(std::string origin, std::string prefix, std::string api_key)
      : origin_(std::move(origin)), prefix_(std::move(prefix)), api_key_(std::move(api_key)) {}

  TransportReply get(const std::string& path, const SmokeLimit& limit, const OnBytes& on_bytes) override {
    return send("GET", path, "", limit, on_bytes);
  }
  TransportReply post(const std::string& path, const std::string& body, const SmokeLimit& limit, const OnBytes& on_bytes) override {
    return send("POST", path, body, limit, on_bytes);
  }

 private:
  TransportReply send(const char* method, const std::string& path, const std::string& body, const SmokeLimit& limit,
                      const OnBytes& on_bytes) {
    // A connection each: what is tested is the answer, not who closes an idle connection first.
    httplib::Client client(origin_);
    const auto seconds = static_cast<time_t>(std::max(1.0, limit.seconds)) + 1;
    client.set_connection_timeout(std::min<time_t>(seconds, 10));
    client.set_read_timeout(seconds);
    client.set_write_timeout(seconds);
    client.set_follow_location(false);
    httplib::Request request;
    request.method = method, request.path = prefix_ + path, request.body = body;
    request.set_header("Accept", body.empty() ? "application/json" : "text/event-stream, application/json");
    request.set_header("User-Agent", fmt::format("ddtree-smoke/{}", DDTREE_VERSION));
    if (!body.empty()) request.set_header("Content-Type", "application/json");
    if (!api_key_.empty()) request.set_header("Authorization", "Bearer " + api_key_);
    TransportReply reply;
    request.response_handler = [&](const httplib::Response& response) {
      reply.status = response.status;
      reply.content_type = media_type(response.get_header_value("Content-Type"));
      return true;
    };
    request.content_receiver = [&](const char* data, size_t size, uint64_t, uint64_t) {
      on_bytes({data, size});
      return true;
    };
    Watchdog watchdog(limit, [&] { client.stop(); });
    const httplib::Result result = client.send(request);
    watchdog.end();
    reply.timed_out = watchdog.timed_out(), reply.cancelled = watchdog.cancelled();
    if (result || reply.timed_out || reply.cancelled) return reply;
    const httplib::Error error = result.error();
    const std::string what = httplib::to_string(error);
    reply.unreachable = error == httplib::Error::Connection || error == httplib::Error::ConnectionTimeout ||
                        error == httplib::Error::SSLConnection || error == httplib::Error::SSLServerVerification ||
                        error == httplib::Error::SSLLoadingCerts;
    reply.error = reply.unreachable ? fmt::format("{}: no connection ({})", origin_, what)
                  : error == httplib::Error::Read || error == httplib::Error::Write
                      ? std::string("the connection was closed or what came is no HTTP")
                      : what;
    return reply;
  }

  std::string origin_, prefix_, api_key_;
};

// The caller in this process: never goes away by itself, and is told to by the watchdog.
class LocalPeer final : public Peer {
 public:
  void on_close(std::function<void(Close)> callback) override {
    std::lock_guard lock(mutex_);
    callback_ = std::move(callback);
    if (closed_ && callback_) std::exchange(callback_, nullptr)(Close::kGone);
  }
  bool closed() const { return closed_; }
  Ask ask() override { return Ask::kCannot; }  // it never closes one half only
  void close() {
    std::lock_guard lock(mutex_);
    closed_ = true;
    if (callback_) std::exchange(callback_, nullptr)(Close::kGone);
  }

 private:
  std::mutex mutex_;
  std::atomic<bool> closed_{false};
  std::function<void(Close)> callback_;
};

class LocalTransport final : public SmokeTransport {
 public:
  explicit LocalTransport(Service& service) : service_(service) {}

  TransportReply get(const std::string&, const SmokeLimit&, const OnBytes&) override { return {}; }
  TransportReply post(const std::string& path, const std::string& body, const SmokeLimit& limit, const OnBytes& on_bytes) override {
    LocalPeer peer;
    HttpRequest request;
    request.method = "POST", request.path = "/v1" + path, request.body = body, request.remote = "smoke test";
    request.header = [](const char*) { return std::string(); };
    request.peer = &peer;
    request.own = true;
    TransportReply reply;
    {
      Watchdog watchdog(limit, [&] { peer.close(); });
      HttpResponse response;
      answer_chat(service_, request, response);
      reply.status = response.status, reply.content_type = media_type(response.content_type);
      if (response.stream) {
        response.stream([&](std::string_view bytes) {
          if (peer.closed()) return false;
          on_bytes(bytes);
          return true;
        });
      } else {
        on_bytes(response.body);
      }
      response = {};  // a stream holds its request until here, and that the peer
      watchdog.end();
      reply.timed_out = watchdog.timed_out(), reply.cancelled = watchdog.cancelled();
    }
    return reply;
  }

 private:
  Service& service_;
};

}  // namespace

Result<std::unique_ptr<SmokeTransport>> http_transport(const std::string& url, const std::string& api_key) {
  const auto wrong = [&](const std::string& why) {
    return Status(Code::kUsage, fmt::format("--url {}: {}; give the API's address, as in http://127.0.0.1:30000/v1", url, why));
  };
  const size_t colon = url.find("://");
  if (colon == std::string::npos) return wrong("no http:// in front");
  std::string scheme = url.substr(0, colon);
  std::transform(scheme.begin(), scheme.end(), scheme.begin(), [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  if (scheme != "http" && scheme != "https") return wrong(fmt::format("'{}' is not http", scheme));
#ifndef CPPHTTPLIB_OPENSSL_SUPPORT
  if (scheme == "https") {
    return Status(Code::kUnavailable,
                  fmt::format("--url {}: this build has no TLS; ask over http, from the machine itself or through a tunnel "
                              "(ssh -L 30000:127.0.0.1:30000 HOST)",
                              url));
  }
#endif
  const size_t slash = url.find('/', colon + 3);
  const std::string host = url.substr(colon + 3, slash == std::string::npos ? slash : slash - colon - 3);
  if (host.empty() || host.find_first_of(" @?#\\%\t\r\n") != std::string::npos) return wrong("no host in it");
  // An IPv6 address stands in brackets, whole and alone, or its colons and a port's could not be told apart.
  const size_t open = host.find_first_of("[]");
  if (open != std::string::npos || std::count(host.begin(), host.end(), ':') > 1) {
    const size_t close = host.find(']');
    const std::string address = open == 0 && close != std::string::npos ? host.substr(1, close - 1) : "";
    in6_addr ignored{};
    if (inet_pton(AF_INET6, address.c_str(), &ignored) != 1 || (close + 1 < host.size() && host[close + 1] != ':'))
      return wrong(fmt::format("'{}' is no host; an IPv6 address stands in brackets, as in [::1]:30000", host));
  }
  if (host[0] == ':') return wrong("no host in it");
  if (const size_t port = host.rfind(':'); port != std::string::npos && host.find(']', port) == std::string::npos) {
    const std::string digits = host.substr(port + 1);
    if (digits.empty() || digits.size() > 5 || digits.find_first_not_of("0123456789") != std::string::npos || std::stoi(digits) > 65535 ||
        std::stoi(digits) == 0)
      return wrong(fmt::format("'{}' is no port", digits));
  }
  std::string prefix = slash == std::string::npos ? "" : url.substr(slash);
  if (prefix.find_first_of("?# ") != std::string::npos) return wrong("a query or a space in the path");
  for (const char* route : {"/chat/completions", "/models"})
    if (prefix.ends_with(route)) prefix.resize(prefix.size() - std::string_view(route).size());
  while (!prefix.empty() && prefix.back() == '/') prefix.pop_back();
  if (!prefix.ends_with("/v1")) prefix += "/v1";
  return std::unique_ptr<SmokeTransport>(std::make_unique<HttpTransport>(scheme + "://" + host, prefix, api_key));
}

std::unique_ptr<SmokeTransport> local_transport(Service& service) { return std::make_unique<LocalTransport>(service); }

}  // namespace ddtree
