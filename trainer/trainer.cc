#include "fulgur/trainer/trainer.h"

#include <c10/util/ScopeExit.h>
#include <fmt/format.h>

#include <utility>

#include "fulgur/base/error.h"
#include "fulgur/base/logging.h"
#include "fulgur/base/seed.h"
#include "fulgur/checkpoint/checkpoint_writer.h"
#include "fulgur/core/module_state.h"
#include "fulgur/distributed/local_collective.h"
#include "fulgur/trainer/check_inputs.h"
#include "fulgur/trainer/fit_state.h"
#include "fulgur/trainer/resolve_options.h"
#include "fulgur/trainer/run.h"

namespace fulgur {
namespace {

void check_one_rank(const RunResources& resources, std::string_view what) {
  if (!resources.strategy->rank_per_device() ||
      static_cast<int64_t>(resources.devices.size()) * resources.options.num_nodes == 1)
    return;
  throw UsageError(fmt::format("{} tries on one device; set devices and num_nodes to 1 for it", what));
}

}  // namespace

struct Trainer::Parts {
  explicit Parts(TrainerOptions options) : resources(std::move(options)) {}

  // Makes a run and passes it to `body`. Saves and stops that the user requests meanwhile go to that run.
  template <class Body>
  auto run(EntryPoint entry_point, const ModuleHandle& module, DataModule& data, const std::string& ckpt_path,
           const Body& body) {
    check_idle(*module);
    const bool is_fit = entry_point == EntryPoint::fit;
    if (is_fit) results.state = {};
    StopRequest of_no_effect;  // only fit stops early
    Run run(resources, results,
            {.entry_point = entry_point,
             .module = module,
             .data = data,
             .stop = is_fit ? stop : of_no_effect,
             .plan = plan_of(resources.options, resources.bounds),
             .callbacks = resources.options.callbacks,
             .ckpt_path = ckpt_path});
    running = &run;
    const auto has_ended = c10::make_scope_exit([this] { running = nullptr; });
    return body(run);
  }

  // A fit of `num_steps` steps without validation that leaves no trace in the module or the random generators.
  void run_trial(const ModuleHandle& module, DataModule& data, std::shared_ptr<Callback> callback, int64_t num_steps) {
    require_fit_hooks(module, resources.options.optimizer);
    const ScopedRandomState random_state;
    const LoopPlan whole = plan_of(resources.options, resources.bounds);
    StopRequest own_stop;
    RunResults own_results;
    Run trial(resources, own_results,
              {.entry_point = EntryPoint::fit,
               .module = module,
               .data = data,
               .stop = own_stop,
               .plan = {.max_steps = num_steps,
                        .limit_val_batches = Batches(0),
                        .reload_dataloaders_every_n_epochs = whole.reload_dataloaders_every_n_epochs,
                        .accumulate_grad_batches = whole.accumulate_grad_batches,
                        .clipping = whole.clipping,
                        .detect_anomaly = whole.detect_anomaly,
                        .keeps_lr = true,
                        .log_every_n_steps = 0,
                        .dry_run_of = resources.bounds},
               .callbacks = {std::move(callback)},
               .is_trial = true});
    running = &trial;
    const auto has_ended = c10::make_scope_exit([this] { running = nullptr; });
    trial.fit();
  }

  // One strategy serves all runs of a Trainer, and one run at a time has a module, so that neither can be nested.
  void check_idle(const Module& module) const {
    if (running != nullptr) {
      throw UsageError("this Trainer is running already; for a run of another module within it make another Trainer");
    }
    if (module.link().trainer == nullptr) return;
    throw UsageError(
        fmt::format("{} is in a run already, of another Trainer; wait until that has ended, or take another module",
                    module.name()));
  }

