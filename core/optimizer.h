#pragma once

#include <ATen/core/Tensor.h>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fulgur/base/state.h"
#include "fulgur/core/lr_scheduler.h"

namespace fulgur {

// Parameters that share hyper-parameters. An unset value is the optimizer's default.
struct ParamGroup {
  std::vector<at::Tensor> params{};
  std::optional<double> lr{};
  std::optional<double> weight_decay{};
  std::string name{};  // what logs and messages call the group, such as "biases"; may be empty
};

// Returns one group with these parameters and the optimizer's default learning rate and weight decay.
std::vector<ParamGroup> one_group(std::vector<at::Tensor> params);

// Changes to the gradients that are made within the update, which saves a separate pass.
struct GradientTransform {
  at::Tensor factor{};                 // 0-dim, fp64, on the parameters' device; undefined: 1
  std::optional<double> clip_value{};  // after the factor: each element is cut to [-clip_value, clip_value]
};

// Recomputes the loss and its gradients; returns the loss, detached.
using Closure = std::function<at::Tensor()>;

// The state of an optimizer for a parameter, or for a part of one. Before the first update there are no tensors.
struct ParameterState {
  int64_t num_updates = 0;
  std::map<std::string, at::Tensor, std::less<>> tensors{};  // by torch's names; "master": fp32 copy, if 16-bit

  const at::Tensor& tensor(std::string_view name) const;  // throws CheckpointError if there is none
};

// Updates parameters from their gradients. optim/ has the built-in optimizers.
// Ownership: holds handles to the parameters, owns its state. Threading: one thread at a time.
class Optimizer {
 public:
  // Parameters that share a learning rate and a weight decay. Groups are numbered from 0.
  struct Group {
    std::vector<at::Tensor> params;
    double lr;  // the next step uses it; learning-rate schedules write it
    double weight_decay;
    std::string name;
    int64_t numel() const;  // elements of all parameters
  };

  // `name` begins every message. A tied parameter, which torch lists twice, counts once. Throws UsageError if there is
  // no parameter, a parameter is in two groups, undefined or not a leaf, a group's lr or weight_decay is negative, or
  // two groups have the same name.
  Optimizer(std::string_view name, std::vector<ParamGroup> groups, double lr, double weight_decay);
  virtual ~Optimizer() = default;

  Optimizer(Optimizer&&) = default;
  Optimizer& operator=(Optimizer&&) = default;

  // Adds parameters in the middle of a run, such as those of a layer that is trained from now on. Errors as above.
  virtual void add_param_group(ParamGroup group);

  // One update. A parameter without a gradient is left alone: no decay, no step. The update may change the gradients.
  virtual void step(const GradientTransform& transform) = 0;
  void step() { step(GradientTransform{}); }

  // True if the optimizer evaluates the loss several times in a step (LBFGS): then step(closure) is called instead.
  virtual bool needs_closure() const { return false; }
  virtual void step(const Closure& closure);

  // True for optimizers that derive from optim::ElementWiseOptimizer, and for no others: the update of an element
  // depends only on its own gradient and state, so that it may run on any slice of a parameter. An optimizer that needs
  // whole tensors, for example for norms, is refused where parameters are sharded.
  virtual bool is_element_wise() const { return false; }

  // How many numbers of state the optimizer keeps for each element of a parameter, in fp32 (fp64 for fp64 parameters);
  // nullopt: not known.
  virtual std::optional<int64_t> num_state_values() const { return std::nullopt; }

  // The state of one parameter: the memory itself, in tensors of the parameter's shape and strides.
  // load_parameter_state copies such a state; throws CheckpointError if it belongs to another optimizer.
  virtual ParameterState parameter_state(size_t /*group*/, size_t /*index*/) { return {}; }
  virtual void load_parameter_state(size_t /*group*/, size_t /*index*/, const ParameterState&) {}

  // The remaining state, without lr and weight_decay of the groups.
  virtual State state() const { return {}; }
  virtual void load_state(const State&) {}

  // Drops every gradient, so that the next backward allocates new ones, and an unused parameter has none.
  void zero_grad();

  std::string_view name() const { return name_; }
  std::vector<Group>& groups() { return groups_; }
  const std::vector<Group>& groups() const { return groups_; }
  std::vector<at::Tensor> params() const;

 private:
  void append(ParamGroup given);

  std::string name_;
  double default_lr_, default_weight_decay_;  // for groups that set none
  std::vector<Group> groups_;
};

// What configure_optimizers returns:
//   return optim::AdamW(parameters(), {.lr = 1e-3});
//   return {optim::AdamW(parameters(), {.lr = 1e-3}), {.scheduler = optim::StepLR::make({.step_size = 10})}};
// For manual optimisation, several optimizers are added one by one.
class Optimizers {
 public:
  Optimizers() = default;
  template <std::derived_from<Optimizer> T>
  Optimizers(T optimizer) {  // NOLINT: implicit, so that an optimizer can be returned
    add(std::move(optimizer));
  }
  template <std::derived_from<Optimizer> T>
  Optimizers(T optimizer, LRSchedulerConfig scheduler) {
    add(std::move(optimizer), std::move(scheduler));
  }

  template <std::derived_from<Optimizer> T>
  void add(T optimizer) {
    list_.push_back(std::make_unique<T>(std::move(optimizer)));
  }
  // Throws UsageError if the scheduler is null or its settings are wrong.
  template <std::derived_from<Optimizer> T>
  void add(T optimizer, LRSchedulerConfig scheduler) {
    add(std::move(optimizer));
    add_scheduler(std::move(scheduler));
  }
  void add(std::unique_ptr<Optimizer> optimizer) { list_.push_back(std::move(optimizer)); }
  void add_scheduler(LRSchedulerConfig scheduler);  // for the optimizer that was added last

  bool empty() const { return list_.empty(); }
  size_t size() const { return list_.size(); }
  Optimizer& operator[](size_t i) const { return *list_[i]; }
  auto begin() const { return list_.begin(); }
  auto end() const { return list_.end(); }

  // A learning-rate scheduler with the number of the optimizer that it is for.
  struct Scheduled {
    size_t optimizer;
    LRSchedulerConfig config;
  };
  std::vector<Scheduled>& schedulers() { return schedulers_; }
  const std::vector<Scheduled>& schedulers() const { return schedulers_; }

 private:
  std::vector<std::unique_ptr<Optimizer>> list_;
  std::vector<Scheduled> schedulers_;
};

}  // namespace fulgur
