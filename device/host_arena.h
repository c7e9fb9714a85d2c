#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstddef>
#include <cstdint>
#include <memory>

namespace fulgur {

// One piece of host memory, of exactly the size asked for, from which tensors are taken one after another: state that
// is updated on the CPU. Huge pages are asked for; no page is touched here, so that each lies near the thread that
// first writes it. The memory lives as long as a tensor of it.
class HostArena {
 public:
  // `pinned`: for copies to and from a GPU beside other work; where the system refuses to pin it, it is not, with one
  // warning. Throws UsageError, before anything is allocated, if the machine (or its container) has less memory to
  // spare.
  HostArena(int64_t num_bytes, bool pinned);

  // 1-dim, of zeros, at a multiple of 64 bytes.
  at::Tensor take(int64_t num_elements, c10::ScalarType dtype);

  static int64_t bytes_for(int64_t num_elements, c10::ScalarType dtype);  // what take() uses up

  // Bytes that this process may still allocate.
  static int64_t available_bytes();

 private:
  struct Memory;
  std::shared_ptr<Memory> memory_;
  int64_t used_ = 0;
};

}  // namespace fulgur
