// sample_rows: penalties and bans in place, then every slice of a row by itself. sample_join.cu makes a choice of a row's slices.
//
// What a filter-free row needs of its 248,000 tokens is the two best sums of logit and noise. Scores to 2e-4 are enough to tell all but a
// few tokens of a slice from its best two; only those few get the exact score, in float64 as on the host. A row that is filtered needs its
// largest logit, the sum of its exponentials and where large logits stand: the largest of each group of 32.
#include "kernels/sample_rows.cuh"

namespace ddtree::kernels {
namespace {

using namespace sampling;  // NOLINT(google-build-using-namespace)

constexpr int kEditThreads = 256;
constexpr int kMostPath = 512;  // tokens of a path; a row with more is left to the host

// A block a row.
__global__ void __launch_bounds__(kEditThreads) edit_kernel(const Rows a) {
  __shared__ int path[kMostPath], listed[kMostPath];
  __shared__ int length;
  pdl_begin();
  const int row = forest_row(a, blockIdx.x);
  if (threadIdx.x == 0) a.left[blockIdx.x] = 0;
  if (row < 0) return;
  const ops::SampleRule& rule = a.rule[a.segment_of[row]];
  const float repetition = rule.params.repetition_penalty, frequency = rule.params.frequency_penalty,
              presence = rule.params.presence_penalty;
  const bool repeats = repetition != 1, charges = frequency != 0 || presence != 0;
  const int banned = a.position[row] + 1 < rule.banned_end ? rule.banned : 0;
  if (!repeats && !charges && banned == 0) return;
  if (threadIdx.x == 0) {
    int n = 0;
    for (int r = row; (repeats || charges) && r >= 0 && a.position[r] >= rule.history_end; r = a.parent[r]) {
      if (n == kMostPath) {
        n = -1;
        break;
      }
      listed[n] = 0, path[n++] = a.token[r];
    }
    length = n;
    if (n < 0) a.left[blockIdx.x] = 1;
  }
  __syncthreads();
  const int n = length;
  if (n < 0) return;
  float* logits = a.logits + blockIdx.x * a.stride;
  const auto penalise = [&](int id, int times) {  // the arithmetic of ops::sample, operation for operation
    if (id < 0 || id >= a.real) return;
    float x = logits[id];
    if (!isfinite(x)) return;
    if (repeats) x = x > 0 ? __fdiv_rn(x, repetition) : __fmul_rn(x, repetition);
    if (charges && times > 0) x = __fsub_rn(__fsub_rn(x, __fmul_rn(frequency, static_cast<float>(times))), presence);
    logits[id] = x;
  };
  for (int i = threadIdx.x; i < rule.seen; i += kEditThreads) {
    const int id = a.list[rule.first_seen + 2 * i];
    int times = a.list[rule.first_seen + 2 * i + 1];
    for (int j = 0; j < n; ++j)
      if (path[j] == id) ++times, listed[j] = 1;
    penalise(id, times);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < n; i += kEditThreads) {
    int times = 0;
    bool first = true;
    for (int j = 0; j < n; ++j) times += path[j] == path[i], first &= j >= i || path[j] != path[i];
    if (first && !listed[i]) penalise(path[i], times);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < banned; i += kEditThreads) {
    const int id = a.list[rule.first_banned + i];
    if (id >= 0 && id < a.real && isfinite(logits[id])) logits[id] = kNothing;
  }
}

struct Best {
  float value = -INFINITY;
  int id = INT32_MAX;
};
__device__ __forceinline__ Best warp_best(Best b) {
#pragma unroll
  for (int o = 16; o > 0; o >>= 1) {
    const Best other{__shfl_xor_sync(0xffffffffu, b.value, o), __shfl_xor_sync(0xffffffffu, b.id, o)};
    if (before(other.value, other.id, b.value, b.id)) b = other;
  }
  return b;
}

__global__ void __launch_bounds__(kSliceThreads) slice_kernel(const Rows a) {
  constexpr int kWarps = kSliceThreads / 32;
  __shared__ Best best[kWarps];
  __shared__ Pair pairs[kWarps];
  __shared__ Two twos[kWarps];
  __shared__ double sums[kWarps];
  __shared__ float lows[kWarps];
  pdl_begin();
  const int row = forest_row(a, blockIdx.y), lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (row < 0) return;
  const ops::SampleRule& rule = a.rule[a.segment_of[row]];
  const float* logits = a.logits + blockIdx.y * a.stride;
  const int first_quad = blockIdx.x * (kSlice / 4) + threadIdx.x;
  float x[kQuads * 4];
  Best mine;
  Pair values;
  bool bad = false;
#pragma unroll
  for (int i = 0; i < kQuads; ++i) {
    const int q = first_quad + i * kSliceThreads;
    float4 v = {-INFINITY, -INFINITY, -INFINITY, -INFINITY};
    if (4 * q < a.real) v = raw_quad(a, logits, q);
    x[4 * i] = v.x, x[4 * i + 1] = v.y, x[4 * i + 2] = v.z, x[4 * i + 3] = v.w;
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const int id = 4 * q + c;
      bad |= id < a.real && !isfinite(x[4 * i + c]);
      x[4 * i + c] = usable(x[4 * i + c], id, a.real);
      if (x[4 * i + c] > mine.value) mine = {x[4 * i + c], id};  // ids rise: of equals the first stays
      values.add(x[4 * i + c]);
    }
  }
  const int any_bad = __syncthreads_or(bad);
  mine = warp_best(mine);
  const Pair warp_values = warp_pair(values);
  if (lane == 0) best[warp] = mine, pairs[warp] = warp_values;
  __syncthreads();
  Best top = best[0];
  for (int w = 1; w < kWarps; ++w)
    if (before(best[w].value, best[w].id, top.value, top.id)) top = best[w];
  Slice* out = a.slice + static_cast<int64_t>(blockIdx.y) * a.slices + blockIdx.x;
  if (rule.params.temperature <= 0) {
    if (threadIdx.x == 0) {
      Pair all = pairs[0];
      for (int w = 1; w < kWarps; ++w) all.join(pairs[w]);
      *out = {0, 0, top.value, all.second, top.id, any_bad};
    }
    return;
  }
  const float inverse = 1.0f / rule.params.temperature;
  if (filtered(rule.params, a.real)) {
    a.group[(static_cast<int64_t>(blockIdx.y) * a.slices + blockIdx.x) * kSliceThreads + threadIdx.x] = values.first;
    float part = 0, low = INFINITY;
#pragma unroll
    for (int i = 0; i < kQuads * 4; ++i)
      if (x[i] != -INFINITY) part += __expf((x[i] - top.value) * inverse), low = fminf(low, x[i]);
    double sum = part;
#pragma unroll
    for (int o = 16; o > 0; o >>= 1) {
      sum += __shfl_xor_sync(0xffffffffu, sum, o);
      low = fminf(low, __shfl_xor_sync(0xffffffffu, low, o));
    }
    if (lane == 0) sums[warp] = sum, lows[warp] = low;
    __syncthreads();
    if (threadIdx.x == 0) {
      for (int w = 1; w < kWarps; ++w) sum += sums[w], low = fminf(low, lows[w]);
      *out = {sum, 0, top.value, low, top.id, any_bad};
    }
    return;
  }
  // Near scores, relative to the slice's largest logit; then the exact ones of those that may be among the best two.
  const uint64_t seed = rule.params.seed;
  const uint32_t choice = rule.params.choice;
  const int position = a.position[row] + 1;
  Pair scores;
#pragma unroll
  for (int i = 0; i < kQuads; ++i) {
    const int q = first_quad + i * kSliceThreads;
    if (4 * q >= a.real) continue;
    const Words w = words(seed, choice, position, q);
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      x[4 * i + c] = (x[4 * i + c] - top.value) * inverse + near_gumbel(w.w[c]);
      scores.add(x[4 * i + c]);
    }
  }
  scores = warp_pair(scores);
  if (lane == 0) pairs[warp] = scores;
  __syncthreads();
  for (int w = 0; w < kWarps; ++w)
    if (w != warp) scores.join(pairs[w]);
  const float enough = scores.second - slack(scores.second);  // -inf: there are not two
  uint32_t worth = 0;
#pragma unroll
  for (int i = 0; i < kQuads * 4; ++i) worth |= x[i] != -INFINITY && x[i] >= enough ? 1u << i : 0;
  const double exact_inverse = 1.0 / static_cast<double>(rule.params.temperature);
  Two two;
  for (; worth != 0; worth &= worth - 1) {
    const int i = __ffs(static_cast<int>(worth)) - 1, q = first_quad + i / 4 * kSliceThreads, id = 4 * q + i % 4;
    if (id >= a.real) continue;
    const Words w = words(seed, choice, position, q);
    const uint32_t word = i % 4 == 0 ? w.w[0] : i % 4 == 1 ? w.w[1] : i % 4 == 2 ? w.w[2] : w.w[3];
    two.add(static_cast<double>(logits[id]) * exact_inverse + exact_gumbel(word), id);
  }
  two = warp_two(two);
  if (lane == 0) twos[warp] = two;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int w = 1; w < kWarps; ++w) two.join(twos[w]);
    *out = {two.first, two.second, top.value, 0, two.id, any_bad};
  }
}

}  // namespace

