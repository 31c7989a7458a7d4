// attention_prepare, attention and kv_commit of the target on a card.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "gpu/forests.h"
#include "gpu/support.h"

namespace ddtree::ops::gpu_test {
namespace {

constexpr double kPrepared = 2e-4;  // norm and rotation: a few 1e-7 before the rounding
// Scores of BF16 values are sums of head_dim products: 1e-6 of their size, up to some tens, so probabilities to 1e-4 at worst; q itself
// may differ by a step in a few places. Probabilities rounded to BF16 on their way into a matrix product (2^-9 each, at random) fit too.
constexpr double kAttended = 4e-3;

struct AttentionShape {
  int32_t heads, kv_heads, dim, rotary;
  bool gate;
};

// The attention layers of a model on every backend.
class Attention {
 public:
  Attention(const Twins& twins, AttentionShape shape, int32_t layers, int32_t pages, int32_t page_size, int32_t rows, int64_t positions,
            Random* random, float sharpness = 1.0f)
      : book(pages, page_size, random), twins_(twins), shape_(shape), layers_(layers), rows_(rows), random_(random) {
    const KvShape kv{.layers = layers, .kv_heads = shape.kv_heads, .head_dim = shape.dim};
    pool_ = twins.make([&](Backend& b) { return b.make_kv_pool(kv, pages, page_size); });
    scratch_ = twins.make([&](Backend& b) { return b.make_kv_scratch(kv, rows); });
    rope_ = twins.make([&](Backend& b) { return b.make_rope(std::max<int64_t>(positions, pages * page_size), shape.rotary, 1e7); });
    q_norm_ = twins.constants(random->normals(shape.dim, sharpness), 1, shape.dim);
    k_norm_ = twins.constants(random->normals(shape.dim), 1, shape.dim);
    buffer_ = twins.activations(rows, width() + 32);  // nn's is as wide as the widest layer
    unread_ = twins.activations(rows, int64_t{shape.heads} * shape.dim);
    if (pages * page_size <= 4096) spoil(pages, page_size);
  }
  int64_t width() const { return int64_t{shape_.heads} * shape_.dim * (shape_.gate ? 2 : 1) + 2 * int64_t{shape_.kv_heads} * shape_.dim; }

  // Certain rows up to a context of `positions`: their K and V only.
  void fill(Sequence* sequence, int32_t positions) {
    while (sequence->context < positions) {
      Plan plan(&book);
      plan.add(Shape::kCertain, std::min(rows_, positions - sequence->context), sequence, random_);
      prepare_all(plan);
    }
  }

  // A pass through every layer, compared.
  void pass(const std::string& what, const Plan& plan) {
    forest_ = plan.stage(twins_);
    const int32_t rows = plan.rows(), heads = shape_.heads;
    std::vector<int32_t> some;  // of the rows, ascending
    for (int32_t r = random_->below(3); r < rows; r += 1 + random_->below(5)) some.push_back(r);
    Each<const int32_t*> picked;
    twins_.each([&](Backend& b, size_t) { picked.push_back(b.stage<int32_t>(Lane::kPass, some)); });
    for (int32_t layer = 0; layer < layers_; ++layer) {
      INFO("layer " << layer);
      const Output q = twins_.output(rows, int64_t{heads} * shape_.dim), o = twins_.output(rows, int64_t{heads} * shape_.dim);
      const Each<Tensor> packed = prepare(forest_, layer, q.view);
      twins_.compare(what + ": q", q, kPrepared);
      const auto attend = [&](const Output& to, bool pick) {
        twins_.each([&](Backend& b, size_t i) {
          b.attention({.forest = &forest_[i],
                       .heads = heads,
                       .q = q.view[i],
                       .packed = packed[i],
                       .gate = shape_.gate,
                       .scratch = scratch_[i],
                       .scratch_layer = layer,
                       .pool = pool_[i],
                       .pool_layer = layer,
                       .row = pick ? picked[i] : nullptr,
                       .count = pick ? static_cast<int32_t>(some.size()) : 0,
                       .o = to.view[i]});
        });
      };
      attend(o, false);
      twins_.compare(what + ": attention", o, kAttended);
      if (some.empty()) continue;
      const Output part = twins_.output(static_cast<int64_t>(some.size()), int64_t{heads} * shape_.dim);
      attend(part, true);
      twins_.compare(what + ": attention of picked rows", part, kAttended);
    }
    plan.advance();
  }

