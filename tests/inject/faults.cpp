#include "inject/faults.h"

#include <fmt/core.h>
#include <sqlite3.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cmath>
#include <limits>
#include <optional>
#include <thread>

namespace ddtree::inject {
namespace {

struct Name {
  const char* name;
  Kind kind;
};
constexpr Name kNames[] = {{"nan-logits", Kind::kNanLogits},
                           {"garbage-text", Kind::kGarbageText},
                           {"stuck-round", Kind::kStuckRound},
                           {"slow-round", Kind::kSlowRound},
                           {"drafter-garbage", Kind::kDrafterGarbage},
                           {"device-lost", Kind::kDeviceLost},
                           {"rank-lost", Kind::kRankLost},
                           {"oom", Kind::kOom},
                           {"store-full", Kind::kStoreFull},
                           {"store-locked", Kind::kStoreLocked}};

void sleep_ms(double ms) { std::this_thread::sleep_for(std::chrono::duration<double, std::milli>(ms)); }

// Between the engine and the real thing. Everything that is not a fault goes through untouched.
class FaultyExecutor final : public Executor {
 public:
  FaultyExecutor(std::unique_ptr<Executor> inner, Faults& faults) : inner_(std::move(inner)), faults_(faults) {}

  const ModelSpec& target() const override { return inner_->target(); }
  const DrafterSpec* drafter() const override { return inner_->drafter(); }
  bool has_mtp() const override { return inner_->has_mtp(); }
  const ExecutorOptions& options() const override { return inner_->options(); }
  int32_t real_vocab() const override { return inner_->real_vocab(); }
  float near_tie() const override { return inner_->near_tie(); }
  Status lost() const override {
    return faults_.on(Kind::kRankLost) ? Status(Code::kEngineFault, "rank 1 of 2: gone (injected)") : inner_->lost();
  }
  void reset_slot(int32_t slot) override { inner_->reset_slot(slot); }

  Status forward(const Forest& forest, PassOutput* output) override {
    faults_.pass();
    if (Status s = gone(); !s.ok()) return s;
    if (faults_.on(Kind::kOom)) return {Code::kDoesNotFit, "injected: no memory for the workspace of this pass"};
    Fault f;
    if (faults_.on(Kind::kSlowRound, &f)) sleep_ms(f.ms);
    if (faults_.on(Kind::kStuckRound, &f)) {
      if (f.ms <= 0)
        for (;;) sleep_ms(1000);
      sleep_ms(f.ms);
    }
    const Status status = inner_->forward(forest, output);
    if (!status.ok()) return status;
    if (faults_.on(Kind::kNanLogits)) {
      output->faulty_rows.clear();
      for (const Segment& s : forest.segments)
        for (int32_t r = s.first_row; r < s.first_row + s.row_count && output->faulty_rows.empty(); ++r)
          if (forest.wants_logits[static_cast<size_t>(r)]) output->faulty_rows.push_back(r);
      if (!output->faulty_rows.empty())
        return {Code::kEngineFault, fmt::format("logits of row {} are not finite (injected)", output->faulty_rows[0])};
    }
    if (faults_.on(Kind::kGarbageText, &f)) garble(forest, output, f.token);
    return status;
  }

  Result<const float*> row_logits(const PassOutput& output, int32_t logits_row) override {
    if (output.logits) return output.logits + static_cast<int64_t>(logits_row) * inner_->target().vocab_size;
    return inner_->row_logits(output, logits_row);
  }

  Status commit(const Forest& forest, std::span<const Accepted> accepted) override {
    if (Status s = gone(); !s.ok()) return s;
    return inner_->commit(forest, accepted);
  }

  Status draft(std::span<const DraftQuery> queries, int32_t top_k, DraftOutput* output) override {
    if (Status s = gone(); !s.ok()) return s;
    const Status status = inner_->draft(queries, top_k, output);
    if (status.ok() && faults_.on(Kind::kDrafterGarbage)) scramble(output);
    return status;
  }

  Status draft_nextn(std::span<const DraftQuery> queries, int32_t steps, DraftOutput* output) override {
    if (Status s = gone(); !s.ok()) return s;
    const Status status = inner_->draft_nextn(queries, steps, output);
    if (status.ok() && faults_.on(Kind::kDrafterGarbage)) scramble(output);
    return status;
  }

 private:
  Status gone() const {
    return faults_.on(Kind::kDeviceLost) ? Status(Code::kUnavailable, "injected: the device is lost (Xid 79)") : lost();
  }

  // The fixed token at every decoding row; prompts (several certain rows) are as they are, so that a text that is scored shows the fault.
  void garble(const Forest& forest, PassOutput* output, int32_t token) {
    const auto vocab = static_cast<size_t>(inner_->target().vocab_size);
    const auto rows =
        static_cast<size_t>(std::count_if(output->logits_row.begin(), output->logits_row.end(), [](int32_t r) { return r >= 0; }));
    if (output->logits) logits_.assign(output->logits, output->logits + rows * vocab);
    for (const Segment& s : forest.segments) {
      if (s.certain && (s.row_count > 1 || s.context == 0)) continue;
      for (int32_t r = s.first_row; r < s.first_row + s.row_count; ++r) {
        const int32_t row = output->logits_row[static_cast<size_t>(r)];
        if (row < 0) continue;
        if (!output->logits) {  // on a card the pass has chosen
          output->chosen[static_cast<size_t>(row)] = token, output->margin[static_cast<size_t>(row)] = 60;
          continue;
        }
        float* x = logits_.data() + static_cast<size_t>(row) * vocab;
        std::fill(x, x + inner_->real_vocab(), -30.0F);
        x[token] = 30;
      }
    }
    if (output->logits) output->logits = logits_.data();
  }

