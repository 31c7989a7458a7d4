// Full attention of the target and the MTP head, and the drafter's block attention: three steps over the same storage.
//
// attention_prepare: splits the packed projection, norms q and k per head (w · x / rms, float32), rotates the first rotary_dim dimensions
//   (NeoX pairs (i, i + rotary_dim/2); the rest passes), and stores K and V: of every row to `scratch`, of certain rows also to `pool` at
//   the row's place (side effect: those places now belong to the row's token). q comes out normed and rotated, unscaled.
//   K columns of `packed` may be overwritten (they are not read again).
//   Packed columns: per query head [q (D) | gate (D)] with an output gate, [q (D)] without; then K heads; then V heads.
//   BF16 boundaries: q, K (after rotation) and V are rounded.
//
// attention: o[r, h] = Σ_p softmax_p(q[r, h] · K[p] / √D) V[p] over the row's path: committed positions [0, context) from pages, then its
//   ancestors and itself from scratch (no row sees a sibling's branch). Head h reads kv head h / (heads / kv_heads). With a gate:
//   o *= sigmoid(gate), always sigmoid. `row`/`count` restrict the rows that are computed (o is then [count, …]).
//
// draft_attention: the same for a drafter's block. Each segment is one block: every row sees committed positions p < context and, in its
//   block, all rows (not causal) or rows up to its own (causal); with window > 0 only positions p > position - window.
//
// Numeric promise: scores accumulate over d, softmax sums and outputs over positions in ascending order of position, in float32; the
//   order depends on the row's own path only. So a row is bit-identical as tentative row, as certain row, alone, in any batch and
//   for any split of the prefill. BF16 boundaries: o is rounded once after the gate; probabilities stay float32.
// On CUDA the softmax runs over tiles of keys with running sums, the context is cut into parts by the length and the rows of the row's own
//   segment, parts are folded in order of position, and probabilities are rounded to BF16 for the product with V: a row's bits depend on
//   its segment alone, not on what else is in the pass; the same row in a segment of another size agrees to that rounding.
// Workspace: the backend's own, bounded by the largest context.
#pragma once

#include "ops/forest.h"
#include "ops/tensor.h"

namespace ddtree::ops {

struct AttentionPrepareArgs {
  const Forest* forest = nullptr;
  int32_t heads = 0;
  bool gate = false;
  Tensor packed;          // [R, heads · D · (gate ? 2 : 1) + 2 · kv_heads · D]
  Tensor q_norm, k_norm;  // [1, D] float32, effective weights
  float eps = 1e-6f;
  const RopeTable* rope = nullptr;
  Tensor q;                      // out [R, heads · D]
  KvScratch* scratch = nullptr;  // kv_heads and D are its shape's
  int32_t scratch_layer = 0;
  KvPool* pool = nullptr;  // null: no row is certain
  int32_t pool_layer = 0;
};

struct AttentionArgs {
  const Forest* forest = nullptr;
  int32_t heads = 0;
  Tensor q;       // [R, heads · D] of attention_prepare
  Tensor packed;  // the same packed projection, for the gate
  bool gate = false;
  const KvScratch* scratch = nullptr;
  int32_t scratch_layer = 0;
  const KvPool* pool = nullptr;
  int32_t pool_layer = 0;
  const int32_t* row = nullptr;  // [count] staged rows to compute, ascending; null: all
  int32_t count = 0;             // with row
  Tensor o;                      // out [R or count, heads · D]
};

struct DraftAttentionArgs {
  const Forest* forest = nullptr;
  int32_t heads = 0;
  Tensor q;  // [R, heads · D]
  const KvScratch* scratch = nullptr;
  int32_t scratch_layer = 0;
  const KvPool* pool = nullptr;  // the drafter's context
  int32_t pool_layer = 0;
  bool causal = false;
  int64_t window = 0;  // 0: unbounded
  Tensor o;            // out [R, heads · D]
};

// draft_context: K and V of newly committed features, of all drafter layers at once: kv [n, layers · 2 · kv_heads · D], per layer
//   [K heads | V heads]; K is normed per head (plain) and rotated at `position`, then both go to the pool at `place`. A context row goes
//   through no input norm: kv comes from the shared context vector. Pages of sliding layers are kept whole: the window is the reader's.
//   BF16 boundaries: K after rotation, and V. Side effect: the places.
struct DraftContextArgs {
  int32_t rows = 0;
  const int32_t* position = nullptr;  // [rows] staged
  const int32_t* place = nullptr;     // [rows] staged
  Tensor kv;
  Tensor k_norm;  // [layers, D] float32, effective weights
  float eps = 1e-6f;
  const RopeTable* rope = nullptr;
  KvPool* pool = nullptr;
};

// kv_commit: appends the K and V of the rows of `paths` from scratch to the pool at the rows' places, in every layer. A copy: exact.
struct KvCommitArgs {
  const Forest* forest = nullptr;
  Paths paths;
  const KvScratch* scratch = nullptr;
  KvPool* pool = nullptr;  // same layers as scratch
};

}  // namespace ddtree::ops
