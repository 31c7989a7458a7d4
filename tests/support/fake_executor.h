// An executor whose "model" is a hash of the whole token prefix, kept page by page and slot by slot as the real one keeps its state. It
// checks everything that an engine owes an executor (see nn/executor.h) and throws where a rule is broken, so scheduler tests run in
// milliseconds and still notice a wrong row, page, parent or commit.
#pragma once

#include <fmt/core.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <set>
#include <stdexcept>
#include <thread>
#include <vector>

#include "nn/executor.h"

namespace ddtree::testing {

class FakeExecutor final : public Executor {
 public:
  explicit FakeExecutor(ExecutorOptions options, int32_t vocab = 64) : options_(options) {
    spec_.vocab_size = vocab;
    spec_.max_positions = 4096;
    drafter_.block_size = 16;
    page_tokens_.resize(static_cast<size_t>(options.pages), std::vector<int32_t>(static_cast<size_t>(options.page_size), -1));
    slots_.resize(static_cast<size_t>(options.slots));
  }

  const ModelSpec& target() const override { return spec_; }
  const DrafterSpec* drafter() const override { return with_drafter ? &drafter_ : nullptr; }
  bool has_mtp() const override { return with_mtp; }
  const ExecutorOptions& options() const override { return options_; }
  int32_t real_vocab() const override { return static_cast<int32_t>(spec_.vocab_size); }
  int32_t padded_rows(int32_t rows) const override { return padded(rows); }

  bool with_drafter = true, with_mtp = true;
  bool lenient_context = false;  // measuring costs looks far down a context that was never written
  int draft_hit_percent = 80;    // how often the drafter's best candidate is the greedy token
  int slow_ms = 0;
  // What things cost, in virtual milliseconds, and the clock that goes by them.
  std::function<double(int32_t rows)> forward_ms = [](int32_t) { return 0.0; };
  double sequence_ms = 0;                                                           // each further sequence of a pass
  std::function<int32_t(int32_t rows)> padded = [](int32_t rows) { return rows; };  // what padded_rows() says; forward_ms knows by itself
  double draft_call_ms = 0, draft_ms = 0, commit_row_ms = 0, feed_row_ms = 0;       // of a draft, and of each query in it
  std::chrono::steady_clock::time_point time{};
  double elapsed_ms() const { return std::chrono::duration<double, std::milli>(time.time_since_epoch()).count(); }
  std::function<Status(const Forest&, PassOutput*)> before_forward;  // fault injection
  std::function<Status()> before_draft, before_commit;
  std::vector<Forest> log;  // forests seen, with keep_log
  bool keep_log = false;
  int64_t forwards = 0, drafts = 0, max_segments = 0, max_rows_seen = 0;
  std::vector<int64_t> prompt_rows_per_pass;

  // The model: five likely tokens for a prefix, the first of them the greedy one.
  static std::vector<float> logits_of(const std::vector<int32_t>& prefix, int32_t vocab) {
    uint64_t h = 1469598103934665603ULL;
    const size_t from = prefix.size() > 6 ? prefix.size() - 6 : 0;  // a short memory, so that text wanders through few states
    for (size_t i = from; i < prefix.size(); ++i) h = (h ^ static_cast<uint64_t>(prefix[i] + 1)) * 1099511628211ULL;
    std::vector<float> out(static_cast<size_t>(vocab));
    for (int32_t i = 0; i < vocab; ++i) out[static_cast<size_t>(i)] = static_cast<float>(mix(h + static_cast<uint64_t>(i)) % 1000) / 500.0F;
    for (int k = 0; k < 5; ++k)
      out[static_cast<size_t>(mix(h * 31 + static_cast<uint64_t>(k)) % static_cast<uint64_t>(vocab))] += 6.0F - static_cast<float>(k);
    return out;
  }

  void reset_slot(int32_t slot) override { slots_.at(static_cast<size_t>(slot)) = Slot(); }

