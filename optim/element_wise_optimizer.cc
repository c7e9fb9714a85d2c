#include "fulgur/optim/element_wise_optimizer.h"

#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "fulgur/base/error.h"
#include "fulgur/base/huge_pages.h"
#include "fulgur/optim/gpu_update.h"
#include "fulgur/optim/gradient_divisor.h"

namespace fulgur::optim {
namespace {

// The largest factor by which PredictBy::repeat multiplies the last update where the learning rate rises. Without a
// bound, a schedule that restarts from a rate near 0 would multiply rounding errors.
constexpr double kLargestRepeat = 2.0;

// The tensor itself if the kernel can run over its memory, otherwise a copy that it can run over.
at::Tensor dense(const at::Tensor& tensor) {
  return tensor.is_non_overlapping_and_dense() ? tensor : tensor.contiguous();
}

// The gradient in the element order of `memory`, and in a dtype that the kernel reads.
at::Tensor as_kernel_gradient(const at::Tensor& grad, const at::Tensor& memory) {
  const bool read_as_it_is = grad.scalar_type() == memory.scalar_type() ||
                             (memory.scalar_type() == at::kFloat && is_16_bit(grad.scalar_type()));
  if (read_as_it_is && grad.strides() == memory.strides()) return grad;
  return at::empty_like(memory).copy_(grad);
}

// The update of one tensor by a kernel. Without a copy the tensor itself is written. A copy that is rounded from the
// master is written instead of the tensor. Ownership: borrows the tensor and the copy.
class KernelUpdate {
 public:
  KernelUpdate(const at::Tensor& param, const at::Tensor& master, const at::Tensor* copy)
      : param_(param), memory_(master.defined() ? master : dense(param)), has_copy_(copy != nullptr) {
    grad_ = as_kernel_gradient(param.grad(), memory_);
    if (has_copy_ && !master.defined()) grad_ = grad_.to(memory_.scalar_type());
    rounded_ = !has_copy_ && master.defined() ? &param : copy;
    if (rounded_ == nullptr) return;
    const bool has_same_layout = rounded_->strides() == memory_.strides();
    target_ = has_same_layout ? *rounded_ : at::empty_like(memory_, memory_.options().dtype(rounded_->scalar_type()));
  }

  c10::ScalarType dtype() const { return memory_.scalar_type(); }

  // The argument of the kernel. Its memory is valid as long as this object.
  template <class T>
  Slice<T> slice(const std::array<at::Tensor, kMaxStates>& states) const {
    Slice<T> slice{.param = memory_.mutable_data_ptr<T>(),
                   .grad = grad_.const_data_ptr(),
                   .grad_type = grad_.scalar_type(),
                   .num_elements = memory_.numel()};
    for (size_t i = 0; i < kMaxStates; ++i) {
      if (states[i].defined()) slice.states[i] = states[i].mutable_data_ptr<T>();
    }
    if (rounded_ != nullptr) {
      slice.copy_out = target_.mutable_data_ptr();
      slice.copy_type = target_.scalar_type();
    }
    return slice;
  }

  // After the kernel: results go to tensors of another layout, and autograd notices the change, as after an in-place
  // operation.
  void finish() const {
    if (rounded_ != nullptr && !target_.is_same(*rounded_)) rounded_->copy_(target_);
    if (rounded_ == nullptr && !memory_.is_same(param_)) param_.copy_(memory_);
    if (rounded_ != nullptr) rounded_->unsafeGetTensorImpl()->bump_version();
    if (!has_copy_) param_.unsafeGetTensorImpl()->bump_version();
  }

