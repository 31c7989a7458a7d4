// Passes that are recorded as CUDA graphs against the same passes launched kernel by kernel: the same bits in every result and in
// everything that lasts, whatever comes in between; and padding leaves no trace.
#ifdef DDTREE_HAS_CUDA

#include <fmt/core.h>

#include <algorithm>
#include <catch2/catch_test_macros.hpp>
#include <cstring>
#include <deque>
#include <random>
#include <set>

#include "gpu/support.h"
#include "nn/pair_executor.h"
#include "ops/cuda/cuda_backend.h"
#include "support/tiny.h"
#include "unit/nn/random_pair.h"

using namespace ddtree;
using namespace ddtree::testing;

namespace {

constexpr int32_t kPage = 16, kPages = 80, kSlots = 6, kLength = 200;

// Of one kind of storage: its values on the host, and what a value belongs to.
struct Snapshot {
  std::vector<float> values;
  bool operator==(const Snapshot& o) const {
    return values.size() == o.values.size() && std::memcmp(values.data(), o.values.data(), values.size() * sizeof(float)) == 0;
  }
};
// A place of a pool, or a slot, is [layers][units][width].
struct Storage {
  std::string name;
  ops::Tensor tensor;
  int64_t units = 0, width = 0;
};

class Machine {
 public:
  Machine(const LoadedPair& pair, const ExecutorOptions& options, const ops::cuda::CudaOptions& cuda) {
    auto backend = ops::cuda::CudaBackend::create(cuda);
    if (!backend.ok() && backend.status().code() == Code::kUnavailable) SKIP(backend.status().message());
    INFO(backend.status().message());
    REQUIRE(backend.ok());
    cuda_ = backend->get();
    auto made = nn::PairExecutor::create(std::move(*backend), pair, options);
    INFO(made.status().message());
    REQUIRE(made.ok());
    executor_ = std::move(*made);
    const nn::PairExecutor::Storage s = executor_->storage();
    const auto pool = [&](const char* name, const ops::KvPool* p) {
      if (!p) return;
      const auto& all = static_cast<const ops::cuda::CudaKvPool*>(p)->all;
      const int64_t width = int64_t{all.kv_heads} * all.head_dim, places = int64_t{kPages} * kPage, layers = p->shape().layers;
      for (auto* data : {all.k, all.v})
        storage_.push_back({fmt::format("{} {}", name, data == all.k ? "K" : "V"),
                            {data, ops::Element::kBfloat16, layers * places, width, width},
                            places,
                            width});
    };
    pool("target", s.target), pool("MTP", s.mtp), pool("drafter", s.drafter);
    if (s.states) {
      const auto& states = static_cast<const ops::cuda::CudaStatePool*>(s.states)->storage;
      const ops::DeltaShape& d = states.shape;
      const int64_t state = int64_t{d.value_heads} * d.key_dim * d.value_dim, window = int64_t{d.conv_width - 1} * d.channels();
      storage_.push_back({"states", {states.state, ops::Element::kFloat32, int64_t{d.layers} * kSlots, state, state}, kSlots, state});
      storage_.push_back({"windows", {states.window, ops::Element::kBfloat16, int64_t{d.layers} * kSlots, window, window}, kSlots, window});
    }
    if (s.mtp_slots.present()) storage_.push_back({"MTP slots", s.mtp_slots, kSlots, s.mtp_slots.cols});
  }

  nn::PairExecutor& executor() { return *executor_; }
  const ops::cuda::CudaBackend& cuda() const { return *cuda_; }
  const std::vector<Storage>& storage() const { return storage_; }

  void poison(uint32_t seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal(0, 0.5f);
    for (const Storage& s : storage_) {
      std::vector<float> values(static_cast<size_t>(s.tensor.rows * s.tensor.cols));
      for (float& v : values) v = normal(random);
      cuda_->upload(values, s.tensor);
    }
  }
  std::vector<Snapshot> snapshot() {
    std::vector<Snapshot> out;
    for (const Storage& s : storage_) {
      const auto values = cuda_->host_floats(s.tensor);
      INFO(values.status().message());
      REQUIRE(values.ok());
      out.push_back({std::vector<float>(*values, *values + s.tensor.rows * s.tensor.cols)});
    }
    return out;
  }
  // Everything is as it was, but for these places of these pools (a name's beginning) and these slots.
  void check_untouched(const std::string& what, const std::vector<Snapshot>& before, const std::map<std::string, std::set<int32_t>>& places,
                       const std::set<int32_t>& slots, const std::set<int32_t>& mtp_slots) {
    const std::vector<Snapshot> after = snapshot();
    for (size_t i = 0; i < storage_.size(); ++i) {
      const Storage& s = storage_[i];
      const std::set<int32_t>* allowed = s.name == "MTP slots" ? &mtp_slots : &slots;
      static const std::set<int32_t> kNone;
      if (s.name.ends_with(" K") || s.name.ends_with(" V")) {
        const auto at = places.find(s.name.substr(0, s.name.size() - 2));
        allowed = at == places.end() ? &kNone : &at->second;
      }
      for (int64_t row = 0; row < s.tensor.rows; ++row) {
        const auto from = static_cast<size_t>(row * s.width);
        if (std::memcmp(&before[i].values[from], &after[i].values[from], static_cast<size_t>(s.width) * sizeof(float)) == 0) continue;
        const auto unit = static_cast<int32_t>(row % s.units);
        INFO(what << ": " << s.name << ", layer " << row / s.units << ", place or slot " << unit);
        REQUIRE(allowed->contains(unit));
      }
    }
  }

