#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "core/batch.h"
#include "core/module.h"
#include "core/optimizer.h"

namespace fulgur {

// How a Module is trained: where its parameters, gradients and optimizer state live, and how an update reaches them.
// The loops call these members and know nothing else of it. strategies/presets.h registers the built-in ones, and
// yours. Threading: the training thread only.
class Strategy {
 public:
  virtual ~Strategy() = default;
  virtual std::string name() const = 0;  // as registered

  // Throws UsageError if it cannot train on these devices; called by the Trainer's constructor.
  virtual void check_devices(const std::vector<c10::Device>& devices) const = 0;

  // Brings the module to its devices. The module outlives teardown().
  virtual void setup(Module& module, const std::vector<c10::Device>& devices) = 0;

  // Takes over the optimizers that the module made, once it is on its devices. Only before fit.
  virtual void setup_optimizers(Optimizers optimizers) = 0;

  virtual Batch to_device(const Batch& batch) = 0;

  // One training step, in order. The loss still holds its graph.
  virtual at::Tensor training_step(const Batch& batch, int64_t batch_idx) = 0;
  virtual void zero_grad() = 0;
  virtual void backward(const at::Tensor& loss) = 0;
  virtual void optimizer_step() = 0;

  // The tensors to save, by the names that Python's state_dict gives them; a tied one once.
  virtual std::vector<std::pair<std::string, at::Tensor>> module_state() const = 0;

  // Gives the module back as ordinary tensors on the CPU. Also after a failed setup; does not throw.
  virtual void teardown() noexcept = 0;
};

}  // namespace fulgur
