#include "fulgur/metrics/labels.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <limits>
#include <vector>

#include "fulgur/base/error.h"

namespace fulgur::metrics::internal {
namespace {

void refuse_out_of_range(std::string_view metric, std::string_view what, const at::Tensor& labels,
                         const at::Tensor& wrong, int64_t num_classes) {
  const at::Tensor places = wrong.nonzero();
  if (places.size(0) == 0) return;
  const auto place = places[0].item<int64_t>();
  const auto label = labels[place].item<int64_t>();
  TORCH_CHECK_VALUE(false, metric, ": ", what, " holds the label ", label, " (element ", place, "); of ", num_classes,
                    " classes the labels are 0 to ", num_classes - 1, ". Correct the label",
                    what == "target" ? c10::str(", set ignore_index to ", label) : "", " or raise num_classes");
}

}  // namespace

int64_t checked_num_classes(std::string_view metric, Task task, int64_t num_classes) {
  if (task == Task::multiclass && num_classes < 2) {
    throw UsageError(c10::str(metric, ": num_classes is ", num_classes,
                              "; multiclass needs the number of classes, at least 2: ", metric,
                              "({.num_classes = 10}). For one score per sample write {.task = Task::binary}"));
  }
  if (task == Task::binary && num_classes != 0 && num_classes != 2) {
    throw UsageError(c10::str(metric, ": num_classes is ", num_classes,
                              " and task is binary; leave num_classes out, or task, for multiclass"));
  }
  return task == Task::binary ? 2 : num_classes;
}

Labels checked_labels(std::string_view metric, std::string_view what, const at::Tensor& labels,
                      const at::Tensor& counted, int64_t num_classes) {
  TORCH_CHECK_VALUE(c10::isIntegralType(labels.scalar_type(), /*includeBool=*/true), metric, ": ", what,
                    " must hold integer labels; got ", labels.scalar_type(), " ", labels.sizes());
  const at::Tensor flat = labels.detach().to(at::kLong).flatten();
  const at::Tensor flat_counted = counted.flatten();
  const at::Tensor in_range = flat.ge(0).logical_and_(flat.lt(num_classes));
  const at::Tensor wrong = flat_counted.logical_and(in_range.logical_not());
  if (flat.is_cpu()) refuse_out_of_range(metric, what, flat, wrong, num_classes);
  const at::Tensor right = flat_counted.logical_and(in_range);
  return {flat.masked_fill(right.logical_not(), 0), right, wrong.sum()};
}

Labels checked_target(std::string_view metric, const at::Tensor& target, int64_t num_classes,
                      std::optional<int64_t> ignore_index, const Valid& valid) {
  at::Tensor counts = counted(metric, valid, target);
  if (ignore_index) counts = counts.logical_and(target.to(at::kLong).ne(*ignore_index));
  return checked_labels(metric, "target", target, counts, num_classes);
}

at::Tensor checked_scores(std::string_view metric, const at::Tensor& preds, const at::Tensor& target,
                          int64_t num_classes) {
  std::vector<int64_t> expected = target.sizes().vec();
  if (!expected.empty()) expected.insert(expected.begin() + 1, num_classes);
  TORCH_CHECK_VALUE(!expected.empty() && preds.sizes() == expected && preds.is_floating_point(), metric,
                    ": for target of shape ", target.sizes(), " and ", num_classes,
                    " classes preds must be floating-point scores of shape ", c10::IntArrayRef(expected), "; got ",
                    preds.toString(), " ", preds.sizes());
  return preds.detach().movedim(1, -1).reshape({-1, num_classes});
}

at::Tensor safe_divide(const at::Tensor& numerator, const at::Tensor& denominator) {
  return numerator.to(at::kDouble).div(denominator).masked_fill_(denominator.eq(0), 0.0);
}

at::Tensor nan_if(const at::Tensor& condition, const at::Tensor& value) {
  return value.masked_fill(condition, std::numeric_limits<double>::quiet_NaN());
}

}  // namespace fulgur::metrics::internal
