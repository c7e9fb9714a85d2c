// Bad input, by the rows of the list of Lightning's checks that we follow (section 10 of the reference): what a user
// writes, and which message follows. Where a message names a fix, the expected text is that part of it.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/optim/lbfgs.h>

#include <chrono>
#include <functional>
#include <limits>
#include <memory>
#include <set>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "fulgur/base/error.h"
#include "fulgur/callbacks/early_stopping.h"
#include "fulgur/callbacks/gradient_accumulation_scheduler.h"
#include "fulgur/callbacks/learning_rate_monitor.h"
#include "fulgur/callbacks/model_checkpoint.h"
#include "fulgur/callbacks/progress_bar.h"
#include "fulgur/callbacks/weight_averaging.h"
#include "fulgur/cli/command_line.h"
#include "fulgur/launch/cluster_environment.h"
#include "fulgur/optim/lr_schedulers.h"
#include "fulgur/optim/sgd.h"
#include "fulgur/optim/torch_optimizer.h"
#include "fulgur/trainer/trainer.h"
#include "tests/testing/temp_dir.h"
#include "tests/testing/tiny.h"
#include "tests/testing/unsized_loader.h"

namespace fulgur {
namespace {

using ::testing::HasSubstr;
using testing::quiet;
using testing::tiny_loader;
using testing::TinyModule;
using testing::UnsizedLoader;

// Does what the user did; returns the message, or kNotHere if this machine cannot refuse it.
using Trigger = std::function<std::string()>;
constexpr std::string_view kNotHere = "this machine has what the row asks for";

struct Row {
  int number;        // number in the list
  std::string name;  // test name; empty: the row has no meaning here
  Trigger trigger;   // null if the row has no meaning here
  std::string text;  // expected part of the message, or why the row has no meaning here
};

Row no_meaning(int number, std::string why) { return {number, {}, {}, std::move(why)}; }

template <class Error, class Body>
std::string refusal_of(const Body& body) {
  try {
    body();
  } catch (const Error& error) {
    return error.what();
  }
  return "nothing was refused";
}

// The Trainer's constructor refuses the options.
Trigger made(TrainerOptions options) {
  return [options] { return refusal_of<UsageError>([&] { Trainer trainer(options); }); };
}

// The command line refuses the flag, or the Trainer refuses the options that it gives.
Trigger parsed(std::string flag) {
  return [flag] {
    return refusal_of<UsageError>([&] {
      TrainerOptions options;
      parse_flags({flag}, "program", [&](FieldVisitor& visit) { options.describe(visit); });
      Trainer trainer(quiet(options));
    });
  };
}

Loaders train_and_val() { return {.train = tiny_loader(40, 8), .val = tiny_loader(16, 8)}; }
Loaders unsized() { return {.train = UnsizedLoader::make(tiny_loader()), .val = UnsizedLoader::make(tiny_loader())}; }

// fit refuses before it takes a step.
template <class M = TinyModule>
Trigger fitted(TrainerOptions options = {}, Loaders loaders = train_and_val()) {
  return [options, loaders] {
    Trainer trainer(quiet(options));
    const auto module = make_module<M>();
    const std::string message = refusal_of<std::exception>([&] { trainer.fit(module, loaders); });
    EXPECT_EQ(trainer.state().global_step, 0);
    return message;
  };
}

struct NoTrainingStep : Module {};

// validate, test or predict refuses a module that has no step of any kind.
template <class EntryPoint>
Trigger evaluated(EntryPoint entry_point) {
  return [entry_point] {
    Trainer trainer(quiet());
    return refusal_of<SetupError>([&] { entry_point(trainer, make_module<NoTrainingStep>()); });
  };
}

// A check that can only be made once training has logged something.
template <class M>
Trigger refused_during_fit(Loaders loaders = train_and_val()) {
  return [loaders] { return refusal_of<std::exception>([&] { Trainer(quiet()).fit(make_module<M>(), loaders); }); };
}

template <class Body>
std::string warning_of(const Body& body) {
  ::testing::internal::CaptureStderr();
  body();
  return ::testing::internal::GetCapturedStderr();
}

template <class M>
Trigger warned(Loaders loaders = train_and_val()) {
  return [loaders] { return warning_of([&] { Trainer(quiet()).fit(make_module<M>(), loaders); }); };
}

struct NoOptimizer : Module {
  at::Tensor training_step(const Batch&, int64_t) override { return {}; }
};

struct EmptyOptimizers : TinyModule {
  Optimizers configure_optimizers() override { return {}; }
};

struct NoValidationStep : NoOptimizer {
  Optimizers configure_optimizers() override { return {}; }
};

struct Manual : TinyModule {
  Manual() { automatic_optimization = false; }
};

struct BackwardInAutomatic : TinyModule {
  at::Tensor training_step(const Batch& batch, int64_t) override {
    manual_backward(loss(batch));
    return {};
  }
};

struct OptimizerInAutomatic : TinyModule {
  at::Tensor training_step(const Batch&, int64_t) override {
    optimizer().step();
    return {};
  }
};

struct TwoOptimizers : TinyModule {
  Optimizers configure_optimizers() override {
    Optimizers optimizers;
    optimizers.add(optim::SGD(hidden->parameters()));
    optimizers.add(optim::SGD(out->parameters()));
    return optimizers;
  }
};

// Modules with a scheduler that is set up wrongly.
template <auto config>
struct Scheduled : TinyModule {
  Optimizers configure_optimizers() override { return {optim::SGD(parameters()), config()}; }
};
LRSchedulerConfig null_scheduler() { return {}; }
LRSchedulerConfig plateau_without_monitor() { return {.scheduler = optim::ReduceLROnPlateau::make()}; }
LRSchedulerConfig plateau_of_a_typo() { return {.scheduler = optim::ReduceLROnPlateau::make(), .monitor = "val_los"}; }
LRSchedulerConfig lenient_plateau() {
  return {.scheduler = optim::ReduceLROnPlateau::make(), .monitor = "val_los", .strict = false};
}
LRSchedulerConfig unknown_interval() {
  return {.scheduler = optim::StepLR::make({.step_size = 1}), .interval = "steps"};
}
LRSchedulerConfig no_frequency() { return {.scheduler = optim::StepLR::make({.step_size = 1}), .frequency = 0}; }

struct SchedulerWithoutOptimizer : TinyModule {
  Optimizers configure_optimizers() override {
    Optimizers optimizers;
    optimizers.add_scheduler({.scheduler = optim::StepLR::make({.step_size = 1})});
    return optimizers;
  }
};

struct ClipsByItsOwnValue : TinyModule {
  void configure_gradient_clipping(Optimizer& optimizer, const GradientClipping&) override {
    clip_gradients(optimizer, {.value = 2.0});
  }
};

struct VectorLoss : TinyModule {
  at::Tensor training_step(const Batch& batch, int64_t) override { return forward(batch["x"]); }
};

struct DetachedLoss : TinyModule {
  at::Tensor training_step(const Batch& batch, int64_t) override { return loss(batch).detach(); }
};

struct SkipsWithLbfgs : TinyModule {
  at::Tensor training_step(const Batch&, int64_t) override { return {}; }
  Optimizers configure_optimizers() override { return optim::TorchOptimizer(torch::optim::LBFGS(parameters())); }
};

struct NanLoss : TinyModule {
  at::Tensor training_step(const Batch& batch, int64_t) override {
    return loss(batch) * std::numeric_limits<double>::quiet_NaN();
  }
};

// Modules that do something wrong in a hook or step.
template <auto wrong>
struct InFitStart : TinyModule {
  void on_fit_start() override { wrong(*this); }
};
template <auto wrong>
struct InTrainStart : TinyModule {
  void on_train_start() override { wrong(*this); }
};
template <auto wrong>
struct InTrainingStep : TinyModule {
  at::Tensor training_step(const Batch& batch, int64_t) override {
    wrong(*this);
    return loss(batch);
  }
};
template <auto wrong>
struct InValidation : TinyModule {
  void validation_step(const Batch&, int64_t) override { wrong(*this); }
};
void log_one(Module& module) { module.log("x", 1.0); }
void log_on_step(Module& module) { module.log("x", 1.0, {.on_step = true}); }
void log_never(Module& module) { module.log("x", 1.0, {.on_step = false, .on_epoch = false}); }
void log_a_vector(Module& module) { module.log("x", torch::ones({3})); }
void log_nothing(Module& module) { module.log("x", at::Tensor()); }
void log_in_two_ways(Module& module) {
  module.log("x", 1.0);
  module.log("x", 1.0, {.prog_bar = true});
}
void log_a_suffix(Module& module) { module.log("x/dataloader_idx_0", 1.0); }

// log() takes numbers: text, lists and nothing at all are refused by the compiler.
template <class T>
concept Loggable = requires(Module& module, const T& value) { module.log("x", value); };
static_assert(Loggable<double> && Loggable<int> && Loggable<at::Tensor>);
static_assert(!Loggable<std::string> && !Loggable<std::vector<double>> && !Loggable<std::nullptr_t>);

Loaders of_ragged_batches() {
  struct Ragged final : Loader {
    bool done = false;
    void begin_epoch(int64_t) override { done = false; }
    std::optional<Batch> next() override {
      if (std::exchange(done, true)) return std::nullopt;
      return Batch{{"x", torch::ones({2, 4})}, {"y", torch::ones({3, 1})}};
    }
    std::optional<int64_t> num_batches() const override { return 1; }
  };
  return {.train = tiny_loader(), .val = std::make_shared<Ragged>()};
}

Loaders with_fewer_batches_than_promised() {
  struct Short final : Loader {
    int64_t given = 0;
    void begin_epoch(int64_t) override { given = 0; }
    std::optional<Batch> next() override {
      if (given++ == 2) return std::nullopt;
      return Batch{{"x", torch::ones({2, 4})}, {"y", torch::ones({2, 1})}};
    }
    std::optional<int64_t> num_batches() const override { return 3; }
  };
  return {.train = std::make_shared<Short>()};
}

Loaders of_no_batch() {
  return {.train = DataLoader::make(testing::tiny_dataset(4), {.batch_size = 8, .drop_last = true})};
}

Loaders with_a_null_loader() { return {.train = tiny_loader(), .val = {tiny_loader(), nullptr}}; }

std::vector<Row> rows_of_amounts() {
  using namespace std::chrono_literals;
  const auto none = std::nullopt;
  return {
      {1, "NegativeLimit", made({.limit_train_batches = Batches(-1)}),
       "limit_train_batches must be a number of batches"},
      {1, "FractionAboveOne", made({.limit_val_batches = Fraction(1.5)}),
       "limit_val_batches must be a Fraction between 0 and 1, or a number of Batches; got 1.5"},
      {1, "FractionOfTest", made({.limit_test_batches = Fraction(-0.1)}), "limit_test_batches"},
      {1, "FractionOfPredict", made({.limit_predict_batches = Fraction(2)}), "limit_predict_batches"},
      {1, "NegativeOverfit", made({.overfit_batches = Batches(-1)}), "overfit_batches must be"},
      {1, "OverfitOfNothing", made({.overfit_batches = Batches(0)}), "leave it unset to train on all"},
      {1, "LimitThatIsNoNumber", parsed("--limit_val_batches=some"),
       "--limit_val_batches: 'some' is not a number of batches (10) nor a part of the epoch (10%)"},
      {2, "FractionOfLessThanABatch", fitted({.limit_train_batches = Fraction(0.1)}),
       "limit_train_batches = Fraction(0.1) of 5 batches is less than one; write Batches(1), or at least "
       "Fraction(0.2)"},
      {2, "OverfitFractionOfLessThanABatch", fitted({.overfit_batches = Fraction(0.1)}),
       "overfit_batches = Fraction(0.1) of 5 batches is less than one"},
      {3, "FractionOfAnUnknownNumber", fitted({.limit_train_batches = Fraction(0.5)}, unsized()),
       "write a number of Batches, or Fraction(1.0) for all"},
      {3, "FractionOfAnUnknownNumberOfVal", fitted({.limit_val_batches = Fraction(0.5)}, unsized()),
       "limit_val_batches = Fraction(0.5), but the loader does not know its length"},
      {4, "ValidationAfterTheLastBatch", fitted({.val_check_interval = Batches(6)}),
       "more than the 5 training batches of an epoch, so that fit would never validate; lower it, or set "
       "check_val_every_n_epoch to nullopt"},
      {5, "FractionAcrossEpochs", made({.val_check_interval = Fraction(0.5), .check_val_every_n_epoch = none}),
       "set val_check_interval to Batches or a TimeSpan"},
      {6, "NoEpochs", made({.check_val_every_n_epoch = 0}), "check_val_every_n_epoch must be at least 1; got 0"},
      {6, "EpochsThatAreNoNumber", parsed("--check_val_every_n_epoch=1.5"), "'1.5' is not a whole number"},
      {7, "IntervalOfAnUnknownNumber", fitted({.val_check_interval = Fraction(0.5)}, unsized()),
       "write Fraction(1.0), a number of Batches or a TimeSpan"},
      {8, "DaysMissing", parsed("--max_time=12:00:00"), "--max_time: '12:00:00' is not a time span; write DD:HH:MM:SS"},
      {8, "NegativePart", parsed("--val_check_interval=00:-1:00:00"), "write DD:HH:MM:SS"},
      {8, "NegativeTime", made({.max_time = -1s}), "max_time must not be negative; got -1 s"},
      {8, "IntervalOfNoTime", made({.val_check_interval = TimeSpan(0s)}), "must be longer than no time"},
      {9, "MaxEpochs", made({.max_epochs = -2}), "max_epochs must be at least -1; got -2"},
      {9, "MaxSteps", made({.max_steps = -2}), "max_steps must be at least -1; got -2"},
      {10, "FastDevRun", made({.fast_dev_run = -1}), "fast_dev_run must be at least 0; got -1"},
      {10, "LogEveryNoStep", made({.log_every_n_steps = 0}), "log_every_n_steps must be at least 1; got 0"},
      {10, "Reload", made({.reload_dataloaders_every_n_epochs = -1}),
       "reload_dataloaders_every_n_epochs must be at least 0; got -1"},
      {11, "ClipOfText", parsed("--gradient_clip_val=norm"), "--gradient_clip_val: 'norm' is not a number"},
      {11, "ClipOfNan", made({.gradient_clip_val = std::numeric_limits<double>::quiet_NaN()}),
       "gradient_clip_val must be at least 0; got nan"},
      {11, "ClipAlgorithm", made({.gradient_clip_algorithm = "nrm"}),
       "unknown gradient_clip_algorithm 'nrm'; did you mean 'norm'? known: norm, value"},
  };
}

std::string without_cuda() {
  try {
    Trainer trainer({.accelerator = "cuda"});
  } catch (const UsageError& error) {
    return error.what();
  }
  return std::string(kNotHere);
}

std::vector<Row> rows_of_devices() {
  return {
      {13, "Accelerator", made({.accelerator = "cdua"}),
       "unknown accelerator 'cdua'; did you mean 'cuda'? known: auto, cpu, cuda, gpu"},
      {13, "Strategy", made({.strategy = "single-devise"}),
       "unknown strategy 'single-devise'; did you mean 'single_device'? known: auto, "},
      {14, "AcceleratorThatIsNotHere", without_cuda, "write 'cpu'"},
      {15, "NoDevice", made({.accelerator = "cpu", .devices = 0}), "devices: at least 1 is needed; got 0"},
      {15, "NoDeviceAsText", parsed("--devices=0"), "devices: at least 1 is needed; got 0"},
      {15, "EmptyList", made({.accelerator = "cpu", .devices = std::vector<int64_t>{}}),
       "the list is empty; at least one device is needed"},
      {16, "DeviceTwice", made({.accelerator = "cpu", .devices = {0, 0}}), "devices: index 0 is listed twice"},
      {16, "DeviceThatDoesNotExist", made({.accelerator = "cpu", .devices = {5000}}),
       "there is no cpu:5000; indices go from 0 to"},
      {17, "NoNode", made({.num_nodes = 0}), "num_nodes must be at least 1; got 0"},
      {17, "MoreDevicesThanTheStrategyCanUse", made({.accelerator = "cpu", .strategy = "single_device", .devices = 2}),
       "trains on one device, but devices = 2"},
      {17, "MoreNodesThanTheStrategyCanUse", made({.accelerator = "cpu", .strategy = "single_device", .num_nodes = 2}),
       "devices = 1 and num_nodes = 2; set both to 1 or write strategy = 'ddp'"},
      {12, "UnknownProfiler", made({.profiler = "kinetto"}), "did you mean 'kineto'?"},
      no_meaning(18, "a strategy is chosen by name and has no devices of its own, so there is one place for each"),
      no_meaning(19,
                 "every strategy runs on CPUs and on GPUs; zero_offload and ddp_sharded say where they save nothing"),
      no_meaning(20,
                 "accelerator, strategy and precision are one setting each; there are no plugins to contradict them"),
  };
}

std::vector<Row> rows_of_modules_and_loaders() {
  return {
      {21, "CheckpointsTurnedOffWithACheckpointCallback",
       made({.enable_checkpointing = false, .callbacks = {ModelCheckpoint::make()}}),
       "enable_checkpointing is false, but callbacks has a ModelCheckpoint; leave one of them out"},
      {21, "ProgressTurnedOffWithABar", made({.enable_progress_bar = false, .callbacks = {ProgressBar::make()}}),
       "enable_progress_bar is false, but callbacks has a ProgressBar; leave one of them out"},
      {21, "TwoBars", made({.callbacks = {ProgressBar::make(), ProgressBar::make()}}),
       "callbacks has two ProgressBars, which would draw over each other; leave one of them out"},
      {22, "TwoCallbacksWithTheSameState",
       fitted(
           {.callbacks = {EarlyStopping::make({.monitor = "val_loss"}), EarlyStopping::make({.monitor = "val_loss"})}}),
       "two callbacks would keep their states in a checkpoint under the same name, EarlyStopping{monitor=val_loss}"},
      {23, "NullModule",
       [] {
         return refusal_of<UsageError>([] { Trainer(quiet()).fit(std::shared_ptr<TinyModule>(), train_and_val()); });
       },
       "the module is a null shared_ptr"},
      {23, "ModuleOfUnknownType",
       [] {
         const std::shared_ptr<Module> base = std::make_shared<TinyModule>();
         return refusal_of<UsageError>([&] { Trainer(quiet()).fit(base, train_and_val()); });
       },
       "make it with make_module<"},
      {24, "NoTrainingStep", fitted<NoTrainingStep>(),
       "does not override at::Tensor training_step(const Batch&, int64_t); fit needs training_step, "
       "configure_optimizers and a train loader"},
      {24, "NoOptimizer", fitted<NoOptimizer>(), "override Optimizers configure_optimizers() and return one, such as"},
      {24, "NoTrainLoader", fitted({}, {}),
       "there is no train loader; pass {.train = ...} or override train_dataloader"},
      {25, "NoValidationStep", evaluated([](Trainer& trainer, auto module) { trainer.validate(module, {}); }),
       "does not override void validation_step(const Batch&, int64_t)"},
      {25, "NoTestStep", evaluated([](Trainer& trainer, auto module) { trainer.test(module, {}); }),
       "does not override void test_step(const Batch&, int64_t)"},
      {25, "NoPredictStep", evaluated([](Trainer& trainer, auto module) { trainer.predict(module, {}); }),
       "does not override Batch predict_step(const Batch&, int64_t)"},
      {26, "ValLoaderWithoutValidationStep", fitted<NoValidationStep>(), "write it, or leave the val loader out"},
      {26, "ValidationStepWithoutValLoader", warned<TinyModule>({.train = tiny_loader()}),
       "has a validation_step, but there is no val loader; fit does not validate"},
      no_meaning(27, "loaders and a DataModule are two overloads; the compiler refuses a call with both"),
      {28, "NullAmongLoaders", fitted({}, with_a_null_loader()),
       "one of the val loaders is a null pointer; leave it out"},
      no_meaning(29, "the number of the loader is asked for, by dataloader_idx(); no signature has it"),
      {30, "NoBatch", fitted({}, of_no_batch()), "the train loader is empty: it yields no batch"},
      {30, "NoValBatch", fitted({}, {.train = tiny_loader(), .val = of_no_batch().train}), "the val loader is empty"},
      {30, "FewerBatchesThanPromised", refused_during_fit<TinyModule>(with_fewer_batches_than_promised()),
       "the loader promised 3 batches (num_batches()) and gave 2; can it be read only once?"},
      {30, "NoBatchAfterAll", fitted({}, {.train = UnsizedLoader::make(of_no_batch().train)}),
       "the train loader yields no batch in epoch 0"},
  };
}

std::vector<Row> rows_of_optimisation() {
  return {
      {31, "ManualWithClipping", fitted<Manual>({.gradient_clip_val = 0.5}),
       "gradient_clip_val = 0.5 would have no effect; do it in training_step, or leave automatic_optimization true"},
      {31, "ManualWithAccumulation", fitted<Manual>({.accumulate_grad_batches = 2}),
       "accumulate_grad_batches = 2 would have no effect"},
      {32, "ManualBackwardInAutomatic", fitted<BackwardInAutomatic>(), "set automatic_optimization = false"},
      {32, "OptimizerInAutomatic", fitted<OptimizerInAutomatic>(), "set automatic_optimization = false"},
      {33, "TwoOptimizersInAutomatic", fitted<TwoOptimizers>(),
       "returned 2 optimizers, but automatic optimisation steps one; set automatic_optimization = false"},
      {34, "NoOptimizerReturned", fitted<EmptyOptimizers>(),
       "has no optimizer: override Optimizers configure_optimizers"},
      {35, "NoScheduler", fitted<Scheduled<null_scheduler>>(), "make one, such as optim::StepLR::make"},
      {35, "SchedulerWithoutOptimizer", fitted<SchedulerWithoutOptimizer>(), "add the optimizer first"},
      {36, "PlateauWithoutMonitor", fitted<Scheduled<plateau_without_monitor>>(),
       "write {.scheduler = ..., .monitor = \"val_loss\"}"},
      {37, "MonitorThatNobodyLogs", refused_during_fit<Scheduled<plateau_of_a_typo>>(),
       "unknown monitor 'val_los'; did you mean 'val_loss'? known: train_loss, val_loss; log it, or set strict = "
       "false"},
      {37, "MonitorThatNobodyLogsIsNotStrict", warned<Scheduled<lenient_plateau>>(), "the learning rate stays"},
      {38, "Interval", fitted<Scheduled<unknown_interval>>(),
       "unknown interval 'steps'; did you mean 'step'? known: epoch, step"},
      {38, "Frequency", fitted<Scheduled<no_frequency>>(), "frequency must be at least 1; got 0"},
      no_meaning(39, "a scheduler has all that is needed, or it is abstract and the compiler refuses to make it"),
      no_meaning(40,
                 "optimizer_step may leave the update out by not calling `step`: it does not run the training step, "
                 "whose loss and gradients are there already (Steps.AnUpdateThatIsLeftOutIsNoStep)"),
      {41, "ClipValuesOfTwoPlaces", fitted<ClipsByItsOwnValue>({.gradient_clip_val = 0.5}),
       "the Trainer's gradient_clip_val is 0.5; set one of them, or make them equal"},
      {42, "LossThatIsNoScalar", fitted<VectorLoss>(), "got a tensor of shape [8, 1]; return its mean() or sum()"},
      {42, "LossWithoutGraph", fitted<DetachedLoss>(), "was it detached, or computed under NoGradGuard?"},
      {42, "NoLossForAClosure", fitted<SkipsWithLbfgs>(),
       "TorchOptimizer(LBFGS) needs a loss for each; return one, or use an optimizer"},
      {43, "LossOfNan", fitted<NanLoss>({.detect_anomaly = true}),
       "returned a loss of nan for batch 0; is there a division by 0"},
  };
}

std::vector<Row> rows_of_logging() {
  return {
      {44, "LogWhereThereIsNoEpoch", fitted<InFitStart<log_one>>(),
       "cannot be called in on_fit_start, which belongs to no step and no epoch; give the value to a logger instead"},
      {45, "OnStepWhereThereIsNoStep", fitted<InTrainStart<log_on_step>>(), "leave on_step out, or set it to false"},
      {45, "NeitherOnStepNorOnEpoch", fitted<InTrainingStep<log_never>>(),
       "the value would go nowhere; set one of them"},
      {46, "LogOfAVector", fitted<InTrainingStep<log_a_vector>>(),
       "got a tensor of shape [3]; log its mean() or sum()"},
      {46, "LogOfNothing", fitted<InTrainingStep<log_nothing>>(), "got an undefined tensor"},
      {47, "TwoSetsOfOptions", fitted<InTrainingStep<log_in_two_ways>>(),
       "called twice in training_step with different options; use one set of options, or two names"},
      {48, "NameWithALoadersSuffix", fitted<InTrainingStep<log_a_suffix>>(), "choose a name without it"},
      {49, "LogWithoutATrainer", [] { return warning_of([] { make_module<TinyModule>()->log("x", 1.0); }); },
       "log('x') was called on a module that no Trainer is running; values are dropped"},
      {50, "BatchWithoutASize", fitted<InValidation<log_one>>({}, of_ragged_batches()), "pass {.batch_size = ...}"},
  };
}

template <class C, class... Args>
Trigger constructed(Args... args) {
  return [args...] { return refusal_of<UsageError>([&] { C callback(args...); }); };
}

Trigger scheduled(GradientAccumulationScheduler::Schedule schedule) {
  return constructed<GradientAccumulationScheduler>(std::move(schedule));
}

template <class M = TinyModule>
Trigger fitted_with(std::shared_ptr<Callback> callback, TrainerOptions options = {}) {
  options.callbacks = {std::move(callback)};
  return fitted<M>(options);
}

struct GroupsOfOneName : TinyModule {
  Optimizers configure_optimizers() override {
    return optim::SGD({{.params = {hidden->weight, out->weight}, .name = "biases"},
                       {.params = {hidden->bias, out->bias}, .name = "biases"}},
                      {.lr = 0.1});
  }
};

// The Trainer resumes from what an earlier Trainer has left in the folder.
struct TwoRuns {
  testing::TempDir dir{};
  TrainerOptions options = [this] {
    TrainerOptions given = quiet({.max_epochs = 2, .default_root_dir = dir.path().string()});
    given.enable_checkpointing = std::nullopt;
    return given;
  }();
  TwoRuns() { Trainer(options).fit(make_module<TinyModule>(), train_and_val()); }

