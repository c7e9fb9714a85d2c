#include "fulgur/data/images/exif.h"

#include "tests/checkpoint/fuzz/require.h"
#include "tests/testing/largest_allocation.h"

// An orientation is one of the eight that there are, and nothing is allocated.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace fulgur;
  const fulgur::testing::LargestAllocation allocated;
  const int orientation = exif_orientation({data, size});
  fulgur::testing::require(orientation >= 1 && orientation <= 8);
  fulgur::testing::require(allocated.sum_of_all() == 0);
  return 0;
}
