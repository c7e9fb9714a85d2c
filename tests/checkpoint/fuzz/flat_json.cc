#include "fulgur/checkpoint/formats/flat_json.h"

#include "fulgur/base/error.h"
#include "tests/checkpoint/fuzz/require.h"

// Values are refused, or are the same after a round trip through their own text.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace fulgur;
  constexpr int64_t kMaxValues = 1000;
  FlatValues values;
  try {
    values = parse_flat_json({reinterpret_cast<const char*>(data), size}, "file", kMaxValues);
  } catch (const CheckpointError&) {
    return 0;
  }
  fulgur::testing::require(values.size() <= kMaxValues);
  const std::string text = to_flat_json(values);
  fulgur::testing::require(to_flat_json(parse_flat_json(text, "file")) ==
                           text);  // compares texts: NaN is not equal to itself
  return 0;
}
