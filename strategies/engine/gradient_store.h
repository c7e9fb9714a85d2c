#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "fulgur/base/state.h"
#include "fulgur/checkpoint/state_range.h"
#include "fulgur/core/module_fwd.h"
#include "fulgur/core/optimizer.h"
#include "fulgur/optim/fused_update.h"
#include "fulgur/strategies/engine/engine_options.h"
#include "fulgur/strategies/engine/flat_parameters.h"
#include "fulgur/strategies/engine/gradient_memory.h"
#include "fulgur/strategies/engine/gradient_reducer.h"
#include "fulgur/strategies/engine/optimizer_shard.h"
#include "fulgur/strategies/engine/shard_groups.h"
#include "fulgur/strategies/strategy.h"

namespace fulgur {

// What a GradientStore works with, until teardown.
struct GradientContext {
  std::string strategy;  // name, for messages
  const Module& module;
  const Optimizers& optimizers;
  const FlatParameters& parameters;
  const EngineOptions& engine;
  const StrategySetup& setup;
  ShardGroups& groups;

  World& world() const { return setup.world; }
  c10::Device device() const { return setup.devices.front(); }
  bool alone() const { return world().world_size() == 1; }
};

// Holds the gradients of a step and updates the parameters from them. There are three implementations:
//   GradientsAtParameters  one rank: gradients stay where autograd puts them
//   ReducedGradients       several ranks, each with all gradients: views of buckets that are summed during backward
//   SeparateGradients      apart from the parameters, on the host or the device: sums of the ranges that a rank updates
// A window's calls, on every rank: open_window(); for each micro-batch begin_backward(), the module's backward,
// end_micro_batch(); then norm() as a step asks for it, and update().
// Threading: the training thread.
class GradientStore {
 public:
  virtual ~GradientStore() = default;

  // Whether gradients pass through buckets. If so, a parameter must be in a bucket before its backward; otherwise its
  // gradient is not summed over ranks.
  virtual bool collects_in_buckets() const { return false; }
  virtual void append() {}  // takes in the buckets that were appended to the parameters

  virtual void open_window() {}  // drops what is left of the last window

  // Finished gradients may be sent to other ranks from here on. In the scope that is returned, to be closed after the
  // module's backward, autograd may make gradients in memory of this store.
  [[nodiscard]] virtual ScopedGradientMemory begin_backward(bool /*is_last*/) { return {}; }

  // A store that collects in buckets sums over ranks here, and returns the combined windows of all ranks. nullopt: the
  // store does so only with the last micro-batch of the window.
  virtual std::optional<AccumulationWindow> end_micro_batch(const AccumulationWindow& /*mine*/, bool /*is_last*/) {
    return std::nullopt;
  }

  // For manual optimisation: runs `backward`, and adds the mean of its gradients over ranks to the gradients.
  virtual void add_mean(const std::function<void()>& backward) { backward(); }

  // The 2-norm of an optimizer's gradients, fp64 and 0-dim; the same on every rank. Infinite or NaN if an element
  // of a gradient is.
  virtual at::Tensor norm(size_t optimizer) = 0;

  // Gives the parameters their complete gradients, in at least fp32, as grad(), for a hook to read or change;
  // take_back() takes over what the hook has left there.
  virtual void show(size_t optimizer) = 0;
  virtual void take_back(size_t /*optimizer*/) {}

  // Updates the parameters of an optimizer; `late`: in the background, until the next update() or drain(). `next_lr`:
  // by group, the learning rates of the next update.
  virtual void update(size_t optimizer, const GradientTransform& transform, const std::vector<double>& next_lr,
                      bool late) = 0;
  virtual void drain() {}
  virtual void wait() {}                          // waits until a delayed update is computed; parameters do not change
  virtual bool is_late() const { return false; }  // a delayed update is in progress

  // While a delayed update is in progress, forward reads parameters without this update, or with a prediction of it.
  // show_exact() waits until the update is computed and writes the exact parameters instead; hide_exact() restores the
  // values for forward, so that training is not changed. Every rank calls them.
  virtual void show_exact() {}
  virtual void hide_exact() {}

  virtual void parameters_were_written() {}  // called after other code wrote parameters: renews their copies

  // The more exact values that exist for a bucket's elements in `within`, in order: fp32 masters of 16-bit parameters,
  // copies on the host of parameters on a device, and the results of a delayed update. Call wait() first.
  virtual std::vector<ExactValues> exact_values(size_t bucket, ElementRange within) const = 0;

  // `late`: the checkpoint was written while a delayed update was in progress, which this run continues. save()
  // requires show_exact(); load() requires that the parameters are those of the checkpoint.
  virtual void save(StrategyState& state) = 0;
  virtual void load(const State& shared, const ReadRange& read, bool late) = 0;
};

// Completes a reduction, in which every rank tells the others about its window.
AccumulationWindow finish_window(GradientReducer& reducer, const AccumulationWindow& mine);

}  // namespace fulgur
