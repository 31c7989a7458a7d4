#include "spec/tree.h"

#include <algorithm>
#include <catch2/catch_test_macros.hpp>
#include <cmath>
#include <limits>
#include <map>
#include <random>
#include <set>

using namespace ddtree;

namespace {

struct Table {
  int32_t positions, top_k;
  std::vector<int32_t> token;
  std::vector<float> log_prob;
  Candidates view() const { return {positions, top_k, token, log_prob}; }
};

// Random candidates whose log-probs are multiples of 1/8: sums are exact, so ties are real ties.
Table random_table(std::mt19937& rng, int32_t positions, int32_t top_k) {
  Table t{positions, top_k, {}, {}};
  for (int32_t p = 0; p < positions; ++p) {
    int down = static_cast<int>(rng() % 4);
    for (int32_t k = 0; k < top_k; ++k) {
      t.token.push_back(100 * p + k * 7 % 50 + k);
      t.log_prob.push_back(-static_cast<float>(down) / 8);
      down += static_cast<int>(rng() % 5);
    }
  }
  return t;
}

struct Prefix {
  double log_prob;
  std::vector<int32_t> ranks, tokens;
};

// Every prefix there is, by definition and without a heap.
std::vector<Prefix> enumerate(const Table& t, int32_t depth) {
  std::vector<Prefix> all, layer = {{0, {}, {}}};
  for (int32_t d = 0; d < depth; ++d) {
    std::vector<Prefix> next;
    for (const Prefix& p : layer)
      for (int32_t k = 0; k < t.top_k; ++k) {
        const size_t i = static_cast<size_t>(d * t.top_k + k);
        if (!std::isfinite(t.log_prob[i])) break;
        Prefix q = p;
        q.log_prob += static_cast<double>(t.log_prob[i]);
        q.ranks.push_back(k);
        q.tokens.push_back(t.token[i]);
        next.push_back(q);
      }
    all.insert(all.end(), next.begin(), next.end());
    layer = next;
  }
  std::sort(all.begin(), all.end(),
            [](const Prefix& a, const Prefix& b) { return a.log_prob != b.log_prob ? a.log_prob > b.log_prob : a.ranks < b.ranks; });
  return all;
}

std::vector<int32_t> tokens_of(const DraftTree& tree, int32_t node) {
  std::vector<int32_t> out;
  for (; node > 0; node = tree.parent[static_cast<size_t>(node)]) out.insert(out.begin(), tree.token[static_cast<size_t>(node)]);
  return out;
}

void check_shape(const DraftTree& tree) {
  REQUIRE(tree.parent[0] == -1);
  std::set<std::pair<int32_t, int32_t>> children;
  for (int32_t i = 1; i < tree.size(); ++i) {
    const size_t k = static_cast<size_t>(i), p = static_cast<size_t>(tree.parent[k]);
    REQUIRE(tree.parent[k] >= 0);
    REQUIRE(tree.parent[k] < i);
    REQUIRE(tree.depth[k] == tree.depth[p] + 1);
    REQUIRE((tree.spine[k] != 0) == (tree.spine[p] != 0 && tree.rank[k] == 0));
    REQUIRE(children.insert({tree.parent[k], tree.token[k]}).second);
  }
}

}  // namespace

TEST_CASE("a best-first tree is the most probable prefixes in order, ties by the ranks along the path") {
  std::mt19937 rng(1);
  for (int round = 0; round < 300; ++round) {
    const int32_t positions = 1 + static_cast<int32_t>(rng() % 4), top_k = 1 + static_cast<int32_t>(rng() % 4);
    const Table t = random_table(rng, positions, top_k);
    const auto all = enumerate(t, positions);
    const int32_t budget = 1 + static_cast<int32_t>(rng() % (all.size() + 3));
    const DraftTree tree = grow_tree(9999, t.view(), {.budget = budget});
    check_shape(tree);
    REQUIRE(tree.token[0] == 9999);
    REQUIRE(tree.nodes() == std::min<int32_t>(budget, static_cast<int32_t>(all.size())));
    for (int32_t i = 1; i < tree.size(); ++i) {
      REQUIRE(tokens_of(tree, i) == all[static_cast<size_t>(i - 1)].tokens);
      REQUIRE(tree.log_prob[static_cast<size_t>(i)] == all[static_cast<size_t>(i - 1)].log_prob);
    }
  }
}

TEST_CASE("smaller budgets are prefixes of larger trees, with and without a seeded chain") {
  std::mt19937 rng(2);
  for (int round = 0; round < 50; ++round)
    for (bool seed : {false, true}) {
      const Table t = random_table(rng, 6, 5);
      const DraftTree large = grow_tree(1, t.view(), {.budget = 90, .seed_chain = seed});
      check_shape(large);
      for (int32_t b : {0, 1, 2, 5, 6, 7, 30, 89}) {
        DraftTree cut = large;
        cut.truncate(b);
        const DraftTree small = grow_tree(1, t.view(), {.budget = b, .seed_chain = seed});
        REQUIRE(small.token == cut.token);
        REQUIRE(small.parent == cut.parent);
        REQUIRE(small.log_prob == cut.log_prob);
      }
    }
}