  void scramble(DraftOutput* output) {
    for (int32_t& token : output->token) token = static_cast<int32_t>(random_() % static_cast<uint32_t>(inner_->real_vocab()));
  }

  std::unique_ptr<Executor> inner_;
  Faults& faults_;
  std::vector<float> logits_;
  std::minstd_rand random_{1};
};

}  // namespace

std::string fault_kinds() {
  std::string out;
  for (const Name& n : kNames) out += (out.empty() ? "" : ", ") + std::string(n.name);
  return out;
}

Result<Fault> parse_fault(const std::string& text) {
  const size_t colon = text.find(':');
  const std::string name = text.substr(0, colon);
  const Name* known = std::find_if(std::begin(kNames), std::end(kNames), [&](const Name& n) { return name == n.name; });
  if (known == std::end(kNames)) return Status(Code::kUsage, fmt::format("--inject {}: must be one of {}", name, fault_kinds()));
  Fault f;
  f.kind = known->kind;
  for (size_t at = colon; at != std::string::npos;) {
    const size_t next = text.find(',', at + 1);
    const std::string part = text.substr(at + 1, next == std::string::npos ? next : next - at - 1);
    at = next;
    const size_t equals = part.find('=');
    const std::string key = part.substr(0, equals), value = equals == std::string::npos ? "" : part.substr(equals + 1);
    char* end = nullptr;
    const double v = std::strtod(value.c_str(), &end);
    if (value.empty() || *end || v < 0)
      return Status(Code::kUsage,
                    fmt::format("--inject {}: '{}' must be after, for, start, every, ms, seconds or token = a number", name, part));
    const auto n = static_cast<int64_t>(v);
    if (key == "after") f.after = n;
    else if (key == "for") f.count = n;
    else if (key == "start") f.from_start = n != 0;
    else if (key == "every") f.every = n;
    else if (key == "ms") f.ms = v;
    else if (key == "seconds") f.seconds = v;
    else if (key == "token") f.token = static_cast<int32_t>(n);
    else return Status(Code::kUsage, fmt::format("--inject {}: '{}' is none of after, for, start, every, ms, seconds, token", name, key));
  }
  return f;
}

Faults& Faults::instance() {
  static Faults faults;
  return faults;
}

void Faults::add(Fault fault) {
  const std::lock_guard lock(mutex_);
  faults_.push_back(fault);
}

void Faults::pass() {
  const std::lock_guard lock(mutex_);
  ++all_passes_;
  passes_ += armed_;
}

bool Faults::on(Kind kind, Fault* out) const {
  const std::lock_guard lock(mutex_);
  for (const Fault& f : faults_) {
    if (!f.from_start && !armed_) continue;
    const int64_t at = kind == Kind::kStoreFull ? (f.from_start ? all_commits_ : commits_) : f.from_start ? all_passes_ : passes_;
    if (f.kind != kind || at <= f.after) continue;
    int64_t since = at - f.after - 1;
    if (f.every > 0) since %= f.every;
    if (f.count >= 0 && since >= f.count) continue;
    if (out) *out = f;
    return true;
  }
  return false;
}

std::unique_ptr<Executor> Faults::wrap(std::unique_ptr<Executor> inner) {
  return std::make_unique<FaultyExecutor>(std::move(inner), *this);
}

Status Faults::store_commit() {
  {
    const std::lock_guard lock(mutex_);
    ++all_commits_;
    commits_ += armed_;
  }
  return on(Kind::kStoreFull) ? Status(Code::kStorage, "injected: database or disk is full") : Status();
}

// A connection of its own holds the write lock, as a backup tool or a shell would.
void Faults::lock_store(const std::string& path) {
  std::optional<Fault> fault;
  {
    const std::lock_guard lock(mutex_);
    for (const Fault& f : faults_)
      if (f.kind == Kind::kStoreLocked) fault = f;
  }
  if (!fault) return;
  std::thread([path, f = *fault] {
    sqlite3* db = nullptr;
    if (sqlite3_open_v2(path.c_str(), &db, SQLITE_OPEN_READWRITE, nullptr) == SQLITE_OK) {
      sqlite3_busy_timeout(db, 10'000);
      if (sqlite3_exec(db, "BEGIN IMMEDIATE", nullptr, nullptr, nullptr) == SQLITE_OK) {
        sleep_ms(f.seconds * 1000);
        sqlite3_exec(db, "ROLLBACK", nullptr, nullptr, nullptr);
      }
    }
    sqlite3_close(db);
  }).detach();
}

}  // namespace ddtree::inject
