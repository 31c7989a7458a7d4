// Any OpenAI-compatible server as what the smoke suite asks: streamed chat completions, read as strictly as clients read them. Where the
// bytes come from is the transport's: a socket, or this process's own routes.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "health/subject.h"

namespace ddtree {

class Service;

struct TransportReply {
  int status = 0;            // 0: no reply at all
  std::string content_type;  // lower case, without parameters
  std::string error;         // the connection failed or broke off; empty: the body is whole
  bool timed_out = false, cancelled = false;
  bool unreachable = false;  // no connection was made
  int retry_after = 0;
};

class SmokeTransport {
 public:
  virtual ~SmokeTransport() = default;
  using OnBytes = std::function<void(std::string_view)>;  // body bytes as they come
  virtual TransportReply get(const std::string& path, const SmokeLimit& limit, const OnBytes& on_bytes) = 0;
  virtual TransportReply post(const std::string& path, const std::string& body, const SmokeLimit& limit, const OnBytes& on_bytes) = 0;
};

// Over a socket. `url`: "http://host[:port][/path]", with or without a last "/v1". kUsage: not such a URL; kUnavailable: https, and this
// build has no TLS.
Result<std::unique_ptr<SmokeTransport>> http_transport(const std::string& url, const std::string& api_key);
// Straight into this service's chat route, also before it is ready; leaves no row in the history. The service outlives it.
std::unique_ptr<SmokeTransport> local_transport(Service& service);

struct OpenAiOptions {
  std::string model;           // empty: the first that the server lists
  int32_t context_length = 0;  // 0: as the server says
};

class OpenAiSubject final : public SmokeSubject {
 public:
  OpenAiSubject(std::unique_ptr<SmokeTransport> transport, OpenAiOptions options);

  // Asks /v1/models what is there. kTemporary: nobody answers, or not yet (503); kUsage: the key or the model is not the server's.
  Status connect(const SmokeLimit& limit);
  const std::string& model() const { return options_.model; }
  bool embedded_pair() const { return embedded_; }  // a ddtree that serves its demo pair
  // What an answer said about the request's own key, model or path, with kUsage; ok: nothing. Nothing else is worth asking then.
  const Status& misuse() const { return misuse_; }

  const SmokeAbilities& abilities() const override { return abilities_; }
  SmokeAnswer ask(const SmokeQuestion& question, const SmokeLimit& limit) override;

 private:
  struct Reading;
  SmokeAnswer once(const SmokeQuestion& question, const SmokeLimit& limit, TransportReply* reply);
  std::string body_of(const SmokeQuestion& question) const;

  std::unique_ptr<SmokeTransport> transport_;
  OpenAiOptions options_;
  SmokeAbilities abilities_;
  Status misuse_;
  bool ddtree_ = false, embedded_ = false;
  bool extras_ = true;              // fields beside OpenAI's: chat_template_kwargs
  bool completion_tokens_ = false;  // max_completion_tokens in place of max_tokens
};

}  // namespace ddtree
