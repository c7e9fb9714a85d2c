#include "fulgur/metrics/auroc.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <tuple>
#include <vector>

#include "fulgur/base/error.h"

namespace fulgur::metrics {
namespace {

constexpr int64_t kNotCounted = -1;  // marks a target that does not count; dropping it would wait for the accelerator

// For each positive sample, the negatives with a lower score plus half of those with the same. The counts are integers,
// so the area is exact.
at::Tensor area_under_curve(const at::Tensor& scores, const at::Tensor& is_positive, const at::Tensor& is_negative) {
  const auto [sorted, order] = scores.contiguous().sort();
  const at::Tensor negatives_before =
      at::cat({at::zeros({1}, order.options()), is_negative.index_select(0, order).cumsum(0)});
  const at::Tensor lower = negatives_before.index_select(0, at::searchsorted(sorted, sorted));
  const at::Tensor lower_or_same =
      negatives_before.index_select(0, at::searchsorted(sorted, sorted, /*out_int32=*/false, /*right=*/true));
  const at::Tensor twice_won = (lower + lower_or_same).mul(is_positive.index_select(0, order)).sum();
  return internal::safe_divide(twice_won, 2 * is_positive.sum() * is_negative.sum());
}

AUROCOptions checked(AUROCOptions options) {
  options.num_classes = internal::checked_num_classes("AUROC", options.task, options.num_classes);
  if (options.average == Average::micro) {
    throw UsageError("AUROC: average micro has no one-vs-rest meaning; write macro, weighted or none");
  }
  if (options.task == Task::binary && options.average != Average::macro) {
    throw UsageError(
        "AUROC: average is for multiclass; leave it out, or set num_classes instead of "
        "{.task = Task::binary}");
  }
  return options;
}

MetricStates no_samples(const AUROCOptions& options) {
  const at::Tensor scores =
      options.task == Task::binary ? at::empty({0}) : at::empty({0, checked(options).num_classes});
  return {{.name = "preds", .value = scores, .combine = Combine::concatenate},
          {.name = "target", .value = at::empty({0}, at::kLong), .combine = Combine::concatenate},
          {.name = "out_of_range", .value = at::zeros({}, at::kLong), .combine = Combine::sum}};
}

at::Tensor probabilities(const at::Tensor& scores) {
  const at::Tensor are_logits = scores.lt(0).logical_or_(scores.gt(1)).any();
  return at::where(are_logits, scores.softmax(1), scores);
}

at::Tensor binary_scores(const at::Tensor& preds, const at::Tensor& target) {
  internal::check_same_shape("AUROC", preds, target);
  TORCH_CHECK_VALUE(preds.is_floating_point(), "AUROC: preds must be floating-point scores; got ", preds.toString());
  return preds.detach().flatten();
}

}  // namespace

AUROC::AUROC(const AUROCOptions& options) : Metric("AUROC", no_samples(options)), options_(checked(options)) {}

void AUROC::update(const at::Tensor& preds, const at::Tensor& target, const Valid& valid) {
  const c10::NoGradGuard no_grad;
  const internal::Labels truth =
      internal::checked_target(name(), target, options_.num_classes, options_.ignore_index, valid);
  const at::Tensor scores = options_.task == Task::binary
                                ? binary_scores(preds, target)
                                : internal::checked_scores(name(), preds, target, options_.num_classes);
  accumulate({scores.to(target.device(), at::kFloat, /*non_blocking=*/false, /*copy=*/true),
              truth.values.masked_fill(truth.counted.logical_not(), kNotCounted), truth.out_of_range});
}

at::Tensor AUROC::value_of(std::span<const at::Tensor> states) const {
  const at::Tensor& target = states[1];
  const at::Tensor counted = target.ne(kNotCounted);
  const bool is_binary = options_.task == Task::binary;
  // Elements that do not count must neither change the decision between logits and probabilities nor be NaN.
  const at::Tensor table = is_binary ? states[0].unsqueeze(1) : states[0];
  const at::Tensor scores = table.masked_fill(counted.logical_not().unsqueeze(1), 0.0);
  const at::Tensor is_bad = scores.isnan().any().logical_or_(states[2].gt(0));
  const at::Tensor ranked = is_binary ? scores : probabilities(scores);

  std::vector<at::Tensor> areas, support;
  for (int64_t label = is_binary ? 1 : 0; label < options_.num_classes; ++label) {
    const at::Tensor is_positive = target.eq(label);
    const at::Tensor is_negative = counted.logical_and(is_positive.logical_not());
    areas.push_back(area_under_curve(ranked.select(1, is_binary ? 0 : label), is_positive, is_negative));
    support.push_back(is_positive.sum());
  }
  const at::Tensor area = internal::nan_if(is_bad, at::stack(areas));
  if (is_binary) return area.squeeze(0);
  if (options_.average == Average::none) return area;
  if (options_.average == Average::macro) return area.mean();
  const at::Tensor weight = at::stack(support);
  return internal::safe_divide((area * weight).sum(), weight.sum());
}

at::Tensor auroc(const at::Tensor& preds, const at::Tensor& target, const AUROCOptions& options) {
  AUROC metric(options);
  metric.update(preds, target);
  return metric.compute();
}

}  // namespace fulgur::metrics
