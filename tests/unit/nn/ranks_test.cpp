// Several ranks on the CPU give what one gives, in every kind of pass, for head ratios of Qwen3.6-27B and of the tiny pair; a rank that
// fails, hangs or disagrees ends it with its name; what a rank takes is what the plan says.
#include <atomic>
#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <limits>
#include <random>
#include <thread>

#include "model/shard.h"
#include "nn/cpu_executor.h"
#include "nn/footprint.h"
#include "nn/pair_executor.h"
#include "nn/rank_executor.h"
#include "ops/cpu/cpu_backend.h"
#include "unit/nn/random_pair.h"

namespace ddtree {
namespace {

using Catch::Matchers::ContainsSubstring;

constexpr int32_t kReal = 97;

ModelSpec spec_27b_ratios() {
  ModelSpec s;
  s.vocab_size = 101;
  s.hidden_size = 48;
  s.intermediate_size = 64;
  s.layers = {LayerKind::kGatedDelta, LayerKind::kGatedDelta, LayerKind::kGatedDelta, LayerKind::kFullAttention};
  s.heads = 24, s.kv_heads = 4, s.head_dim = 16, s.rotary_dim = 8;
  s.key_heads = 16, s.value_heads = 48, s.key_dim = 16, s.value_dim = 16;
  s.mtp_layers = 1;
  s.max_positions = 400;
  return s;
}
ModelSpec spec_tiny_ratios() {
  ModelSpec s = spec_27b_ratios();
  s.tied_head = true;
  s.layers = {LayerKind::kFullAttention, LayerKind::kGatedDelta};
  s.heads = 4, s.kv_heads = 2;
  s.key_heads = 2, s.value_heads = 4, s.value_dim = 32;
  return s;
}
DrafterSpec drafter_of(const ModelSpec& target) {
  DrafterSpec d;
  d.hidden_size = target.hidden_size, d.intermediate_size = 36;
  d.heads = 4, d.kv_heads = 2, d.head_dim = 16;
  d.layers = {{.sliding = true, .causal = true}, {.sliding = false, .causal = false}};
  d.window = 20, d.block_size = 6, d.mask_id = 70;
  d.taps = {0, 1};
  d.num_target_layers = target.num_layers();
  d.rope_theta = 1e5;
  d.vocab_size = target.vocab_size;
  return d;
}

ExecutorOptions options_for(int32_t ranks) {
  ExecutorOptions o;
  o.pages = 24, o.page_size = 16, o.slots = 3, o.max_rows = 60, o.real_vocab = kReal, o.threads = 1, o.tp_size = ranks;
  return o;
}

nn::RankExecutor::MakeBackend cpu_backends(bool bf16 = false) {
  return [bf16](int32_t) -> Result<std::unique_ptr<ops::Backend>> {
    return std::unique_ptr<ops::Backend>(
        std::make_unique<ops::cpu::CpuBackend>(ops::cpu::CpuOptions{.threads = 1, .bfloat16_boundaries = bf16}));
  };
}

std::unique_ptr<nn::RankExecutor> make_ranks(const LoadedPair& pair, int32_t ranks, nn::RankLimits limits = {}, nn::RankHooks hooks = {}) {
  auto made = nn::RankExecutor::create(pair, options_for(ranks), cpu_backends(), limits, std::move(hooks));
  INFO(made.status().message());
  REQUIRE(made.ok());
  return std::move(*made);
}

// One row of one sequence, for faults.
struct OneRow {
  std::vector<int32_t> pages{0, 1};
  Forest forest;
  explicit OneRow(int32_t token = 5) {
    forest.segments.push_back({0, 1, true, 0, pages, 0});
    forest.token = {token}, forest.position = {0}, forest.parent = {-1}, forest.wants_logits = {1};
  }
  std::vector<Accepted> accepted() const { return {{.segment = 0, .rows = {0}, .next = {3}}}; }
};

}  // namespace

TEST_CASE("ranks: two sequences through prompts, trees, commits and drafts are those of one rank", "[ranks]") {
  uint32_t seed = 40;
  for (const ModelSpec& spec : {spec_27b_ratios(), spec_tiny_ratios()})
    for (const int32_t ranks : {2, 4, 8}) {
      if (!share_of(spec, ranks, 0).ok()) continue;
      CAPTURE(ranks, spec.heads);
      const DrafterSpec drafter = drafter_of(spec);
      const auto pair = test::make_random_pair(spec, &drafter, ranks == 4 ? DType::kF32 : DType::kBf16, ++seed);
      auto one = make_cpu_executor(pair->pair, options_for(1));
      REQUIRE(one.ok());
      Executor& alone = **one;
      const auto several = make_ranks(pair->pair, ranks);
      CHECK(several->target().vocab_size == spec.vocab_size);
      CHECK(several->options().tp_size == ranks);
      std::mt19937 random(seed);
      const auto below = [&](int n) { return static_cast<int32_t>(random() % static_cast<uint32_t>(n)); };
      struct Sequence {
        std::vector<int32_t> pages;
        int32_t context = 0;
      } sequences[2] = {{{7, 2, 9, 0, 11, 4}, 0}, {{1, 3, 5, 6, 8, 10}, 0}};
      for (Executor* e : {one->get(), static_cast<Executor*>(several.get())})
        for (int32_t s : {0, 1}) e->reset_slot(s);
      double worst = 0, scale = 0;
      int chosen = 0, ties = 0;
      for (int pass = 0; pass < 9; ++pass) {
        Forest forest;
        std::vector<Accepted> accepted;
        for (int32_t s : {0, 1}) {
          const int32_t first = static_cast<int32_t>(forest.token.size()), rows = 1 + below(9);
          const bool certain = below(2) == 0;
          forest.segments.push_back({first, rows, certain, s, sequences[s].pages, sequences[s].context});
          Accepted a{.segment = s, .feed_drafter = true, .feed_mtp = true};
          for (int32_t i = 0; i < rows; ++i) {
            const int32_t parent = i == 0 ? -1 : certain ? first + i - 1 : first + below(i);
            forest.token.push_back(below(kReal)), forest.parent.push_back(parent);
            forest.position.push_back(parent < 0 ? sequences[s].context : forest.position[static_cast<size_t>(parent)] + 1);
            forest.wants_logits.push_back(1);
          }
          // The path to the last row is kept.
          for (int32_t row = first + rows - 1; row >= 0; row = forest.parent[static_cast<size_t>(row)]) a.rows.insert(a.rows.begin(), row);
          for (size_t i = 1; i < a.rows.size(); ++i) a.next.push_back(forest.token[static_cast<size_t>(a.rows[i])]);
          a.next.push_back(below(kReal));
          sequences[s].context += static_cast<int32_t>(a.rows.size());
          accepted.push_back(a);
        }
        PassOutput want, got;
        REQUIRE(alone.forward(forest, &want).ok());
        REQUIRE(several->forward(forest, &got).message() == "");
        REQUIRE(got.logits == nullptr);
        REQUIRE(got.chosen.size() == forest.token.size());
        REQUIRE(got.logits_row == want.logits_row);
        for (size_t r = 0; r < forest.token.size(); ++r) {
          const float* x = want.logits + static_cast<int64_t>(want.logits_row[r]) * spec.vocab_size;
          const auto fetched = several->row_logits(got, got.logits_row[r]);
          REQUIRE(fetched.ok());
          std::vector<float> sorted(x, x + kReal);
          for (int32_t v = 0; v < kReal; ++v) {
            worst = std::max(worst, static_cast<double>(std::fabs((*fetched)[v] - x[v])));
            scale = std::max(scale, static_cast<double>(std::fabs(x[v])));
          }
          for (int32_t v = kReal; v < spec.vocab_size; ++v) REQUIRE((*fetched)[v] == -std::numeric_limits<float>::infinity());
          const auto best = static_cast<int32_t>(std::max_element(x, x + kReal) - x);
          std::nth_element(sorted.begin(), sorted.begin() + 1, sorted.end(), std::greater<>());
          const float margin = x[best] - sorted[1];
          ++chosen;
          if (margin < 1e-3f) ++ties;
          else REQUIRE(got.chosen[r] == best);
          REQUIRE(std::fabs(got.margin[r] - margin) < 1e-3f);
        }
        REQUIRE(alone.commit(forest, accepted).ok());
        REQUIRE(several->commit(forest, accepted).message() == "");
        std::vector<DraftQuery> queries;
        for (int32_t s : {0, 1})
          queries.push_back({.slot = s,
                             .pages = sequences[s].pages,
                             .context = sequences[s].context,
                             .anchor = accepted[static_cast<size_t>(s)].next.back()});
        for (const bool nextn : {false, true}) {
          DraftOutput a, b;
          REQUIRE((nextn ? alone.draft_nextn(queries, 3, &a) : alone.draft(queries, 4, &a)).ok());
          REQUIRE((nextn ? several->draft_nextn(queries, 3, &b) : several->draft(queries, 4, &b)).message() == "");
          REQUIRE(a.token.size() == b.token.size());
          bool followed_tie = false;
          for (size_t i = 0; i < a.token.size(); ++i) {
            if (nextn && i % 3 == 0) followed_tie = false;
            if (followed_tie) continue;  // another token in a chain, and so another chain
            REQUIRE(std::fabs(a.log_prob[i] - b.log_prob[i]) < 1e-3f);
            // Two candidates as good as one another may change places.
            if (a.token[i] != b.token[i] && nextn) followed_tie = true;
            else if (a.token[i] != b.token[i]) {
              const bool tied = (i > 0 && std::fabs(a.log_prob[i] - a.log_prob[i - 1]) < 1e-3f) ||
                                (i + 1 < a.token.size() && std::fabs(a.log_prob[i] - a.log_prob[i + 1]) < 1e-3f) || i % 4 == 3;
              REQUIRE(tied);
            }
          }
        }
      }
      INFO("largest difference " << worst << " of " << scale << "; " << ties << " of " << chosen << " choices are near ties");
      CHECK(worst < 1e-4 * scale);
      CHECK(ties * 10 < chosen);
      // What lasts has the same bits on every rank: taps, hidden rows.
      for (int32_t r = 1; r < ranks; ++r) {
        const ops::Tensor a = several->rank(0).features(), b = several->rank(r).features();
        for (int64_t row = 0; row < 4; ++row) CHECK(std::memcmp(a.f32(row), b.f32(row), sizeof(float) * static_cast<size_t>(a.cols)) == 0);
      }
    }
}

TEST_CASE("ranks: BF16 boundaries hold across ranks", "[ranks]") {
  const ModelSpec spec = spec_27b_ratios();
  const auto pair = test::make_random_pair(spec, nullptr, DType::kBf16, 77);
  ExecutorOptions o = options_for(4);
  o.precision = Precision::kBfloat16Boundaries;
  auto made = nn::RankExecutor::create(pair->pair, o, cpu_backends(true));
  REQUIRE(made.ok());
  const OneRow one;
  PassOutput out;
  REQUIRE((*made)->forward(one.forest, &out).ok());
  for (int32_t r = 0; r < 4; ++r) {
    const ops::Tensor hidden = (*made)->rank(r).hidden();
    for (int64_t c = 0; c < hidden.cols; ++c) REQUIRE(hidden.f32()[c] == round_to_bf16(hidden.f32()[c]));
    REQUIRE(std::memcmp(hidden.f32(), (*made)->rank(0).hidden().f32(), sizeof(float) * static_cast<size_t>(hidden.cols)) == 0);
  }
}

TEST_CASE("ranks: each books what the plan says of one, and together the weights of all", "[ranks]") {
  const ModelSpec spec = spec_27b_ratios();
  const DrafterSpec drafter = drafter_of(spec);
  const auto pair = test::make_random_pair(spec, &drafter, DType::kBf16, 3);
  const auto whole = PairFootprint::of(pair->pair, ops::DeviceKind::kCpu, 1);
  REQUIRE(whole.ok());
  const auto whole_ledger = whole->with(options_for(1));
  REQUIRE(whole_ledger.ok());
  using ops::MemoryOwner;
  using ops::MemoryUse;
  for (const int32_t ranks : {2, 4, 8}) {
    const auto several = make_ranks(pair->pair, ranks);
    const auto footprint = PairFootprint::of(pair->pair, ops::DeviceKind::kCpu, 1, ranks);
    REQUIRE(footprint.ok());
    CHECK(footprint->ranks() == ranks);
    const auto planned = footprint->with(options_for(ranks));
    REQUIRE(planned.ok());
    for (int32_t r = 0; r < ranks; ++r)
      for (int owner = 0; owner < ops::kMemoryOwners; ++owner)
        for (int use = 0; use < ops::kMemoryUses; ++use) {
          INFO("rank " << r << " of " << ranks << ", owner " << owner << ", use " << use);
          const int64_t took = several->rank(r).backend().ledger().bytes(MemoryOwner(owner), MemoryUse(use));
          const int64_t plan = planned->bytes(MemoryOwner(owner), MemoryUse(use));
          // Ranks before the last may have a row of the vocabulary less.
          if (r + 1 == ranks) CHECK(took == plan);
          else CHECK(took <= plan);
        }
    CHECK(planned->bytes(MemoryOwner::kTarget, MemoryUse::kWeights) <
          whole_ledger->bytes(MemoryOwner::kTarget, MemoryUse::kWeights) / ranks * 3 / 2);
    CHECK(planned->bytes(MemoryOwner::kTarget, MemoryUse::kStates) <=
          whole_ledger->bytes(MemoryOwner::kTarget, MemoryUse::kStates) / ranks + 4096);
    CHECK(planned->bytes(MemoryOwner::kDrafter, MemoryUse::kWeights) == whole_ledger->bytes(MemoryOwner::kDrafter, MemoryUse::kWeights));
  }
  CHECK(PairFootprint::of(pair->pair, ops::DeviceKind::kCpu, 1, 5).status().code() == Code::kUsage);
}

TEST_CASE("ranks: progress of loading is that of all together", "[ranks]") {
  const ModelSpec spec = spec_tiny_ratios();
  const auto pair = test::make_random_pair(spec, nullptr, DType::kBf16, 9);
  ExecutorOptions o = options_for(2);
  std::vector<ops::LoadProgress> told;
  o.loading.progress = [&](const ops::LoadProgress& p) { return told.push_back(p), true; };
  REQUIRE(nn::RankExecutor::create(pair->pair, o, cpu_backends()).ok());
  REQUIRE(!told.empty());
  CHECK(told.back().bytes == told.back().total);
  CHECK(told.back().total > 0);
  CHECK(std::count_if(told.begin(), told.end(), [](const auto& p) { return p.bytes == p.total; }) == 1);
}

TEST_CASE("ranks: what they cannot share, and a backend that works alone, are refused", "[ranks]") {
  const auto pair = test::make_random_pair(spec_27b_ratios(), nullptr, DType::kBf16, 9);
  const auto made = nn::RankExecutor::create(pair->pair, options_for(3), cpu_backends());
  REQUIRE_FALSE(made.ok());
  CHECK_THAT(made.status().message(), ContainsSubstring("num_key_value_heads 4") && ContainsSubstring("1, 2, 4 and 8 can"));
  const auto alone = nn::RankExecutor::create(pair->pair, options_for(2), [](int32_t) -> Result<std::unique_ptr<ops::Backend>> {
    return std::unique_ptr<ops::Backend>(std::make_unique<ops::CountingBackend>(ops::DeviceKind::kCuda));
  });
  REQUIRE_FALSE(alone.ok());
  CHECK(alone.status().code() == Code::kUnavailable);
  // One rank's own trouble has its name.
  const auto one = nn::RankExecutor::create(pair->pair, options_for(2), [](int32_t r) -> Result<std::unique_ptr<ops::Backend>> {
    if (r == 1) return Status(Code::kUnavailable, "card 1 is not there");
    return std::unique_ptr<ops::Backend>(std::make_unique<ops::cpu::CpuBackend>(ops::cpu::CpuOptions{.threads = 1}));
  });
  REQUIRE_FALSE(one.ok());
  CHECK(one.status().message() == "rank 1 of 2: card 1 is not there");
}

TEST_CASE("ranks: a rank that fails ends all of it with its name", "[ranks]") {
  const auto pair = test::make_random_pair(spec_27b_ratios(), nullptr, DType::kBf16, 9);
  std::atomic<int> passes{0};
  const auto several = make_ranks(pair->pair, 4, {}, {.before = [&](int32_t rank, const char* call) -> Status {
                                    if (rank == 2 && std::string_view(call) == "forward" && ++passes == 2)
                                      return {Code::kUnavailable, "its card is gone"};
                                    return {};
                                  }});
  const OneRow one;
  PassOutput out;
  REQUIRE(several->forward(one.forest, &out).ok());
  REQUIRE(several->commit(one.forest, one.accepted()).ok());
  REQUIRE(several->lost().ok());
  const Status lost = several->forward(one.forest, &out);
  CHECK(lost.code() == Code::kEngineFault);
  CHECK(lost.message() == "rank 2 of 4: its card is gone");
  CHECK(out.faulty_rows.empty());
  CHECK(several->lost().message() == lost.message());
  CHECK(several->forward(one.forest, &out).message() == lost.message());  // for good
  CHECK(several->commit(one.forest, one.accepted()).message() == lost.message());
}

TEST_CASE("ranks: a rank that hangs ends all of it within the limit", "[ranks]") {
  const auto pair = test::make_random_pair(spec_27b_ratios(), nullptr, DType::kBf16, 9);
  for (const char* at : {"forward", "commit"}) {
    CAPTURE(at);
    const auto released = std::make_shared<std::atomic<bool>>(false);
    {
      const auto several = make_ranks(pair->pair, 2, {.seconds = 0.3}, {.before = [released, at](int32_t rank, const char* call) -> Status {
                                        while (rank == 1 && std::string_view(call) == at && !*released)
                                          std::this_thread::sleep_for(std::chrono::milliseconds(5));
                                        return {};
                                      }});
      PassOutput out;
      Status status;
      {
        const OneRow one;  // gone when the rank wakes up
        status = several->forward(one.forest, &out);
        if (status.ok()) status = several->commit(one.forest, one.accepted());
      }
      CHECK(status.code() == Code::kEngineFault);
      CHECK_THAT(status.message(), ContainsSubstring("rank 1 of 2 did not"));
      CHECK_FALSE(several->lost().ok());
    }  // and so does its end
    *released = true;
  }
}

TEST_CASE("ranks: ranks that disagree are found after so many commits, by name where there is a majority", "[ranks]") {
  const auto pair = test::make_random_pair(spec_27b_ratios(), nullptr, DType::kBf16, 9);
  for (const int32_t ranks : {2, 4}) {
    const auto several =
        make_ranks(pair->pair, ranks, {.digest_rounds = 3}, {.digest = [](int32_t rank, uint64_t d) { return rank == 1 ? d ^ 1 : d; }});
    OneRow one;
    for (int i = 0; i < 3; ++i) {
      PassOutput out;
      REQUIRE(several->forward(one.forest, &out).ok());
      const Status status = several->commit(one.forest, one.accepted());
      one.forest.segments[0].context++, one.forest.position[0]++;
      if (i < 2) {
        REQUIRE(status.ok());
        continue;
      }
      CHECK(status.code() == Code::kEngineFault);
      CHECK_THAT(status.message(), ContainsSubstring(ranks == 2 ? "ranks 0 and 1 of 2 disagree on" : "rank 1 of 4 disagrees on"));
    }
  }
  // And the real ones agree, whatever they draft and keep.
  const auto several = make_ranks(pair->pair, 4, {.digest_rounds = 1});
  OneRow one;
  for (int i = 0; i < 5; ++i, one.forest.segments[0].context++, one.forest.position[0]++) {
    PassOutput out;
    REQUIRE(several->forward(one.forest, &out).ok());
    std::vector<Accepted> accepted = one.accepted();
    accepted[0].next[0] = out.chosen[0], accepted[0].feed_mtp = true;
    REQUIRE(several->commit(one.forest, accepted).message() == "");
    DraftOutput drafts;
    REQUIRE(
        several->draft_nextn(std::vector{DraftQuery{.slot = 0, .pages = one.pages, .context = i + 1, .anchor = out.chosen[0]}}, 2, &drafts)
            .ok());
  }
}

TEST_CASE("ranks: what is wrong on every rank alike is the call's error, and the next call is as good as ever", "[ranks]") {
  const auto pair = test::make_random_pair(spec_27b_ratios(), nullptr, DType::kBf16, 9);
  // The embedding of one token is not finite.
  auto* embed = const_cast<std::byte*>(pair->pair.tensors.embed.data);
  const uint16_t nan = 0x7fc0;
  std::memcpy(embed + (17 * 48 + 3) * 2, &nan, 2);
  const auto several = make_ranks(pair->pair, 4);
  PassOutput out;
  OneRow wrong(1000);
  CHECK(several->forward(wrong.forest, &out).code() == Code::kInvalidArgument);
  const Status faulty = several->forward(OneRow(17).forest, &out);
  CHECK(faulty.code() == Code::kEngineFault);
  CHECK(out.faulty_rows == std::vector<int32_t>{0});
  CHECK(several->lost().ok());
  several->reset_slot(0);
  CHECK(several->forward(OneRow(16).forest, &out).ok());
}

}  // namespace ddtree
