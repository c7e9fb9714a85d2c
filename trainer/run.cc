#include "fulgur/trainer/run.h"

#include <c10/util/ScopeExit.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdio>
#include <typeinfo>
#include <utility>

#include "fulgur/base/error.h"
#include "fulgur/base/first_error.h"
#include "fulgur/base/names.h"
#include "fulgur/base/type_name.h"
#include "fulgur/callbacks/lambda_callback.h"
#include "fulgur/checkpoint/atomic_files.h"
#include "fulgur/checkpoint/numbered_files.h"
#include "fulgur/distributed/rank_messages.h"
#include "fulgur/launch/launcher.h"
#include "fulgur/loops/fit_loop.h"
#include "fulgur/loops/hooks.h"
#include "fulgur/loops/optimizer_steps.h"
#include "fulgur/nn/sync_batch_norm.h"
#include "fulgur/trainer/callback_states.h"
#include "fulgur/trainer/check_inputs.h"
#include "fulgur/trainer/choose_strategy.h"
#include "fulgur/trainer/debug_modes.h"
#include "fulgur/trainer/post_mortem.h"
#include "fulgur/trainer/resolve_options.h"
#include "fulgur/trainer/run_dir.h"
#include "fulgur/trainer/simple_profiler.h"

namespace fulgur {
namespace {

// Plain BatchNorm is an error, because C++ cannot replace the layers of a model.
void check_sync_batch_norm(const Module& module) {
  const std::vector<std::string> plain = nn::plain_batch_norm_names(module);
  if (plain.empty()) return;
  throw UsageError(fmt::format(
      "sync_batchnorm is true, but {} of {} {} not synchronise ranks; write fulgur::nn::SyncBatchNorm1d, 2d "
      "or 3d instead of torch::nn::BatchNorm1d, 2d or 3d, or set sync_batchnorm to false for those of a program of "
      "Python",
      fmt::join(plain, ", "), module.name(), plain.size() == 1 ? "does" : "do"));
}

const std::type_info& type_of(const Callback& callback) { return typeid(callback); }

// The callbacks of the options and of the Module. A callback of the Module replaces those of the same type, but for
// LambdaCallback, whose type does not say what it does.
std::vector<std::shared_ptr<Callback>> with_module_callbacks(const TrainerOptions& options, Module& module) {
  auto callbacks = options.callbacks;
  auto added = module.configure_callbacks();
  require(added.empty() || !options.barebones,
          fmt::format("barebones turns every extra off, but {}::configure_callbacks returned {}; leave out one or the "
                      "other",
                      module.name(), added.size()));
  for (const auto& callback : added) {
    require(callback != nullptr, module.name() + "::configure_callbacks returned a null callback");
    const std::type_info& type = type_of(*callback);
    if (type == typeid(LambdaCallback)) continue;
    std::erase_if(callbacks, [&](const auto& other) { return type_of(*other) == type; });
  }
  if (options.fast_dev_run > 0) {
    std::erase_if(added, [](const auto& callback) { return !callback->runs_in_fast_dev_run(); });
  }
  callbacks.insert(callbacks.end(), added.begin(), added.end());
  std::ranges::stable_partition(callbacks, [](const auto& callback) { return !callback->runs_last(); });
  return callbacks;
}

// Lets the module access the optimizers of the run for the lifetime of the object, which ends before teardown.
class ScopedOptimizers {
 public:
  ScopedOptimizers(Module& module, const RunAccess& link, ManualOptimization& optimizers)
      : module_(module), link_(link) {
    RunAccess with_optimizers = link;
    with_optimizers.manual_optimization = &optimizers;
    module_.attach(with_optimizers);
  }
  ~ScopedOptimizers() { module_.attach(link_); }
  ScopedOptimizers(const ScopedOptimizers&) = delete;
  ScopedOptimizers& operator=(const ScopedOptimizers&) = delete;

