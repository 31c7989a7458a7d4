// The dashboard's API over a real store and a real socket, without a model: what the records become, and that nothing is lost or let in.
#include "server/admin.h"

#include <httplib.h>

#include <array>
#include <catch2/catch_test_macros.hpp>
#include <filesystem>
#include <set>

#include "health/phases.h"
#include "server/admin_parts.h"

namespace ddtree {
namespace {

using admin::csv_head;
using admin::csv_row;

HttpRequest query(std::multimap<std::string, std::string> q) {
  HttpRequest request;
  request.query = std::move(q);
  request.header = [](const char*) { return std::string(); };
  return request;
}

// A served folder of its own, gone afterwards.
struct Served {
  std::filesystem::path folder = std::filesystem::temp_directory_path() / ("ddtree-admin-" + std::to_string(getpid()));
  std::unique_ptr<Service> service;
  std::unique_ptr<HttpServer> http;
  std::unique_ptr<httplib::Client> client;

  Served() {
    std::filesystem::remove_all(folder);
    ServiceOptions options;
    options.db_path = folder / "admin.db";
    options.flags = {{"--port", "0"}};
    service = std::make_unique<Service>(options);
    REQUIRE(service->open_store().ok());
    HttpServer::Options http_options;
    http_options.port = 0;
    http = std::make_unique<HttpServer>(http_options);
    register_admin_routes(*http, *service);
    REQUIRE(http->start().ok());
    client = std::make_unique<httplib::Client>("127.0.0.1", http->port());
  }
  ~Served() {
    client.reset();
    http.reset();
    service.reset();
    std::filesystem::remove_all(folder);
  }
  Json get(const std::string& path, int status = 200) {
    const auto reply = client->Get("/admin/api/" + path);
    REQUIRE(reply);
    INFO(path << ": " << reply->body);
    REQUIRE(reply->status == status);
    return Json::parse(reply->body);
  }
};

RequestRecord record(int i) {
  RequestRecord r;
  r.request_id = "chatcmpl-" + std::to_string(i);
  r.endpoint = "/v1/chat/completions";
  r.client = i % 2 ? "=cmd|' /C calc'!A0" : "say \"hi\", twice";
  r.model = "tiny";
  r.received_ms = admin::now_ms() - 60'000 - i;  // older ones would fall to the retention
  r.finished_ms = r.received_ms + 40;
  r.finish = i % 5 ? "stop" : "error";
  r.error = i % 5 ? "" : "row 3 is not finite";
  r.mode = "DDTREE";
  r.prompt_tokens = 10;
  r.completion_tokens = i;
  r.rounds = 4;
  r.accepted = 9;
  r.drafted = 60;
  return r;
}

size_t lines(const std::string& text) { return static_cast<size_t>(std::count(text.begin(), text.end(), '\n')); }

}  // namespace

TEST_CASE("runs end as running, stopped, failed or crashed") {
  ServiceRun run;
  run.id = 7;
  run.started_ms = 1000;
  CHECK(admin::run_json(run, 7)["state"] == "running");
  run.heartbeat_ms = 7777;
  CHECK(admin::run_json(run, 8)["ended"] == 7777);  // a killed server's last sign of life
  CHECK(admin::run_json(run, run.id)["ended"].is_null());
  CHECK(admin::run_json(run, 8)["state"] == "crashed");
  run.ended_ms = 2000;
  run.end_reason = kEndedWithoutNotice;
  CHECK(admin::run_json(run, 8)["state"] == "crashed");
  run.end_reason = "asked to stop";
  run.exit_code = 0;
  CHECK(admin::run_json(run, 8)["state"] == "stopped");
  run.end_reason = "fc.weight is [64, 192]";
  run.exit_code = 65;
  CHECK(admin::run_json(run, 8)["state"] == "failed");
  CHECK(admin::run_json(run, 8)["exit_code"] == 65);
  run.exit_code = -1;
  CHECK(admin::run_json(run, 8)["exit_code"].is_null());
  run.plan = R"([{"part":"weights","mib":6.5}])";
  run.flags = "not json";
  const Json detail = admin::run_detail_json(run, {}, 8);
  CHECK(detail["plan"][0]["mib"] == 6.5);
  CHECK(detail["flags"] == "not json");
  CHECK(detail["devices"].is_null());
}

TEST_CASE("a round without ids says so, and a root is no drafted token") {
  RoundTree tree;
  tree.parent = {-1, 0};
  tree.log_prob = {0, -0.25f};
  tree.accepted = {1, 1};
  CHECK(admin::round_json(tree, false)["token"].is_null());
  CHECK(admin::round_json(tree, false)["next"].is_null());
  tree.token = {5, 6};
  CHECK(admin::round_json(tree, true)["token"] == Json({5, 6}));
  CHECK(admin::round_json(tree, true)["next"] == -1);
}

TEST_CASE("CSV: quotes are doubled, formulas are disarmed, columns match the head") {
  const std::string row = csv_row(record(1));
  CHECK(row.find("\"'=cmd|' /C calc'!A0\"") != std::string::npos);
  CHECK(csv_row(record(2)).find("\"say \"\"hi\"\", twice\"") != std::string::npos);
  CHECK(row.ends_with("\r\n"));
  RequestRecord plain = record(1);
  plain.client = "x";
  plain.received_ms = 1'700'000'000'001;
  const std::string commas = csv_row(plain);
  CHECK(std::count(commas.begin(), commas.end(), ',') == [] {
    const std::string head = csv_head();
    return std::count(head.begin(), head.end(), ',');
  }());
  CHECK(commas.find("2023-11-14T22:13:20.001Z") != std::string::npos);
  CHECK(commas.find(",3.2500,") != std::string::npos);  // 1 + 9 / 4
}

TEST_CASE("filters: lists, flags and bounds; a wrong one names itself") {
  RequestFilter filter;
  ApiError error;
  CHECK(admin::read_filter(query({{"finish", "stop,length"}, {"finish", "error"}, {"error", "0"}, {"sort", "speed"}, {"run", "3"}}),
                           &filter, &error));
  CHECK(filter.finish == std::vector<std::string>{"stop", "length", "error"});
  CHECK(filter.error == false);
  CHECK(filter.sort == RequestSort::kSpeed);
  CHECK(filter.run_id == 3);
  const std::vector<std::pair<std::string, std::string>> wrong = {
      {"finish", "never"}, {"mode", "ddtree"}, {"error", "yes"}, {"sort", "size"}, {"run", "-1"}, {"from", "1e3"}, {"to", " 5"}};
  for (const auto& [name, value] : wrong) {
    RequestFilter f;
    ApiError e;
    INFO(name);
    CHECK_FALSE(admin::read_filter(query({{name, value}}), &f, &e));
    CHECK(e.param == name);
    CHECK(e.message.find("must be") != std::string::npos);
  }
  Paging paging;
  CHECK_FALSE(admin::read_paging(query({{"limit", "1001"}}), 50, &paging, &error));
  CHECK(admin::read_paging(query({}), 50, &paging, &error));
  CHECK(paging.limit == 50);
}

TEST_CASE("before a model is there: status, history, and no smoke test") {
  Served s;
  const Json status = s.get("status");
  CHECK(status["model"].is_null());
  CHECK(status["ready"] == false);
  CHECK(status["phase"]["word"] == "starting");
  CHECK(status["smoke_running"].is_null());
  CHECK(status["store"]["writable"] == true);
  REQUIRE(s.service->store()->flush().ok());
  const Json runs = s.get("runs");
  REQUIRE(runs["total"] == 1);
  CHECK(runs["runs"][0]["state"] == "running");
  CHECK(s.get("runs/" + std::to_string(runs["runs"][0]["id"].get<int64_t>()))["flags"]["--port"] == "0");
  CHECK(s.get("runs/99", 404)["error"]["code"] == "not_found");
  CHECK(s.get("series?minutes=5")["time"].is_array());
  const auto refused = s.client->Post("/admin/api/smoke/run", "{}", "application/json");
  REQUIRE(refused);
  CHECK(refused->status == 503);
  CHECK(Json::parse(refused->body)["error"]["message"].get<std::string>().find("no model is loaded") != std::string::npos);
  CHECK(s.client->Post("/admin/api/smoke/run", "{}", "text/plain")->status == 415);
  CHECK(s.client->Post("/admin/api/smoke/run", {{"Sec-Fetch-Site", "cross-site"}}, "{}", "application/json")->status == 403);
}

TEST_CASE("exports give every request once, over many pages") {
  Served s;
  constexpr int kRequests = 2345;
  for (int i = 0; i < kRequests; ++i) s.service->store()->add_request(record(i));
  REQUIRE(s.service->store()->flush(30).ok());
  const auto csv = s.client->Get("/admin/api/requests/export?format=csv");
  REQUIRE(csv);
  REQUIRE(csv->status == 200);
  CHECK(csv->get_header_value("Content-Type").starts_with("text/csv"));
  CHECK(lines(csv->body) == kRequests + 1);
  const auto json = s.client->Get("/admin/api/requests/export?format=json&sort=tokens");
  REQUIRE(json);
  const Json list = Json::parse(json->body);
  REQUIRE(list.size() == kRequests);
  std::set<std::string> ids;
  for (const Json& r : list) ids.insert(r["id"].get<std::string>());
  CHECK(ids.size() == kRequests);
  CHECK(list[0]["completion_tokens"] == kRequests - 1);  // sorted by tokens
  CHECK(Json::parse(s.client->Get("/admin/api/requests/export?error=1")->body).size() == kRequests / 5);
  CHECK(Json::parse(s.client->Get("/admin/api/requests/export?client=nobody")->body).empty());
  CHECK(s.get("requests?finish=error&limit=1")["total"] == kRequests / 5);
  CHECK(s.get("requests/chatcmpl-17")["completion_tokens"] == 17);
  CHECK(s.get("requests/chatcmpl-17/rounds")["total"] == 0);
  s.get("requests/chatcmpl-9999999", 404);
}

TEST_CASE("a parameter that a route does not take, takes once or takes otherwise is a 400 that names it") {
  Served s;
  const std::vector<std::array<std::string, 3>> wrong = {
      {"status?x=1", "x", "it takes none"},
      {"events?limt=5", "limt", "it takes limit, offset, run, kind, severity"},
      {"runs?kind=x", "kind", "no parameter of /admin/api/runs"},
      {"runs/1?limit=5", "limit", "it takes none"},
      {"timeline?limit=101", "limit", "a whole number from 1 to 100"},
      {"timeline?limit=5&limit=6", "limit", "more than once"},
      {"runs/compare?ids=1,,2", "ids", "as in ids=4,3"},
      {"runs/compare?ids=1,2,", "ids", "as in ids=4,3"},
      {"runs/compare?ids=1,2,2", "ids", "different numbers"},
      {"runs/compare?ids=1,2&limit=2", "limit", "it takes ids"},
      {"smoke/compare?id=1,2", "id", "it takes ids"},
      {"requests?finsh=stop", "finsh", "it takes limit, offset, finish, mode"},
      {"requests?finish=stop,,length", "finish", "must be one of"},
      {"requests/summary?limit=5", "limit", "no parameter of"},
      {"requests/export?fromat=csv", "fromat", "it takes finish"},
      {"acceptance?model=x", "model", "it takes finish"},
      {"series?minutes=5&hours=1", "hours", "it takes minutes"},
      {"smoke?run=1", "run", "it takes limit, offset"},
  };
  for (const auto& [path, name, words] : wrong) {
    INFO(path);
    const Json error = s.get(path, 400)["error"];
    CHECK(error["param"] == name);
    CHECK(error["code"] == "invalid_value");
    INFO(error["message"].get<std::string>());
    CHECK(error["message"].get<std::string>().find(words) != std::string::npos);
  }
  // Lists may come in both spellings, and an empty value is none.
  s.get("requests?finish=stop&finish=length&mode=NONE,DFLASH&limit=&client=");
  s.get("timeline?limit=100");
  s.get("timeline?limit=100&offset=0&");
  s.get("runs?");
}

}  // namespace ddtree