  RunResources resources;
  RunResults results;
  StopRequest stop;
  Run* running = nullptr;  // null: no entry point is running
};

Trainer::Trainer(TrainerOptions options) : parts_(std::make_unique<Parts>(std::move(options))) {}
Trainer::~Trainer() = default;

void Trainer::fit(ModuleHandle module, Loaders loaders) {
  LoadersDataModule data(std::move(loaders));
  fit(std::move(module), data);
}

Metrics Trainer::validate(ModuleHandle module, Loaders loaders, const std::string& ckpt_path) {
  LoadersDataModule data(std::move(loaders));
  return validate(std::move(module), data, ckpt_path);
}

Metrics Trainer::test(ModuleHandle module, Loaders loaders, const std::string& ckpt_path) {
  LoadersDataModule data(std::move(loaders));
  return test(std::move(module), data, ckpt_path);
}

std::vector<Batch> Trainer::predict(ModuleHandle module, Loaders loaders, const std::string& ckpt_path) {
  LoadersDataModule data(std::move(loaders));
  return predict(std::move(module), data, ckpt_path);
}

void Trainer::fit(ModuleHandle module, DataModule& data) {
  require_fit_hooks(module, options().optimizer);
  const auto stop_is_forgotten = c10::make_scope_exit([this] { parts_->stop.clear(); });
  parts_->run(EntryPoint::fit, module, data, options().ckpt_path, [](Run& run) { run.fit(); });
}

Metrics Trainer::validate(ModuleHandle module, DataModule& data, const std::string& ckpt_path) {
  require_step(module, module.hooks().validation_step, "void validation_step(const Batch&, int64_t)",
               "validate runs it on every batch");
  return parts_->run(EntryPoint::validate, module, data, ckpt_path,
                     [](Run& run) { return run.evaluate(Stage::validate); });
}

Metrics Trainer::test(ModuleHandle module, DataModule& data, const std::string& ckpt_path) {
  require_step(module, module.hooks().test_step, "void test_step(const Batch&, int64_t)",
               "test runs it on every batch");
  return parts_->run(EntryPoint::test, module, data, ckpt_path, [](Run& run) { return run.evaluate(Stage::test); });
}

std::vector<Batch> Trainer::predict(ModuleHandle module, DataModule& data, const std::string& ckpt_path) {
  require_step(module, module.hooks().predict_step, "Batch predict_step(const Batch&, int64_t)",
               "predict runs it on every batch");
  return parts_->run(EntryPoint::predict, module, data, ckpt_path, [](Run& run) { return run.predict(); });
}

LearningRateCurve Trainer::find_learning_rate(ModuleHandle module, Loaders loaders, LearningRateFinderOptions options) {
  LoadersDataModule data(std::move(loaders));
  return find_learning_rate(std::move(module), data, std::move(options));
}

LearningRateCurve Trainer::find_learning_rate(ModuleHandle module, DataModule& data,
                                              LearningRateFinderOptions options) {
  require(module->automatic_optimization,
          fmt::format("find_learning_rate sets the learning rate before each step that the Trainer takes, but {} "
                      "optimises manually",
                      module->name()));
  parts_->check_idle(*module);
  check_one_rank(parts_->resources, "find_learning_rate");
  if (parts_->resources.options.fast_dev_run > 0) {
    log_warning("find_learning_rate does nothing in fast_dev_run");
    return {};
  }
  return sweep_learning_rate(options, [&](std::shared_ptr<Callback> callback, int64_t num_steps) {
    parts_->run_trial(module, data, std::move(callback), num_steps);
  });
}

int64_t Trainer::find_batch_size(ModuleHandle module, const std::function<Loaders(int64_t batch_size)>& make_loaders,
                                 BatchSizeFinderOptions options) {
  parts_->check_idle(*module);
  check_one_rank(parts_->resources, "find_batch_size");
  if (parts_->resources.options.fast_dev_run > 0) {
    log_warning("find_batch_size does nothing in fast_dev_run");
    return options.init_size;
  }
  const auto trial = [&](int64_t size) {
    LoadersDataModule data(make_loaders(size));
    parts_->run_trial(module, data, std::make_shared<Callback>(), options.steps_per_trial);
  };
  const auto is_whole_epoch = [&](int64_t size) {
    return checked(make_loaders(size).train, "train")->num_batches() == 1;
  };
  return search_batch_size(options, trial, is_whole_epoch);
}

// After a run only the module is left, which rank 0 writes by itself.
void Trainer::save_checkpoint(const std::filesystem::path& folder, const SaveOptions& options) {
  if (parts_->running != nullptr) return parts_->running->save_checkpoint(folder, options);
  const std::optional<ModuleHandle>& module = parts_->results.module;
  if (!module) throw UsageError("save_checkpoint: there is no module yet; call fit, validate, test or predict first");
  if (!is_global_zero()) return;
  CheckpointContent content = content_of(**module, named_state(**module));
  content.run.set("weights_only", true);
  LocalCollective alone;
  write_checkpoint(folder, content, alone, options.links);
}

void Trainer::request_stop(std::string_view reason) { parts_->stop.request(reason); }

const std::filesystem::path& Trainer::run_dir() {
  if (!parts_->results.module) {
    throw UsageError("run_dir: it is known from the first fit, validate, test or predict on");
  }
  return run_dir_of(parts_->results, options());
}

const RunState& Trainer::state() const { return parts_->results.state; }
int64_t Trainer::global_rank() const { return parts_->results.rank; }
int64_t Trainer::world_size() const { return parts_->results.world_size; }
Metrics Trainer::callback_metrics() const { return parts_->results.metrics.callback_metrics(); }
Metrics Trainer::progress_bar_metrics() const { return parts_->results.metrics.progress_bar_metrics(); }
const Metrics& Trainer::logged_metrics() const { return parts_->results.metrics.logged_metrics(); }
const TrainerOptions& Trainer::options() const { return parts_->resources.options; }

}  // namespace fulgur
