#include "health/phases.h"
#include "server/history_keeper.h"
#include "server/json.h"
#include "server/routes.h"

namespace ddtree {

namespace {

Json state_json(Service& service) {
  const PhaseState s = service.phases().state();
  const EngineSnapshot e = service.snapshot();
  Json out{{"status", s.phase == Phase::kDegraded              ? "degraded"
                      : service.ready() && !service.draining() ? "ok"
                                                               : "unavailable"},
           {"phase", phase_name(s.phase)},
           {"message", s.sentence()},
           {"reason", s.reason},
           {"progress", s.progress >= 0 ? Json(s.progress) : Json()},
           {"since_ms", s.since_ms},
           {"ready_since_ms", s.ready_since_ms},
           {"smoke", smoke_state_name(s.smoke)},
           {"running", e.running},
           {"waiting", e.waiting},
           {"tokens_per_round", e.acceptance_1m},
           {"decode_tokens_per_second", e.decode_tps_1m}};
  // The answers do not depend on the history, so a disk that refuses it makes nothing unready; whoever looks should know all the same.
  if (service.history().wanted()) {
    const StoreHealth h = service.history().health();
    out["history"] = Json{
        {"writable", h.writable}, {"message", h.message}, {"failing_since_ms", h.failing_since_ms ? Json(h.failing_since_ms) : Json()}};
  }
  if (service.smoke_skipped())
    out["warning"] = "the smoke test was skipped (--skip-smoke): nothing has shown that this model writes sensible text";
  return out;
}

void answer(Service& service, bool good, HttpResponse& response) {
  response.status = good ? 200 : 503;
  if (!good) response.set_header("Retry-After", std::to_string(service.retry_after()));
  response.set_header("Cache-Control", "no-store");
  response.body = dump_json(state_json(service));
}

}  // namespace

void register_health_routes(HttpServer& server, Service& service) {
  const auto ready = [&service](const HttpRequest&, HttpResponse& response) {
    answer(service, service.ready() && !service.draining(), response);
  };
  server.route("GET", "/health", Access::kOpen, ready);
  server.route("GET", "/readyz", Access::kOpen, ready);
  server.route("GET", "/livez", Access::kOpen,
               [&service](const HttpRequest&, HttpResponse& response) { answer(service, service.alive(), response); });
  server.route("GET", "/startupz", Access::kOpen,
               [&service](const HttpRequest&, HttpResponse& response) { answer(service, service.started(), response); });
}

}  // namespace ddtree
