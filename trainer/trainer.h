#pragma once

#include <c10/core/Device.h>

#include <exception>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/make_module.h"
#include "core/metric_log.h"
#include "core/run_state.h"
#include "data/data_module.h"
#include "strategies/strategy.h"
#include "trainer/hook_caller.h"
#include "trainer/trainer_options.h"

namespace fulgur {

struct LoopContext;

// Runs a Module over data: the loops, the strategy and the callbacks. May be used for several runs, one after the
// other.
//   Trainer trainer({.strategy = "single_device", .max_epochs = 10});
//   trainer.fit(make_module<Digits>(), {.train = train, .val = val});
// Errors: settings that cannot be used throw UsageError from the constructor; a module and data that do not fit
// together throw SetupError from an entry point, before its first step. An exception from a step or a hook reaches the
// caller as it is, once on_exception and teardown have run. Threading: one thread, which all hooks run on.
class Trainer final : private TrainerControl {
 public:
  explicit Trainer(TrainerOptions options = {});
  Trainer(const Trainer&) = delete;
  Trainer& operator=(const Trainer&) = delete;

  // Trains until max_epochs, max_steps or a requested stop, and validates in between if there is a validation_step and
  // a val loader. Starts counting anew. The module is on the CPU afterwards.
  void fit(ModuleHandle module, DataModule& data);
  void fit(ModuleHandle module, Loaders loaders);

  // One pass of validation_step, or of test_step; the metrics that it logged, reduced.
  Metrics validate(ModuleHandle module, DataModule& data);
  Metrics validate(ModuleHandle module, Loaders loaders);
  Metrics test(ModuleHandle module, DataModule& data);
  Metrics test(ModuleHandle module, Loaders loaders);

  // One pass of predict_step; a result for each batch.
  std::vector<Batch> predict(ModuleHandle module, DataModule& data);
  std::vector<Batch> predict(ModuleHandle module, Loaders loaders);

  const RunState& state() const override { return state_; }
  Metrics callback_metrics() const { return metrics_.callback_metrics(); }
  const TrainerOptions& options() const { return options_; }

 private:
  // TrainerControl
  MetricLog& metrics() override { return metrics_; }
  const Module& module() const override { return hooks_.module(); }
  std::string device_summary() const override;
  const std::filesystem::path& run_dir() override;
  void request_stop(std::string_view reason) override;
  void save_checkpoint(const std::filesystem::path& folder) override;

  // What all entry points share: setup, `body`, and whatever happens teardown.
  void run(EntryPoint entry_point, const ModuleHandle& module, DataModule& data,
           const std::function<void(LoopContext&)>& body);
  void setup(EntryPoint entry_point, const ModuleHandle& module, DataModule& data);
  void teardown(EntryPoint entry_point, DataModule& data);
  void notify_of(const std::exception_ptr& failure);

  TrainerOptions options_;
  std::vector<c10::Device> devices_;
  std::unique_ptr<Strategy> strategy_;
  RunState state_;
  MetricLog metrics_;
  HookCaller hooks_;
  bool should_stop_ = false;
  std::filesystem::path run_dir_;
};

}  // namespace fulgur
