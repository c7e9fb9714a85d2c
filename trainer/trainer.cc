#include "fulgur/trainer/trainer.h"

#include <ATen/Parallel.h>
#include <c10/util/ScopeExit.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <csignal>
#include <stdexcept>
#include <system_error>
#include <typeinfo>
#include <utility>

#include "fulgur/base/error.h"
#include "fulgur/base/first_error.h"
#include "fulgur/base/logging.h"
#include "fulgur/base/seed.h"
#include "fulgur/checkpoint/load_weights.h"
#include "fulgur/distributed/exchange.h"
#include "fulgur/launch/thread_world.h"
#include "fulgur/loops/evaluation_loop.h"
#include "fulgur/loops/fit_loop.h"
#include "fulgur/loops/optimizer_steps.h"
#include "fulgur/loops/signal_watch.h"
#include "fulgur/nn/sync_batch_norm.h"
#include "fulgur/strategies/presets.h"
#include "fulgur/trainer/check_inputs.h"
#include "fulgur/trainer/choose_strategy.h"
#include "fulgur/trainer/debug_modes.h"
#include "fulgur/trainer/resolve_options.h"
#include "fulgur/trainer/run_dir.h"

namespace fulgur {
namespace {

// C++ cannot replace the layers of a model, so that plain BatchNorm is an error.
void check_sync_batch_norm(const Module& module) {
  const std::vector<std::string> plain = nn::plain_batch_norm_names(module);
  if (plain.empty()) return;
  throw UsageError(fmt::format(
      "sync_batchnorm is true, but {} of {} {} not synchronise ranks; write fulgur::nn::SyncBatchNorm1d, 2d "
      "or 3d in the place of torch::nn::BatchNorm1d, 2d or 3d",
      fmt::join(plain, ", "), module.name(), plain.size() == 1 ? "does" : "do"));
}

// Gives each rank a seed of its own, so that dropout differs from rank to rank. Rank 0 draws what one process would.
void seed_rank(int64_t rank) {
  if (rank == 0) return;
  const uint64_t seed = at::globalContext().defaultGenerator(c10::kCPU).current_seed();
  seed_everything(seed + static_cast<uint64_t>(rank) * 0x9e3779b97f4a7c15);
}

// The callbacks of the options and of the Module. A callback of the Module replaces those of the same type.
std::vector<std::shared_ptr<Callback>> with_module_callbacks(const TrainerOptions& options, Module& module) {
  auto callbacks = options.callbacks;
  auto added = module.configure_callbacks();
  require(added.empty() || !options.barebones,
          fmt::format("barebones turns every extra off, but {}::configure_callbacks returned {}; leave out one or the "
                      "other",
                      module.name(), added.size()));
  for (const auto& callback : added) {
    require(callback != nullptr, module.name() + "::configure_callbacks returned a null callback");
    std::erase_if(callbacks, [&](const auto& other) { return typeid(*other) == typeid(*callback); });
  }
  if (options.fast_dev_run > 0) {
    std::erase_if(added, [](const auto& callback) { return !callback->runs_in_fast_dev_run(); });
  }
  callbacks.insert(callbacks.end(), added.begin(), added.end());
  std::ranges::stable_partition(callbacks, [](const auto& callback) { return !callback->runs_last(); });
  return callbacks;
}

// Lets the module access the optimizers of the run for the lifetime of the object, which ends before teardown.
class OptimizersInReach {
 public:
  OptimizersInReach(Module& module, const RunLink& link, ManualOptimization& optimizers)
      : module_(module), link_(link) {
    RunLink with_optimizers = link;
    with_optimizers.manual_optimization = &optimizers;
    module_.attach(with_optimizers);
  }
  ~OptimizersInReach() { module_.attach(link_); }
  OptimizersInReach(const OptimizersInReach&) = delete;
  OptimizersInReach& operator=(const OptimizersInReach&) = delete;

