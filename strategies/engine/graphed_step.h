#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "fulgur/base/logging.h"
#include "fulgur/core/batch.h"
#include "fulgur/core/module_fwd.h"
#include "fulgur/device/cuda_graph.h"
#include "fulgur/strategies/precision.h"

namespace torch::nn {
class Module;
}  // namespace torch::nn

namespace fulgur {

// A module's training_step, forward and backward, as a CUDA graph: recorded once, after some steps that ran without,
// and replayed for each further batch. The loss comes with its gradients (core/ready_gradients.h), so that all the rest
// of a step is as ever. A batch of other sizes, and what cannot be recorded, runs without a graph, and a message says
// why. If parameters are frozen, unfrozen or moved, or a submodule changes between train and eval mode, the step is
// recorded anew. Requires one device, on which the current stream is not the default one, and no loss scale. Threading:
// the training thread only.
class GraphedStep {
 public:
  // Records what `body` launches, and returns what launches it again. The default is a CudaGraph.
  using Record = std::function<std::function<void()>(const std::function<void()>& body)>;

  GraphedStep(Module& module, const Precision& precision, c10::Device device, Record record = {});
  ~GraphedStep();

  // What module.training_step(batch, batch_idx) returns, called where autocast is on if the precision has it.
  // `keeps_gradients`: gradients of earlier micro-batches are at the parameters, to be added to.
  at::Tensor run(const Batch& batch, int64_t batch_idx, bool keeps_gradients);

 private:
  struct Recorded;

  bool record(const Batch& batch, int64_t batch_idx);
  void forward_and_backward(Recorded& recorded, int64_t batch_idx) const;
  bool is_as_recorded() const;
  bool has_recorded_sizes(const Batch& batch) const;
  at::Tensor replay(const Batch& batch, bool keeps_gradients);
  void give_up(const std::string& reason);

  Module& module_;
  const Precision& precision_;
  const c10::Device device_;
  const Record record_;
  int64_t num_steps_ = 0;  // steps without a graph since the start, or since the last graph
  bool has_given_up_ = false;
  bool has_told_of_sizes_ = false;
  std::unique_ptr<Recorded> recorded_;  // null: not yet
};

}  // namespace fulgur