TEST_CASE("a seeded tree holds the whole chain first, then the best of the rest, none twice") {
  std::mt19937 rng(3);
  for (int round = 0; round < 100; ++round) {
    const Table t = random_table(rng, 4, 3);
    const auto all = enumerate(t, 4);
    const DraftTree tree = grow_tree(1, t.view(), {.budget = 40, .seed_chain = true});
    const DraftTree chain = chain_tree(1, t.view(), 15);
    check_shape(tree);
    REQUIRE(chain.nodes() == 4);
    for (int32_t i = 0; i <= 4; ++i) REQUIRE(tree.token[static_cast<size_t>(i)] == chain.token[static_cast<size_t>(i)]);
    std::vector<std::vector<int32_t>> rest;
    for (const Prefix& p : all)
      if (std::any_of(p.ranks.begin(), p.ranks.end(), [](int32_t r) { return r > 0; })) rest.push_back(p.tokens);
    for (int32_t i = 5; i < tree.size(); ++i) REQUIRE(tokens_of(tree, i) == rest[static_cast<size_t>(i - 5)]);
  }
}

TEST_CASE("depth, width and unusable candidates limit a tree") {
  std::mt19937 rng(4);
  Table t = random_table(rng, 5, 6);
  const DraftTree shallow = grow_tree(1, t.view(), {.budget = 500, .max_depth = 2});
  CHECK(shallow.max_depth() == 2);
  CHECK(shallow.nodes() == 6 + 36);
  const DraftTree narrow = grow_tree(1, t.view(), {.budget = 500, .top_k = 2});
  CHECK(narrow.nodes() == 2 + 4 + 8 + 16 + 32);
  CHECK(grow_tree(1, t.view(), {.budget = 0}).nodes() == 0);
  CHECK(grow_tree(1, t.view(), {.budget = 3, .max_depth = 0}).nodes() == 0);
  // Masked ids: position 1 has two real candidates, position 3 none.
  for (int32_t k = 2; k < 6; ++k) t.log_prob[static_cast<size_t>(6 + k)] = -std::numeric_limits<float>::infinity();
  for (int32_t k = 0; k < 6; ++k) t.log_prob[static_cast<size_t>(18 + k)] = -std::numeric_limits<float>::infinity();
  const DraftTree masked = grow_tree(1, t.view(), {.budget = 500});
  CHECK(masked.nodes() == 6 + 12 + 72);
  CHECK(grow_tree(1, t.view(), {.budget = 500, .seed_chain = true}).nodes() == masked.nodes());
  CHECK(chain_tree(1, t.view(), 15).nodes() == 3);
}

TEST_CASE("chain and tree unite without losing or doubling a node") {
  std::mt19937 rng(5);
  for (int round = 0; round < 200; ++round) {
    const Table t = random_table(rng, 5, 4);
    const DraftTree chain = chain_tree(1, t.view(), 1 + static_cast<int32_t>(rng() % 5));
    const DraftTree tree = grow_tree(1, t.view(), {.budget = static_cast<int32_t>(rng() % 60)});
    const UnionTree both = unite(chain, tree);
    check_shape(both.tree);
    std::set<std::vector<int32_t>> expected, got, got_tree;
    for (int32_t i = 0; i < chain.size(); ++i) expected.insert(tokens_of(chain, i));
    for (int32_t i = 0; i < tree.size(); ++i) expected.insert(tokens_of(tree, i));
    for (int32_t i = 0; i < both.tree.size(); ++i) {
      REQUIRE(got.insert(tokens_of(both.tree, i)).second);
      if (both.in_tree[static_cast<size_t>(i)]) got_tree.insert(tokens_of(both.tree, i));
    }
    REQUIRE(got == expected);
    REQUIRE(got_tree.size() == static_cast<size_t>(tree.size()));
    for (int32_t i = 0; i < tree.size(); ++i) REQUIRE(got_tree.count(tokens_of(tree, i)) == 1);
  }
}

TEST_CASE("a walk goes on while the target's choice is a child and asks at walked nodes only") {
  DraftTree tree = root_only(10);
  const int32_t a = tree.append(11, 0, 0, -0.1), b = tree.append(12, 0, 1, -0.5), c = tree.append(13, b, 0, -0.6),
                d = tree.append(11, a, 0, -0.7);
  std::vector<int32_t> asked;
  const auto choose = [&](std::map<int32_t, int32_t> choices) {
    return [&asked, choices](int32_t node) {
      asked.push_back(node);
      return choices.at(node);
    };
  };
  Walk w = follow_tree(tree, choose({{0, 12}, {b, 13}, {c, 5}}));
  CHECK(w.path == std::vector<int32_t>{b, c});
  CHECK(w.next == 5);
  CHECK(asked == std::vector<int32_t>{0, b, c});
  w = follow_tree(tree, choose({{0, 99}}));
  CHECK(w.path.empty());
  CHECK(w.next == 99);
  w = follow_tree(tree, choose({{0, 11}, {a, 11}, {d, 11}}));
  CHECK(w.path == std::vector<int32_t>{a, d});
  CHECK(w.next == 11);
  const std::vector<uint8_t> only_b = {1, 0, 1, 0, 0};
  w = follow_tree(tree, choose({{0, 12}, {b, 13}}), only_b);
  CHECK(w.path == std::vector<int32_t>{b});
  CHECK(w.next == 13);
}