 private:
  Module& module_;
  RunLink link_;
};

// The metrics of one pass; empty if a limit turns the stage off.
Metrics evaluate(LoopContext& context, Stage stage, EvaluationLoaders loaders) {
  EvaluationLoop loop(context, stage, std::move(loaders));
  return loop.empty() ? Metrics{} : loop.run();
}

// A signal that came after the last step had looked for one; 0: none. The same on every rank.
int late_signal_of(Ranks& ranks, const SignalWatch& signals) {
  double pending = signals.pending();
  if (ranks.world_size() > 1) ranks.all_reduce({&pending, 1}, Reduction::max);
  return static_cast<int>(pending);
}

constexpr auto kRun = HookCaller::WhatRuns::run;

constexpr std::string_view kNoOptimizer =
    "{} has no optimizer: override Optimizers configure_optimizers() and return one, such as "
    "optim::AdamW(parameters(), {{.lr = 1e-3}})";

}  // namespace

Trainer::Trainer(TrainerOptions options)
    : options_(resolve(std::move(options))),
      strategy_(make_strategy(options_, choose_devices(options_))),
      devices_(choose_devices(options_)),
      precision_(options_.precision),
      callbacks_(options_.callbacks),
      hooks_(callbacks_, *this, state_, metrics_) {}

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
  require_step(module, module.hooks().training_step, "at::Tensor training_step(const Batch&, int64_t)",
               "fit needs training_step, configure_optimizers and a train loader");
  require(module.hooks().configure_optimizers, fmt::format(kNoOptimizer, module->name()));
  const auto stop_is_forgotten = c10::make_scope_exit([this] { stop_requested_ = false; });
  state_ = {};
  run(EntryPoint::fit, module, data, options_.ckpt_path, [&](LoopContext& context) {
    const auto val = [&] {
      return hooks_.located("val_dataloader", kRun, [&] {
        return shared_out(validation_loaders(module, data, options_.limit_val_batches, /*warn=*/state_.epoch == 0),
                          "val");
      });
    };
    const auto train = [&] {
      return hooks_.located("train_dataloader", kRun, [&] {
        return shared_out(checked(data.train_dataloader(), "train"), "train", /*even=*/true);
      });
    };
    warn_of_default_bound(options_);
    FitLoop loop(context, {.train = train, .val = val});
    Optimizers optimizers = hooks_.within(hooks::configure_optimizers, [&] { return module->configure_optimizers(); });
    require(!optimizers.empty(), fmt::format(kNoOptimizer, module->name()));
    if (is_trial_) optimizers.take_schedulers();
    OptimizerSteps steps(context, std::move(optimizers));
    const OptimizersInReach in_reach(*module, link_, steps);
    const FitState fit_state{.context = context, .steps = steps, .loop = loop, .callbacks = callbacks_};
    if (checkpoint_ && !options_.ckpt_weights_only) fit_state.load(*checkpoint_);
    fit_state_ = &fit_state;
    try {
      loop.run(steps);
      saver_->finish();
    } catch (...) {  // caught here, so that on_exception can save
      tell_of_failure(std::current_exception(), data);
      fit_state_ = nullptr;
      throw;
    }
    fit_state_ = nullptr;
  });
}

Metrics Trainer::validate(ModuleHandle module, DataModule& data, const std::string& ckpt_path) {
  require_step(module, module.hooks().validation_step, "void validation_step(const Batch&, int64_t)",
               "validate runs it on every batch");
  Metrics metrics;
  run(EntryPoint::validate, module, data, ckpt_path, [&](LoopContext& context) {
    const LoaderList loaders = hooks_.located("val_dataloader", kRun,
                                              [&] { return shared_out(checked(data.val_dataloader(), "val"), "val"); });
    metrics = evaluate(context, Stage::validate, {loaders, options_.limit_val_batches, "limit_val_batches"});
  });
  return metrics;
}

Metrics Trainer::test(ModuleHandle module, DataModule& data, const std::string& ckpt_path) {
  require_step(module, module.hooks().test_step, "void test_step(const Batch&, int64_t)",
               "test runs it on every batch");
  Metrics metrics;
  run(EntryPoint::test, module, data, ckpt_path, [&](LoopContext& context) {
    const LoaderList loaders = hooks_.located(
        "test_dataloader", kRun, [&] { return shared_out(checked(data.test_dataloader(), "test"), "test"); });
    metrics = evaluate(context, Stage::test, {loaders, options_.limit_test_batches, "limit_test_batches"});
  });
  return metrics;
}

