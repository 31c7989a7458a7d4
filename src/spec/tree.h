// Draft trees: which continuations of an anchor one verification pass looks at. Pure functions over small arrays.
//
// Node 0 is the root (the anchor: sampled, not yet run through the target); it is not counted in a budget. Parents stand before
// their children, so a tree's first n nodes are a tree again, and nodes are rows of a forest in this order.
//
// Source: DDTree, arXiv 2604.12989: the `budget` most probable prefixes under the product of the drafter's per-position marginals.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace ddtree {

struct DraftTree {
  std::vector<int32_t> token;    // [n] token[0] is the anchor
  std::vector<int32_t> parent;   // [n] node index, -1 for the root
  std::vector<int32_t> depth;    // [n] 0 for the root
  std::vector<int32_t> rank;     // [n] place among the candidates of its position (0 = the drafter's best); 0 for the root
  std::vector<uint8_t> spine;    // [n] 1 where every rank on the path is 0: the drafter's greedy chain
  std::vector<double> log_prob;  // [n] of the whole path, by the drafter; 0 for the root

  int32_t size() const { return static_cast<int32_t>(token.size()); }
  int32_t nodes() const { return token.empty() ? 0 : size() - 1; }  // without the root
  int32_t max_depth() const;
  int32_t child(int32_t node, int32_t with_token) const;                         // -1 if there is none
  void truncate(int32_t keep_nodes);                                             // keeps the root and the first keep_nodes nodes
  int32_t append(int32_t token, int32_t parent, int32_t rank, double log_prob);  // returns its index
};

DraftTree root_only(int32_t anchor);

// The drafter's candidates for one anchor: `positions` rows of `top_k`, best first (see nn/executor.h, DraftOutput).
struct Candidates {
  int32_t positions = 0, top_k = 0;
  std::span<const int32_t> token;   // [positions, top_k]
  std::span<const float> log_prob;  // [positions, top_k] non-increasing along a row; a row ends at its first non-finite value
};

struct GrowOptions {
  int32_t budget = 0;             // nodes without the root
  int32_t max_depth = INT32_MAX;  // deeper candidates are left out (what max_tokens cannot use)
  int32_t top_k = INT32_MAX;      // candidates a position, at most those given
  bool seed_chain = false;        // the whole greedy chain goes in first, then best-first
};

// Best-first growth. The heap is ordered by (path log-prob falling, ranks along the path lexicographically rising; a prefix is
// smaller); taking a node offers its next sibling and its first child, so every prefix has one way in and none comes twice.
// Node order = order of taking: without seed_chain log_prob never rises, and a smaller budget is a prefix of a larger tree
// (also with seed_chain). Path log-probs are summed in double in the order parent + own, sibling = own - rank + (rank + 1).
DraftTree grow_tree(int32_t anchor, const Candidates& candidates, const GrowOptions& options);

// The greedy chain of at most `length` nodes.
DraftTree chain_tree(int32_t anchor, const Candidates& candidates, int32_t length);

// chain ∪ tree of one anchor, for shadow verification: the chain's nodes first, then the tree's others in its own order. A best-first
// tree need not contain the whole chain. in_tree[i] says whether node i (root included) is the tree's; the chain's nodes are 0 …
// chain.nodes().
struct UnionTree {
  DraftTree tree;
  std::vector<uint8_t> in_tree;
};
UnionTree unite(const DraftTree& chain, const DraftTree& tree);

// Where a walk ended: accepted nodes from the root's child down, and the token that the target chose after the last of them.
struct Walk {
  std::vector<int32_t> path;  // node indices, rising; empty: only the root stands
  int32_t next = -1;
};

// From the root: asks the target's choice at a node, goes to the child that bears it, ends where there is none. choose(node) -> token
// is called for the nodes of the walk only, in order, root first. allowed (may be empty: all) restricts the nodes that count as children.
template <class Choose>
Walk follow_tree(const DraftTree& tree, Choose&& choose, std::span<const uint8_t> allowed = {}) {
  Walk walk;
  int32_t at = 0;
  for (;;) {
    const int32_t token = choose(at);
    const int32_t child = tree.child(at, token);
    if (child < 0 || (!allowed.empty() && !allowed[static_cast<size_t>(child)])) {
      walk.next = token;
      return walk;
    }
    walk.path.push_back(child);
    at = child;
  }
}

}  // namespace ddtree
