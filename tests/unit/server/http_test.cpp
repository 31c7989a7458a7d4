// The HTTP side on a socket: routing, limits, keys, connections.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <catch2/catch_test_macros.hpp>
#include <random>

#include "harness.h"
#include "server/router.h"

using namespace ddtree;
using namespace ddtree::test;

namespace {

// A connection without a client library in between.
struct Raw {
  int fd = ::socket(AF_INET, SOCK_STREAM, 0);
  explicit Raw(int port) {
    sockaddr_in a{};
    a.sin_family = AF_INET;
    a.sin_port = htons(static_cast<uint16_t>(port));
    a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (::connect(fd, reinterpret_cast<sockaddr*>(&a), sizeof a) != 0) throw std::runtime_error("connect");
    timeval t{10, 0};
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &t, sizeof t);
  }
  ~Raw() { close(); }
  void close() {
    if (fd >= 0) ::close(fd);
    fd = -1;
  }
  void send(const std::string& text) { REQUIRE(::send(fd, text.data(), text.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(text.size())); }
  std::string read_until(const std::string& mark) {
    std::string got;
    char buffer[4096];
    while (got.find(mark) == std::string::npos) {
      const ssize_t n = ::recv(fd, buffer, sizeof buffer, 0);
      if (n <= 0) break;
      got.append(buffer, static_cast<size_t>(n));
    }
    return got;
  }
};

std::string post_text(const std::string& path, const std::string& body) {
  return "POST " + path + " HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: " + std::to_string(body.size()) +
         "\r\n\r\n" + body;
}

}  // namespace

TEST_CASE("routes: literals before parameters, the rest of a path, other methods") {
  Router router;
  const auto nothing = [](const HttpRequest&, HttpResponse&) {};
  router.add("GET", "/a/{x}", Access::kKey, nothing);
  router.add("GET", "/a/b", Access::kOpen, nothing);
  router.add("POST", "/a/b", Access::kKey, nothing);
  router.add("GET", "/m/{id*}", Access::kKey, nothing);
  router.add("GET", "/", Access::kOpen, nothing);
  std::map<std::string, std::string> p;
  std::string allowed;
  CHECK(router.find("GET", "/a/b", &p, &allowed)->access == Access::kOpen);
  CHECK(router.find("GET", "/a/c", &p, &allowed));
  CHECK(p.at("x") == "c");
  CHECK(router.find("GET", "/m/org/model", &p, &allowed));
  CHECK(p.at("id") == "org/model");
  CHECK_FALSE(router.find("GET", "/m", &p, &allowed));
  CHECK_FALSE(router.find("DELETE", "/a/b", &p, &allowed));
  CHECK(allowed == "GET, POST");
  CHECK_FALSE(router.find("GET", "/nowhere", &p, &allowed));
  CHECK(allowed.empty());
  CHECK(router.find("GET", "/", &p, &allowed));
  CHECK_FALSE(router.find("GET", "/a//", &p, &allowed));
}

TEST_CASE("what is not there is a 404, a wrong method a 405, both in OpenAI's shape") {
  Harness h;
  auto r = h.get("/v1/nowhere");
  CHECK(r.status == 404);
  CHECK(r.body["error"]["code"] == "not_found");
  r = h.get("/v1/chat/completions");
  CHECK(r.status == 405);
  CHECK(r.headers.find("Allow")->second == "POST");
  CHECK(r.body["error"]["type"] == "invalid_request_error");
}

TEST_CASE("a body over the limit is a 413, declared or chunked, and the connection is not misread") {
  HttpServer::Options o;
  o.max_body = 1000;
  Harness h({}, o);
  auto r = h.post_text("/v1/chat/completions", std::string(1001, ' '));
  CHECK(r.status == 413);
  CHECK(r.body["error"]["code"] == "request_too_large");

  Raw raw(h.http->port());
  raw.send("POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n");
  raw.send("400\r\n" + std::string(0x400, 'x') + "\r\n");
  const std::string got = raw.read_until("request_too_large");
  CHECK(got.rfind("HTTP/1.1 413", 0) == 0);
  CHECK(got.find("request_too_large") != std::string::npos);

  // Far beyond the limit: the reply arrives although the body is still being sent.
  r = h.post_text("/v1/chat/completions", std::string(4'000'000, 'x'));
  CHECK(r.status == 413);
}

