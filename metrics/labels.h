#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string_view>

#include "core/metric.h"
#include "metrics/samples.h"

namespace fulgur::metrics {

enum class Task {
  binary,      // preds and target have the same shape: a score or a label of 0 and 1 each
  multiclass,  // target [N, ...] holds labels below num_classes; preds holds labels too, or scores [N, num_classes,
               // ...]
};

// A value per class becomes one.
enum class Average {
  micro,     // of all samples together
  macro,     // the mean of the classes
  weighted,  // the mean of the classes, weighted by how often each is in target
  none,      // not at all: a tensor [num_classes]
};

// What metrics over labels have in common. A label that is none of the classes throws if it is on the CPU. On an
// accelerator that would need a wait in each update; there it is counted, and makes the value NaN.
namespace internal {

// The number of classes, 2 if binary. Throws UsageError if it does not go with `task`.
int64_t checked_num_classes(std::string_view metric, Task task, int64_t num_classes);

struct Labels {
  at::Tensor values;        // int64 [M]; 0 where a label does not count
  at::Tensor counted;       // bool [M]
  at::Tensor out_of_range;  // 0-dim int64: how many that should count are none of the classes, and so do not
};

// The labels that count, flat. `what` is the argument's name, for messages.
Labels checked_labels(std::string_view metric, std::string_view what, const at::Tensor& labels,
                      const at::Tensor& counted, int64_t num_classes);

// The labels in `target`, without those that are ignored or not valid.
Labels checked_target(std::string_view metric, const at::Tensor& target, int64_t num_classes,
                      std::optional<int64_t> ignore_index, const Valid& valid);

// Scores [N, num_classes, ...] as [M, num_classes], in the order of target [N, ...] as [M]. Throws c10::ValueError if
// the shapes do not fit.
at::Tensor checked_scores(std::string_view metric, const at::Tensor& preds, const at::Tensor& target,
                          int64_t num_classes);

// float64; 0/0, and anything else over 0, is 0.
at::Tensor safe_divide(const at::Tensor& numerator, const at::Tensor& denominator);

at::Tensor nan_if(const at::Tensor& condition, const at::Tensor& value);

}  // namespace internal
}  // namespace fulgur::metrics
