#include "checkpoint/flat_json.h"

#include "core/error.h"
#include "tests/checkpoint/fuzz/require.h"

// Values are refused, or come back from their own text.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace fulgur;
  FlatValues values;
  try {
    values = parse_flat_json({reinterpret_cast<const char*>(data), size}, "file");
  } catch (const CheckpointError&) {
    return 0;
  }
  const std::string text = to_flat_json(values);
  testing::require(to_flat_json(parse_flat_json(text, "file")) == text);  // NaN is not equal to itself
  return 0;
}