TEST_CASE("two requests in one packet are two requests") {
  Harness h;
  Raw raw(h.http->port());
  raw.send("GET /version HTTP/1.1\r\nHost: x\r\n\r\nGET /v1/models/tiny HTTP/1.1\r\nHost: x\r\n\r\n");
  const std::string got = raw.read_until("\"backend\"");
  CHECK(got.find("\"version\"") != std::string::npos);
  CHECK(got.find("\"backend\"") != std::string::npos);
}

TEST_CASE("a GET with a body does not smuggle a second request") {
  Harness h;
  Raw raw(h.http->port());
  raw.send("GET /version HTTP/1.1\r\nHost: x\r\nContent-Length: 41\r\n\r\nGET /v1/models/tiny HTTP/1.1\r\nHost: x\r\n\r\n");
  raw.send("GET /health HTTP/1.1\r\nHost: x\r\n\r\n");
  const std::string got = raw.read_until("\"smoke\"");
  INFO(got);
  CHECK(got.find("\"version\"") != std::string::npos);
  CHECK(got.find("\"backend\"") == std::string::npos);
}

TEST_CASE("a GET with an endless body is cut off") {
  Harness h;
  Raw raw(h.http->port());
  raw.send("GET /version HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n");
  CHECK(raw.read_until("request_too_large").rfind("HTTP/1.1 413", 0) == 0);
}

TEST_CASE("a request that is no HTTP, and a POST without a length, get an answer") {
  Harness h;
  {
    Raw raw(h.http->port());
    raw.send("NONSENSE\r\n\r\n");
    const std::string got = raw.read_until("\"error\"");
    CHECK(got.rfind("HTTP/1.1 400", 0) == 0);
  }
  Raw raw(h.http->port());
  raw.send("POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n\r\n");
  const std::string got = raw.read_until("invalid_json");
  CHECK(got.rfind("HTTP/1.1 400", 0) == 0);
}

TEST_CASE("broken bytes never stop the server") {
  Harness h;
  const std::string good = post_text("/v1/chat/completions", chat_body().dump());
  std::mt19937 random(20240611);
  for (int i = 0; i < 300; ++i) {
    std::string bytes = good;
    for (int k = static_cast<int>(random() % 4); k >= 0; --k) {
      const size_t at = random() % bytes.size();
      switch (random() % 4) {
        case 0: bytes[at] = static_cast<char>(random()); break;
        case 1: bytes.erase(at, random() % 20); break;
        case 2: bytes.insert(at, std::string(random() % 300, static_cast<char>(random()))); break;
        default: bytes.insert(at, "\r\n\r\n"); break;
      }
      if (bytes.empty()) bytes = "x";
    }
    Raw raw(h.http->port());
    raw.send(bytes);
    ::shutdown(raw.fd, SHUT_WR);
    raw.read_until("\r\n");
  }
  CHECK(h.get("/health").status == 200);
  CHECK(h.post("/v1/chat/completions", chat_body()).status == 200);
  CHECK(Harness::eventually([&] { return h.service.live_requests().empty(); }));
}

TEST_CASE("with --api-key the probes and the page stay open and all else asks") {
  HttpServer::Options o;
  o.api_key = "correct horse";
  Harness h({}, o);
  for (const char* path : {"/health", "/livez", "/readyz", "/startupz"}) {
    INFO(path);
    CHECK(h.get(path).status == 200);
  }
  for (const char* path : {"/v1/models", "/metrics", "/version"}) {
    INFO(path);
    const auto r = h.get(path);
    CHECK(r.status == 401);
    CHECK(r.body["error"]["type"] == "authentication_error");
    CHECK(r.body["error"]["code"] == "invalid_api_key");
    CHECK(r.headers.count("WWW-Authenticate") == 1);
    CHECK(h.get(path, {{"Authorization", "Bearer correct horse"}}).status == 200);
    CHECK(h.get(path, {{"authorization", "bearer correct horse"}}).status == 200);
    CHECK(h.get(path, {{"x-api-key", "correct horse"}}).status == 200);
    for (const char* wrong : {"Bearer correct hors", "Bearer correct horsf", "Bearer ", "correct horse", "Basic correct horse"}) {
      INFO(wrong);
      CHECK(h.get(path, {{"Authorization", wrong}}).status == 401);
    }
  }
  CHECK(h.post("/v1/chat/completions", chat_body()).status == 401);
  CHECK(h.http->key_matches("correct horse"));
  CHECK_FALSE(h.http->key_matches("correct"));
}

