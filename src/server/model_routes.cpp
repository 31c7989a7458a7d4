#include "health/phases.h"
#include "server/json.h"
#include "server/routes.h"

namespace ddtree {

namespace {

Json model_json(const ModelInfo& info, const std::string& name) {
  return Json{{"id", name},
              {"object", "model"},
              {"created", info.created},
              {"owned_by", "ddtree"},
              {"root", info.path},
              {"parent", nullptr},
              {"max_model_len", info.context_length},
              {"meta", Json{{"n_ctx", info.context_length},
                            {"n_vocab", info.vocab_size},
                            {"n_embd", info.hidden_size},
                            {"n_layer", info.layers},
                            {"n_params", info.parameters},
                            {"architecture", info.architecture},
                            {"drafter", info.has_drafter},
                            {"mtp", info.has_mtp},
                            {"backend", info.backend}}}};
}

}  // namespace

void register_model_routes(HttpServer& server, Service& service) {
  // 503 until the smoke suite passed: a list that answers is what load balancers and units take for "ready".
  server.route("GET", "/v1/models", Access::kKey, [&service](const HttpRequest&, HttpResponse& response) {
    ApiError error;
    const auto serving = serving_or_error(service, &error);
    if (!serving) return send_error(response, error);
    Json list = Json::array();
    for (const std::string& name : serving->info.names) list.push_back(model_json(serving->info, name));
    Json body{{"object", "list"}, {"data", std::move(list)}};
    if (service.smoke_skipped()) body["smoke"] = "skipped";
    response.body = dump_json(body);
  });
  // Names may hold slashes ("org/model", "/srv/models/x").
  server.route("GET", "/v1/models/{id*}", Access::kKey, [&service](const HttpRequest& request, HttpResponse& response) {
    ApiError error;
    const auto serving = serving_or_error(service, &error);
    if (!serving) return send_error(response, error);
    std::string id = request.parameters.at("id");
    // A name that begins with a slash loses it in the path.
    for (const std::string& name : serving->info.names)
      if (name == "/" + id) id = name;
    if (auto e = check_model(*serving, id)) return send_error(response, *e);
    response.body = dump_json(model_json(serving->info, id));
  });
  server.route("GET", "/version", Access::kKey, [](const HttpRequest&, HttpResponse& response) {
    response.body = dump_json(Json{{"version", DDTREE_VERSION}, {"name", "ddtree"}});
  });
}

}  // namespace ddtree
