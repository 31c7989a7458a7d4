// attention_prepare, attention, draft_attention, draft_context and kv_commit against float64 loops over plain arrays of K and V by
// position.
#include <catch2/catch_test_macros.hpp>

#include "unit/ops/support.h"

namespace ddtree::ops {
namespace {

using namespace test;  // NOLINT(google-build-using-namespace)
using Doubles = std::vector<double>;

struct Case {
  int32_t heads, kv_heads, head_dim, rotary;
  bool gate;
};

// Everything of one attention layer on one backend; the oracle's K and V of committed positions are kept by place.
struct Layer {
  Layer(const cpu::Kernels* kernels, Case c_, int32_t max_rows, int32_t page_size, uint32_t seed, bool bf16 = false)
      : c(c_), random(seed), backend(make_backend(kernels, bf16)) {
    const KvShape shape{.layers = 2, .kv_heads = c.kv_heads, .head_dim = c.head_dim};
    pool = *backend->make_kv_pool(shape, 64, page_size);
    scratch = *backend->make_kv_scratch(shape, max_rows);
    rope = *backend->make_rope(2000, c.rotary, 1e7);
    q_weight = random.normals(c.head_dim);
    k_weight = random.normals(c.head_dim);
    q_norm = put(backend.get(), q_weight, 1, c.head_dim);
    k_norm = put(backend.get(), k_weight, 1, c.head_dim);
    k_at.resize(64 * page_size);
    v_at.resize(64 * page_size);
  }
  int64_t q_step() const { return c.gate ? 2 * c.head_dim : c.head_dim; }
  int64_t width() const { return c.heads * q_step() + 2 * c.kv_heads * c.head_dim; }

  // w · x / rms, then the rotation, in float64; angles as the models round them.
  Doubles norm_rotate(const float* head, const Floats& w, int32_t position) const {
    Doubles y(c.head_dim);
    double sum = 0.0;
    for (int i = 0; i < c.head_dim; ++i) sum += static_cast<double>(head[i]) * head[i];
    const double inverse = 1.0 / std::sqrt(sum / c.head_dim + 1e-6);
    for (int i = 0; i < c.head_dim; ++i) y[i] = w[i] * head[i] * inverse;
    const int half = c.rotary / 2;
    for (int i = 0; i < half; ++i) {
      const auto frequency = static_cast<float>(1.0 / std::pow(1e7, 2.0 * i / c.rotary));
      const double angle = static_cast<float>(position) * frequency, a = y[i], b = y[half + i];
      y[i] = a * std::cos(angle) - b * std::sin(angle);
      y[half + i] = b * std::cos(angle) + a * std::sin(angle);
    }
    return y;
  }

  // Runs prepare over random projections; remembers what the oracle needs of each row.
  void prepare(Trees* trees, int32_t layer) {
    const Forest& f = trees->view();
    x = random.normals(f.rows * width());
    packed = put(backend.get(), x, f.rows, width());
    q = zeros(backend.get(), f.rows, int64_t{c.heads} * c.head_dim);
    backend->attention_prepare({.forest = &f,
                                .heads = c.heads,
                                .gate = c.gate,
                                .packed = packed,
                                .q_norm = q_norm,
                                .k_norm = k_norm,
                                .eps = 1e-6f,
                                .rope = rope,
                                .q = q,
                                .scratch = scratch,
                                .scratch_layer = layer,
                                .pool = pool,
                                .pool_layer = layer});
    k_row.assign(f.rows, {});
    v_row.assign(f.rows, {});
    for (int32_t r = 0; r < f.rows; ++r) {
      const float* row = x.data() + r * width();
      for (int32_t h = 0; h < c.kv_heads; ++h) {
        const Doubles k = norm_rotate(row + c.heads * q_step() + h * c.head_dim, k_weight, f.position[r]);
        k_row[r].insert(k_row[r].end(), k.begin(), k.end());
      }
      const float* v = row + c.heads * q_step() + c.kv_heads * c.head_dim;
      v_row[r].assign(v, v + c.kv_heads * c.head_dim);
      if (f.segment[f.segment_of[r]].certain) remember(f.place[r], r);
    }
  }
  void remember(int32_t place, int32_t row) {
    k_at[place] = k_row[row];
    v_at[place] = v_row[row];
  }

