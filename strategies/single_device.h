#pragma once

#include <c10/core/DeviceGuard.h>

#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "strategies/flat_parameters.h"
#include "strategies/loss_scaling.h"
#include "strategies/precision.h"
#include "strategies/strategy.h"

namespace fulgur {

// One process, one device, no communication. The parameters lie in flat buckets; their gradients stay where autograd
// puts them, and the optimizer's kernel reads them there. 16-bit gradients of several micro-batches are summed in fp32.
class SingleDevice final : public Strategy {
 public:
  std::string name() const override { return "single_device"; }
  void check_devices(const std::vector<c10::Device>& devices) const override;
  void setup(Module& module, const std::vector<c10::Device>& devices, const Precision& precision) override;
  void setup_optimizers(Optimizers optimizers) override;
  const Optimizers& optimizers() const override { return optimizers_; }
  Batch to_device(const Batch& batch) override;
  at::Tensor training_step(const Batch& batch, int64_t batch_idx) override;
  void zero_grad(size_t optimizer) override;
  void backward(const at::Tensor& loss) override;
  StepReport optimizer_step(size_t optimizer, const StepRequest& request) override;
  void materialize_gradients(size_t optimizer, int64_t micro_batches) override;
  void all_reduce(std::span<double>, Reduction) override {}
  MetricStates combine(MetricStates states) override { return states; }
  std::vector<std::pair<std::string, at::Tensor>> module_state() const override;
  void teardown() noexcept override;

 private:
  StepReport scaled_step(size_t optimizer, const StepRequest& request);
  void flatten();

  Module* module_ = nullptr;
  c10::Device device_{c10::kCPU};
  std::optional<c10::DeviceGuard> current_device_;  // while it is set up, new tensors go where the module is
  Precision precision_;
  std::optional<ConvertedModule> converted_;
  Optimizers optimizers_;
  std::optional<FlatParameters> flat_;
  bool has_16_bit_params_ = false;
  std::optional<LossScaling> loss_scaling_;  // if the precision needs it
};

}  // namespace fulgur
