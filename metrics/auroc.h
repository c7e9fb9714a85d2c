#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <span>

#include "fulgur/core/metric.h"
#include "fulgur/metrics/labels.h"
#include "fulgur/metrics/samples.h"

namespace fulgur::metrics {

struct AUROCOptions {
  Task task = Task::multiclass;
  int64_t num_classes = 0;                // at least 2; needed for multiclass
  Average average = Average::macro;       // multiclass only; macro, weighted or none
  std::optional<int64_t> ignore_index{};  // elements with this target do not count
};

// The area under the ROC curve: the probability that a random sample of a class has a higher score for it than a random
// sample of the others; ties count half. Binary: the area of label 1. Multiclass: each class against the rest.
// Exact, so it keeps every score (float32) and target: memory grows with the samples, and is freed by reset().
// update(): floating-point scores; shapes as Task says.
// compute(): 0-dim, or [num_classes] for Average::none. A class without positive samples, or without negative ones, has
// 0. NaN if a score is NaN. If any multiclass score is outside [0, 1], all are logits and go through a softmax first.
// The decision is made over all samples; torchmetrics decides batch by batch, so its value can depend on how samples
// are batched. Binary scores are only ranked, so logits and probabilities give the same value.
// Source: Hanley and McNeil 1982 (the area as a rank statistic).
class AUROC final : public Metric {
 public:
  explicit AUROC(const AUROCOptions& options);
  void update(const at::Tensor& preds, const at::Tensor& target, const Valid& valid = std::nullopt);

 protected:
  at::Tensor value_of(std::span<const at::Tensor> states) const override;

 private:
  AUROCOptions options_;
};

at::Tensor auroc(const at::Tensor& preds, const at::Tensor& target, const AUROCOptions& options);  // for a single batch

}  // namespace fulgur::metrics
