#include "tests/testing/largest_allocation.h"

#include <algorithm>
#include <cstdlib>
#include <new>

namespace fulgur::testing {
namespace {

thread_local size_t largest = 0;

}  // namespace

LargestAllocation::LargestAllocation() { largest = 0; }

size_t LargestAllocation::num_bytes() const { return largest; }

}  // namespace fulgur::testing

void* operator new(size_t num_bytes) {
  fulgur::testing::largest = std::max(fulgur::testing::largest, num_bytes);
  if (void* block = std::malloc(std::max<size_t>(num_bytes, 1))) return block;
  throw std::bad_alloc();
}

void operator delete(void* block) noexcept { std::free(block); }
void operator delete(void* block, size_t) noexcept { std::free(block); }
