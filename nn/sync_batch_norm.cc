#include "fulgur/nn/sync_batch_norm.h"

#include <ATen/ops/batch_norm_update_stats.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/lerp.h>
#include <ATen/ops/native_batch_norm.h>
#include <ATen/ops/native_batch_norm_backward.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/custom_function.h>

#include <optional>
#include <tuple>

#include "fulgur/core/step_recording.h"
#include "fulgur/nn/batch_norm_owner.h"

namespace fulgur::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// The statistics of the batches of all ranks together, per channel.
struct BatchStatistics {
  at::Tensor count;  // fp64, 0-dimensional
  at::Tensor mean;   // fp64, [num_features]
  at::Tensor var;    // biased; fp64, [num_features]
};

at::ScalarType statistics_dtype(const at::Tensor& input) {
  return input.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

at::Tensor dense(const at::Tensor& tensor, const at::Tensor& like) {
  return tensor.contiguous(like.suggest_memory_format());
}

// Mean and biased variance, in the dtype of statistics.
std::tuple<at::Tensor, at::Tensor> local_statistics(const at::Tensor& input) {
  // If running statistics were not given, a 16-bit input would make 16-bit results.
  const at::TensorOptions options = input.options().dtype(statistics_dtype(input));
  const at::Tensor unused_mean = at::zeros({input.size(1)}, options);
  const at::Tensor unused_var = at::ones({input.size(1)}, options);
  return at::batch_norm_update_stats(input, unused_mean, unused_var, /*momentum=*/0.0);
}

BatchStatistics statistics_of_all_ranks(const at::Tensor& input, Collective& collective) {
  StepRecording::refuse(
      [] { return "SyncBatchNorm exchanges statistics, but not every rank need replay the same step"; });
  const int64_t num_features = input.size(1);
  const int64_t count = input.numel() / num_features;
  // A row for each rank: values per channel, means, biased variances.
  const at::Tensor rows =
      at::zeros({collective.world_size(), 1 + 2 * num_features}, input.options().dtype(at::kDouble));
  const at::Tensor counts = rows.narrow(1, 0, 1);
  const at::Tensor means = rows.narrow(1, 1, num_features);
  const at::Tensor vars = rows.narrow(1, 1 + num_features, num_features);
  if (count > 0) {
    const auto [mean, var] = local_statistics(input);
    counts[collective.rank()].fill_(count);
    means[collective.rank()].copy_(mean);
    vars[collective.rank()].copy_(var);
  }
  collective.all_gather(rows.view({-1})).wait();

  const at::Tensor total = counts.sum();
  // Reading the total would make every step wait for the device; a rank with two values need not read it.
  TORCH_CHECK(count >= 2 || total.item<double>() >= 2,
              "Expected more than 1 value per channel over all ranks when training, got ", total.item<int64_t>(),
              " over ", collective.world_size(), " ranks; this rank has input size ", input.sizes());
  const at::Tensor mean = (counts * means).sum(0) / total;
  return {total, mean, (counts * (vars + (means - mean).square())).sum(0) / total};
}

void update_running_statistics(const at::Tensor& running, const at::Tensor& batch, double momentum) {
  running.copy_(at::lerp(running.to(at::kDouble), batch, momentum));
}

// The arguments of native_batch_norm and its backward besides the input, all of one dtype.
struct Transform {
  at::Tensor weight;
  at::Tensor bias;
  at::Tensor mean;
  at::Tensor var;
  double eps;

  at::Tensor inv_std() const { return (var + eps).rsqrt(); }

  at::Tensor operator()(const at::Tensor& input) const {
    if (input.numel() == 0) return at::empty_like(input);
    return std::get<0>(at::native_batch_norm(input, weight, bias, mean, var, /*training=*/false, /*momentum=*/0, eps));
  }

  // Gradients of the input, as if the statistics did not depend on it, of the weight and of the bias.
  std::tuple<at::Tensor, at::Tensor, at::Tensor> backward(const at::Tensor& grad, const at::Tensor& input) const {
    if (input.numel() == 0) return {at::empty_like(input), at::zeros_like(mean), at::zeros_like(mean)};
    return at::native_batch_norm_backward(grad, input, weight, mean, var, mean, inv_std(), /*train=*/false, eps,
                                          {true, true, true});
  }
};

// Normalises by statistics that include the input.
class Normalize : public torch::autograd::Function<Normalize> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& input, const std::optional<at::Tensor>& weight,
                            const std::optional<at::Tensor>& bias, const BatchStatistics& batch, double eps,
                            Collective* collective) {
    const auto dtype = statistics_dtype(input);
    const auto cast = [&](const std::optional<at::Tensor>& tensor) {
      return tensor ? tensor->to(dtype) : at::Tensor();
    };
    const Transform transform{cast(weight), cast(bias), batch.mean.to(dtype), batch.var.to(dtype), eps};
    ctx->save_for_backward({input, weight.value_or(at::Tensor()), transform.mean, transform.var, batch.count});
    ctx->saved_data["eps"] = eps;
    ctx->saved_data["collective"] = reinterpret_cast<int64_t>(collective);  // an IValue holds no pointers
    return transform(input);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    TORCH_CHECK(!c10::GradMode::is_enabled(),
                "SyncBatchNorm has no second derivative: call backward without create_graph, or use BatchNorm");
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor &input = saved[0], &weight = saved[1], &mean = saved[2], &var = saved[3], &count = saved[4];
    // If a weight is given, its gradient has the dtype of statistics, not a 16-bit input's.
    const Transform transform{weight.defined() ? weight.to(mean.scalar_type()) : at::ones_like(mean), at::Tensor(),
                              mean, var, ctx->saved_data["eps"].toDouble()};
    auto [grad_input, grad_weight, grad_bias] = transform.backward(dense(grads[0], input), input);
    if (ctx->needs_input_grad(0)) {
      auto* collective = reinterpret_cast<Collective*>(ctx->saved_data["collective"].toInt());
      grad_input.add_(through_statistics(transform, input, grad_weight, grad_bias, count, *collective));
    }
    if (!weight.defined()) return {grad_input, {}, {}, {}, {}, {}};
    return {grad_input, grad_weight.to(weight.scalar_type()), grad_bias.to(weight.scalar_type()), {}, {}, {}};
  }

 private:
  // With xhat = (x - mean) / std the gradient of x is, over all n values of all ranks,
  //   weight / std * (dy - sum(dy) / n - xhat * sum(dy * xhat) / n),
  // and this function returns all but the first term: an affine function of xhat, as batch norm is. The sums are
  // the gradients of bias and weight.
  static at::Tensor through_statistics(const Transform& transform, const at::Tensor& input,
                                       const at::Tensor& grad_weight, const at::Tensor& grad_bias,
                                       const at::Tensor& count, Collective& collective) {
    const at::Tensor sums = at::cat({grad_weight, grad_bias}).to(at::kDouble);
    collective.all_reduce(sums).wait();
    const at::Tensor factor = (transform.weight * transform.inv_std()).neg().div(count);
    const auto dtype = transform.mean.scalar_type();
    const auto parts = (sums.view({2, -1}) * factor).to(dtype).unbind(0);
    return Transform{parts[0], parts[1], transform.mean, transform.var, transform.eps}(input);
  }
};

