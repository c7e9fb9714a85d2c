#include "trainer/trainer.h"

#include <ATen/Parallel.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <utility>

#include "checkpoint/checkpoint_writer.h"
#include "core/error.h"
#include "core/logging.h"
#include "strategies/presets.h"
#include "trainer/default_callbacks.h"
#include "trainer/evaluation_loop.h"
#include "trainer/fit_loop.h"
#include "trainer/run_dir.h"

namespace fulgur {
namespace {

constexpr int64_t kDefaultMaxEpochs = 1000;  // Lightning's

TrainerOptions checked(TrainerOptions options) {
  check_fields("Trainer", options);
  if (options.max_epochs < 0 && options.max_steps < 0) {
    log_warning("neither max_epochs nor max_steps is set; training for {} epochs", kDefaultMaxEpochs);
    options.max_epochs = kDefaultMaxEpochs;
  }
  add_default_callbacks(options);
  return options;
}

std::unique_ptr<Strategy> make_strategy(std::string_view name, const std::vector<c10::Device>& devices) {
  auto strategy = strategy_registry().create(name == "auto" ? "single_device" : name);
  strategy->check_devices(devices);
  return strategy;
}

// A data module of loaders that exist already.
class LoadersDataModule final : public DataModule {
 public:
  explicit LoadersDataModule(Loaders loaders) : loaders_(std::move(loaders)) {}
  std::shared_ptr<Loader> train_dataloader() override { return loaders_.train; }
  std::shared_ptr<Loader> val_dataloader() override { return loaders_.val; }
  std::shared_ptr<Loader> test_dataloader() override { return loaders_.test; }
  std::shared_ptr<Loader> predict_dataloader() override { return loaders_.predict; }

