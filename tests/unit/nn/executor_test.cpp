// What Executor promises its caller: refusals by name, what a commit leaves and what nothing leaves, bits that no batch changes.
#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <cstring>
#include <functional>
#include <limits>
#include <numeric>
#include <random>

#include "nn/cpu_executor.h"
#include "unit/nn/random_pair.h"

namespace ddtree {
namespace {

constexpr int32_t kVocab = 75;

ModelSpec small_spec() {
  ModelSpec s;
  s.vocab_size = kVocab;
  s.hidden_size = 48;
  s.intermediate_size = 64;
  s.layers = {LayerKind::kGatedDelta, LayerKind::kFullAttention, LayerKind::kGatedDelta};
  s.heads = 4;
  s.kv_heads = 2;
  s.head_dim = 16;
  s.rotary_dim = 8;
  s.key_heads = 1;
  s.value_heads = 2;
  s.key_dim = 16;
  s.value_dim = 16;
  s.mtp_layers = 1;
  s.tied_head = true;
  s.max_positions = 200;
  return s;
}
DrafterSpec small_drafter() {
  DrafterSpec d;
  d.hidden_size = 48;
  d.intermediate_size = 32;
  d.heads = 2;
  d.kv_heads = 1;
  d.head_dim = 16;
  d.layers = {{.sliding = true, .causal = true}, {.sliding = false, .causal = false}};
  d.window = 16;
  d.block_size = 8;
  d.mask_id = 74;
  d.taps = {0, 2};
  d.num_target_layers = 3;
  d.vocab_size = kVocab;
  return d;
}
ExecutorOptions small_options() {
  ExecutorOptions o;
  o.page_size = 16;
  o.pages = 40;
  o.slots = 4;
  o.max_rows = 64;
  o.real_vocab = 72;
  o.threads = 2;
  return o;
}

struct Fixture {
  explicit Fixture(ExecutorOptions options = small_options(), bool with_drafter = true, bool with_mtp = true) {
    ModelSpec spec = small_spec();
    spec.mtp_layers = with_mtp ? 1 : 0;
    const DrafterSpec drafter = small_drafter();
    pair = test::make_random_pair(spec, with_drafter ? &drafter : nullptr, DType::kBf16, 9);
    auto made = make_cpu_executor(pair->pair, options);
    INFO(made.status().message());
    REQUIRE(made.ok());
    executor = std::move(*made);
  }
  std::unique_ptr<test::RandomPair> pair;
  std::unique_ptr<Executor> executor;
};

struct Sequence {
  int32_t slot = 0;
  std::vector<int32_t> pages, tokens;
  int32_t context = 0;
};

Sequence sequence(int32_t slot, std::vector<int32_t> pages, uint32_t seed, int32_t length = 60) {
  Sequence s{slot, std::move(pages), std::vector<int32_t>(length), 0};
  std::mt19937 random(seed);
  for (int32_t& t : s.tokens) t = static_cast<int32_t>(random() % 72);
  return s;
}

void add_rows(Forest* f, const Sequence& s, int32_t rows, bool certain) {
  const auto first = static_cast<int32_t>(f->token.size());
  f->segments.push_back({first, rows, certain, s.slot, s.pages, s.context});
  for (int32_t i = 0; i < rows; ++i) {
    f->token.push_back(s.tokens[s.context + i]);
    f->position.push_back(s.context + i);
    f->parent.push_back(i == 0 ? -1 : first + i - 1);
    f->wants_logits.push_back(1);
  }
}
Forest chain(const Sequence& s, int32_t rows, bool certain) {
  Forest f;
  add_rows(&f, s, rows, certain);
  return f;
}
Accepted all_rows(const Forest& f, int32_t segment, const Sequence& s, bool feed) {
  Accepted a;
  a.segment = segment;
  for (int32_t i = 0; i < f.segments[segment].row_count; ++i) {
    a.rows.push_back(f.segments[segment].first_row + i);
    a.next.push_back(s.tokens[s.context + i + 1]);
  }
  a.feed_drafter = a.feed_mtp = feed;
  return a;
}
// Runs and commits `rows` rows; returns their logits.
std::vector<float> advance(Executor* e, Sequence* s, int32_t rows, bool certain, bool feed = true) {
  const Forest f = chain(*s, rows, certain);
  PassOutput out;
  Status status = e->forward(f, &out);
  INFO(status.message());
  REQUIRE(status.ok());
  std::vector<float> logits(out.logits, out.logits + static_cast<int64_t>(rows) * kVocab);
  status = e->commit(f, std::vector{all_rows(f, 0, *s, feed)});
  INFO(status.message());
  REQUIRE(status.ok());
  s->context += rows;
  return logits;
}

TEST_CASE("executor: tentative rows stand before the bound that they are kept for, certain ones anywhere", "[nn]") {
  ExecutorOptions options = small_options();
  options.max_tentative_rows = 10;
  Fixture bounded(options), free;
  CHECK(bounded.executor->options().max_tentative_rows == 10);
  CHECK(free.executor->options().max_tentative_rows == 64);
  Sequence a = sequence(0, {1, 2, 3}, 1), b = sequence(1, {4, 5, 6}, 2);
  for (Executor* e : {bounded.executor.get(), free.executor.get()}) e->reset_slot(0), e->reset_slot(1);
  const auto run = [&](Executor& e, bool tentative_first, PassOutput* out) {
    Forest f;
    if (tentative_first) add_rows(&f, a, 7, false), add_rows(&f, b, 25, true);
    else add_rows(&f, b, 25, true), add_rows(&f, a, 7, false);
    Status status = e.forward(f, out);
    if (status.ok()) status = e.commit(f, std::vector{all_rows(f, tentative_first ? 0 : 1, a, true)});
    return status;
  };
  PassOutput out, other;
  const Status refused = run(*bounded.executor, false, &out);
  CHECK(refused.code() == Code::kInvalidArgument);
  CHECK_THAT(refused.message(), Catch::Matchers::ContainsSubstring("segment 1: tentative rows 25 to 31, only the first 10 of a forest"));
  REQUIRE(run(*bounded.executor, true, &out).ok());
  REQUIRE(run(*free.executor, false, &other).ok());
  a.context += 7;
  // What was kept is the same, wherever the rows stood.
  CHECK(advance(bounded.executor.get(), &a, 5, true) == advance(free.executor.get(), &(b = a), 5, true));
}

TEST_CASE("executor: a broken forest is refused by name and leaves everything as it was", "[nn]") {
  Fixture fx;
  Executor& e = *fx.executor;
  Sequence s = sequence(1, {3, 4, 5, 6}, 1);
  e.reset_slot(1);
  advance(&e, &s, 20, true);
  const auto refused = [&](const std::function<void(Forest*)>& break_it, const std::string& word) {
    Forest f = chain(s, 6, false);
    break_it(&f);
    PassOutput out;
    const Status status = e.forward(f, &out);
    INFO(status.message() << " should say: " << word);
    CHECK(status.code() == Code::kInvalidArgument);
    CHECK(status.message().find(word) != std::string::npos);
    CHECK(e.commit(f, {}).code() == Code::kEngineFault);  // nothing ran
  };
  const std::vector<int32_t> short_table{3}, wild_table{3, 40}, negative{3, -1};
  refused([](Forest* f) { *f = {}; }, "forest of 0 rows");
  refused([](Forest* f) { f->token.resize(65); }, "max_rows");
  refused([](Forest* f) { f->position.pop_back(); }, "position has 5 entries for 6 rows");
  refused([](Forest* f) { f->parent.push_back(0); }, "parent has 7");
  refused([](Forest* f) { f->wants_logits.clear(); }, "wants_logits has 0");
  refused([](Forest* f) { f->segments[0].first_row = 1; }, "segment 0");
  refused([](Forest* f) { f->segments[0].row_count = 7; }, "segment 0");
  refused([](Forest* f) { f->segments[0].row_count = 5; }, "cover 5 of 6");
  refused([](Forest* f) { f->segments.clear(); }, "cover 0 of 6");
  refused([](Forest* f) { f->segments[0].slot = 4; }, "slot 4 of 4");
  refused([](Forest* f) { f->segments[0].slot = -1; }, "slot -1");
  refused([](Forest* f) { f->segments[0].context = -1; }, "context is -1");
  refused([](Forest* f) { f->parent[3] = 3; }, "row 3: parent is 3");
  refused([](Forest* f) { f->parent[3] = 4; }, "row 3: parent is 4");
  refused([](Forest* f) { f->parent[0] = -2; }, "row 0: parent is -2");
  refused([](Forest* f) { f->position[2] = 21; }, "row 2: position is 21");
  refused([](Forest* f) { f->segments[0].context = 19; }, "row 0: position is 20");
  refused([](Forest* f) { f->token[5] = kVocab; }, "row 5: token 75");
  refused([](Forest* f) { f->token[0] = -1; }, "row 0: token -1");
  refused(
      [](Forest* f) {
        f->segments[0].certain = true;
        f->parent[4] = 2;
        f->position[4] = 23;
      },
      "row 4: parent is 2 in a certain segment");
  refused([&](Forest* f) { f->segments[0].pages = short_table; }, "cover 16 positions, 26 are needed");
  refused([&](Forest* f) { f->segments[0].pages = wild_table; }, "page 1 of its table is 40");
  refused([&](Forest* f) { f->segments[0].pages = negative; }, "page 1 of its table is -1");
  refused(
      [&](Forest* f) {
        Sequence twin = s;
        twin.context = 20;
        add_rows(f, twin, 1, false);
      },
      "slot 1 is another segment's too");
  {
    Sequence far = sequence(1, std::vector<int32_t>(20, 7), 1, 300);
    far.context = 198;
    PassOutput out;
    const Status status = e.forward(chain(far, 3, false), &out);
    CHECK(status.code() == Code::kInvalidArgument);
    CHECK(status.message().find("past the last one, 199") != std::string::npos);
  }
  // The sequence goes on as one that saw none of this.
  Fixture other;
  Sequence t = sequence(1, {3, 4, 5, 6}, 1);
  other.executor->reset_slot(1);
  advance(other.executor.get(), &t, 20, true);
  CHECK(advance(&e, &s, 10, true) == advance(other.executor.get(), &t, 10, true));
}

TEST_CASE("executor: a commit that does not fit its pass is refused by name", "[nn]") {
  Fixture fx;
  Executor& e = *fx.executor;
  Sequence s = sequence(0, {0, 1, 2}, 2), u = sequence(2, {5, 6, 7}, 3);
  e.reset_slot(0);
  e.reset_slot(2);
  const auto refused = [&](const std::function<void(Accepted*)>& break_it, const std::string& word, bool certain = false) {
    Forest f;
    add_rows(&f, s, 5, certain);
    add_rows(&f, u, 3, false);
    PassOutput out;
    REQUIRE(e.forward(f, &out).ok());
    Accepted a = all_rows(f, 0, s, true);
    break_it(&a);
    const Status status = e.commit(f, std::vector{a});
    INFO(status.message() << " should say: " << word);
    CHECK(status.code() == Code::kInvalidArgument);
    CHECK(status.message().find(word) != std::string::npos);
  };
  refused([](Accepted* a) { a->segment = 2; }, "segment 2 of 2");
  refused([](Accepted* a) { a->segment = -1; }, "segment -1");
  refused([](Accepted* a) { a->rows.clear(); }, "no rows");
  refused([](Accepted* a) { a->rows.back() = 6; }, "row 6 is not of segment 0");
  refused([](Accepted* a) { a->rows.erase(a->rows.begin() + 2), a->next.pop_back(); }, "row 3 follows 1, but its parent is 2");
  refused([](Accepted* a) { a->rows.erase(a->rows.begin()), a->next.pop_back(); }, "row 1 follows -1");
  refused([](Accepted* a) { a->next.pop_back(); }, "next has 4 tokens for 5 rows");
  refused([](Accepted* a) { a->next[1] = 75; }, "next token 75");
  refused([](Accepted* a) { a->rows.pop_back(), a->next.pop_back(); }, "4 rows of certain segment 0, all 5", true);
  Forest f = chain(u, 3, false);
  PassOutput out;
  REQUIRE(e.forward(f, &out).ok());
  CHECK(e.commit(f, std::vector{all_rows(f, 0, u, false), all_rows(f, 0, u, false)}).message().find("named twice") != std::string::npos);
  REQUIRE(e.forward(f, &out).ok());
  CHECK(e.commit(chain(u, 2, false), {}).message().find("2 rows") != std::string::npos);
  REQUIRE(e.forward(f, &out).ok());
  REQUIRE(e.commit(f, {}).ok());
  CHECK(e.commit(f, {}).code() == Code::kEngineFault);
  // Feeding what is not loaded.
  Fixture bare(small_options(), false, false);
  REQUIRE(bare.executor->forward(f, &out).ok());
  Accepted a = all_rows(f, 0, u, false);
  a.feed_drafter = true;
  CHECK(bare.executor->commit(f, std::vector{a}).message().find("no drafter") != std::string::npos);
  REQUIRE(bare.executor->forward(f, &out).ok());
  a.feed_drafter = false;
  a.feed_mtp = true;
  CHECK(bare.executor->commit(f, std::vector{a}).message().find("no MTP head") != std::string::npos);
  DraftOutput draft;
  CHECK(bare.executor->draft({}, 1, &draft).code() == Code::kInvalidArgument);
  CHECK(bare.executor->draft_nextn({}, 1, &draft).code() == Code::kInvalidArgument);
  CHECK(bare.executor->drafter() == nullptr);
  CHECK_FALSE(bare.executor->has_mtp());
}

TEST_CASE("executor: options that cannot work are refused by name", "[nn]") {
  const DrafterSpec drafter = small_drafter();
  const auto pair = test::make_random_pair(small_spec(), &drafter, DType::kBf16, 9);
  const auto refused = [&](const std::function<void(ExecutorOptions*)>& break_it, const std::string& word) {
    ExecutorOptions o = small_options();
    break_it(&o);
    const auto made = make_cpu_executor(pair->pair, o);
    REQUIRE(!made.ok());
    INFO(made.status().message() << " should say: " << word);
    CHECK(made.status().code() == Code::kInvalidArgument);
    CHECK(made.status().message().find(word) != std::string::npos);
  };
  refused([](ExecutorOptions* o) { o->pages = 0; }, "pages is 0");
  refused([](ExecutorOptions* o) { o->slots = 0; }, "slots is 0");
  refused([](ExecutorOptions* o) { o->max_rows = -1; }, "max_rows is -1");
  refused([](ExecutorOptions* o) { o->page_size = 17; }, "page_size is 17");
  refused([](ExecutorOptions* o) { o->real_vocab = 76; }, "real_vocab is 76");
  refused([](ExecutorOptions* o) { o->max_logit_rows = 65; }, "max_logit_rows is 65");
  refused([](ExecutorOptions* o) { o->max_tentative_rows = 65; }, "max_tentative_rows is 65");
  refused([](ExecutorOptions* o) { o->max_tentative_rows = -1; }, "max_tentative_rows is -1");
  refused([](ExecutorOptions* o) { o->pages = 1 << 30; }, "tokens");
  ModelSpec odd = small_spec();
  odd.head_dim = 24;
  const auto bad = test::make_random_pair(odd, nullptr, DType::kBf16, 9);
  const auto made = make_cpu_executor(bad->pair, small_options());
  REQUIRE(!made.ok());
  CHECK(made.status().code() == Code::kBadModel);
  CHECK(made.status().message().find("24") != std::string::npos);
}

TEST_CASE("executor: logits only where wanted, padding -inf", "[nn]") {
  ExecutorOptions options = small_options();
  options.max_logit_rows = 3;
  Fixture fx(options), full;
  Sequence s = sequence(0, {0, 1, 2}, 4);
  Forest f = chain(s, 10, false);
  PassOutput all, some;
  full.executor->reset_slot(0);
  REQUIRE(full.executor->forward(f, &all).ok());
  const Status too_many = fx.executor->forward(f, &some);
  CHECK(too_many.message().find("10 rows want logits, at most 3") != std::string::npos);
  std::fill(f.wants_logits.begin(), f.wants_logits.end(), uint8_t{0});
  f.wants_logits[2] = f.wants_logits[7] = 1;
  REQUIRE(fx.executor->forward(f, &some).ok());
  for (int32_t r = 0; r < 10; ++r) {
    REQUIRE(some.logits_row[r] == (r == 2 ? 0 : r == 7 ? 1 : -1));
    const float* row = all.logits + all.logits_row[r] * kVocab;
    for (int i = 0; i < kVocab; ++i) CHECK((i >= 72) == (row[i] == -INFINITY));
    if (some.logits_row[r] >= 0) CHECK(std::memcmp(row, some.logits + some.logits_row[r] * kVocab, sizeof(float) * kVocab) == 0);
  }
  std::fill(f.wants_logits.begin(), f.wants_logits.end(), uint8_t{0});
  REQUIRE(fx.executor->forward(f, &some).ok());
  CHECK(some.logits == nullptr);
  CHECK(std::all_of(some.logits_row.begin(), some.logits_row.end(), [](int32_t r) { return r == -1; }));
}

TEST_CASE("executor: a sequence's bits do not depend on its company", "[nn]") {
  Fixture alone, together;
  std::mt19937 random(5);
  Sequence a = sequence(0, {0, 1, 2, 3}, 6);
  std::vector<Sequence> all{sequence(2, {9, 8, 7, 6}, 6), sequence(0, {0, 1, 2, 3}, 7), sequence(3, {20, 21, 22, 23}, 8)};
  for (int slot = 0; slot < 4; ++slot) {
    alone.executor->reset_slot(slot);
    together.executor->reset_slot(slot);
  }
  while (a.context < 50) {
    const bool certain = random() % 2 == 0;
    const auto rows = static_cast<int32_t>(1 + random() % 6);
    const std::vector<float> want = advance(alone.executor.get(), &a, rows, certain);
    Forest f;
    std::vector<int32_t> counts;
    const size_t mine = random() % 3;  // where among the segments
    std::vector<size_t> order{1, 2};
    order.insert(order.begin() + static_cast<int64_t>(mine), 0);
    for (const size_t i : order) {
      const int32_t n = i == 0 ? rows : std::min<int32_t>(1 + static_cast<int32_t>(random() % 9), 59 - all[i].context);
      counts.push_back(n);
      if (n > 0) add_rows(&f, all[i], n, i == 0 ? certain : random() % 2 == 0);
    }
    PassOutput out;
    REQUIRE(together.executor->forward(f, &out).ok());
    std::vector<Accepted> accepted;
    int32_t segment = 0;
    for (size_t n = 0; n < order.size(); ++n) {
      if (counts[n] == 0) continue;
      Sequence& s = all[order[n]];
      if (order[n] == 0) {
        const int32_t first = f.segments[segment].first_row;
        CHECK(std::memcmp(out.logits + first * kVocab, want.data(), sizeof(float) * want.size()) == 0);
      }
      accepted.push_back(all_rows(f, segment++, s, true));
    }
    REQUIRE(together.executor->commit(f, accepted).ok());
    for (size_t n = 0; n < order.size(); ++n) all[order[n]].context += counts[n];
    // Drafts too.
    const DraftQuery one{.slot = 0, .pages = a.pages, .context = a.context, .anchor = a.tokens[a.context]};
    std::vector<DraftQuery> many;
    for (const Sequence& s : all) {
      if (s.context < 59) many.push_back({.slot = s.slot, .pages = s.pages, .context = s.context, .anchor = s.tokens[s.context]});
    }
    DraftOutput x, y;
    REQUIRE(alone.executor->draft(std::vector{one}, 4, &x).ok());
    REQUIRE(together.executor->draft(many, 4, &y).ok());
    CHECK(std::equal(x.token.begin(), x.token.end(), y.token.begin()));
    CHECK(std::equal(x.log_prob.begin(), x.log_prob.end(), y.log_prob.begin()));
    REQUIRE(alone.executor->draft_nextn(std::vector{one}, 4, &x).ok());
    REQUIRE(together.executor->draft_nextn(many, 4, &y).ok());
    CHECK(std::equal(x.token.begin(), x.token.end(), y.token.begin()));
    CHECK(std::equal(x.log_prob.begin(), x.log_prob.end(), y.log_prob.begin()));
  }
}

TEST_CASE("executor: what is not committed leaves no trace, what is committed equals the certain way", "[nn]") {
  Fixture fx, clean;
  Sequence s = sequence(0, {0, 1, 2, 3}, 10), t = s;
  fx.executor->reset_slot(0);
  clean.executor->reset_slot(0);
  std::mt19937 random(6);
  while (s.context < 50) {
    // A tree of wrong tokens is run and dropped, drafts are made: none of it may show.
    Forest f;
    f.segments.push_back({0, 12, false, 0, s.pages, s.context});
    for (int32_t i = 0; i < 12; ++i) {
      const int32_t parent = i == 0 ? -1 : static_cast<int32_t>(random() % i);
      f.token.push_back(static_cast<int32_t>(random() % 72));
      f.parent.push_back(parent);
      f.position.push_back(parent < 0 ? s.context : f.position[parent] + 1);
      f.wants_logits.push_back(1);
    }
    PassOutput out;
    REQUIRE(fx.executor->forward(f, &out).ok());
    REQUIRE(fx.executor->commit(f, {}).ok());
    DraftOutput draft;
    const DraftQuery q{.slot = 0, .pages = s.pages, .context = s.context, .anchor = s.tokens[s.context]};
    REQUIRE(fx.executor->draft(std::vector{q}, 2, &draft).ok());
    if (s.context > 0) REQUIRE(fx.executor->draft_nextn(std::vector{q}, 3, &draft).ok());
    const auto rows = static_cast<int32_t>(1 + random() % 5);
    const bool certain = random() % 2 == 0;
    CHECK(advance(fx.executor.get(), &s, rows, certain) == advance(clean.executor.get(), &t, rows, certain));
    DraftOutput other;
    const DraftQuery p{.slot = 0, .pages = s.pages, .context = s.context, .anchor = s.tokens[s.context]};
    REQUIRE(fx.executor->draft(std::vector{p}, 2, &draft).ok());
    REQUIRE(clean.executor->draft(std::vector{p}, 2, &other).ok());
    CHECK(draft.log_prob == other.log_prob);
    REQUIRE(fx.executor->draft_nextn(std::vector{p}, 3, &draft).ok());
    REQUIRE(clean.executor->draft_nextn(std::vector{p}, 3, &other).ok());
    CHECK(draft.log_prob == other.log_prob);
  }
}

TEST_CASE("executor: one row is the same bits certain and tentative, round after round", "[nn]") {
  Fixture a, b;
  Sequence s = sequence(0, {0, 1, 2, 3}, 11), t = s;
  a.executor->reset_slot(0);
  b.executor->reset_slot(0);
  for (int i = 0; i < 40; ++i) CHECK(advance(a.executor.get(), &s, 1, true) == advance(b.executor.get(), &t, 1, false));
}

TEST_CASE("executor: reset_slot makes a slot new", "[nn]") {
  Fixture fx;
  Sequence s = sequence(3, {0, 1, 2, 3}, 12), t = s;
  fx.executor->reset_slot(3);
  const std::vector<float> first = advance(fx.executor.get(), &s, 30, true);
  DraftOutput draft;
  const DraftQuery stale{.slot = 3, .pages = t.pages, .context = 30, .anchor = 1};
  REQUIRE(fx.executor->draft_nextn(std::vector{stale}, 2, &draft).ok());
  fx.executor->reset_slot(3);
  const Status refused = fx.executor->draft_nextn(std::vector{stale}, 2, &draft);
  CHECK(refused.code() == Code::kInvalidArgument);
  CHECK(refused.message().find("position -1") != std::string::npos);
  CHECK(advance(fx.executor.get(), &t, 30, true) == first);
}

TEST_CASE("executor: drafts that cannot be are refused by name", "[nn]") {
  Fixture fx;
  Executor& e = *fx.executor;
  Sequence s = sequence(1, {4, 5, 6}, 13);
  e.reset_slot(1);
  advance(&e, &s, 20, true, false);  // neither drafter nor MTP head fed
  DraftOutput out;
  const auto refused = [&](const Status& status, const std::string& word) {
    INFO(status.message() << " should say: " << word);
    CHECK(status.code() == Code::kInvalidArgument);
    CHECK(status.message().find(word) != std::string::npos);
  };
  const DraftQuery good{.slot = 1, .pages = s.pages, .context = 20, .anchor = 3};
  refused(e.draft(std::vector{good}, 0, &out), "top_k is 0, 1 to 72");
  refused(e.draft(std::vector{good}, 73, &out), "top_k is 73");
  DraftQuery q = good;
  q.anchor = 75;
  refused(e.draft(std::vector{good, q}, 1, &out), "draft 1: anchor 75");
  q = good;
  q.context = 49;
  refused(e.draft(std::vector{q}, 1, &out), "3 pages of 16 cover 48");
  q.context = 201;
  refused(e.draft(std::vector{q}, 1, &out), "at most 200");
  refused(e.draft_nextn(std::vector{good}, 3, &out), "feed_mtp");
  q = good;
  q.slot = 4;
  refused(e.draft_nextn(std::vector{q}, 3, &out), "slot 4 of 4");
  refused(e.draft_nextn(std::vector{good}, 0, &out), "0 steps");
  refused(e.draft_nextn(std::vector{good}, 65, &out), "65 steps");
  // More queries than one pass holds run one pass after another.
  const std::vector<DraftQuery> many(45, good);
  REQUIRE(e.draft(many, 3, &out).ok());
  CHECK(out.positions == 7);
  REQUIRE(out.token.size() == 45u * 7 * 3);
  for (size_t i = 1; i < 45; ++i)
    CHECK(std::equal(out.token.begin(), out.token.begin() + 21, out.token.begin() + static_cast<int64_t>(i) * 21));
}

// NaN weights: what a broken checkpoint or an overflow looks like from here. One layer late, so that only the rows that reach it are hit.
TEST_CASE("executor: logits that are not finite are an engine fault that names the row", "[nn]") {
  ModelSpec spec = small_spec();
  const DrafterSpec drafter = small_drafter();
  const auto pair = test::make_random_pair(spec, &drafter, DType::kF32, 9);
  // Token 5's embedding is poisoned; the head is tied, so id 5's logit is NaN in every row: mask it by a small vocabulary.
  const TensorView& embed = pair->pair.tensors.embed;
  const float nan = std::numeric_limits<float>::quiet_NaN();
  std::memcpy(const_cast<std::byte*>(embed.data) + 70 * spec.hidden_size * 4, &nan, 4);
  ExecutorOptions options = small_options();
  options.real_vocab = 64;
  auto made = make_cpu_executor(pair->pair, options);
  REQUIRE(made.ok());
  Executor& e = **made;
  Sequence s = sequence(2, {0, 1, 2}, 14), u = sequence(0, {5, 6, 7}, 15);
  for (auto* v : {&s.tokens, &u.tokens}) {
    for (int32_t& t : *v) t %= 64;
  }
  e.reset_slot(0);
  e.reset_slot(2);
  Forest f;
  add_rows(&f, u, 4, false);
  add_rows(&f, s, 5, false);
  PassOutput out;
  REQUIRE(e.forward(f, &out).ok());
  f.token[6] = 70;
  const Status status = e.forward(f, &out);
  INFO(status.message());
  CHECK(status.code() == Code::kEngineFault);
  CHECK(status.message().find("row 6 (segment 1, slot 2, position 2, token 70)") != std::string::npos);
  CHECK(out.faulty_rows == std::vector<int32_t>{6, 7, 8});  // it and what hangs below it
  // The other sequence's rows are untouched by it.
  Forest only = chain(u, 4, false);
  PassOutput again;
  REQUIRE(e.forward(only, &again).ok());
  DraftOutput draft;
  const DraftQuery q{.slot = 2, .pages = s.pages, .context = 0, .anchor = 70};
  CHECK(e.draft(std::vector{q}, 1, &draft).code() == Code::kEngineFault);
}

TEST_CASE("executor: BF16 boundaries and a BF16 residual differ from float32 by rounding only", "[nn]") {
  ExecutorOptions half = small_options();
  half.precision = Precision::kBfloat16Boundaries;
  ExecutorOptions residual = half;
  residual.bfloat16_residual = true;
  Fixture exact, rounded(half), both(residual);
  std::vector<float> logits[3];
  Fixture* fixtures[3] = {&exact, &rounded, &both};
  for (int i = 0; i < 3; ++i) {
    Sequence s = sequence(0, {0, 1, 2, 3}, 16);
    fixtures[i]->executor->reset_slot(0);
    logits[i] = advance(fixtures[i]->executor.get(), &s, 20, true);
    const std::vector<float> more = advance(fixtures[i]->executor.get(), &s, 12, false);
    logits[i].insert(logits[i].end(), more.begin(), more.end());
  }
  const auto distance = [&](int a, int b) {
    double sum = 0.0, n = 0.0;
    for (size_t i = 0; i < logits[a].size(); ++i) {
      if (std::isinf(logits[a][i])) continue;
      sum += std::fabs(logits[a][i] - logits[b][i]);
      n += std::fabs(logits[a][i]);
    }
    return sum / n;
  };
  CHECK(distance(0, 1) > 1e-4);
  CHECK(distance(0, 1) < 0.05);
  CHECK(distance(1, 2) > 1e-4);
  CHECK(distance(0, 2) < 0.08);
}

}  // namespace
}  // namespace ddtree
