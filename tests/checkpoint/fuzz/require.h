#pragma once

#include <cstdlib>

namespace fulgur::testing {

// What a fuzzer takes for a find.
inline void require(bool holds) {
  if (!holds) std::abort();
}

}  // namespace fulgur::testing
