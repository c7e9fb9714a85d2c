#include "fulgur/checkpoint/formats/safetensors_header.h"

#include "fulgur/base/error.h"
#include "tests/checkpoint/fuzz/require.h"

// A header is refused, or its tensors lie one after the other and end with the file.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace fulgur;
  const std::span<const char> bytes(reinterpret_cast<const char*>(data), size);
  try {
    const SafetensorsHeader header = parse_safetensors_header(bytes, static_cast<int64_t>(size), "file");
    int64_t position = 0;
    for (const SafetensorsEntry& entry : header.entries) {
      fulgur::testing::require(entry.begin == position && entry.begin <= entry.end && entry.numel() >= 0);
      position = entry.end;
    }
    fulgur::testing::require(header.data_begin + position == static_cast<int64_t>(size));
  } catch (const CheckpointError&) {
  }
  return 0;
}
