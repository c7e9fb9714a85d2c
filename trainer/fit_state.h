#pragma once

#include <functional>
#include <vector>

#include "fulgur/checkpoint/checkpoint_reader.h"
#include "fulgur/checkpoint/checkpoint_writer.h"
#include "fulgur/core/module_fwd.h"
#include "fulgur/loops/fit_loop.h"
#include "fulgur/loops/loop_context.h"
#include "fulgur/loops/optimizer_steps.h"
#include "fulgur/strategies/strategy.h"
#include "fulgur/trainer/callback_states.h"

namespace fulgur {

// What every checkpoint has: the module's weights, the further names of tied tensors, its hyper-parameters, and what
// on_save_checkpoint adds.
CheckpointContent content_of(Module& module, NamedTensors weights);

// Calls `load`; the message of a CheckpointError names the checkpoint.
void name_folder_in_errors(const CheckpointReader& checkpoint, const std::function<void()>& load);

// Restores requires_grad of every parameter from the checkpoint. Called before the optimizers are made. `tells`: logs
// which parameters the module had frozen or trained otherwise.
void load_requires_grad(Module& module, const CheckpointReader& checkpoint, bool tells);

// Lets the loop estimate the steps of the run that resumes from the checkpoint. Called before the optimizers are made.
void estimate_steps(FitLoop& loop, const CheckpointReader& checkpoint);

// Everything of a fit that a checkpoint keeps in addition to the weights. All members are borrowed; `callbacks` has
// only those that run on this rank.
struct FitState {
  LoopContext& context;
  OptimizerSteps& steps;
  FitLoop& loop;
  const CallbackList& callbacks;

  void add_to(CheckpointContent& content) const;

  // Both throw CheckpointError if the fits do not match.
  void load(const CheckpointReader& checkpoint) const;
  void roll_back(const CheckpointReader& checkpoint) const;  // TrainerControl::roll_back, once weights are loaded

 private:
  void load_training(const CheckpointReader& checkpoint) const;
  void log_kept_learning_rates(const std::vector<double>& asked) const;
};

}  // namespace fulgur
