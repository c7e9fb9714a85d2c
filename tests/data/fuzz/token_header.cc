#include "fulgur/data/files/token_header.h"

#include <stdexcept>

#include "tests/checkpoint/fuzz/require.h"
#include "tests/testing/largest_allocation.h"

// What is accepted has exactly the tokens that the header counts, and is written as it was read.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace fulgur;
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  const fulgur::testing::LargestAllocation allocated;
  try {
    const TokenHeader header = parse_token_header(bytes, static_cast<int64_t>(size), "file");
    fulgur::testing::require(static_cast<size_t>(TokenHeader::kBytes + header.num_tokens * header.token_bytes) == size);
    fulgur::testing::require(to_bytes(header).substr(0, 40) == bytes.substr(0, 40));
  } catch (const std::runtime_error&) {
  }
  fulgur::testing::require(allocated.sum_of_all() <= 10'000);
  return 0;
}
