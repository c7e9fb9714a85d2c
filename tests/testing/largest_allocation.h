#pragma once

#include <cstddef>

namespace fulgur::testing {

// Asks for the largest block that this thread has asked `new` for since this was made. A program that uses it has an
// operator new of ours.
class LargestAllocation {
 public:
  LargestAllocation();
  size_t num_bytes() const;
};

}  // namespace fulgur::testing
