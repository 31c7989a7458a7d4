// draft_context and draft_attention on a card: a drafter's blocks over the context that draft_context has stored.
#include <string>
#include <vector>

#include "gpu/forests.h"
#include "gpu/support.h"

namespace ddtree::ops::gpu_test {
namespace {

constexpr double kAttended = 4e-3;  // as in attention_test.cpp

struct DrafterShape {
  int32_t heads, kv_heads, dim, layers;
};

class Drafter {
 public:
  Drafter(const Twins& twins, DrafterShape shape, int32_t pages, int32_t page_size, int32_t rows, Random* random)
      : book(pages, page_size, random), twins_(twins), shape_(shape), random_(random) {
    pool_ = twins.make([&](Backend& b) {
      return b.make_kv_pool({.layers = shape.layers, .kv_heads = shape.kv_heads, .head_dim = shape.dim}, pages, page_size);
    });
    scratch_ =
        twins.make([&](Backend& b) { return b.make_kv_scratch({.layers = 1, .kv_heads = shape.kv_heads, .head_dim = shape.dim}, rows); });
    rope_ = twins.make([&](Backend& b) { return b.make_rope(pages * page_size, shape.dim, 1e7); });
    q_norm_ = twins.constants(random->normals(shape.dim), 1, shape.dim);
    k_norm_ = twins.constants(random->normals(shape.layers * shape.dim), shape.layers, shape.dim);
    features_ = twins.activations(rows, shape.layers * context_width());
  }
  int64_t context_width() const { return 2 * int64_t{shape_.kv_heads} * shape_.dim; }  // of a layer

  // New features of several sequences in one call, as a commit of several streams gives them.
  void feed(const std::vector<Sequence*>& to, int32_t rows_each) {
    std::vector<int32_t> position, place;
    for (Sequence* s : to) {
      book.cover(s, s->context + rows_each);
      for (int32_t i = 0; i < rows_each; ++i, ++s->context) position.push_back(s->context), place.push_back(book.place(*s, s->context));
    }
    const auto rows = static_cast<int32_t>(position.size());
    const Each<Tensor> kv = rows_of(features_, twins_.count(), 0, rows);
    twins_.upload(random_->activations(rows * kv[0].cols), kv);
    twins_.each([&](Backend& b, size_t i) {
      b.stage_begin(Lane::kDraft);
      const auto* positions = b.stage<int32_t>(Lane::kDraft, position);
      const auto* places = b.stage<int32_t>(Lane::kDraft, place);
      REQUIRE((positions && places));
      b.draft_context({.rows = rows,
                       .position = positions,
                       .place = places,
                       .kv = kv[i],
                       .k_norm = k_norm_[i],
                       .eps = 1e-6f,
                       .rope = rope_[i],
                       .pool = pool_[i]});
    });
  }
  void fill(Sequence* s, int32_t positions) {
    while (s->context < positions) feed({s}, std::min<int32_t>(static_cast<int32_t>(features_[0].rows), positions - s->context));
  }

  // Blocks of the given rows behind each sequence, in every layer, compared.
  void pass(const std::vector<Sequence*>& of, int32_t block, bool causal, int64_t window) {
    Plan plan(&book);
    for (Sequence* s : of) plan.add(Shape::kChain, block, s, random_, false);
    const Each<Forest> forest = plan.stage(twins_);
    const int64_t rows = plan.rows(), width = int64_t{shape_.heads} * shape_.dim;
    for (int32_t layer = 0; layer < shape_.layers; ++layer) {
      INFO("layer " << layer << ", " << of.size() << " blocks of " << block << ", causal " << causal << ", window " << window);
      const Output q = twins_.output(rows, width), o = twins_.output(rows, width);
      const auto packed = twins_.activations(random_->activations(rows * (width + context_width())), rows, width + context_width());
      twins_.each([&](Backend& b, size_t i) {
        b.attention_prepare({.forest = &forest[i],
                             .heads = shape_.heads,
                             .gate = false,
                             .packed = packed[i],
                             .q_norm = q_norm_[i],
                             .k_norm = k_norm_[i].row_range(layer, 1),
                             .eps = 1e-6f,
                             .rope = rope_[i],
                             .q = q.view[i],
                             .scratch = scratch_[i],
                             .scratch_layer = 0,
                             .pool = pool_[i],
                             .pool_layer = layer});
        b.draft_attention({.forest = &forest[i],
                           .heads = shape_.heads,
                           .q = q.view[i],
                           .scratch = scratch_[i],
                           .scratch_layer = 0,
                           .pool = pool_[i],
                           .pool_layer = layer,
                           .causal = causal,
                           .window = window,
                           .o = o.view[i]});
      });
      twins_.compare("q", q, 2e-4);
      twins_.compare("draft_attention", o, kAttended);
    }
  }

  PageBook book;

 private:
  const Twins& twins_;
  const DrafterShape shape_;
  Random* random_;
  Each<KvPool*> pool_;
  Each<KvScratch*> scratch_;
  Each<const RopeTable*> rope_;
  Each<Tensor> q_norm_, k_norm_, features_;
};

std::vector<Sequence*> pointers(std::vector<Sequence>& s) {
  std::vector<Sequence*> p;
  for (Sequence& one : s) p.push_back(&one);
  return p;
}

TEST_CASE("gpu: draft_attention of the 27B drafter, causal and not, whole context and window of 2048") {
  INFO(seed_text());
  Random random(seed());
  const Twins twins(512, 4400);
  Drafter drafter(twins, {32, 8, 128, 2}, 280, 32, 512, &random);
  std::vector<Sequence> s(8);
  const std::vector<int32_t> contexts{0, 1, 31, 32, 100, 1000, 2040, 4000};  // 2040: the window's edge falls inside the block
  for (size_t i = 0; i < s.size(); ++i) drafter.fill(&s[i], contexts[i]);
  for (const bool causal : {false, true}) {
    for (const int64_t window : {0, 2048}) {
      drafter.pass(pointers(s), 16, causal, window);
      drafter.pass({&s[7]}, 16, causal, window);  // one stream: its context is cut into parts
    }
  }
  drafter.feed(pointers(s), 7);  // committed, then drafted again
  drafter.pass(pointers(s), 16, false, 2048);
  drafter.feed({&s[0], &s[6]}, 1);
  drafter.pass({&s[0], &s[6]}, 16, false, 0);
}

TEST_CASE("gpu: draft_attention, every ratio of heads, block and window, the window inside the block too") {
  INFO(seed_text());
  Random random(seed());
  for (const DrafterShape& shape :
       {DrafterShape{4, 2, 128, 2}, {8, 1, 128, 1}, {6, 1, 64, 2}, {2, 2, 64, 3}, {12, 1, 256, 1}, {16, 4, 32, 1}}) {
    INFO("heads " << shape.heads << "/" << shape.kv_heads << " of " << shape.dim);
    const Twins twins(300, 1200);
    Drafter drafter(twins, shape, 100, random.below(2) ? 32 : 16, 300, &random);
    std::vector<Sequence> s(5);
    for (Sequence& one : s) drafter.fill(&one, random.below(300));
    for (const int32_t block : {1, 2, 7, 8, 16, 17, 33}) {
      for (const bool causal : {false, true}) {
        for (const int64_t window : {0, 1, 8, 128}) {
          drafter.pass(block == 16 ? pointers(s) : std::vector<Sequence*>{&s[static_cast<size_t>(random.below(5))]}, block, causal, window);
        }
      }
    }
  }
}

}  // namespace
}  // namespace ddtree::ops::gpu_test
