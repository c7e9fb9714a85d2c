#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "fulgur/base/describe.h"
#include "fulgur/callbacks/model_checkpoint.h"
#include "fulgur/core/callback.h"
#include "fulgur/core/gradient_clipping.h"
#include "fulgur/device/devices.h"
#include "fulgur/loops/batch_limit.h"
#include "fulgur/strategies/strategy_choice.h"
#include "fulgur/trainer/optimizer_choice.h"

namespace fulgur {

// How to train. Names and meanings are Lightning's; docs/differences.md has what is not the same.
struct TrainerOptions {
  // Where to train.
  std::string accelerator = "auto";  // cpu, cuda, gpu (the same as cuda), or auto: cuda where there is one
  StrategyChoice strategy{};         // a name or options struct; auto: ddp for several devices, or single_device
  Devices devices{};                 // a count, a list of indices, or "auto"
  int64_t num_nodes = 1;             // number of machines

  // How long. The bound that is reached first ends fit; minimum bounds win over a requested stop.
  std::optional<int64_t> max_epochs{};  // -1: no bound; unset: 1000, with a warning, if nothing else bounds fit
  int64_t min_epochs = 0;
  int64_t max_steps = -1;  // optimizer steps; -1: no bound
  int64_t min_steps = 0;
  std::optional<TimeSpan> max_time{};  // bound on fit: "DD:HH:MM:SS" or a std::chrono duration
  int64_t fast_dev_run = 0;            // n: n batches of every stage, one epoch, no files; to find mistakes quickly
  std::optional<BatchLimit> overfit_batches{};  // the same first batches in every epoch; limits val too
  BatchLimit limit_train_batches{};  // Batches(10) or Fraction(0.1) of each epoch; Batches(0) turns the stage off
  BatchLimit limit_val_batches{};    // applies to each val loader
  BatchLimit limit_test_batches{};
  BatchLimit limit_predict_batches{};

  // When fit validates.
  ValidationInterval val_check_interval{};             // Fraction(0.5) of an epoch, Batches(100), or a TimeSpan
  std::optional<int64_t> check_val_every_n_epoch = 1;  // nullopt: val_check_interval counts across epochs
  std::optional<int64_t> num_sanity_val_steps{};       // val batches run before training; default 2; -1: all

  // What to make for a Module that does not override configure_optimizers.
  OptimizerChoice optimizer{};

  // How a step is computed.
  std::string precision = "32";                  // 32, 64, bf16-mixed, 16-mixed, bf16-true, 16-true
  int64_t accumulate_grad_batches = 1;           // micro-batches per optimizer step, which uses their mean
  double gradient_clip_val = 0.0;                // 0: no clipping
  std::string gradient_clip_algorithm = "norm";  // norm or value
  bool detect_anomaly = false;                   // find the operation whose backward gave NaN; slow
  bool sync_batchnorm = false;                   // UsageError for BatchNorm other than nn::SyncBatchNorm; converts none
  bool deterministic = false;                    // only deterministic algorithms; an operation without one throws
  std::optional<bool> benchmark{};  // cuDNN times its algorithms for each shape and takes the fastest; unset: off if
                                    // deterministic, otherwise libtorch's switch stays as it is
  std::string float32_matmul_precision = "unset";  // highest, high or medium, as in torch; unset: libtorch's stays
  bool cuda_graph = false;  // on a GPU, record training_step, forward and backward, once and replay it: docs/gpu.md

  bool use_distributed_sampler = true;            // each rank reads its shard of the data
  int64_t reload_dataloaders_every_n_epochs = 0;  // recreate the loaders every n epochs; 0: never

  // The checkpoint that fit resumes from: a folder, or "last" or "best", as a ModelCheckpoint has marked it in this
  // run's folder (without `name`: in the newest run that has one). With "last", fit starts from scratch if there is
  // none. Empty: no checkpoint.
  std::string ckpt_path{};
  bool ckpt_strict = true;         // checkpoint and module must have the same weight names
  bool ckpt_weights_only = false;  // load only the weights and what the Module has saved
  bool ckpt_verify = true;         // compare the bytes that are read with the manifest's digests

  // What is shown and written. A switch that is unset means true, or false in barebones mode.
  std::optional<int64_t> log_every_n_steps{};  // from one logged step to the next; 50, or fewer in a short epoch or run
  std::string default_root_dir{};              // runs/version_N is made in it; empty: where the command was typed
  std::string name{};                          // name of the run; its folder is runs/<name>, also when it resumes
  std::optional<bool> enable_progress_bar{};   // adds a ProgressBar, and an EvaluationTable after validate and test
  std::optional<bool> enable_model_summary{};  // adds a ModelSummary
  std::optional<bool> enable_checkpointing{};  // adds a ModelCheckpoint if callbacks has none
  ModelCheckpointOptions checkpoint{};         // how that ModelCheckpoint saves
  std::optional<bool> logger{};                // adds a CSVLogger if callbacks has none
  std::optional<bool> enable_report{};         // adds a RunReport, which writes report.html at the end of fit, if there
                                               // is a CSVLogger
  std::optional<bool> enable_post_mortem{};    // leaves post_mortem/ in the run's folder when an exception ends the run
  std::string profiler = "none";               // none; simple: a table of where the time went; kineto: KinetoProfiler
  bool barebones = false;                      // for measuring: turns every extra off; requesting one throws
  // In firing order; callbacks with runs_last(), such as EarlyStopping and ModelCheckpoint, are moved to the end.
  std::vector<std::shared_ptr<Callback>> callbacks{};

  void describe(FieldVisitor& visit);
};

GradientClipping gradient_clipping(const TrainerOptions& options);

}  // namespace fulgur
