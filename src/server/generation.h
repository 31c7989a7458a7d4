// From a checked request to the engine's deltas: submit, wait, cancel when the client goes away, and keep the books.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "server/http_server.h"
#include "server/service.h"

namespace ddtree {

std::string new_request_id(const char* prefix);  // "chatcmpl-" and 24 random hex digits

// All choices of one API request. Used by one thread.
class Generation {
 public:
  struct Part {
    Request request;
    LiveRequest info;  // id, endpoint, client, stream, counts
  };
  // Submits every part, or none: where one is refused the earlier ones are cancelled and its Status comes back.
  static Result<std::unique_ptr<Generation>> start(Service& service, std::shared_ptr<const Serving> serving, std::vector<Part> parts,
                                                   Peer& peer);
  ~Generation();  // cancels what still runs and waits for its last delta

  struct Event {
    size_t choice = 0;
    Delta delta;
    int64_t branch_hits = 0;  // last one: accepted nodes that were not their parent's best child
  };
  // kTimeout: nothing yet; a stream writes a comment (also, at once, to find out whether a client that closed its sending half still
  // reads). kGone: the client left. kDone: every choice finished.
  enum class Wait : uint8_t { kEvent, kTimeout, kGone, kDone };
  Wait next(Event* event, double seconds);

  // What the reply said, for the history (call before destruction; finish reason "tool_calls" is the API's, not the engine's).
  void note(size_t choice, std::string finish, int32_t reasoning_tokens, std::string answer);
  void note_prompt(size_t choice, std::string prompt);
  void note_thinking(int thinking);  // 1 on, 0 off
  void cancel();
  bool stopping() const { return service_.draining(); }  // why the engine cancels: the server stops, or the engine is restarted

 private:
  struct Channel;
  struct Choice;
  Generation(Service& service, std::shared_ptr<const Serving> serving, Peer& peer);
  void record(Choice& choice);
  void examine(size_t index, const Delta& delta);
  void finish(Choice& choice, Event* event);

  Service& service_;
  std::shared_ptr<const Serving> serving_;
  Peer& peer_;
  std::shared_ptr<Channel> channel_;
  std::vector<Choice> choices_;
  size_t unfinished_ = 0;
};

}  // namespace ddtree