  Status forward(const Forest& f, PassOutput* out) override {
    ++forwards;
    spend(forward_ms(static_cast<int32_t>(f.token.size())) + sequence_ms * (static_cast<double>(f.segments.size()) - 1));
    if (slow_ms > 0) std::this_thread::sleep_for(std::chrono::milliseconds(slow_ms));
    check(f.token.size() == f.position.size() && f.token.size() == f.parent.size() && f.token.size() == f.wants_logits.size(),
          "row arrays differ in length");
    check(static_cast<int32_t>(f.token.size()) <= options_.max_rows, "more rows than max_rows");
    max_rows_seen = std::max<int64_t>(max_rows_seen, static_cast<int64_t>(f.token.size()));
    max_segments = std::max<int64_t>(max_segments, static_cast<int64_t>(f.segments.size()));
    if (keep_log) log.push_back(f);
    out->faulty_rows.clear();
    if (before_forward)
      if (Status s = before_forward(f, out); !s.ok() && out->faulty_rows.empty()) return s;
    prefix_.assign(f.token.size(), {});
    out->logits_row.assign(f.token.size(), -1);
    logits_.clear();
    std::set<int32_t> pages_used, slots_used;
    int32_t next_row = 0;
    int64_t prompt_rows = 0;
    for (const Segment& s : f.segments) {
      check(s.first_row == next_row && s.row_count > 0, "segments must be contiguous");
      next_row += s.row_count;
      Slot& slot = slots_.at(static_cast<size_t>(s.slot));
      check(s.certain || options_.max_tentative_rows == 0 || next_row <= options_.max_tentative_rows, "tentative rows too far behind");
      check(slots_used.insert(s.slot).second, "a slot twice in one forest");
      check(slot.context == s.context || (lenient_context && !s.certain),
            fmt::format("context {} given, slot holds {}", s.context, slot.context));
      std::vector<int32_t> committed = read(s.pages, s.context);
      for (int32_t p : s.pages) check(pages_used.insert(p).second, "a page in two sequences of a forest");
      for (int32_t r = s.first_row; r < s.first_row + s.row_count; ++r) {
        const size_t k = static_cast<size_t>(r);
        const int32_t parent = f.parent[k];
        check(parent == -1 || (parent >= s.first_row && parent < r), "parent outside the segment or behind its child");
        if (s.certain) check(parent == (r == s.first_row ? -1 : r - 1), "certain rows must be a chain");
        prefix_[k] = parent < 0 ? committed : prefix_[static_cast<size_t>(parent)];
        check(f.position[k] == static_cast<int32_t>(prefix_[k].size()), "position is not context + depth");
        check(f.position[k] < static_cast<int32_t>(s.pages.size()) * options_.page_size, "a row beyond its page table");
        prefix_[k].push_back(f.token[k]);
        if (f.wants_logits[k]) {
          out->logits_row[k] = static_cast<int32_t>(logits_.size()) / static_cast<int32_t>(spec_.vocab_size);
          const auto l = logits_of(prefix_[k], static_cast<int32_t>(spec_.vocab_size));
          logits_.insert(logits_.end(), l.begin(), l.end());
        }
      }
      if (s.certain) {
        if (s.row_count > 1) prompt_rows += s.row_count;
        for (int32_t r = s.first_row; r < s.first_row + s.row_count; ++r)
          write(s.pages, f.position[static_cast<size_t>(r)], f.token[static_cast<size_t>(r)]);
        slot.context += s.row_count;
      }
    }
    prompt_rows_per_pass.push_back(prompt_rows);
    check(next_row == static_cast<int32_t>(f.token.size()), "rows outside segments");
    out->logits = logits_.data();
    if (!out->faulty_rows.empty()) return {Code::kEngineFault, fmt::format("logits of row {} are not finite", out->faulty_rows[0])};
    return {};
  }

  Status commit(const Forest& f, std::span<const Accepted> accepted) override {
    if (before_commit)
      if (Status s = before_commit(); !s.ok()) return s;
    for (const Accepted& a : accepted) {
      const Segment& s = f.segments.at(static_cast<size_t>(a.segment));
      Slot& slot = slots_.at(static_cast<size_t>(s.slot));
      check(a.rows.size() == a.next.size() && !a.rows.empty(), "rows and next differ");
      if (s.certain) check(static_cast<int32_t>(a.rows.size()) == s.row_count, "certain segments keep all rows");
      for (size_t i = 0; i < a.rows.size(); ++i) {
        const int32_t r = a.rows[i];
        check(r >= s.first_row && r < s.first_row + s.row_count, "a kept row of another segment");
        check(f.parent[static_cast<size_t>(r)] == (i == 0 ? -1 : a.rows[i - 1]), "kept rows are not a root path");
        if (i + 1 < a.rows.size()) check(a.next[i] == f.token[static_cast<size_t>(a.rows[i + 1])], "next is not the next row's token");
        if (!s.certain) write(s.pages, f.position[static_cast<size_t>(r)], f.token[static_cast<size_t>(r)]);
      }
      if (!s.certain) slot.context += static_cast<int32_t>(a.rows.size());
      if (a.feed_drafter)
        slot.drafter_context += static_cast<int32_t>(a.rows.size()), spend(feed_row_ms * static_cast<double>(a.rows.size()));
      if (!s.certain) spend(commit_row_ms * static_cast<double>(a.rows.size()));
      if (a.feed_mtp) slot.mtp_context += static_cast<int32_t>(a.rows.size());
      slot.anchor = a.next.back();
    }
    return {};
  }

