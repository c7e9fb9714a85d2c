#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/callback.h"
#include "core/describe.h"
#include "device/devices.h"

namespace fulgur {

// How to train. Names and meanings are Lightning's.
struct TrainerOptions {
  std::string accelerator = "auto";  // cpu, cuda, or auto: cuda where there is one
  std::string strategy = "auto";     // a name of strategy_registry(); auto: single_device
  Devices devices{};                 // a count, a list of indices, or "auto"
  int64_t max_epochs = -1;           // -1: no bound; 1000, with a warning, if max_steps is unset too
  int64_t max_steps = -1;            // optimizer steps; -1: no bound. The bound that is reached first ends fit
  int64_t check_val_every_n_epoch = 1;
  int64_t log_every_n_steps = 50;    // how often loggers get the values of a step
  std::string default_root_dir{};    // runs/version_N is made in it; empty: the folder that the command was typed in
  bool enable_progress_bar = true;   // adds a ProgressBar, and an EvaluationTable after validate and test
  bool enable_model_summary = true;  // adds a ModelSummary
  bool enable_checkpointing = true;  // adds a ModelCheckpoint if callbacks has none
  bool logger = true;                // adds a CSVLogger if callbacks has none
  std::vector<std::shared_ptr<Callback>> callbacks{};  // in firing order; ModelCheckpoint is moved to the end

  void describe(FieldVisitor& visit);
};

}  // namespace fulgur
