#pragma once

#include <c10/util/FunctionRef.h>

#include <cstdint>

namespace fulgur {

// Calls body(begin, end) for chunks of [0, size) on torch's own threads, on the calling thread alone if `size` is at
// most `grain`. `memory`: an address with at least `size` bytes behind it, which are neither read nor written.
void parallel_chunks(const void* memory, int64_t size, int64_t grain, c10::function_ref<void(int64_t, int64_t)> body);

}  // namespace fulgur
