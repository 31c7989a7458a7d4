#include "engine/engine.h"

#include <fmt/core.h>

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <random>
#include <thread>
#include <unordered_set>
#include <utility>

#include "base/log.h"
#include "engine/pools.h"
#include "engine/rates.h"
#include "engine/rounds.h"
#include "engine/sampler.h"
#include "engine/sequence.h"
#include "engine/validate.h"
#include "text/tokenizer.h"

namespace ddtree {
namespace {

ops::SampleParams sample_params(const SamplingParams& p) {
  return {p.temperature,
          p.top_p,
          p.min_p,
          p.top_k,
          p.presence_penalty,
          p.frequency_penalty,
          p.repetition_penalty,
          p.seed,
          static_cast<uint32_t>(p.choice)};
}

class EngineImpl final : public Engine {
 public:
  EngineImpl(Executor& executor, const Tokenizer& tokenizer, EngineOptions options, EngineSeams seams)
      : executor_(executor),
        tokenizer_(tokenizer),
        options_(std::move(options)),
        rounds_(executor, options_, std::move(seams)),
        pages_(executor.options().pages),
        slots_(executor.options().slots),
        random_(std::random_device{}()) {
    state_.pages_total = pages_.total();
    state_.slots_total = slots_.total();
    published_ = state_;  // asked for before the first step: the plan of this run
  }

  ~EngineImpl() override {
    {
      std::lock_guard lock(mutex_);
      draining_ = true;
      stop_ = true;
    }
    wake_.notify_all();
    if (thread_.joinable()) thread_.join();
  }

  Status prepare() {
    if (options_.measure_costs) DDTREE_RETURN_IF_ERROR(rounds_.measure());
    thread_ = std::thread([this] { loop(); });
    return {};
  }

  Result<uint64_t> submit(Request request, DeltaSink sink) override;
  void cancel(uint64_t id) override;
  void drain(double seconds) override;
  void limit_mode(SpeculationMode most) override;
  void reset_drafts() override;
  Status score(ScoreRequest request, ScoreSink sink) override;
  EngineSnapshot snapshot() const override;
  const EngineOptions& options() const override { return options_; }

 private:
  using Owned = std::unique_ptr<Sequence>;

  void loop();
  void admit();
  static void limit(Sequence& sequence, SpeculationMode most);
  void restart_drafting(Sequence& sequence);
  bool start(Sequence& sequence);
  void retire(Sequence& sequence);
  void deliver(Sequence& sequence);
  void count(const PassReport& report);
  void publish();

  Executor& executor_;
  const Tokenizer& tokenizer_;
  const EngineOptions options_;

  // The engine's thread alone.
  Rounds rounds_;
  IndexPool pages_, slots_;
  std::vector<Owned> running_;  // in the order of admission
  EngineSnapshot state_;        // published after every pass
  MinuteRates rates_;

  // Shared.
  mutable std::mutex mutex_;
  std::condition_variable wake_, idle_;
  std::deque<Owned> waiting_;
  std::deque<Owned> ahead_;  // scores and Request::ahead: before all that wait, one at a time, in a slot of their own
  SpeculationMode most_ = SpeculationMode::kDdtree;
  bool reset_drafts_ = false;
  std::unordered_set<uint64_t> cancelled_;
  EngineSnapshot published_;
  MinuteRates published_rates_;
  uint64_t next_id_ = 1;
  int32_t in_flight_ = 0;  // submitted, last delta not yet delivered
  bool draining_ = false, stop_ = false, cancel_all_ = false;
  std::mt19937_64 random_;

