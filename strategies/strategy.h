#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/DeviceType.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "fulgur/base/describe.h"
#include "fulgur/base/error.h"
#include "fulgur/base/state.h"
#include "fulgur/checkpoint/state_range.h"
#include "fulgur/core/batch.h"
#include "fulgur/core/gradient_clipping.h"
#include "fulgur/core/model_memory.h"
#include "fulgur/core/module_fwd.h"
#include "fulgur/core/optimizer.h"
#include "fulgur/core/step_report.h"
#include "fulgur/distributed/world.h"
#include "fulgur/strategies/precision.h"

namespace fulgur {

// How one optimizer step uses the gradients.
struct StepRequest {
  int64_t micro_batches = 1;    // number of micro-batches whose gradients were summed; the step uses the mean
  GradientClipping clipping{};  // applied to the mean gradient
  bool wants_norm = false;      // compute StepReport::grad_norm, even if the gradients are not clipped by it
  // Returns whether gradients of this norm may update the parameters; if not, the step is skipped. Null: always.
  // Requires wants_norm. The step calls this once, and every rank must get the same answer.
  std::function<bool(const at::Tensor& grad_norm)> accepts{};
  // Returns the learning rates of the next step, by group, as far as they are known. Null: they are those of this step.
  std::function<std::vector<double>()> next_lr{};
  Closure closure{};  // for an optimizer that needs_closure(): each call computes the gradients of one batch
};

// An accumulation window: the micro-batches of one optimizer step, as one rank has seen them.
struct AccumulationWindow {
  int64_t micro_batches = 0;  // micro-batches that had a loss
  double loss_sum = 0.0;      // sum of the losses of these micro-batches, if a callback judges_updates()
  bool wants_stop = false;    // requests the end of fit
  bool ends_epoch = false;    // no further batch in this epoch
  bool skips_epoch = false;   // because on_train_batch_start returned skip_epoch
};

// The arguments of Strategy::setup().
struct StrategySetup {
  std::vector<c10::Device> devices;  // all devices of this process
  Precision precision{};
  World& world;                  // the ranks that train together; borrowed until teardown
  bool deterministic = false;    // bits must not depend on how parameters are cut into buckets
  int64_t local_world_size = 1;  // ranks on this machine, which share its cores
  bool reduces_during_backward =
      true;                       // gradients may be reduced during backward: no hook reads them, backward runs once
  bool averages_weights = false;  // average_weights() will be called, or the average of a checkpoint is to be kept
  bool accumulates = false;       // windows have several micro-batches; if false, a callback may still request it later
  bool only_copies_batches = false;  // transfer_batch_to_device is not overridden, so it may run on a stream
  bool cuda_graph = false;           // fit, and training_step is to run as a CUDA graph: TrainerOptions::cuda_graph
  State resumed{};  // StrategyState::shared that load_state() will be called with; empty: the run does not resume
};

// The run whose memory Strategy::model_memory() estimates.
struct MemoryRequest {
  Precision precision{};
  int64_t num_devices = 1;  // total over all machines
  int64_t num_nodes = 1;    // machines
  c10::DeviceType device_type = c10::kCPU;
  bool accumulates = false;       // accumulation windows have several micro-batches
  bool averages_weights = false;  // Strategy::average_weights is called
};

// The state of a strategy for a checkpoint, without the module's.
struct StrategyState {
  State shared{};                    // the same on every rank
  std::vector<StateRange> ranges{};  // written by this rank, as views; over all ranks each element is written once
};

// How a Module is trained: where its parameters, gradients and optimizer state live, and how an update reaches them.
// The loops use a strategy through these members only. strategies/presets.h registers the built-in strategies and
// those of users. Threading: the training thread only.
class Strategy {
 public:
  virtual ~Strategy() = default;
  virtual std::string name() const = 0;  // the registered name

  // Visits the settings, for flags and options structs (strategies/strategy_choice.h).
  virtual void describe(FieldVisitor&) {}

  // Throws UsageError if the strategy cannot train on these devices of each of num_nodes machines; called by the
  // Trainer's constructor.
  virtual void check_devices(const std::vector<c10::Device>& devices, int64_t num_nodes) const = 0;

  // How ranks are connected, for a strategy with one process (rank) per device; nullopt: one process for all devices.
  virtual std::optional<WorldOptions> rank_per_device() const { return std::nullopt; }

