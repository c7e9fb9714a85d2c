#include "fulgur/core/metric.h"

#include <ATen/ops/cat.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <utility>

#include "fulgur/core/step_recording.h"

namespace fulgur {
namespace {

bool has_shape_of(const MetricState& state, const at::Tensor& value) {
  const size_t fixed_from = state.combine == Combine::sum ? 0 : 1;  // the dims from here on must be equal
  return value.dim() == state.value.dim() && value.sizes().slice(fixed_from) == state.value.sizes().slice(fixed_from);
}

}  // namespace

Metric::Metric(std::string_view name, MetricStates initial)
    : name_(name), initial_(std::move(initial)), parts_(initial_.size()) {}

at::Tensor Metric::compute(const MetricStates& states) const {
  const c10::NoGradGuard no_grad;
  check_states(states);
  std::vector<at::Tensor> values;
  for (const MetricState& state : states) values.push_back(state.value);
  return value_of(values);
}

void Metric::reset() {
  for (auto& parts : parts_) parts.clear();
}

MetricStates Metric::states() const {
  MetricStates states = initial_;
  for (size_t i = 0; i < states.size(); ++i) {
    const auto& parts = parts_[i];
    states[i].value = parts.size() > 1 ? at::cat(parts) : (parts.empty() ? initial_[i].value : parts.front()).clone();
  }
  return states;
}

void Metric::set_states(const MetricStates& states) {
  check_states(states);
  for (size_t i = 0; i < states.size(); ++i) parts_[i] = {states[i].value.clone()};
}

// Sums are not added to in place: copies of the metric share the tensors, and a tensor that was made in inference mode
// cannot be written to later.
void Metric::accumulate(std::initializer_list<at::Tensor> amounts) {
  check_amounts(amounts);
  StepRecording::refuse([&] { return std::string("the metric " + name_ + " is updated, which no replay does"); });
  for (size_t i = 0; i < initial_.size(); ++i) {
    const at::Tensor& given = amounts.begin()[i];
    const at::Tensor amount = given.detach().to(initial_[i].value.scalar_type());
    auto& parts = parts_[i];
    for (at::Tensor& part : parts) part = part.to(amount.device());
    if (initial_[i].combine == Combine::sum && !parts.empty()) {
      parts.front() = parts.front().add(amount);
    } else {
      parts.push_back(amount.is_alias_of(given) ? amount.clone() : amount);  // the caller may change it later
    }
  }
}

void Metric::check_amounts(std::span<const at::Tensor> amounts) const {
  TORCH_CHECK_VALUE(amounts.size() == initial_.size(), name_, " has ", initial_.size(), " states, accumulate got ",
                    amounts.size(), "; give it one tensor for each, in the order of the constructor's");
  for (size_t i = 0; i < amounts.size(); ++i) {
    const at::Tensor& expected = initial_[i].value;
    TORCH_CHECK_VALUE(amounts[i].defined(), name_, ": accumulate got an undefined tensor for '", initial_[i].name, "'");
    TORCH_CHECK_VALUE(
        has_shape_of(initial_[i], amounts[i]), name_, ": the state '", initial_[i].name, "' has the shape ",
        expected.sizes(), ", accumulate got ", amounts[i].sizes(),
        initial_[i].combine == Combine::sum ? "; they must be the same" : "; they may differ in dim 0 only");
  }
}

void Metric::check_states(const MetricStates& states) const {
  TORCH_CHECK_VALUE(states.size() == initial_.size(), name_, " has ", initial_.size(), " states; got ", states.size(),
                    ". Give it what states() of the same metric returned");
  for (size_t i = 0; i < states.size(); ++i) {
    const at::Tensor& expected = initial_[i].value;
    const at::Tensor& value = states[i].value;
    TORCH_CHECK_VALUE(states[i].name == initial_[i].name && value.defined() && has_shape_of(initial_[i], value) &&
                          value.scalar_type() == expected.scalar_type(),
                      name_, ": state ", i, " is '", initial_[i].name, "', ", expected.scalar_type(), " ",
                      expected.sizes(), "; got '", states[i].name, "', ", value.toString(), " ",
                      value.defined() ? value.sizes() : c10::IntArrayRef{},
                      ". Give it what states() of a metric with the same options returned");
  }
}

MetricStates combined(std::span<const MetricStates> by_rank) {
  TORCH_CHECK_VALUE(!by_rank.empty(), "combined() was given the states of no rank; give it one entry per rank");
  const c10::NoGradGuard no_grad;
  MetricStates all = by_rank.front();
  for (size_t i = 0; i < all.size(); ++i) {
    std::vector<at::Tensor> values;
    for (const MetricStates& states : by_rank) {
      TORCH_CHECK_VALUE(states.size() == all.size() && states[i].name == all[i].name, "combined(): rank 0 has ",
                        all.size(), " states, '", all[i].name, "' at place ", i,
                        ", but another rank does not; the ranks must give the states of the same metric, in its order");
      values.push_back(states[i].value.to(all[i].value.device()));
    }
    if (all[i].combine == Combine::concatenate) {
      all[i].value = at::cat(values);
    } else {
      for (size_t rank = 1; rank < values.size(); ++rank) all[i].value = all[i].value.add(values[rank]);
    }
  }
  return all;
}

}  // namespace fulgur
