#include "strategies/single_device.h"

#include <fmt/format.h>

#include <unordered_set>

#include "core/error.h"
#include "core/logging.h"

namespace fulgur {

void SingleDevice::check_devices(const std::vector<c10::Device>& devices) const {
  if (devices.size() == 1) return;
  throw UsageError(
      fmt::format("strategy 'single_device' trains on one device, but devices = {}; set devices to 1 or "
                  "choose a strategy for several devices",
                  devices.size()));
}

void SingleDevice::setup(Module& module, const std::vector<c10::Device>& devices) {
  check_devices(devices);
  module_ = &module;
  device_ = devices.front();
  if (!device_.is_cpu()) module.to(device_);
}

at::Tensor SingleDevice::training_step(const Batch& batch, int64_t batch_idx) {
  return module_->training_step(batch, batch_idx);
}

void SingleDevice::zero_grad() {
  for (const auto& optimizer : optimizers_) optimizer->zero_grad();
}

void SingleDevice::backward(const at::Tensor& loss) { loss.backward(); }

void SingleDevice::optimizer_step() {
  for (const auto& optimizer : optimizers_) optimizer->step();
}

std::vector<std::pair<std::string, at::Tensor>> SingleDevice::module_state() const {
  std::vector<std::pair<std::string, at::Tensor>> state;
  std::unordered_set<const at::TensorImpl*> seen;
  const auto add = [&](const auto& named_tensors) {
    for (const auto& entry : named_tensors) {
      if (seen.insert(entry.value().unsafeGetTensorImpl()).second) state.emplace_back(entry.key(), entry.value());
    }
  };
  add(module_->named_parameters());
  add(module_->named_buffers());
  return state;
}

void SingleDevice::teardown() noexcept {
  optimizers_ = {};
  if (module_ == nullptr || device_.is_cpu()) return;
  try {
    module_->to(c10::kCPU);
  } catch (const std::exception& error) {
    log_warning("the module could not be brought back to the CPU: {}", error.what());
  }
}

}  // namespace fulgur