 private:
  std::unique_ptr<nn::PairExecutor> executor_;
  ops::cuda::CudaBackend* cuda_ = nullptr;
  std::vector<Storage> storage_;
};

struct Sequence {
  int32_t slot = -1, context = 0, pending = 0;  // pending: prompt tokens still to come
  std::vector<int32_t> pages;
  bool alive = false;
};

// Random rounds on machines that must agree: some record, one does not.
class Rounds {
 public:
  Rounds(const LoadedPair& pair, std::vector<std::unique_ptr<Machine>>* machines, uint32_t seed, int32_t vocab)
      : pair_(pair), machines_(*machines), random_(seed), vocab_(vocab) {
    for (auto& m : machines_) m->poison(seed);
    std::vector<int32_t> pages(kPages);
    for (int32_t i = 0; i < kPages; ++i) pages[static_cast<size_t>(i)] = i;
    std::shuffle(pages.begin(), pages.end(), random_);
    constexpr int32_t kEach = kPages / kSlots;  // 13 pages of 16: 208 positions
    static_assert(kEach * kPage >= kLength);
    for (int32_t s = 0; s < kSlots; ++s)
      sequences_.push_back({s, 0, 0, {pages.begin() + s * kEach, pages.begin() + (s + 1) * kEach}, false});
  }

  void run(int32_t rounds) {
    for (int32_t i = 0; i < rounds; ++i) {
      INFO("round " << i);
      begin_and_end();
      round(i % 4 == 3, i % 5 == 0);
    }
    const auto first = machines_[0]->snapshot();
    for (size_t m = 1; m < machines_.size(); ++m) {
      const auto other = machines_[m]->snapshot();
      for (size_t i = 0; i < first.size(); ++i) {
        INFO("machine " << m << ", " << machines_[0]->storage()[i].name);
        CHECK(first[i] == other[i]);
      }
    }
  }

 private:
  static constexpr int32_t kBanned[] = {0, 3, 17};
  std::deque<ops::TokenHistory> histories_;  // of the round's choices

  int32_t below(int32_t n) { return static_cast<int32_t>(random_() % static_cast<uint32_t>(n)); }
  int32_t token() { return below(vocab_); }
  int32_t place(const Sequence& s, int32_t position) const {
    return s.pages[static_cast<size_t>(position / kPage)] * kPage + position % kPage;
  }

  void begin_and_end() {
    for (Sequence& s : sequences_) {
      if (s.alive && (below(12) == 0 || s.context + 60 > kLength)) s.alive = false;
      if (s.alive || below(3) != 0) continue;
      s.alive = true, s.context = 0, s.pending = 1 + below(40);
      for (auto& m : machines_) m->executor().reset_slot(s.slot);
    }
  }

  // prompts: sequences that have some left bring chunks of several rows; otherwise one row at a time, as the last of a prompt comes.
  // all: every sequence that there is takes part, so that the largest buffers are filled to their last row.
  void round(bool prompts, bool all) {
    std::vector<Sequence*> in;
    for (Sequence& s : sequences_)
      if (s.alive && (all || below(4) != 0)) in.push_back(&s);
    if (in.empty()) return;
    draft(in);
    const bool sampled = below(2) == 0;
    histories_.clear();
    const int32_t limit = 1 << below(8);  // rows of one tree
    Forest f;
    for (Sequence* s : in) {
      const auto first = static_cast<int32_t>(f.token.size());
      const bool prompt = s->pending > 0, certain = prompt || below(3) == 0;
      const int32_t rows = prompt ? (prompts ? 1 + below(s->pending) : 1) : certain ? 1 : 1 + below(std::min(limit, 50));
      for (int32_t i = 0; i < rows; ++i) {
        const int32_t parent = i == 0 ? -1 : certain ? first + i - 1 : first + below(i);
        f.parent.push_back(parent);
        f.position.push_back(parent < 0 ? s->context : f.position[static_cast<size_t>(parent)] + 1);
        f.token.push_back(token());
        f.wants_logits.push_back(!prompts || i + 1 == rows || !certain);
      }
      f.segments.push_back({first, rows, certain, s->slot, s->pages, s->context, sampled && below(4) != 0 ? choice(*s) : Choice()});
      if (prompt) s->pending -= rows;
    }
    forward(f);
    commit(f, in);
  }

