// Tensors of checkpoints to where a backend wants them: several readers fill a few staging buffers from the files and hand them to the
// backend, which copies while the next ones are read. The host needs the buffers and no more, whatever the checkpoint's size.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/status.h"
#include "model/tensor.h"
#include "ops/load.h"
#include "ops/tensor.h"

namespace ddtree::ops {

// A tensor and the place it goes to.
struct LoadItem {
  TensorView from;                       // kBf16, kF16 or kF32; must be readable until the load has ended
  Element element = Element::kBfloat16;  // what the place holds: kBfloat16 only for tensors of kBf16 (nothing is ever rounded)
  float add = 0;                         // added to each element, in float32; kFloat32 places only
  int64_t place = 0;                     // the sink's own number
};

// The backend's side. Everything but put() and wait() is called on the loading thread.
class LoadSink {
 public:
  virtual ~LoadSink() = default;
  // Memory for `count` buffers of `bytes` each, one behind the other, on a 64-byte boundary; until close(). kDoesNotFit.
  virtual Result<std::byte*> open(int count, int64_t bytes) = 0;
  virtual void close() = 0;
  // First thing on each reader's thread.
  virtual Status begin_thread() { return {}; }
  // Elements [first, first + count) of the item, converted, at `from` inside buffer `buffer`. May return before they are copied: the
  // buffer is not touched until wait(buffer). Called from any reader, for different buffers at a time.
  virtual Status put(int buffer, const std::byte* from, const LoadItem& item, int64_t first, int64_t count) = 0;
  virtual Status wait(int buffer) = 0;
};

class WeightLoader {
 public:
  void add(LoadItem item) { items_.push_back(std::move(item)); }
  bool empty() const { return items_.empty(); }

  // Reads all items, in the order of their files, and returns when they are in their places; forgets them. A tensor that several items
  // ask for in the same form is read once. The options must be whole (no zeros). The first error ends it, naming file and tensor: what
  // OpenFile::read and the sink give, kCancelled where the caller's progress says so, and kBadModel where a file was changed meanwhile.
  // The places' contents are then undefined.
  Status run(LoadSink* sink, const LoadOptions& options);

 private:
  std::vector<LoadItem> items_;
};

}  // namespace ddtree::ops
