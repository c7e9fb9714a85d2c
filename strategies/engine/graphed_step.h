#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "fulgur/core/batch.h"
#include "fulgur/core/module_fwd.h"
#include "fulgur/strategies/precision.h"

namespace fulgur {

// A module's training_step, forward and backward, as a CUDA graph: recorded once, after some steps that ran without,
// and replayed for each further batch. The loss comes with its gradients (core/ready_gradients.h), which any strategy
// takes. A batch of other sizes, and what cannot be recorded, runs without a graph, and a message says why. The step is
// recorded anew if parameters are frozen or unfrozen, if parameters or buffers lie elsewhere, if a submodule changes
// between train and eval mode, and, from the next epoch on, if any of these was added or taken away.
// Requires one device, on which the current stream is not the default one, and no loss scale.
// Threading: the training thread only.
class GraphedStep {
 public:
  // Records what `body` launches, and returns what launches it again. The default is a CudaGraph, which calls `body`
  // once; a stand-in may call it again in each replay.
  using Record = std::function<std::function<void()>(const std::function<void()>& body)>;

  GraphedStep(Module& module, const Precision& precision, c10::Device device, Record record = {});
  ~GraphedStep();

  // What module.training_step(batch, batch_idx) returns, called where autocast is on if the precision has it.
  // `keeps_gradients`: gradients of earlier micro-batches are at the parameters, to be added to.
  at::Tensor run(const Batch& batch, int64_t batch_idx, bool keeps_gradients);

 private:
  struct Recorded;

  at::Tensor rehearse(const Batch& batch, int64_t batch_idx);
  void record(const Batch& batch, int64_t batch_idx);
  void forward_and_backward(Recorded& recorded, int64_t batch_idx) const;
  bool is_as_recorded();
  bool has_recorded_sizes(const Batch& batch) const;
  at::Tensor replay(const Batch& batch, bool keeps_gradients);
  void give_up(const std::string& reason);

  Module& module_;
  const Precision& precision_;
  const c10::Device device_;
  const Record record_;
  int64_t num_steps_ = 0;  // steps that ran without a graph; enough of them make a recording possible
  bool has_given_up_ = false;
  bool has_told_of_sizes_ = false;
  std::unique_ptr<Recorded> recorded_;  // null: the step is not recorded, or no longer as it was
};

}  // namespace fulgur