TEST_CASE("a body with two lengths is refused, and nothing after it is taken for a request") {
  Harness h;
  const char* both = "Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n";
  const char* twice = "Content-Length: 2\r\nContent-Length: 4\r\n\r\n{}  ";
  for (const char* rest : {both, twice}) {
    Raw raw(h.http->port());
    raw.send(std::string("POST /tokenize HTTP/1.1\r\nHost: x\r\n") + rest + "GET /version HTTP/1.1\r\nHost: x\r\n\r\n");
    const std::string got = raw.read_until("\"version\"");  // to the end of the connection
    INFO(got);
    CHECK(got.rfind("HTTP/1.1 400", 0) == 0);
    CHECK(got.find("Content-Length") != std::string::npos);
    CHECK(got.find("\"version\"") == std::string::npos);
  }
}

TEST_CASE("what is refused before a route sees it has a code too") {
  Harness h;
  for (const std::string& head : {std::string("NONSENSE\r\n\r\n"), "GET /" + std::string(9000, 'a') + " HTTP/1.1\r\nHost: x\r\n\r\n",
                                  std::string("POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n")}) {
    Raw raw(h.http->port());
    raw.send(head);
    const std::string got = raw.read_until("}}");
    const auto body = got.find("\r\n\r\n");
    REQUIRE(body != std::string::npos);
    INFO(got);
    CHECK(Json::parse(got.substr(body + 4))["error"]["code"].is_string());
  }
}

TEST_CASE("idle connections on every thread make room for one that asks") {
  HttpServer::Options o;
  o.max_connections = 4;
  o.keep_alive_seconds = 3600;
  Harness h({}, o);
  std::vector<std::unique_ptr<Raw>> idle;
  for (int i = 0; i < 4; ++i) {
    idle.push_back(std::make_unique<Raw>(h.http->port()));
    idle.back()->send("GET /version HTTP/1.1\r\nHost: x\r\n\r\n");
    idle.back()->read_until("\"version\"");
  }
  Raw raw(h.http->port());  // gives up after 10 s
  raw.send("GET /health HTTP/1.1\r\nHost: x\r\n\r\n");
  CHECK(raw.read_until("\"smoke\"").rfind("HTTP/1.1 200", 0) == 0);
}

TEST_CASE("a burst of clients finds room in the backlog") {
  Harness h;
  int backlog = 0;
  for (int fd = 3; fd < 1024; ++fd) {  // the server's socket is one of ours
    int listening = 0;
    socklen_t size = sizeof listening;
    sockaddr_in a{};
    socklen_t a_size = sizeof a;
    if (getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listening, &size) != 0 || !listening) continue;
    if (getsockname(fd, reinterpret_cast<sockaddr*>(&a), &a_size) != 0 || ntohs(a.sin_port) != h.http->port()) continue;
    tcp_info info{};
    size = sizeof info;
    REQUIRE(getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size) == 0);
    backlog = static_cast<int>(info.tcpi_sacked);  // of a listening socket: the most that may wait
  }
  CHECK(backlog >= 128);
}

TEST_CASE("an answer that the stop of the server cut off is an error, not a short answer") {
  for (const char* path : {"/v1/chat/completions", "/v1/completions"}) {
    for (const bool streaming : {false, true}) {
      Harness h;
      h.engine.endless = true;
      h.engine.pause = std::chrono::milliseconds(2);
      Json body = chat_body();
      body["prompt"] = "a";
      body["max_tokens"] = 400;
      body["stream"] = streaming;
      Raw raw(h.http->port());
      raw.send(post_text(path, body.dump()));
      CHECK(Harness::eventually([&] { return h.engine.running() == 1; }));
      h.service.drain(0);
      const std::string got = raw.read_until("\"draining\"}}");
      INFO(got);
      CHECK((streaming || got.rfind("HTTP/1.1 503", 0) == 0));
      CHECK(got.find("\"code\":\"draining\"") != std::string::npos);
      CHECK(got.find("[DONE]") == std::string::npos);
      CHECK(got.find("\"finish_reason\":\"c") == std::string::npos);
    }
  }
}