std::vector<Batch> Trainer::predict(ModuleHandle module, DataModule& data, const std::string& ckpt_path) {
  require_step(module, module.hooks().predict_step, "Batch predict_step(const Batch&, int64_t)",
               "predict runs it on every batch");
  std::vector<Batch> predictions;
  run(EntryPoint::predict, module, data, ckpt_path, [&](LoopContext& context) {
    const LoaderList loaders = hooks_.located("predict_dataloader", kRun, [&] {
      return shared_out(checked(data.predict_dataloader(), "predict"), "predict");
    });
    predictions = run_prediction(context, {loaders, options_.limit_predict_batches, "limit_predict_batches"});
  });
  return predictions;
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
  check_one_rank("find_learning_rate");
  if (options_.fast_dev_run > 0) {
    log_warning("find_learning_rate does nothing in fast_dev_run");
    return {};
  }
  return sweep_learning_rate(options, [&](std::shared_ptr<Callback> callback, int64_t num_steps) {
    run_trial(module, data, std::move(callback), num_steps);
  });
}

int64_t Trainer::find_batch_size(ModuleHandle module, const std::function<Loaders(int64_t batch_size)>& make_loaders,
                                 BatchSizeFinderOptions options) {
  check_one_rank("find_batch_size");
  if (options_.fast_dev_run > 0) {
    log_warning("find_batch_size does nothing in fast_dev_run");
    return options.init_size;
  }
  const auto trial = [&](int64_t size) {
    LoadersDataModule data(make_loaders(size));
    run_trial(module, data, std::make_shared<Callback>(), options.steps_per_trial);
  };
  const auto is_whole_epoch = [&](int64_t size) {
    return checked(make_loaders(size).train, "train")->num_batches() == 1;
  };
  return search_batch_size(options, trial, is_whole_epoch);
}

void Trainer::run_trial(const ModuleHandle& module, DataModule& data, std::shared_ptr<Callback> callback,
                        int64_t num_steps) {
  const RandomStateRestored random_state;
  TrainerOptions options = options_;
  options.callbacks = {std::move(callback)};
  options.max_epochs = -1;
  options.max_steps = num_steps;
  options.min_epochs = options.min_steps = 0;
  options.max_time = std::nullopt;
  options.overfit_batches = std::nullopt;
  options.limit_train_batches = {};
  options.limit_val_batches = Batches(0);
  options.val_check_interval = {};
  options.check_val_every_n_epoch = 1;
  options.log_every_n_steps = std::nullopt;
  options.enable_progress_bar = options.enable_model_summary = options.enable_checkpointing = options.logger = false;
  options.barebones = false;  // barebones allows no callbacks
  options.fast_dev_run = 0;
  Trainer trial(std::move(options));
  trial.is_trial_ = true;
  trial.fit(module, data);
}

