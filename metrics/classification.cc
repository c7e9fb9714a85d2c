#include "fulgur/metrics/classification.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/util/StringUtil.h>

#include <tuple>

#include "fulgur/base/error.h"

namespace fulgur::metrics {
namespace {

using internal::Labels;
using internal::nan_if;
using internal::safe_divide;
using internal::Score;

// The labels of one batch; target.counted and target.out_of_range cover both target and preds.
struct LabelPairs {
  Labels target;
  at::Tensor preds;  // int64 [M]
};

// Which scores of a batch say whether all of them are logits.
enum class Judged { all, counted };

at::Tensor is_above(const at::Tensor& scores, const at::Tensor& judged, double threshold) {
  const at::Tensor are_logits = judged.lt(0).logical_or_(judged.gt(1)).any();
  return at::where(are_logits, scores.sigmoid(), scores).gt(threshold);
}

// The target if it is among the k highest scores, otherwise the class with the highest score.
at::Tensor best_of_top_k(const at::Tensor& scores, int64_t top_k, const at::Tensor& target) {
  if (top_k == 1) return scores.argmax(1);
  const at::Tensor highest = std::get<1>(scores.topk(top_k, 1));
  return at::where(highest.eq(target.unsqueeze(1)).any(1), target, highest.select(1, 0));
}

at::Tensor binary_labels(std::string_view metric, const at::Tensor& preds, const at::Tensor& target,
                         const Labels& flat_target, double threshold, Judged judged) {
  internal::check_same_shape(metric, preds, target);
  if (!preds.is_floating_point()) return preds;
  const at::Tensor scores = preds.detach();
  if (judged == Judged::all) return is_above(scores, scores, threshold);
  const at::Tensor is_left_out = flat_target.counted.logical_not().reshape(scores.sizes()).to(scores.device());
  return is_above(scores, scores.masked_fill(is_left_out, 0), threshold);
}

at::Tensor multiclass_labels(std::string_view metric, const at::Tensor& preds, const at::Tensor& target,
                             const Labels& flat_target, int64_t num_classes, int64_t top_k) {
  const bool are_labels = preds.sizes() == target.sizes() && !preds.is_floating_point();
  TORCH_CHECK_VALUE(!are_labels || top_k == 1, metric, ": top_k is ", top_k, " but preds of shape ", preds.sizes(),
                    " holds labels; give scores of shape [N, num_classes, ...]");
  if (are_labels) return preds;
  return best_of_top_k(internal::checked_scores(metric, preds, target, num_classes), top_k, flat_target.values);
}

LabelPairs label_pairs(std::string_view metric, const ClassificationOptions& options, const at::Tensor& preds,
                       const at::Tensor& target, const Valid& valid, Judged judged) {
  Labels truth = internal::checked_target(metric, target, options.num_classes, options.ignore_index, valid);
  const at::Tensor labels = options.task == Task::binary
                                ? binary_labels(metric, preds, target, truth, options.threshold, judged)
                                : multiclass_labels(metric, preds, target, truth, options.num_classes, options.top_k);
  const Labels found =
      internal::checked_labels(metric, "preds", labels.to(target.device()), truth.counted, options.num_classes);
  return {{truth.values, found.counted, truth.out_of_range.add(found.out_of_range)}, found.values};
}

// How often each label occurs where `counted` is true. Unlike bincount, it does not wait for an accelerator.
at::Tensor histogram(const at::Tensor& labels, const at::Tensor& counted, int64_t num_labels) {
  return at::zeros({num_labels}, labels.options()).scatter_add_(0, labels, counted.to(at::kLong));
}

ClassificationOptions checked(std::string_view metric, ClassificationOptions options) {
  options.num_classes = internal::checked_num_classes(metric, options.task, options.num_classes);
  if (options.top_k < 1 || options.top_k > options.num_classes) {
    throw UsageError(c10::str(metric, ": top_k is ", options.top_k, "; it must be between 1 and num_classes (",
                              options.num_classes, ")"));
  }
  if (options.task == Task::binary && (options.top_k != 1 || options.average != Average::micro)) {
    throw UsageError(c10::str(metric, ": top_k and average are for multiclass; leave them out, or set num_classes ",
                              "instead of {.task = Task::binary}"));
  }
  if (!(options.threshold >= 0.0 && options.threshold <= 1.0)) {
    throw UsageError(c10::str(metric, ": threshold is ", options.threshold, "; it must be between 0 and 1"));
  }
  return options;
}

ClassificationOptions as_classification(const ConfusionMatrixOptions& options) {
  return {.task = options.task,
          .num_classes = options.num_classes,
          .ignore_index = options.ignore_index,
          .threshold = options.threshold};
}

MetricStates counts_of(at::IntArrayRef shape) {
  return {{.name = "counts", .value = at::zeros(shape, at::kLong), .combine = Combine::sum},
          {.name = "out_of_range", .value = at::zeros({}, at::kLong), .combine = Combine::sum}};
}

// The counts as [3, num_classes], or [3] if there is no value per class.
at::Tensor relevant_counts(const at::Tensor& counts, Score score, const ClassificationOptions& options) {
  const bool is_binary = options.task == Task::binary;
  if (is_binary && score != Score::accuracy) return counts.select(1, 1);
  return is_binary || options.average == Average::micro ? counts.sum(1) : counts;
}

at::Tensor score_of(const at::Tensor& counts, Score score) {
  const at::Tensor tp = counts[0], fp = counts[1], fn = counts[2];
  switch (score) {
    case Score::precision:
      return safe_divide(tp, tp + fp);
    case Score::f1_score:
      return safe_divide(2 * tp, 2 * tp + fp + fn);
    default:
      return safe_divide(tp, tp + fn);
  }
}

at::Tensor average_of(const at::Tensor& values, const at::Tensor& counts, Score score,
                      const ClassificationOptions& options) {
  const at::Tensor support = counts[0] + counts[2];
  const bool found_is_enough = options.top_k == 1 || score == Score::f1_score;
  const at::Tensor occurs = found_is_enough ? support + counts[1] : support;
  const at::Tensor weight = options.average == Average::weighted ? support : occurs.gt(0).to(at::kLong);
  return safe_divide((weight * values).sum(), weight.sum());
}

MetricStates no_scores(std::string_view metric, const ClassificationOptions& options) {
  return counts_of({3, checked(metric, options).num_classes});
}

MetricStates no_cells(const ConfusionMatrixOptions& options) {
  const int64_t num_classes = checked("ConfusionMatrix", as_classification(options)).num_classes;
  return counts_of({num_classes, num_classes});
}

template <class Metric, class Options>
at::Tensor of_one_batch(const at::Tensor& preds, const at::Tensor& target, const Options& options) {
  Metric metric(options);
  metric.update(preds, target);
  return metric.compute();
}

}  // namespace

namespace internal {

StatScores::StatScores(std::string_view name, Score score, const ClassificationOptions& options)
    : Metric(name, no_scores(name, options)), score_(score), options_(checked(name, options)) {}

void StatScores::update(const at::Tensor& preds, const at::Tensor& target, const Valid& valid) {
  const c10::NoGradGuard no_grad;
  const auto [truth, found] = label_pairs(name(), options_, preds, target, valid, Judged::all);
  const at::Tensor right = truth.values.eq(found);
  const at::Tensor hits = truth.counted.logical_and(right);
  const at::Tensor misses = truth.counted.logical_and(right.logical_not());
  const int64_t num_classes = options_.num_classes;
  accumulate({at::stack({histogram(truth.values, hits, num_classes), histogram(found, misses, num_classes),
                         histogram(truth.values, misses, num_classes)}),
              truth.out_of_range});
}

at::Tensor StatScores::value_of(std::span<const at::Tensor> states) const {
  const at::Tensor counts = relevant_counts(states[0], score_, options_);
  const at::Tensor value = score_of(counts, score_);
  const bool is_one_value = value.dim() == 0 || options_.average == Average::none;
  return nan_if(states[1].gt(0), is_one_value ? value : average_of(value, counts, score_, options_));
}

}  // namespace internal

ConfusionMatrix::ConfusionMatrix(const ConfusionMatrixOptions& options)
    : Metric("ConfusionMatrix", no_cells(options)), options_(options) {
  options_.num_classes = internal::checked_num_classes(name(), options.task, options.num_classes);
}

void ConfusionMatrix::update(const at::Tensor& preds, const at::Tensor& target, const Valid& valid) {
  const c10::NoGradGuard no_grad;
  const auto [truth, found] = label_pairs(name(), as_classification(options_), preds, target, valid, Judged::counted);
  const int64_t n = options_.num_classes;
  accumulate({histogram(truth.values * n + found, truth.counted, n * n).view({n, n}), truth.out_of_range});
}

at::Tensor ConfusionMatrix::value_of(std::span<const at::Tensor> states) const {
  const at::Tensor& counts = states[0];
  const at::Tensor is_bad = states[1].gt(0);
  switch (options_.normalize) {
    case Normalize::by_true:
      return nan_if(is_bad, safe_divide(counts, counts.sum(1, /*keepdim=*/true)));
    case Normalize::by_pred:
      return nan_if(is_bad, safe_divide(counts, counts.sum(0, /*keepdim=*/true)));
    case Normalize::by_all:
      return nan_if(is_bad, safe_divide(counts, counts.sum()));
    case Normalize::none:
      break;
  }
  return counts.masked_fill(is_bad, -1);
}

at::Tensor accuracy(const at::Tensor& preds, const at::Tensor& target, const ClassificationOptions& options) {
  return of_one_batch<Accuracy>(preds, target, options);
}
at::Tensor precision(const at::Tensor& preds, const at::Tensor& target, const ClassificationOptions& options) {
  return of_one_batch<Precision>(preds, target, options);
}
at::Tensor recall(const at::Tensor& preds, const at::Tensor& target, const ClassificationOptions& options) {
  return of_one_batch<Recall>(preds, target, options);
}
at::Tensor f1_score(const at::Tensor& preds, const at::Tensor& target, const ClassificationOptions& options) {
  return of_one_batch<F1Score>(preds, target, options);
}
at::Tensor confusion_matrix(const at::Tensor& preds, const at::Tensor& target, const ConfusionMatrixOptions& options) {
  return of_one_batch<ConfusionMatrix>(preds, target, options);
}

}  // namespace fulgur::metrics
