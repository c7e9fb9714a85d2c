#include "fulgur/data/files/tar_index.h"

#include <stdexcept>

#include "tests/checkpoint/fuzz/require.h"
#include "tests/testing/largest_allocation.h"

// Every file lies within the archive, and the index takes little more memory than the headers.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace fulgur;
  const fulgur::testing::LargestAllocation allocated;
  try {
    for (const TarEntry& entry : read_tar_index({reinterpret_cast<const char*>(data), size}, "file")) {
      fulgur::testing::require(entry.begin >= 0 && entry.num_bytes >= 0);
      fulgur::testing::require(static_cast<size_t>(entry.begin) <= size);
      fulgur::testing::require(static_cast<size_t>(entry.num_bytes) <= size - static_cast<size_t>(entry.begin));
      fulgur::testing::require(!entry.path.starts_with('/'));
    }
  } catch (const std::runtime_error&) {
  }
  fulgur::testing::require(allocated.sum_of_all() <= 10'000 + 2 * size);
  return 0;
}
