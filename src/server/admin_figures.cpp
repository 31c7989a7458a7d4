// Figures over the history: the time line, percentiles, acceptance by what it depends on, and starts and smoke runs side by side.
#include <fmt/core.h>

#include "server/admin_parts.h"
#include "server/history_compare.h"

namespace ddtree::admin {

namespace {

constexpr size_t kCompared = 6;  // side by side; more would not fit a screen

void timeline_route(Store& store, Admin& admin, const HttpRequest& request, HttpResponse& response) {
  Paging paging;
  ApiError error;
  constexpr int32_t kMost = 100;  // each start's phases are a query of their own
  if (!read_paging(request, 25, &paging, &error, kMost)) return send_error(response, error);
  auto timeline = timeline_json(store, paging, admin.service.run_id());
  if (!timeline) return send_error(response, from_status(timeline.status()));
  send_json(response, *timeline);
}

void compare_runs_route(Store& store, Admin& admin, const HttpRequest& request, HttpResponse& response) {
  std::vector<int64_t> ids;
  ApiError error;
  if (!read_ids(request, "ids", 2, kCompared, &ids, &error)) return send_error(response, error);
  std::vector<RunFigures> runs;
  for (const int64_t id : ids) {
    auto figures = read_run_figures(store, id);
    if (!figures) return send_error(response, from_status(figures.status()));
    if (!figures->has_value()) return send_not_found(response, fmt::format("there is no start {} in the history", id));
    runs.push_back(std::move(**figures));
  }
  send_json(response, compare_runs_json(runs, admin.service.run_id()));
}

void compare_smoke_route(Store& store, Admin&, const HttpRequest& request, HttpResponse& response) {
  std::vector<int64_t> ids;
  ApiError error;
  if (!read_ids(request, "ids", 2, kCompared, &ids, &error)) return send_error(response, error);
  std::vector<SmokeRun> runs;
  for (const int64_t id : ids) {
    auto run = store.smoke_run(id);
    if (!run) return send_error(response, from_status(run.status()));
    if (!run->has_value()) return send_not_found(response, fmt::format("there is no smoke run {}", id));
    runs.push_back(std::move(**run));
  }
  send_json(response, compare_smoke_json(runs));
}

void summary_route(Store& store, Admin&, const HttpRequest& request, HttpResponse& response) {
  RequestFilter filter;
  ApiError error;
  if (!read_filter(request, &filter, &error)) return send_error(response, error);
  auto summary = store.request_summary(filter);
  if (!summary) return send_error(response, from_status(summary.status()));
  send_json(response, summary_json(*summary));
}

void acceptance_route(Store& store, Admin&, const HttpRequest& request, HttpResponse& response) {
  RequestFilter filter;
  ApiError error;
  if (!read_filter(request, &filter, &error)) return send_error(response, error);
  auto breakdown = store.acceptance(filter);
  if (!breakdown) return send_error(response, from_status(breakdown.status()));
  send_json(response, acceptance_json(*breakdown));
}

}  // namespace

void register_figure_routes(HttpServer& server, const std::shared_ptr<Admin>& admin) {
  const auto with = [&](const char* pattern, Parameters takes, void (*handler)(Store&, Admin&, const HttpRequest&, HttpResponse&)) {
    route(server, "GET", pattern, std::move(takes), [admin, handler](const HttpRequest& request, HttpResponse& response) {
      Store* store = admin->service.store();
      if (!store) return send_error(response, no_store(admin->service));
      handler(*store, *admin, request, response);
    });
  };
  with("/admin/api/timeline", kPaging, timeline_route);
  with("/admin/api/runs/compare", {"ids"}, compare_runs_route);
  with("/admin/api/smoke/compare", {"ids"}, compare_smoke_route);
  with("/admin/api/requests/summary", kFilter, summary_route);
  with("/admin/api/acceptance", kFilter, acceptance_route);
}

}  // namespace ddtree::admin
