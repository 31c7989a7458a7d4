#include "health/engine_subject.h"

#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

namespace ddtree {
namespace {

using Clock = std::chrono::steady_clock;

double milliseconds_since(Clock::time_point begin) { return std::chrono::duration<double, std::milli>(Clock::now() - begin).count(); }

// A piece that begins with a continuation byte, or ends before its character does, was cut inside one.
bool whole_characters(const std::string& text) {
  for (size_t i = 0; i < text.size();) {
    const auto lead = static_cast<unsigned char>(text[i]);
    const size_t length = lead < 0x80 ? 1 : lead >= 0xF0 ? 4 : lead >= 0xE0 ? 3 : lead >= 0xC2 ? 2 : 0;
    if (length == 0 || i + length > text.size()) return false;
    for (size_t j = 1; j < length; ++j)
      if ((static_cast<unsigned char>(text[i + j]) & 0xC0) != 0x80) return false;
    i += length;
  }
  return true;
}

// The sink's side: owned by both, since a late delta may come after the waiter gave up.
struct Pending {
  std::mutex mutex;
  std::condition_variable changed;
  SmokeAnswer answer;
  std::string run;  // the current run of ordinary text
  bool finished = false, cancelled = false;
  Clock::time_point begin = Clock::now();

  void take(Delta&& delta) {
    std::lock_guard lock(mutex);
    if (!delta.ids.empty() && answer.ids.empty()) answer.first_ms = milliseconds_since(begin);
    if (finished && answer.framing.empty()) answer.framing = "something came after the last delta";
    answer.ids.insert(answer.ids.end(), delta.ids.begin(), delta.ids.end());
    for (const TextPiece& piece : delta.pieces) {
      if (!whole_characters(piece.text) && answer.framing.empty()) answer.framing = "a piece of text was cut inside a character";
      if (!piece.special) answer.text += piece.text;
      run = piece.token < 0 ? run + piece.text : std::string();
      if (run.size() > answer.longest_run.size()) answer.longest_run = run;
    }
    if (!delta.finished) return;
    answer.finish = finish_name(delta.finish);
    answer.stop_string = delta.stop_string;
    answer.prompt_tokens = delta.stats.prompt_tokens, answer.completion_tokens = delta.stats.completion_tokens;
    answer.decode_ms = delta.stats.decode_ms;
    answer.stats = std::move(delta.stats);
    answer.stats_whole = true;
    if (delta.finish == FinishReason::kError) {
      answer.trouble = SmokeTrouble::kFault;
      answer.error = delta.error.empty() ? "the engine ended the request with an error" : delta.error;
    }
    cancelled = delta.finish == FinishReason::kCancelled;
    finished = true;
    changed.notify_all();
  }
};

}  // namespace

EngineSubject::EngineSubject(Engine& engine, Encode encode, std::vector<SpeculationMode> modes, bool chat)
    : engine_(engine), encode_(std::move(encode)) {
  abilities_.chat = chat;
  abilities_.modes = std::move(modes);
  abilities_.no_tools = "tool calls are the API's";
  abilities_.context = engine.options().context_length;
}

int EngineSubject::others() const {
  const EngineSnapshot s = engine_.snapshot();
  return s.running + s.waiting;
}

int64_t EngineSubject::count_tokens(const SmokeQuestion& question) {
  const auto ids = encode_(question);
  return ids ? static_cast<int64_t>(ids->size()) : -1;
}

SmokeAnswer EngineSubject::ask(const SmokeQuestion& question, const SmokeLimit& limit) {
  const auto failed = [](SmokeTrouble trouble, std::string why) {
    SmokeAnswer answer;
    answer.trouble = trouble, answer.error = std::move(why);
    return answer;
  };
  auto ids = encode_(question);
  if (!ids) return failed(SmokeTrouble::kFault, ids.status().message());
  if (ids->empty()) return failed(SmokeTrouble::kFault, "the prompt has no tokens");
  Request request;
  request.id = "smoke-" + question.id;
  request.prompt = std::move(*ids);
  request.sampling.temperature = 0;
  request.max_tokens = question.max_tokens;
  request.stop_strings = question.stop;
  request.mode = question.mode;
  request.budget = question.budget;
  request.own = true;

  const auto cancelled = [&] { return limit.cancel != nullptr && limit.cancel->load(); };
  const Clock::time_point start = Clock::now();
  const auto deadline = start + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(limit.seconds));
  const int64_t passes = engine_.snapshot().passes;
  auto pending = std::make_shared<Pending>();
  const auto sink = [pending](Delta&& delta) { pending->take(std::move(delta)); };
  auto id = engine_.submit(request, sink);
  // A full queue is no fault of what is tested here: the suite waits like everybody else.
  while (!id && id.status().code() == Code::kTemporary && Clock::now() < deadline && !cancelled()) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    id = engine_.submit(request, sink);
  }
  if (!id) {
    if (cancelled()) return failed(SmokeTrouble::kStopped, "stopped");
    return failed(id.status().code() == Code::kTemporary ? SmokeTrouble::kNoRoom : SmokeTrouble::kRefused,
                  "the engine refused the request: " + id.status().message());
  }
  std::unique_lock lock(pending->mutex);
  while (!pending->finished && Clock::now() < deadline && !cancelled())
    pending->changed.wait_until(lock, std::min(deadline, Clock::now() + std::chrono::milliseconds(200)));
  const bool finished = pending->finished;
  SmokeAnswer answer = pending->answer;
  const bool ended_by_others = pending->cancelled;
  lock.unlock();
  answer.milliseconds = milliseconds_since(start);
  if (!finished) {
    engine_.cancel(*id);
    if (cancelled()) {
      answer.trouble = SmokeTrouble::kStopped, answer.error = "stopped";
    } else {
      // It waited behind others all the time, and they moved.
      const bool queued = answer.ids.empty() && engine_.snapshot().passes > passes;
      answer.trouble = queued ? SmokeTrouble::kNoRoom : SmokeTrouble::kTimeLimit;
      answer.error = fmt::format("no end within {:.1f} s: {} tokens came", limit.seconds, answer.ids.size());
    }
  } else if (answer.trouble == SmokeTrouble::kNone && ended_by_others) {
    answer.trouble = SmokeTrouble::kFault, answer.error = "the request was cancelled";
  }
  return answer;
}

std::vector<SpeculationMode> smoke_modes(bool has_drafter, bool has_mtp) {
  std::vector<SpeculationMode> modes;
  if (has_drafter) modes = {SpeculationMode::kDflash, SpeculationMode::kDdtree};
  if (has_mtp) modes.push_back(SpeculationMode::kNextn);
  return modes;
}

}  // namespace ddtree
