#include "fulgur/checkpoint/formats/zip_directory.h"

#include "fulgur/base/error.h"
#include "tests/checkpoint/fuzz/require.h"
#include "tests/testing/largest_allocation.h"

// The reader reads nothing outside the file, and allocates little more than the directory.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace fulgur;
  const auto read = [&](uint64_t begin, uint64_t num_bytes) {
    fulgur::testing::require(begin <= size && num_bytes <= size - begin);
    return std::string(reinterpret_cast<const char*>(data) + begin, num_bytes);
  };
  const fulgur::testing::LargestAllocation allocated;
  try {
    check_zip_directory(read, size, "file");
  } catch (const CheckpointError&) {
  }
  fulgur::testing::require(allocated.sum_of_all() <= 10'000 + 10 * size);
  try {
    for (const ZipEntry& entry : read_zip_directory(read, size, "file")) {
      const uint64_t begin = zip_entry_begin(entry, read, size, "file");
      fulgur::testing::require(begin <= size && entry.stored_bytes <= size - begin);
    }
  } catch (const CheckpointError&) {
  }
  return 0;
}
