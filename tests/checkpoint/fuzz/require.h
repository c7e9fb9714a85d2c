#pragma once

#include <cstdlib>

namespace fulgur::testing {

// Aborts unless `holds`, which a fuzzer reports as a find.
inline void require(bool holds) {
  if (!holds) std::abort();
}

}  // namespace fulgur::testing
