#pragma once

#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

namespace fulgur {

// The state of autocast in this thread for one device type: if enabled, the operations that gain by it compute in
// `dtype`.
struct AutocastState {
  c10::DeviceType device_type = c10::kCPU;
  bool enabled = false;
  c10::ScalarType dtype = c10::kBFloat16;

  static AutocastState now(c10::DeviceType device_type);
};

// Sets autocast for the lifetime of the object and restores it afterwards, like Python's torch.autocast. The end of the
// outermost scope drops the cast weights that autocast caches. An update within a scope would leave the cache stale, so
// that a scope must span a forward pass and no step. Threading: affects only the thread that makes it.
class ScopedAutocast {
 public:
  explicit ScopedAutocast(const AutocastState& state);
  ~ScopedAutocast();
  ScopedAutocast(const ScopedAutocast&) = delete;
  ScopedAutocast& operator=(const ScopedAutocast&) = delete;

 private:
  const AutocastState before_;
  const bool other_dtype_;
};

}  // namespace fulgur