 private:
  Loaders loaders_;
};

void require(bool condition, const std::string& message) {
  if (!condition) throw SetupError(message);
}

void require_step(const ModuleHandle& module, bool overridden, std::string_view signature) {
  require(overridden, fmt::format("{} does not override {}, which is needed here", module->name(), signature));
}

// The loader, if it can give at least one batch. `name` as in Loaders.
std::shared_ptr<Loader> require_loader(std::shared_ptr<Loader> loader, std::string_view name) {
  require(loader != nullptr,
          fmt::format("there is no {0} loader; pass {{.{0} = ...}} or override {0}_dataloader()", name));
  require(
      loader->num_batches().value_or(1) > 0,
      fmt::format("the {} loader is empty: it yields no batch. Is the dataset empty, or shorter than batch_size with "
                  "drop_last?",
                  name));
  return loader;
}

// The loader to validate with during fit; null if there is none.
std::shared_ptr<Loader> validation_loader(const ModuleHandle& module, DataModule& data) {
  const auto loader = data.val_dataloader();
  if (loader == nullptr) return nullptr;
  require(module.hooks().validation_step,
          fmt::format("there is validation data, but {} does not override void validation_step(const Batch&, int64_t); "
                      "write it, or leave the val loader out",
                      module->name()));
  return require_loader(loader, "val");
}

constexpr std::string_view kNoOptimizer =
    "{} has no optimizer: override Optimizers configure_optimizers() and return one, such as "
    "optim::AdamW(parameters(), {{.lr = 1e-3}})";

}  // namespace

Trainer::Trainer(TrainerOptions options)
    : options_(checked(std::move(options))),
      devices_(resolve_devices(options_.accelerator, options_.devices)),
      strategy_(make_strategy(options_.strategy, devices_)),
      hooks_(options_.callbacks, *this, state_, metrics_) {}

void Trainer::fit(ModuleHandle module, Loaders loaders) {
  LoadersDataModule data(std::move(loaders));
  fit(std::move(module), data);
}

Metrics Trainer::validate(ModuleHandle module, Loaders loaders) {
  LoadersDataModule data(std::move(loaders));
  return validate(std::move(module), data);
}

Metrics Trainer::test(ModuleHandle module, Loaders loaders) {
  LoadersDataModule data(std::move(loaders));
  return test(std::move(module), data);
}

std::vector<Batch> Trainer::predict(ModuleHandle module, Loaders loaders) {
  LoadersDataModule data(std::move(loaders));
  return predict(std::move(module), data);
}

void Trainer::fit(ModuleHandle module, DataModule& data) {
  require_step(module, module.hooks().training_step, "at::Tensor training_step(const Batch&, int64_t)");
  require(module.hooks().configure_optimizers, fmt::format(kNoOptimizer, module->name()));
  state_ = {};
  metrics_ = {};
  run(EntryPoint::fit, module, data, [&](LoopContext& context) {
    const auto train = require_loader(data.train_dataloader(), "train");
    const auto val = validation_loader(module, data);
    state_.max_epochs = options_.max_epochs;
    state_.has_validation = val != nullptr;
    Optimizers optimizers = module->configure_optimizers();
    require(!optimizers.empty(), fmt::format(kNoOptimizer, module->name()));
    strategy_->setup_optimizers(std::move(optimizers));
    FitLoop(context, *train, val.get()).run();
  });
}

Metrics Trainer::validate(ModuleHandle module, DataModule& data) {
  require_step(module, module.hooks().validation_step, "void validation_step(const Batch&, int64_t)");
  Metrics metrics;
  run(EntryPoint::validate, module, data, [&](LoopContext& context) {
    metrics = run_evaluation(context, Stage::validate, *require_loader(data.val_dataloader(), "val"));
  });
  return metrics;
}

Metrics Trainer::test(ModuleHandle module, DataModule& data) {
  require_step(module, module.hooks().test_step, "void test_step(const Batch&, int64_t)");
  Metrics metrics;
  run(EntryPoint::test, module, data, [&](LoopContext& context) {
    metrics = run_evaluation(context, Stage::test, *require_loader(data.test_dataloader(), "test"));
  });
  return metrics;
}

std::vector<Batch> Trainer::predict(ModuleHandle module, DataModule& data) {
  require_step(module, module.hooks().predict_step, "Batch predict_step(const Batch&, int64_t)");
  std::vector<Batch> predictions;
  run(EntryPoint::predict, module, data, [&](LoopContext& context) {
    predictions = run_prediction(context, *require_loader(data.predict_dataloader(), "predict"));
  });
  return predictions;
}

void Trainer::run(EntryPoint entry_point, const ModuleHandle& module, DataModule& data,
                  const std::function<void(LoopContext&)>& body) {
  std::exception_ptr failure;
  try {
    setup(entry_point, module, data);
    LoopContext context{options_, *strategy_, state_, metrics_, hooks_, should_stop_};
    body(context);
  } catch (...) {
    failure = std::current_exception();
    notify_of(failure);
  }
  try {
    teardown(entry_point, data);
  } catch (const std::exception& error) {
    if (failure == nullptr) throw;
    log_warning("teardown failed too: {}", error.what());
  }
  if (failure != nullptr) std::rethrow_exception(failure);
}

void Trainer::setup(EntryPoint entry_point, const ModuleHandle& module, DataModule& data) {
  should_stop_ = false;
  state_.entry_point = entry_point;
  hooks_.set_module(&*module);
  module->attach(&state_, &metrics_);
  hooks_.enter(LogScope::forbidden);
  data.prepare_data();
  module->prepare_data();
  data.setup(entry_point);
  hooks_.call(LogScope::forbidden, &Callback::setup, &Module::setup, entry_point);
  strategy_->setup(*module, devices_);
}

void Trainer::teardown(EntryPoint entry_point, DataModule& data) {
  strategy_->teardown();
  data.teardown(entry_point);
  hooks_.call(LogScope::forbidden, &Callback::teardown, &Module::teardown, entry_point);
  hooks_.module().attach(nullptr, nullptr);
}

void Trainer::notify_of(const std::exception_ptr& failure) {
  try {
    std::rethrow_exception(failure);
  } catch (const std::exception& error) {
    try {
      hooks_.call_callbacks(LogScope::forbidden, any_callback, &Callback::on_exception, error);
    } catch (const std::exception& second) {
      log_warning("on_exception failed too: {}", second.what());
    }
  } catch (...) {  // not a std::exception: nothing that a callback could be told
  }
}

std::string Trainer::device_summary() const {
  std::vector<std::string> names;
  for (const c10::Device& device : devices_) names.push_back(device.str());
  std::string summary = fmt::format("{} on {}", strategy_->name(), fmt::join(names, ", "));
  if (devices_.front().is_cpu())
    summary += fmt::format(" with {} thread{}", at::get_num_threads(), at::get_num_threads() == 1 ? "" : "s");
  return summary;
}

const std::filesystem::path& Trainer::run_dir() {
  if (run_dir_.empty()) run_dir_ = make_run_dir(options_.default_root_dir);
  return run_dir_;
}

void Trainer::request_stop(std::string_view reason) {
  if (!should_stop_) log_info("stopping: {}", reason);
  should_stop_ = true;
}

void Trainer::save_checkpoint(const std::filesystem::path& folder) {
  write_checkpoint(folder, strategy_->module_state());
}

}  // namespace fulgur
