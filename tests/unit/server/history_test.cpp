// Figures over the history by the API, starts and smoke runs side by side, and a service whose disk has no room.
#include <httplib.h>
#include <sys/mount.h>
#include <unistd.h>

#include <catch2/catch_approx.hpp>
#include <catch2/catch_test_macros.hpp>
#include <filesystem>
#include <fstream>

#include "harness.h"
#include "server/admin_parts.h"
#include "server/history_compare.h"
#include "server/history_keeper.h"
#include "server/metrics.h"

namespace ddtree {
namespace {

using Catch::Approx;
using test::Harness;

struct Folder {
  std::filesystem::path path = std::filesystem::temp_directory_path() / ("ddtree-history-" + std::to_string(getpid()));
  Folder() {
    std::filesystem::remove_all(path);
    std::filesystem::create_directories(path);
  }
  ~Folder() { std::filesystem::remove_all(path); }
};

// A disk of its own of so many bytes; `made` is false where this user may not mount one.
struct SmallDisk {
  std::filesystem::path path;
  bool made = false;
  explicit SmallDisk(const std::filesystem::path& at, const char* options) : path(at) {
    std::filesystem::create_directories(at);
    made = mount("none", at.c_str(), "tmpfs", 0, options) == 0;
  }
  ~SmallDisk() {
    if (made) umount2(path.c_str(), MNT_DETACH);
  }
  bool read_only(bool yes) const { return mount("none", path.c_str(), "tmpfs", MS_REMOUNT | (yes ? MS_RDONLY : 0), nullptr) == 0; }
  void fill() const {
    std::ofstream out(path / "filler", std::ios::binary);
    const std::string block(4096, 'x');
    while (out.write(block.data(), 4096).flush()) {
    }
  }
};

ServiceOptions options_at(const std::filesystem::path& db) {
  ServiceOptions options;
  options.db_path = db;
  return options;
}

RequestRecord record(int64_t run, const char* mode, int rounds, std::vector<int32_t> accepted_at, double speed) {
  RequestRecord r;
  r.run_id = run;
  r.request_id = "chatcmpl-" + std::to_string(speed);
  r.received_ms = admin::now_ms();
  r.mode = mode, r.finish = "stop", r.rounds = rounds, r.accepted_at = std::move(accepted_at);
  for (const int32_t n : r.accepted_at) r.accepted += n;
  r.prompt_tokens = 100, r.completion_tokens = 101, r.decode_ms = 100 * 1000 / speed, r.tokens_per_second = speed;
  r.first_token_ms = 20, r.total_ms = 20 + r.decode_ms;
  return r;
}

SmokeRun smoke_run(int64_t run, const char* verdict, double speed, std::vector<SmokeCheck> checks) {
  SmokeRun s;
  s.run_id = run, s.trigger = "start", s.verdict = verdict, s.tokens_per_second = speed, s.acceptance = 6, s.checks = std::move(checks);
  s.started_ms = s.finished_ms = admin::now_ms();
  return s;
}

const Json* row_of(const Json& comparison, const std::string& section, const std::string& name) {
  for (const Json& row : comparison["rows"])
    if (row["section"] == section && row["name"] == name) return &row;
  return nullptr;
}

}  // namespace

TEST_CASE("two starts side by side: what differs comes first, measured figures have their tolerance") {
  Folder folder;
  auto opened = Store::open(folder.path / "a.db");
  REQUIRE(opened.ok());
  Store& store = **opened;
  const int64_t now = admin::now_ms();
  const int64_t first =
      store.begin_run({.version = "1", .mode = "DFLASH", .flags = R"({"--port":"1","--tp":"1"})", .started_ms = now - 9000});
  store.set_run_details(first, R"({"backend":"cpu"})", R"([{"part":"weights","mib":10},{"part":"pages","mib":4}])");
  store.add_phase({0, first, now - 9000, "weights", "", 0});
  store.add_phase({0, first, now - 7000, "ready", "", 0});
  store.set_run_ready(first, now - 7000, "pass");
  store.end_run(first, "asked to stop", 0);
  const int64_t second =
      store.begin_run({.version = "2", .mode = "DFLASH", .flags = R"({"--port":"1","--trees":"9"})", .started_ms = now - 5000});
  store.set_run_details(second, R"({"backend":"cpu"})", R"([{"part":"weights","mib":10},{"part":"pages","mib":8}])");
  store.add_phase({0, second, now - 5000, "weights", "", 0});
  store.add_phase({0, second, now - 2960, "ready", "", 0});
  store.set_run_ready(second, now - 2960, "pass");
  store.add_request(record(first, "DFLASH", 10, {8, 4}, 100));
  store.add_request(record(second, "DFLASH", 10, {8, 5}, 103));
  store.add_smoke_run(smoke_run(first, "pass", 500, {{.name = "coherent", .mode = "NONE", .verdict = "pass", .output = "a"}}));
  store.add_smoke_run(smoke_run(
      second, "pass", 700, {{.name = "coherent", .mode = "NONE", .verdict = "fail", .output = "b"}, {.name = "speed", .verdict = "pass"}}));
  REQUIRE(store.flush().ok());

  std::vector<admin::RunFigures> runs;
  for (const int64_t id : {first, second}) {
    auto figures = admin::read_run_figures(store, id);
    REQUIRE((figures.ok() && figures->has_value()));
    runs.push_back(**figures);
  }
  const Json c = admin::compare_runs_json(runs, second);
  bool same_seen = false;
  for (const Json& row : c["rows"]) {
    if (!row["differs"].get<bool>()) same_seen = true;
    else CHECK_FALSE(same_seen);  // all that differs stands before all that does not
  }
  const auto expect = [&](const char* section, const char* name, const Json& a, const Json& b, bool differs) {
    INFO(section << " " << name);
    const Json* row = row_of(c, section, name);
    REQUIRE(row);
    CHECK((*row)["values"] == Json::array({a, b}));
    CHECK((*row)["differs"] == differs);
  };
  expect("start", "version", "1", "2", true);
  expect("start", "mode", "DFLASH", "DFLASH", false);
  expect("start", "end", "asked to stop", "running", true);
  expect("flags", "--port", "1", "1", false);
  expect("flags", "--tp", "1", nullptr, true);
  expect("flags", "--trees", nullptr, "9", true);
  expect("plan", "weights.mib", 10, 10, false);
  expect("plan", "pages.mib", 4, 8, true);
  expect("phases", "ready after", 2.0, 2.04, false);  // 2 % apart
  expect("smoke", "speed", 500.0, 700.0, true);
  expect("smoke", "coherent, NONE", "pass", "fail", true);
  expect("smoke", "speed", 500.0, 700.0, true);
  expect("requests", "tok/s, median", 100.0, 103.0, false);
  expect("acceptance", "tokens a round", 2.2, 2.3, false);
  expect("acceptance", "at position 2", 40.0, 50.0, true);

  const auto smoke = store.smoke_runs({});
  REQUIRE(smoke.ok());
  const Json s = admin::compare_smoke_json(smoke->rows);  // newest first
  REQUIRE(s["rows"].size() == 2);
  CHECK(s["rows"][0]["name"] == "coherent");
  CHECK(s["rows"][0]["differs"] == true);
  CHECK(s["rows"][0]["cells"][1]["output"] == "a");
  CHECK(s["rows"][1]["cells"][1].is_null());
}

TEST_CASE("summary, acceptance, time line and comparison over HTTP") {
  Folder folder;
  Service service(options_at(folder.path / "a.db"));
  REQUIRE(service.open_store().ok());
  HttpServer::Options http_options;
  http_options.port = 0;
  HttpServer http(http_options);
  register_routes(http, service);
  REQUIRE(http.start().ok());
  httplib::Client client("127.0.0.1", http.port());
  const auto get = [&](const std::string& path, int status = 200) {
    const auto reply = client.Get("/admin/api/" + path);
    REQUIRE(reply);
    INFO(path << ": " << reply->body);
    REQUIRE(reply->status == status);
    return Json::parse(reply->body);
  };
  Store& store = *service.store();
  for (int i = 1; i <= 100; ++i)
    store.add_request(record(0, i % 2 ? "DDTREE" : "NONE", 10, i % 2 ? std::vector<int32_t>{9, 5} : std::vector<int32_t>{}, i));
  store.add_event({.severity = Severity::kWarning, .kind = "ladder", .message = "down", .detail = R"({"from":"DDTREE","to":"reset"})"});
  store.add_event({.severity = Severity::kInfo, .kind = "speculation.fallback", .message = "no mark"});
  REQUIRE(store.flush().ok());

  const Json all = get("requests/summary");
  CHECK(all["totals"]["requests"] == 100);
  CHECK(all["tokens_per_second"]["p50"] == 50.0);
  CHECK(all["tokens_per_second"]["p90"] == 90.0);
  CHECK(all["tokens_per_second"]["p99"] == 99.0);
  CHECK(all["tokens_per_round"] == Json({{"count", 50}, {"p50", 2.4}, {"p90", 2.4}, {"p95", 2.4}, {"p99", 2.4}}));
  CHECK(get("requests/summary?mode=NONE")["tokens_per_round"]["p50"].is_null());
  CHECK(get("requests/summary?context_from=300")["totals"]["requests"] == 0);
  const Json acceptance = get("acceptance");
  CHECK(acceptance["speculative"]["rounds"] == 500);
  CHECK(acceptance["speculative"]["accepted_at"] == Json({450, 250}));
  CHECK(acceptance["by_mode"].size() == 2);
  CHECK(acceptance["by_context"][0]["name"] == "256");
  CHECK(get("requests?sort=speed&order=rising&limit=1")["requests"][0]["tokens_per_second"].get<double>() == Approx(1));
  CHECK(get("requests?sort=speed&limit=1")["requests"][0]["tokens_per_second"].get<double>() == Approx(100));
  CHECK(get("requests?order=up", 400)["error"]["param"] == "order");
  const Json timeline = get("timeline");
  REQUIRE(timeline["runs"].size() == 1);
  CHECK(timeline["runs"][0]["phases"][0]["phase"] == "starting");
  REQUIRE(timeline["runs"][0]["events"].size() == 1);
  CHECK(timeline["runs"][0]["events"][0]["detail"]["to"] == "reset");
  CHECK(get("runs/compare?ids=1", 400)["error"]["param"] == "ids");
  CHECK(get("runs/compare?ids=1,1", 400)["error"]["param"] == "ids");
  CHECK(get("runs/compare?ids=1,x", 400)["error"]["message"].get<std::string>().find("must be") != std::string::npos);
  get("runs/compare?ids=1,2", 404);
  get("smoke/compare?ids=1,2", 404);
  http.stop();
}

TEST_CASE("a disk without room keeps nobody from answers, is told wherever readiness is, and is used when it has room") {
  Folder folder;
  for (const bool read_only : {true, false}) {
    INFO((read_only ? "read-only" : "full"));
    const SmallDisk disk(folder.path / (read_only ? "ro" : "full"), "size=1m");
    if (!disk.made) SKIP("this user may not mount a small disk");
    if (read_only) REQUIRE(disk.read_only(true));
    else disk.fill();
    Service service(options_at(disk.path / "a.db"));
    const Status opened = service.open_store();
    INFO(opened.message());
    REQUIRE(opened.ok());
    CHECK(service.store() == nullptr);
    CHECK(service.run_id() == 0);
    CHECK_FALSE(service.history().health().writable);
    CHECK(service.history().health().failing_since_ms > 0);
    HttpServer::Options http_options;
    http_options.port = 0;
    HttpServer http(http_options);
    register_routes(http, service);
    REQUIRE(http.start().ok());
    httplib::Client client("127.0.0.1", http.port());
    const Json status = Json::parse(client.Get("/admin/api/status")->body);
    CHECK(status["store"]["writable"] == false);
    CHECK(status["store"]["open"] == false);
    CHECK(status["store"]["failing_since"].is_number());
    const Json health = Json::parse(client.Get("/health")->body);
    CHECK(health["history"]["writable"] == false);
    CHECK_FALSE(health["history"]["message"].get<std::string>().empty());
    CHECK(metrics_text(service).find("ddtree:store_writable 0") != std::string::npos);
    const Json events = Json::parse(client.Get("/admin/api/events")->body);
    REQUIRE(events["events"].size() == 1);
    CHECK(events["events"][0]["kind"] == "store.unwritable");
    CHECK(client.Get("/admin/api/runs")->status == 503);
    RecentRequest done;
    done.request.id = "chatcmpl-early";
    done.request.started = done.finished = static_cast<double>(admin::now_ms()) / 1000;
    done.finish = "stop";
    service.request_finished(done);

    if (read_only) REQUIRE(disk.read_only(false));
    else std::filesystem::remove(disk.path / "filler");
    REQUIRE(Harness::eventually([&] { return service.store() != nullptr; }));
    REQUIRE(service.store()->flush(30).ok());
    CHECK(Json::parse(client.Get("/health")->body)["history"]["writable"] == true);
    const Json requests = Json::parse(client.Get("/admin/api/requests")->body);
    REQUIRE(requests["total"] == 1);  // what ended before it could be written is there
    CHECK(requests["requests"][0]["id"] == "chatcmpl-early");
    CHECK(requests["requests"][0]["run_id"] == service.run_id());
    const Json run = Json::parse(client.Get("/admin/api/runs/" + std::to_string(service.run_id()))->body);
    CHECK(run["phases"][0]["phase"] == "starting");
    std::string kinds;
    const Json told = Json::parse(client.Get("/admin/api/events")->body);
    for (const Json& e : told["events"]) kinds += e["kind"].get<std::string>() + " ";
    CHECK(kinds == "store.writable store.unwritable ");
    http.stop();
    service.close(0, "asked to stop");
  }
}

TEST_CASE("a short life on a disk that has room by its end still leaves its record") {
  Folder folder;
  const SmallDisk disk(folder.path / "disk", "size=1m");
  if (!disk.made) SKIP("this user may not mount a small disk");
  disk.fill();
  {
    Service service(options_at(disk.path / "a.db"));
    REQUIRE(service.open_store().ok());
    REQUIRE(service.store() == nullptr);
    RecentRequest done;
    done.request.id = "chatcmpl-only";
    done.finish = "stop", done.prompt_text = "text", done.stats.trees.resize(3);
    service.request_finished(done);
    std::filesystem::remove(disk.path / "filler");
    service.close(70, "failed: device lost");
  }
  auto store = Store::open_read_only(disk.path / "a.db");
  REQUIRE(store.ok());
  const auto runs = (*store)->runs({});
  REQUIRE((runs.ok() && runs->rows.size() == 1));
  CHECK((runs->rows[0].end_reason == "failed: device lost" && runs->rows[0].exit_code == 70));
  const auto requests = (*store)->requests({}, {});
  REQUIRE((requests.ok() && requests->rows.size() == 1));
  CHECK((requests->rows[0].request_id == "chatcmpl-only" && requests->rows[0].prompt_text.empty() && requests->rows[0].trees == 0));
}

TEST_CASE("what is wrong with the file itself is still refused at the start") {
  Folder folder;
  std::ofstream(folder.path / "other.db") << "not a database at all, but some text";
  Service service(options_at(folder.path / "other.db"));
  CHECK(service.open_store().code() == Code::kUnavailable);
  Service first(options_at(folder.path / "a.db")), second(options_at(folder.path / "a.db"));
  REQUIRE(first.open_store().ok());
  CHECK(second.open_store().code() == Code::kTemporary);
}

}  // namespace ddtree
