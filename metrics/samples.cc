#include "fulgur/metrics/samples.h"

#include <ATen/ops/ones_like.h>
#include <c10/util/Exception.h>

#include <vector>

namespace fulgur::metrics {
namespace internal {

void check_same_shape(std::string_view metric, const at::Tensor& preds, const at::Tensor& target) {
  TORCH_CHECK_VALUE(preds.defined() && target.defined() && preds.sizes() == target.sizes(), metric,
                    ": preds and target must have the same shape; got ",
                    preds.defined() ? preds.sizes() : c10::IntArrayRef{}, " and ",
                    target.defined() ? target.sizes() : c10::IntArrayRef{});
}

at::Tensor counted(std::string_view metric, const Valid& valid, const at::Tensor& like) {
  if (!valid) return at::ones_like(like, like.options().dtype(at::kBool));
  TORCH_CHECK_VALUE(valid->defined() && valid->scalar_type() == at::kBool && valid->dim() == 1 && like.dim() >= 1 &&
                        valid->size(0) == like.size(0),
                    metric, ": valid must be a bool tensor with one value per sample, of shape [",
                    like.dim() >= 1 ? like.size(0) : 1, "]; got ", valid->toString(), " ",
                    valid->defined() ? valid->sizes() : c10::IntArrayRef{});
  std::vector<int64_t> shape(static_cast<size_t>(like.dim()), 1);
  shape.front() = like.size(0);
  return valid->to(like.device()).view(shape).expand_as(like);
}

at::Tensor sum_where(const at::Tensor& counted, const at::Tensor& values) {
  const at::Tensor wide = values.to(at::kDouble);
  return wide.masked_fill(counted.logical_not(), 0.0).sum();
}

}  // namespace internal
}  // namespace fulgur::metrics