namespace {

// The reply's body, chunks joined, after any interim replies.
std::string body_of(const std::string& got) {
  size_t at = 0;
  while (got.compare(at, 12, "HTTP/1.1 100") == 0) at = got.find("\r\n\r\n", at) + 4;
  const size_t head = got.find("\r\n\r\n", at);
  REQUIRE(head != std::string::npos);
  if (got.substr(at, head - at).find("chunked") == std::string::npos) return got.substr(head + 4);
  std::string out;
  for (at = head + 4;;) {
    const size_t line = got.find("\r\n", at);
    REQUIRE(line != std::string::npos);
    const size_t size = std::stoul(got.substr(at, line - at), nullptr, 16);
    if (size == 0) return out;
    out += got.substr(line + 2, size);
    at = line + 2 + size + 2;
  }
}

}  // namespace

TEST_CASE("who closes only the sending half gets the whole reply, streamed or not, at once or in the middle") {
  for (const char* path : {"/v1/chat/completions", "/v1/completions"})
    for (const bool streaming : {false, true})
      for (const bool at_once : {true, false}) {
        INFO(path << (streaming ? " stream" : "") << (at_once ? " at once" : ""));
        Harness h;
        h.engine.endless = true;
        h.engine.pause = std::chrono::milliseconds(2);
        Json body = chat_body();
        body["prompt"] = "a";
        body["max_tokens"] = 100;
        body["stream"] = streaming;
        body["return_token_ids"] = true;
        Raw raw(h.http->port());
        raw.send(post_text(path, body.dump()));
        std::string got;
        if (!at_once) {
          if (streaming) got = raw.read_until("data: ");
          else CHECK(Harness::eventually([&] { return h.engine.running() == 1; }));
        }
        ::shutdown(raw.fd, SHUT_WR);
        got += raw.read_until("nothing like this: to the end of the connection");
        INFO(got);
        size_t ids = 0;
        if (streaming) {
          const auto events = sse_data(body_of(got));
          REQUIRE_FALSE(events.empty());
          CHECK(events.back() == "[DONE]");
          for (const std::string& e : events) {
            if (e[0] != '{') continue;
            const Json choice = Json::parse(e)["choices"][0];
            if (choice.contains("token_ids")) ids += choice["token_ids"].size();
          }
        } else {
          const Json reply = Json::parse(body_of(got));
          CHECK(reply["choices"][0]["finish_reason"].is_string());
          ids = reply["choices"][0]["token_ids"].size();
        }
        CHECK(ids == 100);
        CHECK(h.engine.cancelled() == 0);
      }
}

TEST_CASE("HTTP/1.0 knows no interim reply: closing the sending half before the reply ends the request without one") {
  Harness h;
  h.engine.endless = true;
  h.engine.pause = std::chrono::milliseconds(2);
  for (const char* path : {"/v1/chat/completions", "/v1/completions"})
    for (const bool streaming : {false, true}) {
      h.engine.hold = streaming;  // nothing is written before the close is seen
      Json body = chat_body();
      body["prompt"] = "a";
      body["max_tokens"] = 400;
      body["stream"] = streaming;
      std::string text = post_text(path, body.dump());
      text.replace(text.find("HTTP/1.1"), 8, "HTTP/1.0");
      Raw raw(h.http->port());
      raw.send(text);
      ::shutdown(raw.fd, SHUT_WR);
      CHECK(raw.read_until("\r\n") == "");  // 499 is for the books
      CHECK(Harness::eventually([&] { return h.engine.running() == 0 && !h.service.recent_requests().empty(); }));
      CHECK(h.service.recent_requests().front()->http_status == 499);
    }
}

