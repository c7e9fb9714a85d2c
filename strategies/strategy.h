#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/DeviceType.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/state_range.h"
#include "core/batch.h"
#include "core/describe.h"
#include "core/gradient_clipping.h"
#include "core/model_memory.h"
#include "core/module.h"
#include "core/optimizer.h"
#include "core/state.h"
#include "distributed/world.h"
#include "strategies/precision.h"

namespace fulgur {

// What one optimizer step is to do with the gradients.
struct StepRequest {
  int64_t micro_batches = 1;    // whose losses' gradients were summed; the step is taken on their mean
  GradientClipping clipping{};  // of that mean
  Closure closure{};            // for an optimizer that needs_closure(); it leaves the gradients of one batch
};

// What became of it.
struct StepReport {
  bool skipped = false;  // nothing was changed: with the loss scale in use, gradients were not finite
  double loss_scale = 1.0;
};

// The micro-batches of one optimizer step, as one rank has seen them.
struct Window {
  int64_t micro_batches = 0;  // that had a loss
  bool wants_stop = false;    // asks for the end of fit
  bool ends_epoch = false;    // has no further batch in this epoch
};

// What a strategy is set up with.
struct StrategySetup {
  std::vector<c10::Device> devices;  // of this process
  Precision precision{};
  World& world;                  // the ranks that train together; borrowed until teardown
  bool deterministic = false;    // the same bits however the parameters fall into buckets
  int64_t local_world_size = 1;  // ranks on this machine, which share its cores
  bool sends_ahead = true;       // gradients may go on their way in backward: nobody looks at them, or calls it twice
  bool accumulates = false;      // a window has several micro-batches; a callback may ask for that later all the same
};

// A run whose memory a strategy is asked for.
struct MemoryRequest {
  Precision precision{};
  int64_t num_devices = 1;  // over all machines
  c10::DeviceType device_type = c10::kCPU;
  bool accumulates = false;  // a window has several micro-batches
};

// What a strategy has beside the module, for a checkpoint.
struct StrategyState {
  State shared{};                    // the same on every rank
  std::vector<StateRange> ranges{};  // those that this rank writes; over all ranks each element is there once. Views
};

// How a Module is trained: where its parameters, gradients and optimizer state live, and how an update reaches them.
// The loops call these members and know nothing else of it. strategies/presets.h registers the built-in ones, and
// yours. Threading: the training thread only.
class Strategy {
 public:
  virtual ~Strategy() = default;
  virtual std::string name() const = 0;  // as registered

  // Its settings, for flags and options structs (strategies/strategy_choice.h).
  virtual void describe(FieldVisitor&) {}

  // Throws UsageError if it cannot train on these devices of each of num_nodes machines; called by the Trainer's
  // constructor.
  virtual void check_devices(const std::vector<c10::Device>& devices, int64_t num_nodes) const = 0;

  // For a strategy with a process (rank) for each device: how ranks are connected. Else there is one process.
  virtual std::optional<WorldOptions> rank_per_device() const { return std::nullopt; }

  // Brings the module to its devices and into its precision, in which training_step and backward then run; afterwards
  // it is the same on every rank. The module outlives teardown(). Throws UsageError if the strategy cannot train so.
  virtual void setup(Module& module, const StrategySetup& setup) = 0;

  // Takes over the optimizers that the module made, once it is on its devices. Only before fit. Throws UsageError if it
  // cannot run one of them.
  virtual void setup_optimizers(Optimizers optimizers) = 0;
  virtual const Optimizers& optimizers() const = 0;

  // By the module's transfer_batch_to_device, in the precision of the run.
  virtual Batch to_device(const Batch& batch) = 0;

  // One micro-batch, in order: training_step, zero_grad if it is the first of its step, backward. The loss still holds
  // its graph. Gradients of a step's micro-batches are summed. `is_last`: of its window, so that gradients may go on
  // their way to other ranks.
  virtual at::Tensor training_step(const Batch& batch, int64_t batch_idx) = 0;
  virtual void zero_grad(size_t optimizer) = 0;
  virtual void backward(const at::Tensor& loss, bool is_last) = 0;

  // Ends a micro-batch. After the last of a window gradients are the sums over all ranks, and what comes back is the
  // window of all: micro_batches summed, what any rank wants; before it is that or `mine`. Every rank calls it, also
  // one that had no loss. `mine` counts from the window's first micro-batch.
  virtual Window end_micro_batch(const Window& mine, bool /*is_last*/) { return mine; }

  // For manual optimisation: a backward that leaves the mean over ranks, added to gradients that are there already.
  virtual void manual_backward(const at::Tensor& loss) { backward(loss, /*is_last=*/false); }

  // What a rank would keep of a model that is trained by these optimizers, without making any of it. dp: what its first
  // device keeps. Unset: not known.
  virtual std::optional<ModelMemory> model_memory(const Module& /*module*/, const Optimizers& /*optimizers*/,
                                                  const MemoryRequest& /*request*/) const {
    return std::nullopt;
  }

  // Updates the parameters of one optimizer.
  virtual StepReport optimizer_step(size_t optimizer, const StepRequest& request) = 0;

  // Applies updates that are still under way. Every rank calls it, between steps.
  virtual void drain() {}

  // Makes the gradients those of the mean loss, without loss scale, for a hook that wants to see them; the following
  // optimizer_step is then asked for micro_batches = 1.
  virtual void materialize_gradients(size_t optimizer, int64_t micro_batches) = 0;

  // The tensors to save, by the names that Python's state_dict gives them; a tied one once.
  virtual std::vector<std::pair<std::string, at::Tensor>> module_state() const = 0;

  // Between steps, every rank. What is read in state() may change with the next step. load_state() comes after
  // setup_optimizers(), before the first step, also with another number of ranks or of another strategy; the module has
  // its saved weights already. Throws CheckpointError if the state is of another kind.
  virtual StrategyState state() = 0;
  virtual void load_state(const State& shared, const ReadRange& read) = 0;

  // Gives the module back as ordinary tensors of their own types on the CPU. Also after a failed setup; does not throw.
  virtual void teardown() noexcept = 0;
};

}  // namespace fulgur
