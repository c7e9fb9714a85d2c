#include "trainer/trainer_options.h"

#include "strategies/presets.h"

namespace fulgur {
namespace {

std::vector<std::string> strategy_choices() {
  std::vector<std::string> names = strategy_registry().names();
  names.insert(names.begin(), "auto");
  return names;
}

}  // namespace

void TrainerOptions::describe(FieldVisitor& visit) {
  visit({.name = "accelerator", .help = "what to train on", .choices = {"auto", "cpu", "cuda", "gpu"}}, &accelerator);
  visit({.name = "strategy", .help = "how to train", .choices = strategy_choices()}, &strategy);
  visit({.name = "devices", .help = "a count (2), indices (0,2) or auto"},
        TextField{[this](std::string_view text) { devices = Devices(text); }, [this] { return devices.to_string(); }});
  visit({.name = "max_epochs", .help = "epochs to train; -1: no bound", .min = -1}, &max_epochs);
  visit({.name = "max_steps", .help = "optimizer steps to train; -1: no bound", .min = -1}, &max_steps);
  visit({.name = "check_val_every_n_epoch", .help = "epochs from one validation to the next", .min = 1},
        &check_val_every_n_epoch);
  visit({.name = "log_every_n_steps", .help = "steps from one line of step metrics to the next", .min = 1},
        &log_every_n_steps);
  visit({.name = "default_root_dir", .help = "folder in which runs/version_N is made"}, &default_root_dir);
  visit({.name = "enable_progress_bar", .help = "show progress and result tables"}, &enable_progress_bar);
  visit({.name = "enable_model_summary", .help = "show the layers before training"}, &enable_model_summary);
  visit({.name = "enable_checkpointing", .help = "save checkpoints"}, &enable_checkpointing);
  visit({.name = "logger", .help = "write metrics.csv"}, &logger);
}

}  // namespace fulgur
