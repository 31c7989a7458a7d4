#include "spec/tree.h"

#include <algorithm>
#include <cmath>
#include <queue>

namespace ddtree {
namespace {

size_t at(int32_t i) { return static_cast<size_t>(i); }

// Candidates that may be used at a position: a row ends at its first non-finite log-prob (masked ids, fewer real ids than top_k).
int32_t usable(const Candidates& c, int32_t position, int32_t top_k) {
  int32_t n = 0;
  while (n < top_k && std::isfinite(c.log_prob[at(position * c.top_k + n)])) ++n;
  return n;
}

struct Offer {
  double log_prob;
  int32_t parent, depth, rank;  // depth of this node, 1-based
};

// Ranks along the path of an offer, root's child first.
std::vector<int32_t> ranks_of(const DraftTree& tree, const Offer& offer) {
  std::vector<int32_t> ranks(at(offer.depth));
  ranks.back() = offer.rank;
  for (int32_t node = offer.parent; node > 0; node = tree.parent[at(node)]) ranks[at(tree.depth[at(node)] - 1)] = tree.rank[at(node)];
  return ranks;
}

}  // namespace

int32_t DraftTree::max_depth() const { return depth.empty() ? 0 : *std::max_element(depth.begin(), depth.end()); }

int32_t DraftTree::child(int32_t node, int32_t with_token) const {
  for (int32_t i = node + 1; i < size(); ++i)
    if (parent[at(i)] == node && token[at(i)] == with_token) return i;
  return -1;
}

void DraftTree::truncate(int32_t keep_nodes) {
  const size_t n = at(std::min(size(), std::max(keep_nodes, 0) + 1));
  token.resize(n), parent.resize(n), depth.resize(n), rank.resize(n), spine.resize(n), log_prob.resize(n);
}

int32_t DraftTree::append(int32_t new_token, int32_t new_parent, int32_t new_rank, double new_log_prob) {
  const bool root = new_parent < 0;
  depth.push_back(root ? 0 : depth[at(new_parent)] + 1);
  spine.push_back(root || (spine[at(new_parent)] != 0 && new_rank == 0) ? 1 : 0);
  token.push_back(new_token);
  parent.push_back(new_parent);
  rank.push_back(new_rank);
  log_prob.push_back(new_log_prob);
  return size() - 1;
}

DraftTree root_only(int32_t anchor) {
  DraftTree tree;
  tree.append(anchor, -1, 0, 0.0);
  return tree;
}

DraftTree grow_tree(int32_t anchor, const Candidates& c, const GrowOptions& options) {
  DraftTree tree = root_only(anchor);
  const int32_t depth_limit = std::min(c.positions, options.max_depth);
  const int32_t top = std::min(c.top_k, options.top_k);
  if (depth_limit <= 0 || top <= 0 || options.budget <= 0) return tree;
  std::vector<int32_t> width(at(depth_limit));
  for (int32_t d = 0; d < depth_limit; ++d) width[at(d)] = usable(c, d, top);
  const auto value = [&](int32_t depth, int32_t rank) { return static_cast<double>(c.log_prob[at((depth - 1) * c.top_k + rank)]); };

  // true where a is taken after b
  const auto later = [&](const Offer& a, const Offer& b) {
    if (a.log_prob != b.log_prob) return a.log_prob < b.log_prob;
    return ranks_of(tree, b) < ranks_of(tree, a);  // exact ties are rare, so paths are only built here
  };
  std::priority_queue<Offer, std::vector<Offer>, decltype(later)> heap(later);
  const auto offer_sibling = [&](const Offer& taken) {
    if (taken.rank + 1 < width[at(taken.depth - 1)])
      heap.push({taken.log_prob - value(taken.depth, taken.rank) + value(taken.depth, taken.rank + 1), taken.parent, taken.depth,
                 taken.rank + 1});
  };
  const auto take = [&](const Offer& offer) {
    return tree.append(c.token[at((offer.depth - 1) * c.top_k + offer.rank)], offer.parent, offer.rank, offer.log_prob);
  };

  if (width[0] == 0) return tree;
  Offer first{value(1, 0), 0, 1, 0};
  if (options.seed_chain) {
    // The chain is taken unasked; its nodes offer only their siblings, for each one's first child is the chain's next node.
    for (;;) {
      const int32_t node = take(first);
      offer_sibling(first);
      if (tree.nodes() >= options.budget || first.depth >= depth_limit || width[at(first.depth)] == 0) break;
      first = {first.log_prob + value(first.depth + 1, 0), node, first.depth + 1, 0};
    }
  } else {
    heap.push(first);
  }
  while (tree.nodes() < options.budget && !heap.empty()) {
    const Offer best = heap.top();
    heap.pop();
    const int32_t node = take(best);
    offer_sibling(best);
    if (best.depth < depth_limit && width[at(best.depth)] > 0)
      heap.push({best.log_prob + value(best.depth + 1, 0), node, best.depth + 1, 0});
  }
  return tree;
}

DraftTree chain_tree(int32_t anchor, const Candidates& c, int32_t length) {
  DraftTree tree = root_only(anchor);
  for (int32_t d = 0; d < std::min(length, c.positions) && c.top_k > 0; ++d) {
    const float own = c.log_prob[at(d * c.top_k)];
    if (!std::isfinite(own)) break;
    tree.append(c.token[at(d * c.top_k)], tree.size() - 1, 0, tree.log_prob.back() + static_cast<double>(own));
  }
  return tree;
}

UnionTree unite(const DraftTree& chain, const DraftTree& tree) {
  UnionTree out;
  out.tree = chain;
  out.in_tree.assign(at(chain.size()), 0);
  out.in_tree[0] = 1;
  std::vector<int32_t> place(at(tree.size()), 0);  // tree node -> union node
  for (int32_t i = 1; i < tree.size(); ++i) {
    const int32_t parent = place[at(tree.parent[at(i)])];
    int32_t node = out.tree.child(parent, tree.token[at(i)]);
    if (node < 0) {
      node = out.tree.append(tree.token[at(i)], parent, tree.rank[at(i)], tree.log_prob[at(i)]);
      out.in_tree.push_back(1);
    }
    out.in_tree[at(node)] = 1;
    place[at(i)] = node;
  }
  return out;
}

}  // namespace ddtree
