// Rows go in, come out as they were, are found by filters, and go when they are old.
#include "store/store.h"

#include <fmt/core.h>
#include <sys/stat.h>

#include <catch2/catch_test_macros.hpp>
#include <cstdlib>
#include <optional>
#include <thread>

#include "store/columns.h"
#include "store/database.h"
#include "store/queries.h"
#include "unit/store/opened.h"
#include "unit/store/temporary.h"

using namespace ddtree;
using test::open_at;
using test::TemporaryFolder;

namespace {

// Every column different from its default and from the others.
template <class R>
R filled(int seed) {
  R record;
  int n = seed;
  store::columns(record, [&](const char* name, auto& member) {
    using T = std::decay_t<decltype(member)>;
    ++n;
    if constexpr (std::is_same_v<T, std::string>) member = fmt::format("{} {} \xC3\xA9 'x'", name, n);
    else if constexpr (std::is_same_v<T, bool>) member = true;
    else if constexpr (std::is_same_v<T, std::vector<int32_t>>) member = {n, -n, 0, 2147483647};
    else if constexpr (std::is_same_v<T, Severity>) member = Severity::kError;
    else if constexpr (std::is_floating_point_v<T>) member = static_cast<T>(n + 0.5);
    else member = static_cast<T>(n);
  });
  return record;
}

template <class R>
void check_same(R a, R b, std::vector<std::string> except = {}) {
  std::vector<std::string> left;
  store::columns(a, [&](const char* name, auto& member) {
    const store::Value value = store::to_value(member);
    left.push_back(std::string(name) + "=" +
                   (std::holds_alternative<std::string>(value) ? std::get<std::string>(value)
                    : std::holds_alternative<double>(value)    ? fmt::format("{}", std::get<double>(value))
                                                               : fmt::format("{}", std::get<int64_t>(value))));
  });
  size_t at = 0;
  store::columns(b, [&](const char* name, auto& member) {
    const store::Value value = store::to_value(member);
    const std::string right = std::string(name) + "=" +
                              (std::holds_alternative<std::string>(value) ? std::get<std::string>(value)
                               : std::holds_alternative<double>(value)    ? fmt::format("{}", std::get<double>(value))
                                                                          : fmt::format("{}", std::get<int64_t>(value)));
    if (std::find(except.begin(), except.end(), name) == except.end()) CHECK(left[at] == right);
    ++at;
  });
}

RoundTree sample_tree(int round) {
  RoundTree tree;
  tree.round = round, tree.start = 100 + round, tree.next = 7;
  tree.token = {5, 6, -1, 248076}, tree.parent = {-1, 0, 0, 1}, tree.log_prob = {0, -0.25f, -3.5f, -1e30f}, tree.accepted = {1, 1, 0, 0};
  tree.draft_ms = 1.5f, tree.verify_ms = 2.5f, tree.total_ms = 4.5f;
  return tree;
}

RequestRecord sample_request(int64_t received, const std::string& mode, const std::string& finish, const std::string& error = "") {
  if (received == 0) received = store::now_ms();
  RequestRecord request;
  request.request_id = fmt::format("chatcmpl-{}", received), request.received_ms = received, request.finished_ms = received + 10;
  request.mode = mode, request.finish = finish, request.error = error;
  return request;
}

}  // namespace

