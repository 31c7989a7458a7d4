// The ops of the CUDA backend: each uploads what was staged, then enqueues its kernels.
#include <algorithm>
#include <cstring>

#include "ops/cuda/cuda_backend.h"

namespace ddtree::ops::cuda {
namespace {

const CudaWeight& of(const Weight* w) { return *static_cast<const CudaWeight*>(w); }
const kernels::Rope& of(const RopeTable* r) { return static_cast<const CudaRope*>(r)->table; }

}  // namespace

void CudaBackend::embed(const EmbedArgs& a) {
  flush();
  const CudaWeight& w = of(a.weight);
  check(kernels::embed(stream_, a.token, a.rows, w.data, w.bf16, w.k(), a.y), "embed");
}

void CudaBackend::copy_rows(const CopyRowsArgs& a) {
  if (a.count == 0) return;
  flush();
  check(kernels::copy_rows(stream_, a), "copy_rows");
}

void CudaBackend::rms_norm(const RmsNormArgs& a) { flush(), check(kernels::rms_norm(stream_, a), "rms_norm"); }
void CudaBackend::add_rms_norm(const AddRmsNormArgs& a) { flush(), check(kernels::add_rms_norm(stream_, a), "add_rms_norm"); }
void CudaBackend::gated_rms_norm(const GatedRmsNormArgs& a) { flush(), check(kernels::gated_rms_norm(stream_, a), "gated_rms_norm"); }
void CudaBackend::silu_mul(const SiluMulArgs& a) { flush(), check(kernels::silu_mul(stream_, a), "silu_mul"); }

// Own kernels read the weights once for up to 128 rows on Hopper, and beat the library there; other cards' kernel is for few rows.
bool CudaBackend::library_linear(const CudaWeight& w, const LinearArgs& a) {
  const int64_t own = w.mapped ? 128 : 32;
  if (!blas_ || !w.bf16 || a.x.rows <= own || w.k() % 8 || a.x.stride % 8 || reinterpret_cast<uintptr_t>(a.x.data) % 16) return false;
  const Result<bool> done = blas_->linear(stream_, w.data, w.n(), w.k(), a.x, a.y, blas_work_);
  if (done.ok() && !*done) return false;
  check(cudaSuccess, "linear (cuBLASLt)");
  if (!done.ok() && error_.ok()) error_ = done.status();
  return true;
}

void CudaBackend::linear(const LinearArgs& a) {
  flush();
  const CudaWeight& w = of(a.weight);
  if (library_linear(w, a)) return;
  // linear_add_norm leaves a scale only where the kernels for few rows take what follows.
  if (a.scale.parts > 0 && !(w.mapped && few_rows_map(a.x))) return check(cudaErrorInvalidValue, "linear (of rows without their scale)");
  if (w.mapped) {
    constexpr int64_t kMost = 128;
    for (int64_t first = 0; first < a.x.rows; first += kMost) {
      const int64_t rows = std::min(kMost, a.x.rows - first);
      const Tensor x = a.x.row_range(first, rows), y = a.y.row_range(first, rows);
      const CUtensorMap* map = few_rows_map(x);
      if (!map) {
        check(kernels::linear_portable(stream_, w.data, w.bf16, x, w.n(), w.k(), y), "linear");
        continue;
      }
      check(kernels::linear_few_rows(stream_, few_rows_weight(w, w.map), *map, static_cast<int>(rows), y, a.scale), "linear");
    }
    return;
  }
  check(kernels::linear_portable(stream_, w.data, w.bf16, a.x, w.n(), w.k(), a.y), "linear");
}

void CudaBackend::linear_silu(const LinearSiluArgs& a) {
  const CudaWeight& w = of(a.weight);
  const CUtensorMap* map = w.paired ? few_rows_map(a.x) : nullptr;
  if (!map) return Backend::linear_silu(a);
  flush();
  check(kernels::linear_silu_few_rows(stream_, few_rows_weight(w, w.pairs), *map, static_cast<int>(a.x.rows), a.y, a.scale), "linear_silu");
}

RowScale CudaBackend::linear_add_norm(const LinearAddNormArgs& a) {
  const CudaWeight& w = of(a.weight);
  const auto aligned = [](const Tensor& t, int64_t bytes) {
    return reinterpret_cast<uintptr_t>(t.data) % static_cast<size_t>(bytes) == 0 && t.stride * t.size() % bytes == 0;
  };
  const CUtensorMap* map = nullptr;
  if (a.next && w.mapped && of(a.next).mapped && kernels::few_rows_norms(w.n(), w.tile) && a.squares.rows >= a.x.rows &&
      few_rows_map(a.y) && aligned(a.residual, 16) && aligned(a.w, 16) && aligned(a.squares, 16) && aligned(a.y, 8) && aligned(a.tap, 8))
    map = few_rows_map(a.x);
  if (!map) return Backend::linear_add_norm(a);
  flush();
  check(kernels::linear_add_norm_few_rows(stream_, few_rows_weight(w, w.map), *map, static_cast<int>(a.x.rows), a), "linear_add_norm");
  return {a.squares, static_cast<int32_t>((w.n() + w.tile - 1) / w.tile), w.n(), a.eps};
}

void CudaBackend::attention_prepare(const AttentionPrepareArgs& a) {
  flush();
  const kernels::KvStorage scratch = layer_of(static_cast<CudaKvScratch*>(a.scratch)->all, a.scratch_layer);
  kernels::KvStorage pool;
  if (a.pool) pool = layer_of(static_cast<CudaKvPool*>(a.pool)->all, a.pool_layer);
  check(kernels::attention_prepare(stream_, a, of(a.rope), scratch, a.pool ? &pool : nullptr), "attention_prepare");
}

void CudaBackend::attention(const AttentionArgs& a) {
  flush();
  kernels::AttentionCall c;
  c.forest = a.forest, c.heads = a.heads, c.count = a.row ? a.count : a.forest->rows, c.row = a.row;
  c.q = a.q, c.o = a.o, c.packed = a.packed, c.gate = a.gate;
  c.scratch = layer_of(static_cast<const CudaKvScratch*>(a.scratch)->all, a.scratch_layer);
  if (a.pool) c.pool = layer_of(static_cast<const CudaKvPool*>(a.pool)->all, a.pool_layer);
  if (c.count > 0) check(kernels::attention(stream_, c, attention_work_), "attention");
}

void CudaBackend::draft_attention(const DraftAttentionArgs& a) {
  flush();
  kernels::AttentionCall c;
  c.forest = a.forest, c.heads = a.heads, c.count = a.forest->rows;
  c.q = a.q, c.o = a.o, c.bidirectional = !a.causal, c.window = a.window;
  c.scratch = layer_of(static_cast<const CudaKvScratch*>(a.scratch)->all, a.scratch_layer);
  if (a.pool) c.pool = layer_of(static_cast<const CudaKvPool*>(a.pool)->all, a.pool_layer);
  check(kernels::attention(stream_, c, attention_work_), "draft_attention");
}

void CudaBackend::draft_context(const DraftContextArgs& a) {
  if (a.rows == 0) return;
  flush();
  check(kernels::draft_context(stream_, a, of(a.rope), static_cast<CudaKvPool*>(a.pool)->all), "draft_context");
}

void CudaBackend::kv_commit(const KvCommitArgs& a) {
  flush();
  const auto& scratch = *static_cast<const CudaKvScratch*>(a.scratch);
  check(kernels::kv_commit(stream_, a, scratch.all, static_cast<CudaKvPool*>(a.pool)->all, scratch.shape().layers), "kv_commit");
}

void CudaBackend::conv(const ConvArgs& a) {
  flush();
  const auto& trace = *static_cast<CudaDeltaTrace*>(a.trace);
  check(kernels::conv(stream_, a, static_cast<CudaStatePool*>(a.states)->storage, trace.storage), "conv");
}

void CudaBackend::delta_rule(const DeltaRuleArgs& a) {
  flush();
  // More rows would write past the window's arrays in shared memory.
  if (a.forest->max_segment_rows == 0 || a.forest->max_tree_rows > kernels::kDeltaPath)
    return check(cudaErrorInvalidValue, "delta_rule (a tree of too many rows)");
  const auto& trace = *static_cast<CudaDeltaTrace*>(a.trace);
  check(kernels::delta_rule(stream_, a, static_cast<CudaStatePool*>(a.states)->storage, trace.storage, trace.work), "delta_rule");
}

void CudaBackend::gated_delta_mixer(const GatedDeltaMixerArgs& a) {
  flush();
  // More rows would write past the window's arrays in shared memory.
  if (a.forest->max_segment_rows == 0 || a.forest->max_tree_rows > kernels::kDeltaPath)
    return check(cudaErrorInvalidValue, "gated_delta_mixer (a tree of too many rows)");
  const auto& trace = *static_cast<CudaDeltaTrace*>(a.trace);
  check(kernels::gated_delta_mixer(stream_, a, static_cast<CudaStatePool*>(a.states)->storage, trace.storage, trace.work),
        "gated_delta_mixer");
}

void CudaBackend::delta_commit(const DeltaCommitArgs& a) {
  flush();
  check(kernels::delta_commit(stream_, a, static_cast<CudaStatePool*>(a.states)->storage,
                              static_cast<const CudaDeltaTrace*>(a.trace)->storage),
        "delta_commit");
}

void CudaBackend::finish_logits(const FinishLogitsArgs& a) {
  flush();
  auto* bad = reinterpret_cast<int32_t*>(take_results(sizeof(int32_t)));
  if (!bad) return;
  check(cudaMemsetAsync(bad, 0xFF, sizeof(int32_t), stream_), "finish_logits");
  check(kernels::finish_logits(stream_, a.logits, a.real_vocab, bad), "finish_logits");
  later(a.bad_row, bad, sizeof(int32_t));
}

void CudaBackend::top_k_log_probs(const TopKArgs& a) {
  flush();
  const int64_t values = a.logits.rows * a.top_k;
  std::byte* results = take_results(256 + values * 8 + a.logits.rows * 4);
  if (!results) return;
  auto* bad = reinterpret_cast<int32_t*>(results);
  auto* row_bad = reinterpret_cast<int32_t*>(results + 256);
  auto* token = row_bad + a.logits.rows;
  auto* log_prob = reinterpret_cast<float*>(token + values);
  const cudaError_t fast = work_fits(layout::logits_work(a.logits.rows, a.real_vocab, a.top_k))
                               ? kernels::best_of_rows(stream_, a.logits, a.real_vocab, a.top_k, true, work_, token, log_prob, row_bad)
                               : cudaErrorNotSupported;
  if (fast == cudaErrorNotSupported) {
    check(cudaMemsetAsync(bad, 0xFF, sizeof(int32_t), stream_), "top_k_log_probs");
    check(kernels::top_k_log_probs(stream_, a.logits, a.real_vocab, a.top_k, token, log_prob, bad), "top_k_log_probs");
    later(a.bad_row, bad, sizeof(int32_t));
  } else {
    check(fast, "top_k_log_probs");
    later(
        [to = a.bad_row](const std::byte* from, int64_t bytes) {
          const auto* flag = reinterpret_cast<const int32_t*>(from);
          *to = -1;
          for (int64_t r = bytes / 4 - 1; r >= 0; --r)
            if (flag[r]) *to = static_cast<int32_t>(r);
        },
        row_bad, a.logits.rows * 4);
  }
  later(a.token, token, values * 4);
  later(a.log_prob, log_prob, values * 4);
}

void CudaBackend::best_two(const BestTwoArgs& a) {
  flush();
  const int64_t rows = a.logits.rows;
  std::byte* results = take_results(rows * 20);
  if (!results) return;
  auto* bad = reinterpret_cast<int32_t*>(results);
  auto* token = bad + rows;
  auto* score = reinterpret_cast<float*>(token + 2 * rows);
  if (!work_fits(layout::logits_work(rows, a.real_vocab, 2))) return;
  check(kernels::best_of_rows(stream_, a.logits, a.real_vocab, 2, false, work_, token, score, bad), "best_two");
  later(
      [a, rows](const std::byte* from, int64_t) {
        const auto* flag = reinterpret_cast<const int32_t*>(from);
        const int32_t* id = flag + rows;
        const auto* value = reinterpret_cast<const float*>(id + 2 * rows);
        for (int64_t r = 0; r < rows; ++r) a.bad[r] = flag[r] != 0, a.token[r] = id[2 * r], a.margin[r] = value[2 * r] - value[2 * r + 1];
      },
      results, rows * 20);
}

void CudaBackend::sample_rows(const SampleRowsArgs& a) {
  flush();
  const int64_t rows = a.logits.rows;
  std::byte* results = take_results(rows * 12);
  if (!results || !work_fits(layout::sample_work(rows, a.real_vocab))) return;
  auto* token = reinterpret_cast<int32_t*>(results);
  auto* margin = reinterpret_cast<float*>(token + rows);
  auto* bad = reinterpret_cast<int32_t*>(margin + rows);
  check(kernels::sample_rows(stream_, a, work_, token, margin, bad), "sample_rows");
  later(
      [token_to = a.token, margin_to = a.margin, bad_to = a.bad, rows](const std::byte* from, int64_t) {
        std::memcpy(token_to, from, static_cast<size_t>(rows) * 4);
        std::memcpy(margin_to, from + rows * 4, static_cast<size_t>(rows) * 4);
        const auto* flag = reinterpret_cast<const int32_t*>(from) + 2 * rows;
        for (int64_t r = 0; r < rows; ++r) bad_to[r] = flag[r] != 0;
      },
      results, rows * 12);
}

}  // namespace ddtree::ops::cuda
