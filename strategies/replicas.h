#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "core/batch.h"
#include "core/module.h"

namespace fulgur {

// A module on several devices of one process: the module itself on the first, a replica of it on each of the others,
// and a thread for each. A step runs on all at once, each with its part of the batch.
//   const at::Tensor loss = replicas.training_step(batch, batch_idx);
//   loss.backward();      // quick: says how much the loss of each part counts
//   replicas.backward();  // of all parts at once; leaves the sum of their gradients in the module
// The loss is the mean of the parts' losses by number of samples: where a loss is the mean over its batch, loss and
// gradients are those of the whole batch, whether it divides evenly or not. A part whose loss is undefined is left out
// of that mean; the batch is skipped if all are. Of a batch with fewer samples than devices the last devices get none.
// Module::backward stands between the two: one that overrides it may scale the loss, or add to it, but parameters get
// their gradients after it.
//   Before each step a replica gets what the module has: parameters (on the CPU they share memory, so that nothing is
// copied), buffers, requires_grad, and train or eval mode of every submodule. What a step changes in a replica is lost,
// but for gradients and what it logs: buffers, such as running means, are what the first part makes them.
//   A replica is made as the module was, by constructor, setup and configure_model. No other hook is called on it, so
// that it does not have what they set in members of the module (run_state() and buffers it has); and hooks on
// parameters see the gradients of the first part only.
//   Each thread has an equal share of the intra-op threads of the one that makes this. On the CPU all draw from one
// random generator, in no particular order: dropout differs from run to run, and gradients are wrong where fn of
// checkpoint(fn) draws random numbers, for it cannot draw the same ones again. GPUs have a generator each; where all
// have one seed, as after seed_everything, the i-th device gets that seed + i, so that their dropout differs.
// Ownership: borrows the module, whose link() is another one during training_step. Threading: the training thread.
// Errors: what a step throws reaches the caller as it is, the first device's first, once all have ended.
class Replicas {
 public:
  // The module is on devices.front(), in the precision of the run, and attached to it. Leaves the random generators
  // where they are. Throws UsageError if the module does not know how to make another (make_module); SetupError if that
  // one is different or has a tensor in common with it, or if it optimises manually: each part would step the same
  // weights.
  Replicas(Module& module, const std::vector<c10::Device>& devices);
  ~Replicas();
  Replicas(const Replicas&) = delete;
  Replicas& operator=(const Replicas&) = delete;

  at::Tensor training_step(const Batch& batch, int64_t batch_idx);
  void backward();  // adds to gradients that are there; those in 16 bits are summed in fp32

 private:
  struct Replica;

  void prepare_threads();
  void run_steps(const std::vector<Batch>& parts, int64_t batch_idx);
  at::Tensor mean_loss(const std::vector<Batch>& parts);
  void sum_gradients();
  void on_each(size_t count, const std::function<void(size_t)>& job);

  Module& module_;
  std::vector<std::unique_ptr<Replica>> replicas_;  // the first is the module itself
};

}  // namespace fulgur
