// What a plan counts is what an executor takes: the same books, line by line, and what malloc says.
#include "nn/footprint.h"

#include <malloc.h>

#include <catch2/catch_test_macros.hpp>
#include <fstream>
#include <string>

#include "nn/pair_executor.h"
#include "ops/cpu/cpu_backend.h"
#include "random_pair.h"

using namespace ddtree;
using ops::MemoryOwner;
using ops::MemoryUse;

namespace {

void same_books(const ops::MemoryLedger& took, const ops::MemoryLedger& planned) {
  for (int owner = 0; owner < ops::kMemoryOwners; ++owner)
    for (int use = 0; use < ops::kMemoryUses; ++use) {
      INFO("owner " << owner << ", use " << use);
      CHECK(took.bytes(MemoryOwner(owner), MemoryUse(use)) == planned.bytes(MemoryOwner(owner), MemoryUse(use)));
    }
  CHECK(took.pinned() == planned.pinned());
}

ExecutorOptions options_of(int32_t pages, int32_t slots, int32_t rows, int32_t logit_rows) {
  ExecutorOptions o;
  o.pages = pages, o.slots = slots, o.max_rows = rows, o.max_logit_rows = logit_rows, o.threads = 3;
  return o;
}

std::unique_ptr<nn::PairExecutor> make(const LoadedPair& pair, const ExecutorOptions& o) {
  auto made = nn::PairExecutor::create(std::make_unique<ops::cpu::CpuBackend>(ops::cpu::CpuOptions{.threads = o.threads}), pair, o);
  INFO(made.status().message());
  REQUIRE(made.ok());
  return std::move(*made);
}

// The process's address space, in bytes.
[[maybe_unused]] int64_t in_use() {
  std::ifstream statm("/proc/self/statm");
  int64_t pages = 0;
  statm >> pages;
  return pages * 4096;
}

}  // namespace

TEST_CASE("an executor books what its footprint says, whatever the options") {
  auto pair = load_pair("tiny");
  REQUIRE(pair.ok());
  const auto footprint = PairFootprint::of(*pair, ops::DeviceKind::kCpu, 3);
  REQUIRE(footprint.ok());
  for (const ExecutorOptions& o : {options_of(256, 8, 512, 0), options_of(7, 1, 64, 32), options_of(1000, 33, 2000, 700)}) {
    const auto executor = make(*pair, o);
    const auto planned = footprint->with(o);
    REQUIRE(planned.ok());
    same_books(executor->backend().ledger(), *planned);
    CHECK(planned->bytes(MemoryOwner::kTarget, MemoryUse::kWeights) > 0);
    CHECK(planned->bytes(MemoryOwner::kDrafter, MemoryUse::kKvPages) > 0);
    CHECK(planned->bytes(MemoryOwner::kMtp, MemoryUse::kKvPages) > 0);
  }
}

TEST_CASE("without a drafter its books are empty, and the rest stays") {
  auto pair = load_pair("tiny", "");
  REQUIRE(pair.ok());
  auto both = load_pair("tiny");
  REQUIRE(both.ok());
  const auto whole = PairFootprint::of(*both, ops::DeviceKind::kCpu, 2);
  REQUIRE(whole.ok());
  const ExecutorOptions o = options_of(100, 4, 300, 0);
  const auto planned = whole->without_drafter().with(o);
  REQUIRE(planned.ok());
  CHECK(planned->of_owner(MemoryOwner::kDrafter) == 0);
  ExecutorOptions two = o;
  two.threads = 2;
  same_books(make(*pair, two)->backend().ledger(), *planned);
}

TEST_CASE("weights are counted as wide as the checkpoint has them") {
  auto tiny = load_pair("tiny");
  REQUIRE(tiny.ok());
  int64_t weights[2];
  for (const DType dtype : {DType::kBf16, DType::kF32}) {
    const auto random = test::make_random_pair(tiny->spec, &tiny->drafter->spec, dtype, 3);
    const auto footprint = PairFootprint::of(random->pair, ops::DeviceKind::kCpu, 3);
    REQUIRE(footprint.ok());
    const ExecutorOptions o = options_of(20, 2, 64, 0);
    const auto planned = footprint->with(o);
    REQUIRE(planned.ok());
    same_books(make(random->pair, o)->backend().ledger(), *planned);
    weights[dtype == DType::kF32] = planned->of_use(MemoryUse::kWeights);
  }
  CHECK(weights[1] > weights[0] * 19 / 10);  // all but norms and taps are twice as wide
}

#ifndef DDTREE_SANITIZED  // whose shadow is mapped too
TEST_CASE("the address space grows by what was planned while an executor is made") {
  auto pair = load_pair("tiny");
  REQUIRE(pair.ok());
  ExecutorOptions o = options_of(2000, 24, 1024, 0);
  o.threads = 1;  // others bring their stacks
  const auto footprint = PairFootprint::of(*pair, ops::DeviceKind::kCpu, 1);
  REQUIRE(footprint.ok());
  const auto planned = footprint->with(o);
  REQUIRE(planned.ok());
  const int64_t before = in_use();
  const auto executor = make(*pair, o);
  const int64_t took = in_use() - before;
  INFO("planned " << planned->total() << ", took " << took);
  CHECK(std::abs(took - planned->total()) < (4 << 20));  // what the heap had free, its headers, and pages not filled
}
#endif

TEST_CASE("options that an executor refuses have no footprint") {
  auto pair = load_pair("tiny");
  REQUIRE(pair.ok());
  const auto footprint = PairFootprint::of(*pair, ops::DeviceKind::kCuda);
  REQUIRE(footprint.ok());
  const auto refused = footprint->with(options_of(0, 1, 1, 0));
  REQUIRE(!refused.ok());
  CHECK(refused.status().code() == Code::kInvalidArgument);
  CHECK(refused.status().message().find("pages") != std::string::npos);
}