void Trainer::run(EntryPoint entry_point, const ModuleHandle& module, DataModule& data, const std::string& ckpt_path,
                  const std::function<void(LoopContext&)>& body) {
  meet_ranks();
  module_ = module;
  metrics_ = {};
  accumulate_grad_batches_ = options_.accumulate_grad_batches;
  state_.entry_point = entry_point;
  callbacks_ = options_.callbacks;
  link_ = {.state = &state_,
           .metrics = options_.barebones ? nullptr : &metrics_,
           .clipping = gradient_clipping(options_),
           .trainer = this,
           .device = device()};
  hooks_.set_module(&*module);
  std::exception_ptr failure;
  const DebugModes modes(options_, entry_point);
  GroupRanks ranks(world_->control());
  const bool watches_signals = entry_point == EntryPoint::fit && !is_trial_;
  const SignalWatch signals(watches_signals);
  NonFinite non_finite(/*active=*/rank_ == 0 && !is_trial_ && !options_.barebones);
  int late_signal = 0;
  const std::function<void(int)> on_signal = [this](int signal) { interrupt(signal); };
  const std::function<void()> on_step_boundary = [this] { save_at_boundary(); };
  saver_ = std::make_unique<CheckpointSaver>(
      world_->control(), [this](bool weights_only) { return checkpoint_content(weights_only); },
      [this](const std::filesystem::path& folder, const SaveOptions& options) { tell_of_checkpoint(folder, options); });
  failing_ = interrupted_ = false;
  try {
    setup(data, ckpt_path);
    const LoopPlan plan = plan_of(options_);
    LoopContext context{.plan = plan,
                        .strategy = *strategy_,
                        .world = *world_,
                        .ranks = ranks,
                        .precision = precision_,
                        .device_type = own_devices_.front().type(),
                        .data = data,
                        .overridden = module.hooks(),
                        .state = state_,
                        .metrics = metrics_,
                        .hooks = hooks_,
                        .saver = *saver_,
                        .signals = signals,
                        .interrupt = on_signal,
                        .on_step_boundary = on_step_boundary,
                        .stop_requested = stop_requested_,
                        .non_finite = non_finite,
                        .accumulate_grad_batches = accumulate_grad_batches_};
    body(context);
    saver_->finish();
    if (watches_signals) late_signal = late_signal_of(ranks, signals);
  } catch (...) {
    failure = std::current_exception();
    tell_of_failure(failure, data);
  }
  FirstError after;
  saver_.reset();
  checkpoint_.reset();
  after.run([&] { teardown(data); });
  if (late_signal == 0 && world_size_ == 1) late_signal = signals.pending();
  if (failure == nullptr && late_signal != 0) {
    after.run([&] { interrupt_after_last_step(late_signal); });
  }
  if (failure == nullptr && after.get() == nullptr) return leave_ranks();
  if (failure != nullptr) after.warn("teardown failed too");
  leave_ranks(failure != nullptr ? failure : after.get());
}

// Connects this process to the other ranks, if there are any. A single rank joins no session, so that its failure ends
// no other process.
void Trainer::meet_ranks() {
  const std::optional<WorldOptions> ranks = strategy_->rank_per_device();
  World* const threads = ranks ? ThreadWorld::current() : nullptr;
  const bool has_one_rank = static_cast<int64_t>(devices_.size()) * options_.num_nodes == 1;
  if (!ranks || (has_one_rank && threads == nullptr)) {
    check_alone();
    world_ = &alone_.emplace();
    own_devices_ = devices_;
    return;
  }
  if (threads != nullptr) {
    world_ = threads;
    local_rank_ = threads->rank();
  } else {
    session_ = &process_session::join({.devices = devices_, .num_nodes = options_.num_nodes, .world = *ranks});
    session_->set_busy(true);
    world_ = &session_->world();
    local_rank_ = session_->environment().local_rank;
    seed_rank(world_->rank());
  }
  rank_ = world_->rank();
  world_size_ = world_->world_size();
  own_devices_ = {devices_[static_cast<size_t>(local_rank_) % devices_.size()]};
}

// Aborts all ranks with `reason`; leave_ranks(failure) follows.
void Trainer::give_up(const std::string& reason) {
  if (session_ != nullptr) return session_->abort(reason);
  world_->abort(reason);
}

// Throws `failure`, or the failure of the rank that caused it.
void Trainer::leave_ranks(std::exception_ptr failure) {
  world_ = nullptr;
  Session* session = std::exchange(session_, nullptr);
  if (session != nullptr) session->set_busy(false);
  if (failure == nullptr) return;
  std::rethrow_exception(session != nullptr ? process_session::end(failure) : failure);
}

void Trainer::prepare_data(DataModule& data) {
  if (local_rank_ == 0) {
    hooks_.within(hooks::prepare_data, [&] {
      data.prepare_data();
      hooks_.module().prepare_data();
    });
  }
  world_->control().barrier();
}

// Every rank uses the run folder that rank 0 creates.
void Trainer::share_run_dir() {
  if (world_size_ == 1) return;
  const std::string own = rank_ == 0 ? run_dir().string() : "";
  run_dir_ = all_gather_bytes(world_->control(), own).front();
}

