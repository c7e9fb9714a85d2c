#include "fulgur/checkpoint/manifest.h"

#include "fulgur/base/error.h"
#include "tests/checkpoint/fuzz/require.h"

// A manifest is refused, or is the same after a round trip through its own text.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace fulgur;
  try {
    const Manifest manifest = parse_manifest({reinterpret_cast<const char*>(data), size}, "file");
    fulgur::testing::require(parse_manifest(to_json(manifest), "file") == manifest);
  } catch (const CheckpointError&) {
  }
  return 0;
}
