#pragma once

#include <ATen/core/Tensor.h>

#include <span>

#include "fulgur/core/metric.h"
#include "fulgur/metrics/samples.h"

namespace fulgur::metrics {

// The weighted mean of values of any shape; torchmetrics' MeanMetric with nan_strategy "disable": a NaN stays visible.
// Before the first update() the value is NaN (0/0).
class Mean final : public Metric {
 public:
  Mean();
  void update(const at::Tensor& value, double weight = 1.0, const Valid& valid = std::nullopt);
  // `weight` is broadcast to the shape of `value`.
  void update(const at::Tensor& value, const at::Tensor& weight, const Valid& valid = std::nullopt);
  void update(double value, double weight = 1.0);

 protected:
  at::Tensor value_of(std::span<const at::Tensor> states) const override;
};

// The sum of values of any shape; torchmetrics' SumMetric, but a NaN stays visible.
class Sum final : public Metric {
 public:
  Sum();
  void update(const at::Tensor& value, const Valid& valid = std::nullopt);
  void update(double value);

 protected:
  at::Tensor value_of(std::span<const at::Tensor> states) const override;
};

}  // namespace fulgur::metrics
