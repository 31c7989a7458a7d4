// Segments as CUDA graphs: recorded from the stream, launched at once.
//
// A key's first run is plain: kernels are loaded when they first run, which recording does not allow, and a shape that comes once is not
// worth a graph. The second is recorded and launched, as are all that follow. What varies between runs stands in the staged arrays, which
// are copied before the launch, and in what tensors hold; results go through the same places of the pinned buffer every time.
#include <cuda_runtime_api.h>
#include <fmt/core.h>

#include <algorithm>

#include "base/log.h"
#include "ops/cuda/cuda_backend.h"

namespace ddtree::ops::cuda {
namespace {

// Of device memory, beside the bound of their number: the plan's row for kernels and graphs has to hold it (engine/plan_rows.cpp).
constexpr int64_t kMostBytes = int64_t{96} << 20;
constexpr size_t kMostSeen = 1024;  // keys remembered

}  // namespace

void CudaBackend::segment(const SegmentKey& key, const std::function<void()>& ops) {
  // Ops that are timed one by one run one by one; results that still wait would be overwritten; a pass that failed already records nothing.
  if (!options_.graphs || timing_ || results_used_ > 0 || small_used_ > 0 || !error_.ok()) return once(ops);
  flush();
  if (graphs_.size() >= kMostSeen && !graphs_.contains(key)) std::erase_if(graphs_, [](const auto& g) { return !g.second.exec; });
  const auto [at, fresh] = graphs_.try_emplace(key);
  Graph& graph = at->second;
  graph.used = ++graph_clock_;
  if (fresh) return once(ops);
  if (!graph.exec) {
    make_room_for_graphs();
    if (!record(&graph, ops)) {
      options_.graphs = false;
      return once(ops);
    }
  }
  const cudaError_t launched = cudaGraphLaunch(graph.exec, stream_);
  check(launched, "graph");
  if (launched != cudaSuccess) return;  // there are no results: what the last run left must not be taken for them
  pending_ = graph.pending, results_used_ = graph.results, small_used_ = graph.small;
  if (graph.begin) segment_events_.emplace_back(graph.begin, graph.end);
}

void CudaBackend::once(const std::function<void()>& ops) {
  if (!time_segments_ || timing_) return ops();
  flush();
  std::pair<cudaEvent_t, cudaEvent_t> events{};
  check(cudaEventCreate(&events.first), "timing");
  check(cudaEventCreate(&events.second), "timing");
  check(cudaEventRecord(events.first, stream_), "timing");
  ops();
  check(cudaEventRecord(events.second, stream_), "timing");
  segment_events_.push_back(events);
}

bool CudaBackend::record(Graph* graph, const std::function<void()>& ops) {
  const Status before = error_;
  size_t free_before = 0, free_after = 0, total = 0;
  cudaMemGetInfo(&free_before, &total);
  cudaError_t e = cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal);
  cudaGraph_t recorded = nullptr;
  if (e == cudaSuccess) {
    if (time_segments_) {
      check(cudaEventCreate(&graph->begin), "timing");
      check(cudaEventCreate(&graph->end), "timing");
      check(cudaEventRecordWithFlags(graph->begin, stream_, cudaEventRecordExternal), "timing");
    }
    ops();
    if (time_segments_) check(cudaEventRecordWithFlags(graph->end, stream_, cudaEventRecordExternal), "timing");
    e = cudaStreamEndCapture(stream_, &recorded);
  }
  const bool ran = e == cudaSuccess && error_.ok();
  if (ran) e = cudaGraphInstantiate(&graph->exec, recorded, 0);
  if (recorded) cudaGraphDestroy(recorded);
  graph->pending = std::exchange(pending_, {});
  graph->results = std::exchange(results_used_, 0), graph->small = std::exchange(small_used_, 0);
  if (!ran || e != cudaSuccess) {
    const std::string why = e != cudaSuccess ? cudaGetErrorString(e) : error_.message();
    cudaGetLastError();
    log::warn("recording a CUDA graph failed ({}): passes are launched kernel by kernel from here on, which takes more of the host", why);
    error_ = before;
    drop(graph);
    return false;
  }
  check(cudaGraphUpload(graph->exec, stream_), "graph");
  cudaMemGetInfo(&free_after, &total);
  graph->bytes = std::max<int64_t>(static_cast<int64_t>(free_before) - static_cast<int64_t>(free_after), 0);
  graph_bytes_ += graph->bytes, ++recorded_;
  return true;
}

// The longest unused go until one more fits.
void CudaBackend::make_room_for_graphs() {
  while (recorded_ >= options_.most_graphs || (graph_bytes_ > kMostBytes && recorded_ > 0)) {
    auto oldest = graphs_.end();
    for (auto at = graphs_.begin(); at != graphs_.end(); ++at)
      if (at->second.exec && (oldest == graphs_.end() || at->second.used < oldest->second.used)) oldest = at;
    check(cudaStreamSynchronize(stream_), "graph");  // it may still run
    if (!segment_events_.empty()) read_segment_times();
    drop(&oldest->second);
    graphs_.erase(oldest);
  }
}

void CudaBackend::drop(Graph* graph) {
  if (graph->exec) cudaGraphExecDestroy(graph->exec), --recorded_, graph_bytes_ -= graph->bytes;
  if (graph->begin) cudaEventDestroy(graph->begin);
  if (graph->end) cudaEventDestroy(graph->end);
  *graph = Graph{.used = graph->used};
}

void CudaBackend::drop_graphs() {
  for (auto& [key, graph] : graphs_) drop(&graph);
  graphs_.clear();
}

void CudaBackend::time_segments(bool on) {
  check(cudaStreamSynchronize(stream_), "time_segments");
  if (!segment_events_.empty()) read_segment_times();
  drop_graphs();  // events are part of what is recorded
  time_segments_ = on;
  segment_ms_ = 0;
}

void CudaBackend::read_segment_times() {
  for (const auto& [begin, end] : segment_events_) {
    float ms = 0;
    check(cudaEventElapsedTime(&ms, begin, end), "timing");
    segment_ms_ += ms;
    const bool recorded = std::any_of(graphs_.begin(), graphs_.end(), [b = begin](const auto& g) { return g.second.begin == b; });
    if (!recorded) cudaEventDestroy(begin), cudaEventDestroy(end);
  }
  segment_events_.clear();
}

}  // namespace ddtree::ops::cuda