  Choice choice(const Sequence& s) {
    Choice c;
    c.params = {.temperature = static_cast<float>(below(4)) / 2, .seed = random_()};
    if (below(2) == 0) c.params.top_k = 1 + below(30);
    if (below(2) == 0) c.params.top_p = 0.9f;
    if (below(3) == 0) {
      ops::TokenHistory& h = histories_.emplace_back();
      for (int32_t n = below(30); n > 0; --n) h.prompt.insert(token()), ++h.generated[token()];
      c.params.presence_penalty = 1.5f, c.params.repetition_penalty = 1.1f;
      c.history = &h, c.history_end = s.context + 1;
    }
    if (below(3) == 0) c.banned = kBanned, c.banned_end = s.context + below(4);
    return c;
  }

  void forward(const Forest& f) {
    std::vector<PassOutput> out(machines_.size());
    const bool look = below(5) == 0;  // at all that lasts; slow
    for (size_t m = 0; m < machines_.size(); ++m) {
      Machine& machine = *machines_[m];
      std::vector<Snapshot> before;
      if (look) before = machine.snapshot();
      const Status status = machine.executor().forward(f, &out[m]);
      INFO(status.message());
      REQUIRE(status.ok());
      if (look) {
        std::map<std::string, std::set<int32_t>> places;
        std::set<int32_t> slots;
        for (const Segment& s : f.segments) {
          if (!s.certain) continue;
          slots.insert(s.slot);
          for (int32_t r = s.first_row; r < s.first_row + s.row_count; ++r)
            places["target"].insert(place(sequences_[static_cast<size_t>(s.slot)], f.position[static_cast<size_t>(r)]));
        }
        machine.check_untouched("forward", before, places, slots, {});
      }
    }
    for (size_t m = 1; m < machines_.size(); ++m) {
      INFO("machine " << m << ", " << f.token.size() << " rows, " << f.segments.size() << " segments");
      REQUIRE(out[m].chosen == out[0].chosen);
      REQUIRE(out[m].margin == out[0].margin);
      for (const int32_t row : out[0].logits_row) {
        if (row < 0) continue;
        const auto a = machines_[0]->executor().row_logits(out[0], row), b = machines_[m]->executor().row_logits(out[m], row);
        REQUIRE((a.ok() && b.ok()));
        INFO("logits row " << row);
        REQUIRE(std::memcmp(*a, *b, static_cast<size_t>(pair_.spec.vocab_size) * sizeof(float)) == 0);
      }
    }
  }

  void commit(const Forest& f, const std::vector<Sequence*>& in) {
    std::vector<Accepted> all;
    std::map<std::string, std::set<int32_t>> places;
    std::set<int32_t> slots, mtp;
    for (size_t i = 0; i < in.size(); ++i) {
      Sequence& s = *in[i];
      const Segment& segment = f.segments[i];
      if (below(8) == 0) {  // it ended: nothing is kept
        s.alive = false;
        continue;
      }
      Accepted a;
      a.segment = static_cast<int32_t>(i);
      if (segment.certain)
        for (int32_t r = 0; r < segment.row_count; ++r) a.rows.push_back(segment.first_row + r);
      else
        for (int32_t r = segment.first_row + below(segment.row_count); r >= 0; r = f.parent[static_cast<size_t>(r)])
          a.rows.insert(a.rows.begin(), r);
      for (size_t r = 0; r < a.rows.size(); ++r)
        a.next.push_back(r + 1 < a.rows.size() ? f.token[static_cast<size_t>(a.rows[r + 1])] : token());
      a.feed_drafter = pair_.drafter.has_value(), a.feed_mtp = pair_.has_mtp();
      for (const int32_t r : a.rows) {
        const int32_t at = place(s, f.position[static_cast<size_t>(r)]);
        if (!segment.certain) places["target"].insert(at);
        places["drafter"].insert(at), places["MTP"].insert(at);
      }
      if (!segment.certain) slots.insert(s.slot);
      mtp.insert(s.slot);
      s.context += static_cast<int32_t>(a.rows.size());
      all.push_back(std::move(a));
    }
    if (all.empty()) return;
    const bool look = below(5) == 0;
    for (auto& m : machines_) {
      std::vector<Snapshot> before;
      if (look) before = m->snapshot();
      const Status status = m->executor().commit(f, all);
      INFO(status.message());
      REQUIRE(status.ok());
      if (look) m->check_untouched("commit", before, places, slots, mtp);
    }
  }

