#include "fulgur/data/files/npy_header.h"

#include <stdexcept>

#include "tests/checkpoint/fuzz/require.h"
#include "tests/testing/largest_allocation.h"

// What is accepted has exactly the bytes that follow the header.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace fulgur;
  const fulgur::testing::LargestAllocation allocated;
  const auto file_bytes = static_cast<int64_t>(size);
  try {
    const NpyHeader header = parse_npy_header({reinterpret_cast<const char*>(data), size}, file_bytes, "file");
    int64_t num_bytes = header.element_bytes;
    for (const int64_t dimension : header.shape) num_bytes *= dimension;
    fulgur::testing::require(num_bytes == header.data_bytes && header.data_begin + num_bytes == file_bytes);
    fulgur::testing::require(header.element_bytes >= 1 && header.element_bytes <= 16 && header.shape.size() <= 64);
  } catch (const std::runtime_error&) {
  }
  fulgur::testing::require(allocated.sum_of_all() <= 10'000);
  return 0;
}
