// How weights are read: what a caller may choose and is told.
#pragma once

#include <cstdint>
#include <functional>

namespace ddtree::ops {

struct LoadProgress {
  int64_t bytes = 0, total = 0;  // of the tensors asked for, as the files hold them; each counts once
  double seconds = 0;            // since reading began
  double bytes_per_second() const { return seconds > 0 ? static_cast<double>(bytes) / seconds : 0; }
};

struct LoadOptions {
  int threads = 0;           // readers; 0: the backend's choice
  int64_t buffer_bytes = 0;  // of one staging buffer; 0: the backend's choice
  int buffers = 0;           // staging buffers; 0: two a reader
  // Called a few times a second on the thread that waits for the load: never backwards, and with bytes == total once, when all is where
  // it belongs. False ends the load with kCancelled.
  std::function<bool(const LoadProgress&)> progress;
};

}  // namespace ddtree::ops
