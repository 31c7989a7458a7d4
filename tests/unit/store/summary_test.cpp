// Percentiles, breakdowns and filters over requests, against figures worked out here without SQL; and what a disk that refuses does.
#include <fmt/core.h>
#include <sys/resource.h>

#include <algorithm>
#include <catch2/catch_test_macros.hpp>
#include <cmath>
#include <csignal>
#include <map>
#include <random>
#include <thread>

#include "store/database.h"
#include "store/store.h"
#include "unit/store/opened.h"
#include "unit/store/temporary.h"

using namespace ddtree;
using test::open_at;
using test::TemporaryFolder;

namespace {

std::vector<RequestRecord> some_requests(int count) {
  std::mt19937 random(5);
  const auto below = [&](int n) { return static_cast<int32_t>(random() % static_cast<unsigned>(n)); };
  std::vector<RequestRecord> all;
  const int64_t now = store::now_ms();
  for (int i = 0; i < count; ++i) {
    RequestRecord r;
    r.request_id = fmt::format("chatcmpl-{}", i);
    r.received_ms = now - 1000 * (count - i), r.finished_ms = r.received_ms + 10;
    r.mode = std::vector<const char*>{"NONE", "DFLASH", "DDTREE", "NEXTN"}[static_cast<size_t>(below(4))];
    r.thinking = below(3) - 1;
    r.finish = "stop";
    r.prompt_tokens = 1 + below(3000);
    r.completion_tokens = i % 17 == 0 ? 0 : 1 + below(900);
    r.rounds = r.completion_tokens > 1 ? 1 + below(60) : 0;
    if (r.mode != "NONE") {
      for (int64_t left = r.rounds; left > 0; left = left * below(100) / 100) r.accepted_at.push_back(static_cast<int32_t>(left));
      for (const int32_t n : r.accepted_at) r.accepted += n;
    }
    r.drafted = r.accepted + below(500);
    if (r.completion_tokens > 0) r.first_token_ms = 5 + below(4000) / 8.0;
    r.decode_ms = r.completion_tokens > 1 ? 10 + below(9000) : 0;
    r.total_ms = i % 17 == 0 ? 0 : r.first_token_ms + r.decode_ms;
    if (r.decode_ms > 0) r.tokens_per_second = (r.completion_tokens - 1) * 1000 / r.decode_ms;
    all.push_back(r);
  }
  return all;
}

// By definition and by counting, not by sorting: the smallest value that at least `percent` % of all do not exceed.
double by_counting(const std::vector<double>& values, int percent) {
  double best = INFINITY;
  for (const double v : values) {
    const auto not_above = std::count_if(values.begin(), values.end(), [&](double x) { return x <= v; });
    if (100 * not_above >= percent * static_cast<std::ptrdiff_t>(values.size())) best = std::min(best, v);
  }
  return best;
}

void check_percentiles(const Percentiles& got, const std::vector<double>& values) {
  REQUIRE(got.count == static_cast<int64_t>(values.size()));
  CHECK(got.p50 == by_counting(values, 50));
  CHECK(got.p90 == by_counting(values, 90));
  CHECK(got.p95 == by_counting(values, 95));
  CHECK(got.p99 == by_counting(values, 99));
}

template <class F>
bool eventually(F&& f) {
  for (int i = 0; i < 1200; ++i) {
    if (f()) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(25));
  }
  return false;
}

}  // namespace

