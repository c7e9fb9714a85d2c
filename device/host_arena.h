#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstddef>
#include <cstdint>
#include <memory>

namespace fulgur {

struct HostArenaOptions {
  bool pinned = false;    // for copies to and from a GPU beside other work; if the system refuses, there is a warning
  int64_t processes = 1;  // of this machine that are about to need as much
};

// One piece of host memory, of exactly the size asked for, from which tensors are taken one after another: state that
// is updated on the CPU. Huge pages are asked for; unless it is pinned no page is touched here, so that each lies near
// the thread that first writes it. The memory lives as long as a tensor of it.
class HostArena {
 public:
  // Throws UsageError, before anything is allocated, if the machine (or its container) has less memory to spare.
  explicit HostArena(int64_t num_bytes, const HostArenaOptions& options = {});

  // 1-dim, of zeros, at a multiple of 64 bytes.
  at::Tensor take(int64_t num_elements, c10::ScalarType dtype);

  int64_t num_bytes() const;

  static int64_t bytes_for(int64_t num_elements, c10::ScalarType dtype);  // what take() uses up

  // Bytes that this process may still allocate. FULGUR_HOST_MEMORY_GIB in the environment takes the place of what the
  // system says. Throws UsageError if that is no number above 0.
  static int64_t available_bytes();

 private:
  struct Memory;
  std::shared_ptr<Memory> memory_;
  int64_t used_ = 0;
};

}  // namespace fulgur