 private:
  Module& module_;
  RunAccess link_;
};

// The signal that came after the last step had checked for signals; 0: none. The same on every rank.
int late_signal_of(Ranks& ranks, const SignalWatch& signals) {
  double pending = signals.pending();
  if (ranks.world_size() > 1) ranks.all_reduce({&pending, 1}, Reduction::max);
  return static_cast<int>(pending);
}

constexpr auto kRun = HookCaller::WhatRuns::run;

}  // namespace

RunResources::RunResources(TrainerOptions given)
    : bounds(bounds_of(given)),
      options(resolve(std::move(given))),
      devices(choose_devices(options)),
      precision(options.precision),
      strategy(make_strategy(options, devices)) {}

const std::filesystem::path& run_dir_of(RunResults& results, const TrainerOptions& options) {
  if (results.run_dir.empty()) {
    results.run_dir = options.name.empty() ? make_run_dir(options.default_root_dir)
                                           : make_named_run_dir(options.default_root_dir, options.name);
  }
  return results.run_dir;
}

Run::Run(RunResources& resources, RunResults& results, RunRequest request)
    : resources_(resources),
      results_(results),
      request_(std::move(request)),
      world_(*resources.strategy, resources.devices, resources.options.num_nodes),
      callbacks_(request_.callbacks),
      checkpoints_(context_, *this, resources.options, results.run_dir),
      context_(make_context()),
      link_(make_link()) {
  results_.module = request_.module;
  results_.metrics = {};
  results_.rank = world_.rank();
  results_.world_size = world_.world_size();
  results_.state.entry_point = request_.entry_point;
}

LoopContext Run::make_context() {
  const TrainerOptions& options = resources_.options;
  const bool is_fit = request_.entry_point == EntryPoint::fit;
  return {.plan = request_.plan,
          .strategy = *resources_.strategy,
          .world = world_.world(),
          .precision = resources_.precision,
          .device_type = world_.devices().front().type(),
          .data = request_.data,
          .overridden = request_.module.hooks(),
          .state = results_.state,
          .metrics = results_.metrics,
          .stop = request_.stop,
          .events = checkpoints_,
          .hooks = HookCaller(callbacks_, *this, module(), results_.state, results_.metrics),
          .ranks = CollectiveRanks(world_.world().control()),
          .saver = CheckpointSaver(
              world_.world().control(),
              [this](bool weights_only, const auto& use) { checkpoints_.with_content(weights_only, use); },
              [this](const std::filesystem::path& folder, const SaveOptions& saved) {
                checkpoints_.on_saved(folder, saved);
              }),
          .signals = SignalWatch(is_fit && !request_.is_trial),
          .non_finite = NonFinite(world_.rank() == 0 && !request_.is_trial && !options.barebones),
          .accumulate_grad_batches = request_.plan.accumulate_grad_batches,
          .log_every_n_steps = request_.plan.log_every_n_steps.value_or(kLogEveryNSteps)};
}

RunAccess Run::make_link() {
  const bool has_metrics = request_.is_trial || !resources_.options.barebones;
  return {.state = &results_.state,
          .metrics = has_metrics ? &results_.metrics : nullptr,
          .clipping = request_.plan.clipping,
          .trainer = this,
          .device = device()};
}

void Run::fit() {
  execute([this] {
    bool is_first = true;
    const auto val = [this, &is_first] {
      return context_.hooks.located("val_dataloader", kRun, [this, warns = std::exchange(is_first, false)] {
        return shard(validation_loaders(request_.module, request_.data, request_.plan.limit_val_batches, warns), "val");
      });
    };
    const auto train = [this] {
      return context_.hooks.located("train_dataloader", kRun, [this] {
        return shard(checked(request_.data.train_dataloader(), "train"), "train", /*even=*/true);
      });
    };
    if (!request_.is_trial) warn_of_default_bound(resources_.options);
    FitLoop loop(context_, {.train = train, .val = val});
    checkpoints_.estimate_steps(loop);
    Optimizers optimizers = context_.hooks.within(hooks::configure_optimizers, [this] {
      const bool makes_its_own = request_.module.hooks().configure_optimizers;
      return makes_its_own ? module().configure_optimizers() : resources_.options.optimizer.make(module());
    });
    require_optimizer(module(), !optimizers.empty());
    OptimizerSteps steps(context_, std::move(optimizers));
    const ScopedOptimizers in_reach(module(), link_, steps);
    const FitState fit_state{.context = context_, .steps = steps, .loop = loop, .callbacks = callbacks_};
    checkpoints_.resume(fit_state);
    checkpoints_.set_fit(&fit_state);
    const auto is_over = c10::make_scope_exit([this] { checkpoints_.set_fit(nullptr); });
    try {
      loop.run(steps);
      context_.saver.finish();
    } catch (...) {  // caught here, so that on_exception can save
      handle_failure(std::current_exception());
      throw;
    }
  });
}

Metrics Run::evaluate(Stage stage) {
  const bool is_test = stage == Stage::test;
  const std::string name = is_test ? "test" : "val", hook = name + "_dataloader", limit = "limit_" + name + "_batches";
  const TrainerOptions& options = resources_.options;
  Metrics metrics;
  execute([&] {
    const LoaderList loaders = context_.hooks.located(hook, kRun, [&] {
      return shard(checked(is_test ? request_.data.test_dataloader() : request_.data.val_dataloader(), name), name);
    });
    EvaluationLoop loop(context_, stage,
                        {loaders, is_test ? options.limit_test_batches : options.limit_val_batches, limit});
    if (!loop.empty()) metrics = loop.run();
  });
  return metrics;
}

std::vector<Batch> Run::predict() {
  std::vector<Batch> predictions;
  execute([&] {
    const LoaderList loaders = context_.hooks.located("predict_dataloader", kRun, [this] {
      return shard(checked(request_.data.predict_dataloader(), "predict"), "predict");
    });
    predictions =
        run_prediction(context_, {loaders, resources_.options.limit_predict_batches, "limit_predict_batches"});
  });
  return predictions;
}

// Runs what all entry points share: setup, `body`, and, even after an exception, teardown.
void Run::execute(const std::function<void()>& body) {
  const ScopedDebugModes modes(resources_.options, request_.entry_point);
  const bool watches_signals = request_.entry_point == EntryPoint::fit && !request_.is_trial;
  trace::Profile profile;
  std::optional<trace::ScopedProfile> profiling;
  if (canonical_name(resources_.options.profiler) == "simple" && !request_.is_trial) profiling.emplace(profile);
  std::optional<trace::ScopedRecentSpans> recent_spans;
  if (*resources_.options.enable_post_mortem && !request_.is_trial) recent_spans.emplace();
  const auto begin = trace::Clock::now();
  int late_signal = 0;
  std::exception_ptr failure;
  try {
    setup();
    body();
    context_.saver.finish();
    if (profiling) {
      profile.add(to_string(request_.entry_point), trace::Clock::now() - begin);
      report_profile(profile);
    }
    if (watches_signals) late_signal = late_signal_of(context_.ranks, context_.signals);
  } catch (...) {
    failure = std::current_exception();
    handle_failure(failure);
  }
  FirstError after;
  context_.saver.close();
  after.run([&] { teardown(); });
  if (late_signal == 0 && world_.world_size() == 1) late_signal = context_.signals.pending();
  if (failure == nullptr && late_signal != 0) {
    after.run([&] { checkpoints_.interrupt_after_last_step(late_signal); });
  }
  if (failure != nullptr) after.warn("teardown failed too");
  world_.leave(failure != nullptr ? failure : after.get());
}

// Prints the actions that took at least a thousandth of the time, and writes all of them to the run's folder.
void Run::report_profile(const trace::Profile& profile) {
  std::vector<trace::Profile::Sums> by_rank;
  for (const std::string& text : all_gather_bytes(world_.world().control(), sums_to_text(profile.sums()))) {
    by_rank.push_back(sums_from_text(text));
  }
  if (global_rank() > 0) return;
  const std::string_view whole = to_string(request_.entry_point);
  fmt::print("where the time of {} went\n{}", whole, profile_table(by_rank, whole, /*least_share=*/1e-3));
  std::fflush(stdout);
  if (resources_.options.fast_dev_run > 0) return;
  FirstError error;
  error.run([&] {
    replace_file_atomically(next_numbered(run_dir(), fmt::format("profile-{}", whole), ".txt"), [&](FileWriter& file) {
      const std::string table = profile_table(by_rank, whole, /*least_share=*/0.0);
      file.write(table.data(), table.size());
    });
  });
  error.warn("the profile is not kept");
}

void Run::setup() {
  choose_callbacks();
  checkpoints_.tell_where_checkpoints_are();
  module().attach(link_);
  checkpoints_.set_weights_in_strategy(true);
  broadcast_run_dir();
  prepare_data();
  HookCaller& hooks = context_.hooks;
  hooks.within(hooks::setup, [this] { request_.data.setup(request_.entry_point); });
  hooks(hooks::setup, request_.entry_point);
  hooks.within(hooks::configure_model, [this] { module().configure_model(); });
  if (request_.is_trial) {
    restored_.emplace(module());
  } else {
    checkpoints_.open(request_.ckpt_path);
    if (!std::exchange(resources_.has_warned_slow, true)) resources_.precision.warn_if_slow_on(context_.device_type);
  }
  if (resources_.options.sync_batchnorm) check_sync_batch_norm(module());
  setup_strategy();
  checkpoints_.load_weights();
}

void Run::choose_callbacks() {
  if (!request_.is_trial) {
    callbacks_ = context_.hooks.located("configure_callbacks", kRun,
                                        [this] { return with_module_callbacks(resources_.options, module()); });
    if (request_.entry_point == EntryPoint::fit) check_state_keys(callbacks_);
  }
  for (const auto& callback : callbacks_) {
    const bool works_with_others = callback->wants_gradients() || callback->wants_grad_norm() ||
                                   callback->judges_updates() || callback->averages_weights();
    if (callback->runs_on_every_rank() || !works_with_others) continue;
    throw SetupError(fmt::format(
        "{} wants gradients, their norm or averaged weights, which all ranks compute together, but runs on rank 0 "
        "only; let its runs_on_every_rank() return true",
        short_type_name(type_of(*callback))));
  }
  const auto averages = [](const auto& callback) { return callback->averages_weights(); };
  if (std::ranges::count_if(callbacks_, averages) > 1) {
    throw SetupError("two callbacks average weights, but a run has one average; leave one WeightAveraging out");
  }
  if (world_.rank() > 0)
    std::erase_if(callbacks_, [](const auto& callback) { return !callback->runs_on_every_rank(); });
}

bool Run::averages_weights() const {
  return std::ranges::any_of(callbacks_, [](const auto& callback) { return callback->averages_weights(); });
}

// The ranks of this run that share the cores of this host.
int64_t Run::local_world_size() const {
  return resources_.strategy->rank_per_device() ? static_cast<int64_t>(resources_.devices.size()) : 1;
}

void Run::setup_strategy() {
  const OverriddenHooks& overridden = request_.module.hooks();
  Strategy& strategy = *resources_.strategy;
  strategy.setup(module(), {.devices = world_.devices(),
                            .precision = resources_.precision,
                            .world = world_.world(),
                            .deterministic = resources_.options.deterministic,
                            .local_world_size = local_world_size(),
                            .reduces_during_backward = !overridden.backward && !overridden.on_after_backward,
                            .averages_weights = averages_weights(),
                            .accumulates = context_.accumulate_grad_batches > 1,
                            .only_copies_batches = !overridden.transfer_batch_to_device,
                            .cuda_graph = resources_.options.cuda_graph && request_.entry_point == EntryPoint::fit,
                            .resumed = checkpoints_.strategy_state()});
}

void Run::prepare_data() {
  if (world_.local_rank() == 0) {
    context_.hooks.within(hooks::prepare_data, [this] {
      request_.data.prepare_data();
      module().prepare_data();
    });
  }
  world_.world().control().barrier();
}

// Every rank uses the run folder that rank 0 creates, and writes its post-mortem into the same subfolder.
void Run::broadcast_run_dir() {
  if (world_.world_size() == 1) return;
  const bool is_zero = world_.rank() == 0;
  const auto from_zero = [&](const std::string& own) {
    return all_gather_bytes(world_.world().control(), is_zero ? own : "").front();
  };
  results_.run_dir = from_zero(is_zero ? run_dir().string() : "");
  post_mortem_name_ = from_zero(free_post_mortem_name(results_.run_dir));
}

// The folder is created when its path is first needed; it may have stayed empty.
void Run::remove_unused_run_dir() {
  std::filesystem::path& run_dir = results_.run_dir;
  if (world_.rank() > 0 || run_dir.empty()) return;
  if (::rmdir(run_dir.c_str()) != 0) return;  // refuses a folder with files, and a link to one
  ::rmdir(run_dir.parent_path().c_str());
  run_dir.clear();
}

// Shards the loader over the ranks. Throws on every rank if one of them would have nothing to read.
std::shared_ptr<Loader> Run::shard(std::shared_ptr<Loader> loader, std::string_view name, bool even) {
  const bool share = world_.world_size() > 1 && resources_.options.use_distributed_sampler;
  DataShard part{.num_cores = threads_per_rank(local_world_size()),
                 .for_accelerator = context_.device_type != c10::DeviceType::CPU};
  if (share) {
    part.rank = world_.rank();
    part.world_size = world_.world_size();
    part.even = even;
  }
  const bool is_shared = loader->set_shard(part);
  if (share && !is_shared) {
    resources_.warn_no_shard(
        "the {} loader cannot be sharded (Loader::set_shard returned false), so that each of the {} ranks reads all of "
        "it; implement set_shard, or set use_distributed_sampler to false if each rank reads its own part already",
        name, world_.world_size());
  }
  if (world_.world_size() > 1 && any_rank(context_.ranks, loader->num_batches() == 0)) {
    throw SetupError(
        fmt::format("the {} loader has too few samples for each of the {} ranks to get a batch; use fewer devices, or "
                    "a smaller batch_size without drop_last",
                    name, world_.world_size()));
  }
  return loader;
}

LoaderList Run::shard(LoaderList loaders, std::string_view name) {
  for (const auto& loader : loaders) shard(loader, name, /*even=*/false);
  return loaders;
}

void Run::teardown() {
  results_.metrics.reset_metrics();  // first, because replicas end with the strategy, and their metrics with them
  resources_.strategy->teardown();
  checkpoints_.set_weights_in_strategy(false);
  FirstError first;
  const auto tell = [&](const auto& call) { first.run([&] { context_.hooks.within(hooks::teardown, call); }); };
  tell([&] { request_.data.teardown(request_.entry_point); });
  for (const auto& callback : callbacks_) tell([&] { callback->teardown(*this, request_.entry_point); });
  tell([&] { module().teardown(request_.entry_point); });
  module().attach({});
  first.run([&] { remove_unused_run_dir(); });
  first.rethrow();
}

}  // namespace fulgur