TEST_CASE("every column of every record comes back as it went in") {
  TemporaryFolder folder;
  StoreOptions options = test::ageless();
  options.store_text = true;
  auto history = open_at(folder / "a/b/ddtree.db", options);

  ServiceRun run = filled<ServiceRun>(10);
  run.ended_ms = 0, run.heartbeat_ms = 0;
  const int64_t run_id = history->begin_run(run);
  RequestRecord request = filled<RequestRecord>(1000);
  const int64_t request_id = history->add_request(request, {sample_tree(0), sample_tree(1)});
  ServicePhase phase = filled<ServicePhase>(2000);
  phase.run_id = run_id;
  history->add_phase(phase);
  SmokeRun smoke = filled<SmokeRun>(3000);
  smoke.checks = {filled<SmokeCheck>(4000), filled<SmokeCheck>(5000)};
  const int64_t smoke_id = history->add_smoke_run(smoke);
  Event event = filled<Event>(6000);
  const int64_t event_id = history->add_event(event);
  Calibration calibration = filled<Calibration>(7000);
  history->add_calibration(calibration);
  MetricMinute minute = filled<MetricMinute>(8000);
  minute.minute_ms = 120'000;
  history->put_metric_minute(minute);
  REQUIRE(history->flush().ok());

  auto runs = history->runs({});
  REQUIRE(runs.ok());
  REQUIRE(runs->rows.size() == 1);
  check_same(run, runs->rows[0], {"heartbeat_ms"});
  CHECK(runs->rows[0].heartbeat_ms > 1'600'000'000'000);
  auto got = history->request(request_id);
  REQUIRE((got.ok() && got->has_value()));
  check_same(request, **got, {"trees"});
  CHECK((*got)->trees == 2);
  auto trees = history->trees(request_id, {});
  REQUIRE((trees.ok() && trees->rows.size() == 2));
  CHECK(trees->total == 2);
  const RoundTree want = sample_tree(1), &tree = trees->rows[1];
  CHECK(tree.round == 1);
  CHECK(tree.token == want.token);
  CHECK(tree.parent == want.parent);
  CHECK(tree.log_prob == want.log_prob);
  CHECK(tree.accepted == want.accepted);
  CHECK((tree.next == 7 && tree.start == 101 && tree.draft_ms == 1.5f && tree.verify_ms == 2.5f && tree.total_ms == 4.5f));
  auto phases = history->phases(run_id);
  REQUIRE((phases.ok() && phases->size() == 1));
  check_same(phase, (*phases)[0]);
  auto smokes = history->smoke_run(smoke_id);
  REQUIRE((smokes.ok() && smokes->has_value()));
  check_same(smoke, **smokes);
  REQUIRE((*smokes)->checks.size() == 2);
  check_same(smoke.checks[1], (*smokes)->checks[1], {"smoke_id", "position"});
  CHECK((*smokes)->checks[1].position == 1);
  auto events = history->events({}, {});
  REQUIRE((events.ok() && events->rows.size() == 1));
  check_same(event, events->rows[0]);
  CHECK(events->rows[0].id == event_id);
  auto value = history->latest_calibration(calibration.machine, calibration.name);
  REQUIRE((value.ok() && value->has_value()));
  check_same(calibration, **value);
  auto minutes = history->metric_minutes(0, 200'000);
  REQUIRE((minutes.ok() && minutes->size() == 1));
  check_same(minute, (*minutes)[0]);
}

TEST_CASE("prompt, answer and token ids stay out unless they were asked for") {
  TemporaryFolder folder;
  auto history = open_at(folder / "ddtree.db");
  RequestRecord request = sample_request(1'700'000'000'000 + 1, "DDTREE", "stop");
  request.received_ms = 0;
  request.prompt_text = "a secret question", request.answer_text = "a secret answer";
  const int64_t id = history->add_request(request, {sample_tree(0)});
  REQUIRE(history->flush().ok());
  auto got = history->request(id);
  REQUIRE((got.ok() && got->has_value()));
  CHECK(((*got)->prompt_text.empty() && (*got)->answer_text.empty()));
  auto trees = history->trees(id, {});
  REQUIRE((trees.ok() && trees->rows.size() == 1));
  CHECK((trees->rows[0].token.empty() && trees->rows[0].next == -1));
  CHECK(trees->rows[0].parent == sample_tree(0).parent);  // the shape stays
  history.reset();
  CHECK(test::read_file(folder / "ddtree.db").find("secret") == std::string::npos);
}

TEST_CASE("requests are filtered, sorted, paged and summed") {
  TemporaryFolder folder;
  StoreOptions options = test::ageless();
  auto history = open_at(folder / "ddtree.db", options);
  const int64_t first_run = history->begin_run({});
  for (int i = 0; i < 60; ++i) {
    RequestRecord request = sample_request(1000 + i,
                                           i % 3 == 0   ? "DDTREE"
                                           : i % 3 == 1 ? "DFLASH"
                                                        : "NONE",
                                           i % 2 == 0 ? "stop" : "length", i % 10 == 0 ? "engine fault" : "");
    request.client = i < 30 ? "openai/1.0" : "curl/8_%";
    request.stream = i % 4 == 0, request.thinking = i % 2;
    request.rounds = 10, request.accepted = i, request.completion_tokens = i, request.total_ms = 100 - i;
    request.accepted_at = {1, i}, request.histogram = {1, 2, 3};
    history->add_request(request);
  }
  const int64_t second_run = history->begin_run({});
  history->add_request(sample_request(5000, "NEXTN", "stop"));
  REQUIRE(history->flush().ok());

  const auto count = [&](const RequestFilter& filter) {
    auto page = history->requests(filter, {0, 0});
    REQUIRE(page.ok());
    CHECK(page->rows.empty());
    return page->total;
  };
  const auto with = [](auto set) {
    RequestFilter filter;
    set(filter);
    return filter;
  };
  CHECK(count({}) == 61);
  CHECK(count(with([&](auto& f) { f.run_id = first_run; })) == 60);
  CHECK(count(with([&](auto& f) { f.run_id = second_run; })) == 1);
  CHECK(count(with([](auto& f) { f.mode = {"DDTREE"}; })) == 20);
  CHECK(count(with([](auto& f) { f.mode = {"DDTREE", "NEXTN"}; })) == 21);
  CHECK(count(with([](auto& f) { f.finish = {"length"}; })) == 30);
  CHECK(count(with([](auto& f) { f.error = true; })) == 6);
  CHECK(count(with([](auto& f) { f.error = false; })) == 55);
  CHECK(count(with([](auto& f) { f.stream = true; })) == 15);
  CHECK(count(with([](auto& f) { f.thinking = true; })) == 30);
  CHECK(count(with([](auto& f) { f.client = "8_%"; })) == 30);  // no wildcards
  CHECK(count(with([](auto& f) { f.client = "' OR 1 --"; })) == 0);
  CHECK(count(with([](auto& f) { f.request_id = "chatcmpl-1005"; })) == 1);
  CHECK(count(with([](auto& f) { f.from_ms = 1010, f.to_ms = 1020; })) == 10);
  CHECK(count(with([](auto& f) { f.mode = {"DDTREE"}, f.finish = {"stop"}, f.error = true; })) == 2);

  auto page = history->requests({}, {10, 10});
  REQUIRE(page.ok());
  REQUIRE(page->rows.size() == 10);
  CHECK((page->rows[0].received_ms == 1050 && page->rows[9].received_ms == 1041));
  const auto leading = [&](RequestSort sort) {
    RequestFilter filter;
    filter.run_id = first_run, filter.sort = sort;
    auto rows = history->requests(filter, {1, 0});
    REQUIRE((rows.ok() && rows->rows.size() == 1));
    return rows->rows[0].received_ms;
  };
  CHECK(leading(RequestSort::kNewest) == 1059);
  CHECK(leading(RequestSort::kOldest) == 1000);
  CHECK(leading(RequestSort::kSlowest) == 1000);
  CHECK(leading(RequestSort::kAcceptance) == 1059);
  CHECK(leading(RequestSort::kTokens) == 1059);

  auto totals = history->request_totals(with([&](auto& f) { f.run_id = first_run; }));
  REQUIRE(totals.ok());
  CHECK((totals->requests == 60 && totals->errors == 6 && totals->rounds == 600 && totals->accepted == 59 * 60 / 2));
  CHECK(totals->accepted_at == std::vector<int64_t>{60, 59 * 60 / 2});
  CHECK(totals->histogram == std::vector<int64_t>{60, 120, 180});
  auto none = history->request_totals(with([](auto& f) { f.mode = {"?"}; }));
  CHECK((none.ok() && none->requests == 0 && none->accepted_at.empty()));
  auto runs = history->runs({});
  REQUIRE((runs.ok() && runs->rows.size() == 2));
  CHECK((runs->rows[1].requests == 60 && runs->rows[1].errors == 6));
}

TEST_CASE("events are filtered by kind, severity, request and time") {
  TemporaryFolder folder;
  auto history = open_at(folder / "ddtree.db");
  history->add_event(
      {.at_ms = 10'000'000'000'000, .severity = Severity::kInfo, .kind = "speculation.fallback", .message = "a", .request = 3});
  history->add_event({.at_ms = 10'000'000'000'001, .severity = Severity::kError, .kind = "speculation.fault", .message = "b"});
  history->add_event({.at_ms = 10'000'000'000'002, .severity = Severity::kWarning, .kind = "store.dropped", .message = "c"});
  REQUIRE(history->flush().ok());
  const auto found = [&](const EventFilter& filter) {
    auto page = history->events(filter, {});
    REQUIRE(page.ok());
    std::string text;
    for (const Event& event : page->rows) text += event.message;
    return text;
  };
  EventFilter kind, prefix, severity, request, time;
  kind.kind = "store.dropped", prefix.kind = "speculation.", severity.at_least = Severity::kWarning, request.request = 3;
  time.from_ms = 10'000'000'000'001, time.to_ms = 10'000'000'000'002;
  CHECK(found({}) == "cba");
  CHECK(found(kind) == "c");
  CHECK(found(prefix) == "ba");
  CHECK(found(severity) == "cb");
  CHECK(found(request) == "a");
  CHECK(found(time) == "b");
}

TEST_CASE("a run's life: phases with durations, readiness, its end; ids go on after a restart") {
  TemporaryFolder folder;
  const std::string path = folder / "ddtree.db";
  int64_t run_id, request_id;
  {
    auto history = open_at(path);
    run_id = history->begin_run({.version = "1", .started_ms = 1'900'000'000'000});
    history->add_phase({.at_ms = 1'900'000'000'000, .phase = "starting"});
    history->add_phase({.at_ms = 1'900'000'002'500, .phase = "ready", .reason = "smoke test skipped (--skip-smoke)"});
    history->set_run_ready(run_id, 1'900'000'002'500, "skipped");
    history->set_run_ready(run_id, 1'900'000'009'999, "pass");  // ready again after being degraded: the first time counts
    history->set_run_details(run_id, "", "", "DDTREE", "drafts/here");
    history->set_run_details(run_id, R"({"cpu":1})", "[]");
    request_id = history->add_request(sample_request(0, "NONE", "stop"));
    history->end_run(run_id, "asked to stop", 0);
  }
  auto history = open_at(path);
  auto run = history->run(run_id);
  REQUIRE((run.ok() && run->has_value()));
  CHECK(((*run)->end_reason == "asked to stop" && (*run)->exit_code == 0 && (*run)->ended_ms > 0));
  CHECK(((*run)->ready_ms == 1'900'000'002'500 && (*run)->smoke == "pass" && (*run)->devices == R"({"cpu":1})" &&
         (*run)->mode == "DDTREE" && (*run)->drafter == "drafts/here" && (*run)->pid == getpid()));
  auto phases = history->phases(run_id);
  REQUIRE((phases.ok() && phases->size() == 2));
  CHECK((*phases)[0].lasted_ms == 2500);
  CHECK((*phases)[1].reason == "smoke test skipped (--skip-smoke)");
  CHECK(history->begin_run({}) == run_id + 1);
  CHECK(history->add_request(sample_request(0, "NONE", "stop")) == request_id + 1);
  auto missing = history->request(999);
  CHECK((missing.ok() && !missing->has_value()));
}

TEST_CASE("trees are kept of the last requests only; the requests stay") {
  TemporaryFolder folder;
  StoreOptions options = test::ageless();
  options.tree_requests = 3, options.tree_rounds = 2;
  auto history = open_at(folder / "ddtree.db", options);
  std::vector<int64_t> ids;
  for (int i = 0; i < 8; ++i) {
    ids.push_back(history->add_request(sample_request(0, "DDTREE", "stop"), {sample_tree(0), sample_tree(1), sample_tree(2)}));
    if (i == 3) REQUIRE(history->flush().ok());
  }
  REQUIRE(history->flush().ok());
  for (size_t i = 0; i < ids.size(); ++i) {
    auto trees = history->trees(ids[i], {});
    auto request = history->request(ids[i]);
    REQUIRE((trees.ok() && request.ok() && request->has_value()));
    CHECK(trees->total == (i < 5 ? 0 : 2));
    CHECK((*request)->trees == (i < 5 ? 0 : 2));
  }
}

TEST_CASE("retention by days removes what is older, and nothing else") {
  TemporaryFolder folder;
  const std::string path = folder / "ddtree.db";
  const int64_t now = store::now_ms(), day = 86'400'000;
  StoreOptions keep;
  keep.retain_days = 0;
  {
    auto history = open_at(path, keep);
    for (int age : {0, 5, 29, 31, 400}) {
      const int64_t run_id = history->begin_run({.started_ms = now - age * day});
      history->add_phase({.run_id = run_id, .at_ms = now - age * day, .phase = "starting"});
      for (int i = 0; i < 700; ++i)
        history->add_request(sample_request(now - age * day, "DDTREE", "stop"),
                             i == 0 ? std::vector{sample_tree(0)} : std::vector<RoundTree>{});
      history->add_event({.at_ms = now - age * day, .kind = "x"});
      history->put_metric_minute({.minute_ms = now - age * day});
      history->add_calibration({.at_ms = now - age * day, .machine = "m", .name = "n"});
      REQUIRE(history->flush().ok());
    }
  }
  StoreOptions options = test::ageless();
  options.retain_days = 30;
  auto history = open_at(path, options);
  int64_t left = 0;
  for (int i = 0; i < 200; ++i) {
    auto page = history->requests({}, {0, 0});
    REQUIRE(page.ok());
    left = page->total;
    if (left == 2100) break;
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  CHECK(left == 2100);
  auto events = history->events({.kind = "x"}, {});
  CHECK((events.ok() && events->total == 3));
  auto minutes = history->metric_minutes(0, now + day);
  CHECK((minutes.ok() && minutes->size() == 3));
  auto value = history->latest_calibration("m", "n");
  CHECK((value.ok() && value->has_value() && (*value)->at_ms == now - 400 * day));  // the last of its kind stays, whatever its age
}

TEST_CASE("retention by size shrinks the file, oldest requests first") {
  TemporaryFolder folder;
  const std::string path = folder / "ddtree.db";
  StoreOptions options = test::ageless();
  options.store_text = true, options.retain_bytes = 0;
  {
    auto history = open_at(path, options);
    for (int i = 0; i < 3000; ++i) {
      RequestRecord request = sample_request(store::now_ms() + i, "NONE", "stop");
      request.answer_text = std::string(4000, 'x');
      history->add_request(request);
    }
  }
  const auto full = static_cast<int64_t>(test::read_file(path).size());
  REQUIRE(full > 12'000'000);
  options.retain_bytes = 6'000'000;
  {
    auto history = open_at(path, options);
    for (int i = 0; i < 300 && static_cast<int64_t>(std::filesystem::file_size(path)) > 8'000'000; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(30));
      (void)history->add_event({.kind = "tick"});
      REQUIRE(history->flush().ok());
    }
    auto oldest = history->requests({.sort = RequestSort::kOldest}, {1, 0});
    REQUIRE((oldest.ok() && oldest->rows.size() == 1));
    CHECK(oldest->rows[0].id > 1000);
    auto newest = history->requests({}, {1, 0});
    REQUIRE((newest.ok() && newest->rows.size() == 1));
    CHECK(newest->rows[0].id == 3000);
  }
  CHECK(std::filesystem::file_size(path) < 8'000'000);
}

TEST_CASE("rows appear within the promised time without a flush") {
  TemporaryFolder folder;
  auto history = open_at(folder / "ddtree.db");
  const int64_t id = history->add_request(sample_request(0, "NONE", "stop"));
  // Far above commit_ms: only a writer that never commits by itself fails.
  bool seen = false;
  for (int i = 0; i < 200 && !seen; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(25));
    auto request = history->request(id);
    seen = request.ok() && request->has_value();
  }
  CHECK(seen);
  CHECK(history->health().written == 1);
}

