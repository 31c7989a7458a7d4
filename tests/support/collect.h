// Sinks that gather what a request got, and a wait for its end.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "engine/engine.h"

namespace ddtree::testing {

struct Collected {
  std::mutex mutex;
  std::condition_variable done;
  std::vector<int32_t> ids;
  std::string text;  // of pieces that are not special
  std::vector<TextPiece> pieces;
  std::vector<size_t> delta_sizes;
  int finished = 0;  // how often a last delta came
  int late = 0;      // deltas after the last
  Delta last;
  void wait() {
    std::unique_lock lock(mutex);
    done.wait(lock, [&] { return finished > 0; });
  }
};

inline DeltaSink sink_of(const std::shared_ptr<Collected>& c) {
  return [c](Delta&& d) {
    std::lock_guard lock(c->mutex);
    if (c->finished > 0) ++c->late;
    c->ids.insert(c->ids.end(), d.ids.begin(), d.ids.end());
    c->delta_sizes.push_back(d.ids.size());
    for (const TextPiece& p : d.pieces) {
      if (!p.special) c->text += p.text;
      c->pieces.push_back(p);
    }
    if (d.finished) {
      ++c->finished;
      c->last = std::move(d);
      c->done.notify_all();
    }
  };
}

// Submits and waits; the engine must accept it.
inline std::shared_ptr<Collected> run_request(Engine& engine, Request request) {
  auto c = std::make_shared<Collected>();
  const auto id = engine.submit(std::move(request), sink_of(c));
  if (!id) throw std::runtime_error("refused: " + id.status().message());
  c->wait();
  return c;
}

}  // namespace ddtree::testing
