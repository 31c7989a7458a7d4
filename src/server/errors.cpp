#include "server/errors.h"

#include <nlohmann/json.hpp>

#include "server/http_server.h"
#include "server/json.h"

namespace ddtree {

std::string ApiError::json() const {
  nlohmann::ordered_json e;
  e["message"] = message;
  e["type"] = type;
  e["param"] = param.empty() ? nlohmann::ordered_json() : nlohmann::ordered_json(param);
  e["code"] = code.empty() ? nlohmann::ordered_json() : nlohmann::ordered_json(code);
  for (const auto& [name, value] : numbers) e[name] = value;
  for (const auto& [name, value] : strings) e[name] = value;
  nlohmann::ordered_json body;
  body["error"] = std::move(e);
  return dump_json(body);
}

ApiError invalid_value(std::string param, std::string message) {
  ApiError e;
  e.code = "invalid_value";
  e.param = std::move(param);
  e.message = std::move(message);
  return e;
}

ApiError unsupported(std::string param, std::string message) {
  ApiError e;
  e.code = "unsupported_parameter";
  e.param = std::move(param);
  e.message = std::move(message);
  return e;
}

ApiError interrupted(bool stopping) {
  ApiError e;
  e.status = 503;
  e.type = "server_error";
  e.code = stopping ? "draining" : "unhealthy";
  e.message = stopping ? "the server stops, and this answer was not finished in the time it had for that; send the request again"
                       : "the engine is restarted after a fault, and this answer was not finished; send the request again";
  e.retry_after = 10;
  if (stopping) e.strings.emplace_back("phase", "draining");
  return e;
}

ApiError client_gone() {
  ApiError e;
  e.status = 499;
  e.code = "client_closed_request";
  e.message = "the client closed its connection (with HTTP/1.0: its sending half) before the reply";
  return e;
}

ApiError from_status(const Status& status) {
  ApiError e;
  e.message = status.message();
  switch (status.code()) {
    case Code::kInvalidArgument:
    case Code::kUsage:
    case Code::kDoesNotFit: e.code = "invalid_value"; break;
    case Code::kTemporary:
      e.status = 429;
      e.type = "rate_limit_error";
      e.code = "server_overloaded";
      e.retry_after = 1;
      break;
    case Code::kStorage:
    case Code::kUnavailable:
      e.status = 503;
      e.type = "server_error";
      e.code = "unhealthy";
      e.retry_after = 5;
      break;
    default:
      e.status = 500;
      e.type = "server_error";
      e.code = "engine_fault";
  }
  return e;
}

void send_error(HttpResponse& response, const ApiError& error) {
  response.status = error.status;
  response.content_type = "application/json";
  response.body = error.json();
  response.stream = nullptr;
  if (error.retry_after > 0) response.set_header("Retry-After", std::to_string(error.retry_after));
  if (error.status == 401) response.set_header("WWW-Authenticate", "Bearer");
}

}  // namespace ddtree