TEST_CASE("after a clean end the history is one file, also where it was read") {
  TemporaryFolder folder;
  const std::string path = folder / "h.db";
  {
    auto opened = Store::open(path);
    REQUIRE(opened.ok());
    Store& store = **opened;
    Event event;
    event.kind = "test", event.message = "kept";
    event.at_ms = std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::system_clock::now().time_since_epoch()).count();
    store.add_event(event);
    REQUIRE(store.flush(10).ok());
    REQUIRE(store.events({}, {}).ok());
    REQUIRE(store.requests({}, {}).ok());
  }
  CHECK_FALSE(std::filesystem::exists(path + "-wal"));
  CHECK_FALSE(std::filesystem::exists(path + "-shm"));
  const std::string copy = folder / "copy.db";
  std::filesystem::copy_file(path, copy);
  auto again = Store::open(copy);
  REQUIRE(again.ok());
  const auto events = (*again)->events({}, {});
  REQUIRE(events.ok());
  CHECK(events->total == 1);
}

TEST_CASE("many threads write and read at once") {
  TemporaryFolder folder;
  StoreOptions options = test::ageless();
  options.full_wait_ms = 20'000;
  auto history = open_at(folder / "ddtree.db", options);
  std::vector<std::thread> threads;
  std::atomic<bool> failed{false};
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 500; ++i) history->add_request(sample_request(0, "DDTREE", "stop"));
    });
    threads.emplace_back([&] {
      for (int i = 0; i < 100; ++i)
        if (!history->requests({}, {5, 0}).ok() || !history->runs({}).ok()) failed = true;
    });
  }
  for (auto& thread : threads) thread.join();
  CHECK_FALSE(failed);
  REQUIRE(history->flush(30).ok());
  auto page = history->requests({}, {0, 0});
  CHECK((page.ok() && page->total == 2000));
  CHECK(history->health().dropped_rows == 0);
}