 private:
  const at::Tensor& param_;
  at::Tensor memory_;  // the master or, without one, the tensor
  at::Tensor grad_;
  bool has_copy_;
  const at::Tensor* rounded_ =
      nullptr;         // the copy, or a tensor that has a master; null: the kernel writes `memory_` alone
  at::Tensor target_;  // memory for `rounded_`
};

GradientScaling scaling_of(const GradientTransform& transform) {
  GradientScaling scaling;
  if (transform.factor.defined()) scaling.factor = transform.factor.item<double>();
  if (transform.clip_value) scaling.clip_value = *transform.clip_value;
  return scaling;
}

// Whether the parameters are on a CPU. All lie on one device, but some groups may be empty.
bool are_on_cpu(const std::vector<Optimizer::Group>& groups) {
  const auto first = std::ranges::find_if(groups, [](const Optimizer::Group& group) { return !group.params.empty(); });
  return first == groups.end() || first->params.front().is_cpu();
}

// Whether our kernel can update these tensors of a GPU; fp64 is for torch's kernels.
bool are_for_our_kernel(const std::vector<at::Tensor>& tensors) {
  return tensors.empty() ||
         (has_update_kernels(tensors.front().device()) &&
          std::ranges::none_of(tensors, [](const at::Tensor& tensor) { return tensor.scalar_type() == at::kDouble; }));
}

}  // namespace

// The updates that a launch makes.
struct ElementWiseOptimizer::UpdatesOnGpu {
  std::vector<gpu::RuleOfSlices> rules;
  std::vector<gpu::SliceOnGpu> slices;
  std::vector<KernelUpdate> updates;
  c10::Device device = c10::kCPU;