TEST_CASE("percentiles are those of the filtered requests that have the figure") {
  TemporaryFolder folder;
  auto history = open_at(folder / "ddtree.db");
  const std::vector<RequestRecord> all = some_requests(257);
  for (const RequestRecord& r : all) history->add_request(r);
  REQUIRE(history->flush().ok());
  const auto check = [&](const RequestFilter& filter, auto matches) {
    std::vector<double> first, total, speed, mean;
    int64_t requests = 0, decoded = 0;
    for (const RequestRecord& r : all) {
      if (!matches(r)) continue;
      ++requests;
      decoded += std::max(0, r.completion_tokens - 1);
      if (r.completion_tokens > 0) first.push_back(r.first_token_ms);
      if (r.total_ms > 0) total.push_back(r.total_ms);
      if (r.tokens_per_second > 0) speed.push_back(r.tokens_per_second);
      if (r.rounds > 0 && r.mode != "NONE") mean.push_back(1.0 + static_cast<double>(r.accepted) / static_cast<double>(r.rounds));
    }
    auto got = history->request_summary(filter);
    REQUIRE(got.ok());
    REQUIRE(requests > 3);
    CHECK(got->totals.requests == requests);
    CHECK(got->totals.decoded_tokens == decoded);
    check_percentiles(got->first_token_ms, first);
    check_percentiles(got->total_ms, total);
    check_percentiles(got->tokens_per_second, speed);
    check_percentiles(got->tokens_per_round, mean);
  };
  check({}, [](const RequestRecord&) { return true; });
  check({.mode = {"DDTREE"}}, [](const RequestRecord& r) { return r.mode == "DDTREE"; });
  check({.thinking = true}, [](const RequestRecord& r) { return r.thinking == 1; });
  check({.context_from = 1000, .context_to = 2000}, [](const RequestRecord& r) {
    const int32_t context = r.prompt_tokens + r.completion_tokens;
    return context >= 1000 && context < 2000;
  });
  auto none = history->request_summary({.client = "nobody"});
  REQUIRE(none.ok());
  CHECK((none->totals.requests == 0 && none->total_ms.count == 0 && none->total_ms.p99 == 0));
  auto one = history->request_summary({.request_id = "chatcmpl-5"});
  REQUIRE(one.ok());
  CHECK((one->total_ms.count == 1 && one->total_ms.p50 == all[5].total_ms && one->total_ms.p99 == all[5].total_ms));
}

TEST_CASE("acceptance by mode, thinking and context length adds up to what the requests had") {
  TemporaryFolder folder;
  auto history = open_at(folder / "ddtree.db");
  const std::vector<RequestRecord> all = some_requests(400);
  for (const RequestRecord& r : all) history->add_request(r);
  REQUIRE(history->flush().ok());
  auto got = history->acceptance({});
  REQUIRE(got.ok());
  struct Sum {
    int64_t requests = 0, rounds = 0, accepted = 0, decoded = 0;
    std::vector<int64_t> at;
    void add(const RequestRecord& r) {
      ++requests, rounds += r.rounds, accepted += r.accepted, decoded += std::max(0, r.completion_tokens - 1);
      if (at.size() < r.accepted_at.size()) at.resize(r.accepted_at.size());
      for (size_t i = 0; i < r.accepted_at.size(); ++i) at[i] += r.accepted_at[i];
    }
  };
  std::map<std::string, Sum> mode, thinking, context;
  Sum speculative;
  for (const RequestRecord& r : all) {
    if (r.rounds == 0) continue;
    mode[r.mode].add(r);
    if (r.mode == "NONE") continue;
    speculative.add(r);
    thinking[r.thinking == 1 ? "on" : r.thinking == 0 ? "off" : "unknown"].add(r);
    const int32_t tokens = r.prompt_tokens + r.completion_tokens;
    context[tokens < 256 ? "256" : tokens < 512 ? "512" : tokens < 1024 ? "1024" : tokens < 2048 ? "2048" : "4096"].add(r);
  }
  const auto same = [](const RequestTotals& a, const Sum& b) {
    CHECK(a.requests == b.requests);
    CHECK(a.rounds == b.rounds);
    CHECK(a.accepted == b.accepted);
    CHECK(a.decoded_tokens == b.decoded);
    CHECK(a.accepted_at == b.at);
  };
  const auto compare = [&](const std::vector<AcceptanceGroup>& groups, const std::map<std::string, Sum>& want) {
    REQUIRE(groups.size() == want.size());
    for (const AcceptanceGroup& group : groups) {
      INFO(group.name);
      REQUIRE(want.contains(group.name));
      same(group.totals, want.at(group.name));
    }
  };
  same(got->speculative, speculative);
  compare(got->by_mode, mode);
  compare(got->by_thinking, thinking);
  compare(got->by_context, context);
  for (size_t i = 1; i < got->by_context.size(); ++i)
    CHECK(std::stoi(got->by_context[i - 1].name) < std::stoi(got->by_context[i].name));  // by number, not by letter
  auto tree = history->acceptance({.mode = {"DDTREE"}});
  REQUIRE(tree.ok());
  CHECK((tree->by_mode.size() == 1 && tree->by_mode[0].name == "DDTREE"));
  CHECK(tree->speculative.rounds == mode["DDTREE"].rounds);
  auto plain = history->acceptance({.mode = {"NONE"}});
  REQUIRE(plain.ok());
  CHECK((plain->speculative.requests == 0 && plain->by_context.empty() && plain->by_mode.size() == 1));
}