// The folder is created when its path is first needed; it may have stayed empty.
void Trainer::remove_unused_run_dir() {
  if (rank_ > 0 || run_dir_.empty()) return;
  std::error_code is_used;
  if (!std::filesystem::remove(run_dir_, is_used) || is_used) return;
  std::filesystem::remove(run_dir_.parent_path(), is_used);
  run_dir_.clear();
}

// Shards the loader over the ranks. Throws on every rank if one of them would have nothing to read.
std::shared_ptr<Loader> Trainer::shared_out(std::shared_ptr<Loader> loader, std::string_view name, bool even) {
  const bool share = world_size_ > 1 && options_.use_distributed_sampler;
  const DataShard shard{.rank = rank_, .world_size = world_size_, .even = even};
  const bool is_shared = loader->set_shard(share ? shard : DataShard());
  if (share && !is_shared && !std::exchange(told_no_shard_, true)) {
    log_warning(
        "the {} loader does not know how to share its data out (Loader::set_shard), so that each of the {} ranks reads "
        "all of it; write set_shard, or set use_distributed_sampler to false if it reads a part already",
        name, world_size_);
  }
  GroupRanks ranks(world_->control());
  if (world_size_ > 1 && any_rank(ranks, loader->num_batches() == 0)) {
    throw SetupError(
        fmt::format("the {} loader has too few samples: of {} ranks, not each gets a batch; use fewer "
                    "devices, or a smaller batch_size without drop_last",
                    name, world_size_));
  }
  return loader;
}

LoaderList Trainer::shared_out(LoaderList loaders, std::string_view name) {
  for (const auto& loader : loaders) shared_out(loader, name, /*even=*/false);
  return loaders;
}

void Trainer::check_one_rank(std::string_view what) const {
  if (!strategy_->rank_per_device() || static_cast<int64_t>(devices_.size()) * options_.num_nodes == 1) return;
  throw UsageError(fmt::format("{} tries on one device; set devices and num_nodes to 1 for it", what));
}

void Trainer::setup(DataModule& data, const std::string& ckpt_path) {
  Module& module = hooks_.module();
  if (!is_trial_) {
    callbacks_ = hooks_.located("configure_callbacks", kRun, [&] { return with_module_callbacks(options_, module); });
  }
  if (rank_ > 0) std::erase_if(callbacks_, [](const auto& callback) { return !callback->runs_on_every_rank(); });
  tell_where_checkpoints_are();
  module.attach(link_);
  running_ = true;
  share_run_dir();
  prepare_data(data);
  hooks_.within(hooks::setup, [&] { data.setup(state_.entry_point); });
  hooks_(hooks::setup, state_.entry_point);
  hooks_.within(hooks::configure_model, [&] { module.configure_model(); });
  if (is_trial_) restored_.emplace(module);
  if (!is_trial_) open_checkpoint(ckpt_path, data);
  if (!is_trial_ && !std::exchange(told_slow_, true)) precision_.warn_if_slow_on(own_devices_.front().type());
  if (options_.sync_batchnorm) check_sync_batch_norm(module);
  strategy_->setup(module,
                   {.devices = own_devices_,
                    .precision = precision_,
                    .world = *world_,
                    .deterministic = options_.deterministic,
                    .local_world_size = strategy_->rank_per_device() ? static_cast<int64_t>(devices_.size()) : 1,
                    .sends_ahead = !module_->hooks().backward && !module_->hooks().on_after_backward,
                    .accumulates = accumulate_grad_batches_ > 1});
  if (checkpoint_) {  // now that the module has the precision of the run
    load_weights(module, checkpointed_weights(), checkpoint_->folder().string(), options_.ckpt_strict);
  }
}

void Trainer::teardown(DataModule& data) {
  strategy_->teardown();
  running_ = false;
  Module& module = hooks_.module();
  FirstError first;
  const auto tell = [&](const auto& call) { first.run([&] { hooks_.within(hooks::teardown, call); }); };
  tell([&] { data.teardown(state_.entry_point); });
  for (const auto& callback : callbacks_) tell([&] { callback->teardown(*this, state_.entry_point); });
  tell([&] { module.teardown(state_.entry_point); });
  module.attach({});
  first.run([&] { remove_unused_run_dir(); });
  first.rethrow();
}

