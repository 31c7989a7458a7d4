// sample_rows: a row's choice from its slices, a block a row.
//
// Filters keep a beginning of the tokens in the order of choice (larger logits first, then smaller ids). Where it ends is found without
// sorting: counts and weights of all tokens are added up in 2,048 bins of equal width, which rank as their tokens do, and only the one bin
// in which the end falls is sorted. Weights are integers, so their sums do not depend on the order in which threads come. Groups whose
// largest logit cannot matter are not read again: with top_k those are all but a few dozen.
#include "kernels/sample_rows.cuh"

namespace ddtree::kernels::sampling {
namespace {

constexpr int kThreads = 1024, kWarps = kThreads / 32;
constexpr int kBins = 2048, kListed = 2048;  // two a thread
constexpr int kHeldGroups = 8;               // a thread, while the k-th largest group is looked for
constexpr uint64_t kAll = ~uint64_t{0};

struct Shared {
  uint32_t count[kBins];  // then: of the bins before
  union {
    struct {
      uint32_t weight_low[kBins], weight_high[kBins];
    };
    uint64_t weight[kBins];  // of the bins before
  };
  uint64_t list[kListed];
  uint64_t warp_weight[kWarps];
  uint32_t warp_count[kWarps];
  uint32_t tally[32];
  Two two[kWarps];
  Pair pair[kWarps];
  float extra[kWarps];
  double exact_extra[kWarps];
  // What every thread reads.
  float top, low, from;
  int top_id, bad;
  double sum;
  uint32_t total_count;
  uint64_t total_weight;
  int bin;
  uint32_t listed;
  uint32_t least, most, next;  // rising keys: of the bin's tokens, and the largest behind it
  uint32_t inside;
};

// Where a prefix of the order ends.
struct Edge {
  uint64_t key = kAll;  // the last token inside
  bool exact = true;    // false: the bin held too many tokens, `key` is the end of a whole bin
  bool has_next = false;
  float next = 0;  // the first logit outside
};

class Row {
 public:
  __device__ Row(const Rows& a, int i, Shared& s) : a_(a), s_(s), i_(i) {
    row_ = forest_row(a, i);
    if (row_ < 0) return;
    rule_ = &a.rule[a.segment_of[row_]];
    logits_ = a.logits + i * a.stride;
    group_ = a.group + static_cast<int64_t>(i) * a.slices * kSliceThreads;
  }
  __device__ bool padding() const { return row_ < 0; }

  __device__ void choose() {
    const ops::SampleParams& p = rule_->params;
    const bool greedy = p.temperature <= 0, filters = !greedy && filtered(p, a_.real);
    join_slices(greedy, filters);
    if (s_.bad || a_.left[i_] || s_.top_id == INT32_MAX) return give(s_.bad ? 0 : -1, 0);
    if (!filters) {
      const Two& t = s_.two[0];
      return give(t.id, greedy ? t.first - t.second : (t.first - t.second) * static_cast<double>(p.temperature));
    }
    choose_filtered();
  }

 private:
  // The results; every thread calls it.
  __device__ void give(int token, double margin) const {
    if (threadIdx.x != 0) return;
    a_.token_out[i_] = token;
    a_.margin_out[i_] = fminf(static_cast<float>(margin), kNoRival);
    a_.bad_out[i_] = s_.bad;
  }

