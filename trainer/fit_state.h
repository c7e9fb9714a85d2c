#pragma once

#include <memory>
#include <vector>

#include "checkpoint/checkpoint_reader.h"
#include "checkpoint/checkpoint_writer.h"
#include "core/callback.h"
#include "core/module.h"
#include "strategies/strategy.h"
#include "trainer/fit_loop.h"
#include "trainer/loop_context.h"
#include "trainer/optimizer_steps.h"

namespace fulgur {

// The weights of a module, with the names of tied ones.
CheckpointContent weights_of(const Module& module, NamedTensors weights);

// Which parameters are trained, as it was when the checkpoint was written. Before the optimizers are made.
void load_requires_grad(Module& module, const CheckpointReader& checkpoint);

// All of a fit that a checkpoint keeps beside the weights. All are borrowed; of callbacks only those that run on this
// rank.
struct FitState {
  LoopContext& context;
  OptimizerSteps& steps;
  FitLoop& loop;
  const std::vector<std::shared_ptr<Callback>>& callbacks;

  void add_to(CheckpointContent& content) const;
  void load(const CheckpointReader& checkpoint) const;  // throws CheckpointError if it is of another fit
};

}  // namespace fulgur
