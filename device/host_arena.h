#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstddef>
#include <cstdint>
#include <memory>

namespace fulgur {

struct HostArenaOptions {
  bool pinned = false;    // for copies to and from a GPU in the background; a refusal by the system is a warning
  int64_t processes = 1;  // processes of this machine that each need as much
};

// One piece of host memory, of exactly the requested size, from which tensors are taken one after another: state that
// is updated on the CPU. Huge pages are requested; unless the memory is pinned no page is touched here, so that each
// page lies near the thread that first writes it. The memory lives as long as any tensor in it.
class HostArena {
 public:
  // Throws UsageError, before anything is allocated, if the machine (or its container) has less memory to spare.
  explicit HostArena(int64_t num_bytes, const HostArenaOptions& options = {});

  // Returns a 1-dim tensor of zeros, aligned to 64 bytes. Throws c10::Error if the arena is used up.
  at::Tensor take(int64_t num_elements, c10::ScalarType dtype);

  int64_t num_bytes() const;

  static int64_t bytes_for(int64_t num_elements, c10::ScalarType dtype);  // bytes that take() uses up

  // Bytes that this process may still allocate. FULGUR_HOST_MEMORY_GIB in the environment overrides the system's
  // figure. Throws UsageError if the variable is not a number above 0.
  static int64_t available_bytes();

 private:
  struct Memory;
  std::shared_ptr<Memory> memory_;
  int64_t used_ = 0;
};

}  // namespace fulgur
