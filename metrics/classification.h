#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <span>

#include "fulgur/core/metric.h"
#include "fulgur/metrics/labels.h"
#include "fulgur/metrics/samples.h"

namespace fulgur::metrics {

// The options of Accuracy, Precision, Recall and F1Score.
struct ClassificationOptions {
  Task task = Task::multiclass;
  int64_t num_classes = 0;                // at least 2; needed for multiclass
  int64_t top_k = 1;                      // right if target is among the k highest scores; multiclass scores only
  Average average = Average::micro;       // multiclass only
  std::optional<int64_t> ignore_index{};  // elements with this target do not count
  double threshold = 0.5;                 // binary: a score above it is label 1
};

// Counts, for each class, true positives (tp), false positives (fp) and false negatives (fn): 3 * num_classes numbers.
// update(): preds and target as Task says; the extra dimensions are samples too, but `valid` masks dim 0. If a binary
// score of a batch is outside [0, 1], the scores of the batch are logits, and go through a sigmoid first.
// compute(): 0-dim, or [num_classes] for Average::none. 0/0 is 0. Macro leaves out classes that occur neither in target
// nor in preds; with top_k > 1, except for F1Score, it leaves out all classes that do not occur in target.
namespace internal {

enum class Score { accuracy, precision, recall, f1_score };

class StatScores : public Metric {
 public:
  void update(const at::Tensor& preds, const at::Tensor& target, const Valid& valid = std::nullopt);

 protected:
  StatScores(std::string_view name, Score score, const ClassificationOptions& options);
  at::Tensor value_of(std::span<const at::Tensor> states) const override;

 private:
  Score score_;
  ClassificationOptions options_;
};

}  // namespace internal

// The share of correct samples; for single classes (macro, weighted, none): the recall of the class.
class Accuracy final : public internal::StatScores {
 public:
  explicit Accuracy(const ClassificationOptions& options)
      : StatScores("Accuracy", internal::Score::accuracy, options) {}
};

// tp / (tp + fp). In the binary task Precision, Recall and F1Score are those of label 1.
class Precision final : public internal::StatScores {
 public:
  explicit Precision(const ClassificationOptions& options)
      : StatScores("Precision", internal::Score::precision, options) {}
};

// tp / (tp + fn)
class Recall final : public internal::StatScores {
 public:
  explicit Recall(const ClassificationOptions& options) : StatScores("Recall", internal::Score::recall, options) {}
};

// 2 tp / (2 tp + fp + fn), the harmonic mean of precision and recall
class F1Score final : public internal::StatScores {
 public:
  explicit F1Score(const ClassificationOptions& options) : StatScores("F1Score", internal::Score::f1_score, options) {}
};

// What each cell of a confusion matrix is divided by.
enum class Normalize {
  none,     // not divided: int64 counts
  by_true,  // the sum of the row, so that a row adds up to 1: torchmetrics' "true"
  by_pred,  // the sum of the column
  by_all,   // the sum of all cells
};

struct ConfusionMatrixOptions {
  Task task = Task::multiclass;
  int64_t num_classes = 0;  // at least 2; needed for multiclass
  Normalize normalize = Normalize::none;
  std::optional<int64_t> ignore_index{};  // elements with this target do not count
  double threshold = 0.5;                 // binary: a score above it is label 1
};

// compute(): [num_classes, num_classes]; row: target, column: prediction. 0/0 is 0. If a label on an accelerator was
// out of range, all counts are -1. update(): as for Accuracy, but binary scores of elements that do not count have no
// part in whether the batch has logits; in Accuracy they have, as in torchmetrics.
class ConfusionMatrix final : public Metric {
 public:
  explicit ConfusionMatrix(const ConfusionMatrixOptions& options);
  void update(const at::Tensor& preds, const at::Tensor& target, const Valid& valid = std::nullopt);

 protected:
  at::Tensor value_of(std::span<const at::Tensor> states) const override;

 private:
  ConfusionMatrixOptions options_;
};

// The values of a single batch.
at::Tensor accuracy(const at::Tensor& preds, const at::Tensor& target, const ClassificationOptions& options);
at::Tensor precision(const at::Tensor& preds, const at::Tensor& target, const ClassificationOptions& options);
at::Tensor recall(const at::Tensor& preds, const at::Tensor& target, const ClassificationOptions& options);
at::Tensor f1_score(const at::Tensor& preds, const at::Tensor& target, const ClassificationOptions& options);
at::Tensor confusion_matrix(const at::Tensor& preds, const at::Tensor& target, const ConfusionMatrixOptions& options);

}  // namespace fulgur::metrics
