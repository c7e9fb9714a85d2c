#include "tests/testing/largest_allocation.h"

#include <algorithm>
#include <cstdlib>
#include <new>

namespace fulgur::testing {
namespace {

thread_local size_t largest = 0, sum = 0;

}  // namespace

LargestAllocation::LargestAllocation() { largest = sum = 0; }

size_t LargestAllocation::num_bytes() const { return largest; }

size_t LargestAllocation::sum_of_all() const { return sum; }

}  // namespace fulgur::testing

void* operator new(size_t num_bytes, const std::nothrow_t&) noexcept {
  fulgur::testing::largest = std::max(fulgur::testing::largest, num_bytes);
  fulgur::testing::sum += num_bytes;
  return std::malloc(std::max<size_t>(num_bytes, 1));
}

void* operator new(size_t num_bytes) {
  if (void* block = operator new(num_bytes, std::nothrow)) return block;
  throw std::bad_alloc();
}

void operator delete(void* block) noexcept { std::free(block); }
void operator delete(void* block, size_t) noexcept { std::free(block); }