TEST_CASE("Range is ignored, whatever it says") {
  Harness h;
  const std::string whole = h.get("/v1/models").text, page = h.get("/").text;
  for (const char* range : {"bytes=0-3", "bytes=5-2", "bytes=999999-", "bytes=-1,0-0,0-0,0-0", "bytes", "items=1-2", "", "bytes=a-b"})
    for (const char* name : {"Range", "rAnGe"}) {
      INFO(name << ": " << range);
      const httplib::Headers headers = {{name, range}, {"X-Last", "y"}};
      auto r = h.get("/v1/models", headers);
      CHECK(r.status == 200);
      CHECK(r.text == whole);
      CHECK(r.headers.count("Content-Range") == 0);
      r = h.get("/", headers);
      CHECK(r.status == 200);
      CHECK(r.text == page);
      CHECK(h.post("/v1/chat/completions", chat_body(), headers).status == 200);
      Json streaming = chat_body();
      streaming["stream"] = true;
      CHECK(sse_data(h.post("/v1/chat/completions", streaming, headers).text).back() == "[DONE]");
      CHECK(h.get("/v1/nowhere", headers).status == 404);
    }
  Raw raw(h.http->port());
  // First, twice, and followed by another request: nothing else is lost.
  raw.send("GET /version HTTP/1.1\r\nRange: bytes=9-1\r\nHost: x\r\nRange:x\r\n\r\nHEAD /version HTTP/1.1\r\nHost: x\r\n\r\n");
  const std::string got = raw.read_until("Accept-Ranges: none");
  CHECK(got.rfind("HTTP/1.1 200", 0) == 0);
  CHECK(got.find("Accept-Ranges: none") != std::string::npos);
}

