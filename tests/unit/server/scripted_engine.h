// An Engine whose answers are written down, for tests of what is above it. Times are under the test's control.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

#include "base/embedded.h"
#include "engine/engine.h"
#include "text/detokenizer.h"
#include "text/tokenizer.h"

namespace ddtree::test {

inline const Tokenizer& tiny_tokenizer() {
  static const Tokenizer tokenizer = [] {
    auto t = Tokenizer::from_json(*embedded_file("models/tiny/target/tokenizer.json"),
                                  *embedded_file("models/tiny/target/tokenizer_config.json"), "tokenizer.json");
    if (!t) throw std::runtime_error(t.status().message());
    return std::move(*t);
  }();
  return tokenizer;
}

class ScriptedEngine final : public Engine {
 public:
  // The whole answer to a request, as text with tags; the model's end token follows unless `endless`.
  std::function<std::string(const Request&)> answer = [](const Request&) { return std::string("Hello, Carol!"); };
  int run = 3;                          // tokens a round
  std::chrono::milliseconds pause{0};   // between rounds
  bool endless = false;                 // the answer is repeated until max_tokens
  std::atomic<bool> hold{false};        // requests wait, as if queued
  std::atomic<bool> hold_ahead{false};  // those that go ahead do, as if pages were short
  std::string fault;                    // ends every request with this error, after fault_after tokens
  int fault_after = 0;
  EngineOptions settings;
  std::vector<Request> seen;  // under mutex()

  ScriptedEngine() {
    settings.mode = SpeculationMode::kDdtree;
    settings.context_length = 512;
    settings.eos_ids = {*tiny_tokenizer().id_of("<|im_end|>")};
  }
  ~ScriptedEngine() override {
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    changed_.notify_all();
    for (auto& t : threads_) t.join();
  }

  std::mutex& mutex() { return mutex_; }
  int running() const { return running_; }
  int cancelled() const { return cancelled_; }

  Result<uint64_t> submit(Request request, DeltaSink sink) override {
    std::lock_guard lock(mutex_);
    if (draining_) return Status(Code::kTemporary, "the engine is draining");
    if (running_ >= settings.max_running + settings.max_queue) return Status(Code::kTemporary, "the queue is full");
    const uint64_t id = ++next_;
    seen.push_back(request);
    ++running_;
    cancel_[id] = false;
    threads_.emplace_back([this, id, request = std::move(request), sink = std::move(sink)] { generate(id, request, sink); });
    return id;
  }

  void cancel(uint64_t id) override {
    std::lock_guard lock(mutex_);
    if (const auto it = cancel_.find(id); it != cancel_.end()) it->second = true;
    changed_.notify_all();
  }

  void drain(double seconds) override {
    std::unique_lock lock(mutex_);
    draining_ = true;
    if (!changed_.wait_for(lock, std::chrono::duration<double>(seconds), [&] { return running_ == 0; }))
      for (auto& [id, c] : cancel_) c = true;
    changed_.notify_all();
    changed_.wait_for(lock, std::chrono::seconds(5), [&] { return running_ == 0; });
  }

  void limit_mode(SpeculationMode m) override { most = m; }
  void reset_drafts() override { ++resets; }
  // Judges at once: every token as the script says, or none.
  Status score(ScoreRequest r, ScoreSink sink) override {
    ++scores;
    Score s;
    for (size_t i = static_cast<size_t>(r.from); i < r.generated.size(); ++i)
      s.tokens.push_back({r.generated[i], stands_by_it ? r.generated[i] : r.generated[i] + 1, stands_by_it ? -0.1F : -20.0F, 5.0F});
    sink(std::move(s));
    return {};
  }
  std::atomic<SpeculationMode> most{SpeculationMode::kDdtree};
  std::atomic<int> resets{0}, scores{0};
  bool stands_by_it = true;

  EngineSnapshot snapshot() const override {
    EngineSnapshot s;
    s.running = running_;
    s.requests_cancelled = cancelled_;
    s.passes = passes_;
    return s;
  }
  const EngineOptions& options() const override { return settings; }

 private:
  void generate(uint64_t id, const Request& request, const DeltaSink& sink) {
    const Tokenizer& tokenizer = tiny_tokenizer();
    std::vector<int32_t> ids = tokenizer.encode(answer(request));
    const std::vector<int32_t> once = ids;
    while (endless && ids.size() < static_cast<size_t>(request.max_tokens)) ids.insert(ids.end(), once.begin(), once.end());
    if (!endless) ids.push_back(settings.eos_ids[0]);
    Delta last;
    last.finished = true;
    last.finish = FinishReason::kStop;
    last.stop_id = settings.eos_ids[0];
    if (ids.size() > static_cast<size_t>(request.max_tokens)) {
      ids.resize(static_cast<size_t>(request.max_tokens));
      last.finish = FinishReason::kLength;
      last.stop_id = -1;
    }
    Detokenizer detokenizer(tokenizer);
    RequestStats& stats = last.stats;
    stats.mode = request.mode.value_or(settings.mode);
    stats.prompt_tokens = static_cast<int32_t>(request.prompt.size());
    size_t at = 0;
    std::unique_lock lock(mutex_);
    const auto held = [&] { return hold || (hold_ahead && request.ahead); };
    while (at < ids.size() || held()) {
      changed_.wait_for(lock, held() ? std::chrono::milliseconds(5) : pause, [&] { return cancel_[id] || stopping_; });
      if (cancel_[id] || stopping_) {
        last.finish = FinishReason::kCancelled;
        ++cancelled_;
        break;
      }
      if (held()) continue;
      if (!fault.empty() && static_cast<int>(at) >= fault_after) {
        last.finish = FinishReason::kError;
        last.error = fault;
        break;
      }
      // The first token comes from the prefill, rounds bring `run` each.
      const size_t n = std::min(at == 0 ? 1 : static_cast<size_t>(run), ids.size() - at);
      Delta d;
      d.ids.assign(ids.begin() + static_cast<long>(at), ids.begin() + static_cast<long>(at + n));
      detokenizer.push(d.ids, &d.pieces);
      if (at > 0) {
        ++stats.rounds;
        stats.accepted += static_cast<int64_t>(n) - 1;
        stats.drafted += 15;
        if (stats.histogram.size() < n) stats.histogram.resize(n);
        ++stats.histogram[n - 1];
        stats.emitted.push_back(static_cast<int32_t>(n));
      }
      at += n;
      ++passes_;
      lock.unlock();
      sink(std::move(d));
      lock.lock();
    }
    stats.completion_tokens = static_cast<int32_t>(at);
    lock.unlock();
    detokenizer.flush(&last.pieces);
    sink(std::move(last));
    lock.lock();
    cancel_.erase(id);
    --running_;
    changed_.notify_all();
  }

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::thread> threads_;
  std::map<uint64_t, bool> cancel_;
  std::atomic<int> running_{0}, cancelled_{0};
  std::atomic<int64_t> passes_{0};
  uint64_t next_ = 0;
  bool stopping_ = false, draining_ = false;
};

}  // namespace ddtree::test