  // One output row by the definition: `own` are the rows it sees, positions below `low` are masked.
  Doubles expect(const Trees& trees, int32_t row, const std::vector<int32_t>& own, int32_t low) const {
    const ForestSegment& s = trees.segments[trees.segment_of[row]];
    std::vector<const Doubles*> ks, vs;
    for (int32_t p = low; p < s.context; ++p) {
      ks.push_back(&k_at[trees.place_of(s, p)]);
      vs.push_back(&v_at[trees.place_of(s, p)]);
    }
    for (const int32_t r : own) {
      if (trees.position[r] < low) continue;
      ks.push_back(&k_row[r]);
      vs.push_back(&v_row[r]);
    }
    Doubles out;
    for (int32_t h = 0; h < c.heads; ++h) {
      const int32_t kv = h / (c.heads / c.kv_heads);
      const float* projected = x.data() + row * width() + h * q_step();
      const Doubles query = norm_rotate(projected, q_weight, trees.position[row]);
      Doubles score(ks.size());
      double top = -INFINITY, sum = 0.0;
      for (size_t i = 0; i < ks.size(); ++i) {
        for (int d = 0; d < c.head_dim; ++d) score[i] += query[d] * (*ks[i])[kv * c.head_dim + d];
        score[i] /= std::sqrt(static_cast<double>(c.head_dim));
        top = std::max(top, score[i]);
      }
      for (double& s_i : score) sum += (s_i = std::exp(s_i - top));
      for (int d = 0; d < c.head_dim; ++d) {
        double o = 0.0;
        for (size_t i = 0; i < vs.size(); ++i) o += score[i] / sum * (*vs[i])[kv * c.head_dim + d];
        if (c.gate) o /= 1.0 + std::exp(-static_cast<double>(projected[c.head_dim + d]));
        out.push_back(o);
      }
    }
    return out;
  }

  Tensor attend(Trees* trees, int32_t layer, const std::vector<int32_t>* rows = nullptr) {
    const Forest& f = trees->view();
    const Tensor o = zeros(backend.get(), rows ? static_cast<int64_t>(rows->size()) : f.rows, int64_t{c.heads} * c.head_dim);
    backend->attention({.forest = &f,
                        .heads = c.heads,
                        .q = q,
                        .packed = packed,
                        .gate = c.gate,
                        .scratch = scratch,
                        .scratch_layer = layer,
                        .pool = pool,
                        .pool_layer = layer,
                        .row = rows ? rows->data() : nullptr,
                        .count = rows ? static_cast<int32_t>(rows->size()) : 0,
                        .o = o});
    return o;
  }