  __device__ void join_slices(bool greedy, bool filters) {
    const int lane = threadIdx.x % 32;
    if (threadIdx.x < 32) {
      const Slice* slice = a_.slice + static_cast<int64_t>(i_) * a_.slices;
      float top = -INFINITY, low = INFINITY;
      int top_id = INT32_MAX, bad = 0;
      Two two;
      for (int k = lane; k < a_.slices; k += 32) {
        const Slice x = slice[k];
        bad |= x.bad;
        if (before(x.top, x.id, top, top_id)) top = x.top, top_id = x.id;
        if (greedy) two.join({x.top, x.low, x.id});
        else if (!filters) two.join({x.first, x.second, x.id});
        else low = fminf(low, x.low);
      }
#pragma unroll
      for (int o = 16; o > 0; o >>= 1) {
        const float t = __shfl_xor_sync(0xffffffffu, top, o);
        const int id = __shfl_xor_sync(0xffffffffu, top_id, o);
        if (before(t, id, top, top_id)) top = t, top_id = id;
        low = fminf(low, __shfl_xor_sync(0xffffffffu, low, o));
        bad |= __shfl_xor_sync(0xffffffffu, bad, o);
      }
      two = warp_two(two);
      if (lane == 0) {
        s_.top = top, s_.top_id = top_id, s_.low = low, s_.bad = bad, s_.two[0] = two;
        double sum = 0;
        const float inverse = 1.0f / rule_->params.temperature;
        for (int k = 0; filters && k < a_.slices; ++k)
          if (slice[k].top != -INFINITY) sum += slice[k].first * exp(static_cast<double>((slice[k].top - top) * inverse));
        s_.sum = sum;
      }
    }
    __syncthreads();
  }

  // f(id of the first, four logits) of every quad whose group reaches s_.from; logits that cannot be chosen are -inf.
  template <class F>
  __device__ __forceinline__ void each_quad(float reach, F&& f) const {
    const int quads = (a_.real + 3) / 4;
    for (int q = threadIdx.x; q < quads; q += kThreads) {
      if (group_[q / (kSlice / 4) * kSliceThreads + q % kSliceThreads] < reach) continue;
      const float4 v = raw_quad(a_, logits_, q);
      const int id = 4 * q;
      const float x[4] = {usable(v.x, id, a_.real), usable(v.y, id + 1, a_.real), usable(v.z, id + 2, a_.real),
                          usable(v.w, id + 3, a_.real)};
      f(q, x);
    }
  }

  __device__ __forceinline__ int bin_of(float x) const { return min(static_cast<int>((s_.top - x) * scale_), kBins - 1); }

  // The n-th largest group maximum: at least n tokens are as large.
  __device__ float nth_group(int n) {
    const int groups = a_.slices * kSliceThreads;
    uint32_t key[kHeldGroups];
#pragma unroll
    for (int k = 0; k < kHeldGroups; ++k) {
      const int g = k * kThreads + threadIdx.x;
      key[k] = g < groups ? rising_key(group_[g]) : 0;
    }
    uint32_t found = 0;
    for (int bit = 31; bit >= 0; --bit) {
      const uint32_t trial = found | 1u << bit;
      uint32_t here = 0;
#pragma unroll
      for (int k = 0; k < kHeldGroups; ++k) here += key[k] >= trial;
      here = __reduce_add_sync(0xffffffffu, here);
      if (threadIdx.x % 32 == 0 && here > 0) atomicAdd(&s_.tally[bit], here);
      __syncthreads();
      if (s_.tally[bit] >= static_cast<uint32_t>(n)) found = trial;
    }
    return key_value(static_cast<uint64_t>(~found) << 32);
  }

  // Adds up two values a thread in order: what stands before the thread's first, and the sum of all.
  __device__ uint64_t scan(uint64_t both, uint64_t* all) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    uint64_t sum = both;
#pragma unroll
    for (int o = 1; o < 32; o <<= 1) {
      const uint64_t other = __shfl_up_sync(0xffffffffu, sum, o);
      if (lane >= o) sum += other;
    }
    __syncthreads();
    if (lane == 31) s_.warp_weight[warp] = sum;
    __syncthreads();
    uint64_t ahead = 0, total = 0;
    for (int w = 0; w < kWarps; ++w) {
      if (w == warp) ahead = total;
      total += s_.warp_weight[w];
    }
    *all = total;
    return ahead + sum - both;
  }

