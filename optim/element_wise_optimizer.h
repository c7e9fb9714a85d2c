#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "fulgur/core/optimizer.h"
#include "fulgur/optim/fused_update.h"
#include "fulgur/optim/update_rules.h"

namespace fulgur::optim {

// How the next update is predicted: none: not at all; gradient: as an update by the last gradient; moments: as an
// update by a gradient of 0, from momentum and decay alone; repeat: as the last update again.
enum class PredictBy { none, gradient, moments, repeat };

// The common part of the optimizers with an update rule: state per element, a count of updates per parameter, and a
// step that is one pass of fused_update over each parameter on a CPU and one launch of update_on_gpu for all on a GPU,
// with the same bits. Torch's own kernels run on other devices, on GPUs that our kernels do not support, and for fp64
// parameters on a GPU. Parameters may be fp32, fp64 or 16-bit, with any strides. A 16-bit parameter has an fp32 master,
// made at the first update: the master is updated and rounded to the parameter, so that training is as in fp32; values
// written to such a parameter between steps are overwritten. The gradient of a 16-bit parameter may be 16-bit or fp32.
// Throws SetupError for a sparse gradient and for other dtypes.
class ElementWiseOptimizer : public Optimizer {
 public:
  // A tensor that the update rule keeps for each parameter.
  struct StateField {
    std::string_view name;  // as in torch's state dict
    size_t slot = 0;        // index in Slice::states
    double initial = 0.0;
  };

  // The state of one tensor. Until the first gradient its tensors are undefined, or memory without values.
  struct State {
    std::array<at::Tensor, kMaxStates> tensors;  // by slot
    at::Tensor master;                           // fp32, only for a 16-bit tensor
    int64_t num_updates = 0;

    // Where the exact values of its tensor are: in the master, if it has been updated.
    const at::Tensor& values_of(const at::Tensor& tensor) const {
      return num_updates > 0 && master.defined() ? master : tensor;
    }
  };

  using Optimizer::step;
  void step(const GradientTransform& transform) override;
  void step_with_torch(const GradientTransform& transform);  // the step by torch's kernels, on any device

  // Copies of tensors, of the same layouts. A copy gets the tensor's values after the update and the predicted next
  // update, which has learning rate `next_lr`; nothing is predicted for a tensor without a gradient. A copy may take
  // the place of the gradient. The copy of a 16-bit tensor is rounded from the master. It may be the tensor itself;
  // otherwise the tensor is not changed.
  struct Copies {
    const std::vector<at::Tensor>& tensors;
    PredictBy by = PredictBy::none;
    double next_lr = 0.0;
  };

  // Updates other tensors than the parameters of a group: parts of them, each with its gradient and, at the same
  // index of `states`, its state.
  void update(const Group& group, const std::vector<at::Tensor>& tensors, std::vector<State>& states,
              const GradientTransform& transform, const Copies* copies = nullptr);

  // The update with copies by torch's kernels, on any device.
  void update_and_copy_with_torch(const Group& group, const std::vector<at::Tensor>& tensors,
                                  std::vector<State>& states, const GradientTransform& transform, const Copies& copies);

  // Whether an update can be predicted before its gradient is known (optim/update_rules.h).
  bool has_momentum() const { return optim::has_momentum(rule(groups().front(), /*num_updates=*/1)); }

  // The states that step() keeps for a group, by parameter.
  std::vector<State>& states(size_t group);
  ParameterState parameter_state(size_t group, size_t index) override;
  void load_parameter_state(size_t group, size_t index, const ParameterState& state) override;

  bool is_element_wise() const final { return true; }
  std::optional<int64_t> num_state_values() const final { return static_cast<int64_t>(state_fields_.size()); }

  // The numbers that are kept for each element of a parameter.
  const std::vector<StateField>& state_fields() const { return state_fields_; }

  // The coefficients of the num_updates-th update, from 1, of a parameter of the group.
  virtual Rule rule(const Group& group, int64_t num_updates) const = 0;

 protected:
  ElementWiseOptimizer(std::string_view name, std::vector<ParamGroup> groups, double lr, double weight_decay,
                       std::vector<StateField> state_fields);

  // Parallel lists of tensors with the same number of updates.
  struct TensorLists {
    std::vector<at::Tensor> params, grads;
    std::array<std::vector<at::Tensor>, kMaxStates> states;  // by slot
    std::vector<at::Tensor> repeated(double value) const;    // a 0-dim fp32 tensor on their device, once per param
  };
  virtual void update_with_torch(const Group& group, int64_t num_updates, const TensorLists& lists,
                                 const std::optional<at::Tensor>& gradient_divisor) = 0;

 private:
  void next_update(const at::Tensor& param, State& state) const;
  Prediction prediction(const Group& group, int64_t num_updates, const Copies& copies) const;
  struct UpdatesOnGpu;

  template <class Body>
  void for_each_update(const Group& group, const std::vector<at::Tensor>& params, std::vector<State>& states,
                       const Copies* copies, const Body& body) const;
  void update_on_cpu(const Group& group, const std::vector<at::Tensor>& params, std::vector<State>& states,
                     const GradientScaling& scaling, const Copies* copies) const;
  void collect(const Group& group, const std::vector<at::Tensor>& params, std::vector<State>& states,
               const Copies* copies, UpdatesOnGpu& all) const;
  void step_on_device(const GradientTransform& transform);
  void run_torch_kernels(const Group& group, std::span<const at::Tensor> params, std::span<State> states,
                         const std::optional<at::Tensor>& gradient_divisor);

  std::vector<StateField> state_fields_;
  std::vector<std::vector<State>> states_;  // [group][parameter]
};

}  // namespace fulgur::optim