  void run(const GradientTransform& transform) const {
    if (slices.empty()) return;
    update_on_gpu(rules, slices, transform, device);
    for (const KernelUpdate& update : updates) update.finish();
  }
};

ElementWiseOptimizer::ElementWiseOptimizer(std::string_view name, std::vector<ParamGroup> given_groups, double lr,
                                           double weight_decay, std::vector<StateField> state_fields)
    : Optimizer(name, std::move(given_groups), lr, weight_decay), state_fields_(std::move(state_fields)) {}

void ElementWiseOptimizer::step(const GradientTransform& transform) {
  if (!are_on_cpu(groups())) return step_on_device(transform);
  const c10::NoGradGuard no_grad;
  const GradientScaling scaling = scaling_of(transform);
  for (size_t g = 0; g < groups().size(); ++g) {
    update_on_cpu(groups()[g], groups()[g].params, states(g), scaling, nullptr);
  }
}

void ElementWiseOptimizer::step_on_device(const GradientTransform& transform) {
  if (!std::ranges::all_of(groups(), [](const Group& group) { return are_for_our_kernel(group.params); })) {
    return step_with_torch(transform);
  }
  const c10::NoGradGuard no_grad;
  UpdatesOnGpu all;
  for (size_t g = 0; g < groups().size(); ++g) collect(groups()[g], groups()[g].params, states(g), nullptr, all);
  all.run(transform);
}

void ElementWiseOptimizer::step_with_torch(const GradientTransform& transform) {
  const c10::NoGradGuard no_grad;
  const std::optional<at::Tensor> divisor = gradient_divisor(transform, params());
  for (size_t g = 0; g < groups().size(); ++g) run_torch_kernels(groups()[g], groups()[g].params, states(g), divisor);
}

void ElementWiseOptimizer::update(const Group& group, const std::vector<at::Tensor>& tensors,
                                  std::vector<State>& states, const GradientTransform& transform,
                                  const Copies* copies) {
  if (tensors.empty()) return;
  const c10::NoGradGuard no_grad;
  if (tensors.front().is_cpu()) {
    update_on_cpu(group, tensors, states, scaling_of(transform), copies);
  } else if (are_for_our_kernel(tensors)) {
    UpdatesOnGpu all;
    collect(group, tensors, states, copies, all);
    all.run(transform);
  } else if (copies == nullptr) {
    run_torch_kernels(group, tensors, states, gradient_divisor(transform, tensors));
  } else {
    update_and_copy_with_torch(group, tensors, states, transform, *copies);
  }
}

std::vector<ElementWiseOptimizer::State>& ElementWiseOptimizer::states(size_t group) {
  for (size_t g = states_.size(); g < groups().size(); ++g) states_.emplace_back(groups()[g].params.size());
  return states_[group];
}

ParameterState ElementWiseOptimizer::parameter_state(size_t group, size_t index) {
  const State& own = states(group)[index];
  ParameterState state{.num_updates = own.num_updates};
  if (own.num_updates == 0) return state;
  for (const StateField& field : state_fields_) state.tensors.emplace(field.name, own.tensors[field.slot]);
  if (own.master.defined()) state.tensors.emplace("master", own.master);
  return state;
}

void ElementWiseOptimizer::load_parameter_state(size_t group, size_t index, const ParameterState& state) {
  State& own = states(group)[index];
  own = {.tensors = {}, .master = {}, .num_updates = state.num_updates};
  if (own.num_updates == 0) return;
  const at::Tensor& param = groups()[group].params[index];
  if (is_16_bit(param.scalar_type())) {
    own.master = state.tensors.contains("master") ? state.tensor("master").to(param.device(), at::kFloat, false, true)
                                                  : dense(param.detach().to(at::kFloat));
  }
  const at::Tensor memory = own.master.defined() ? own.master : dense(param.detach());
  for (const StateField& field : state_fields_) {
    own.tensors[field.slot] = in_huge_pages(at::empty_like(memory)).copy_(state.tensor(field.name));
  }
}

void ElementWiseOptimizer::next_update(const at::Tensor& param, State& state) const {
  if (param.grad().layout() != at::kStrided) {
    throw SetupError(
        fmt::format("{}: a gradient is sparse; give the embedding that it comes from sparse = false", name()));
  }
  if (!at::isFloatingType(param.scalar_type())) {
    throw SetupError(fmt::format("{}: a parameter has dtype {}; it must be fp32, fp64, bf16 or fp16", name(),
                                 c10::toString(param.scalar_type())));
  }
  if (state.num_updates++ > 0) return;
  if (is_16_bit(param.scalar_type())) {
    state.master.defined() ? state.master.copy_(param) : state.master = dense(param.detach().to(at::kFloat));
  }
  const at::Tensor memory = state.master.defined() ? state.master : dense(param.detach());
  for (const StateField& field : state_fields_) {
    at::Tensor& tensor = state.tensors[field.slot];
    if (!tensor.defined()) tensor = in_huge_pages(at::empty_like(memory));
    tensor.fill_(field.initial);
  }
}

// The prediction for copies of tensors with this number of updates, the last one included.
Prediction ElementWiseOptimizer::prediction(const Group& group, int64_t num_updates, const Copies& copies) const {
  if (copies.by == PredictBy::repeat) {
    return {.repeat = copies.next_lr < kLargestRepeat * group.lr ? copies.next_lr / group.lr : kLargestRepeat};
  }
  if (copies.by == PredictBy::none) return {};
  Group next{.params = {}, .lr = copies.next_lr, .weight_decay = group.weight_decay, .name = {}};
  return {.next = rule(next, num_updates + 1), .gradient = copies.by == PredictBy::gradient ? 1.0 : 0.0};
}

// Counts an update of each tensor that has a gradient, and calls body(tensor, state, copy or null, rule with
// prediction, whether that is another one than for the tensor before). A copy of a tensor without a gradient gets its
// values.
template <class Body>
void ElementWiseOptimizer::for_each_update(const Group& group, const std::vector<at::Tensor>& params,
                                           std::vector<State>& states, const Copies* copies, const Body& body) const {
  std::optional<gpu::RuleOfSlices> rule_of_last;  // nearly always all parameters have the same number of updates
  int64_t num_updates_of_last = 0;
  for (size_t i = 0; i < params.size(); ++i) {
    const at::Tensor* copy = copies == nullptr ? nullptr : &copies->tensors[i];
    if (!params[i].grad().defined()) {
      if (copy != nullptr) at::Tensor(*copy).copy_(states[i].values_of(params[i]));
      continue;
    }
    next_update(params[i], states[i]);
    const int64_t num_updates = states[i].num_updates;
    const bool is_another = num_updates != std::exchange(num_updates_of_last, num_updates);
    if (is_another) {
      rule_of_last = {.rule = rule(group, num_updates),
                      .prediction = copies == nullptr ? Prediction{} : prediction(group, num_updates, *copies)};
    }
    body(params[i], states[i], copy, *rule_of_last, is_another);
  }
}

void ElementWiseOptimizer::update_on_cpu(const Group& group, const std::vector<at::Tensor>& params,
                                         std::vector<State>& states, const GradientScaling& scaling,
                                         const Copies* copies) const {
  for_each_update(group, params, states, copies,
                  [&](const at::Tensor& param, const State& state, const at::Tensor* copy, const gpu::RuleOfSlices& by,
                      bool /*is_another*/) {
                    const KernelUpdate update(param, state.master, copy);
                    if (update.dtype() == at::kDouble) {
                      fused_update(by.rule, update.slice<double>(state.tensors), scaling, by.prediction);
                    } else {
                      fused_update(by.rule, update.slice<float>(state.tensors), scaling, by.prediction);
                    }
                    update.finish();
                  });
}

void ElementWiseOptimizer::collect(const Group& group, const std::vector<at::Tensor>& params,
                                   std::vector<State>& states, const Copies* copies, UpdatesOnGpu& all) const {
  for_each_update(group, params, states, copies,
                  [&](const at::Tensor& param, const State& state, const at::Tensor* copy, const gpu::RuleOfSlices& by,
                      bool is_another) {
                    if (is_another) all.rules.push_back(by);
                    const KernelUpdate& update = all.updates.emplace_back(param, state.master, copy);
                    all.slices.push_back({update.slice<float>(state.tensors), all.rules.size() - 1});
                    all.device = param.device();
                  });
}

void ElementWiseOptimizer::run_torch_kernels(const Group& group, std::span<const at::Tensor> params,
                                             std::span<State> states, const std::optional<at::Tensor>& divisor) {
  std::map<int64_t, TensorLists> by_num_updates;
  std::vector<std::pair<at::Tensor, at::Tensor>> with_masters;
  for (size_t i = 0; i < params.size(); ++i) {
    const at::Tensor& param = params[i];
    if (!param.grad().defined()) continue;
    next_update(param, states[i]);
    const State& state = states[i];
    if (state.master.defined()) with_masters.emplace_back(param, state.master);
    TensorLists& lists = by_num_updates[state.num_updates];
    lists.params.push_back(state.master.defined() ? state.master : param);
    lists.grads.push_back(param.grad().to(lists.params.back().scalar_type()));
    for (const StateField& field : state_fields_) lists.states[field.slot].push_back(state.tensors[field.slot]);
  }
  for (const auto& [num_updates, lists] : by_num_updates) update_with_torch(group, num_updates, lists, divisor);
  for (const auto& [param, master] : with_masters) param.copy_(master);
}

// The prediction takes a second update, of copies of a tensor and its state. Tensors are updated one by one, so that
// these copies exist of one tensor at a time.
void ElementWiseOptimizer::update_and_copy_with_torch(const Group& group, const std::vector<at::Tensor>& params,
                                                      std::vector<State>& states, const GradientTransform& transform,
                                                      const Copies& copies) {
  const c10::NoGradGuard no_grad;
  const std::optional<at::Tensor> divisor = gradient_divisor(transform, params);
  for (size_t i = 0; i < params.size(); ++i) {
    const at::Tensor& param = params[i];
    State& state = states[i];
    const bool is_updated = param.grad().defined();
    at::Tensor before, grad;
    if (is_updated && copies.by == PredictBy::repeat) before = state.values_of(param).clone();
    if (is_updated && copies.by == PredictBy::gradient) {
      const at::Tensor wide = param.grad().to(widened(param.scalar_type()));
      grad = divisor ? wide.div(*divisor) : wide.clone();
    }
    run_torch_kernels(group, {&param, 1}, {&state, 1}, divisor);
    at::Tensor ahead = state.values_of(param);
    const Prediction expected = is_updated ? prediction(group, state.num_updates, copies) : Prediction{};
    if (expected.next) {
      ahead = ahead.clone();
      TensorLists lists{.params = {ahead}, .grads = {grad.defined() ? grad : at::zeros_like(ahead)}, .states = {}};
      for (const StateField& field : state_fields_) lists.states[field.slot] = {state.tensors[field.slot].clone()};
      const Group next{.params = {}, .lr = copies.next_lr, .weight_decay = group.weight_decay, .name = {}};
      update_with_torch(next, state.num_updates + 1, lists, std::nullopt);
    } else if (expected.repeat != 0.0) {
      ahead = ahead.add(ahead.sub(before), expected.repeat);
    }
    at::Tensor(copies.tensors[i]).copy_(ahead);
  }
}

std::vector<at::Tensor> ElementWiseOptimizer::TensorLists::repeated(double value) const {
  return {params.size(), at::full({}, value, params.front().options().dtype(at::kFloat))};
}

}  // namespace fulgur::optim
