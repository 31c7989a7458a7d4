// One loaded pair on one backend: forest passes of the target, commits, and drafts. This is all that engine/ sees of tensors.
//
// The executor owns the storage (KV pages, recurrent-state slots, drafter and MTP context) but knows no sequences: the caller says
// which page table and slot a segment uses. Page tables are shared by the target's layers, the drafter and the MTP head: page p of
// every pool belongs to the same tokens.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/status.h"
#include "model/spec.h"
#include "ops/load.h"
#include "ops/rates.h"
#include "ops/sample.h"

namespace ddtree {

// How the rows of a segment choose the token that follows them (ops/sample.h). As it is: greedily.
struct Choice {
  ops::SampleParams params{.temperature = 0};
  // Null if no penalty is set; read during forward(). It counts the sequence's tokens at positions below history_end; from there on a row's
  // ancestors in the pass and the row itself count too.
  const ops::TokenHistory* history = nullptr;
  int32_t history_end = 0;
  std::span<const int32_t> banned;  // ids that must not be chosen for positions below banned_end
  int32_t banned_end = 0;

  bool greedy() const { return params.temperature <= 0 && history == nullptr && banned.empty(); }
};

// The rows of one sequence in a pass: contiguous, parent before child.
struct Segment {
  int32_t first_row = 0, row_count = 0;
  // Certain rows (prompt tokens, the one row of plain decoding) are a chain and advance state, window and K/V in the pass itself.
  // Tentative rows (chains and trees under verification) write nothing that lasts until commit().
  bool certain = false;
  int32_t slot = -1;               // recurrent-state slot
  std::span<const int32_t> pages;  // page table: covers context + row_count positions
  int32_t context = 0;             // committed length: row r sees positions [0, context) and its ancestors
  Choice choice;                   // of its rows that want logits
};

struct Forest {
  std::vector<Segment> segments;
  std::vector<int32_t> token;         // [R]
  std::vector<int32_t> position;      // [R] context + depth
  std::vector<int32_t> parent;        // [R] row index in this forest, or -1: the segment's committed end
  std::vector<uint8_t> wants_logits;  // [R]
};

// Valid until the next forward().
struct PassOutput {
  // [L, vocab]; ids past the real vocabulary are -inf. Null where no row wanted logits, or where they lie in a device's memory: then the
  // pass has chosen, and Executor::row_logits() fetches a row.
  const float* logits = nullptr;
  std::vector<int32_t> chosen;  // [L] by the segment's Choice; empty with `logits`. -1: not chosen, the caller does it from row_logits()
  std::vector<float> margin;    // [L] of the choice (ops::Sampled); empty with `logits`
  std::vector<int32_t> logits_row;  // [R] row of `logits`, or -1
  // After kEngineFault for logits that are not finite: the rows concerned; all other rows are right. Empty: the whole pass is lost.
  std::vector<int32_t> faulty_rows;
};

// The root path of one segment that the engine keeps. For certain segments: all rows.
struct Accepted {
  int32_t segment = 0;
  std::vector<int32_t> rows;  // row indices in the forest, root first, each the parent of the next
  std::vector<int32_t> next;  // [rows] the token that follows each row (next[i] is the token of rows[i+1]; the last one is
                              // the new anchor, or the next prompt token)
  bool feed_drafter = false;  // append drafter context for these rows (needed if this sequence may ever draft)
  bool feed_mtp = false;      // append MTP rows (row i from token next[i] and the target's hidden state of row i)
};

struct DraftQuery {
  int32_t slot = -1;
  std::span<const int32_t> pages;
  int32_t context = 0;  // committed length = position of the anchor
  int32_t anchor = 0;   // token sampled, not yet run
};

// Best candidates of each drafted position, true log-probs (logsumexp over the real vocabulary), best first, ties by smaller id.
struct DraftOutput {
  int32_t positions = 0, top_k = 0;  // positions = block - 1 (DFlash)
  std::vector<int32_t> token;        // [B, positions, top_k]
  std::vector<float> log_prob;       // [B, positions, top_k]
};

enum class Precision {
  kFloat32,
  kBfloat16Boundaries,  // CPU: round activations to BF16 where the CUDA ops do, to compare twins
};

struct ExecutorOptions {
  int32_t page_size = 32;  // tokens a page
  int32_t pages = 0;       // in each pool
  int32_t slots = 0;
  int32_t max_rows = 512;      // of one forest
  int32_t max_logit_rows = 0;  // rows of one forest that may want logits; 0: max_rows
  // Tentative segments must lie within the first so many rows of a forest; 0: max_rows. What a commit needs of a row (2.5 MiB of a 27B) is
  // kept for these alone.
  int32_t max_tentative_rows = 0;
  int32_t real_vocab = 0;  // ids the tokenizer knows; rows past them are padding. 0: every row of embed_tokens
  int32_t top_k = 32;      // candidates that a draft may be asked for without further workspace
  int threads = 0;         // 0: all cores; ranks in one process have equal parts of them
  int32_t tp_size = 1;     // ranks that share the target's weights (model/shard.h)
  Precision precision = Precision::kFloat32;
  bool bfloat16_residual = false;   // with kBfloat16Boundaries: round the residual stream too (default: float32, as on CUDA)
  bool single_allocations = false;  // CUDA: each buffer by itself, for compute-sanitizer; default: one block of the memory plan's size
  bool graphs = true;               // CUDA: passes of up to 128 rows are recorded and replayed; false: launched kernel by kernel, same bits
  ops::LoadOptions loading;         // of the weights; forgotten when they are loaded
};

class Executor {
 public:
  virtual ~Executor() = default;

