// Smoke runs: the list, one of them, and "run now".
#include <fmt/core.h>

#include <charconv>
#include <map>

#include "base/log.h"
#include "health/phases.h"
#include "health/smoke.h"
#include "server/admin_parts.h"

namespace ddtree::admin {

SmokeJob::~SmokeJob() {
  // The engine's drain cancels the run's request, so this does not wait for a whole suite.
  if (thread_.joinable()) thread_.join();
}

bool SmokeJob::start() {
  const std::lock_guard lock(mutex_);
  if (started_ms_ != 0) return false;
  if (thread_.joinable()) thread_.join();  // the run before: ended
  started_ms_ = now_ms();
  last_error_.clear();
  thread_ = std::thread([this] {
    const Status status = service_.run_smoke_now();
    const std::lock_guard inner(mutex_);
    started_ms_ = 0;
    // A failed check is a result, kept with the run; only a suite that could not run has nowhere else to say so.
    if (!status.ok() && status.code() != Code::kEngineFault) last_error_ = status.message();
  });
  return true;
}

int64_t SmokeJob::running_since() const {
  const std::lock_guard lock(mutex_);
  return started_ms_;
}

std::string SmokeJob::last_error() const {
  const std::lock_guard lock(mutex_);
  return last_error_;
}

Json smoke_running_json(Admin& admin) {
  if (const int64_t since = admin.smoke.running_since()) return Json{{"started", since}};
  const PhaseState state = admin.service.phases().state();
  if (state.phase == Phase::kSmoke) return Json{{"started", state.since_ms}};
  return Json();
}

Json smoke_json(const SmokeRun& run) {
  static const auto* const what = [] {
    auto* map = new std::map<std::string, std::string>;
    for (const SmokeCheckInfo& check : smoke_check_list()) (*map)[check.name] = check.what;
    return map;
  }();
  Json checks = Json::array();
  for (const SmokeCheck& c : run.checks) {
    const auto it = what->find(c.name);
    checks.push_back(Json{{"name", c.name},
                          {"what", it == what->end() ? "" : it->second},
                          {"mode", c.mode},
                          {"verdict", c.verdict},
                          {"input_id", c.input_id},
                          {"output", c.output},
                          {"figure", c.unit.empty() ? Json() : Json(c.figure)},
                          {"unit", c.unit},
                          {"ms", c.ms},
                          {"message", c.message}});
  }
  Json before;
  if (run.before_runs > 0) {
    before = Json{{"runs", run.before_runs},
                  {"tokens_per_second", run.before_tokens_per_second > 0 ? Json(run.before_tokens_per_second) : Json()},
                  {"tokens_per_round", run.before_acceptance > 0 ? Json(run.before_acceptance) : Json()}};
  }
  return Json{{"id", run.id},
              {"run_id", run.run_id},
              {"trigger", run.trigger},
              {"started", run.started_ms},
              {"finished", run.finished_ms ? Json(run.finished_ms) : Json()},
              {"verdict", run.verdict},
              {"version", run.version},
              {"model", run.model},
              {"drafter", run.drafter},
              {"subject", run.subject},
              {"mode", run.mode},
              {"previous_version", run.previous_version.empty() ? Json() : Json(run.previous_version)},
              {"message", run.message},
              {"warning", run.warning},
              {"tokens_per_second", run.tokens_per_second > 0 ? Json(run.tokens_per_second) : Json()},
              {"tokens_per_round", run.acceptance > 0 ? Json(run.acceptance) : Json()},
              {"before", std::move(before)},
              {"checks", std::move(checks)}};
}

namespace {

// A page elsewhere cannot send JSON here without the browser asking first (which is never granted), and says so in Sec-Fetch-Site.
bool from_own_page(const HttpRequest& request, ApiError* error) {
  const std::string site = request.header("Sec-Fetch-Site");
  if (!site.empty() && site != "same-origin" && site != "none") {
    error->status = 403;
    error->code = "cross_site";
    error->message = fmt::format("a page of another site (Sec-Fetch-Site: {}) may not start a smoke test", site);
    return false;
  }
  if (!request.header("Content-Type").starts_with("application/json")) {
    error->status = 415;
    error->code = "unsupported_media_type";
    error->message = fmt::format("Content-Type is \"{}\", but must be application/json", request.header("Content-Type"));
    return false;
  }
  return true;
}

}  // namespace

void register_smoke_admin_routes(HttpServer& server, const std::shared_ptr<Admin>& admin) {
  route(server, "GET", "/admin/api/smoke", kPaging, [admin](const HttpRequest& request, HttpResponse& response) {
    Paging paging;
    ApiError error;
    if (!read_paging(request, 20, &paging, &error)) return send_error(response, error);
    Json list = Json::array();
    int64_t total = 0;
    if (Store* store = admin->service.store()) {
      const auto page = store->smoke_runs(paging);
      if (!page.ok()) return send_error(response, from_status(page.status()));
      for (const SmokeRun& run : page->rows) list.push_back(smoke_json(run));
      total = page->total;
    }
    send_json(response, Json{{"total", total},
                             {"offset", paging.offset},
                             {"limit", paging.limit},
                             {"running", smoke_running_json(*admin)},
                             {"last_error", admin->smoke.last_error()},
                             {"runs", std::move(list)}});
  });

  route(server, "GET", "/admin/api/smoke/{id}", {}, [admin](const HttpRequest& request, HttpResponse& response) {
    const std::string& text = request.parameters.at("id");
    int64_t id = 0;
    const auto [end, code] = std::from_chars(text.data(), text.data() + text.size(), id);
    Store* store = admin->service.store();
    if (code != std::errc() || end != text.data() + text.size() || !store)
      return send_not_found(response, fmt::format("there is no smoke run {}", text));
    const auto run = store->smoke_run(id);
    if (!run.ok()) return send_error(response, from_status(run.status()));
    if (!run->has_value()) return send_not_found(response, fmt::format("there is no smoke run {}", text));
    send_json(response, smoke_json(**run));
  });

  route(server, "POST", "/admin/api/smoke/run", {}, [admin](const HttpRequest& request, HttpResponse& response) {
    secure(response);
    ApiError error;
    if (!from_own_page(request, &error)) return send_error(response, error);
    if (!admin->service.serving() || admin->service.draining()) {
      error.status = 503;
      error.type = "server_error";
      error.code = "loading";
      error.message = "no model is loaded that could be tested: " + admin->service.phases().state().sentence();
      error.retry_after = admin->service.retry_after();
      return send_error(response, error);
    }
    const int64_t begun = now_ms();
    if (!smoke_running_json(*admin).is_null() || !admin->smoke.start()) {
      error.status = 409;
      error.code = "smoke_running";
      error.message = "a smoke test is running; its result will be in the list";
      return send_error(response, error);
    }
    log::info("smoke test asked for by {}", request.remote);
    response.status = 202;
    response.body = dump_json(Json{{"started", begun}});
  });
}

}  // namespace ddtree::admin
