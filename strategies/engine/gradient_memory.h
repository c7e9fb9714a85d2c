#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

namespace fulgur {

class ScopedGradientMemory;

// Memory in which autograd makes the gradients of large parameters on a CPU: where other ranks read them, which saves a
// copy, or in the same place in every step, which saves the page faults of new memory.
//   memory.add({{.dtype = at::kFloat, .num_elements = param.numel(), .region_elements = param.numel()}}, allocate);
//   {
//     const ScopedGradientMemory scope = memory.open();
//     loss.backward();
//   }
//   memory.region_of(param.grad());  // a tensor of region_elements, or an undefined one
// While a scope is open, a tensor that its thread makes gets the memory of a free region, if there is one for exactly
// as many bytes. Which tensors do depends on the backward: if one that is not a gradient takes a region, a gradient has
// ordinary memory. A region is free again when the last tensor in it is gone. Such tensors may outlive this object.
// Threading: one thread at a time, and add() without an open scope. A scope belongs to the thread that opened it;
// tensors may be dropped on any thread.
class GradientMemory {
 public:
  static constexpr int64_t kLeastBytes = 1 << 20;  // a smaller gradient is not worth a region

  struct Request {
    c10::ScalarType dtype;
    int64_t num_elements;     // the length of the gradient
    int64_t region_elements;  // at least as many
  };

  // Adds regions, all in one piece of memory: `allocate` returns a 1-dim tensor of bytes (at::kByte) on the CPU, of
  // zeros if regions are to begin with zeros.
  // The first call in a process wraps its CPU allocator (c10::SetCPUAllocator) for good; outside of scopes the wrapper
  // passes all requests on. If the program has set an allocator of a higher priority, no region is added.
  void add(const std::vector<Request>& requests, const std::function<at::Tensor(int64_t num_bytes)>& allocate);

  [[nodiscard]] ScopedGradientMemory open() const;

  // A 1-dim tensor in a free region for as many elements; undefined if there is none.
  at::Tensor make(c10::ScalarType dtype, int64_t num_elements) const;

  // The region that a gradient, or a tensor from make(), fills; undefined if it lies elsewhere.
  at::Tensor region_of(const at::Tensor& gradient) const;

 private:
  friend class ScopedGradientMemory;

  struct Region;
  class Allocator;
  using Regions = std::vector<std::shared_ptr<Region>>;

  std::shared_ptr<Regions> regions_{};  // null: none
};

class [[nodiscard]] ScopedGradientMemory {
 public:
  ScopedGradientMemory() : ScopedGradientMemory(nullptr) {}  // changes nothing
  ~ScopedGradientMemory();
  ScopedGradientMemory(const ScopedGradientMemory&) = delete;
  ScopedGradientMemory& operator=(const ScopedGradientMemory&) = delete;

 private:
  friend class GradientMemory;

  explicit ScopedGradientMemory(std::shared_ptr<GradientMemory::Regions> regions);

  const std::shared_ptr<GradientMemory::Regions> regions_;
  GradientMemory::Regions* const outer_;  // the scope around this one has them
};

}  // namespace fulgur
