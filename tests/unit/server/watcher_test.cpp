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
  CHECK(h.get("/health").body["ladder"]["step"] == "NONE");  // the options' mode: nothing was loaded here
  CHECK(h.get("/health_generate").status == 503);            // no canary is known
}
