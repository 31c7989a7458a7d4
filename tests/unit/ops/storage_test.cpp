// What a CPU backend's storage costs the process.
#include <malloc.h>
#include <unistd.h>

#include <cstdio>

#include "unit/ops/support.h"

namespace ddtree::ops::test {
namespace {

// Private resident memory in bytes (proc(5), statm: resident and shared pages).
int64_t resident() {
  long size = 0, resident = 0, shared = 0;
  std::FILE* f = std::fopen("/proc/self/statm", "r");
  REQUIRE(f != nullptr);
  const int fields = std::fscanf(f, "%ld %ld %ld", &size, &resident, &shared);
  std::fclose(f);
  REQUIRE(fields == 3);
  return static_cast<int64_t>(resident - shared) * sysconf(_SC_PAGESIZE);
}

}  // namespace

// An engine restarted inside its process: the second one's pools must not be resident before they are used, as recycled heap is.
TEST_CASE("pools of a second backend cost nothing until used", "[ops]") {
#ifdef DDTREE_SANITIZED
  SKIP("the sanitizers' own allocator keeps what was freed");
#endif
  constexpr int64_t kSlack = 4 << 20;
  const int64_t before = resident();
  std::vector<std::unique_ptr<char[]>> lasting;  // what outlives an engine lies above it in the heap, so that the heap cannot shrink
  for (int round = 0; round < 4; ++round) {
    {
      cpu::CpuBackend backend({.threads = 1});
      // Blocks of 1 to 24 MiB: on both sides of where allocators begin to map.
      for (const int32_t pages : {32, 256, 768})
        REQUIRE(backend.make_kv_pool({.layers = 4, .kv_heads = 2, .head_dim = 64}, pages, 16).ok());
      lasting.push_back(std::make_unique<char[]>(1000));
      INFO("round " << round);
      CHECK(resident() - before < kSlack);
    }
    malloc_trim(0);
    CHECK(resident() - before < kSlack);
  }
}

}  // namespace ddtree::ops::test
