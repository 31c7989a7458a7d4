// conv over many rows. In a chain the taps of neighbouring rows overlap: a thread walks several rows of eight channels with the taps in
// registers, so that an input is read once and not once a tap. Rows whose parent is not the row before gather theirs, whatever the tree.
#include "kernels/common.cuh"
#include "kernels/kernels.h"

namespace ddtree::kernels {
namespace {

constexpr int kWidth = 4, kChannels = 8, kEach = 8, kThreads = 128;  // taps; channels and rows of a thread

struct alignas(16) Eight {
  bf16 v[kChannels];
};

__global__ void __launch_bounds__(kThreads)
    conv_rows_kernel(const ops::ForestSegment* segment, const int32_t* segment_of, const int32_t* parent, int rows, const bf16* x,
                     int64_t x_stride, const float* w, int channels, const bf16* window, bf16* input, bf16* y, int64_t y_stride) {
  pdl_begin();
  const int c = (blockIdx.x * kThreads + threadIdx.x) * kChannels, first = blockIdx.y * kEach;
  if (c >= channels) return;
  const auto at = [](const bf16* p) { return *reinterpret_cast<const Eight*>(p); };
  Eight own[kEach];
  int up[kEach], of[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const bool there = first + i < rows;
    up[i] = there ? parent[first + i] : -1, of[i] = there ? segment_of[first + i] : -1;
    if (there) own[i] = at(x + (first + i) * x_stride + c);
  }
  float weight[kWidth][kChannels];
#pragma unroll
  for (int t = 0; t < kWidth; ++t)
#pragma unroll
    for (int e = 0; e < kChannels; e += 4) {
      const float4 v = *reinterpret_cast<const float4*>(w + static_cast<int64_t>(t) * channels + c + e);
      weight[t][e] = v.x, weight[t][e + 1] = v.y, weight[t][e + 2] = v.z, weight[t][e + 3] = v.w;
    }
  float taps[kWidth][kChannels];
  const auto widen = [](const Eight& from, float(&to)[kChannels]) {
#pragma unroll
    for (int e = 0; e < kChannels; ++e) to[e] = to_float(from.v[e]);
  };
  ops::ForestSegment s{};
  int which = -1;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int r = first + i;
    if (of[i] < 0) continue;  // no row, or one that pads the pass
    if (of[i] != which) s = segment[of[i]], which = of[i];
    if (i > 0 && up[i] == r - 1) {
#pragma unroll
      for (int t = 0; t + 1 < kWidth; ++t)
#pragma unroll
        for (int e = 0; e < kChannels; ++e) taps[t][e] = taps[t + 1][e];
    } else {
      const bf16* before = window + static_cast<int64_t>(s.slot) * (kWidth - 1) * channels + c;
      int row = up[i], behind = 0;  // behind: columns of the window already taken
#pragma unroll
      for (int t = kWidth - 2; t >= 0; --t) {
        if (row >= 0) {
          widen(at(x + row * x_stride + c), taps[t]);
          row = parent[row];
        } else {
          ++behind;
          widen(at(before + static_cast<int64_t>(kWidth - 1 - behind) * channels), taps[t]);
        }
      }
    }
    widen(own[i], taps[kWidth - 1]);
    if (!s.certain) *reinterpret_cast<Eight*>(input + static_cast<int64_t>(r) * channels + c) = own[i];  // for the commit
    float sum[kChannels] = {};
#pragma unroll
    for (int t = 0; t < kWidth; ++t)
#pragma unroll
      for (int e = 0; e < kChannels; ++e) sum[e] = fmaf(weight[t][e], taps[t][e], sum[e]);
    Eight out;
#pragma unroll
    for (int e = 0; e < kChannels; ++e) out.v[e] = from_float<bf16>(silu(sum[e]));
    *reinterpret_cast<Eight*>(y + r * y_stride + c) = out;
  }
}

bool sixteen(const ops::Tensor& t) { return reinterpret_cast<uintptr_t>(t.data) % 16 == 0 && t.stride % kChannels == 0; }

}  // namespace

cudaError_t conv_rows(cudaStream_t stream, const ops::ConvArgs& a, const DeltaStorage& states, const TraceStorage& trace) {
  const ops::Forest& f = *a.forest;
  const int channels = states.shape.channels();
  if (states.shape.conv_width != kWidth || channels % kChannels || !sixteen(a.x) || !sixteen(a.y)) return cudaErrorNotSupported;
  const unsigned across = static_cast<unsigned>((channels / kChannels + kThreads - 1) / kThreads);
  return launch(conv_rows_kernel, dim3(across, static_cast<unsigned>((f.rows + kEach - 1) / kEach)), dim3(kThreads), 0, stream, f.segment,
                f.segment_of, f.parent, f.rows, as_bf16(a.x), a.x.stride, as_f32(a.w), channels,
                states.window + static_cast<int64_t>(a.layer) * states.slots * (kWidth - 1) * channels,
                trace.input + static_cast<int64_t>(a.layer) * trace.rows * channels, as_bf16_out(a.y), a.y.stride);
}

}  // namespace ddtree::kernels