  __device__ void fill_bins(bool weigh) {
    for (int b = threadIdx.x; b < kBins; b += kThreads) s_.count[b] = s_.weight_low[b] = s_.weight_high[b] = 0;
    __syncthreads();
    each_quad(s_.from, [&](int, const float(&x)[4]) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        if (!(x[c] >= s_.from) || x[c] == -INFINITY) continue;
        const int b = bin_of(x[c]);
        atomicAdd(&s_.count[b], 1u);
        if (!weigh) continue;
        const uint64_t w = weight(x[c], s_.top, inverse_);
        const uint32_t before_it = atomicAdd(&s_.weight_low[b], static_cast<uint32_t>(w));
        const uint32_t carry = static_cast<uint32_t>(w >> 32) + (before_it + static_cast<uint32_t>(w) < before_it ? 1 : 0);
        if (carry > 0) atomicAdd(&s_.weight_high[b], carry);
      }
    });
    __syncthreads();
    const int b = 2 * threadIdx.x;
    const uint64_t n0 = s_.count[b], n1 = s_.count[b + 1];
    const uint64_t w0 = static_cast<uint64_t>(s_.weight_high[b]) << 32 | s_.weight_low[b],
                   w1 = static_cast<uint64_t>(s_.weight_high[b + 1]) << 32 | s_.weight_low[b + 1];
    uint64_t all_n = 0, all_w = 0;
    const uint64_t n = scan(n0 + n1, &all_n), w = scan(w0 + w1, &all_w);  // ends behind a barrier: all bins are read
    s_.count[b] = static_cast<uint32_t>(n), s_.count[b + 1] = static_cast<uint32_t>(n + n0);
    s_.weight[b] = w, s_.weight[b + 1] = w + w0;
    if (threadIdx.x == 0) s_.total_count = static_cast<uint32_t>(all_n), s_.total_weight = all_w;
    __syncthreads();
    held_ = -1;
  }
  __device__ uint32_t count_to(int b) const { return b + 1 < kBins ? s_.count[b + 1] : s_.total_count; }
  __device__ uint64_t weight_to(int b) const { return b + 1 < kBins ? s_.weight[b + 1] : s_.total_weight; }

  // Brings the tokens of a bin in order. s_.listed counts them also where they are too many to be held.
  __device__ void hold(int bin) {
    if (held_ == bin) return;
    __syncthreads();
    if (threadIdx.x == 0) s_.listed = 0, s_.least = 0xffffffffu, s_.most = 0, s_.next = 0;
    __syncthreads();
    uint32_t least = 0xffffffffu, most = 0, next = 0;
    each_quad(s_.from, [&](int q, const float(&x)[4]) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        if (!(x[c] >= s_.from) || x[c] == -INFINITY) continue;
        const int b = bin_of(x[c]);
        if (b < bin) continue;
        const uint32_t rising = rising_key(x[c]);
        if (b > bin) {
          next = max(next, rising);
          continue;
        }
        least = min(least, rising), most = max(most, rising);
        const uint32_t at = atomicAdd(&s_.listed, 1u);
        if (at < kListed) s_.list[at] = order_key(x[c], 4 * q + c);
      }
    });
    least = __reduce_min_sync(0xffffffffu, least), most = __reduce_max_sync(0xffffffffu, most), next = __reduce_max_sync(0xffffffffu, next);
    if (threadIdx.x % 32 == 0) atomicMin(&s_.least, least), atomicMax(&s_.most, most), atomicMax(&s_.next, next);
    __syncthreads();
    const int n = static_cast<int>(min(s_.listed, static_cast<uint32_t>(kListed)));
    int size = 2;
    while (size < n) size *= 2;
    for (int k = n + threadIdx.x; k < size; k += kThreads) s_.list[k] = kAll;
    for (int run = 2; run <= size; run *= 2)
      for (int step = run / 2; step > 0; step /= 2) {
        __syncthreads();
        for (int k = threadIdx.x; k < size / 2; k += kThreads) {
          const int low = 2 * k - (k & (step - 1)), high = low + step;  // of the pairs `step` apart
          const uint64_t x = s_.list[low], y = s_.list[high];
          if ((x > y) == ((low & run) == 0)) s_.list[low] = y, s_.list[high] = x;
        }
      }
    __syncthreads();
    held_ = bin;
  }

  // The one bin of which that is true; 0 where it is of none.
  template <class F>
  __device__ __forceinline__ int find_bin(F&& holds) {
    __syncthreads();
    if (threadIdx.x == 0) s_.bin = 0;
    __syncthreads();
    for (int b = 2 * threadIdx.x; b < 2 * static_cast<int>(threadIdx.x) + 2; ++b)
      if (holds(b)) s_.bin = b;
    __syncthreads();
    return s_.bin;
  }

  // The first k tokens; there are more.
  __device__ Edge first_of_count(uint32_t k) {
    const int bin = find_bin([&](int b) { return s_.count[b] < k && k <= count_to(b); });
    hold(bin);
    return edge_at(bin, k - s_.count[bin]);
  }
  // The tokens with less than `goal` before them, at least one. Weights relative to the largest token's.
  __device__ Edge first_of_weight(double goal) {
    const int bin = find_bin([&](int b) {
      return s_.count[b] < count_to(b) && static_cast<double>(s_.weight[b]) * kUnit < goal &&
             (static_cast<double>(weight_to(b)) * kUnit >= goal || count_to(b) == s_.total_count);
    });
    hold(bin);
    if (s_.listed > kListed) return edge_at(bin, s_.listed);
    if (threadIdx.x == 0) s_.inside = 0;
    const int k = 2 * threadIdx.x, n = static_cast<int>(s_.listed);
    const uint64_t w0 = k < n ? weight(key_value(s_.list[k]), s_.top, inverse_) : 0,
                   w1 = k + 1 < n ? weight(key_value(s_.list[k + 1]), s_.top, inverse_) : 0;
    uint64_t all = 0;
    const uint64_t ahead = scan(w0 + w1, &all) + s_.weight[bin];
    uint32_t inside = k < n && static_cast<double>(ahead) * kUnit < goal;
    inside += k + 1 < n && static_cast<double>(ahead + w0) * kUnit < goal;
    inside = __reduce_add_sync(0xffffffffu, inside);
    if (threadIdx.x % 32 == 0 && inside > 0) atomicAdd(&s_.inside, inside);
    __syncthreads();
    return edge_at(bin, max(s_.inside, 1u));
  }
  // Behind the first m tokens of the held bin; behind all of it where they are not in order.
  __device__ Edge edge_at(int bin, uint32_t m) {
    Edge e;
    const uint32_t n = s_.listed;
    if (n > kListed) {
      e.exact = false;
      e.key = static_cast<uint64_t>(~s_.least) << 32 | 0xffffffffu;
      m = n;
    } else {
      e.key = s_.list[m - 1];
    }
    if (m < n) e.next = key_value(s_.list[m]), e.has_next = true;
    else if (s_.next != 0) e.next = key_value(static_cast<uint64_t>(~s_.next) << 32), e.has_next = true;
    return e;
  }
  // Of everything up to the edge, which stands in the held bin.
  __device__ double weight_of(const Edge& e) {
    const int k = 2 * threadIdx.x, n = static_cast<int>(s_.listed);
    const uint64_t w0 = k < n && s_.list[k] <= e.key ? weight(key_value(s_.list[k]), s_.top, inverse_) : 0,
                   w1 = k + 1 < n && s_.list[k + 1] <= e.key ? weight(key_value(s_.list[k + 1]), s_.top, inverse_) : 0;
    uint64_t all = 0;
    scan(w0 + w1, &all);
    return static_cast<double>(all + s_.weight[held_]) * kUnit;
  }

  __device__ void choose_filtered();

  const Rows& a_;
  Shared& s_;
  int i_, row_, held_ = -1;
  const ops::SampleRule* rule_ = nullptr;
  const float* logits_ = nullptr;
  const float* group_ = nullptr;
  float inverse_ = 0, scale_ = 0;
};

