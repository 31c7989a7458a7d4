// How much memory this process may ever have.
#pragma once

#include <cstdint>

namespace ddtree {

// The machine's, or the limit of a control group that this process is in (a container, a unit's MemoryMax=), where that is less. Bytes; 0
// if the system does not say.
int64_t host_memory_bytes();

}  // namespace ddtree
