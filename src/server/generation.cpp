#include "server/generation.h"

#include <fmt/core.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <optional>
#include <random>

#include "base/log.h"
#include "health/degeneracy.h"
#include "server/watcher.h"

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
  bool half = false;  // the client closed its sending half and has not been asked yet whether it still reads
  bool gone = false;
  std::vector<uint64_t> ids;                            // engine ids of submitted parts
  std::deque<std::pair<size_t, std::string>> verdicts;  // choice, and what to tell the client; empty: its text is the model's own
};

struct Generation::Choice {
  RecentRequest record;
  bool finished = false;
  // The watch over its text.
  DegeneracyDetector detector;
  Request request;            // as submitted
  std::vector<int32_t> ids;   // committed so far
  bool suspected = false;     // once a stream
  bool judging = false;       // a verdict is awaited
  std::string condemned;      // the verdict was an engine fault: what the client is told
  std::optional<Event> held;  // the last event, which waits for the verdict
};

namespace {
double now_seconds() { return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count(); }
constexpr size_t kJudgedTokens = 512;  // of a suspicious tail: the loop, and where it began

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
  peer.on_close([channel, engine](Peer::Close close) {
    std::vector<uint64_t> ids;
    {
      std::lock_guard lock(channel->mutex);
      if (close == Peer::Close::kHalf) {
        channel->half = true;
      } else {
        channel->gone = true;
        ids = channel->ids;
      }
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
    // A seed of its own, so that what was drawn can be drawn again where the text is judged.
    SamplingParams& sampling = part.request.sampling;
    if (sampling.temperature > 0 && sampling.seed == 0 && !sampling.seed_given) {
      std::random_device device;
      sampling.seed = (static_cast<uint64_t>(device()) << 32) ^ device();
      sampling.seed_given = true;
    }
    if (service.options().degeneracy.run > 0) {
      choice.detector = DegeneracyDetector(service.options().degeneracy);
      choice.request = part.request;
    }
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
  for (Choice& c : choices_)
    if (c.held) {  // it had ended, and the client did not wait for the verdict
      Event event = std::move(*c.held);
      c.held.reset();
      finish(c, &event);
    }
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
  const auto deadline = std::chrono::steady_clock::now() +
                        std::chrono::duration_cast<std::chrono::steady_clock::duration>(std::chrono::duration<double>(seconds));
  for (;;) {
    std::unique_lock lock(channel_->mutex);
    channel_->changed.wait_until(lock, deadline, [&] {
      return channel_->gone || channel_->half || !channel_->events.empty() || !channel_->verdicts.empty() || unfinished_ == 0;
    });
    if (channel_->gone) return Wait::kGone;
    if (channel_->half) {
      channel_->half = false;
      lock.unlock();
      const Peer::Ask asked = peer_.ask();
      if (asked == Peer::Ask::kWrite) return Wait::kTimeout;
      if (asked == Peer::Ask::kAsked) continue;
      cancel();
      lock.lock();
      channel_->gone = true;
      return Wait::kGone;
    }
    if (!channel_->verdicts.empty()) {
      const auto [index, error] = std::move(channel_->verdicts.front());
      channel_->verdicts.pop_front();
      const uint64_t id = channel_->ids[index];
      lock.unlock();
      Choice& c = choices_[index];
      c.judging = false;
      c.condemned = error;
      if (c.held) {
        *event = std::move(*c.held);
        c.held.reset();
        finish(c, event);
        return Wait::kEvent;
      }
      if (!error.empty() && !c.finished) serving_->engine->cancel(id);
      continue;
    }
    if (channel_->events.empty()) return unfinished_ == 0 ? Wait::kDone : Wait::kTimeout;
    *event = std::move(channel_->events.front());
    channel_->events.pop_front();
    lock.unlock();
    Choice& c = choices_[event->choice];
    if (!c.condemned.empty() && !event->delta.finished) continue;  // nothing more of it goes out
    c.record.request.completion_tokens += static_cast<int32_t>(event->delta.ids.size());
    examine(event->choice, event->delta);
    if (!event->delta.finished || c.finished) {
      service_.request_progress(c.record.request.id, c.record.request.completion_tokens);
      return Wait::kEvent;
    }
    if (c.judging && event->delta.finish != FinishReason::kError) {
      c.held = std::move(*event);  // whether this was an answer is not known yet
      continue;
    }
    finish(c, event);
    return Wait::kEvent;
  }
}

// Is this what a broken engine writes? Then the target is asked.
void Generation::examine(size_t index, const Delta& delta) {
  Choice& c = choices_[index];
  if (service_.options().degeneracy.run <= 0 || c.suspected) return;
  c.ids.insert(c.ids.end(), delta.ids.begin(), delta.ids.end());
  std::string text;
  for (const TextPiece& piece : delta.pieces) text += piece.text;
  if (!c.detector.add(text, delta.ids)) return;
  c.suspected = c.judging = true;
  ScoreRequest score;
  score.request = c.request;
  score.from = static_cast<int32_t>(c.ids.size() - std::min(c.ids.size(), kJudgedTokens));
  score.generated = std::move(c.ids);
  service_.watcher().judge(serving_, std::move(score), c.record.request.id, c.detector.reason(),
                           [channel = channel_, index](const std::string& error) {
                             {
                               std::lock_guard lock(channel->mutex);
                               channel->verdicts.emplace_back(index, error);
                             }
                             channel->changed.notify_all();
                           });
}

// The last event of a choice: closes its record.
void Generation::finish(Choice& c, Event* event) {
  Delta& delta = event->delta;
  if (!c.condemned.empty()) {
    delta.finish = FinishReason::kError;
    delta.error = c.condemned;
    delta.ids.clear();
    delta.pieces.clear();
  }
  c.finished = true;
  --unfinished_;
  c.record.stats = delta.stats;
  c.record.finish = finish_name(delta.finish);
  c.record.error = delta.error;
  if (delta.finish == FinishReason::kError) c.record.http_status = 500;
  if (delta.finish == FinishReason::kCancelled) c.record.http_status = 503;  // not by its client: the server stops or restarts its engine
  event->branch_hits = branch_hits(delta.stats);
  delta.stats.trees.clear();  // the record has them; replies do not
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