// The steps of ops/cpu/sample.cpp, with edges for its ranks.
__device__ void Row::choose_filtered() {
  const ops::SampleParams& p = rule_->params;
  const bool top_k = p.top_k > 0 && p.top_k < a_.real, top_p = p.top_p<1, min_p = p.min_p> 0;
  const double temperature = p.temperature, inverse = 1.0 / temperature, hair = kHair * inverse;
  inverse_ = 1.0f / p.temperature;
  const int groups = a_.slices * kSliceThreads;
  if (threadIdx.x < 32) s_.tally[threadIdx.x] = 0;
  __syncthreads();
  const float top = s_.top;
  float from = s_.low;
  if (top_k) {
    if (p.top_k + 8 <= groups / 4 && groups <= kHeldGroups * kThreads) from = fmaxf(from, nth_group(p.top_k + 8));
  } else {
    double floor = -INFINITY;
    if (top_p) floor = log(fmax(1.0 - static_cast<double>(p.top_p), 1e-12) / a_.real) - 1;
    if (min_p) floor = fmax(floor, log(static_cast<double>(p.min_p)) - 1);
    from = fmaxf(from, static_cast<float>(top + floor * temperature));
  }
  if (threadIdx.x == 0) s_.from = from;
  scale_ = top > from ? kBins / (top - from) : 0;
  __syncthreads();
  Edge by_k, by_p, sure, maybe;
  const uint64_t first_key = order_key(top, s_.top_id);
  if (top_k || top_p) fill_bins(top_p);
  double total = s_.sum;
  bool cut_k = false;
  if (top_k) {
    cut_k = s_.total_count > static_cast<uint32_t>(p.top_k);
    total = static_cast<double>(s_.total_weight) * kUnit;
    if (cut_k) {
      by_k = first_of_count(static_cast<uint32_t>(p.top_k));
      if (!by_k.exact) return give(-1, 0);
      if (top_p) total = weight_of(by_k);
    }
  }
  if (top_p) {
    const double goal = static_cast<double>(p.top_p) * total, by_a_hair = kHair * total;
    by_p = first_of_weight(goal);
    if (!by_p.exact) return give(-1, 0);
    maybe = first_of_weight(goal + by_a_hair);
    sure = goal - by_a_hair > 0 ? first_of_weight(goal - by_a_hair) : Edge{.key = first_key};
    // A bin that is not in order is in doubt as a whole.
    if (!sure.exact) sure.key = (static_cast<uint64_t>(~s_.most) << 32) - 1;
  }
  const Edge kept = by_p.key <= by_k.key ? by_p : by_k;  // both kAll: nothing is cut
  const double lowest = top * inverse + log(static_cast<double>(p.min_p)), value_k = key_value(by_k.key) * inverse,
               value_kept = key_value(kept.key) * inverse, next_k = by_k.next * inverse, next_kept = kept.next * inverse;
  // 0: out; 1: kept; 2: out, but another rounding may keep it.
  const auto place = [&](float x, int id) {
    const uint64_t key = order_key(x, id);
    const double v = static_cast<double>(x) * inverse;
    if (key <= kept.key && (!min_p || v >= lowest || key == first_key)) return 1;
    if (min_p && v < lowest - hair) return 0;
    if (!cut_k && !top_p) return 2;
    if (top_p) {
      const bool in_reach = !cut_k || key <= by_k.key || value_k - v < hair;
      return (key <= maybe.key && in_reach) || value_kept - v < hair ? 2 : 0;
    }
    return value_k - v < hair ? 2 : 0;
  };
  float reach = from;  // nothing below has a place
  if (cut_k || top_p)
    reach = fmaxf(reach, fminf(key_value(kept.key), key_value(top_p ? maybe.key : kept.key)) - 2 * static_cast<float>(kHair));
  if (min_p) reach = fmaxf(reach, static_cast<float>(lowest * temperature) - 2 * static_cast<float>(kHair));

  const uint64_t seed = p.seed;
  const uint32_t choice = p.choice;
  const int position = a_.position[row_] + 1, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  Pair scores;
  float extra = -INFINITY;
  // f(token, place, near score, word) of every token with a place.
  const auto each_score = [&](auto&& f) {
    each_quad(reach, [&](int q, const float(&x)[4]) {
      uint32_t places = 0;
#pragma unroll
      for (int c = 0; c < 4; ++c)
        if (x[c] >= reach && x[c] != -INFINITY) places |= static_cast<uint32_t>(place(x[c], 4 * q + c)) << 2 * c;
      if (places == 0) return;
      const Words w = words(seed, choice, position, q);
#pragma unroll
      for (int c = 0; c < 4; ++c)
        if (const int at = places >> 2 * c & 3; at != 0) f(4 * q + c, at, x[c], (x[c] - top) * inverse_ + near_gumbel(w.w[c]), w.w[c]);
    });
  };
  each_score([&](int, int at, float, float score, uint32_t) {
    if (at == 1) scores.add(score);
    else extra = fmaxf(extra, score);
  });
  const float own_best = scores.first, own_extra = extra;
  scores = warp_pair(scores);
#pragma unroll
  for (int o = 16; o > 0; o >>= 1) extra = fmaxf(extra, __shfl_xor_sync(0xffffffffu, extra, o));
  if (lane == 0) s_.pair[warp] = scores, s_.extra[warp] = extra;
  __syncthreads();
  for (int w = 0; w < kWarps; ++w) {
    if (w != warp) scores.join(s_.pair[w]);
    extra = fmaxf(extra, s_.extra[w]);
  }
  const float enough = scores.second - slack(scores.second), enough_extra = extra - slack(extra);
  Two two;
  double exact_extra = -INFINITY;
  if ((own_best != -INFINITY && own_best >= enough) || (own_extra != -INFINITY && own_extra >= enough_extra))
    each_score([&](int id, int at, float x, float score, uint32_t word) {
      if (!(score >= (at == 1 ? enough : enough_extra))) return;
      const double exact = static_cast<double>(x) * inverse + exact_gumbel(word);
      if (at == 1) two.add(exact, id);
      else exact_extra = fmax(exact_extra, exact);
    });
  __syncwarp();
  two = warp_two(two);
#pragma unroll
  for (int o = 16; o > 0; o >>= 1) exact_extra = fmax(exact_extra, __shfl_xor_sync(0xffffffffu, exact_extra, o));
  if (lane == 0) s_.two[warp] = two, s_.exact_extra[warp] = exact_extra;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int w = 1; w < kWarps; ++w) two.join(s_.two[w]), exact_extra = fmax(exact_extra, s_.exact_extra[w]);
  if (two.id == INT32_MAX) return give(-1, 0);  // does not happen: the first token is always kept
  const float x = logits_[two.id];
  const uint64_t key = order_key(x, two.id);
  const double v = static_cast<double>(x) * inverse;
  double margin = two.first - two.second;
  const bool doubtful = (top_p && key > sure.key) || (cut_k && by_k.has_next && v - next_k < hair) ||
                        (top_p && kept.has_next && v - next_kept < hair) || (min_p && v < lowest + hair && key != first_key);
  if (doubtful) margin = 0;
  margin = fmin(margin, fmax(two.first - exact_extra, 0.0));
  give(two.id, margin * temperature);
}

__global__ void __launch_bounds__(kThreads) join_kernel(const Rows a) {
  __shared__ Shared s;
  pdl_begin();
  Row row(a, blockIdx.x, s);
  if (row.padding()) {
    if (threadIdx.x == 0) a.token_out[blockIdx.x] = 0, a.margin_out[blockIdx.x] = 0, a.bad_out[blockIdx.x] = 0;
    return;
  }
  row.choose();
}

}  // namespace

cudaError_t choose_rows(cudaStream_t stream, const Rows& rows, int count) {
  return launch(join_kernel, dim3(static_cast<unsigned>(count)), dim3(kThreads), 0, stream, rows);
}

}  // namespace ddtree::kernels::sampling
