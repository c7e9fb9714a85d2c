#pragma once

#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

namespace fulgur {

// What autocast does, in this thread, with operations on a kind of device: where it is on, those that gain by it
// compute in `dtype`.
struct AutocastState {
  c10::DeviceType device_type = c10::kCPU;
  bool enabled = false;
  c10::ScalarType dtype = c10::kBFloat16;

  static AutocastState now(c10::DeviceType device_type);
};

// Autocast as given for as long as it lives, then as it was; the counterpart of Python's torch.autocast. The outermost
// one drops, at its end, the cast weights that autocast keeps: an update inside leaves them stale, so that one must
// span a forward pass and no step. Threading: of the thread that makes it, only.
class AutocastScope {
 public:
  explicit AutocastScope(const AutocastState& state);
  ~AutocastScope();
  AutocastScope(const AutocastScope&) = delete;
  AutocastScope& operator=(const AutocastScope&) = delete;

 private:
  const AutocastState before_;
  const bool other_dtype_;
};

}  // namespace fulgur