TEST_CASE("every order can be turned round") {
  TemporaryFolder folder;
  auto history = open_at(folder / "ddtree.db");
  for (const RequestRecord& r : some_requests(60)) history->add_request(r);
  REQUIRE(history->flush().ok());
  for (const RequestSort sort : {RequestSort::kNewest, RequestSort::kOldest, RequestSort::kSlowest, RequestSort::kFirstToken,
                                 RequestSort::kTokens, RequestSort::kAcceptance, RequestSort::kSpeed, RequestSort::kContext}) {
    auto there = history->requests({.sort = sort}, {100, 0}), back = history->requests({.sort = sort, .reversed = true}, {100, 0});
    REQUIRE((there.ok() && back.ok() && there->rows.size() == 60 && back->rows.size() == 60));
    for (size_t i = 0; i < 60; ++i) CHECK(there->rows[i].id == back->rows[59 - i].id);
    auto ids = history->request_ids({.sort = sort});
    REQUIRE((ids.ok() && ids->size() == 60));
    for (size_t i = 0; i < 60; ++i) CHECK((*ids)[i] == there->rows[i].id);
  }
  auto some = history->requests_of({7, 999, 3, 5});  // in that order, without what is not there
  REQUIRE((some.ok() && some->size() == 3));
  CHECK(((*some)[0].id == 7 && (*some)[1].id == 3 && (*some)[2].id == 5 && (*some)[1].request_id == "chatcmpl-2"));
  auto longest = history->requests({.sort = RequestSort::kContext}, {1, 0});
  REQUIRE(longest.ok());
  int32_t most = 0;
  for (const RequestRecord& r : some_requests(60)) most = std::max(most, r.prompt_tokens + r.completion_tokens);
  CHECK(longest->rows[0].prompt_tokens + longest->rows[0].completion_tokens == most);
}

TEST_CASE("smoke runs of one start") {
  TemporaryFolder folder;
  auto history = open_at(folder / "ddtree.db");
  const int64_t first = history->begin_run({});
  history->add_smoke_run({.trigger = "start", .verdict = "pass"});
  const int64_t second = history->begin_run({});
  history->add_smoke_run({.trigger = "start", .verdict = "fail"});
  history->add_smoke_run({.trigger = "dashboard", .verdict = "pass"});
  REQUIRE(history->flush().ok());
  auto of_first = history->smoke_runs({}, first), of_second = history->smoke_runs({}, second);
  REQUIRE((of_first.ok() && of_second.ok()));
  CHECK((of_first->total == 1 && of_first->rows[0].verdict == "pass"));
  CHECK((of_second->total == 2 && of_second->rows[0].trigger == "dashboard"));
}

