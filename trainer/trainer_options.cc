#include "fulgur/trainer/trainer_options.h"

#include "fulgur/base/names.h"
#include "fulgur/callbacks/callback_registry.h"
#include "fulgur/device/devices.h"
#include "fulgur/strategies/precision.h"

namespace fulgur {
namespace {

// A field whose value is parsed from text.
template <class T>
TextField text_field(T& value) {
  return {.set = [&value](std::string_view text) { value = T(text); },
          .get = [&value] { return value.to_string(); },
          .check = [&value](std::string_view name) { value.check(name); }};
}

template <class T>
TextField text_field(std::optional<T>& value) {
  return {.set = [&value](std::string_view text) { value = text == "none" ? std::nullopt : std::optional(T(text)); },
          .get = [&value] { return value ? value->to_string() : "none"; },
          .check =
              [&](std::string_view name) {
                if constexpr (requires { value->check(name); }) {
                  if (value) value->check(name);
                }
              }};
}

}  // namespace

void TrainerOptions::describe(FieldVisitor& visit) {
  visit({.name = "accelerator",
         .help = "device type to train on",
         .choices = {"auto", "cpu", "cuda", "gpu"},
         .is_common = true},
        &accelerator);
  strategy.describe(visit);
  optimizer.describe(visit);
  visit({.name = "devices", .help = "a count (2), indices (0,2) or auto", .is_common = true},
        TextField{.set = [this](std::string_view text) { devices = Devices(text); },
                  .get = [this] { return devices.to_string(); },
                  .check = [this](std::string_view) { check_devices(devices); }});
  visit({.name = "num_nodes", .help = "number of machines", .min = 1}, &num_nodes);
  visit({.name = "max_epochs",
         .help = "epochs to train; -1: no bound; none: 1000 if nothing else bounds fit",
         .min = -1,
         .is_common = true},
        &max_epochs);
  visit({.name = "min_epochs", .help = "epochs to train before a requested stop takes effect", .min = 0}, &min_epochs);
  visit({.name = "max_steps", .help = "optimizer steps to train; -1: no bound", .min = -1, .is_common = true},
        &max_steps);
  visit({.name = "min_steps", .help = "optimizer steps before a requested stop takes effect", .min = 0}, &min_steps);
  visit({.name = "max_time", .help = "time to train, DD:HH:MM:SS"}, text_field(max_time));
  visit({.name = "fast_dev_run",
         .help = "run one epoch with this number of batches of every stage, and write no files; 0: a whole run",
         .min = 0,
         .is_common = true},
        &fast_dev_run);
  visit({.name = "overfit_batches", .help = "train on the same few batches in every epoch: 10 batches, or 10%"},
        text_field(overfit_batches));
  visit({.name = "limit_train_batches", .help = "training batches of an epoch: 10 batches, or 10%", .is_common = true},
        text_field(limit_train_batches));
  visit({.name = "limit_val_batches", .help = "validation batches of each loader: 10 batches, or 10%"},
        text_field(limit_val_batches));
  visit({.name = "limit_test_batches", .help = "test batches of each loader: 10 batches, or 10%"},
        text_field(limit_test_batches));
  visit({.name = "limit_predict_batches", .help = "predict batches of each loader: 10 batches, or 10%"},
        text_field(limit_predict_batches));
  visit({.name = "val_check_interval", .help = "validate every 50% of an epoch, 100 batches, or 00:01:00:00"},
        text_field(val_check_interval));
  visit({.name = "check_val_every_n_epoch",
         .help = "epochs from one validation to the next; none: val_check_interval counts across epochs",
         .min = 1},
        &check_val_every_n_epoch);
  visit({.name = "num_sanity_val_steps", .help = "validation batches before training; -1: all; none: 2", .min = -1},
        &num_sanity_val_steps);
  visit({.name = "precision",
         .help = "what to compute in: 32, 64, bf16-mixed, 16-mixed, bf16-true, 16-true",
         .is_common = true},
        TextField{.set = [this](std::string_view text) { precision = text; },
                  .get = [this] { return precision; },
                  .check = [this](std::string_view) { static_cast<void>(Precision(precision)); }});
  visit({.name = "accumulate_grad_batches", .help = "micro-batches per optimizer step", .min = 1, .is_common = true},
        &accumulate_grad_batches);
  visit({.name = "gradient_clip_val", .help = "bound on the gradients; 0: none", .min = 0, .is_common = true},
        &gradient_clip_val);
  visit({.name = "gradient_clip_algorithm", .help = "clip by total norm or by value", .choices = {"norm", "value"}},
        &gradient_clip_algorithm);
  visit({.name = "detect_anomaly", .help = "find the operation that gave NaN; slow"}, &detect_anomaly);
  visit({.name = "sync_batchnorm", .help = "refuse BatchNorm that does not synchronise ranks"}, &sync_batchnorm);
  visit({.name = "deterministic", .help = "use only deterministic algorithms"}, &deterministic);
  visit({.name = "benchmark", .help = "let cuDNN time its algorithms for each shape and take the fastest"}, &benchmark);
  visit({.name = "float32_matmul_precision",
         .help = "how exact fp32 matrix products are; high and medium use the faster units of a GPU",
         .choices = {"unset", "highest", "high", "medium"}},
        &float32_matmul_precision);
  visit({.name = "cuda_graph", .help = "on a GPU, record the kernels of training_step once and replay them"},
        &cuda_graph);
  visit({.name = "use_distributed_sampler", .help = "let each rank read only its shard of the data"},
        &use_distributed_sampler);
  visit({.name = "reload_dataloaders_every_n_epochs",
         .help = "recreate the data loaders every n epochs; 0: never",
         .min = 0},
        &reload_dataloaders_every_n_epochs);
  visit({.name = "log_every_n_steps",
         .help = "steps from one line of step metrics to the next; none: 50, or those of an epoch or run with fewer",
         .min = 1},
        &log_every_n_steps);
  visit({.name = "ckpt_path", .help = "checkpoint to resume from: a folder, last or best", .is_common = true},
        &ckpt_path);
  visit({.name = "ckpt_strict", .help = "require that checkpoint and module have the same weight names"}, &ckpt_strict);
  visit({.name = "ckpt_weights_only",
         .help = "load only the weights and what the Module has saved of the checkpoint, and start over"},
        &ckpt_weights_only);
  visit({.name = "ckpt_verify", .help = "compare what is read of a checkpoint with its digests"}, &ckpt_verify);
  visit({.name = "default_root_dir", .help = "folder in which runs/version_N is made"}, &default_root_dir);
  visit({.name = "name", .help = "name of the run, whose folder is runs/<name>", .is_common = true}, &name);
  visit({.name = "enable_progress_bar", .help = "show progress and result tables; none: true"}, &enable_progress_bar);
  visit({.name = "enable_model_summary", .help = "show the layers before training; none: true"}, &enable_model_summary);
  visit({.name = "enable_checkpointing", .help = "save checkpoints; none: true"}, &enable_checkpointing);
  visit({.name = "checkpoint", .help = "which checkpoints are saved"}, &checkpoint);
  visit({.name = "logger", .help = "write metrics.csv; none: true"}, &logger);
  visit({.name = "enable_report", .help = "write report.html at the end of fit; none: true with a CSVLogger"},
        &enable_report);
  visit({.name = "enable_post_mortem", .help = "write what is known of a run that an exception has ended; none: true"},
        &enable_post_mortem);
  visit({.name = "profiler",
         .help = "measure where the time goes, and show it at the end",
         .choices = {"none", "simple", "kineto"},
         .is_common = true},
        &profiler);
  visit.list({.name = "callbacks", .help = "what watches the run, in firing order"},
             callback_registry().list_field(callbacks));
  visit.list({.name = "loggers", .help = "further callbacks, which write logs"},
             callback_registry().list_field(callbacks));
  visit({.name = "barebones", .help = "turn every extra off, to measure"}, &barebones);
}

GradientClipping gradient_clipping(const TrainerOptions& options) {
  const bool by_value = canonical_name(options.gradient_clip_algorithm) == "value";
  return {.value = options.gradient_clip_val, .algorithm = by_value ? ClipAlgorithm::value : ClipAlgorithm::norm};
}

}  // namespace fulgur
