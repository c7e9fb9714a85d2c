#include "strategies/single_device.h"

#include <ATen/ops/scalar_tensor.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "core/error.h"
#include "core/logging.h"
#include "core/module_state.h"
#include "optim/fused_update.h"

namespace fulgur {
namespace {

// One factor for the mean over micro-batches, the loss scale and the clipping of the norm, computed in fp64 where the
// gradients are, so that nothing waits for the device. `unscale` is the factor that undoes the loss scale.
GradientTransform transform_for(const Optimizer& optimizer, const StepRequest& request, double unscale) {
  GradientTransform transform;
  const double mean = unscale / static_cast<double>(request.micro_batches);
  const GradientClipping& clipping = request.clipping;
  if (clipping.active() && clipping.algorithm == ClipAlgorithm::norm) {
    transform.factor = clip_coefficient(gradient_norm(optimizer.params()).mul(mean), clipping.value).mul(mean);
  } else if (mean != 1.0) {
    transform.factor =
        at::scalar_tensor(mean, at::device(optimizer.groups().front().params.front().device()).dtype(at::kDouble));
  }
  if (clipping.active() && clipping.algorithm == ClipAlgorithm::value) transform.clip_value = clipping.value;
  return transform;
}

// So that the gradients of further micro-batches are added in fp32. The first one's stay as they are: a step of one
// micro-batch pays nothing.
void widen_gradients(const std::vector<at::Tensor>& params) {
  for (const at::Tensor& param : params) {
    const at::Tensor& grad = param.grad();
    if (grad.defined() && optim::is_16_bit(grad.scalar_type())) param.mutable_grad() = grad.to(at::kFloat);
  }
}

}  // namespace

void SingleDevice::check_devices(const std::vector<c10::Device>& devices) const {
  if (devices.size() == 1) return;
  throw UsageError(
      fmt::format("strategy 'single_device' trains on one device, but devices = {}; set devices to 1 or "
                  "choose a strategy for several devices",
                  devices.size()));
}

void SingleDevice::setup(Module& module, const std::vector<c10::Device>& devices, const Precision& precision) {
  check_devices(devices);
  module_ = &module;
  precision_ = precision;
  converted_.emplace(module, precision);
  device_ = devices.front();
  current_device_.emplace(device_);
  module.to(device_);
}

void SingleDevice::setup_optimizers(Optimizers optimizers) {
  optimizers_ = std::move(optimizers);
  flatten();
  has_16_bit_params_ = std::ranges::any_of(flat_->buckets(), [](const FlatParameters::Bucket& bucket) {
    return optim::is_16_bit(bucket.flat.scalar_type());
  });
  if (!precision_.needs_loss_scale()) return;
  for (const auto& optimizer : optimizers_) {
    if (!optimizer->needs_closure()) continue;
    throw UsageError(
        fmt::format("{} evaluates the loss several times in a step, which does not go with the loss scale "
                    "of precision '{}'; use 'bf16-mixed' or '32'",
                    optimizer->name(), precision_.name()));
  }
  loss_scaling_.emplace(optimizers_.size());
}

void SingleDevice::flatten() {
  flat_.reset();
  flat_.emplace(*module_, optimizers_);
}

at::Tensor SingleDevice::training_step(const Batch& batch, int64_t batch_idx) {
  const PrecisionScope scope(precision_, device_.type());
  return module_->training_step(batch, batch_idx);
}

Batch SingleDevice::to_device(const Batch& batch) {
  return module_->transfer_batch_to_device(precision_.convert(batch), device_);
}

void SingleDevice::zero_grad(size_t optimizer) {
  optimizers_[optimizer].zero_grad();
  if (loss_scaling_) loss_scaling_->zeroed(optimizer);
}

void SingleDevice::backward(const at::Tensor& loss) {
  const OutsidePrecisionScope outside(precision_, device_.type());
  if (has_16_bit_params_) {
    for (const auto& optimizer : optimizers_) widen_gradients(optimizer->params());
  }
  module_->backward(loss_scaling_ ? loss_scaling_->scale(loss) : loss);
}

StepReport SingleDevice::optimizer_step(size_t index, const StepRequest& request) {
  const OutsidePrecisionScope outside(precision_, device_.type());
  if (!flat_->are_those_of(optimizers_)) flatten();
  flat_->check_in_place();
  if (loss_scaling_) return scaled_step(index, request);
  Optimizer& optimizer = optimizers_[index];
  if (optimizer.needs_closure()) {
    optimizer.step(request.closure);
  } else {
    optimizer.step(transform_for(optimizer, request, /*unscale=*/1.0));
  }
  return {};
}

StepReport SingleDevice::scaled_step(size_t index, const StepRequest& request) {
  Optimizer& optimizer = optimizers_[index];
  const StepReport report{.skipped = loss_scaling_->is_non_finite(index, optimizer.params()),
                          .loss_scale = loss_scaling_->loss_scale()};
  if (!report.skipped) optimizer.step(transform_for(optimizer, request, loss_scaling_->factor(index)));
  loss_scaling_->stepped(index);
  return report;
}

void SingleDevice::materialize_gradients(size_t index, int64_t micro_batches) {
  const std::vector<at::Tensor> params = optimizers_[index].params();
  double factor = 1.0 / static_cast<double>(micro_batches);
  if (loss_scaling_) {
    loss_scaling_->is_non_finite(index, params);  // before a hook can hide it
    factor *= loss_scaling_->factor(index);
    loss_scaling_->unscaled(index);
  }
  if (factor != 1.0) scale_gradients(params, at::scalar_tensor(factor, at::kDouble));
}

std::vector<std::pair<std::string, at::Tensor>> SingleDevice::module_state() const {
  TORCH_CHECK(module_ != nullptr, "single_device: there is no module before setup");
  return named_state(*module_);
}

void SingleDevice::teardown() noexcept {
  flat_.reset();
  optimizers_ = {};
  loss_scaling_.reset();
  Module* module = std::exchange(module_, nullptr);
  if (module == nullptr) return;
  try {
    if (!device_.is_cpu()) module->zero_grad();  // Module::to leaves gradients behind
    module->to(c10::kCPU);
    if (converted_) converted_->give_back();
    current_device_.reset();
  } catch (const std::exception& error) {
    log_warning("the module could not be brought back to the CPU: {}", error.what());
  }
}

}  // namespace fulgur
