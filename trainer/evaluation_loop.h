#pragma once

#include <vector>

#include "core/loader.h"
#include "trainer/loop_context.h"

namespace fulgur {

// One pass over a loader for validation, also in the middle of fit, or for test: without gradients and in eval mode.
// The train or eval mode of every submodule, and the stage of the run, are afterwards as they were. Returns the metrics
// of the pass.
Metrics run_evaluation(LoopContext& context, Stage stage, Loader& loader);

// The same for predict_step; returns its results, one for each batch.
std::vector<Batch> run_prediction(LoopContext& context, Loader& loader);

}  // namespace fulgur