TEST_CASE("a head that trickles in has one time limit, however often a byte comes") {
  HttpServer::Options o;
  o.head_seconds = 2;
  Harness h({}, o);
  for (const std::string& begin : {std::string("G"), std::string("GET /version HTTP/1.1\r\nHost: x\r\nX-Long: ")}) {
    Raw raw(h.http->port());
    raw.send(begin);
    std::string got;
    char buffer[4096];
    bool open = true;
    for (int i = 0; i < 1000 && open; ++i) {  // a byte each 20 ms: no single read is ever late
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      open = ::send(raw.fd, "a", 1, MSG_NOSIGNAL) == 1;
      const ssize_t n = ::recv(raw.fd, buffer, sizeof buffer, MSG_DONTWAIT);
      if (n > 0) got.append(buffer, static_cast<size_t>(n));
      if (n == 0) open = false;
    }
    INFO(got);
    CHECK_FALSE(open);
    CHECK(got.rfind("HTTP/1.1 408", 0) == 0);
    CHECK(got.find("\"request_timeout\"") != std::string::npos);
  }
  // A head in pieces that is in time, twice on one connection: the limit is for each request.
  Raw raw(h.http->port());
  for (int i = 0; i < 2; ++i) {
    for (const char* piece : {"GET /ver", "sion HTTP/1.1\r", "\nHost: x\r\n\r", "\n"}) {
      raw.send(piece);
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    CHECK(raw.read_until("\"version\"").rfind("HTTP/1.1 200", 0) == 0);
    std::this_thread::sleep_for(std::chrono::milliseconds(2200));
  }
}

TEST_CASE("a head without end is refused before it fills the memory") {
  Harness h;
  Raw raw(h.http->port());
  std::string head = "GET /version HTTP/1.1\r\n";
  while (head.size() < (128u << 10)) head += "X-More: " + std::string(1000, 'a') + "\r\n";
  raw.send(head);
  const std::string got = raw.read_until("}}");
  CHECK(got.rfind("HTTP/1.1 431", 0) == 0);
  CHECK(got.find("headers_too_large") != std::string::npos);
}

TEST_CASE("a body may be slow but not trickle") {
  HttpServer::Options o;
  o.body_grace_seconds = 2;
  o.body_bytes_a_second = 100;
  Harness h({}, o);
  const std::string text = chat_body().dump();
  {
    Raw raw(h.http->port());
    raw.send("POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n");
    std::string got;
    char buffer[4096];
    bool open = true;
    for (int i = 0; i < 1000 && open; ++i) {  // 50 bytes a second
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      open = ::send(raw.fd, " ", 1, MSG_NOSIGNAL) == 1;
      const ssize_t n = ::recv(raw.fd, buffer, sizeof buffer, MSG_DONTWAIT);
      if (n > 0) got.append(buffer, static_cast<size_t>(n));
      if (n == 0) open = false;
    }
    INFO(got);
    CHECK(got.rfind("HTTP/1.1 408", 0) == 0);
    CHECK(got.find("too slowly") != std::string::npos);
  }
  // Longer than the grace, and faster than the rate: 40,000 bytes in 40 pieces within some 2.4 s; each piece earns 10 s.
  Raw raw(h.http->port());
  const std::string filler(1000, ' ');
  raw.send("POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: " + std::to_string(40 * filler.size() + text.size()) +
           "\r\n\r\n" + filler);
  for (int i = 1; i < 40; ++i) {
    raw.send(filler);
    std::this_thread::sleep_for(std::chrono::milliseconds(60));
  }
  raw.send(text);
  CHECK(raw.read_until("\"finish_reason\"").rfind("HTTP/1.1 200", 0) == 0);
}

TEST_CASE("CORS headers only where an origin was given") {
  Harness plain;
  CHECK(plain.get("/health").headers.count("Access-Control-Allow-Origin") == 0);
  HttpServer::Options o;
  o.cors_origin = "https://example.org";
  Harness open({}, o);
  CHECK(open.get("/health").headers.find("Access-Control-Allow-Origin")->second == "https://example.org");
  CHECK(open.client().Options("/v1/chat/completions")->status == 204);
}

TEST_CASE("a port in use is said, not shared") {
  Harness h;
  HttpServer::Options o;
  o.port = h.http->port();
  HttpServer second(o);
  const Status s = second.start();
  CHECK(s.code() == Code::kUnavailable);
  CHECK(exit_code(s.code()) == 69);
  CHECK(s.message().find("in use") != std::string::npos);
  CHECK(s.message().find(std::to_string(o.port)) != std::string::npos);
}

TEST_CASE("a client that goes away ends its request: streaming, waiting for the whole, and queued") {
  Harness h;
  h.engine.endless = true;
  h.engine.pause = std::chrono::milliseconds(2);
  Json body = chat_body();
  body["max_tokens"] = 400;
  const auto gone = [&](int n) {
    return Harness::eventually([&] { return h.engine.cancelled() == n && h.engine.running() == 0 && h.service.live_requests().empty(); });
  };
  {
    Json streaming = body;
    streaming["stream"] = true;
    Raw raw(h.http->port());
    raw.send(post_text("/v1/chat/completions", streaming.dump()));
    raw.read_until("data: ");
    raw.close();
    CHECK(gone(1));
  }
  h.engine.pause = std::chrono::milliseconds(50);
  {
    Raw raw(h.http->port());
    raw.send(post_text("/v1/chat/completions", body.dump()));
    CHECK(Harness::eventually([&] { return h.engine.running() == 1; }));
    raw.close();
    CHECK(gone(2));
  }
  h.engine.hold = true;  // nothing is generated: as in the queue
  {
    Raw raw(h.http->port());
    raw.send(post_text("/v1/completions", Json{{"prompt", {"a", "b"}}, {"max_tokens", 400}, {"stream", true}}.dump()));
    CHECK(Harness::eventually([&] { return h.engine.running() == 2; }));
    raw.close();
    CHECK(gone(4));
  }
  {  // a client whose Expect was answered has seen an interim reply already
    std::string text = post_text("/v1/chat/completions", body.dump());
    text.insert(text.find("Host"), "Expect: 100-continue\r\n");
    Raw raw(h.http->port());
    raw.send(text);
    CHECK(Harness::eventually([&] { return h.engine.running() == 1; }));
    raw.read_until("100 Continue\r\n\r\n");
    raw.close();
    CHECK(gone(5));
  }
  // They are in the books as what they were.
  const auto recent = h.service.recent_requests();
  REQUIRE(recent.size() == 5);
  for (const auto& r : recent) {
    CHECK(r->finish == "cancelled");
    CHECK(r->http_status == 499);
  }
}
