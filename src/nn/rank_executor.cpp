#include "nn/rank_executor.h"

#include <fmt/core.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>

#include "base/log.h"
#include "model/shard.h"
#include "nn/pair_executor.h"
#include "ops/rank_group.h"

namespace ddtree::nn {
namespace {

constexpr auto kStep = std::chrono::milliseconds(50);
constexpr double kGraceSeconds = 2;  // for ranks to come back once their group is broken

int64_t steps_of(double seconds) { return static_cast<int64_t>(seconds / std::chrono::duration<double>(kStep).count()) + 1; }

// What a job reads is its own: the caller's may be gone before a rank that hangs wakes up.
struct HeldForest {
  // choices: whether its rows' rules are read. They are forward()'s only.
  HeldForest(const Forest& f, bool choices) : forest(f) {
    for (const Segment& s : forest.segments) pages.insert(pages.end(), s.pages.begin(), s.pages.end());
    size_t at = 0;
    for (Segment& s : forest.segments) s.pages = std::span<const int32_t>(pages).subspan(at, s.pages.size()), at += s.pages.size();
    for (Segment& s : forest.segments) {
      if (!choices) s.choice = {};
      if (s.choice.history) s.choice.history = &histories.emplace_back(*s.choice.history);
      s.choice.banned = banned.emplace_back(s.choice.banned.begin(), s.choice.banned.end());
    }
  }
  HeldForest(const HeldForest&) = delete;
  HeldForest& operator=(const HeldForest&) = delete;
  Forest forest;
  std::vector<int32_t> pages;
  std::deque<ops::TokenHistory> histories;
  std::deque<std::vector<int32_t>> banned;
};

struct HeldQueries {
  explicit HeldQueries(std::span<const DraftQuery> q) : queries(q.begin(), q.end()) {
    for (const DraftQuery& one : queries) pages.insert(pages.end(), one.pages.begin(), one.pages.end());
    size_t at = 0;
    for (DraftQuery& one : queries) one.pages = std::span<const int32_t>(pages).subspan(at, one.pages.size()), at += one.pages.size();
  }
  HeldQueries(const HeldQueries&) = delete;
  HeldQueries& operator=(const HeldQueries&) = delete;
  std::vector<DraftQuery> queries;
  std::vector<int32_t> pages;
};

void mix(uint64_t* digest, std::span<const int32_t> values) {
  for (const int32_t v : values) {
    *digest = (*digest ^ static_cast<uint32_t>(v)) * 0x9E3779B97F4A7C15u;
    *digest ^= *digest >> 29;
  }
}

bool same(const Status& a, const Status& b) { return a.code() == b.code() && a.message() == b.message(); }

}  // namespace

struct RankExecutor::Rank {
  int32_t index = 0;
  std::unique_ptr<PairExecutor> executor;
  PassOutput output;
  DraftOutput draft;
  const float* row = nullptr;
  uint64_t digest = 0;  // of what this rank chose, drafted and committed since the start
  Status result;
  bool done = true;
};

// What the ranks' threads share with the executor, and outlives it where one of them hangs.
struct RankExecutor::Crew {
  Crew(int32_t n, double seconds, RankHooks h) : group(n, seconds), ranks(static_cast<size_t>(n)), hooks(std::move(h)) {
    for (int32_t r = 0; r < n; ++r) ranks[static_cast<size_t>(r)].index = r;
  }

  ops::RankGroup group;
  std::vector<Rank> ranks;
  const RankHooks hooks;
  std::vector<std::thread> threads;

  std::mutex mutex;  // of what follows, and of every rank's result and done
  std::condition_variable work, finished;
  Job job;
  const char* call = "";
  uint64_t posted = 0;
  bool stop = false;

  int32_t size() const { return static_cast<int32_t>(ranks.size()); }

  void run(Rank& rank) {
    std::unique_lock lock(mutex);
    for (uint64_t seen = 0;;) {
      work.wait(lock, [&] { return stop || posted != seen; });
      if (stop) return;
      seen = posted;
      const Job mine = job;
      const char* what = call;
      lock.unlock();
      Status status = hooks.before ? hooks.before(rank.index, what) : Status();
      if (status.ok()) status = mine(rank);
      if (status.ok()) status = group.status();  // of a collective whose result nobody waited for
      group.leave(rank.index, status);
      lock.lock();
      rank.result = std::move(status);
      rank.done = true;
      finished.notify_all();
    }
  }

