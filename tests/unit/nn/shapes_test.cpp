// Random-weight pairs of shapes that the tiny pair does not have, against the float64 reference: every number comes from the spec.
#include <catch2/catch_test_macros.hpp>
#include <numeric>
#include <random>

#include "nn/pair_executor.h"
#include "ops/cpu/cpu_backend.h"
#include "unit/nn/random_pair.h"
#include "unit/nn/reference.h"

namespace ddtree {
namespace {

constexpr auto kDelta = LayerKind::kGatedDelta;
constexpr auto kFull = LayerKind::kFullAttention;

struct Shape {
  const char* name;
  ModelSpec target;
  DrafterSpec drafter;
  DType dtype;
};

ModelSpec spec(std::vector<LayerKind> layers) {
  ModelSpec s;
  s.vocab_size = 75;
  s.hidden_size = 40;
  s.intermediate_size = 52;
  s.layers = std::move(layers);
  s.heads = 4;
  s.kv_heads = 2;
  s.head_dim = 32;
  s.rotary_dim = 8;
  s.rope_theta = 1e6;
  s.key_heads = 2;
  s.value_heads = 4;
  s.key_dim = 16;
  s.value_dim = 16;
  s.conv_width = 4;
  s.mtp_layers = 1;
  s.max_positions = 400;
  return s;
}
DrafterSpec drafter(const ModelSpec& target, std::vector<int32_t> taps) {
  DrafterSpec d;
  d.hidden_size = target.hidden_size;
  d.intermediate_size = 36;
  d.heads = 4;
  d.kv_heads = 2;
  d.head_dim = 16;
  d.layers = {{.sliding = true, .causal = true}, {.sliding = false, .causal = false}};
  d.window = 20;
  d.block_size = 6;
  d.mask_id = 70;
  d.taps = std::move(taps);
  d.num_target_layers = target.num_layers();
  d.rope_theta = 1e5;
  d.vocab_size = target.vocab_size;
  return d;
}

std::vector<Shape> shapes() {
  std::vector<Shape> all;
  {
    ModelSpec s = spec({kDelta, kDelta, kDelta, kFull});
    s.value_heads = 6;  // ratio 3, as in the 27B
    s.heads = 12;       // GQA 6
    all.push_back({"untied head, value ratio 3, GQA 6, last layer tapped", s, drafter(s, {0, 3}), DType::kBf16});
  }
  {
    ModelSpec s = spec({kFull, kDelta});
    s.tied_head = true;
    s.heads = 8;
    s.kv_heads = 1;
    s.key_dim = 32;
    s.value_dim = 48;
    s.value_heads = 2;
    s.conv_width = 3;
    s.rotary_dim = 32;
    DrafterSpec d = drafter(s, {1, 0, 1});  // not ascending, one layer twice
    d.layers = {{.sliding = true, .causal = false}, {.sliding = false, .causal = true}, {.sliding = true, .causal = true}};
    d.block_size = 24;  // longer than the window
    d.heads = 6;
    d.kv_heads = 3;
    all.push_back({"attention first, key dim != value dim, conv 3, odd drafter", s, d, DType::kF32});
  }
  {
    ModelSpec s = spec({kFull, kFull, kFull});
    s.output_gate = false;
    s.heads = 3;
    s.kv_heads = 3;
    s.rotary_dim = 16;
    s.mtp_layers = 0;
    all.push_back({"attention only, no gate, no MTP", s, drafter(s, {2}), DType::kF16});
  }
  {
    ModelSpec s = spec({kDelta, kDelta});
    s.value_heads = 2;  // ratio 1
    s.hidden_size = 33;
    s.intermediate_size = 17;
    s.conv_width = 2;
    s.heads = 2;
    s.kv_heads = 1;
    s.head_dim = 16;
    all.push_back({"delta only, odd widths, ratio 1", s, drafter(s, {1}), DType::kBf16});
  }
  return all;
}

double relative(const float* got, const test::Row& want) {
  double square = 0.0, worst = 0.0;
  for (size_t i = 0; i < want.size(); ++i) {
    if (!std::isfinite(got[i])) return INFINITY;
    square += want[i] * want[i];
    worst = std::max(worst, std::fabs(got[i] - want[i]));
  }
  return worst / std::sqrt(square / static_cast<double>(want.size()));
}

TEST_CASE("target, drafter and MTP head of other shapes equal the float64 reference", "[nn]") {
  uint32_t seed = 5;
  for (const Shape& shape : shapes()) {
    CAPTURE(shape.name);
    const auto random_pair = test::make_random_pair(shape.target, &shape.drafter, shape.dtype, ++seed);
    const test::Reference reference(random_pair->pair);
    ExecutorOptions options;
    options.pages = 12;
    options.page_size = 16;
    options.slots = 2;
    options.max_rows = 60;
    options.real_vocab = 73;
    auto made = nn::PairExecutor::create(std::make_unique<ops::cpu::CpuBackend>(ops::cpu::CpuOptions{.threads = 2}), random_pair->pair,
                                         options, nn::Probe{.captures = {}, .all_mtp_rows = true});
    INFO(made.status().message());
    REQUIRE(made.ok());
    nn::PairExecutor& executor = **made;
    const bool has_mtp = shape.target.mtp_layers > 0;
    REQUIRE(executor.has_mtp() == has_mtp);

    std::mt19937 random(seed);
    std::vector<int32_t> tokens(71), pages{7, 2, 9, 0, 11, 4};
    for (int32_t& t : tokens) t = static_cast<int32_t>(random() % 73);
    const test::Reference::Run want = reference.target(tokens);
    const test::Rows want_mtp = has_mtp ? reference.mtp(tokens, {want.hidden.begin(), want.hidden.end() - 1}) : test::Rows{};
    executor.reset_slot(1);
    int32_t at = 0;
    while (at < 70) {
      // Alternately a certain chunk and a tree with one right path, kept to its end.
      const bool certain = random() % 2 == 0;
      const int32_t depth = std::min<int32_t>(1 + static_cast<int32_t>(random() % 12), 70 - at), rows = certain ? depth : depth + 15;
      Forest forest;
      forest.segments.push_back({0, rows, certain, 1, pages, at});
      Accepted accepted;
      for (int32_t i = 0; i < rows; ++i) {
        const auto on = static_cast<int32_t>(accepted.rows.size());
        const bool right = on < depth && (i == 0 || certain || rows - i <= depth - on || random() % 2 == 0);
        const int32_t parent = right ? (on == 0 ? -1 : accepted.rows.back()) : static_cast<int32_t>(random() % i);
        forest.token.push_back(right ? tokens[at + on] : static_cast<int32_t>(random() % 73));
        forest.parent.push_back(parent);
        forest.position.push_back(parent < 0 ? at : forest.position[parent] + 1);
        forest.wants_logits.push_back(right);
        if (right) {
          accepted.rows.push_back(i);
          accepted.next.push_back(tokens[at + on + 1]);
        }
      }
      accepted.feed_drafter = true;
      accepted.feed_mtp = has_mtp;
      PassOutput out;
      const Status ran = executor.forward(forest, &out);
      INFO(ran.message());
      REQUIRE(ran.ok());
      for (int32_t i = 0; i < depth; ++i) {
        const int32_t row = accepted.rows[i];
        INFO("position " << at + i << (certain ? " certain" : " tentative"));
        CHECK(relative(executor.hidden().f32(row), want.hidden[at + i]) < 1e-4);
        const float* logits = out.logits + static_cast<int64_t>(out.logits_row[row]) * shape.target.vocab_size;
        CHECK(relative(logits, test::Row(want.logits[at + i].begin(), want.logits[at + i].begin() + 73)) < 1e-4);
        CHECK(logits[73] == -INFINITY);
        CHECK(logits[74] == -INFINITY);
        for (size_t t = 0; t < shape.drafter.taps.size(); ++t) {
          CHECK(relative(executor.features().f32(row) + static_cast<int64_t>(t) * shape.target.hidden_size,
                         want.layer[shape.drafter.taps[t]][at + i]) < 1e-4);
        }
      }
      REQUIRE(executor.commit(forest, std::vector{accepted}).ok());
      for (int32_t i = 0; has_mtp && i < depth; ++i) CHECK(relative(executor.mtp_output().f32(i), want_mtp[at + i]) < 1e-4);
      at += depth;

      const DraftQuery query{.slot = 1, .pages = pages, .context = at, .anchor = tokens[at]};
      DraftOutput draft;
      const Status drafted = executor.draft(std::vector{query}, 3, &draft);
      INFO(drafted.message());
      REQUIRE(drafted.ok());
      const test::Rows block = reference.draft(want, at, tokens[at]);
      const test::Rows scores = reference.head(block);
      for (int32_t r = 0; r < shape.drafter.block_size; ++r) {
        INFO("context " << at << " block row " << r);
        CHECK(relative(executor.drafter_hidden().f32(r), block[r]) < 1e-4);
        if (r == 0) continue;
        double sum = 0.0;
        for (int i = 0; i < 73; ++i) sum += std::exp(scores[r][i]);
        for (int k = 0; k < 3; ++k) {
          const int32_t id = draft.token[(r - 1) * 3 + k];
          REQUIRE(id < 73);
          CHECK(std::fabs(draft.log_prob[(r - 1) * 3 + k] - (scores[r][id] - std::log(sum))) < 1e-3);
        }
      }
      if (has_mtp) {
        // Three recursive steps by the reference: each appends its own output as the next hidden state.
        std::vector<int32_t> seen(tokens.begin(), tokens.begin() + at + 1);
        test::Rows hidden(want.hidden.begin(), want.hidden.begin() + at);
        REQUIRE(executor.draft_nextn(std::vector{query}, 3, &draft).ok());
        for (int step = 0; step < 3; ++step) {
          const test::Row m = reference.mtp(seen, hidden).back();
          const test::Row logits = reference.head({m})[0];
          const auto best = static_cast<int32_t>(std::max_element(logits.begin(), logits.begin() + 73) - logits.begin());
          CHECK(logits[best] - logits[draft.token[step]] < 1e-3);  // the same, or a tie
          seen.push_back(draft.token[step]);
          hidden.push_back(m);
        }
      }
    }
  }
}

}  // namespace
}  // namespace ddtree
