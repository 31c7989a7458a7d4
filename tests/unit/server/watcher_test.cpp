// Suspicious text on its way to a client: judged once, ended only where the target does not stand by it.
#include "server/watcher.h"

#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>

#include "harness.h"
#include "health/phases.h"

using namespace ddtree;
using namespace ddtree::test;
using Catch::Matchers::ContainsSubstring;

namespace {

Json endless(bool stream) {
  Json body = chat_body();
  body["max_tokens"] = 400;
  body["temperature"] = 0;
  body["stream"] = stream;
  return body;
}

void write_exclamation_marks(Harness& h) {
  h.engine.answer = [](const Request&) { return std::string("!"); };
  h.engine.endless = true;
}

}  // namespace

TEST_CASE("degenerate text that the target does not stand by: a 500, or an error event at the end of a stream") {
  Harness h;
  write_exclamation_marks(h);
  h.engine.stands_by_it = false;
  const auto whole = h.post("/v1/chat/completions", endless(false));
  CHECK(whole.status == 500);
  CHECK(whole.body["error"]["code"] == "engine_fault");
  CHECK_THAT(whole.body["error"]["message"].get<std::string>(), ContainsSubstring("does not stand by") && ContainsSubstring("'!'"));
  CHECK(h.engine.scores == 1);

  h.engine.pause = std::chrono::milliseconds(1);
  const auto events = sse_data(h.post("/v1/chat/completions", endless(true)).text);
  REQUIRE(events.size() > 20);
  CHECK_THAT(events.back(), ContainsSubstring("\"error\"") && ContainsSubstring("does not stand by"));
  for (const std::string& e : events) CHECK(e != "[DONE]");
  CHECK(h.engine.scores == 2);
  const auto recent = h.service.recent_requests();
  REQUIRE(recent.size() == 2);
  for (const auto& r : recent) {
    CHECK(r->finish == "error");
    CHECK(r->http_status == 500);
    CHECK_THAT(r->error, ContainsSubstring("does not stand by"));
  }
}

TEST_CASE("the same text, stood by, reaches its end, and is judged once a stream") {
  Harness h;
  write_exclamation_marks(h);
  const auto whole = h.post("/v1/chat/completions", endless(false));
  CHECK(whole.status == 200);
  CHECK(whole.body["usage"]["completion_tokens"] == 400);
  CHECK(h.engine.scores == 1);
  const auto events = sse_data(h.post("/v1/chat/completions", endless(true)).text);
  CHECK(events.back() == "[DONE]");
  CHECK(h.engine.scores == 2);
}

TEST_CASE("ordinary text is not judged, and nothing is where the watch is off") {
  Harness h;
  CHECK(h.post("/v1/chat/completions", chat_body()).status == 200);
  CHECK(h.engine.scores == 0);
  ServiceOptions off;
  off.degeneracy.run = 0;
  Harness unwatched(off);
  write_exclamation_marks(unwatched);
  unwatched.engine.stands_by_it = false;
  CHECK(unwatched.post("/v1/chat/completions", endless(false)).status == 200);
  CHECK(unwatched.engine.scores == 0);
}

TEST_CASE("a sampled request is given a seed, so that its text can be drawn again") {
  Harness h;
  Json body = chat_body();
  body["temperature"] = 1.0;
  REQUIRE(h.post("/v1/chat/completions", body).status == 200);
  body["seed"] = 0;
  REQUIRE(h.post("/v1/chat/completions", body).status == 200);
  std::lock_guard lock(h.engine.mutex());
  REQUIRE(h.engine.seen.size() == 2);
  CHECK(h.engine.seen[0].sampling.seed_given);
  CHECK(h.engine.seen[0].sampling.seed != 0);
  CHECK(h.engine.seen[1].sampling.seed == 0);
}

TEST_CASE("conditions make ready degraded and back, and their words are everywhere") {
  Harness h;
  h.service.set_condition("a", {false, "one thing is different"});
  CHECK(h.service.phases().state().phase == Phase::kReady);
  CHECK_THAT(h.get("/readyz").text, ContainsSubstring("one thing is different"));
  h.service.set_condition("b", {true, "another is wrong"});
  CHECK(h.service.phases().state().phase == Phase::kDegraded);
  CHECK(h.get("/readyz").status == 200);
  CHECK(h.service.phases().state().reason == "one thing is different; another is wrong");
  h.service.set_condition("b", {});
  CHECK(h.service.phases().state().phase == Phase::kReady);
  h.service.set_condition("a", {});
  CHECK(h.service.phases().state().reason.empty());
  CHECK(h.get("/health").body["ladder"].is_null());  // nothing was loaded here, so no mode is known
  h.service.watcher().begin(h.service.serving());
  CHECK(h.get("/livez").body["ladder"]["step"] == "DDTREE");
}

TEST_CASE("a canary that has to wait: busy where passes end meanwhile, no answer where they do not, and a failed one is not forgiven") {
  Harness h;
  h.engine.answer = [](const Request& r) { return std::string(r.own ? "36, 37, 38" : "word "); };
  h.service.watcher().begin(h.service.serving());
  REQUIRE(h.service.watcher().canary_now(20, 20).passed);
  {
    std::lock_guard lock(h.engine.mutex());
    CHECK(h.engine.seen.back().ahead);
    CHECK(h.engine.seen.back().own);
  }
  const auto later = [] { std::this_thread::sleep_for(std::chrono::milliseconds(1100)); };  // an answer is shared for a second
  later();
  h.engine.hold_ahead = true;
  const CanaryState idle = h.service.watcher().canary_now(0.3, 0.1);
  CHECK(idle.running);
  CHECK_FALSE(idle.busy);
  CHECK_THAT(idle.reason, ContainsSubstring("not answered within"));

  // The same while a client's stream runs: the engine gets on.
  h.engine.endless = true;
  h.engine.pause = std::chrono::milliseconds(5);
  std::thread stream([&] {
    Json body = endless(true);
    body["max_tokens"] = 450;
    h.post("/v1/chat/completions", body);
  });
  REQUIRE(Harness::eventually([&] { return h.engine.running() == 2; }));
  const CanaryState busy = h.service.watcher().canary_now(20, 0.2);
  CHECK(busy.busy);
  CHECK_THAT(busy.reason, ContainsSubstring("busy: 2 requests run") && ContainsSubstring("passes ended"));
  stream.join();

  // It is answered after all, and wrongly: from then on being busy is no excuse.
  h.engine.answer = [](const Request&) { return std::string("something else"); };
  h.engine.hold_ahead = false;
  REQUIRE(Harness::eventually([&] { return !h.service.watcher().canary().running; }));
  later();
  REQUIRE_FALSE(h.service.watcher().canary_now(20, 20).passed);
  later();
  h.engine.hold_ahead = true;
  std::thread again([&] {
    Json body = endless(true);
    body["max_tokens"] = 450;
    h.post("/v1/chat/completions", body);
  });
  REQUIRE(Harness::eventually([&] { return h.engine.running() == 1; }));
  const CanaryState failed = h.service.watcher().canary_now(0.4, 0.2);
  CHECK_FALSE(failed.busy);
  CHECK(failed.running);
  h.engine.hold_ahead = false;
  again.join();
}