// Runs once per run; later calls return at once.
void Trainer::tell_of_failure(const std::exception_ptr& failure, DataModule& data) {
  if (std::exchange(failing_, true)) return;
  metrics_.set_batch(nullptr);  // the batch is gone
  saver_->abort(text_of(failure));
  give_up(text_of(failure));
  notify_of(failure, data);
}

void Trainer::notify_of(const std::exception_ptr& failure, DataModule& data) {
  FirstError first;
  const auto call = [&](const auto& hook) { first.run([&] { hooks_.within(hooks::on_exception, hook); }); };
  const auto tell = [&](const std::exception& error) {
    for (const auto& callback : callbacks_) call([&] { callback->on_exception(*this, error); });
    call([&] { data.on_exception(error); });
  };
  try {
    std::rethrow_exception(failure);
  } catch (const std::exception& error) {
    tell(error);
  } catch (...) {
    tell(std::runtime_error(text_of(failure)));
  }
  first.warn("on_exception failed too");
}

std::string Trainer::device_summary() const {
  std::vector<std::string> names;
  for (const c10::Device& device : devices_) names.push_back(device.str());
  std::string summary = fmt::format("{} on {}", strategy_->name(), fmt::join(names, ", "));
  if (devices_.front().is_cpu()) {
    summary += fmt::format(" with {} thread{}{}", at::get_num_threads(), at::get_num_threads() == 1 ? "" : "s",
                           world_size_ > 1 ? " each" : "");
  }
  if (options_.num_nodes > 1) summary += fmt::format(", on each of {} machines", options_.num_nodes);
  return summary;
}

// The memory of the model under this strategy and, if different, on a single device.
std::string Trainer::memory_summary() const {
  const MemoryRequest request{.precision = precision_,
                              .num_devices = static_cast<int64_t>(devices_.size()) * options_.num_nodes,
                              .device_type = devices_.front().type(),
                              .accumulates = accumulate_grad_batches_ > 1};
  const auto memory_of = [&](const Strategy& strategy) {
    return strategy.model_memory(**module_, strategy_->optimizers(), request);
  };
  const auto memory = memory_of(*strategy_);
  if (!memory) return "";
  std::vector<std::pair<std::string, ModelMemory>> rows{{strategy_->name(), *memory}};
  const auto alone = memory_of(*strategy_registry().create("single_device"));
  if (alone->total() != memory->total()) rows.emplace_back("single_device", *alone);
  return format_memory(rows);
}

const Optimizers& Trainer::optimizers() {
  static const Optimizers kNone;
  return fit_state_ == nullptr ? kNone : strategy_->optimizers();
}

// A CPU device has no index here, as in tensors.
c10::Device Trainer::device() const {
  const c10::Device own = own_devices_.front();
  return own.is_cpu() ? c10::Device(c10::kCPU) : own;
}

at::Tensor Trainer::all_gather(const at::Tensor& tensor) {
  if (world_ == nullptr) throw UsageError("all_gather: no run is under way");
  return all_gather_tensors(world_->control(), tensor);
}

const std::filesystem::path& Trainer::run_dir() {
  if (!module_) throw UsageError("run_dir: it is known from the first fit, validate, test or predict on");
  if (run_dir_.empty()) {
    run_dir_ = options_.name.empty() ? make_run_dir(options_.default_root_dir)
                                     : make_named_run_dir(options_.default_root_dir, options_.name);
  }
  return run_dir_;
}

void Trainer::request_stop(std::string_view reason) {
  if (!stop_requested_.exchange(true)) log_info("stopping: {}", reason);
}

void Trainer::set_accumulation(int64_t accumulate_grad_batches) {
  if (accumulate_grad_batches < 1) {
    throw UsageError(fmt::format("accumulate_grad_batches must be at least 1; got {}", accumulate_grad_batches));
  }
  accumulate_grad_batches_ = accumulate_grad_batches;
}

}  // namespace fulgur
