#pragma once

#include <cstddef>

namespace fulgur::testing {

// Measures the largest block that this thread has requested from `new` since construction. A program that uses it has
// an operator new of ours.
class LargestAllocation {
 public:
  LargestAllocation();
  size_t num_bytes() const;
  size_t sum_of_all() const;  // bytes of all blocks together, also of those that were freed again
};

}  // namespace fulgur::testing