  virtual const ModelSpec& target() const = 0;
  virtual const DrafterSpec* drafter() const = 0;  // null: none loaded
  virtual bool has_mtp() const = 0;
  virtual const ExecutorOptions& options() const = 0;
  virtual int32_t real_vocab() const = 0;  // ids >= this never come out
  // Why no later call can succeed (a rank of several was lost); ok: none knows. Then the process has to end.
  virtual Status lost() const { return {}; }
  // Logit gap under which another pass over the same tokens (other rows, kernels, splits) may choose otherwise: rounding of the
  // activations.
  virtual float near_tie() const { return 0.01f; }

  // Empties a slot (zero state and window, no MTP hidden) for a new sequence.
  virtual void reset_slot(int32_t slot) = 0;

  // Runs the target over the forest. kEngineFault if a logit row is not finite, naming the row and sequence.
  virtual Status forward(const Forest& forest, PassOutput* output) = 0;

  // One row of the last pass's logits, by PassOutput::logits_row; valid until the next call of anything here. Where the pass has chosen,
  // only rows of greedy segments and those not chosen: the op that chooses may change the others (ops/sample_rows.h).
  virtual Result<const float*> row_logits(const PassOutput& output, int32_t logits_row) {
    return output.logits + static_cast<int64_t>(logits_row) * target().vocab_size;
  }

  // The device side of the commit point, once after each forward(), for every segment that keeps rows: folds delta-rule factors and
  // shifts conv windows of tentative segments, appends their K/V from scratch to pages; appends drafter context and MTP rows.
  // A tentative segment that is not named leaves no trace.
  virtual Status commit(const Forest& forest, std::span<const Accepted> accepted) = 0;

  // DFlash: one block [anchor, mask × (block - 1)] a query, over its committed drafter context.
  virtual Status draft(std::span<const DraftQuery> queries, int32_t top_k, DraftOutput* output) = 0;

  // NEXTN: `steps` recursive greedy drafts by the MTP head (top_k = 1, positions = steps). Leaves MTP context at the committed rows.
  virtual Status draft_nextn(std::span<const DraftQuery> queries, int32_t steps, DraftOutput* output) = 0;

  // Rows that a pass of so many rows, none of them a prompt's, really runs: more where passes are padded to recorded shapes.
  virtual int32_t padded_rows(int32_t rows) const { return rows; }

  // For measurements (ops/backend.h).
  virtual void time_ops(bool) {}
  virtual std::vector<ops::OpTime> op_times() { return {}; }
  // While on, device_ms() gives what drafts, passes and commits took of the device since it was last asked, as far as they were waited for.
  virtual void time_device(bool) {}
  virtual double device_ms() { return 0; }
  // Runs of a pass until it is as fast as it will be: where passes are recorded, the third of a shape is the first that shows it.
  virtual int32_t warm_up_runs() const { return 0; }
  virtual Result<ops::DeviceRates> measure_rates() { return Status(Code::kUnavailable, "this executor measures no rates"); }
};

}  // namespace ddtree