  std::thread thread_;
};

Result<uint64_t> EngineImpl::submit(Request request, DeltaSink sink) {
  DDTREE_RETURN_IF_ERROR(validate_request(request, options_, executor_));
  const SpeculationMode mode = effective_mode(request, options_);
  auto sequence = std::make_unique<Sequence>(0, std::move(request), std::move(sink), options_.eos_ids, tokenizer_);
  Sequence& s = *sequence;
  const Request& r = s.request;
  s.mode = mode;
  s.budget = effective_budget(r, options_);
  s.shadow = options_.shadow_linear && mode == SpeculationMode::kDdtree;
  s.pages_needed =
      pages_needed(static_cast<int32_t>(r.prompt.size()), r.max_tokens, draft_overshoot(mode, options_), executor_.options().page_size);
  s.sampling = sample_params(r.sampling);
  if (s.sampling.penalised()) s.history.prompt.insert(r.prompt.begin(), r.prompt.end());
  s.stats.mode = mode;
  s.stats.prompt_tokens = static_cast<int32_t>(r.prompt.size());
  s.submitted = Clock::now();

  std::lock_guard lock(mutex_);
  if (draining_) return {Code::kTemporary, "the engine is draining: no new requests"};
  // A canary asks whether the engine works: a queue full of others is no answer.
  if (!r.ahead && in_flight_ >= options_.max_running + options_.max_queue)
    return {Code::kTemporary, fmt::format("{} requests are running or waiting; the limit is {} running and {} waiting", in_flight_,
                                          options_.max_running, options_.max_queue)};
  s.id = next_id_++;
  limit(s, most_);
  if (r.sampling.seed == 0 && !r.sampling.seed_given) s.sampling.seed = random_();
  ++in_flight_;
  const uint64_t id = s.id;
  (r.ahead ? ahead_ : waiting_).push_back(std::move(sequence));
  wake_.notify_all();
  return id;
}

Status EngineImpl::score(ScoreRequest request, ScoreSink sink) {
  DDTREE_RETURN_IF_ERROR(validate_score(request, options_, executor_));
  auto scoring = std::make_unique<Scoring>();
  scoring->sink = std::move(sink);
  scoring->prompt = static_cast<int32_t>(request.request.prompt.size());
  scoring->from = request.from;
  ops::TokenHistory history;
  history.prompt.insert(request.request.prompt.begin(), request.request.prompt.end());
  Request& r = request.request;
  r.prompt.insert(r.prompt.end(), request.generated.begin(), request.generated.end() - 1);
  r.mode = SpeculationMode::kNone;
  r.own = true;
  r.record_trees = false;
  scoring->generated = std::move(request.generated);
  auto sequence = std::make_unique<Sequence>(0, std::move(r), DeltaSink(), options_.eos_ids, tokenizer_);
  Sequence& s = *sequence;
  s.pages_needed = pages_needed(static_cast<int32_t>(s.request.prompt.size()), 1, 0, executor_.options().page_size);
  s.sampling = sample_params(s.request.sampling);
  if (s.sampling.penalised()) s.history = std::move(history);
  s.scoring = std::move(scoring);
  s.submitted = Clock::now();

  std::lock_guard lock(mutex_);
  if (draining_) return {Code::kTemporary, "the engine is draining: nothing is scored any more"};
  s.id = next_id_++;
  ++in_flight_;
  ahead_.push_back(std::move(sequence));
  wake_.notify_all();
  return {};
}

void EngineImpl::limit(Sequence& s, SpeculationMode most) {
  if (s.scoring) return;
  SpeculationMode mode = limited_mode(s.mode, most);
  if (mode == s.mode) return;
  // What the drafter has not been fed it cannot draft from; only trees of `auto` are ever fed later.
  if (s.behind) mode = SpeculationMode::kNone;
  s.mode = s.stats.mode = mode;
  s.shadow = false;
  s.foretold.clear();
}

void EngineImpl::limit_mode(SpeculationMode most) {
  std::lock_guard lock(mutex_);
  most_ = most;
  for (auto& s : waiting_) limit(*s, most);
  for (auto& s : ahead_) limit(*s, most);
  wake_.notify_all();
}

void EngineImpl::reset_drafts() {
  std::lock_guard lock(mutex_);
  reset_drafts_ = true;
  wake_.notify_all();
}

// Everything that the sequence knows is run once more, and the drafter fed with it.
void EngineImpl::restart_drafting(Sequence& s) {
  if (s.scoring || s.finished || s.mode == SpeculationMode::kNone || s.anchor < 0) return;
  executor_.reset_slot(s.slot);
  s.context = 0;
  s.replaying = true;
  s.behind = false;
  s.fallback = FallbackPolicy();
  s.outlook = Outlook();
  s.rounds_without_draft = s.hopeless_rounds = s.promising_rounds = 0;
}

void EngineImpl::cancel(uint64_t id) {
  std::lock_guard lock(mutex_);
  if (id == 0 || id >= next_id_) return;
  cancelled_.insert(id);
  wake_.notify_all();
}

void EngineImpl::drain(double seconds) {
  std::unique_lock lock(mutex_);
  draining_ = true;
  const auto empty = [&] { return in_flight_ == 0; };
  if (idle_.wait_for(lock, std::chrono::duration<double>(std::clamp(seconds, 0.0, 1e9)), empty)) return;
  cancel_all_ = true;
  wake_.notify_all();
  idle_.wait(lock, empty);
}

EngineSnapshot EngineImpl::snapshot() const {
  std::lock_guard lock(mutex_);
  EngineSnapshot s = published_;
  s.waiting = static_cast<int32_t>(waiting_.size() + ahead_.size());
  s.most = most_;
  const MinuteRates::Bucket minute = published_rates_.sum(Clock::now());
  s.prefill_tps_1m = minute.prompt_ms > 0 ? minute.prompt_tokens / minute.prompt_ms * 1e3 : 0;
  s.decode_tps_1m = minute.decode_ms > 0 ? minute.decoded_tokens / minute.decode_ms * 1e3 : 0;
  s.acceptance_1m = minute.rounds > 0 ? minute.decoded_tokens / minute.rounds : 0;
  return s;
}

// Takes slot and pages for the whole need of a sequence; false if they are short now.
bool EngineImpl::start(Sequence& s) {
  if (pages_.free() < s.pages_needed) return false;
  std::vector<int32_t> slot;
  if (!slots_.take(1, &slot)) return false;
  pages_.take(s.pages_needed, &s.pages);
  s.slot = slot[0];
  executor_.reset_slot(s.slot);
  s.admitted = Clock::now();
  s.stats.queue_ms = milliseconds_between(s.submitted, s.admitted);
  return true;
}

// In order of arrival: a large request at the head waits for its pages and is not overtaken for ever by small ones.
void EngineImpl::admit() {
  int32_t clients = 0, ahead = 0;
  for (const auto& s : running_) ++(s->scoring || s->request.ahead ? ahead : clients);
  {
    std::unique_lock lock(mutex_);
    const ExecutorOptions& e = executor_.options();  // every sequence that decodes needs a row, and its logits
    const int32_t rows = e.max_logit_rows > 0 ? std::min(e.max_rows, e.max_logit_rows) : e.max_rows;
    if (!ahead_.empty() && ahead == 0 && clients < rows) {
      if (!start(*ahead_.front())) return;
      running_.push_back(std::move(ahead_.front()));
      ahead_.pop_front();
    }
  }
  for (; clients < options_.max_running; ++clients) {
    std::unique_lock lock(mutex_);
    if (waiting_.empty()) return;
    Sequence& head = *waiting_.front();
    if (!start(head)) return;
    running_.push_back(std::move(waiting_.front()));
    waiting_.pop_front();
  }
}

// Gives back what a sequence holds and completes its last delta.
void EngineImpl::retire(Sequence& s) {
  const auto now = Clock::now();
  pages_.give_back(&s.pages);
  if (s.slot >= 0) {
    std::vector<int32_t> slot = {s.slot};
    slots_.give_back(&slot);
    s.slot = -1;
  }
  Delta& d = s.delta;
  if (d.finish == FinishReason::kCancelled || d.finish == FinishReason::kError)
    for (TextPiece& piece : s.commit.flush()) d.pieces.push_back(std::move(piece));
  d.finished = true;
  RequestStats& t = s.stats;
  t.completion_tokens = s.commit.count();
  t.rounds = s.acceptance.rounds;
  t.drafted = s.acceptance.drafted;
  t.accepted = s.acceptance.accepted;
  t.histogram = s.acceptance.histogram;
  t.accepted_at = s.acceptance.accepted_at;
  t.emitted = s.acceptance.emitted;
  t.total_ms = milliseconds_between(s.submitted, now);
  if (s.commit.count() > 0) {
    t.first_token_ms = milliseconds_between(s.submitted, s.first_token);
    t.prefill_ms = milliseconds_between(s.admitted, s.first_token);
    t.decode_ms = milliseconds_between(s.first_token, now);
  }
  d.stats = std::move(t);
  if (s.scoring) ++state_.scored;
  else if (s.request.own) ++state_.own_requests;
  else if (d.finish == FinishReason::kCancelled) ++state_.requests_cancelled;
  else if (d.finish == FinishReason::kError) ++state_.requests_failed;
  else ++state_.requests_finished;
}

void EngineImpl::deliver(Sequence& s) {
  if (s.scoring) {
    if (!s.delta.finished) return;
    Score score = std::move(s.scoring->score);
    if (s.delta.finish == FinishReason::kCancelled) score.error = "the engine stops";
    if (s.delta.finish == FinishReason::kError) score.error = s.delta.error;
    return s.scoring->sink(std::move(score));
  }
  if (s.delta.finished || !s.delta.ids.empty() || !s.delta.pieces.empty()) s.sink(std::move(s.delta));
  s.delta = Delta();
}

void EngineImpl::count(const PassReport& r) {
  state_.passes += r.ran ? 1 : 0;
  const int32_t prompt_rows = r.prompt_rows - r.own_prompt_rows, decoding = r.decoding - r.own_decoding;
  state_.prompt_tokens += prompt_rows - r.replayed_rows;
  state_.rounds += r.rounds;
  state_.drafted += r.drafted;
  state_.accepted += r.accepted;
  state_.fallbacks += r.fallbacks;
  for (int32_t n : r.accepted_counts) {
    if (state_.accepted_at.size() < static_cast<size_t>(n)) state_.accepted_at.resize(static_cast<size_t>(n), 0);
    for (int32_t i = 0; i < n; ++i) ++state_.accepted_at[static_cast<size_t>(i)];
  }
  for (size_t m = 0; m < r.draft_rounds.size(); ++m) {
    state_.draft_rounds[m] += r.draft_rounds[m];
    state_.draft_accepted[m] += r.draft_accepted[m];
  }
  state_.nan_faults += r.nan_faults;
  state_.failed_drafts += r.failed_drafts;
  if (!r.nan_message.empty()) state_.nan_message = r.nan_message;
  if (!r.lost.ok()) ++state_.lost_passes, state_.lost_code = r.lost.code(), state_.lost_message = r.lost.message();
  if (!r.lost.ok()) state_.gone = executor_.lost().message();
  if (r.timed) ++state_.timed_passes, state_.pass_ms += r.pass_ms, state_.promised_ms += r.promised_ms;
  MinuteRates::Bucket& b = rates_.now(Clock::now());
  // A pass that clients share with a smoke test counts with its whole time: they waited for it.
  if (prompt_rows > 0) b.prompt_tokens += prompt_rows, b.prompt_ms += r.milliseconds;
  if (decoding > 0) b.decoded_tokens += r.emitted, b.decode_ms += r.milliseconds, b.rounds += r.rounds;
}

void EngineImpl::publish() {
  state_.running = static_cast<int32_t>(running_.size());
  state_.pages_used = pages_.used();
  state_.slots_used = slots_.used();
  const auto points = [](const CostCurve& curve) { return CostPoints{curve.knots(), curve.values()}; };
  state_.verify_ms = points(rounds_.costs().verify_curve());
  state_.sequence_ms = rounds_.costs().sequence_slope();
  state_.draft_ms = points(rounds_.costs().draft_curve());
  state_.host_ms = points(rounds_.costs().host_curve());
  std::lock_guard lock(mutex_);
  published_ = state_;
  published_rates_ = rates_;
}

void EngineImpl::loop() {
  for (;;) {
    std::vector<Owned> gone;  // cancelled before they ran
    std::unordered_set<uint64_t> ended;
    bool stopping, all, reset;
    SpeculationMode most;
    {
      std::unique_lock lock(mutex_);
      wake_.wait(lock,
                 [&] { return stop_ || cancel_all_ || !waiting_.empty() || !ahead_.empty() || !running_.empty() || !cancelled_.empty(); });
      stopping = stop_;
      all = stopping || cancel_all_;
      cancel_all_ = false;
      ended.swap(cancelled_);
      reset = std::exchange(reset_drafts_, false);
      most = most_;
      for (std::deque<Owned>* queue : {&ahead_, &waiting_})
        for (auto it = queue->begin(); it != queue->end();) {
          if (all || ended.contains((*it)->id)) gone.push_back(std::move(*it)), it = queue->erase(it);
          else ++it;
        }
    }
    for (auto& s : running_) limit(*s, most);
    if (reset) {
      rounds_.forget_drafts();
      for (auto& s : running_) restart_drafting(*s);
    }
    for (auto& s : running_)
      if (all || ended.contains(s->id)) s->finished = true, s->delta.finish = FinishReason::kCancelled;
    for (auto& s : gone) s->finished = true, s->delta.finish = FinishReason::kCancelled;
    const auto sweep = [&] {  // finished sequences out of running_, everything freed and counted before anybody hears of it
      const auto end = std::stable_partition(running_.begin(), running_.end(), [](const Owned& s) { return !s->finished; });
      for (auto it = end; it != running_.end(); ++it) gone.push_back(std::move(*it));
      running_.erase(end, running_.end());
      for (auto& s : gone) retire(*s);
      publish();
      for (auto& s : gone) deliver(*s);
      if (!gone.empty()) {
        std::lock_guard lock(mutex_);
        in_flight_ -= static_cast<int32_t>(gone.size());
        if (in_flight_ == 0) idle_.notify_all();
      }
      gone.clear();
    };
    sweep();
    if (stopping) return;

    admit();
    if (running_.empty()) continue;
    std::vector<Sequence*> batch;
    for (auto& s : running_) batch.push_back(s.get());
    const PassReport report = rounds_.step(batch);
    count(report);
    for (Sequence* s : batch)
      if (!s->request.own) state_.completion_tokens += static_cast<int64_t>(s->delta.ids.size());
    for (Sequence* s : batch)
      if (!s->finished) deliver(*s);
    sweep();
  }
}

}  // namespace

Result<std::unique_ptr<Engine>> start_engine(Executor& executor, const Tokenizer& tokenizer, EngineOptions options, EngineSeams seams) {
  DDTREE_RETURN_IF_ERROR(validate_options(options, executor));
  auto engine = std::make_unique<EngineImpl>(executor, tokenizer, std::move(options), std::move(seams));
  DDTREE_RETURN_IF_ERROR(engine->prepare());
  return std::unique_ptr<Engine>(std::move(engine));
}

Result<std::unique_ptr<Engine>> Engine::start(Executor& executor, const Tokenizer& tokenizer, EngineOptions options) {
  return start_engine(executor, tokenizer, std::move(options), EngineSeams());
}

}  // namespace ddtree
