// Faults on demand: what `ddtree-inject serve --inject KIND[:name=value…]` puts between the engine and its executor, and before the
// history's commits. Not in `ddtree`.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <vector>

#include "base/status.h"
#include "nn/executor.h"

namespace ddtree::inject {

enum class Kind : uint8_t {
  kNanLogits,       // rows of the first segment that decodes are reported as not finite
  kGarbageText,     // the target's choice at decoding rows is one fixed token, without any error: only the text shows it
  kStuckRound,      // a pass does not end
  kSlowRound,       // passes take `ms` longer
  kDrafterGarbage,  // drafts are random tokens
  kDeviceLost,      // every call fails
  kRankLost,        // the same, for good, as where one rank of several is gone
  kOom,             // passes find no memory
  kStoreFull,       // commits of the history fail as on a full disk
  kStoreLocked,     // another connection holds the history's write lock
};

// One fault, its place in time counted in target passes since the service was first ready (store faults: commits; seconds for
// kStoreLocked).
struct Fault {
  Kind kind{};
  int64_t after = 0;        // passes until it begins
  int64_t count = -1;       // passes it lasts; -1: for ever
  bool from_start = false;  // counted from the process's start, not from the service's first being ready
  int64_t every = 0;        // begins again each so many passes; 0: once
  double ms = 1000;         // kSlowRound: per pass; kStuckRound: how long one pass is stuck (0: for ever)
  double seconds = 10;      // kStoreLocked
  int32_t token = 0;        // kGarbageText
};

// "nan-logits:after=20,for=3"; kUsage names what is wrong and what would be right.
Result<Fault> parse_fault(const std::string& text);
std::string fault_kinds();  // for help

// All faults of the process. Survives the engine, as a lost device does.
class Faults {
 public:
  static Faults& instance();
  void add(Fault fault);
  void arm() { armed_ = true; }  // the service is ready: from now on passes count

  // Counts a pass; true where a fault of that kind is on.
  void pass();
  bool on(Kind kind, Fault* fault = nullptr) const;

  std::unique_ptr<Executor> wrap(std::unique_ptr<Executor> inner);
  Status store_commit();                     // StoreOptions::before_commit
  void lock_store(const std::string& path);  // kStoreLocked, once armed

 private:
  mutable std::mutex mutex_;
  std::vector<Fault> faults_;
  int64_t passes_ = 0, commits_ = 0, all_passes_ = 0, all_commits_ = 0;
  std::atomic<bool> armed_{false};
};

}  // namespace ddtree::inject
