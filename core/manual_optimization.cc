#include "fulgur/core/manual_optimization.h"

#include <unordered_set>

namespace fulgur {

ScopedToggle::ScopedToggle(const Optimizers& optimizers, size_t index) {
  std::unordered_set<const at::TensorImpl*> own;
  for (const at::Tensor& param : optimizers[index].params()) own.insert(param.unsafeGetTensorImpl());
  for (const auto& optimizer : optimizers) {
    for (const at::Tensor& param : optimizer->params()) {
      if (own.contains(param.unsafeGetTensorImpl()) || !param.requires_grad()) continue;
      param.set_requires_grad(false);
      turned_off_.push_back(param);
    }
  }
}

ScopedToggle::~ScopedToggle() {
  for (const at::Tensor& param : turned_off_) param.set_requires_grad(true);
}

}  // namespace fulgur
