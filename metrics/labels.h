#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string_view>

#include "fulgur/core/metric.h"
#include "fulgur/metrics/samples.h"

namespace fulgur::metrics {

enum class Task {
  binary,      // preds and target have the same shape; an element is a score or a label (0 or 1)
  multiclass,  // target [N, ...] holds labels below num_classes; preds holds labels too, or scores [N, num_classes,
               // ...]
};

// How the values of all classes become one value.
enum class Average {
  micro,     // the value over all samples together
  macro,     // the mean of the classes
  weighted,  // the mean of the classes, weighted by how often each is in target
  none,      // not averaged: a tensor [num_classes]
};

// Shared by the metrics over labels. A label outside the classes throws on the CPU. On an accelerator this check would
// stall every update: there such labels are counted instead, and make the value NaN.
namespace internal {

// The number of classes, 2 if binary. Throws UsageError if num_classes contradicts `task`.
int64_t checked_num_classes(std::string_view metric, Task task, int64_t num_classes);

struct Labels {
  at::Tensor values;        // int64 [M]; 0 where a label does not count
  at::Tensor counted;       // bool [M]
  at::Tensor out_of_range;  // 0-dim int64: number of labels that would count, but are outside the classes
};

// Flattens the labels and marks those that count. `what` is the argument's name, for messages.
Labels checked_labels(std::string_view metric, std::string_view what, const at::Tensor& labels,
                      const at::Tensor& counted, int64_t num_classes);

// The labels in `target`; ignored and invalid ones do not count.
Labels checked_target(std::string_view metric, const at::Tensor& target, int64_t num_classes,
                      std::optional<int64_t> ignore_index, const Valid& valid);

// Scores [N, num_classes, ...] as [M, num_classes], in the order of target [N, ...] as [M]. Throws c10::ValueError if
// the shapes do not fit.
at::Tensor checked_scores(std::string_view metric, const at::Tensor& preds, const at::Tensor& target,
                          int64_t num_classes);

// Divides in float64; the result is 0 wherever the denominator is 0.
at::Tensor safe_divide(const at::Tensor& numerator, const at::Tensor& denominator);

at::Tensor nan_if(const at::Tensor& condition, const at::Tensor& value);

}  // namespace internal
}  // namespace fulgur::metrics
