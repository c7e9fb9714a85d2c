#include "fulgur/metrics/aggregation.h"

#include <ATen/ExpandUtils.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

namespace fulgur::metrics {

Mean::Mean()
    : Metric("Mean", {{.name = "mean_value", .value = at::zeros({}, at::kDouble), .combine = Combine::sum},
                      {.name = "weight", .value = at::zeros({}, at::kDouble), .combine = Combine::sum}}) {}

void Mean::update(const at::Tensor& value, double weight, const Valid& valid) {
  update(value, at::scalar_tensor(weight, value.options().dtype(at::kDouble)), valid);
}

void Mean::update(const at::Tensor& value, const at::Tensor& weight, const Valid& valid) {
  const c10::NoGradGuard no_grad;
  TORCH_CHECK_VALUE(at::is_expandable_to(weight.sizes(), value.sizes()), name(), ": weight of shape ", weight.sizes(),
                    " cannot be broadcast to value of shape ", value.sizes());
  const at::Tensor counts = internal::counted(name(), valid, value);
  const at::Tensor weights = weight.detach().to(value.device(), at::kDouble).expand_as(value);
  accumulate({internal::sum_where(counts, value.detach().mul(weights)), internal::sum_where(counts, weights)});
}

void Mean::update(double value, double weight) { update(at::scalar_tensor(value, at::kDouble), weight); }

at::Tensor Mean::value_of(std::span<const at::Tensor> states) const { return states[0].div(states[1]); }

Sum::Sum() : Metric("Sum", {{.name = "sum_value", .value = at::zeros({}, at::kDouble), .combine = Combine::sum}}) {}

void Sum::update(const at::Tensor& value, const Valid& valid) {
  const c10::NoGradGuard no_grad;
  accumulate({internal::sum_where(internal::counted(name(), valid, value), value.detach())});
}

void Sum::update(double value) { update(at::scalar_tensor(value, at::kDouble)); }

at::Tensor Sum::value_of(std::span<const at::Tensor> states) const { return states[0].clone(); }

}  // namespace fulgur::metrics
