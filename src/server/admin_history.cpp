// What has been: the runs of the service, finished requests with their draft trees, and the exports.
#include <fmt/core.h>

#include <algorithm>
#include <charconv>
#include <iterator>
#include <set>

#include "server/admin_parts.h"
#include "server/recorder.h"

namespace ddtree::admin {

namespace {

void runs_route(Admin& admin, const HttpRequest& request, HttpResponse& response) {
  Paging paging;
  ApiError error;
  if (!read_paging(request, 50, &paging, &error)) return send_error(response, error);
  Store* store = admin.service.store();
  if (!store) return send_error(response, no_store(admin.service));
  const auto page = store->runs(paging);
  if (!page.ok()) return send_error(response, from_status(page.status()));
  Json list = Json::array();
  for (const ServiceRun& run : page->rows) list.push_back(run_json(run, admin.service.run_id()));
  send_json(response, Json{{"total", page->total}, {"offset", paging.offset}, {"limit", paging.limit}, {"runs", std::move(list)}});
}

void run_route(Admin& admin, const HttpRequest& request, HttpResponse& response) {
  Store* store = admin.service.store();
  if (!store) return send_error(response, no_store(admin.service));
  const std::string& text = request.parameters.at("id");
  int64_t id = 0;
  const auto [end, code] = std::from_chars(text.data(), text.data() + text.size(), id);
  const std::string unknown = fmt::format("there is no start {} in the history", text);
  if (code != std::errc() || end != text.data() + text.size()) return send_not_found(response, unknown);
  const auto run = store->run(id);
  if (!run.ok()) return send_error(response, from_status(run.status()));
  if (!run->has_value()) return send_not_found(response, unknown);
  const auto phases = store->phases(id);
  if (!phases.ok()) return send_error(response, from_status(phases.status()));
  send_json(response, run_detail_json(**run, *phases, admin.service.run_id()));
}

// Rounds of a request whose tree can be shown: those in memory have their tokens.
int32_t trees_of(Admin& admin, const RequestRecord& record) {
  const auto recent = admin.service.recent_request(record.request_id);
  return recent && !recent->stats.trees.empty() ? static_cast<int32_t>(recent->stats.trees.size()) : record.trees;
}

void requests_route(Admin& admin, const HttpRequest& request, HttpResponse& response) {
  Paging paging;
  RequestFilter filter;
  ApiError error;
  if (!read_paging(request, 50, &paging, &error) || !read_filter(request, &filter, &error)) return send_error(response, error);
  Store* store = admin.service.store();
  if (!store) return send_error(response, no_store(admin.service));
  const auto page = store->requests(filter, paging);
  if (!page.ok()) return send_error(response, from_status(page.status()));
  Json list = Json::array();
  for (const RequestRecord& r : page->rows) list.push_back(request_json(r, trees_of(admin, r)));
  send_json(response, Json{{"total", page->total}, {"offset", paging.offset}, {"limit", paging.limit}, {"requests", std::move(list)}});
}

constexpr size_t kExported = 1000;  // rows in memory at a time: the history may be larger than memory should hold

// Everything that matches, some rows at a time. What finishes meanwhile is not in it.
void export_route(const std::shared_ptr<Admin>& admin, const HttpRequest& request, HttpResponse& response) {
  RequestFilter filter;
  ApiError error;
  const std::string format = request.query_value("format", "json");
  if (format != "json" && format != "csv")
    error = invalid_value("format", fmt::format("format is \"{}\", but must be csv or json", format));
  else if (!read_filter(request, &filter, &error))
    ;  // error is set
  else if (!admin->service.store()) error = no_store(admin->service);
  if (!error.message.empty()) return send_error(response, error);
  const bool csv = format == "csv";
  secure(response);
  response.set_header("Cache-Control", "no-store");
  response.set_header("Content-Disposition", fmt::format("attachment; filename=\"ddtree-requests.{}\"", format));
  response.content_type = csv ? "text/csv; charset=utf-8" : "application/json";
  auto ids = admin->service.store()->request_ids(filter);
  if (!ids) return send_error(response, from_status(ids.status()));
  response.stream = [admin, ids = std::move(*ids), csv](const BodyWriter& write) {
    if (!write(csv ? csv_head() : std::string("["))) return;
    bool first = true;
    for (size_t at = 0; at < ids.size(); at += kExported) {
      const auto begin = ids.begin() + static_cast<std::ptrdiff_t>(at);
      const auto rows =
          admin->service.store()->requests_of({begin, begin + static_cast<std::ptrdiff_t>(std::min(kExported, ids.size() - at))});
      if (!rows.ok()) {
        // Too late for a status. A CSV that ends in a line of its own kind, and JSON that is none, do not pass for the whole.
        write(fmt::format("\r\nerror: the history could not be read further: {}\r\n", rows.status().message()));
        return;
      }
      std::string chunk;
      for (const RequestRecord& r : *rows) {
        if (csv) {
          chunk += csv_row(r);
        } else {
          chunk += first ? "\n" : ",\n";
          chunk += dump_json(request_json(r, r.trees));
        }
        first = false;
      }
      if (!chunk.empty() && !write(chunk)) return;
    }
    if (!csv) write("\n]\n");
  };
}

// The record of an id as replies carry it; from memory where the writer has not committed it yet.
bool find_request(Admin& admin, const std::string& id, RequestRecord* record, HttpResponse& response) {
  if (Store* store = admin.service.store()) {
    RequestFilter filter;
    filter.request_id = id;
    const auto page = store->requests(filter, {.limit = 1});
    if (!page.ok()) {
      send_error(response, from_status(page.status()));
      return false;
    }
    if (!page->rows.empty()) {
      // Lists leave out the long columns.
      const auto whole = store->request(page->rows.front().id);
      *record = whole.ok() && whole->has_value() ? **whole : page->rows.front();
      return true;
    }
  }
  if (const auto recent = admin.service.recent_request(id)) {
    const auto serving = admin.service.serving();
    *record = request_record(*recent, admin.service.run_id(), serving ? serving->info.name : "");
    return true;
  }
  for (const LiveRequest& live : admin.service.live_requests()) {
    if (live.id != id) continue;
    send_not_found(response, fmt::format("{} has not finished yet; its figures are kept when it has", id));
    return false;
  }
  send_not_found(response, fmt::format("there is no request {} in the history", id));
  return false;
}

void request_route(Admin& admin, const HttpRequest& request, HttpResponse& response) {
  RequestRecord record;
  if (!find_request(admin, request.parameters.at("id"), &record, response)) return;
  send_json(response, request_detail_json(record, trees_of(admin, record)));
}

// Ids of an earlier run are this tokenizer's only if it served the same model.
bool same_model(Admin& admin, int64_t run_id) {
  Store* store = admin.service.store();
  if (run_id == admin.service.run_id() || !store) return true;
  const auto then = store->run(run_id);
  const auto now = store->run(admin.service.run_id());
  return then.ok() && now.ok() && then->has_value() && now->has_value() && (*then)->model == (*now)->model;
}

void rounds_route(Admin& admin, const HttpRequest& request, HttpResponse& response) {
  Paging paging;
  ApiError error;
  if (!read_paging(request, 100, &paging, &error)) return send_error(response, error);
  const std::string& id = request.parameters.at("id");
  std::vector<RoundTree> trees;
  int64_t total = 0;
  int64_t run_id = admin.service.run_id();
  const auto recent = admin.service.recent_request(id);
  if (recent && !recent->stats.trees.empty()) {
    std::vector<RoundTree> all = round_trees(recent->stats);
    total = static_cast<int64_t>(all.size());
    const int64_t begin = std::min(total, paging.offset), end = std::min(total, begin + paging.limit);
    trees.assign(std::make_move_iterator(all.begin() + begin), std::make_move_iterator(all.begin() + end));
  } else {
    RequestRecord record;
    if (!find_request(admin, id, &record, response)) return;
    run_id = record.run_id;
    if (Store* store = admin.service.store(); store && record.id != 0) {
      auto page = store->trees(record.id, paging);
      if (!page.ok()) return send_error(response, from_status(page.status()));
      trees = std::move(page->rows);
      total = page->total;
    }
  }
  Json rounds = Json::array();
  std::set<int32_t> ids;
  for (const RoundTree& tree : trees) {
    const bool kept = !tree.token.empty();
    ids.insert(tree.token.begin(), tree.token.end());
    if (kept && tree.next >= 0) ids.insert(tree.next);
    rounds.push_back(round_json(tree, kept));
  }
  Json texts = Json::object();
  if (same_model(admin, run_id)) {
    const std::vector<int32_t> list(ids.begin(), ids.end());
    const std::vector<std::string> found = admin.service.token_texts(list);
    for (size_t i = 0; i < std::min(list.size(), found.size()); ++i) texts[std::to_string(list[i])] = found[i];
  }
  send_json(response, Json{{"total", total},
                           {"offset", paging.offset},
                           {"limit", paging.limit},
                           {"rounds", std::move(rounds)},
                           {"texts", std::move(texts)}});
}

}  // namespace

void register_history_routes(HttpServer& server, const std::shared_ptr<Admin>& admin) {
  const auto with = [&](const char* pattern, Parameters takes, void (*handler)(Admin&, const HttpRequest&, HttpResponse&)) {
    route(server, "GET", pattern, std::move(takes),
          [admin, handler](const HttpRequest& request, HttpResponse& response) { handler(*admin, request, response); });
  };
  with("/admin/api/runs", kPaging, runs_route);
  with("/admin/api/runs/{id}", {}, run_route);
  with("/admin/api/requests", kPaging + kFilter, requests_route);
  with("/admin/api/requests/{id}", {}, request_route);
  with("/admin/api/requests/{id}/rounds", kPaging, rounds_route);
  route(server, "GET", "/admin/api/requests/export", kFilter + Parameters{"format"},
        [admin](const HttpRequest& request, HttpResponse& response) { export_route(admin, request, response); });
}

}  // namespace ddtree::admin
