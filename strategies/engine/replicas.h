#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "fulgur/core/batch.h"
#include "fulgur/core/module_fwd.h"

namespace fulgur {

// A module on several devices of one process: the module itself on the first, a replica of it on each of the others,
// and a thread for each. A step runs on all at once, each with its part of the batch.
//   const at::Tensor loss = replicas.training_step(batch, batch_idx);
//   loss.backward();      // quick: computes how much the loss of each part counts
//   replicas.backward();  // runs all parts at once; leaves the sum of their gradients in the module
// The loss is the mean of the parts' losses, weighted by number of samples: if a loss is the mean over its batch,
// loss and gradients are those of the whole batch, whether it divides evenly or not. A part with an undefined loss is
// left out of the mean; the batch is skipped if all losses are undefined. If a batch has fewer samples than devices,
// the last devices get none. Module::backward runs between the two calls: an override may scale the loss, or add to
// it, but parameters get their gradients only afterwards.
//   Before each step a replica gets the module's parameters (on the CPU they share memory, so that nothing is
// copied), buffers, requires_grad, and train or eval mode of every submodule. Changes that a step makes in a replica
// are discarded, except gradients and logged values: buffers, such as running means, are those of the first part.
//   A replica is made like the module, by constructor, setup and configure_model. No other hook is called on it, so
// it lacks members that other hooks set in the module (but has run_state() and buffers); hooks on parameters see only
// the gradients of the first part.
//   Each thread has an equal share of the intra-op threads of the constructing thread. On the CPU all threads draw
// from one random generator, in no particular order: dropout differs from run to run, and gradients are wrong if fn
// of checkpoint(fn) draws random numbers, because it cannot draw the same numbers again. Each GPU has its own
// generator; if all have one seed, as after seed_everything, the i-th device gets seed + i, so that dropout differs
// between devices.
// Ownership: borrows the module, and replaces its link() during training_step. Threading: the training thread.
// Errors: an exception of a step reaches the caller unchanged, once all devices are done; the first device's takes
// precedence.
class Replicas {
 public:
  // The module must be on devices.front(), in the precision of the run, and attached to the run. Making replicas does
  // not advance the random generators. Throws UsageError if the module cannot make another one (make_module);
  // SetupError if the replica is different or has a tensor in common with the module, or if the module optimises
  // manually: each part would step the same weights.
  Replicas(Module& module, const std::vector<c10::Device>& devices);
  ~Replicas();
  Replicas(const Replicas&) = delete;
  Replicas& operator=(const Replicas&) = delete;

  at::Tensor training_step(const Batch& batch, int64_t batch_idx);
  void backward();  // adds to existing gradients; 16-bit gradients are summed in fp32

 private:
  struct Replica;

  void prepare_threads();
  void run_steps(const std::vector<Batch>& parts, int64_t batch_idx);
  at::Tensor mean_loss(const std::vector<Batch>& parts);
  void sum_gradients();
  void on_each(size_t count, const std::function<void(size_t)>& job);
  void on_each_gpu(size_t count, const std::function<void(size_t)>& job);

  Module& module_;
  std::vector<std::unique_ptr<Replica>> replicas_;  // the first is the module itself
};

}  // namespace fulgur
