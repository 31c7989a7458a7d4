// Errors as OpenAI's clients read them: {"error": {"message", "type", "param", "code"}}, code always a string or null.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "base/status.h"

namespace ddtree {

struct HttpResponse;

struct ApiError {
  int status = 400;
  std::string type = "invalid_request_error";
  std::string code;   // empty: null
  std::string param;  // empty: null
  std::string message;
  int retry_after = 0;                                       // seconds, 0: no header
  std::vector<std::pair<std::string, int64_t>> numbers;      // extra members of "error", such as n_ctx
  std::vector<std::pair<std::string, std::string>> strings;  // extra members, such as phase

  std::string json() const;  // the body, valid UTF-8 whatever the message holds
};

ApiError invalid_value(std::string param, std::string message);
ApiError unsupported(std::string param, std::string message);
// 503: the engine ended the request because the server stops, or restarts its engine after a fault.
ApiError interrupted(bool stopping);
ApiError client_gone();  // 499: for the books; the connection is closed without a reply
// What the engine's submit() said, in the client's terms. Never a 500 for the request's own faults.
ApiError from_status(const Status& status);

void send_error(HttpResponse& response, const ApiError& error);

}  // namespace ddtree