  void draft(const std::vector<Sequence*>& in) {
    std::vector<DraftQuery> queries;
    for (const Sequence* s : in)
      if (s->pending == 0 && s->context > 0) queries.push_back({s->slot, s->pages, s->context, token()});
    if (queries.empty()) return;
    for (const bool nextn : {false, true}) {
      if (nextn ? !pair_.has_mtp() : !pair_.drafter) continue;
      std::vector<DraftOutput> out(machines_.size());
      const bool look = below(10) == 0;
      for (size_t m = 0; m < machines_.size(); ++m) {
        std::vector<Snapshot> before;
        if (look) before = machines_[m]->snapshot();
        nn::PairExecutor& e = machines_[m]->executor();
        const Status status = nextn ? e.draft_nextn(queries, 3, &out[m]) : e.draft(queries, 8, &out[m]);
        INFO(status.message());
        REQUIRE(status.ok());
        if (look) machines_[m]->check_untouched("draft", before, {}, {}, {});
      }
      for (size_t m = 1; m < machines_.size(); ++m) {
        INFO("machine " << m << (nextn ? ", NEXTN" : ", drafter"));
        REQUIRE(out[m].token == out[0].token);
        REQUIRE(out[m].log_prob == out[0].log_prob);
      }
    }
  }

  const LoadedPair& pair_;
  std::vector<std::unique_ptr<Machine>>& machines_;
  std::mt19937 random_;
  int32_t vocab_;
  std::vector<Sequence> sequences_;
};

void compare(const LoadedPair& pair, int32_t real_vocab, bool portable, int32_t rounds) {
  ExecutorOptions options;
  options.page_size = kPage, options.pages = kPages, options.slots = kSlots, options.max_rows = 320, options.real_vocab = real_vocab;
  const auto seed = static_cast<uint32_t>(ops::gpu_test::seed());
  INFO(ops::gpu_test::seed_text());
  // One by one; recorded; recorded with so little room that graphs come and go.
  std::vector<std::unique_ptr<Machine>> machines;
  machines.push_back(std::make_unique<Machine>(pair, options, ops::cuda::CudaOptions{.portable_kernels = portable, .graphs = false}));
  machines.push_back(std::make_unique<Machine>(pair, options, ops::cuda::CudaOptions{.portable_kernels = portable}));
  machines.push_back(std::make_unique<Machine>(pair, options, ops::cuda::CudaOptions{.portable_kernels = portable, .most_graphs = 3}));
  Rounds(pair, &machines, seed, real_vocab).run(rounds);
  CHECK(machines[0]->cuda().graph_count() == 0);
  CHECK(machines[1]->cuda().graph_count() > 3);
  CHECK(machines[2]->cuda().graph_count() == 3);
  WARN(fmt::format("{} graphs of {} KiB of device memory", machines[1]->cuda().graph_count(), machines[1]->cuda().graph_bytes() >> 10));
}

// The ratios and head sizes of Qwen3.6-27B and its drafter, few and narrow layers.
std::unique_ptr<test::RandomPair> ratios_of_27b() {
  ModelSpec s;
  s.vocab_size = 9000, s.hidden_size = 256, s.intermediate_size = 384;
  s.layers = {LayerKind::kGatedDelta, LayerKind::kFullAttention, LayerKind::kGatedDelta};
  s.heads = 12, s.kv_heads = 2, s.head_dim = 256, s.rotary_dim = 64;
  s.key_heads = 2, s.value_heads = 6, s.key_dim = 128, s.value_dim = 128;
  s.output_gate = true;
  s.mtp_layers = 1, s.tied_head = false, s.max_positions = 512;
  DrafterSpec d;
  d.hidden_size = 256, d.intermediate_size = 384, d.heads = 8, d.kv_heads = 2, d.head_dim = 128;
  d.layers = {{.sliding = true, .causal = true}, {.sliding = false, .causal = false}};
  d.window = 32, d.block_size = 16, d.mask_id = 8990, d.taps = {0, 2}, d.num_target_layers = 3, d.vocab_size = 9000;
  return test::make_random_pair(s, &d, DType::kBf16, 11);
}

}  // namespace

TEST_CASE("gpu: recorded passes of the tiny pair give the bits of launched ones") {
  compare(tiny_pair(), tiny_tokenizer().id_count(), false, scaled(40, 10));
}
TEST_CASE("gpu: recorded passes of a 27B's ratios give the bits of launched ones") {
  const auto pair = ratios_of_27b();
  compare(pair->pair, 8980, false, scaled(40, 10));
}
TEST_CASE("gpu: recorded passes on the portable kernels give the bits of launched ones") {
  const auto pair = ratios_of_27b();
  compare(pair->pair, 8980, true, scaled(20, 10));
}

#endif