  // A pass from given values through layer 0, on card i: the outputs, and behind them those of the same rows asked for as a list. Only the
  // first `rows` rows count; those that follow in `forest` fill a bucket.
  Floats outputs(const Each<Forest>& forest, size_t i, int32_t rows, const Floats& values) {
    const int64_t width = int64_t{shape_.heads} * shape_.dim;
    const Each<Tensor> q = rows_of(unread_, twins_.count(), 0, forest[0].rows);
    const Each<Tensor> packed = cols_of(rows_of(buffer_, twins_.count(), 0, forest[0].rows), twins_.count(), 0, this->width());
    std::vector<int32_t> all(static_cast<size_t>(rows));
    for (int32_t r = 0; r < rows; ++r) all[static_cast<size_t>(r)] = r;
    Floats both, padded = values;
    padded.resize(static_cast<size_t>(forest[0].rows * this->width()), 1.0f);
    Backend& b = twins_.at(i);
    b.upload(padded, packed[i]);
    b.attention_prepare({.forest = &forest[i],
                         .heads = shape_.heads,
                         .gate = shape_.gate,
                         .packed = packed[i],
                         .q_norm = q_norm_[i],
                         .k_norm = k_norm_[i],
                         .eps = 1e-6f,
                         .rope = rope_[i],
                         .q = q[i],
                         .scratch = scratch_[i],
                         .pool = pool_[i]});
    for (const bool list : {false, true}) {
      const auto o = b.make_tensor(forest[0].rows, width, b.activation());
      REQUIRE(o.ok());
      b.attention({.forest = &forest[i],
                   .heads = shape_.heads,
                   .q = q[i],
                   .packed = packed[i],
                   .gate = shape_.gate,
                   .scratch = scratch_[i],
                   .pool = pool_[i],
                   .row = list ? b.stage<int32_t>(Lane::kPass, all) : nullptr,
                   .count = list ? rows : 0,
                   .o = *o});
      const auto got = b.host_floats(o->row_range(0, rows));
      INFO(b.name() << ": " << got.status().message());
      REQUIRE(got.ok());
      both.insert(both.end(), *got, *got + rows * width);
    }
    return both;
  }

  // Of the last pass: random root paths of its tentative segments.
  void commit(const Plan& plan) {
    const Each<Paths> paths = plan.accept(random_).stage(twins_);
    twins_.each(
        [&](Backend& b, size_t i) { b.kv_commit({.forest = &forest_[i], .paths = paths[i], .scratch = scratch_[i], .pool = pool_[i]}); });
  }

  PageBook book;

 private:
  void prepare_all(const Plan& plan) {
    const Each<Forest> forest = plan.stage(twins_);
    for (int32_t layer = 0; layer < layers_; ++layer) prepare(forest, layer, rows_of(unread_, twins_.count(), 0, plan.rows()));
    plan.advance();
  }
  // From fresh values; gives the packed projection.
  Each<Tensor> prepare(const Each<Forest>& forest, int32_t layer, const Each<Tensor>& q) {
    const int64_t rows = forest[0].rows;
    const Each<Tensor> packed = cols_of(rows_of(buffer_, twins_.count(), 0, rows), twins_.count(), 0, width());
    twins_.upload(random_->activations(rows * width(), scale_), packed);
    twins_.each([&](Backend& b, size_t i) {
      b.attention_prepare({.forest = &forest[i],
                           .heads = shape_.heads,
                           .gate = shape_.gate,
                           .packed = packed[i],
                           .q_norm = q_norm_[i],
                           .k_norm = k_norm_[i],
                           .eps = 1e-6f,
                           .rope = rope_[i],
                           .q = q[i],
                           .scratch = scratch_[i],
                           .scratch_layer = layer,
                           .pool = pool_[i],
                           .pool_layer = layer});
    });
    return packed;
  }
  // Large values in every place of the pool, as other sequences leave them: a place read astray shows.
  void spoil(int32_t pages, int32_t page_size) {
    PageBook all(pages, page_size, random_);
    std::swap(scale_, spoilt_);
    Sequence whole;
    while (whole.context < pages * page_size) {
      Plan plan(&all);
      plan.add(Shape::kCertain, std::min(rows_, pages * page_size - whole.context), &whole, random_);
      prepare_all(plan);
    }
    std::swap(scale_, spoilt_);
  }

