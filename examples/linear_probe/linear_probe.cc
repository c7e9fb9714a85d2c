#include "examples/linear_probe/linear_probe.h"

#include <fmt/format.h>
#include <torch/optim/lbfgs.h>

namespace linear_probe {
namespace {

namespace F = torch::nn::functional;

constexpr double kPenalty = 1e-3;       // factor of the squared weights' sum
constexpr double kMinDeviation = 1e-6;  // a feature that is constant stays near 0
constexpr int64_t kMaxIterations = 200;

}  // namespace

double probe(const LabelledFeatures& train, const LabelledFeatures& held_out) {
  const auto mean = train.features.mean(0), deviation = train.features.std(0).clamp_min(kMinDeviation);
  const auto standardised = [&](const at::Tensor& features) { return (features - mean) / deviation; };
  const auto x = standardised(train.features);
  const int64_t num_classes = train.labels.max().item<int64_t>() + 1;
  const auto weight = at::zeros({num_classes, x.size(1)}, x.options()).requires_grad_();
  const auto bias = at::zeros({num_classes}, x.options()).requires_grad_();

  torch::optim::LBFGS optimizer(
      {weight, bias}, torch::optim::LBFGSOptions(1.0).max_iter(kMaxIterations).line_search_fn("strong_wolfe"));
  optimizer.step([&] {
    optimizer.zero_grad();
    const auto loss = F::cross_entropy(at::linear(x, weight, bias), train.labels) + kPenalty * weight.square().sum();
    loss.backward();
    return loss;
  });

  const at::NoGradGuard no_grad;
  const auto predicted = at::linear(standardised(held_out.features), weight, bias).argmax(1);
  return predicted.eq(held_out.labels).to(at::kDouble).mean().item<double>();
}

void print_margin(std::string_view title, const DigitFeatures& trained, const DigitFeatures& random) {
  const double accuracy = probe(trained.train, trained.held_out), baseline = probe(random.train, random.held_out);
  fmt::print("{}: {:.3f} of the digits; with random weights: {:.3f}; margin: {:.3f}\n", title, accuracy, baseline,
             accuracy - baseline);
}

}  // namespace linear_probe
