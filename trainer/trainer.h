#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <atomic>
#include <cstdint>
#include <exception>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "fulgur/checkpoint/checkpoint_reader.h"
#include "fulgur/core/make_module.h"
#include "fulgur/core/metric_log.h"
#include "fulgur/core/run_state.h"
#include "fulgur/data/data_module.h"
#include "fulgur/launch/session.h"
#include "fulgur/loops/checkpoint_saver.h"
#include "fulgur/loops/hook_caller.h"
#include "fulgur/loops/loop_context.h"
#include "fulgur/strategies/precision.h"
#include "fulgur/strategies/strategy.h"
#include "fulgur/trainer/fit_state.h"
#include "fulgur/trainer/module_restored.h"
#include "fulgur/trainer/trainer_options.h"
#include "fulgur/trainer/tuner.h"

namespace fulgur {

class ModelCheckpoint;

// Runs a Module over data: the loops, the strategy and the callbacks. May be used for several runs, one after the
// other.
//   Trainer trainer({.strategy = "single_device", .max_epochs = 10});
//   trainer.fit(make_module<Digits>(), {.train = train, .val = val});
// Errors: settings that cannot be used throw UsageError from the constructor; a module and data that do not fit
// together throw SetupError from an entry point, before its first step. An exception from a step or a hook reaches the
// caller as it is, once on_exception and teardown have run; text_of (base/exception_text.h) says which hook, epoch and
// batch it came from. Threading: one thread, which all hooks run on (with dp, training_step runs on
// a thread per device); only request_stop may be called from any thread.
class Trainer final : private TrainerControl {
 public:
  explicit Trainer(TrainerOptions options = {});
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
  // Learning-rate schedules and all callbacks are left out. Afterwards the module's parameters, buffers and gradients
  // and the random generators are restored; other effects of the module's hooks stay. In fast_dev_run it only warns.
  // Errors: as for fit; UsageError for options that cannot be used.
  LearningRateCurve find_learning_rate(ModuleHandle module, DataModule& data, LearningRateFinderOptions options = {});
  LearningRateCurve find_learning_rate(ModuleHandle module, Loaders loaders, LearningRateFinderOptions options = {});

  // The largest batch size, in samples, with which training does not run out of memory, up to max_size and the size of
  // the data set. Restores the same as find_learning_rate; in fast_dev_run the result is init_size.
  //   const int64_t size = trainer.find_batch_size(module, [&](int64_t batch_size) {
  //     return Loaders{.train = DataLoader::make(dataset, {.batch_size = batch_size})};
  //   });
  int64_t find_batch_size(ModuleHandle module, const std::function<Loaders(int64_t batch_size)>& make_loaders,
                          BatchSizeFinderOptions options = {});

  // Saves the module of the running or the last entry point, and in fit everything needed to resume; in training the
  // checkpoint is written once the running step has ended. Throws CheckpointError, or UsageError before the first
  // entry point.
  void save_checkpoint(const std::filesystem::path& folder, const SaveOptions& options = {}) override;

  // fit ends after the running optimizer step, once min_epochs and min_steps are reached; if no fit runs, the next fit
  // ends before its first step. The request is cleared when fit ends. May be called from any thread, while the Trainer
  // lives.
  void request_stop(std::string_view reason) override;

  const RunState& state() const override { return state_; }

  // The rank of this process, and the number of ranks that train together. Known from the first entry point on.
  int64_t global_rank() const override { return rank_; }
  int64_t world_size() const override { return world_size_; }
  using TrainerControl::is_global_zero;

  // The folder for files of the running or the last entry point: runs/version_N, or runs/<name>, under
  // default_root_dir. Throws UsageError before the first entry point.
  const std::filesystem::path& run_dir() override;

  Metrics callback_metrics() const { return metrics_.callback_metrics(); }
  Metrics progress_bar_metrics() const { return metrics_.progress_bar_metrics(); }
  const Metrics& logged_metrics() const { return metrics_.logged_metrics(); }
  const TrainerOptions& options() const { return options_; }  // defaults filled in; max_epochs: see state()

