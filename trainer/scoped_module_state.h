#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <string>

#include "fulgur/core/module_fwd.h"

namespace fulgur {

// Keeps a copy of a module's parameters, buffers and gradients, and restores them in its destructor. The module is
// borrowed.
class ScopedModuleState {
 public:
  explicit ScopedModuleState(Module& module);
  ~ScopedModuleState();
  ScopedModuleState(const ScopedModuleState&) = delete;
  ScopedModuleState& operator=(const ScopedModuleState&) = delete;

 private:
  Module& module_;
  std::map<std::string, at::Tensor> state_, gradients_;  // by name
};

}  // namespace fulgur
