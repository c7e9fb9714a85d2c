#include "strategies/single_device.h"

#include <ATen/ops/scalar_tensor.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <utility>

#include "core/error.h"
#include "core/logging.h"
#include "core/module_state.h"

namespace fulgur {
namespace {

// One factor for the mean over micro-batches and the clipping of its norm, computed in fp64 where the gradients are, so
// that nothing waits for the device.
GradientTransform transform_for(const Optimizer& optimizer, const StepRequest& request) {
  GradientTransform transform;
  const double mean = 1.0 / static_cast<double>(request.micro_batches);
  const GradientClipping& clipping = request.clipping;
  if (clipping.active() && clipping.algorithm == ClipAlgorithm::norm) {
    transform.factor = clip_coefficient(gradient_norm(optimizer.params()).mul(mean), clipping.value).mul(mean);
  } else if (request.micro_batches > 1) {
    transform.factor =
        at::scalar_tensor(mean, at::device(optimizer.groups().front().params.front().device()).dtype(at::kDouble));
  }
  if (clipping.active() && clipping.algorithm == ClipAlgorithm::value) transform.clip_value = clipping.value;
  return transform;
}

}  // namespace

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
  current_device_.emplace(device_);
  module.to(device_);
}

at::Tensor SingleDevice::training_step(const Batch& batch, int64_t batch_idx) {
  return module_->training_step(batch, batch_idx);
}

Batch SingleDevice::to_device(const Batch& batch) { return module_->transfer_batch_to_device(batch, device_); }

void SingleDevice::zero_grad(size_t optimizer) { optimizers_[optimizer].zero_grad(); }

void SingleDevice::backward(const at::Tensor& loss) { module_->backward(loss); }

void SingleDevice::optimizer_step(size_t index, const StepRequest& request) {
  Optimizer& optimizer = optimizers_[index];
  if (optimizer.needs_closure()) return optimizer.step(request.closure);
  optimizer.step(transform_for(optimizer, request));
}

void SingleDevice::materialize_gradients(size_t index, int64_t micro_batches) {
  if (micro_batches == 1) return;
  scale_gradients(optimizers_[index].params(),
                  at::scalar_tensor(1.0 / static_cast<double>(micro_batches), at::kDouble));
}

std::vector<std::pair<std::string, at::Tensor>> SingleDevice::module_state() const {
  TORCH_CHECK(module_ != nullptr, "single_device: there is no module before setup");
  return named_state(*module_);
}

void SingleDevice::teardown() noexcept {
  optimizers_ = {};
  Module* module = std::exchange(module_, nullptr);
  if (module == nullptr) return;
  try {
    if (!device_.is_cpu()) module->zero_grad();  // Module::to leaves gradients behind
    module->to(c10::kCPU);
    current_device_.reset();
  } catch (const std::exception& error) {
    log_warning("the module could not be brought back to the CPU: {}", error.what());
  }
}

}  // namespace fulgur