 private:
  // TrainerControl
  MetricLog& metrics() override { return metrics_; }
  Module& module() override { return hooks_.module(); }
  const Optimizers& optimizers() override;
  c10::Device device() const override;
  at::Tensor all_gather(const at::Tensor& tensor) override;
  std::string device_summary() const override;
  std::string memory_summary() const override;
  int64_t accumulation() const override { return accumulate_grad_batches_; }
  void set_accumulation(int64_t accumulate_grad_batches) override;
  std::filesystem::path free_checkpoint_path(const std::filesystem::path& wanted) override;
  double from_rank_zero(double value) override;
  void remove_checkpoint(const std::filesystem::path& folder) override;

  // What all entry points share: setup, `body`, and, even after an exception, teardown.
  void run(EntryPoint entry_point, const ModuleHandle& module, DataModule& data, const std::string& ckpt_path,
           const std::function<void(LoopContext&)>& body);
  void open_checkpoint(const std::string& ckpt_path, DataModule& data);
  NamedTensors checkpointed_weights() const;
  void tell_of_resume() const;
  void check_ranks_go_on(const std::filesystem::path& folder) const;
  CheckpointContent checkpoint_content(bool weights_only);
  void tell_of_checkpoint(const std::filesystem::path& folder, const SaveOptions& options);
  void save_at_boundary();
  void tell_where_checkpoints_are();
  ModelCheckpoint* model_checkpoint() const;
  std::vector<std::filesystem::path> folders_of_checkpoints();
  void interrupt(int signal);
  void requeue() const;
  [[noreturn]] void interrupt_after_last_step(int signal) const;
  void meet_ranks();
  void give_up(const std::string& reason);
  void leave_ranks(std::exception_ptr failure = nullptr);
  void share_run_dir();
  void remove_unused_run_dir();
  void prepare_data(DataModule& data);
  std::shared_ptr<Loader> shared_out(std::shared_ptr<Loader> loader, std::string_view name, bool even);
  LoaderList shared_out(LoaderList loaders, std::string_view name);
  void check_one_rank(std::string_view what) const;
  void run_trial(const ModuleHandle& module, DataModule& data, std::shared_ptr<Callback> callback, int64_t num_steps);
  void setup(DataModule& data, const std::string& ckpt_path);
  void teardown(DataModule& data);
  void tell_of_failure(const std::exception_ptr& failure, DataModule& data);
  void notify_of(const std::exception_ptr& failure, DataModule& data);

  TrainerOptions options_;
  std::unique_ptr<Strategy> strategy_;
  std::vector<c10::Device> devices_;      // used on each machine
  std::vector<c10::Device> own_devices_;  // used by this process
  Precision precision_;
  std::optional<World> alone_;  // the world of a run of one process
  World* world_ = nullptr;      // null: no entry point is running
  Session* session_ = nullptr;  // owns world_; null: world_ is alone_ or a ThreadWorld
  int64_t rank_ = 0, local_rank_ = 0, world_size_ = 1;
  RunState state_;
  MetricLog metrics_;
  std::vector<std::shared_ptr<Callback>> callbacks_;  // the options' and, during a run, the Module's
  HookCaller hooks_;
  std::optional<ModuleHandle> module_;          // null before the first entry point
  RunLink link_;                                // what the module can access of the run
  std::optional<CheckpointReader> checkpoint_;  // loaded by the running entry point
  std::filesystem::path resumed_from_;          // empty: fit started from scratch, or with weights only
  bool names_origin_ = false;                   // ckpt_path is the path of resumed_from_, not "last" or a link
  bool origin_was_left_ = false;                // a run that a signal or an exception ended saved resumed_from_
  const FitState* fit_state_ = nullptr;         // null: there is no running fit to save
  std::unique_ptr<CheckpointSaver> saver_;      // null: no entry point is running
  bool failing_ = false;                        // the running entry point has thrown
  bool interrupted_ = false;                    // a signal ends the run
  bool running_ = false;
  std::atomic<bool> stop_requested_ = false;
  int64_t accumulate_grad_batches_ = 1;
  bool told_slow_ = false;                  // the warning that the precision is slow here is given once
  bool told_no_shard_ = false;              // the warning of a loader that cannot be sharded is given once
  bool is_trial_ = false;                   // a trial of find_*: no schedules, no callbacks of the module
  std::optional<ModuleRestored> restored_;  // restores the module after a trial
  std::filesystem::path run_dir_;
};

}  // namespace fulgur