  Status draft(std::span<const DraftQuery> queries, int32_t top_k, DraftOutput* out) override {
    return run_draft(queries, top_k, 15, false, out);
  }
  Status draft_nextn(std::span<const DraftQuery> queries, int32_t steps, DraftOutput* out) override {
    return run_draft(queries, 1, steps, true, out);
  }

 private:
  struct Slot {
    int32_t context = 0, drafter_context = 0, mtp_context = 0, anchor = -1;
  };
  void spend(double ms) {
    time += std::chrono::duration_cast<std::chrono::steady_clock::duration>(std::chrono::duration<double, std::milli>(ms));
  }
  static uint64_t mix(uint64_t x) {
    x ^= x >> 33, x *= 0xff51afd7ed558ccdULL, x ^= x >> 33, x *= 0xc4ceb9fe1a85ec53ULL;
    return x ^ (x >> 33);
  }
  static void check(bool ok, const std::string& what) {
    if (!ok) throw std::logic_error("the engine broke a rule of the executor: " + what);
  }
  void write(std::span<const int32_t> pages, int32_t position, int32_t token) {
    page_tokens_.at(static_cast<size_t>(
        pages[static_cast<size_t>(position / options_.page_size)]))[static_cast<size_t>(position % options_.page_size)] = token;
  }
  std::vector<int32_t> read(std::span<const int32_t> pages, int32_t count) const {
    std::vector<int32_t> out;
    for (int32_t p = 0; p < count; ++p)
      out.push_back(page_tokens_.at(
          static_cast<size_t>(pages[static_cast<size_t>(p / options_.page_size)]))[static_cast<size_t>(p % options_.page_size)]);
    return out;
  }

  Status run_draft(std::span<const DraftQuery> queries, int32_t top_k, int32_t positions, bool mtp, DraftOutput* out) {
    if (before_draft)
      if (Status s = before_draft(); !s.ok()) return s;
    ++drafts;
    spend(draft_call_ms + draft_ms * static_cast<double>(queries.size()));
    out->positions = positions;
    out->top_k = top_k;
    out->token.clear();
    out->log_prob.clear();
    for (const DraftQuery& q : queries) {
      const Slot& slot = slots_.at(static_cast<size_t>(q.slot));
      check(slot.context == q.context, "draft context is not the committed one");
      check((mtp ? slot.mtp_context : slot.drafter_context) == q.context, "the drafter was not fed all committed rows");
      check(slot.anchor == q.anchor, "draft anchor is not the committed one");
      std::vector<int32_t> prefix = read(q.pages, q.context);
      prefix.push_back(q.anchor);
      for (int32_t p = 0; p < positions; ++p) {
        std::vector<float> l = logits_of(prefix, static_cast<int32_t>(spec_.vocab_size));
        std::vector<std::pair<float, int32_t>> order;
        for (size_t i = 0; i < l.size(); ++i) order.push_back({-l[i], static_cast<int32_t>(i)});
        std::sort(order.begin(), order.end());
        // Now and then the right token is not the first candidate.
        if (mix(static_cast<uint64_t>(q.context) * 977 + static_cast<uint64_t>(p * 31 + q.anchor)) % 100 >=
            static_cast<uint64_t>(draft_hit_percent)) {
          const int32_t right = order[0].second;
          order[0].second = order[1].second;
          order[1].second = right;
        }
        for (int32_t k = 0; k < top_k; ++k) {
          out->token.push_back(order[static_cast<size_t>(k)].second);
          out->log_prob.push_back(-0.25F - 1.3F * static_cast<float>(k));
        }
        prefix.push_back(order[0].second);
      }
    }
    return {};
  }

  ExecutorOptions options_;
  ModelSpec spec_;
  DrafterSpec drafter_;
  std::vector<std::vector<int32_t>> page_tokens_;
  std::vector<Slot> slots_;
  std::vector<std::vector<int32_t>> prefix_;
  std::vector<float> logits_;
};

}  // namespace ddtree::testing
