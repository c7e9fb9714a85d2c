#pragma once

#include <string>
#include <utility>
#include <vector>

#include "strategies/strategy.h"

namespace fulgur {

// One process, one device, no communication: libtorch's autograd and the optimizer as they are.
class SingleDevice final : public Strategy {
 public:
  std::string name() const override { return "single_device"; }
  void check_devices(const std::vector<c10::Device>& devices) const override;
  void setup(Module& module, const std::vector<c10::Device>& devices) override;
  void setup_optimizers(Optimizers optimizers) override { optimizers_ = std::move(optimizers); }
  Batch to_device(const Batch& batch) override { return device_.is_cpu() ? batch : batch.to(device_); }
  at::Tensor training_step(const Batch& batch, int64_t batch_idx) override;
  void zero_grad() override;
  void backward(const at::Tensor& loss) override;
  void optimizer_step() override;
  std::vector<std::pair<std::string, at::Tensor>> module_state() const override;
  void teardown() noexcept override;

 private:
  Module* module_ = nullptr;
  c10::Device device_{c10::kCPU};
  Optimizers optimizers_;
};

}  // namespace fulgur
