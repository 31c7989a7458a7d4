// The real routes over a scripted engine, on a free port of the loopback.
#pragma once

#include <httplib.h>

#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "scripted_engine.h"
#include "server/http_server.h"
#include "server/routes.h"
#include "server/service.h"
#include "text/chat_template.h"

namespace ddtree::test {

using Json = nlohmann::ordered_json;

struct Harness {
  explicit Harness(ServiceOptions options = {}, HttpServer::Options http_options = {}, bool ready = true) : service(std::move(options)) {
    auto parsed = ChatTemplate::parse(std::string(*embedded_file("models/tiny/target/chat_template.jinja")));
    if (!parsed) throw std::runtime_error(parsed.status().message());
    chat_template.emplace(std::move(*parsed));
    http_options.port = 0;
    http = std::make_unique<HttpServer>(http_options);
    register_routes(*http, service);
    if (Status s = http->start(); !s.ok()) throw std::runtime_error(s.message());
    if (ready) make_ready();
  }
  ~Harness() {
    service.drain(0);
    http->stop();
  }

  void make_ready() {
    auto serving = std::make_shared<Serving>();
    serving->info.name = "tiny";
    serving->info.names = {"tiny", "org/alias"};
    serving->info.path = "embedded:tiny";
    serving->info.context_length = engine.settings.context_length;
    serving->info.block_size = 16;
    serving->engine = &engine;
    serving->tokenizer = &tiny_tokenizer();
    serving->chat_template = &*chat_template;
    serving->reasoning_parser = "qwen3";
    serving->tool_parser = "qwen3_coder";
    serving->defaults.do_sample = true;
    serving->defaults.temperature = 0.6f;
    serving->defaults.top_k = 20;
    serving->defaults.top_p = 0.95f;
    service.adopt(serving);
  }

  httplib::Client client() const {
    httplib::Client c("127.0.0.1", http->port());
    c.set_read_timeout(20);
    return c;
  }

  struct Reply {
    int status = 0;
    Json body;
    std::string text;
    httplib::Headers headers;
  };
  static Reply reply_of(const httplib::Result& r) {
    Reply out;
    if (!r) throw std::runtime_error("no reply: " + httplib::to_string(r.error()));
    out.status = r->status;
    out.text = r->body;
    out.headers = r->headers;
    out.body = Json::parse(r->body, nullptr, false);
    return out;
  }
  Reply post(const std::string& path, const Json& body, const httplib::Headers& headers = {}) const {
    return post_text(path, body.dump(), headers);
  }
  Reply post_text(const std::string& path, const std::string& body, const httplib::Headers& headers = {}) const {
    return reply_of(client().Post(path, headers, body, "application/json"));
  }
  Reply get(const std::string& path, const httplib::Headers& headers = {}) const { return reply_of(client().Get(path, headers)); }

  // Waits for a condition that another thread brings about; how long it takes decides nothing but a hang.
  template <class F>
  static bool eventually(F&& f) {
    for (int i = 0; i < 2000; ++i) {
      if (f()) return true;
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    return false;
  }

  ScriptedEngine engine;
  std::optional<ChatTemplate> chat_template;
  Service service;
  std::unique_ptr<HttpServer> http;
};

inline Json chat_body(const std::string& text = "Say hello to Carol.") {
  return Json{{"model", "tiny"}, {"messages", Json::array({Json{{"role", "user"}, {"content", text}}})}};
}

// The events of a stream, [DONE] and comments included as strings.
inline std::vector<std::string> sse_data(const std::string& text) {
  std::vector<std::string> out;
  size_t at = 0;
  while (at < text.size()) {
    const size_t end = text.find("\n\n", at);
    const std::string frame = text.substr(at, end == std::string::npos ? std::string::npos : end - at);
    out.push_back(frame.rfind("data: ", 0) == 0 ? frame.substr(6) : frame);
    if (end == std::string::npos) break;
    at = end + 2;
  }
  return out;
}

}  // namespace ddtree::test
