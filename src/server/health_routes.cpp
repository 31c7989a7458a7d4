#include "health/phases.h"
#include "server/errors.h"
#include "server/history_keeper.h"
#include "server/json.h"
#include "server/routes.h"
#include "server/watcher.h"
#include "store/store.h"

namespace ddtree {

namespace {

constexpr double kCanaryPatience = 30;  // seconds that /health_generate waits,
constexpr double kBusyPatience = 10;    // and where the engine gets on with others' requests

Json canary_json(const CanaryState& c) {
  return Json{{"verdict", !c.ran     ? "not run"
                          : c.passed ? "pass"
                                     : "fail"},
              {"at_ms", c.ran ? Json(c.at_ms) : Json()},
              {"mode", c.ran ? Json(mode_name(c.mode)) : Json()},
              {"tokens_per_second", c.tokens_per_second},
              {"tokens_per_round", c.tokens_per_round},
              {"reason", c.reason}};
}

Json state_json(Service& service) {
  const PhaseState s = service.phases().state();
  const EngineSnapshot e = service.snapshot();
  const LadderState ladder = service.ladder();
  const double still = service.watcher().still_seconds();
  Json out{
      {"status", !service.alive()                         ? "unavailable"
                 : s.phase == Phase::kDegraded            ? "degraded"
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
      {"decode_tokens_per_second", e.decode_tps_1m},
      {"seconds_without_a_pass", still},
      // Before the engine is there nobody knows the mode: without the flag the pair decides.
      {"ladder", ladder.steps.empty() ? Json() : Json{{"step", ladder.step}, {"mode", mode_name(ladder.most)}, {"reason", ladder.reason}}},
      {"canary", canary_json(service.watcher().canary())}};
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
    answer(service, service.ready() && !service.draining() && service.alive(), response);
  };
  server.route("GET", "/health", Access::kOpen, ready);
  server.route("GET", "/readyz", Access::kOpen, ready);
  server.route("GET", "/livez", Access::kOpen,
               [&service](const HttpRequest&, HttpResponse& response) { answer(service, service.alive(), response); });
  server.route("GET", "/startupz", Access::kOpen,
               [&service](const HttpRequest&, HttpResponse& response) { answer(service, service.started(), response); });
  // Text is the only proof: a known request, answered now. Probes that come together share one.
  server.route("GET", "/health_generate", Access::kOpen, [&service](const HttpRequest&, HttpResponse& response) {
    if (auto e = not_ready(service)) {
      send_error(response, *e);
      return response.set_header("Cache-Control", "no-store");
    }
    const CanaryState c = service.watcher().canary_now(kCanaryPatience, kBusyPatience);
    const PhaseState s = service.phases().state();
    const bool good = c.busy || (c.ran && !c.running && c.passed);
    response.status = good ? 200 : 503;
    if (!good) response.set_header("Retry-After", std::to_string(service.retry_after()));
    response.set_header("Cache-Control", "no-store");
    Json out = canary_json(c);
    if (c.running || !c.ran) out["verdict"] = c.busy ? "busy" : "no answer";
    out["text"] = c.text;
    out["phase"] = phase_name(s.phase);
    out["message"] = s.sentence();
    response.body = dump_json(out);
  });
}

}  // namespace ddtree
