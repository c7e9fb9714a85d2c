#pragma once

#include <ATen/core/Tensor.h>

#include <span>

#include "fulgur/core/metric.h"
#include "fulgur/metrics/samples.h"

namespace fulgur::metrics {

struct MeanSquaredErrorOptions {
  bool squared = true;  // false: the square root of the error (RMSE)
};

// The mean of (preds - target)^2 over all elements. preds and target: the same shape, any dtype; the difference is
// taken in float64. Before the first update() the value is NaN (0/0).
class MeanSquaredError final : public Metric {
 public:
  explicit MeanSquaredError(const MeanSquaredErrorOptions& options = {});
  void update(const at::Tensor& preds, const at::Tensor& target, const Valid& valid = std::nullopt);

 protected:
  at::Tensor value_of(std::span<const at::Tensor> states) const override;

 private:
  MeanSquaredErrorOptions options_;
};

// The mean of |preds - target|; otherwise like MeanSquaredError.
class MeanAbsoluteError final : public Metric {
 public:
  MeanAbsoluteError();
  void update(const at::Tensor& preds, const at::Tensor& target, const Valid& valid = std::nullopt);

 protected:
  at::Tensor value_of(std::span<const at::Tensor> states) const override;
};

// The values of a single batch.
at::Tensor mean_squared_error(const at::Tensor& preds, const at::Tensor& target,
                              const MeanSquaredErrorOptions& options = {});
at::Tensor mean_absolute_error(const at::Tensor& preds, const at::Tensor& target);

}  // namespace fulgur::metrics
