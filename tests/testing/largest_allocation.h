#pragma once

#include <cstddef>

namespace fulgur::testing {

// Knows the largest block that this thread has asked `new` for since this was made. A program that uses it has an
// operator new of ours.
class LargestAllocation {
 public:
  LargestAllocation();
  size_t num_bytes() const;
  size_t sum_of_all() const;  // all blocks together, also those that were freed again
};

}  // namespace fulgur::testing