  std::string weights_only() const {
    const std::string path = (dir.path() / "weights").string();
    Trainer trainer(quiet());
    trainer.test(make_module<TinyModule>(), {.test = tiny_loader()});
    trainer.save_checkpoint(path);
    return path;
  }
  template <class Error>
  std::string refusal_to_go_on(const std::string& ckpt_path) {
    options.ckpt_path = ckpt_path;
    return refusal_of<Error>([&] { Trainer(options).fit(make_module<TinyModule>(), train_and_val()); });
  }
};

std::string fewer_epochs_than_were_run() {
  TwoRuns runs;
  runs.options.max_epochs = 1;
  return runs.refusal_to_go_on<CheckpointError>("last");
}

std::string no_optimizer_state() {
  TwoRuns runs;
  return runs.refusal_to_go_on<UsageError>(runs.weights_only());
}

std::string weights_of_another_model() {
  struct Other : TinyModule {
    Other() { register_module("more", torch::nn::Linear(1, 1)); }
  };
  const TwoRuns runs;
  const std::string path = runs.weights_only();
  return refusal_of<CheckpointError>(
      [&] { Trainer(quiet()).test(make_module<Other>(), {.test = tiny_loader()}, path); });
}

// test() requests a checkpoint of a folder that has none.
Trigger tested_with(std::string ckpt_path) {
  return [ckpt_path] {
    const testing::TempDir dir;
    Trainer trainer(quiet({.default_root_dir = dir.path().string()}));
    return refusal_of<UsageError>([&] { trainer.test(make_module<TinyModule>(), {.test = tiny_loader()}, ckpt_path); });
  };
}

std::string other_tasks_of_slurm() {
  return refusal_of<UsageError>(
      [] { check_world_size({.name = "SLURM", .world_size = 3}, /*num_devices=*/2, /*num_nodes=*/2); });
}

std::vector<Row> rows_of_callbacks() {
  const auto checkpoint = [](ModelCheckpointOptions options) { return constructed<ModelCheckpoint>(options); };
  return {
      {51, "FewerThanNoCheckpoints", checkpoint({.save_top_k = -2}), "save_top_k must be at least -1; got -2"},
      {51, "BestWithoutAMonitor", checkpoint({.save_top_k = 2}),
       "save_top_k = 2 needs a monitor that tells which are best"},
      {51, "ModeOfTheMonitor", checkpoint({.monitor = "val_loss", .mode = "mni"}),
       "unknown mode 'mni'; did you mean 'min'? known: min, max"},
      {51, "NegativeEpochs", checkpoint({.every_n_epochs = -1}), "every_n_epochs must be at least 1; got -1"},
      {51, "NegativeSteps", checkpoint({.every_n_train_steps = -1}), "every_n_train_steps must be at least 0; got -1"},
      {52, "ModeOfEarlyStopping",
       constructed<EarlyStopping>(EarlyStoppingOptions{.monitor = "val_loss", .mode = "mni"}),
       "unknown mode 'mni'; did you mean 'min'? known: min, max"},
      {52, "EarlyStoppingWithoutAMonitor", constructed<EarlyStopping>(EarlyStoppingOptions{}),
       "monitor is empty; set it to the name of a metric that is logged, such as val_loss"},
      {53, "IntervalOfLearningRates",
       constructed<LearningRateMonitor>(LearningRateMonitorOptions{.logging_interval = "epochs"}),
       "did you mean 'epoch'?"},
      {53, "GroupsOfOneName", fitted_with<GroupsOfOneName>(LearningRateMonitor::make()),
       "two groups have the name 'biases'; rename one of them"},
      {54, "ScheduleOfANegativeEpoch", scheduled({{-1, 2}}), "epochs count from 0 and factors from 1; got {-1, 2}"},
      {54, "ScheduleOfNoBatches", scheduled({{0, 0}}), "epochs count from 0 and factors from 1; got {0, 0}"},
      {54, "ScheduleAndOption",
       fitted_with(GradientAccumulationScheduler::make({{0, 4}}), {.accumulate_grad_batches = 2}),
       "accumulate_grad_batches = 2 and a GradientAccumulationScheduler contradict each other; leave one"},
      {54, "ScheduleOfAManualModule", fitted_with<Manual>(GradientAccumulationScheduler::make({{0, 4}})),
       "accumulate in training_step, or leave the callback out"},
      {55, "AverageThatStays", constructed<WeightAveraging>(WeightAveragingOptions{.decay = 1.0}),
       "decay = 1 would keep the first weights for ever"},
      {55, "AverageFromANegativeStep", constructed<WeightAveraging>(WeightAveragingOptions{.start_step = -1}),
       "start_step must be at least 0; got -1"},
      {55, "AverageOfWholeTensors", fitted_with<SkipsWithLbfgs>(WeightAveraging::make()),
       "needs whole tensors; use an optimizer that derives from optim::ElementWiseOptimizer"},
      no_meaning(56,
                 "every strategy clips by value and accumulates as the Trainer's options say; row 33 is about "
                 "several optimizers"),
  };
}

std::vector<Row> rows_of_runs() {
  return {
      {57, "BestWithoutACheckpoint", tested_with("best"),
       "ckpt_path = 'best', but this Trainer has no run in whose folder"},
      {57, "CheckpointThatIsNotThere", tested_with("missing"), "there is no checkpoint 'missing'"},
      {58, "FewerEpochsThanTheCheckpointHas", fewer_epochs_than_were_run,
       "the checkpoint has completed 2 epochs, but max_epochs = 1; set max_epochs to the total number of epochs"},
      {59, "NoOptimizerState", no_optimizer_state,
       "has weights only, so that no run can resume from it; set ckpt_weights_only"},
      {59, "WeightsOfAnotherModel", weights_of_another_model,
       "it lacks more.weight, more.bias; to load what there is, "
       "set ckpt_strict"},
      no_meaning(61, "the ranks that the first fit starts serve all later ones"),
      {62, "OtherNumberOfTasks", other_tasks_of_slurm,
       "SLURM started 3 ranks, but devices=2 and num_nodes=2 need 4; change either"},
      no_meaning(64, "a DataModule keeps no hyper-parameters"),
      {60, "CheckpointOfNoModel",
       [] { return refusal_of<UsageError>([] { Trainer(quiet()).save_checkpoint("unused"); }); },
       "there is no module yet; call fit, validate, test or predict first"},
      {63, "BarebonesWithAnExtra", made({.enable_progress_bar = true, .barebones = true}),
       "barebones turns every extra off, but enable_progress_bar is set; leave out one or the other"},
      {63, "BarebonesWithSeveral", made({.num_sanity_val_steps = 2, .log_every_n_steps = 10, .barebones = true}),
       "num_sanity_val_steps, log_every_n_steps are set"},
  };
}

std::vector<Row> all_rows() {
  std::vector<Row> all;
  for (auto rows : {rows_of_amounts(), rows_of_devices(), rows_of_modules_and_loaders(), rows_of_optimisation(),
                    rows_of_logging(), rows_of_callbacks(), rows_of_runs()}) {
    all.insert(all.end(), rows.begin(), rows.end());
  }
  return all;
}

std::vector<Row> rows_with_meaning() {
  std::vector<Row> rows = all_rows();
  std::erase_if(rows, [](const Row& row) { return row.trigger == nullptr; });
  return rows;
}

class BadInput : public ::testing::TestWithParam<Row> {};

TEST_P(BadInput, IsRefusedWithTheFix) {
  const std::string told = GetParam().trigger();
  if (told == kNotHere) GTEST_SKIP() << told;
  EXPECT_THAT(told, HasSubstr(GetParam().text));
}

INSTANTIATE_TEST_SUITE_P(Table, BadInput, ::testing::ValuesIn(rows_with_meaning()),
                         [](const auto& row) { return fmt::format("Row{:02}_{}", row.param.number, row.param.name); });

TEST(BadInputTable, HasEveryRowOrAReason) {
  std::set<int> rows;
  for (const Row& row : all_rows()) {
    rows.insert(row.number);
    EXPECT_FALSE(row.text.empty()) << row.number;
  }
  constexpr int kRows = 64;
  for (int row = 1; row <= kRows; ++row) EXPECT_TRUE(rows.contains(row)) << row;
  EXPECT_EQ(rows.size(), kRows);
}

}  // namespace
}  // namespace fulgur