  void post(const char* what, Job next) {
    const std::lock_guard lock(mutex);
    group.begin();
    for (Rank& r : ranks) r.done = false, r.result = {};
    job = std::move(next);
    call = what;
    ++posted;
    work.notify_all();
  }

  // One step of waiting; the number of ranks that are done.
  int32_t wait() {
    std::unique_lock lock(mutex);
    const auto count = [&] {
      return static_cast<int32_t>(std::count_if(ranks.begin(), ranks.end(), [](const Rank& r) { return r.done; }));
    };
    finished.wait_for(lock, kStep, [&] { return count() == size(); });
    return count();
  }

  std::string missing() {
    const std::lock_guard lock(mutex);
    std::vector<int32_t> out;
    for (const Rank& r : ranks)
      if (!r.done) out.push_back(r.index);
    return out.size() == 1 ? ops::rank_name(out[0], size()) : fmt::format("ranks {} of {}", fmt::join(out, ", "), size());
  }
};

Result<std::unique_ptr<RankExecutor>> RankExecutor::create(const LoadedPair& pair, const ExecutorOptions& options,
                                                           const MakeBackend& make_backend, const RankLimits& limits, RankHooks hooks) {
  if (auto share = share_of(pair.spec, options.tp_size, 0); !share.ok()) return share.status();
  std::unique_ptr<RankExecutor> out(new RankExecutor());
  out->options_ = options;
  out->limits_ = limits;
  out->crew_ = std::make_shared<Crew>(options.tp_size, limits.seconds, std::move(hooks));
  try {
    for (Rank& r : out->crew_->ranks) out->crew_->threads.emplace_back([crew = out->crew_, &r] { crew->run(r); });
  } catch (const std::system_error& e) {
    return Status(Code::kTemporary,
                  fmt::format("no thread could be started for {}: {}",
                              ops::rank_name(static_cast<int32_t>(out->crew_->threads.size()), options.tp_size), e.what()));
  }
  DDTREE_RETURN_IF_ERROR(out->load(pair, make_backend));
  return out;
}

// All ranks read at once; what the caller hears is their sum.
Status RankExecutor::load(const LoadedPair& pair, const MakeBackend& make_backend) {
  struct Loaded {
    std::atomic<int64_t> bytes{0}, total{-1};
  };
  const int32_t ranks = crew_->size();
  std::vector<Loaded> loaded(static_cast<size_t>(ranks));
  std::atomic<bool> stopped{false};
  const auto begin = std::chrono::steady_clock::now();
  // Nobody is left behind here: references are safe.
  crew_->post("load", [&](Rank& rank) -> Status {
    const auto refuse = [&](const Status& s) {
      stopped = true;
      return s;
    };
    auto backend = make_backend(rank.index);
    if (!backend.ok()) return refuse(backend.status());
    if (Status s = (*backend)->join(crew_->group.collectives(rank.index)); !s.ok()) return refuse(s);
    PairParts parts = parts_of(pair);
    parts.rank = rank.index, parts.ranks = ranks;
    ExecutorOptions own = options_;
    Loaded& mine = loaded[static_cast<size_t>(rank.index)];
    own.loading.progress = [&](const ops::LoadProgress& p) {
      mine.bytes = p.bytes, mine.total = p.total;
      return !stopped;
    };
    auto made = PairExecutor::create(std::move(*backend), parts, own);
    if (!made.ok()) return refuse(made.status());
    rank.executor = std::move(*made);
    return {};
  });
  const auto& progress = options_.loading.progress;
  bool cancelled = false;
  for (int64_t told = 0; crew_->wait() < ranks;) {
    if (!progress || stopped) continue;
    int64_t bytes = 0, total = 0;
    for (const Loaded& l : loaded) {
      if (l.total < 0) total = -1;
      if (total >= 0) bytes += l.bytes, total += l.total;
    }
    if (total <= 0 || bytes >= total || bytes < told) continue;
    told = bytes;
    if (!progress({bytes, total, std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count()}))
      cancelled = stopped = true;
  }
  if (cancelled) return {Code::kCancelled, "loading weights was stopped"};
  // The first reason, not a rank that was stopped because of it.
  const Rank* failed = nullptr;
  for (const Rank& r : crew_->ranks)
    if (!r.result.ok() && (!failed || failed->result.code() == Code::kCancelled)) failed = &r;
  if (failed) {
    const bool all = std::all_of(crew_->ranks.begin(), crew_->ranks.end(), [&](const Rank& r) { return same(r.result, failed->result); });
    return all ? failed->result
               : Status(failed->result.code(), fmt::format("{}: {}", ops::rank_name(failed->index, ranks), failed->result.message()));
  }
  int64_t total = 0;
  for (const Loaded& l : loaded) total += std::max<int64_t>(l.total, 0);
  if (progress) progress({total, total, std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count()});
  options_ = crew_->ranks[0].executor->options();  // with what was settled; loading is forgotten
  return {};
}

RankExecutor::~RankExecutor() {
  {
    const std::lock_guard lock(crew_->mutex);
    crew_->stop = true;
    crew_->work.notify_all();
  }
  for (size_t r = 0; r < crew_->threads.size(); ++r) {
    bool done;
    {
      const std::lock_guard lock(crew_->mutex);
      done = crew_->ranks[r].done;
    }
    if (done) crew_->threads[r].join();
    else crew_->threads[r].detach();  // inside a pass that does not end; it keeps the crew
  }
}

Status RankExecutor::lose(std::string message) {
  if (lost_.ok()) {
    lost_ = {Code::kEngineFault, std::move(message)};
    log::error("tensor parallel: {}", lost_.message());
    crew_->group.fail(lost_);
  }
  return lost_;
}

Status RankExecutor::run(const char* call, Job job) {
  if (!lost_.ok()) return lost_;
  crew_->post(call, std::move(job));
  const int64_t limit = steps_of(limits_.seconds), grace = steps_of(kGraceSeconds);
  int64_t waited = 0, broken = 0;  // steps since the first rank was done; since the group broke
  for (int32_t done; (done = crew_->wait()) < crew_->size();) {
    if (const Status s = crew_->group.status(); !s.ok() && ++broken > grace)
      return lose(fmt::format("{}; {} did not come back from {}", s.message(), crew_->missing(), call));
    if (done > 0 && ++waited > limit)
      return lose(fmt::format("{} did not finish {} for {:g} s after the others had", crew_->missing(), call, limits_.seconds));
  }
  if (const Status s = crew_->group.status(); !s.ok()) return lose(s.message());
  const Status& first = crew_->ranks[0].result;
  for (const Rank& r : crew_->ranks)
    if (!same(r.result, first)) {
      const Rank& bad = first.ok() ? r : crew_->ranks[0];
      return lose(
          fmt::format("{}: {} failed, and not on every rank: {}", ops::rank_name(bad.index, crew_->size()), call, bad.result.message()));
    }
  return first;
}

PairExecutor& RankExecutor::rank(int32_t index) const { return *crew_->ranks[static_cast<size_t>(index)].executor; }
const ModelSpec& RankExecutor::target() const { return rank(0).target(); }
const DrafterSpec* RankExecutor::drafter() const { return rank(0).drafter(); }
bool RankExecutor::has_mtp() const { return rank(0).has_mtp(); }
int32_t RankExecutor::real_vocab() const { return rank(0).real_vocab(); }
float RankExecutor::near_tie() const { return rank(0).near_tie(); }
int32_t RankExecutor::padded_rows(int32_t rows) const { return rank(0).padded_rows(rows); }

void RankExecutor::reset_slot(int32_t slot) {
  (void)run("reset_slot", [slot](Rank& r) {  // what goes wrong is lost()'s to say, and the next call's
    r.executor->reset_slot(slot);
    return Status();
  });
}

Status RankExecutor::forward(const Forest& forest, PassOutput* output) {
  const auto held = std::make_shared<HeldForest>(forest, true);
  Status status = run("forward", [held](Rank& r) {
    const Status s = r.executor->forward(held->forest, &r.output);
    if (s.ok()) mix(&r.digest, r.output.chosen);
    return s;
  });
  if (lost_.ok()) *output = crew_->ranks[0].output;
  else *output = {.logits_row = std::vector<int32_t>(forest.token.size(), -1)};
  return status;
}

Result<const float*> RankExecutor::row_logits(const PassOutput&, int32_t logits_row) {
  const Status status = run("row_logits", [logits_row](Rank& r) {
    auto row = r.executor->row_logits(r.output, logits_row);
    r.row = row.ok() ? *row : nullptr;
    return row.status();
  });
  if (!status.ok()) return status;
  return crew_->ranks[0].row;
}

Status RankExecutor::commit(const Forest& forest, std::span<const Accepted> accepted) {
  const auto held = std::make_shared<HeldForest>(forest, false);
  const auto kept = std::make_shared<std::vector<Accepted>>(accepted.begin(), accepted.end());
  DDTREE_RETURN_IF_ERROR(run("commit", [held, kept](Rank& r) {
    for (const Accepted& a : *kept) {
      mix(&r.digest, std::array{a.segment});
      for (const int32_t row : a.rows)
        if (row >= 0 && row < static_cast<int32_t>(held->forest.token.size()))
          mix(&r.digest, std::array{held->forest.token[static_cast<size_t>(row)]});
      mix(&r.digest, a.next);
    }
    return r.executor->commit(held->forest, *kept);
  }));
  if (++commits_ % std::max(limits_.digest_rounds, 1) != 0) return {};
  return compare_digests();
}

Status RankExecutor::compare_digests() {
  std::vector<uint64_t> digests;
  for (const Rank& r : crew_->ranks) digests.push_back(crew_->hooks.digest ? crew_->hooks.digest(r.index, r.digest) : r.digest);
  if (std::all_of(digests.begin(), digests.end(), [&](uint64_t d) { return d == digests[0]; })) return {};
  // Where most agree, the others are wrong; of two, nobody knows which.
  const auto votes = [&](uint64_t d) { return std::count(digests.begin(), digests.end(), d); };
  const uint64_t most = *std::max_element(digests.begin(), digests.end(), [&](uint64_t a, uint64_t b) { return votes(a) < votes(b); });
  std::vector<int32_t> odd;
  for (size_t r = 0; r < digests.size(); ++r)
    if (digests[r] != most || votes(most) * 2 <= static_cast<int64_t>(digests.size())) odd.push_back(static_cast<int32_t>(r));
  return lose(fmt::format("rank{} {} of {} disagree{} on what was committed (digests after {} commits: {:016x})",
                          odd.size() == 1 ? "" : "s", fmt::join(odd, " and "), crew_->size(), odd.size() == 1 ? "s" : "", commits_,
                          fmt::join(digests, ", ")));
}

Status RankExecutor::draft(std::span<const DraftQuery> queries, int32_t top_k, DraftOutput* output) {
  const auto held = std::make_shared<HeldQueries>(queries);
  DDTREE_RETURN_IF_ERROR(run("draft", [held, top_k](Rank& r) {
    const Status s = r.executor->draft(held->queries, top_k, &r.draft);
    if (s.ok()) mix(&r.digest, r.draft.token);
    return s;
  }));
  *output = crew_->ranks[0].draft;
  return {};
}

Status RankExecutor::draft_nextn(std::span<const DraftQuery> queries, int32_t steps, DraftOutput* output) {
  const auto held = std::make_shared<HeldQueries>(queries);
  DDTREE_RETURN_IF_ERROR(run("draft_nextn", [held, steps](Rank& r) {
    const Status s = r.executor->draft_nextn(held->queries, steps, &r.draft);
    if (s.ok()) mix(&r.digest, r.draft.token);
    return s;
  }));
  *output = crew_->ranks[0].draft;
  return {};
}

void RankExecutor::time_ops(bool on) { rank(0).time_ops(on); }
std::vector<ops::OpTime> RankExecutor::op_times() { return rank(0).op_times(); }
void RankExecutor::time_device(bool on) { rank(0).time_device(on); }
double RankExecutor::device_ms() { return rank(0).device_ms(); }
int32_t RankExecutor::warm_up_runs() const { return rank(0).warm_up_runs(); }
Result<ops::DeviceRates> RankExecutor::measure_rates() { return rank(0).measure_rates(); }

}  // namespace ddtree::nn
