#include "server/routes.h"

#include <fmt/core.h>

#include <algorithm>

#include "health/phases.h"
#include "server/admin.h"

namespace ddtree {

void register_routes(HttpServer& server, Service& service) {
  register_model_routes(server, service);
  register_chat_routes(server, service);
  register_completion_routes(server, service);
  register_tokenize_routes(server, service);
  register_health_routes(server, service);
  register_metrics_route(server, service);
  register_admin_routes(server, service);
}

std::optional<ApiError> not_ready(Service& service) {
  if (service.ready() && !service.draining() && service.alive()) return {};
  const PhaseState state = service.phases().state();
  ApiError e;
  e.status = 503;
  e.type = "server_error";
  e.code = service.draining() ? "draining" : state.phase == Phase::kFailed || state.serving() ? "unhealthy" : "loading";
  e.message = state.sentence();
  e.retry_after = service.retry_after();
  e.strings = {{"phase", phase_name(state.phase)}};
  return e;
}

std::shared_ptr<const Serving> serving_or_error(Service& service, ApiError* error) {
  if (auto e = not_ready(service)) {
    *error = std::move(*e);
    return nullptr;
  }
  auto serving = service.serving();
  if (!serving) {
    error->status = 503;
    error->type = "server_error";
    error->code = "loading";
    error->message = "the model is not loaded";
    error->retry_after = service.retry_after();
  }
  return serving;
}

std::optional<ApiError> check_model(const Serving& serving, const std::string& name) {
  const auto& names = serving.info.names;
  if (name.empty() || std::find(names.begin(), names.end(), name) != names.end()) return {};
  ApiError e;
  e.status = 404;
  e.code = "model_not_found";
  e.param = "model";
  std::string known;
  for (const auto& n : names) known += (known.empty() ? "\"" : ", \"") + n + "\"";
  e.message = fmt::format("the model \"{}\" is not served here; this server has {}", name.substr(0, 200), known);
  return e;
}

std::optional<ApiError> check_speculation(const Serving& serving, const Request& request) {
  if (!request.mode) return {};
  const bool blocks = *request.mode == SpeculationMode::kDflash || *request.mode == SpeculationMode::kDdtree;
  if (blocks ? serving.info.has_drafter : *request.mode == SpeculationMode::kNextn ? serving.info.has_mtp : true) return {};
  return invalid_value("speculative_algorithm",
                       fmt::format("speculative_algorithm {} needs {}, which this server has not loaded; NONE{} works",
                                   mode_name(*request.mode), blocks ? "a DFlash drafter" : "an MTP head",
                                   serving.info.has_drafter ? ", DFLASH or DDTREE"
                                   : serving.info.has_mtp   ? " or NEXTN"
                                                            : ""));
}

ApiError submit_error(Service& service, const Status& status) {
  if (status.code() == Code::kTemporary && service.draining())
    if (auto e = not_ready(service)) return *e;
  return from_status(status);
}

std::optional<ApiError> fit_context(const Serving& serving, const char* param, int32_t max_tokens, Request* request) {
  const int64_t context = serving.info.context_length;
  const int64_t prompt = static_cast<int64_t>(request->prompt.size());
  if (prompt >= context) {
    ApiError e;
    e.code = "context_length_exceeded";
    e.param = param;
    e.message = fmt::format(
        "This model's maximum context length is {} tokens. However, your {} resulted in {} tokens, which leaves no room for an answer. "
        "Please shorten it.",
        context, param, prompt);
    e.numbers = {{"n_prompt_tokens", prompt}, {"n_ctx", context}};
    return e;
  }
  // A larger max_tokens than the context has room for is no error: the answer then ends with "length" where the context does.
  const int64_t room = context - prompt;
  request->max_tokens = static_cast<int32_t>(max_tokens > 0 ? std::min<int64_t>(max_tokens, room) : room);
  if (request->min_tokens > request->max_tokens) request->min_tokens = request->max_tokens;
  return {};
}

}  // namespace ddtree
