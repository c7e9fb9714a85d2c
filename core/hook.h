#pragma once

#include <string_view>

namespace fulgur {

// What log() may do in a hook.
enum class LogScope {
  forbidden,        // hooks that belong to no epoch: setup, teardown, checkpoint, predict, the end of a stage
  training_step,    // training_step and the hooks around one training batch
  evaluation_step,  // validation_step, test_step and the hooks around one of their batches
  epoch,            // hooks around an epoch: on_epoch metrics only
};

// A hook as log() sees it. loops/hooks.h lists all hooks.
struct Hook {
  std::string_view name;
  LogScope scope;
};

}  // namespace fulgur
