#include "optim/element_wise_optimizer.h"

#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/full_like.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>

#include <utility>

#include "core/error.h"
#include "optim/gradient_divisor.h"

namespace fulgur::optim {
namespace {

at::ScalarType kernel_type(at::ScalarType param_type) { return param_type == at::kDouble ? at::kDouble : at::kFloat; }

// The parameter itself if the kernel can run over its memory, else a copy that it can run over.
at::Tensor as_kernel_memory(const at::Tensor& param) {
  const at::ScalarType type = kernel_type(param.scalar_type());
  if (param.scalar_type() == type && param.is_non_overlapping_and_dense()) return param;
  return param.to(type).contiguous();
}

// Its gradient in the same order of elements, and of a dtype that the kernel reads.
at::Tensor as_kernel_gradient(const at::Tensor& grad, const at::Tensor& memory) {
  const bool read_as_it_is =
      grad.scalar_type() == memory.scalar_type() ||
      (memory.scalar_type() == at::kFloat && (grad.scalar_type() == at::kBFloat16 || grad.scalar_type() == at::kHalf));
  if (read_as_it_is && grad.strides() == memory.strides()) return grad;
  return at::empty_like(memory).copy_(grad);
}

template <class T>
Slice<T> slice_of(const at::Tensor& memory, const at::Tensor& grad, const std::array<at::Tensor, kMaxStates>& states) {
  Slice<T> slice{.param = memory.mutable_data_ptr<T>(),
                 .grad = grad.const_data_ptr(),
                 .grad_type = grad.scalar_type(),
                 .num_elements = memory.numel()};
  for (size_t i = 0; i < kMaxStates; ++i) {
    if (states[i].defined()) slice.states[i] = states[i].mutable_data_ptr<T>();
  }
  return slice;
}

GradientScaling scaling_of(const GradientTransform& transform) {
  GradientScaling scaling;
  if (transform.factor.defined()) scaling.factor = transform.factor.item<double>();
  if (transform.clip_value) scaling.clip_value = *transform.clip_value;
  return scaling;
}

}  // namespace

ElementWiseOptimizer::ElementWiseOptimizer(std::string_view name, std::vector<ParamGroup> given_groups, double lr,
                                           double weight_decay, std::vector<StateField> state_fields)
    : Optimizer(name, std::move(given_groups), lr, weight_decay), state_fields_(std::move(state_fields)) {
  for (const Group& group : groups()) states_.emplace_back(group.params.size());
}

ElementWiseOptimizer::State& ElementWiseOptimizer::next_update(size_t group_index, size_t param_index) {
  const at::Tensor& param = groups()[group_index].params[param_index];
  State& state = states_[group_index][param_index];
  if (param.grad().layout() != at::kStrided) {
    throw SetupError(
        fmt::format("{}: a gradient is sparse; give the embedding that it comes from sparse = false", name()));
  }
  if (!at::isFloatingType(param.scalar_type())) {
    throw SetupError(fmt::format("{}: a parameter has dtype {}; it must be fp32, fp64, bf16 or fp16", name(),
                                 c10::toString(param.scalar_type())));
  }
  if (state.num_updates++ == 0) {
    const at::Tensor memory = as_kernel_memory(param);
    for (const StateField& field : state_fields_) {
      state.tensors[field.slot] = at::full_like(memory, field.initial);
    }
  }
  return state;
}

void ElementWiseOptimizer::step(const GradientTransform& transform) {
  if (!groups().front().params.front().is_cpu()) return step_with_torch(transform);
  const c10::NoGradGuard no_grad;
  const GradientScaling scaling = scaling_of(transform);
  for (size_t g = 0; g < groups().size(); ++g) {
    const Group& group = groups()[g];
    std::optional<Rule> rule_of_last;  // nearly always all parameters have as many updates
    int64_t num_updates_of_last = 0;
    for (size_t i = 0; i < group.params.size(); ++i) {
      const at::Tensor& param = group.params[i];
      if (!param.grad().defined()) continue;
      State& state = next_update(g, i);
      if (state.num_updates != std::exchange(num_updates_of_last, state.num_updates)) {
        rule_of_last = rule(group, state.num_updates);
      }
      update_on_cpu(param, state, *rule_of_last, scaling);
    }
  }
}

void ElementWiseOptimizer::update_on_cpu(const at::Tensor& param, State& state, const Rule& rule,
                                         const GradientScaling& scaling) {
  const at::Tensor memory = as_kernel_memory(param);
  const at::Tensor grad = as_kernel_gradient(param.grad(), memory);
  if (memory.scalar_type() == at::kDouble) {
    fused_update(rule, slice_of<double>(memory, grad, state.tensors), scaling);
  } else {
    fused_update(rule, slice_of<float>(memory, grad, state.tensors), scaling);
  }
  if (memory.is_same(param)) {
    param.unsafeGetTensorImpl()->bump_version();  // so that autograd notices the change, as after an in-place operation
  } else {
    param.copy_(memory);
  }
}

void ElementWiseOptimizer::step_with_torch(const GradientTransform& transform) {
  const c10::NoGradGuard no_grad;
  const std::optional<at::Tensor> divisor = gradient_divisor(transform, *this);
  for (size_t g = 0; g < groups().size(); ++g) {
    const Group& group = groups()[g];
    std::map<int64_t, TensorLists> by_num_updates;
    for (size_t i = 0; i < group.params.size(); ++i) {
      if (!group.params[i].grad().defined()) continue;
      const State& state = next_update(g, i);
      TensorLists& lists = by_num_updates[state.num_updates];
      lists.params.push_back(group.params[i]);
      lists.grads.push_back(group.params[i].grad());
      for (const StateField& field : state_fields_) lists.states[field.slot].push_back(state.tensors[field.slot]);
    }
    for (const auto& [num_updates, lists] : by_num_updates) update_with_torch(group, num_updates, lists, divisor);
  }
}

std::vector<at::Tensor> ElementWiseOptimizer::TensorLists::repeated(double value) const {
  return {params.size(), at::full({}, value, params.front().options().dtype(at::kFloat))};
}

}  // namespace fulgur::optim
