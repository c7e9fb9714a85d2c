#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "fulgur/core/callback.h"
#include "fulgur/core/make_module.h"
#include "fulgur/core/run_state.h"
#include "fulgur/data/data_module.h"
#include "fulgur/trainer/trainer_options.h"
#include "fulgur/trainer/tuner.h"

namespace fulgur {

// Runs a Module over data: the loops, the strategy and the callbacks. May be used for several runs, one after the
// other.
//   Trainer trainer({.strategy = "single_device", .max_epochs = 10});
//   trainer.fit(make_module<Digits>(), {.train = train, .val = val});
// Errors: settings that cannot be used throw UsageError from the constructor; a module and data that do not fit
// together throw SetupError from an entry point, before its first step. An exception from a step or a hook reaches the
// caller as it is, once on_exception and teardown have run; text_of (base/exception_text.h) says which hook, epoch and
// batch it came from. Threading: one thread, which all hooks run on (with dp, training_step runs on
// a thread per device); only request_stop may be called from any thread.
class Trainer final {
 public:
  explicit Trainer(TrainerOptions options = {});
  ~Trainer();
  Trainer(const Trainer&) = delete;
  Trainer& operator=(const Trainer&) = delete;

  // With a strategy of several ranks, the first entry point of a process starts the other ranks, unless torchrun, srun
  // or mpirun did. Each rank runs this program from its beginning, so that the code before and after fit runs on every
  // rank.

  // Trains until a bound is reached or a stop is requested, and validates in between if there is a validation_step and
  // a val loader. Starts from scratch, or resumes from the checkpoint TrainerOptions::ckpt_path: with the same
  // strategy and number of ranks bit for bit as if the run had never ended (except for dp on a CPU with dropout);
  // otherwise from the same weights, optimizer state and data position. The module is on the CPU afterwards. Errors:
  // SIGTERM and Ctrl-C end fit with InterruptedError after the running step or during a validation, which starts over
  // in the run that resumes; a ModelCheckpoint saves first. InterruptedError is also thrown for a signal after the last
  // step, once everything is saved.
  void fit(ModuleHandle module, DataModule& data);
  void fit(ModuleHandle module, Loaders loaders);

  // Runs one pass of validation_step, or of test_step, and returns the reduced metrics that it logged. With several
  // loaders, the names of metrics end in /dataloader_idx_N. The weights are those of the module, or of the checkpoint
  // `ckpt_path`: a folder, or "best" or "last" of this Trainer's run, or of the run called TrainerOptions::name.
  // Throws UsageError if there is no such checkpoint.
  Metrics validate(ModuleHandle module, DataModule& data, const std::string& ckpt_path = "");
  Metrics validate(ModuleHandle module, Loaders loaders, const std::string& ckpt_path = "");
  Metrics test(ModuleHandle module, DataModule& data, const std::string& ckpt_path = "");
  Metrics test(ModuleHandle module, Loaders loaders, const std::string& ckpt_path = "");

  // Runs one pass of predict_step; returns a result for each batch, loader by loader, on the CPU. With several ranks,
  // each rank returns the results of its own shard of the data.
  std::vector<Batch> predict(ModuleHandle module, DataModule& data, const std::string& ckpt_path = "");
  std::vector<Batch> predict(ModuleHandle module, Loaders loaders, const std::string& ckpt_path = "");

  // Trains for a few steps, each with a larger learning rate than the one before, and returns the curve of the loss:
  //   const auto lr = trainer.find_learning_rate(module, data).suggestion();
  // Schedules are made, but the Trainer does not move them; callbacks are left out. Afterwards the module's parameters,
  // buffers and gradients and the random generators are restored; other effects of the module's hooks stay. In
  // fast_dev_run it only warns. Errors: as for fit; UsageError for options that cannot be used, and with several ranks:
  // it takes devices = 1.
  LearningRateCurve find_learning_rate(ModuleHandle module, DataModule& data, LearningRateFinderOptions options = {});
  LearningRateCurve find_learning_rate(ModuleHandle module, Loaders loaders, LearningRateFinderOptions options = {});

  // The largest batch size, in samples, with which training does not run out of memory: up to max_size, or until one
  // batch holds the whole data set. Restores the same as find_learning_rate; in fast_dev_run the result is init_size.
  //   const int64_t size = trainer.find_batch_size(module, [&](int64_t batch_size) {
  //     return Loaders{.train = DataLoader::make(dataset, {.batch_size = batch_size})};
  //   });
  int64_t find_batch_size(ModuleHandle module, const std::function<Loaders(int64_t batch_size)>& make_loaders,
                          BatchSizeFinderOptions options = {});

  // Saves the module of the running or the last entry point, and in fit everything needed to resume; in training the
  // checkpoint is written once the running step has ended. Throws CheckpointError, or UsageError before the first
  // entry point.
  void save_checkpoint(const std::filesystem::path& folder, const SaveOptions& options = {});

  // fit ends after the running optimizer step, once min_epochs and min_steps are reached; if no fit runs, the next fit
  // ends before its first step. The request is cleared when fit ends. May be called from any thread, while the Trainer
  // lives.
  void request_stop(std::string_view reason);

  const RunState& state() const;

  // The rank of this process, and the number of ranks that train together. Known from the first entry point on.
  int64_t global_rank() const;
  int64_t world_size() const;
  bool is_global_zero() const { return global_rank() == 0; }  // this rank writes the files

  // The folder for files of the running or the last entry point: runs/version_N, or runs/<name>, under
  // default_root_dir. Throws UsageError before the first entry point.
  const std::filesystem::path& run_dir();

  Metrics callback_metrics() const;       // all values that were logged, as callbacks see them (core/metric_log.h)
  Metrics progress_bar_metrics() const;   // values logged with prog_bar
  const Metrics& logged_metrics() const;  // the last value of each name that loggers got
  const TrainerOptions& options() const;  // defaults filled in; max_epochs: see state()

 private:
  struct Parts;
  const std::unique_ptr<Parts> parts_;
};

}  // namespace fulgur
