#include "fulgur/strategies/precision.h"

#include <ATen/autocast_mode.h>
#include <c10/core/GradMode.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <array>

#include "fulgur/base/error.h"
#include "fulgur/base/logging.h"
#include "fulgur/base/names.h"

namespace fulgur {
namespace {

struct Known {
  std::string_view name, alias;  // the alias is Lightning's other spelling
  std::optional<c10::ScalarType> autocast_dtype{}, true_dtype{};
};

constexpr std::array kKnown = {
    Known{.name = "32", .alias = "32-true"},
    Known{.name = "64", .alias = "64-true", .true_dtype = c10::kDouble},
    Known{.name = "bf16-mixed", .alias = "bf16", .autocast_dtype = c10::kBFloat16},
    Known{.name = "16-mixed", .alias = "16", .autocast_dtype = c10::kHalf},
    Known{.name = "bf16-true", .alias = "bf16-true", .true_dtype = c10::kBFloat16},
    Known{.name = "16-true", .alias = "16-true", .true_dtype = c10::kHalf},
};

const Known& find(std::string_view name) {
  const std::string asked = canonical_name(name);
  const auto* found = std::ranges::find_if(kKnown, [&](const Known& known) {
    return asked == canonical_name(known.name) || asked == canonical_name(known.alias);
  });
  if (found != kKnown.end()) return *found;
  std::vector<std::string> names;
  for (const Known& known : kKnown) names.emplace_back(known.name);
  throw UsageError(unknown_name_message("precision", name, names));
}

// Gives a tensor, which stays the same object, another type.
void set_dtype(const at::Tensor& tensor, c10::ScalarType dtype) {
  tensor.mutable_grad().reset();  // the gradient would have the wrong type
  tensor.set_data(tensor.detach().to(dtype));
}

}  // namespace

Precision::Precision(std::string_view name) {
  const Known& known = find(name);
  name_ = known.name;
  autocast_dtype_ = known.autocast_dtype;
  true_dtype_ = known.true_dtype;
}

bool Precision::needs_loss_scale() const { return autocast_dtype_ == c10::kHalf || true_dtype_ == c10::kHalf; }

Batch Precision::convert(const Batch& batch) const {
  if (!true_dtype_) return batch;
  std::vector<Batch::Entry> entries;
  for (const auto& [name, tensor] : batch) {
    const bool floating = tensor.defined() && tensor.is_floating_point();
    entries.emplace_back(name, floating ? tensor.to(*true_dtype_) : tensor);
  }
  return Batch(std::move(entries));
}

void Precision::warn_if_slow_on(c10::DeviceType device_type) const {
  if (device_type == c10::kCPU && autocast_dtype_ == c10::kHalf) {
    log_warning("precision '16-mixed' on a CPU: 'bf16-mixed' is faster there, and needs no loss scale");
  }
}

ScopedPrecision::ScopedPrecision(const Precision& precision, c10::DeviceType device_type) {
  if (!precision.is_mixed()) return;
  autocast_.emplace(AutocastState{.device_type = device_type, .enabled = true, .dtype = *precision.autocast_dtype()});
}

ScopedFullPrecision::ScopedFullPrecision(const Precision& precision, c10::DeviceType device_type) {
  if (!precision.is_mixed()) return;
  autocast_.emplace(AutocastState{.device_type = device_type, .enabled = false, .dtype = *precision.autocast_dtype()});
}

ScopedFullPrecision::~ScopedFullPrecision() {
  if (autocast_) at::autocast::clear_cache();
}

ConvertedModule::ConvertedModule(torch::nn::Module& module, const Precision& precision) {
  if (!precision.true_dtype()) return;
  dtype_ = *precision.true_dtype();
  const auto convert = [&](const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_floating_point() || tensor.scalar_type() == dtype_) return;
    own_dtypes_.emplace_back(tensor, tensor.scalar_type());
    set_dtype(tensor, dtype_);
  };
  for (const at::Tensor& parameter : module.parameters()) convert(parameter);
  for (const at::Tensor& buffer : module.buffers()) convert(buffer);
}

void ConvertedModule::give_back() {
  for (const auto& [tensor, dtype] : own_dtypes_) {
    if (tensor.scalar_type() == dtype_) set_dtype(tensor, dtype);
  }
  own_dtypes_.clear();
}

}  // namespace fulgur
