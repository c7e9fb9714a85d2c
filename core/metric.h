#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <initializer_list>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace fulgur {

// How the states of several ranks are combined into the state of all samples.
enum class Combine {
  sum,
  concatenate,  // along dim 0, in any order; sizes may differ
};

// One tensor of a metric's state.
struct MetricState {
  std::string name;
  at::Tensor value;
  Combine combine = Combine::sum;
};
using MetricStates = std::vector<MetricState>;

// A value over many batches, such as accuracy: update() adds a batch, compute() returns the value over all batches
// since reset(). Each class declares its own update().
//   metrics::Accuracy accuracy({.num_classes = 10});
//   for (const Batch& batch : loader) accuracy.update(model(batch["image"]), batch["label"]);
//   accuracy.compute().item<double>();
//   accuracy.reset();
// Over ranks: each rank takes states(), combines them with the states of the other ranks and computes the value of the
// result. The metric's own state does not change, so that a rank can continue with update(); combining twice counts
// nothing twice.
//   metric.compute(combined(gathered_states));
// Neither update() nor compute() waits for an accelerator: the state lives where the updates' tensors are (a metric
// without updates: on the CPU), and the value is a tensor there. Counts are int64, sums and values float64.
// A metric of your own names its states, adds a batch to them, and computes the value from them:
//   class MeanError final : public Metric {
//    public:
//     MeanError() : Metric("MeanError", {{"sum", at::zeros({}, at::kDouble)}, {"count", at::zeros({}, at::kLong)}}) {}
//     void update(const at::Tensor& preds, const at::Tensor& target) {
//       accumulate({(preds - target).abs().sum(), at::scalar_tensor(target.numel(), at::kLong)});
//     }
//    protected:
//     at::Tensor value_of(std::span<const at::Tensor> states) const override { return states[0] / states[1]; }
//   };
// Copies are independent of each other. A metric is used by one thread at a time.
// Errors: UsageError for options (in the constructor), c10::ValueError for data; a failed update() changes nothing.
// Source: the semantics are those of torchmetrics 1.9, unless a class says otherwise.
class Metric {
 public:
  virtual ~Metric() = default;

  at::Tensor compute() const { return compute(states()); }  // 0-dim, or of a shape that the class names
  at::Tensor compute(const MetricStates& states) const;     // the value of these states instead of the metric's own
  void reset();                                             // forgets every update

  MetricStates states() const;                  // copies; always the same names, order and dtypes
  void set_states(const MetricStates& states);  // replaces the metric's own states, as when a run resumes

 protected:
  // `initial`: the states without any sample, on the CPU. A state that is concatenated has 0 rows.
  Metric(std::string_view name, MetricStates initial);
  Metric(const Metric&) = default;
  Metric& operator=(const Metric&) = default;

  // Adds a batch: one tensor per state, in the order of `initial` and of the same shapes, except for dim 0 of states
  // that are concatenated. Other dtypes are converted. Throws c10::ValueError, before anything is added.
  void accumulate(std::initializer_list<at::Tensor> amounts);
  // The metric's value, given one tensor per state. Called with gradients off.
  virtual at::Tensor value_of(std::span<const at::Tensor> states) const = 0;

  const std::string& name() const { return name_; }

 private:
  void check_states(const MetricStates& states) const;
  void check_amounts(std::span<const at::Tensor> amounts) const;

  std::string name_;
  MetricStates initial_;
  std::vector<std::vector<at::Tensor>> parts_;  // by state: empty, the sum, or the tensors to concatenate
};

// The states of all ranks, given each rank's states(): summed or concatenated, on the first rank's device.
MetricStates combined(std::span<const MetricStates> by_rank);

}  // namespace fulgur
