#include "fulgur/checkpoint/formats/pickle.h"

#include "fulgur/base/error.h"
#include "tests/checkpoint/fuzz/require.h"
#include "tests/testing/largest_allocation.h"

// A pickle is refused, or its tensors lie in their storages. In either case the reader allocates no more than the
// limits allow, which are small here, so that short files reach them.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace fulgur;
  constexpr PickleLimits kLimits{.max_values = 1 << 13, .max_copied_bytes = 1 << 18};
  const fulgur::testing::LargestAllocation allocated;
  try {
    for (const auto& [name, tensor] :
         read_pickled_state_dict({reinterpret_cast<const char*>(data), size}, "file", kLimits)) {
      fulgur::testing::require(tensor.shape.size() == tensor.strides.size());
      int64_t last = tensor.offset, is_empty = false;
      for (size_t i = 0; i < tensor.shape.size(); ++i) {
        is_empty |= tensor.shape[i] == 0;
        last += (tensor.shape[i] - 1) * tensor.strides[i];
      }
      fulgur::testing::require(is_empty || last < tensor.storage_numel);
    }
  } catch (const CheckpointError&) {
  }
  fulgur::testing::require(allocated.sum_of_all() <=
                           300 * kLimits.max_values + 4 * kLimits.max_copied_bytes + 64 * size);
  return 0;
}