std::optional<at::Tensor> if_defined(const at::Tensor& tensor) {
  return tensor.defined() ? std::optional(tensor) : std::nullopt;
}

}  // namespace

template <size_t D, class Derived>
at::Tensor SyncBatchNormImplBase<D, Derived>::forward(const at::Tensor& input) {
  this->_check_input_dim(input);
  const double momentum = count_batch();
  if (alone() || !this->is_training()) {
    return torch::nn::functional::detail::batch_norm(input, running_mean, running_var, weight, bias,
                                                     this->is_training() || !options.track_running_stats(), momentum,
                                                     options.eps());
  }
  TORCH_CHECK(input.size(1) == options.num_features(), "expected input of ", options.num_features(),
              " channels (num_features), got input size ", input.sizes());
  const at::Tensor dense_input = dense(input, input);
  const BatchStatistics batch = statistics_of_all_ranks(dense_input.detach(), collective());
  if (running_mean.defined()) {
    update_running_statistics(running_mean, batch.mean, momentum);
    update_running_statistics(running_var, batch.var * (batch.count / (batch.count - 1)), momentum);
  }
  return Normalize::apply(dense_input, if_defined(weight), if_defined(bias), batch, options.eps(), &collective());
}

// Returns the weight of this batch in the running statistics.
template <size_t D, class Derived>
double SyncBatchNormImplBase<D, Derived>::count_batch() {
  if (this->is_training() && num_batches_tracked.defined()) {
    num_batches_tracked += 1;
    if (!options.momentum()) return 1.0 / num_batches_tracked.template item<double>();
  }
  return options.momentum().value_or(0.0);
}

template <size_t D, class Derived>
void SyncBatchNormImplBase<D, Derived>::_check_input_dim(const at::Tensor& input) {
  if constexpr (D == 1) {
    TORCH_CHECK(input.dim() == 2 || input.dim() == 3, "expected 2D or 3D input (got ", input.dim(), "D input)");
  } else {
    TORCH_CHECK(input.dim() == D + 2, "expected ", D + 2, "D input (got ", input.dim(), "D input)");
  }
}

template <size_t D, class Derived>
void SyncBatchNormImplBase<D, Derived>::pretty_print(std::ostream& stream) const {
  stream << std::boolalpha << "fulgur::nn::SyncBatchNorm" << D << "d(" << options.num_features()
         << ", eps=" << options.eps() << ", momentum=";
  if (options.momentum()) {
    stream << *options.momentum();
  } else {
    stream << "None";
  }
  stream << ", affine=" << options.affine() << ", track_running_stats=" << options.track_running_stats() << ')';
}

template class SyncBatchNormImplBase<1, SyncBatchNorm1dImpl>;
template class SyncBatchNormImplBase<2, SyncBatchNorm2dImpl>;
template class SyncBatchNormImplBase<3, SyncBatchNorm3dImpl>;

bool has_sync_batch_norm(const torch::nn::Module& module) {
  bool any = false;
  module.apply(
      [&any](const torch::nn::Module& part) { any = any || dynamic_cast<const SyncBatchNormBase*>(&part) != nullptr; });
  return any;
}

void attach_sync_batch_norm(torch::nn::Module& module, Collective* collective) {
  module.apply([collective](torch::nn::Module& part) {
    if (auto* norm = dynamic_cast<SyncBatchNormBase*>(&part)) norm->attach(collective);
  });
}

std::vector<std::string> plain_batch_norm_names(const torch::nn::Module& module) {
  std::vector<std::string> names;
  module.apply([&names](const std::string& name, const torch::nn::Module& part) {
    const auto* p = &part;
    if (dynamic_cast<const torch::nn::BatchNorm1dImpl*>(p) || dynamic_cast<const torch::nn::BatchNorm2dImpl*>(p) ||
        dynamic_cast<const torch::nn::BatchNorm3dImpl*>(p)) {
      names.push_back(name);
    }
    const auto* owner = dynamic_cast<const BatchNormOwner*>(p);
    if (owner == nullptr) return;
    for (const std::string& path : owner->batch_norm_paths()) {
      names.push_back(name.empty() || path.empty() ? name + path : name + '.' + path);
    }
  });
  return names;
}

}  // namespace fulgur::nn