TEST_CASE("a disk that refuses degrades the history, says so in memory, and is written to again when it takes rows") {
  TemporaryFolder folder;
  const std::string path = folder / "ddtree.db";
  auto history = open_at(path);
  const int64_t run_id = history->begin_run({});
  history->add_request({.request_id = "before", .finish = "stop"});
  REQUIRE(history->flush().ok());
  // No file of this process may grow: writes past the limit fail as on a full disk.
  std::signal(SIGXFSZ, SIG_IGN);
  rlimit before{};
  REQUIRE(getrlimit(RLIMIT_FSIZE, &before) == 0);
  const rlimit none{1, before.rlim_max};
  REQUIRE(setrlimit(RLIMIT_FSIZE, &none) == 0);
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < 300; ++i) history->add_request({.request_id = fmt::format("during-{}", i), .finish = "stop"});
  history->add_event({.kind = "ladder", .message = "to NONE"});
  const double added_in = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  const bool noticed = eventually([&] { return !history->health().writable; });
  const StoreHealth health = history->health();
  const std::vector<Event> events = history->recent_events();
  auto page = history->requests({}, {10, 0});
  REQUIRE(setrlimit(RLIMIT_FSIZE, &before) == 0);  // before any check can end the case
  REQUIRE(noticed);
  CHECK(added_in < 5);  // only callers that wait for the disk take longer
  CHECK((health.failing_since_ms > 0 && !health.message.empty() && health.queued >= 301 && health.dropped_rows == 0));
  REQUIRE(events.size() == 2);
  const bool told_first = events[0].kind == "store.unwritable";
  CHECK(events[told_first ? 0 : 1].kind == "store.unwritable");
  CHECK(events[told_first ? 0 : 1].run_id == run_id);
  CHECK(events[told_first ? 1 : 0].message == "to NONE");
  CHECK((page.ok() && page->total == 1));  // what was written can still be read

  REQUIRE(eventually([&] { return history->health().writable; }));
  REQUIRE(history->flush(30).ok());
  REQUIRE(eventually([&] {
    auto told = history->events({.kind = "store."}, {});
    return told.ok() && told->total == 2;
  }));
  auto told = history->events({}, {});
  REQUIRE((told.ok() && told->total == 3));
  std::string kinds;
  for (const Event& e : told->rows) kinds += e.kind + " ";
  CHECK(kinds.find("store.unwritable") != std::string::npos);
  CHECK(kinds.find("store.writable") != std::string::npos);
  CHECK(kinds.find("ladder") != std::string::npos);
  auto kept = history->requests({}, {0, 0});
  CHECK((kept.ok() && kept->total == 301));
  CHECK(history->health().failing_since_ms == 0);
}

TEST_CASE("a locked history waits for its lock, and a flapping disk does not fill the memory with events") {
  TemporaryFolder folder;
  std::atomic<bool> refuse{false};
  StoreOptions options = test::ageless();
  options.before_commit = [&] { return refuse ? Status(Code::kStorage, "database is locked (SQLite code 5)") : Status(); };
  auto history = open_at(folder / "ddtree.db", options);
  REQUIRE(history->flush().ok());
  refuse = true;
  history->add_request({.request_id = "a", .finish = "stop"});
  REQUIRE(eventually([&] { return !history->health().writable; }));
  CHECK(history->health().message.find("locked") != std::string::npos);
  const Status late = history->flush(0.05);
  CHECK((!late.ok() && late.message().find("locked") != std::string::npos));
  refuse = false;
  REQUIRE(history->flush(30).ok());
  for (int i = 0; i < 200; ++i) history->add_event({.kind = "x", .message = std::to_string(i)});
  const std::vector<Event> recent = history->recent_events();
  REQUIRE(recent.size() == 64);
  CHECK(recent[0].message == "199");
  REQUIRE(history->flush().ok());
  auto page = history->events({.kind = "x"}, {1, 0});
  REQUIRE(page.ok());
  CHECK(page->rows[0].id == recent[0].id);  // the same event, wherever it is read
}
