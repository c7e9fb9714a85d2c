#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <utility>
#include <vector>

#include "fulgur/core/lr_schedule.h"
#include "fulgur/core/optimizer.h"

namespace fulgur {

// The operations that a Module with automatic_optimization = false calls itself. The Trainer's implementation goes
// through the strategy and fires the hooks; optimizers are numbered as configure_optimizers returned them.
class ManualOptimization {
 public:
  virtual ~ManualOptimization() = default;
  virtual const Optimizers& optimizers() const = 0;
  virtual std::vector<LRSchedule>& lr_schedules() = 0;
  virtual void backward(const at::Tensor& loss) = 0;
  virtual void zero_grad(size_t optimizer) = 0;
  virtual void step(size_t optimizer) = 0;
};

// One optimizer, as training_step sees it in manual optimisation.
class ManualOptimizer {
 public:
  ManualOptimizer(ManualOptimization& owner, size_t index) : owner_(&owner), index_(index) {}

  void zero_grad() { owner_->zero_grad(index_); }
  void step() { owner_->step(index_); }  // counts as a global_step
  std::vector<Optimizer::Group>& groups() { return owner_->optimizers()[index_].groups(); }

 private:
  ManualOptimization* owner_;
  size_t index_;
};

// For the lifetime of the object, parameters that belong only to other optimizers do not require gradients, so that a
// GAN's generator step computes none for the discriminator. Afterwards requires_grad is restored.
class ScopedToggle {
 public:
  ScopedToggle(const Optimizers& optimizers, size_t index);
  ~ScopedToggle();
  ScopedToggle(ScopedToggle&&) noexcept = default;  // the moved-from object does nothing in its destructor
  ScopedToggle& operator=(ScopedToggle&&) = delete;

 private:
  std::vector<at::Tensor> turned_off_;
};

}  // namespace fulgur
