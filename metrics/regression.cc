#include "fulgur/metrics/regression.h"

#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

namespace fulgur::metrics {
namespace {

MetricStates sum_and_total(const char* sum_name) {
  return {{.name = sum_name, .value = at::zeros({}, at::kDouble), .combine = Combine::sum},
          {.name = "total", .value = at::zeros({}, at::kLong), .combine = Combine::sum}};
}

at::Tensor difference(std::string_view metric, const at::Tensor& preds, const at::Tensor& target) {
  internal::check_same_shape(metric, preds, target);
  return preds.detach().to(at::kDouble).sub(target.detach().to(at::kDouble));
}

}  // namespace

MeanSquaredError::MeanSquaredError(const MeanSquaredErrorOptions& options)
    : Metric("MeanSquaredError", sum_and_total("sum_squared_error")), options_(options) {}

void MeanSquaredError::update(const at::Tensor& preds, const at::Tensor& target, const Valid& valid) {
  const c10::NoGradGuard no_grad;
  const at::Tensor errors = difference(name(), preds, target).square();
  const at::Tensor counts = internal::counted(name(), valid, errors);
  accumulate({internal::sum_where(counts, errors), counts.sum()});
}

at::Tensor MeanSquaredError::value_of(std::span<const at::Tensor> states) const {
  const at::Tensor mean = states[0].div(states[1]);
  return options_.squared ? mean : mean.sqrt();
}

MeanAbsoluteError::MeanAbsoluteError() : Metric("MeanAbsoluteError", sum_and_total("sum_abs_error")) {}

void MeanAbsoluteError::update(const at::Tensor& preds, const at::Tensor& target, const Valid& valid) {
  const c10::NoGradGuard no_grad;
  const at::Tensor errors = difference(name(), preds, target).abs();
  const at::Tensor counts = internal::counted(name(), valid, errors);
  accumulate({internal::sum_where(counts, errors), counts.sum()});
}

at::Tensor MeanAbsoluteError::value_of(std::span<const at::Tensor> states) const { return states[0].div(states[1]); }

at::Tensor mean_squared_error(const at::Tensor& preds, const at::Tensor& target,
                              const MeanSquaredErrorOptions& options) {
  MeanSquaredError metric(options);
  metric.update(preds, target);
  return metric.compute();
}

at::Tensor mean_absolute_error(const at::Tensor& preds, const at::Tensor& target) {
  MeanAbsoluteError metric;
  metric.update(preds, target);
  return metric.compute();
}

}  // namespace fulgur::metrics
