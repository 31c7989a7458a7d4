// Launchers of the device code, one group a kernel file. They enqueue and return the launch's error; contracts are the ops' (src/ops/*.h).
// `storage` structs are how ops/cuda/ lays out what the ops know as opaque handles.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "ops/backend.h"
#include "ops/cuda/layout.h"

namespace ddtree::kernels {

// --- probe.cu: the current device --------------------------------------------------------------------------------------------------------
int binary_version();    // 90: machine code or compiled PTX for 9.0; -1: none of this build's code runs there
bool has_hopper_code();  // the sm_90a variant was chosen

// --- measure.cu ------------------------------------------------------------------------------------------------------------------------
cudaError_t read_all(cudaStream_t stream, const void* memory, int64_t bytes, void* out, int multiprocessors);  // out: 4 bytes
// BF16 values of a Fill (model/tensor.h).
cudaError_t fill(cudaStream_t stream, void* out, int64_t count, uint32_t seed, float centre, float spread);

// --- rows.cu ---------------------------------------------------------------------------------------------------------------------------
cudaError_t embed(cudaStream_t stream, const int32_t* token, int rows, const void* weight, bool weight_bf16, int64_t hidden,
                  const ops::Tensor& y);
cudaError_t copy_rows(cudaStream_t stream, const ops::CopyRowsArgs& a);
cudaError_t rms_norm(cudaStream_t stream, const ops::RmsNormArgs& a);
cudaError_t add_rms_norm(cudaStream_t stream, const ops::AddRmsNormArgs& a);
cudaError_t gated_rms_norm(cudaStream_t stream, const ops::GatedRmsNormArgs& a);
cudaError_t silu_mul(cudaStream_t stream, const ops::SiluMulArgs& a);

// --- linear_few_rows.cu (sm_90a), linear_portable.cu (any) -------------------------------------------------------------------------------
int few_rows_bucket(int rows);                      // 8, 16, 32, 64, 128; 0: too many
int few_rows_tile(int64_t n, int multiprocessors);  // weight rows a tile, a multiple of 8, at most 128
struct FewRowsWeight {
  const CUtensorMap* map = nullptr;  // [n, k] with box {64, tile}; for SiLU {k, 4, gate | up, n / 8} with box {64, 4, 2, tile / 8}
  int64_t n = 0, k = 0;
  int tile = 0, multiprocessors = 1;
  size_t shared_limit = 0;  // bytes a block may use
};
// Maps are of BF16 with 128-byte swizzle; `rows` is [rows, k] with box {64, bucket}.
cudaError_t linear_few_rows(cudaStream_t stream, const FewRowsWeight& w, const CUtensorMap& rows, int row_count, const ops::Tensor& y,
                            const ops::RowScale& scale);
cudaError_t linear_silu_few_rows(cudaStream_t stream, const FewRowsWeight& w, const CUtensorMap& rows, int row_count, const ops::Tensor& y,
                                 const ops::RowScale& scale);
// Leaves the scale to the next product: args.squares gets a partial sum of squares for each of the ceil(n / tile) tiles. Residual, w and
// squares begin at multiples of 16 bytes, y and tap at multiples of 8, in every row.
bool few_rows_norms(int64_t n, int tile);  // whether this form takes a weight
cudaError_t linear_add_norm_few_rows(cudaStream_t stream, const FewRowsWeight& w, const CUtensorMap& rows, int row_count,
                                     const ops::LinearAddNormArgs& args);
// Any card, any row count, BF16 or float32 weights.
cudaError_t linear_portable(cudaStream_t stream, const void* weight, bool weight_bf16, const ops::Tensor& x, int64_t n, int64_t k,
                            const ops::Tensor& y);

// --- attention.cu ------------------------------------------------------------------------------------------------------------------------
struct KvStorage {                           // BF16, K and V alike
  __nv_bfloat16 *k = nullptr, *v = nullptr;  // [layers, places, kv_heads, head_dim]; places = pages · page_size, or scratch rows
  int64_t layer_stride = 0;                  // elements
  int kv_heads = 0, head_dim = 0, page_size = 0;
  // Of all layers' places [layers · places, kv_heads · head_dim] with boxes {64, 32}, 128-byte swizzled; null: none. map_row: of this
  // layer.
  const CUtensorMap *k_map = nullptr, *v_map = nullptr;
  int map_row = 0;
};
struct Rope {
  const float *cos = nullptr, *sin = nullptr;  // [positions, rotary_dim / 2]
  int rotary_dim = 0;
};
cudaError_t attention_prepare(cudaStream_t stream, const ops::AttentionPrepareArgs& a, const Rope& rope, const KvStorage& scratch,
                              const KvStorage* pool);
struct AttentionWork {  // partial results of the parts of a context (attention.cuh)
  float* partial = nullptr;
  int64_t capacity = 0;     // floats
  size_t shared_limit = 0;  // bytes a block may use
  bool hopper = false;      // the card runs sm_90a code, and may
};
// Both attentions: `gate` null for drafters; window 0: unbounded; bidirectional: all rows of the segment are visible.
struct AttentionCall {
  const ops::Forest* forest = nullptr;
  int heads = 0, count = 0;      // count: rows computed
  const int32_t* row = nullptr;  // or all
  ops::Tensor q, o, packed;
  bool gate = false, bidirectional = false;
  int64_t window = 0;
  KvStorage scratch, pool;  // already at their layer
  bool has_pool = false;
};
cudaError_t attention(cudaStream_t stream, const AttentionCall& a, const AttentionWork& work);
cudaError_t draft_context(cudaStream_t stream, const ops::DraftContextArgs& a, const Rope& rope, const KvStorage& pool);
cudaError_t kv_commit(cudaStream_t stream, const ops::KvCommitArgs& a, const KvStorage& scratch, const KvStorage& pool, int layers);

// --- delta.cu ----------------------------------------------------------------------------------------------------------------------------
struct DeltaStorage {               // a StatePool
  float* state = nullptr;           // [layers, slots, value_heads, key_dim, value_dim]
  __nv_bfloat16* window = nullptr;  // [layers, slots, width - 1, channels]
  int slots = 0;
  ops::DeltaShape shape;
};
struct TraceStorage {              // a DeltaTrace: of tentative rows, which are a pass's first ones; certain rows write nothing here
  float* k = nullptr;              // [layers, rows, key_heads, key_dim] normed
  float* u = nullptr;              // [layers, rows, value_heads, value_dim]
  double* gate = nullptr;          // [layers, rows, value_heads] cumulated along the path
  __nv_bfloat16* input = nullptr;  // [layers, rows, channels]
  int rows = 0;
};
struct DeltaWork {
  float* q = nullptr;        // [rows of a pass, key_heads, key_dim] normed and scaled
  float* k = nullptr;        // the same, normed
  float* dots = nullptr;     // [rows of a pass, key_heads, kDeltaPath, 2]: k_j·k_i, k_j·q_i for the j-th row of i's window
  int32_t* turns = nullptr;  // [segments, key_heads, 4] zeros between launches: blocks of a key head that have read the window
  uint8_t* tile = nullptr;   // [tiles, value_heads, ops::cuda::kDeltaTileBytes]: chunks of certain segments (delta_chunk.cu)
  int tiles = 0;             // chunks computed together
  size_t shared_limit = 0;   // bytes a block may use
  bool pairs = false;        // clusters of two blocks may be launched
};
using ops::cuda::kDeltaPath;
// conv by conv_rows.cu; cudaErrorNotSupported: not four taps, or rows that do not begin at multiples of 16 bytes. The window stays as it
// is.
cudaError_t conv_rows(cudaStream_t stream, const ops::ConvArgs& a, const DeltaStorage& states, const TraceStorage& trace);
// but_few_rows: segments of few rows (delta.cuh) are left out: states, windows and outputs of theirs stay as they are.
cudaError_t conv(cudaStream_t stream, const ops::ConvArgs& a, const DeltaStorage& states, const TraceStorage& trace,
                 bool but_few_rows = false);
cudaError_t delta_rule(cudaStream_t stream, const ops::DeltaRuleArgs& a, const DeltaStorage& states, const TraceStorage& trace,
                       const DeltaWork& work, bool but_few_rows = false);

// --- delta_few.cu ------------------------------------------------------------------------------------------------------------------------
cudaError_t gated_delta_mixer(cudaStream_t stream, const ops::GatedDeltaMixerArgs& a, const DeltaStorage& states, const TraceStorage& trace,
                              const DeltaWork& work);

// --- delta_commit.cu ---------------------------------------------------------------------------------------------------------------------
cudaError_t delta_commit(cudaStream_t stream, const ops::DeltaCommitArgs& a, const DeltaStorage& states, const TraceStorage& trace);

// --- logits.cu ---------------------------------------------------------------------------------------------------------------------------
// Device results; the backend copies them to the host values that the args name.
cudaError_t finish_logits(cudaStream_t stream, const ops::Tensor& logits, int64_t real_vocab, int32_t* bad_row);
// The top_k best columns of every row, best first, ties by smaller id: token and score [rows, top_k] (log-probabilities, or the logits
// themselves); bad [rows]: 1 where a row holds a NaN or an infinity, else 0. cudaErrorNotSupported: too many for this form
// (top_k > 64, or above 4,096 candidates); top_k_log_probs serves.
// work: ops::cuda::layout::logits_work(rows, real_vocab, top_k) bytes.
cudaError_t best_of_rows(cudaStream_t stream, const ops::Tensor& logits, int64_t real_vocab, int top_k, bool log_probs, void* work,
                         int32_t* token, float* score, int32_t* bad);
cudaError_t top_k_log_probs(cudaStream_t stream, const ops::Tensor& logits, int64_t real_vocab, int top_k, int32_t* token, float* log_prob,
                            int32_t* bad_row);

// --- sample_rows.cu, sample_join.cu ------------------------------------------------------------------------------------------------------
// Device results token, margin, bad [rows]; work: ops::cuda::layout::sample_work(rows, real_vocab) bytes.
cudaError_t sample_rows(cudaStream_t stream, const ops::SampleRowsArgs& args, void* work, int32_t* token, float* margin, int32_t* bad);

}  // namespace ddtree::kernels