  Case c;
  Random random;
  std::unique_ptr<cpu::CpuBackend> backend;
  KvPool* pool;
  KvScratch* scratch;
  const RopeTable* rope;
  Floats q_weight, k_weight, x;
  Tensor q_norm, k_norm, packed, q;
  std::vector<Doubles> k_row, v_row, k_at, v_at;
};

// Fills the context of every segment of `trees` with one certain pass of its own.
void fill_context(Layer* layer, const Trees& trees, int32_t which) {
  for (const ForestSegment& s : trees.segments) {
    if (s.context == 0) continue;
    Trees fill(trees.page_size);
    fill.pages.assign(trees.pages.begin(), trees.pages.end());
    fill.segments.push_back({.first_row = 0, .row_count = s.context, .certain = 1, .slot = 0, .context = 0, .first_page = s.first_page});
    for (int32_t i = 0; i < s.context; ++i) {
      fill.token.push_back(0);
      fill.parent.push_back(i - 1);
      fill.position.push_back(i);
      fill.segment_of.push_back(0);
      fill.place.push_back(fill.place_of(fill.segments[0], i));
    }
    layer->prepare(&fill, which);
  }
}

void check_rows(Layer* layer, Trees* trees, const Tensor& o, double tolerance) {
  double worst = 0.0;
  for (int32_t r = 0; r < o.rows; ++r) {
    worst = std::max(worst, error(get(o.row_range(r, 1)), layer->expect(*trees, r, trees->path(r), 0)));
  }
  INFO("worst " << worst);
  CHECK(worst < tolerance);
}

TEST_CASE("attention: trees, chains and prompts over paged context, any head ratio", "[ops]") {
  const std::vector<Case> cases{{4, 2, 256, 64, true}, {4, 4, 32, 32, false}, {12, 2, 64, 16, true},  {8, 1, 16, 8, true},
                                {16, 1, 32, 32, true}, {6, 3, 48, 0, false},  {24, 4, 128, 32, true}, {13, 1, 16, 16, false}};
  uint32_t seed = 10;
  for (const cpu::Kernels* kernels : all_kernels()) {
    for (const Case& c : cases) {
      for (const int32_t page_size : {16, 32, 48}) {
        Layer layer(kernels, c, 300, page_size, ++seed);
        Trees trees(page_size);
        trees.add('t', 1 + layer.random.below(40), layer.random.below(150), 0, &layer.random);
        trees.add('c', 1 + layer.random.below(70), layer.random.below(90), 1, &layer.random);
        trees.add('l', 17, page_size * 2, 2, &layer.random);
        trees.add('c', 1, 77, 3, &layer.random);
        trees.add('t', 64, 0, 4, &layer.random);
        fill_context(&layer, trees, 1);
        layer.prepare(&trees, 1);
        const Tensor o = layer.attend(&trees, 1);
        INFO(kernels->name << " heads " << c.heads << "/" << c.kv_heads << " dim " << c.head_dim << " page " << page_size);
        check_rows(&layer, &trees, o, 5e-6);
        // A list of rows gives the same bits as all rows.
        const std::vector<int32_t> some{0, 3, trees.segments[1].first_row, trees.segments[2].first_row + 16, trees.view().rows - 1};
        if (trees.segments[0].row_count > 3) {
          const Tensor few = layer.attend(&trees, 1, &some);
          for (size_t i = 0; i < some.size(); ++i) CHECK(same_bits(few.f32(i), o.f32(some[i]), o.cols));
        }
      }
    }
  }
}

TEST_CASE("attention: a tree of 256 rows", "[ops]") {
  Layer layer(nullptr, {4, 2, 64, 16, true}, 300, 32, 5);
  Trees trees;
  trees.add('t', 256, 200, 0, &layer.random);
  fill_context(&layer, trees, 0);
  layer.prepare(&trees, 0);
  check_rows(&layer, &trees, layer.attend(&trees, 0), 5e-6);
}

// The promise that makes speculation lossless: bits depend on a row's path only.
TEST_CASE("attention: a path has the same bits as prompt, as chain, inside a tree, step by step, and in a batch", "[ops]") {
  const Case c{4, 2, 64, 16, true};
  const int32_t length = 90, width = 4 * 128 + 2 * 2 * 64;
  Random random(21);
  const Floats projections = random.normals(length * width);
  const auto run = [&](Layer* layer, Trees* trees, const std::vector<int32_t>& source) {  // source[r]: row of `projections`
    const Forest& f = trees->view();
    layer->packed = zeros(layer->backend.get(), f.rows, width);
    for (int32_t r = 0; r < f.rows; ++r) std::copy_n(projections.data() + source[r] * width, width, layer->packed.f32(r));
    layer->q = zeros(layer->backend.get(), f.rows, 256);
    layer->backend->attention_prepare({.forest = &f,
                                       .heads = 4,
                                       .gate = true,
                                       .packed = layer->packed,
                                       .q_norm = layer->q_norm,
                                       .k_norm = layer->k_norm,
                                       .eps = 1e-6f,
                                       .rope = layer->rope,
                                       .q = layer->q,
                                       .scratch = layer->scratch,
                                       .scratch_layer = 0,
                                       .pool = layer->pool,
                                       .pool_layer = 0});
    return layer->attend(trees, 0);
  };
  std::vector<int32_t> all(length);
  std::iota(all.begin(), all.end(), 0);
  Layer whole(nullptr, c, 300, 32, 99);
  Trees prompt;
  prompt.add('c', length, 0, 0, &random);
  const Tensor want = run(&whole, &prompt, all);

  SECTION("cut anywhere, certain or tentative with commits, beside another sequence") {
    for (int trial = 0; trial < 6; ++trial) {
      Layer layer(nullptr, c, 300, 32, 99);
      Trees table;  // page tables of both sequences
      table.add('c', length, 0, 0, &random);
      table.add('c', 40, 0, 1, &random);
      for (int32_t at = 0; at < length;) {
        const int32_t rows = std::min(1 + random.below(trial < 3 ? 3 : 40), length - at);
        const bool certain = random.below(2) == 0;
        Trees pass;
        pass.pages = table.pages;
        std::vector<int32_t> source;
        const auto add = [&](const ForestSegment& like, int32_t context, int32_t count, bool sure, int32_t first_source) {
          pass.segments.push_back({.first_row = static_cast<int32_t>(source.size()),
                                   .row_count = count,
                                   .certain = sure,
                                   .slot = like.slot,
                                   .context = context,
                                   .first_page = like.first_page});
          for (int32_t i = 0; i < count; ++i) {
            pass.parent.push_back(i == 0 ? -1 : static_cast<int32_t>(source.size()) - 1);
            pass.position.push_back(context + i);
            pass.place.push_back(pass.place_of(pass.segments.back(), context + i));
            pass.segment_of.push_back(static_cast<int32_t>(pass.segments.size()) - 1);
            pass.token.push_back(0);
            source.push_back(first_source + i);
          }
        };
        const bool beside = random.below(2) == 0;
        if (beside) add(table.segments[1], 0, 1 + random.below(30), true, 50);
        const auto mine = static_cast<int32_t>(source.size());
        add(table.segments[0], at, rows, certain, at);
        const Tensor o = run(&layer, &pass, source);
        for (int32_t i = 0; i < rows; ++i) {
          INFO("trial " << trial << " position " << at + i << (certain ? " certain" : " tentative"));
          CHECK(same_bits(o.f32(mine + i), want.f32(at + i), o.cols));
        }
        if (!certain) {
          std::vector<int32_t> path(rows);
          std::iota(path.begin(), path.end(), mine);
          const std::vector<int32_t> offset{0, rows}, slot{0};
          layer.backend->kv_commit({.forest = &pass.view(),
                                    .paths = {.count = 1, .rows = rows, .offset = offset.data(), .row = path.data(), .slot = slot.data()},
                                    .scratch = layer.scratch,
                                    .pool = layer.pool});
        }
        at += rows;
      }
    }
  }
  SECTION("as a path of a tree") {
    Layer layer(nullptr, c, 300, 32, 99);
    Trees tree;
    std::vector<int32_t> source, path;
    tree.pages.resize(16);
    std::iota(tree.pages.begin(), tree.pages.end(), 3);
    tree.segments.push_back({.first_row = 0, .row_count = 200, .certain = 0, .slot = 0, .context = 0, .first_page = 0});
    for (int32_t i = 0; i < 200; ++i) {
      const bool on = static_cast<int32_t>(path.size()) < length && (i == 0 || random.below(2) == 0);
      const int32_t parent = on ? (path.empty() ? -1 : path.back()) : random.below(i);
      tree.parent.push_back(parent);
      tree.position.push_back(parent < 0 ? 0 : tree.position[parent] + 1);
      tree.place.push_back(-1);
      tree.segment_of.push_back(0);
      tree.token.push_back(0);
      source.push_back(on ? static_cast<int32_t>(path.size()) : random.below(length));
      if (on) path.push_back(i);
    }
    const Tensor o = run(&layer, &tree, source);
    REQUIRE(path.size() > 50);
    for (size_t i = 0; i < path.size(); ++i) CHECK(same_bits(o.f32(path[i]), want.f32(static_cast<int64_t>(i)), o.cols));
  }
}

TEST_CASE("draft_attention: windows and both kinds of blocks, several blocks at once", "[ops]") {
  uint32_t seed = 40;
  for (const cpu::Kernels* kernels : all_kernels()) {
    for (const Case& c : {Case{4, 2, 128, 128, false}, Case{8, 1, 32, 32, false}, Case{6, 1, 16, 16, false}}) {
      for (const bool causal : {true, false}) {
        for (const int64_t window : {0, 4, 31, 32, 33, 64, 128}) {
          Layer layer(kernels, c, 300, 32, ++seed);
          Trees trees;
          for (const int32_t context : {0, 1, 31, 64, 140}) trees.add('b', 16, context, -1, &layer.random);
          fill_context(&layer, trees, 1);
          layer.prepare(&trees, 0);  // a block's own K and V: scratch layer 0
          const Forest& f = trees.view();
          const Tensor o = zeros(layer.backend.get(), f.rows, int64_t{c.heads} * c.head_dim);
          layer.backend->draft_attention({.forest = &f,
                                          .heads = c.heads,
                                          .q = layer.q,
                                          .scratch = layer.scratch,
                                          .scratch_layer = 0,
                                          .pool = layer.pool,
                                          .pool_layer = 1,
                                          .causal = causal,
                                          .window = window,
                                          .o = o});
          double worst = 0.0;
          for (int32_t r = 0; r < f.rows; ++r) {
            const ForestSegment& s = f.segment[f.segment_of[r]];
            std::vector<int32_t> own;
            for (int32_t i = s.first_row; i < s.first_row + s.row_count; ++i) {
              if (!causal || i <= r) own.push_back(i);
            }
            const auto low = static_cast<int32_t>(window > 0 ? std::max<int64_t>(0, f.position[r] - window + 1) : 0);
            worst = std::max(worst, error(get(o.row_range(r, 1)), layer.expect(trees, r, own, low)));
          }
          INFO(kernels->name << " heads " << c.heads << " causal " << causal << " window " << window);
          CHECK(worst < 5e-6);
        }
      }
    }
  }
}

TEST_CASE("draft_context: K normed and rotated, V as it is, every layer at its places", "[ops]") {
  Layer layer(nullptr, {4, 2, 32, 32, false}, 300, 32, 77);
  const int32_t rows = 50;
  const int64_t width = 2 * 2 * 32;
  const Floats kv = layer.random.normals(rows * 2 * width), norms = layer.random.normals(2 * 32);
  std::vector<int32_t> position(rows), place(rows);
  for (int32_t r = 0; r < rows; ++r) {
    position[r] = 100 + r;
    place[r] = (r * 37) % (64 * 32);
  }
  layer.backend->draft_context({.rows = rows,
                                .position = position.data(),
                                .place = place.data(),
                                .kv = put(layer.backend.get(), kv, rows, 2 * width),
                                .k_norm = put(layer.backend.get(), norms, 2, 32),
                                .eps = 1e-6f,
                                .rope = layer.rope,
                                .pool = layer.pool});
  const auto& pool = static_cast<const cpu::CpuKvPool&>(*layer.pool);
  double worst = 0.0;
  for (int32_t r = 0; r < rows; ++r) {
    for (int32_t l = 0; l < 2; ++l) {
      for (int32_t h = 0; h < 2; ++h) {
        const float* row = kv.data() + r * 2 * width + l * width;
        const Doubles k = layer.norm_rotate(row + h * 32, Floats(norms.begin() + l * 32, norms.begin() + (l + 1) * 32), position[r]);
        const float* kp = pool.k_page(l, place[r] / 32, h) + place[r] % 32;
        const float* vp = pool.v_page(l, place[r] / 32, h) + (place[r] % 32) * 32;
        for (int d = 0; d < 32; ++d) worst = std::max(worst, std::fabs(kp[d * 32] - k[d]));
        CHECK(same_bits(vp, row + (2 + h) * 32, 32));
      }
    }
  }
  CHECK(worst < 3e-6);
}

TEST_CASE("attention: BF16 boundaries round q, K and the output", "[ops]") {
  Layer layer(nullptr, {4, 2, 64, 16, true}, 300, 32, 8, true);
  Trees trees;
  trees.add('t', 20, 33, 0, &layer.random);
  fill_context(&layer, trees, 0);
  layer.prepare(&trees, 0);
  for (const float q : get(layer.q)) CHECK(q == round_to_bf16(q));
  const Tensor o = layer.attend(&trees, 0);
  double worst = 0.0;
  for (int32_t r = 0; r < o.rows; ++r) {
    for (const float x : get(o.row_range(r, 1))) CHECK(x == round_to_bf16(x));
    worst = std::max(worst, error(get(o.row_range(r, 1)), layer.expect(trees, r, trees.path(r), 0)));
  }
  CHECK(worst < 0.03);
  CHECK(worst > 1e-4);
}

TEST_CASE("set-up: shapes that the CPU kernels cannot run are refused with the reason", "[ops]") {
  const auto backend = make_backend();
  const auto head = backend->make_kv_pool({.layers = 1, .kv_heads = 1, .head_dim = 40}, 4, 32);
  REQUIRE(!head.ok());
  CHECK(head.status().code() == Code::kBadModel);
  CHECK(head.status().message().find("40") != std::string::npos);
  const auto page = backend->make_kv_pool({.layers = 1, .kv_heads = 1, .head_dim = 32}, 4, 20);
  REQUIRE(!page.ok());
  CHECK(page.status().message().find("page_size is 20") != std::string::npos);
  CHECK(!backend->make_rope(10, 7, 1e4).ok());
}

}  // namespace
}  // namespace ddtree::ops