  const Twins& twins_;
  const AttentionShape shape_;
  const int32_t layers_, rows_;
  Random* random_;
  float scale_ = 1.0f, spoilt_ = 500.0f;
  Each<KvPool*> pool_;
  Each<KvScratch*> scratch_;
  Each<const RopeTable*> rope_;
  Each<Tensor> q_norm_, k_norm_, buffer_, unread_;
  Each<Forest> forest_;
};

std::vector<Sequence> sequences(Attention* attention, const std::vector<int32_t>& contexts) {
  std::vector<Sequence> made(contexts.size());
  for (size_t i = 0; i < contexts.size(); ++i) attention->fill(&made[i], contexts[i]);
  return made;
}

TEST_CASE("gpu: attention of Qwen3.6-27B, trees and certain rows over contexts of 0 to 4000, then again after the commit") {
  INFO(seed_text());
  Random random(seed());
  const Twins twins(600, 4800);
  Attention attention(twins, {24, 4, 256, 64, true}, 2, 300, 32, 600, 4800, &random);
  std::vector<Sequence> s = sequences(&attention, {0, 1, 31, 32, 100, 1000, 4000});
  {
    Plan plan(&attention.book);
    plan.add(Shape::kBestFirst, 64, &s[6], &random).add(Shape::kCertain, 33, &s[4], &random).add(Shape::kChain, 16, &s[5], &random);
    plan.add(Shape::kStar, 16, &s[3], &random).add(Shape::kCertain, 1, &s[2], &random).add(Shape::kRandom, 65, &s[1], &random);
    plan.add(Shape::kCertain, 7, &s[0], &random);
    attention.pass("first", plan);
    attention.commit(plan);
  }
  {
    Plan plan(&attention.book);
    plan.add(Shape::kCertain, 64, &s[0], &random).add(Shape::kBestFirst, 17, &s[1], &random).add(Shape::kStar, 2, &s[2], &random);
    plan.add(Shape::kChain, 1, &s[3], &random).add(Shape::kRandom, 33, &s[4], &random).add(Shape::kCertain, 200, &s[5], &random);
    plan.add(Shape::kBestFirst, 65, &s[6], &random);
    attention.pass("second", plan);
    attention.commit(plan);
  }
  for (size_t i = 4; i < s.size(); ++i) {  // one sequence at a time, which cuts its context into parts
    Plan plan(&attention.book);
    plan.add(i == 5 ? Shape::kChain : Shape::kBestFirst, i == 6 ? 16 : 1, &s[i], &random);
    attention.pass("alone", plan);
    attention.commit(plan);
  }
  for (size_t i = 0; i < s.size(); ++i) {
    Plan plan(&attention.book);
    plan.add(Shape::kCertain, 1, &s[i], &random);
    attention.pass("one row", plan);
  }
}

TEST_CASE("gpu: attention, every ratio of heads, head size, page size and kind of tree") {
  INFO(seed_text());
  Random random(seed());
  const std::vector<AttentionShape> shapes{{4, 2, 256, 64, true},  {4, 2, 128, 128, false}, {16, 4, 128, 32, true},
                                           {12, 2, 256, 64, true}, {8, 1, 128, 128, false}, {3, 3, 64, 64, false},
                                           {12, 1, 64, 16, true},  {32, 2, 32, 8, false},   {8, 4, 64, 32, true}};
  int32_t turn = 0;
  for (const AttentionShape& shape : shapes) {
    const int32_t page_size = std::vector<int32_t>{32, 16, 64, 48}[static_cast<size_t>(turn % 4)];
    INFO("heads " << shape.heads << "/" << shape.kv_heads << " of " << shape.dim << ", page size " << page_size);
    const Twins twins(600, 2048);
    Attention attention(twins, shape, 2, 4096 / page_size, page_size, 600, 2048, &random);
    std::vector<Sequence> s = sequences(&attention, {0, 1, 31, 32, 100, page_size, 1000});
    for (int round = 0; round < 3; ++round) {
      Plan plan(&attention.book);
      for (Sequence& one : s) {
        const int32_t kind = (turn++ + round) % 5, rows = std::vector<int32_t>{1, 2, 7, 16, 33, 64, 65}[random.below(7)];
        plan.add(kind == 4 ? Shape::kCertain : kTrees[kind], rows, &one, &random);
      }
      attention.pass("round", plan);
      attention.commit(plan);
    }
  }
}

TEST_CASE("gpu: attention, segments of 1 to 512 rows of every kind") {
  INFO(seed_text());
  Random random(seed());
  const Twins twins(600, 2048);
  Attention attention(twins, {4, 2, 256, 64, true}, 1, 1200, 32, 600, 2048, &random);
  for (const int32_t rows : {1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 128, 200, 256, 257, 512}) {
    for (const Shape shape : {Shape::kCertain, Shape::kChain, Shape::kStar, Shape::kRandom, Shape::kBestFirst}) {
      INFO(rows << " rows, " << name_of(shape));
      Sequence s;
      attention.fill(&s, random.below(200));
      Plan plan(&attention.book);
      plan.add(shape, rows, &s, &random);
      attention.pass("pass", plan);
    }
  }
}

TEST_CASE("gpu: attention, a prompt in pieces of any size, then a tree over all of it") {
  INFO(seed_text());
  Random random(seed());
  const Twins twins(600, 2048);
  Attention attention(twins, {4, 2, 256, 64, true}, 2, 128, 32, 600, 2048, &random);
  for (const std::vector<int32_t>& pieces : std::vector<std::vector<int32_t>>{{300}, {1, 299}, {64, 64, 64, 64, 44}, {33, 1, 1, 200, 65}}) {
    Sequence s;
    for (const int32_t rows : pieces) {
      INFO("piece of " << rows << " after " << s.context);
      Plan plan(&attention.book);
      plan.add(Shape::kCertain, rows, &s, &random);
      attention.pass("piece", plan);
    }
    Plan plan(&attention.book);
    plan.add(Shape::kBestFirst, 40, &s, &random);
    attention.pass("tree", plan);
  }
}

TEST_CASE("gpu: attention with sharp scores keeps its digits") {
  INFO(seed_text());
  Random random(seed());
  const Twins twins(600, 2048);
  Attention attention(twins, {8, 2, 128, 128, false}, 1, 64, 32, 600, 2048, &random, 6.0f);
  std::vector<Sequence> s = sequences(&attention, {0, 100, 1000});
  Plan plan(&attention.book);
  plan.add(Shape::kCertain, 65, &s[0], &random).add(Shape::kBestFirst, 64, &s[1], &random).add(Shape::kRandom, 33, &s[2], &random);
  attention.pass("sharp", plan);
}

TEST_CASE("gpu: attention, a segment's rows have the same bits alone, in company, and in a captured graph's bucket") {
  INFO(seed_text());
  Random random(seed());
  // The first and second have so many parts that a pass of all segments has no room for their results side by side.
  for (const AttentionShape& shape :
       {AttentionShape{24, 4, 256, 64, true}, {32, 8, 128, 128, false}, {4, 2, 256, 64, true}, {8, 1, 64, 64, false}}) {
    INFO("heads " << shape.heads << "/" << shape.kv_heads << " of " << shape.dim);
    const Twins twins(1100, 10880);
    Attention attention(twins, shape, 1, 340, 32, 1100, 10880, &random);
    struct Segment {
      Shape shape;
      int32_t context, rows;
    };
    const std::vector<Segment> segments{{Shape::kBestFirst, 1000, 16}, {Shape::kCertain, 700, 130}, {Shape::kRandom, 2200, 64},
                                        {Shape::kChain, 2200, 1},      {Shape::kCertain, 0, 70},    {Shape::kCertain, 1500, 1},
                                        {Shape::kStar, 2000, 5},       {Shape::kCertain, 100, 300}, {Shape::kChain, 1900, 20},
                                        {Shape::kBestFirst, 2100, 65}, {Shape::kRandom, 640, 2},    {Shape::kCertain, 4000, 310}};
    std::vector<int32_t> contexts{2200};
    for (const Segment& one : segments) contexts.push_back(one.shape == Shape::kCertain ? one.context : 0);
    const std::vector<Sequence> filled = sequences(&attention, contexts);
    std::vector<Sequence> s;
    for (size_t k = 0; k < segments.size(); ++k) {  // trees write no pages: they may all stand on one sequence, each at its own length
      s.push_back(filled[segments[k].shape == Shape::kCertain ? k + 1 : 0]);
      s.back().context = segments[k].context;
    }
    std::vector<uint64_t> tree;
    std::vector<Floats> values;
    for (const Segment& one : segments) {
      tree.push_back(random.bits());
      values.push_back(random.activations(one.rows * attention.width()));
    }
    const auto plan_of = [&](const std::vector<size_t>& which, Floats* all) {
      Plan plan(&attention.book);
      for (const size_t k : which) {
        Random same(tree[k]);
        plan.add(segments[k].shape, segments[k].rows, &s[k], &same);
        all->insert(all->end(), values[k].begin(), values[k].end());
      }
      return plan;
    };
    const int64_t width = int64_t{shape.heads} * shape.dim;
    std::vector<std::vector<Floats>> alone(segments.size(), std::vector<Floats>(twins.count()));  // [segment][card]
    for (size_t k = 0; k < segments.size(); ++k) {
      Floats all;
      const Plan plan = plan_of({k}, &all);
      for (size_t i = 1; i < twins.count(); ++i) alone[k][i] = attention.outputs(plan.stage(twins), i, plan.rows(), all);
    }
    const std::vector<std::vector<size_t>> companies{
        {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11}, {3, 0, 5}, {10, 9, 8, 6}, {2, 4}, {5}, {8}, {11}, {0, 11}};
    for (const std::vector<size_t>& company : companies) {
      for (const bool padded : {false, true}) {
        Floats all;
        const Plan plan = plan_of(company, &all);
        const int32_t rows = plan.rows(), bucket = rows <= 500 ? rows + 1 + random.below(12) : 1024;
        for (size_t i = 1; i < twins.count(); ++i) {
          if (padded && bucket > 512) continue;
          const auto forest =
              padded ? plan.stage_padded(twins, bucket, static_cast<int32_t>(company.size()) + random.below(40), 6399) : plan.stage(twins);
          const Floats got = attention.outputs(forest, i, rows, all);
          int64_t at = 0;
          for (const size_t k : company) {
            INFO(twins.at(i).name() << ", segment " << k << " in a pass of " << company.size() << " segments, padded " << padded);
            const auto count = static_cast<size_t>(segments[k].rows * width);
            const Floats& want = alone[k][i];
            REQUIRE(want.size() == 2 * count);
            CHECK(std::memcmp(got.data() + at, want.data(), count * sizeof(float)) == 0);
            CHECK(std::memcmp(got.data() + rows * width + at, want.data() + count, count * sizeof(float)) == 0);
            at += static_cast<int64_t>(count);
          }
        }
      }
    }
  }
}

// Prompts that fill the card have their keys cut for the sake of its last wave of blocks, from 4,096 keys on.
TEST_CASE("gpu: attention, prompts of 250 to 1,100 rows around 4,096 keys, alone and beside trees") {
  INFO(seed_text());
  Random random(seed());
  const Twins twins(1200, 9000);
  Attention attention(twins, {24, 4, 256, 64, true}, 1, 560, 32, 1200, 9000, &random);
  std::vector<Sequence> s = sequences(&attention, {3000, 700, 5200, 0});
  const auto prompt = [&](size_t of, int32_t rows) {
    INFO(rows << " rows after " << s[of].context);
    Plan plan(&attention.book);
    plan.add(Shape::kCertain, rows, &s[of], &random);
    attention.pass("prompt", plan);
  };
  prompt(0, 600), prompt(0, 512), prompt(0, 1024), prompt(2, 250), prompt(2, 512);
  for (const int32_t rows : {300, 700}) {
    INFO("two prompts, one of " << rows << " rows, and two trees");
    Plan plan(&attention.book);
    plan.add(Shape::kBestFirst, 20, &s[1], &random).add(Shape::kCertain, rows, &s[0], &random);
    plan.add(Shape::kCertain, 300, &s[2], &random).add(Shape::kRandom, 9, &s[3], &random);
    attention.pass("pass", plan);
  }
  prompt(0, 1100);
}

TEST_CASE("gpu: attention over a context of 32,000") {
  INFO(seed_text());
  Random random(seed());
  const Twins twins(512, 32400);
  Attention attention(twins, {6, 1, 256, 64, true}, 1, 1020, 32, 512, 32400, &random);
  std::vector<Sequence> s = sequences(&attention, {32000});
  for (const auto& [shape, rows] : {std::pair{Shape::kBestFirst, 64}, {Shape::kCertain, 1}, {Shape::kCertain, 70}, {Shape::kChain, 16}}) {
    INFO(name_of(shape));
    Plan plan(&attention.book);
    plan.add(shape, rows, &s[0], &random);
    attention.pass("long", plan);
    attention.commit(plan);
  }
}

}  // namespace
}  // namespace ddtree::ops::gpu_test
