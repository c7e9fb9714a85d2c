#include "checkpoint/pickle.h"

#include "core/error.h"
#include "tests/checkpoint/fuzz/require.h"

// A pickle is refused, or its tensors lie in their storages.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace fulgur;
  try {
    for (const auto& [name, tensor] : read_pickled_state_dict({reinterpret_cast<const char*>(data), size}, "file")) {
      testing::require(tensor.shape.size() == tensor.strides.size());
      int64_t last = tensor.offset, is_empty = false;
      for (size_t i = 0; i < tensor.shape.size(); ++i) {
        is_empty |= tensor.shape[i] == 0;
        last += (tensor.shape[i] - 1) * tensor.strides[i];
      }
      testing::require(is_empty || last < tensor.storage_numel);
    }
  } catch (const CheckpointError&) {
  }
  return 0;
}