  // Moves the module to the devices and into the precision of the run; afterwards its state is the same on every
  // rank. The module must outlive teardown(). Throws UsageError if the strategy cannot train with this setup, and
  // SetupError if it cannot train this module, or the ranks have different ones.
  virtual void setup(Module& module, const StrategySetup& setup) = 0;

  // Takes over the optimizers of the module, after setup(). Called for fit only. Throws UsageError for an optimizer
  // that the strategy cannot run, and SetupError if the module and the optimizers do not go together.
  virtual void setup_optimizers(Optimizers optimizers) = 0;
  virtual const Optimizers& optimizers() const = 0;

  // Moves a batch by the module's transfer_batch_to_device, in the precision of the run.
  virtual Batch to_device(const Batch& batch) = 0;

  // The calls for one micro-batch, in order: training_step, zero_grad if the micro-batch is the first of its step,
  // backward. The returned loss still holds its graph. The gradients of a step's micro-batches are summed. `is_last`:
  // the micro-batch is the last of its accumulation window, so that gradients may be sent to other ranks.
  virtual at::Tensor training_step(const Batch& batch, int64_t batch_idx) = 0;
  virtual void zero_grad(size_t optimizer) = 0;
  virtual void backward(const at::Tensor& loss, bool is_last) = 0;

  // Ends a micro-batch. After the last micro-batch of an accumulation window, gradients are sums over all ranks, and
  // the result combines the windows of all ranks: micro_batches is the sum, and a flag is set if any rank set it. After
  // an earlier micro-batch, the result is either this combination or `mine`. `mine` counts from the first micro-batch
  // of the window. Every rank calls this, even a rank without a loss.
  virtual AccumulationWindow end_micro_batch(const AccumulationWindow& mine, bool /*is_last*/) { return mine; }

  // For manual optimisation: adds the mean of the gradients over ranks to the existing gradients.
  virtual void manual_backward(const at::Tensor& loss) { backward(loss, /*is_last=*/false); }

  // The memory that a rank would keep for a model trained by these optimizers, computed without allocating it. For
  // dp: the memory of the first device. nullopt: not known.
  virtual std::optional<ModelMemory> model_memory(const Module& /*module*/, const Optimizers& /*optimizers*/,
                                                  const MemoryRequest& /*request*/) const {
    return std::nullopt;
  }

  // Updates the parameters of one optimizer.
  virtual StepReport optimizer_step(size_t optimizer, const StepRequest& request) = 0;

  // Keeps an average of the parameters that the optimizers train: average += share * (parameters - average), or, in the
  // first call, a copy of them. Requires StrategySetup::averages_weights. Every rank calls it, between steps.
  virtual void average_weights(double /*share*/) {
    throw UsageError("strategy '" + name() + "' does not average weights");
  }

  // If `shown`, gives the parameters the values to evaluate and save: all updates are complete, and the values are the
  // average if there is one. Otherwise restores the values that training reads. Returns whether the evaluated values
  // were shown before this call. Every rank calls it, between steps. No step runs while they are shown, and training is
  // not changed. A checkpoint calls state() and module_state() while they are shown; the two contain what training
  // needs to resume.
  virtual bool show_evaluated(bool /*shown*/) { return false; }

  // Completes updates that are still in progress. Every rank calls it, between steps.
  virtual void drain() {}

  // Turns the gradients into those of the mean loss, without loss scale, for a hook that reads them. The following
  // optimizer_step then gets micro_batches = 1.
  virtual void materialize_gradients(size_t optimizer, int64_t micro_batches) = 0;

  // The tensors to save, by the names of Python's state_dict; a tied tensor appears once.
  virtual std::vector<std::pair<std::string, at::Tensor>> module_state() const = 0;

  // Every rank calls these between steps. The tensors in state() may change with the next step. load_state() is called
  // when the module has its saved weights: between setup_optimizers() and the first step, or after drain(). The state
  // may come from another number of ranks or another strategy. Throws CheckpointError if the state does not fit the
  // optimizers.
  virtual StrategyState state() = 0;
  virtual void load_state(const State& shared, const ReadRange& read) = 0;

  // Turns the module back into ordinary tensors of their own types on the CPU. Also called after a failed setup; does
  // not throw.
  virtual void teardown() noexcept = 0;
};

}  // namespace fulgur