TEST_CASE("broken UTF-8 goes in and comes out valid") {
  CHECK(store::valid_utf8("ok \xF0\x9F\x8C\xB3") == "ok \xF0\x9F\x8C\xB3");
  CHECK(store::valid_utf8("a\xFF") == "a\xEF\xBF\xBD");
  CHECK(store::valid_utf8("\xE2\x82") == "\xEF\xBF\xBD\xEF\xBF\xBD");                  // cut
  CHECK(store::valid_utf8("\xED\xA0\x80") == "\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD");  // a surrogate
  CHECK(store::valid_utf8("\xC0\xAF") == "\xEF\xBF\xBD\xEF\xBF\xBD");                  // overlong
  TemporaryFolder folder;
  auto history = open_at(folder / "ddtree.db");
  history->add_event({.kind = "x", .message = std::string("a\xFE") + '\0' + "b"});
  REQUIRE(history->flush().ok());
  auto events = history->events({}, {});
  REQUIRE((events.ok() && events->rows.size() == 1));
  CHECK(events->rows[0].message == std::string("a\xEF\xBF\xBD") + '\0' + "b");
}

TEST_CASE("the default path follows XDG, systemd and HOME") {
  struct Environment {
    std::vector<std::pair<std::string, std::optional<std::string>>> saved;
    void set(const char* name, const char* value) {
      const char* old = std::getenv(name);
      saved.emplace_back(name, old ? std::optional<std::string>(old) : std::nullopt);
      if (value) setenv(name, value, 1);
      else unsetenv(name);
    }
    ~Environment() {
      for (auto it = saved.rbegin(); it != saved.rend(); ++it)
        it->second ? setenv(it->first.c_str(), it->second->c_str(), 1) : unsetenv(it->first.c_str());
    }
  } environment;
  environment.set("XDG_STATE_HOME", "/x/state");
  environment.set("STATE_DIRECTORY", "/var/lib/ddtree:/var/lib/other");
  environment.set("HOME", "/home/u");
  CHECK(*default_store_path() == "/x/state/ddtree/ddtree.db");
  environment.set("XDG_STATE_HOME", "relative");
  CHECK(*default_store_path() == "/var/lib/ddtree/ddtree.db");
  environment.set("STATE_DIRECTORY", nullptr);
  CHECK(*default_store_path() == "/home/u/.local/state/ddtree/ddtree.db");
  environment.set("HOME", nullptr);
  environment.set("XDG_STATE_HOME", nullptr);
  const auto none = default_store_path();
  REQUIRE_FALSE(none.ok());
  CHECK(none.status().message().find("--db") != std::string::npos);
}

TEST_CASE("the folder is made for its owner alone, and so is the file") {
  TemporaryFolder folder;
  auto history = open_at(folder / "state/ddtree/ddtree.db");
  struct stat info {};
  for (const char* name : {"state", "state/ddtree"}) {
    REQUIRE(stat((folder / name).c_str(), &info) == 0);
    CHECK((info.st_mode & 0777) == 0700);
  }
  REQUIRE(stat((folder / "state/ddtree/ddtree.db").c_str(), &info) == 0);
  CHECK((info.st_mode & 0777) == 0600);
}
