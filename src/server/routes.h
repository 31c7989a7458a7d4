// Registration of the OpenAI routes, one function a file, and what they share.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "server/errors.h"
#include "server/http_server.h"
#include "server/service.h"

namespace ddtree {

void register_model_routes(HttpServer& server, Service& service);       // /v1/models, /version
void register_chat_routes(HttpServer& server, Service& service);        // /v1/chat/completions
void register_completion_routes(HttpServer& server, Service& service);  // /v1/completions
void register_tokenize_routes(HttpServer& server, Service& service);    // /tokenize, /detokenize
void register_health_routes(HttpServer& server, Service& service);      // /health, /livez, /readyz, /startupz
void register_metrics_route(HttpServer& server, Service& service);      // /metrics

// The chat route as a function: the smoke test asks through it (HttpRequest::own).
void answer_chat(Service& service, const HttpRequest& request, HttpResponse& response);

// All of them and the dashboard's.
void register_routes(HttpServer& server, Service& service);

// What answers this request now, or the 503 that says why nothing does.
std::shared_ptr<const Serving> serving_or_error(Service& service, ApiError* error);
// 503 with the phase while not ready or draining; nullopt when the service may be used.
std::optional<ApiError> not_ready(Service& service);

// The model a request names: empty and every served name are fine, anything else is a 404.
std::optional<ApiError> check_model(const Serving& serving, const std::string& name);

// A mode that the loaded pair cannot run, asked for by name.
std::optional<ApiError> check_speculation(const Serving& serving, const Request& request);
// Why the engine did not take a request: a full queue is a 429, draining a 503.
ApiError submit_error(Service& service, const Status& status);

// Fills in max_tokens and checks that the prompt leaves room: context_length_exceeded with both numbers. `param`: "messages" or "prompt".
std::optional<ApiError> fit_context(const Serving& serving, const char* param, int32_t max_tokens, Request* request);

}  // namespace ddtree
