#include "examples/swav/losses.h"

#include <limits>

namespace swav {

at::Tensor swapped_prediction_loss(const at::Tensor& codes, const at::Tensor& scores, double temperature) {
  const auto log_probabilities = at::log_softmax(scores.to(codes.scalar_type()) / temperature, -1);
  const auto cross_entropy = -at::einsum("lbk,cbk->lc", {codes, log_probabilities}) / scores.size(1);
  const int64_t num_pairs = codes.size(0) * (scores.size(0) - 1);
  return (cross_entropy.sum() - cross_entropy.diagonal().sum()) / num_pairs;
}

at::Tensor nt_xent_loss(const at::Tensor& first, const at::Tensor& second, double temperature) {
  const auto views = at::cat({first, second});
  const auto is_itself = at::eye(views.size(0), views.options().dtype(at::kBool));
  const auto similarities = views.matmul(views.t()) / temperature;
  const auto partner = at::arange(views.size(0), views.options().dtype(at::kLong)).roll(first.size(0));
  return at::cross_entropy_loss(similarities.masked_fill(is_itself, -std::numeric_limits<double>::infinity()), partner);
}

}  // namespace swav
