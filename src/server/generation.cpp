#include "server/generation.h"

#include <fmt/core.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <random>

#include "base/log.h"

namespace ddtree {

std::string new_request_id(const char* prefix) {
  static thread_local std::mt19937_64 random{(static_cast<uint64_t>(std::random_device{}()) << 32) ^ std::random_device{}()};
  const uint64_t a = random(), b = random();
  return fmt::format("{}{:016x}{:08x}", prefix, a, static_cast<uint32_t>(b));
}

// Between the engine's thread, the watcher's and the connection's. Outlives the Generation where a sink still holds it.
struct Generation::Channel {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Event> events;
  bool gone = false;
  std::vector<uint64_t> ids;  // engine ids of submitted parts
};

struct Generation::Choice {
  RecentRequest record;
  bool finished = false;
};

namespace {
double now_seconds() { return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count(); }
// Nodes are in best-first order: a parent's first child is its best.
int64_t branch_hits(const RequestStats& stats) {
  int64_t hits = 0;
  for (const RoundRecord& round : stats.trees) {
    std::vector<uint8_t> has_child(round.parent.size(), 0);
    for (size_t i = 0; i < round.parent.size(); ++i) {
      const int32_t parent = round.parent[i];
      if (parent < 0 || static_cast<size_t>(parent) >= has_child.size()) continue;
      if (has_child[static_cast<size_t>(parent)] && i < round.accepted.size() && round.accepted[i]) ++hits;
      has_child[static_cast<size_t>(parent)] = 1;
    }
  }
  return hits;
}

}  // namespace

Generation::Generation(Service& service, std::shared_ptr<const Serving> serving, Peer& peer)
    : service_(service), serving_(std::move(serving)), peer_(peer), channel_(std::make_shared<Channel>()) {}

Result<std::unique_ptr<Generation>> Generation::start(Service& service, std::shared_ptr<const Serving> serving, std::vector<Part> parts,
                                                      Peer& peer) {
  std::unique_ptr<Generation> g(new Generation(service, std::move(serving), peer));
  Engine* engine = g->serving_->engine;
  const std::shared_ptr<Channel> channel = g->channel_;
  // The watch comes first: a client that is gone already cancels whatever is submitted below.
  peer.on_close([channel, engine] {
    std::vector<uint64_t> ids;
    {
      std::lock_guard lock(channel->mutex);
      channel->gone = true;
      ids = channel->ids;
    }
    for (const uint64_t id : ids) engine->cancel(id);
    channel->changed.notify_all();
  });
  g->choices_.reserve(parts.size());
  for (size_t i = 0; i < parts.size(); ++i) {
    Part& part = parts[i];
    part.info.started = now_seconds();
    Choice choice;
    choice.record.request = part.info;
    choice.record.temperature = part.request.sampling.temperature;
    choice.record.budget = part.request.budget.value_or(engine->options().budget);
    part.request.id = part.info.id;
    service.request_started(part.info);
    auto submitted = engine->submit(std::move(part.request), [channel, i](Delta&& delta) {
      {
        std::lock_guard lock(channel->mutex);
        channel->events.push_back({i, std::move(delta), 0});
      }
      channel->changed.notify_all();
    });
    if (!submitted) {
      const Status status = submitted.status();
      choice.record.finish = "error";
      choice.record.error = status.message();
      choice.record.finished = now_seconds();
      choice.record.http_status = status.code() == Code::kTemporary ? 429 : 400;
      service.request_finished(std::move(choice.record));
      return status;  // ~Generation cancels the parts before this one
    }
    ++g->unfinished_;
    g->choices_.push_back(std::move(choice));
    bool gone;
    {
      std::lock_guard lock(channel->mutex);
      channel->ids.push_back(*submitted);
      gone = channel->gone;
    }
    if (gone) engine->cancel(*submitted);  // the watch fired between submit and here
  }
  return g;
}

Generation::~Generation() {
  peer_.on_close(nullptr);
  if (unfinished_ > 0) {
    cancel();
    // The engine ends a cancelled request before its next round; its last delta closes the books. A minute means that the engine is stuck:
    // then the books are closed without it.
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    std::unique_lock lock(channel_->mutex);
    while (unfinished_ > 0 && std::chrono::steady_clock::now() < deadline) {
      if (channel_->events.empty()) {
        channel_->changed.wait_until(lock, deadline);
        continue;
      }
      Event event = std::move(channel_->events.front());
      channel_->events.pop_front();
      if (!event.delta.finished) continue;
      Choice& c = choices_[event.choice];
      if (c.finished) continue;
      c.finished = true;
      --unfinished_;
      c.record.stats = std::move(event.delta.stats);
      // Whatever the engine made of it, the client did not see it.
      c.record.finish = event.delta.finish == FinishReason::kError ? "error" : "cancelled";
      c.record.error = event.delta.error;
      c.record.http_status = 499;
    }
  }
  for (Choice& c : choices_) record(c);
}

void Generation::record(Choice& c) {
  if (!c.finished) {
    log::error("request {}: the engine did not end it within a minute of its cancellation", c.record.request.id);
    c.record.finish = "error";
    c.record.error = "the engine did not answer";
    c.record.http_status = 500;
  }
  c.record.finished = now_seconds();
  c.record.request.completion_tokens = c.record.stats.completion_tokens;
  service_.request_finished(std::move(c.record));
}

Generation::Wait Generation::next(Event* event, double seconds) {
  std::unique_lock lock(channel_->mutex);
  channel_->changed.wait_for(lock, std::chrono::duration<double>(seconds),
                             [&] { return channel_->gone || !channel_->events.empty() || unfinished_ == 0; });
  if (channel_->gone) return Wait::kGone;
  if (channel_->events.empty()) return unfinished_ == 0 ? Wait::kDone : Wait::kTimeout;
  *event = std::move(channel_->events.front());
  channel_->events.pop_front();
  lock.unlock();
  Choice& c = choices_[event->choice];
  c.record.request.completion_tokens += static_cast<int32_t>(event->delta.ids.size());
  if (event->delta.finished && !c.finished) {
    c.finished = true;
    --unfinished_;
    c.record.stats = event->delta.stats;
    c.record.finish = finish_name(event->delta.finish);
    c.record.error = event->delta.error;
    if (event->delta.finish == FinishReason::kError) c.record.http_status = 500;
    if (event->delta.finish == FinishReason::kCancelled) c.record.http_status = 503;  // not by its client: the server stops
    event->branch_hits = branch_hits(event->delta.stats);
    event->delta.stats.trees.clear();  // the record has them; replies do not
  } else {
    service_.request_progress(c.record.request.id, c.record.request.completion_tokens);
  }
  return Wait::kEvent;
}

void Generation::note(size_t choice, std::string finish, int32_t reasoning_tokens, std::string answer) {
  RecentRequest& r = choices_[choice].record;
  r.finish = std::move(finish);
  r.reasoning_tokens = reasoning_tokens;
  if (service_.options().store_text) r.answer_text = std::move(answer);
}

void Generation::note_prompt(size_t choice, std::string prompt) {
  if (service_.options().store_text) choices_[choice].record.prompt_text = std::move(prompt);
}

void Generation::note_thinking(int thinking) {
  for (Choice& c : choices_) c.record.thinking = thinking;
}

void Generation::cancel() {
  std::vector<uint64_t> ids;
  {
    std::lock_guard lock(channel_->mutex);
    ids = channel_->ids;
  }
  for (const uint64_t id : ids) serving_->engine->cancel(id);
}

}  // namespace ddtree
