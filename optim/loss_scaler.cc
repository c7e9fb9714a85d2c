#include "fulgur/optim/loss_scaler.h"

#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <string>

#include "fulgur/core/gradient_clipping.h"

namespace fulgur::optim {
namespace {

LossScalerOptions checked(LossScalerOptions options) {
  check_fields("LossScaler", options);
  return options;
}

}  // namespace

void LossScalerOptions::describe(FieldVisitor& visit) {
  constexpr double kTiny = std::numeric_limits<float>::min(), kHuge = std::numeric_limits<float>::max();
  visit({.name = "init_scale", .help = "initial loss scale", .min = kTiny, .max = kHuge}, &init_scale);
  visit({.name = "growth_factor", .help = "factor of the loss scale after growth_interval finite steps", .min = 1.0},
        &growth_factor);
  visit({.name = "backoff_factor", .help = "factor of the loss scale after a skipped step", .min = kTiny, .max = 1.0},
        &backoff_factor);
  visit({.name = "growth_interval", .help = "steps from one growth to the next", .min = 1}, &growth_interval);
}

LossScaler::LossScaler(LossScalerOptions options)
    : options_(checked(options)), scale_(static_cast<float>(options.init_scale)) {}

at::Tensor LossScaler::scale(const at::Tensor& loss) const {
  return loss.to(c10::promoteTypes(loss.scalar_type(), c10::kFloat)).mul(static_cast<double>(scale_));
}

void LossScaler::update(bool found_inf) {
  if (found_inf) {
    scale_ = static_cast<float>(static_cast<double>(scale_) * options_.backoff_factor);
    growth_tracker_ = 0;
    TORCH_CHECK(scale_ >= std::numeric_limits<float>::min(), "the gradients are still not finite at a loss scale of ",
                scale_,
                ", so that it is not the scale: is the loss NaN or infinite? detect_anomaly finds the operation");
    return;
  }
  if (++growth_tracker_ < options_.growth_interval) return;
  const auto grown = static_cast<float>(static_cast<double>(scale_) * options_.growth_factor);
  if (std::isfinite(grown)) scale_ = grown;
  growth_tracker_ = 0;
}

void LossScaler::load_state(const LossScalerState& state) {
  TORCH_CHECK_VALUE(state.scale > 0.0 && std::isfinite(state.scale) && state.growth_tracker >= 0,
                    "LossScaler: a state has a scale above 0 and a growth_tracker of at least 0; got ", state.scale,
                    " and ", state.growth_tracker);
  scale_ = static_cast<float>(state.scale);
  growth_tracker_ = state.growth_tracker;
}

bool any_non_finite(const std::vector<at::Tensor>& gradients) {
  const c10::NoGradGuard no_grad;
  std::map<std::string, std::vector<at::Tensor>> by_device;
  for (const at::Tensor& gradient : gradients) {
    if (gradient.defined()) by_device[gradient.device().str()].push_back(gradient);
  }
  return std::ranges::any_of(
      by_device, [](const auto& group) { return !std::isfinite(joint_norm(group.second).template item<double>()); });
}

}  // namespace fulgur::optim