cudaError_t sample_rows(cudaStream_t stream, const ops::SampleRowsArgs& args, void* work, int32_t* token, float* margin, int32_t* bad) {
  const ops::Forest& f = *args.forest;
  const int64_t slices = (args.real_vocab + kSlice - 1) / kSlice;
  const auto most = static_cast<int64_t>(ops::cuda::kSampleRows);
  Rows a{};
  a.stride = args.logits.stride, a.real = static_cast<int>(args.real_vocab), a.slices = static_cast<int>(slices);
  a.quads = args.logits.stride % 4 == 0 && args.logits.cols % 4 == 0 && reinterpret_cast<uintptr_t>(args.logits.data) % 16 == 0;
  a.segment_of = f.segment_of, a.token = f.token, a.position = f.position, a.parent = f.parent, a.list = f.pages, a.rule = args.rule;
  a.row = args.row;
  const int64_t held = args.logits.rows < most ? args.logits.rows : most;
  a.slice = static_cast<Slice*>(work);
  a.group = reinterpret_cast<float*>(a.slice + held * slices);
  a.left = reinterpret_cast<int32_t*>(a.group + held * slices * kSliceThreads);
  for (int64_t first = 0; first < args.logits.rows; first += most) {
    const int count = static_cast<int>(args.logits.rows - first < most ? args.logits.rows - first : most);
    a.first = static_cast<int>(first);
    a.logits = as_f32(args.logits) + first * a.stride;
    a.token_out = token + first, a.margin_out = margin + first, a.bad_out = bad + first;
    cudaError_t e = launch(edit_kernel, dim3(static_cast<unsigned>(count)), dim3(kEditThreads), 0, stream, a);
    if (e == cudaSuccess)
      e = launch(slice_kernel, dim3(static_cast<unsigned>(slices), static_cast<unsigned>(count)), dim3(kSliceThreads), 0, stream, a);
    if (e == cudaSuccess) e = choose_rows(stream, a, count);
    if (e != cudaSuccess) return e;
  }
  return cudaSuccess;
}

}  // namespace ddtree::kernels
