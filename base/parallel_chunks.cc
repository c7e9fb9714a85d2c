#include "fulgur/base/parallel_chunks.h"

#include <ATen/TensorIterator.h>
#include <ATen/ops/from_blob.h>

namespace fulgur {

// at::parallel_for is a template that runs serially unless the file that calls it is compiled with -fopenmp, which
// would bring a second OpenMP runtime; so libtorch is given an iteration over `size` bytes, and the pointers identify
// the chunk.
void parallel_chunks(const void* memory, int64_t size, int64_t grain, c10::function_ref<void(int64_t, int64_t)> body) {
  if (size == 0) return;
  const at::Tensor bytes = at::from_blob(const_cast<void*>(memory), {size}, at::kByte);
  at::TensorIterator::borrowing_nullary_op(bytes).for_each(
      [&](char** data, const int64_t* /*strides*/, int64_t count, int64_t /*rows: 1*/) {
        const int64_t begin = data[0] - static_cast<const char*>(memory);
        body(begin, begin + count);
      },
      grain);
}

}  // namespace fulgur
