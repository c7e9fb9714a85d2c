// A run on several devices of one process against the same run on one.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/optim/lbfgs.h>

#include <algorithm>
#include <barrier>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <functional>
#include <iterator>
#include <memory>
#include <stdexcept>
#include <thread>
#include <vector>

#include "fulgur/base/autocast.h"
#include "fulgur/base/error.h"
#include "fulgur/metrics/regression.h"
#include "fulgur/nn/activation_checkpoint.h"
#include "fulgur/nn/tie_parameter.h"
#include "fulgur/optim/sgd.h"
#include "fulgur/optim/torch_optimizer.h"
#include "fulgur/strategies/presets.h"
#include "fulgur/trainer/trainer.h"
#include "tests/testing/errors.h"
#include "tests/testing/tiny.h"

namespace fulgur {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::message_of;
using testing::quiet;
using testing::tiny_loader;
using testing::TinyModule;

// Records what the Trainer sees: the module of the first device.
struct Observed : TinyModule {
  std::vector<double> losses{};                  // one per batch
  std::vector<at::Tensor> gradients{}, after{};  // gradients of the first step, and the parameters after it

  at::Tensor training_step(const Batch& batch, int64_t) override { return loss(batch); }
  void on_before_optimizer_step(Optimizer&) override {
    if (!gradients.empty()) return;
    for (const at::Tensor& param : parameters()) {
      gradients.push_back(param.grad().defined() ? param.grad().clone() : at::Tensor());
    }
  }
  void on_train_batch_end(const at::Tensor& loss, const Batch&, int64_t) override {
    losses.push_back(loss.defined() ? loss.item<double>() : std::nan(""));
    if (!after.empty()) return;
    for (const at::Tensor& param : parameters()) after.push_back(param.detach().clone());
  }
};

TrainerOptions on_devices(int64_t devices, TrainerOptions options = {}) {
  options.strategy = devices == 1 ? "single_device" : "dp";
  options.devices = devices;
  return quiet(options);
}

// 8 samples a batch, of which 3 devices get 3, 3 and 2; the last batch of an epoch has 2.
std::shared_ptr<DataLoader> uneven_loader() { return tiny_loader(42, 8, /*shuffle=*/true); }

std::shared_ptr<DataLoader> one_batch(const at::Tensor& x, int64_t size) {
  return DataLoader::make(TensorDataset::make({{"x", x.slice(0, 0, size)}, {"y", x.slice(0, 0, size).sum(1, true)}}),
                          {.batch_size = size});
}

template <class Net = Observed, class... Args>
std::shared_ptr<Net> trained(const TrainerOptions& options, std::shared_ptr<DataLoader> loader = uneven_loader(),
                             Args... args) {
  seed_everything(1);
  const auto module = make_module<Net>(args...);
  Trainer(options).fit(module, {.train = std::move(loader)});
  return module;
}

double relative_distance(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  double difference = 0.0, norm = 0.0;
  for (size_t i = 0; i < b.size(); ++i) {
    EXPECT_EQ(a[i].defined(), b[i].defined()) << i;
    if (!b[i].defined()) continue;
    const at::Tensor expected = b[i].detach().to(at::kDouble);
    difference += a[i].detach().to(at::kDouble).sub(expected).square().sum().item<double>();
    norm += expected.square().sum().item<double>();
  }
  return std::sqrt(difference / norm);
}

double largest_difference(const std::vector<double>& a, const std::vector<double>& b) {
  EXPECT_EQ(a.size(), b.size());
  double largest = 0.0;
  for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
    largest = std::max(largest, std::abs(a[i] - b[i]) / std::abs(b[i]));
  }
  return largest;
}

struct Tolerances {
  double one_step = 1e-6, losses = 1e-5;
};

void expect_same_run(const Observed& actual, const Observed& expected, const Tolerances& tolerances = {}) {
  EXPECT_LE(relative_distance(actual.gradients, expected.gradients), tolerances.one_step);
  EXPECT_LE(relative_distance(actual.after, expected.after), tolerances.one_step);
  EXPECT_LE(largest_difference(actual.losses, expected.losses), tolerances.losses);
}

bool same_bits(const Observed& a, const Observed& b) {
  const auto equal = [](const at::Tensor& x, const at::Tensor& y) { return x.equal(y); };
  return a.losses == b.losses && std::ranges::equal(a.parameters(), b.parameters(), equal);
}

class DpTest : public ::testing::TestWithParam<int64_t> {
 protected:
  template <class Net = Observed, class... Args>
  void expect_as_on_one_device(const TrainerOptions& options = {.max_epochs = 9}, const Tolerances& tolerances = {},
                               const std::shared_ptr<DataLoader>& loader = uneven_loader(), Args... args) {
    const auto one = trained<Net>(on_devices(1, options), loader, args...);
    const auto several = trained<Net>(on_devices(GetParam(), options), loader, args...);
    ASSERT_FALSE(one->losses.empty());
    EXPECT_LT(*std::ranges::min_element(one->losses), one->losses.front());
    expect_same_run(*several, *one, tolerances);
  }
};

INSTANTIATE_TEST_SUITE_P(, DpTest, ::testing::Values(2, 3, 5),
                         [](const auto& devices) { return std::to_string(devices.param) + "Devices"; });

TEST_P(DpTest, EqualsOneDevice) { expect_as_on_one_device(); }

TEST_P(DpTest, EqualsOneDeviceIn64Bits) {
  expect_as_on_one_device({.max_epochs = 9, .precision = "64"}, {.one_step = 1e-9, .losses = 1e-9});
}

TEST_P(DpTest, EqualsOneDeviceOnBatchesSmallerThanTheDevices) {
  expect_as_on_one_device({.max_epochs = 9}, {}, tiny_loader(9, 4));  // the last batch has one sample
}

TEST_P(DpTest, AccumulatesAndClips) {
  TrainerOptions options{.max_epochs = 9, .accumulate_grad_batches = 4};  // the last accumulation window is short
  options.gradient_clip_val = 0.1;
  expect_as_on_one_device(options);
}

TEST_P(DpTest, TwoRunsHaveTheSameBits) {
  for (const char* precision : {"32", "bf16-mixed", "16-mixed", "bf16-true"}) {
    const TrainerOptions options = on_devices(GetParam(), {.max_epochs = 5, .precision = precision});
    EXPECT_TRUE(same_bits(*trained(options), *trained(options))) << precision;
  }
}

// Uses a weight before and after the other part ends an autocast scope of its own, if it has one.
struct UsesAWeightTwice : Observed {
  UsesAWeightTwice(std::shared_ptr<std::barrier<>> its_parts, bool has_scope)
      : parts(std::move(its_parts)), scope(has_scope) {}
  std::shared_ptr<std::barrier<>> parts;
  bool scope;
  at::Tensor training_step(const Batch& batch, int64_t) override {
    const at::Tensor h = hidden->forward(batch["x"]);
    parts->arrive_and_wait();
    if (scope && batch["x"].lt(0).all().item<bool>()) const ScopedAutocast off({.enabled = false});
    parts->arrive_and_wait();
    return torch::nn::functional::mse_loss(out->forward((h + hidden->forward(h.slice(1, 0, 4))).tanh()), batch["y"]);
  }
};

TEST(Dp, CastsOfWeightsAreKeptWhileAnyThreadMayUseThem) {
  at::Tensor x = torch::rand({8, 4});
  x.slice(0, 4).neg_();
  const TrainerOptions options = on_devices(2, {.precision = "bf16-mixed"});
  const auto run = [&](bool scope) {
    return trained<UsesAWeightTwice>(options, one_batch(x, 8), std::make_shared<std::barrier<>>(2), scope);
  };
  const auto without = run(false), with = run(true);
  for (size_t i = 0; i < with->gradients.size(); ++i) EXPECT_TRUE(with->gradients[i].equal(without->gradients[i])) << i;
}

// The scope in the step is the only one: no other code drops the cached casts before the weights change.
struct OwnAutocast : Observed {
  at::Tensor training_step(const Batch& batch, int64_t batch_idx) override {
    const ScopedAutocast on({.enabled = true});
    return Observed::training_step(batch, batch_idx);
  }
};

TEST_P(DpTest, AStepMayTurnAutocastOn) {
  expect_as_on_one_device<OwnAutocast>({.max_epochs = 9}, {.one_step = 1e-2, .losses = 2e-2});
}

struct Bf16 : Observed {
  at::Tensor training_step(const Batch& batch, int64_t batch_idx) override {
    log("is_bf16", forward(batch["x"]).scalar_type() == at::kBFloat16 ? 1.0 : 0.0,
        {.on_epoch = true, .reduce_fx = Reduction::min});
    return Observed::training_step(batch, batch_idx);
  }
};

TEST_P(DpTest, AutocastIsOnInEveryThread) {
  expect_as_on_one_device<Bf16>({.max_epochs = 9, .precision = "bf16-mixed"}, {.one_step = 1e-2, .losses = 2e-2});
  Trainer trainer(on_devices(GetParam(), {.max_epochs = 1, .precision = "bf16-mixed"}));
  trainer.fit(make_module<Bf16>(), {.train = uneven_loader()});
  EXPECT_EQ(trainer.callback_metrics().at("is_bf16"), 1.0);
}

TEST_P(DpTest, True16BitsAreNearOneDevice) {
  const TrainerOptions options{.max_epochs = 9, .precision = "bf16-true"};
  expect_as_on_one_device(options, {.one_step = 2e-2, .losses = 0.1});
  const auto module = trained(on_devices(GetParam(), options));
  EXPECT_EQ(module->out->weight.scalar_type(), at::kFloat);        // the same as before the run
  EXPECT_EQ(module->gradients.front().scalar_type(), at::kFloat);  // the sum of several gradients
}

struct Overflows : Observed {
  at::Tensor training_step(const Batch& batch, int64_t batch_idx) override {
    const at::Tensor value = Observed::training_step(batch, batch_idx);
    const bool is_a_part = batch.batch_size() < 8;
    log("part", is_a_part ? 1.0 : 0.0);
    return batch_idx == 2 && batch["y"].lt(0).any().item<bool>() ? value * 1e37 : value;
  }
};

TEST_P(DpTest, AnOverflowInOnePartSkipsTheStep) {
  Trainer trainer(on_devices(GetParam(), {.max_epochs = 1, .precision = "16-mixed"}));
  const auto module = make_module<Overflows>();
  trainer.fit(module, {.train = uneven_loader()});
  EXPECT_EQ(trainer.state().global_step, 5);
  for (const at::Tensor& param : module->parameters()) EXPECT_TRUE(param.isfinite().all().item<bool>());
}

struct FreezesAndUnfreezes : Observed {
  void on_train_epoch_start() override {
    hidden->weight.set_requires_grad(current_epoch() != 1);
    out->bias.set_requires_grad(current_epoch() >= 2);
  }
};

TEST_P(DpTest, ParametersAreFrozenAndUnfrozenInTheMiddleOfARun) { expect_as_on_one_device<FreezesAndUnfreezes>(); }

struct TiedInReplicas : Observed {
  torch::nn::Linear again{nullptr};
  TiedInReplicas() {
    again = register_module("again", torch::nn::Linear(4, 8));
    tie_parameter(*again, "weight", again->weight, hidden->weight);
  }
  at::Tensor training_step(const Batch& batch, int64_t) override {
    const at::Tensor out_of_both = out->forward(hidden->forward(batch["x"]).tanh() + again->forward(batch["x"]));
    return torch::nn::functional::mse_loss(out_of_both, batch["y"]);
  }
};

TEST_P(DpTest, TiedWeightsStayTied) {
  expect_as_on_one_device<TiedInReplicas>();
  const auto module = trained<TiedInReplicas>(on_devices(GetParam()));
  EXPECT_TRUE(module->again->weight.is_same(module->hidden->weight));
}

// The data decides which samples use `rare`: in the first batch, only the samples of the last part.
struct PartlyUsed : Observed {
  torch::nn::Linear unused{nullptr}, rare{nullptr};
  PartlyUsed() {
    unused = register_module("unused", torch::nn::Linear(4, 4));
    rare = register_module("rare", torch::nn::Linear(4, 1));
  }
  at::Tensor training_step(const Batch& batch, int64_t batch_idx) override {
    at::Tensor value = Observed::training_step(batch, batch_idx);
    const at::Tensor wanted = batch["x"].select(1, 0).gt(0);
    if (wanted.any().item<bool>()) value = value + (rare->forward(batch["x"]).squeeze(1) * wanted).mean();
    return value;
  }
};

TEST_P(DpTest, AParameterHasAGradientIfAnyPartUsedIt) {
  expect_as_on_one_device<PartlyUsed>({.max_epochs = 1});
  const auto module = trained<PartlyUsed>(on_devices(GetParam()));
  seed_everything(1);
  EXPECT_TRUE(module->unused->weight.equal(make_module<PartlyUsed>()->unused->weight));
  EXPECT_FALSE(module->unused->weight.grad().defined());
}

struct SeveralGroups : Observed {
  Optimizers configure_optimizers() override {
    return optim::SGD({{.params = hidden->parameters(), .lr = 0.1}, {.params = out->parameters(), .lr = 0.01}},
                      {.momentum = 0.9});
  }
};

TEST_P(DpTest, GroupsHaveTheirOwnSettings) { expect_as_on_one_device<SeveralGroups>(); }

struct WithLbfgs : Observed {
  Optimizers configure_optimizers() override {
    return optim::TorchOptimizer(torch::optim::LBFGS(parameters(), torch::optim::LBFGSOptions(0.1)));
  }
};

TEST_P(DpTest, AnOptimizerMayEvaluateTheLossSeveralTimes) {
  expect_as_on_one_device<WithLbfgs>({.max_epochs = 1}, {.one_step = 1e-4, .losses = 1e-3}, tiny_loader(40, 20));
}

struct Checkpointed : Observed {
  at::Tensor training_step(const Batch& batch, int64_t) override {
    const auto layer = hidden;
    const at::Tensor h =
        checkpoint([layer](const at::Tensor& x) { return torch::nn::Linear(layer)->forward(x).tanh(); }, batch["x"]);
    return torch::nn::functional::mse_loss(out->forward(h), batch["y"]);
  }
};

TEST_P(DpTest, ActivationsMayBeRecomputed) { expect_as_on_one_device<Checkpointed>(); }

struct ScalesItsLoss : Observed {
  void backward(const at::Tensor& loss) override { (2 * loss).backward(); }
};

TEST_P(DpTest, AnOverriddenBackwardDecidesHowMuchTheLossCounts) { expect_as_on_one_device<ScalesItsLoss>(); }

struct SkipsNegative : Observed {
  at::Tensor training_step(const Batch& batch, int64_t batch_idx) override {
    return batch["x"][0][0].item<double>() < 0 ? at::Tensor() : Observed::training_step(batch, batch_idx);
  }
};

TEST(Dp, APartWithoutALossDoesNotCount) {
  const at::Tensor x = torch::rand({8, 4});
  x.slice(0, 6).neg_();  // samples of the third device
  expect_same_run(*trained<SkipsNegative>(on_devices(3), one_batch(x, 8)), *trained(on_devices(1), one_batch(x, 6)));
}

TEST(Dp, ABatchIsSkippedIfAllPartsAre) {
  Trainer trainer(on_devices(3));
  const auto module = make_module<SkipsNegative>();
  trainer.fit(module, {.train = one_batch(-torch::rand({8, 4}), 8)});
  EXPECT_EQ(trainer.state().global_step, 0);
  EXPECT_THAT(module->losses, ElementsAre(::testing::IsNan()));
}

struct WithBatchNorm : Observed {
  torch::nn::BatchNorm1d norm{nullptr};
  WithBatchNorm() { norm = register_module("norm", torch::nn::BatchNorm1d(4)); }
  at::Tensor training_step(const Batch& batch, int64_t) override {
    log("lowest", norm->running_mean.sum(), {.on_epoch = true, .reduce_fx = Reduction::min});
    log("highest", norm->running_mean.sum(), {.on_epoch = true, .reduce_fx = Reduction::max});
    log("tracked", norm->num_batches_tracked.item<double>(), {.on_epoch = true, .reduce_fx = Reduction::sum});
    return loss({{"x", norm->forward(batch["x"])}, {"y", batch["y"]}});
  }
};

TEST(Dp, BuffersAreThoseOfTheFirstPartAndGoToAll) {
  const auto loader = tiny_loader(16, 8);
  Trainer trainer(on_devices(2));
  const auto module = make_module<WithBatchNorm>();
  trainer.fit(module, {.train = loader});
  torch::nn::BatchNorm1d expected(4);
  loader->begin_epoch(0);
  while (const auto batch = loader->next()) expected->forward((*batch)["x"].slice(0, 0, 4));
  EXPECT_TRUE(module->norm->running_mean.allclose(expected->running_mean));
  EXPECT_TRUE(module->norm->running_var.allclose(expected->running_var));
  EXPECT_EQ(module->norm->num_batches_tracked.item<int64_t>(), 2);
  const Metrics metrics = trainer.callback_metrics();
  EXPECT_EQ(metrics.at("lowest_step"), metrics.at("highest_step"));  // both values are of the second step
  EXPECT_EQ(metrics.at("tracked"), 2.0);  // 0 in the first step, 1 in both parts of the second
}

struct Logs : Observed {
  metrics::MeanSquaredError error;
  at::Tensor training_step(const Batch& batch, int64_t batch_idx) override {
    const at::Tensor y = batch["y"];
    log("mean", y.mean(), {.on_epoch = true});
    log("mean_of_two", y.mean(), {.on_epoch = true});
    log("mean_of_two", y.square().mean(), {.on_epoch = true});
    log("step_only", y.mean());
    log("epoch_only", y.mean(), {.on_step = false, .on_epoch = true});
    log("by_elements", y.mean(), {.on_epoch = true, .batch_size = 7 * y.numel()});
    log("sum", y.sum(), {.on_epoch = true, .reduce_fx = Reduction::sum});
    log("min", y.min(), {.on_epoch = true, .reduce_fx = Reduction::min});
    log("max", y.max(), {.on_epoch = true, .reduce_fx = Reduction::max});
    error.update(forward(batch["x"]), y);
    log("error", error);
    log("epoch", static_cast<double>(current_epoch()));
    return Observed::training_step(batch, batch_idx);
  }
};

struct KeepsLogged final : Callback {
  void on_metrics(TrainerControl&, const Metrics& metrics, int64_t) override { all.push_back(metrics); }
  std::vector<Metrics> all;
};

TEST_P(DpTest, LogsWhatOneDeviceLogs) {
  const auto logged = [](int64_t devices) {
    const auto kept = std::make_shared<KeepsLogged>();
    trained<Logs>(on_devices(devices, {.max_epochs = 2, .log_every_n_steps = 1, .callbacks = {kept}}));
    return kept->all;
  };
  const auto one = logged(1), several = logged(GetParam());
  ASSERT_EQ(one.size(), 2U * (6 + 1));
  ASSERT_EQ(several.size(), one.size());
  for (size_t i = 0; i < one.size(); ++i) {
    ASSERT_EQ(several[i].size(), one[i].size());
    for (const auto& [name, value] : one[i]) EXPECT_NEAR(several[i].at(name), value, 1e-6) << name << " of " << i;
  }
}

struct Boom : std::runtime_error {
  explicit Boom(double its_sample) : runtime_error("boom"), sample(its_sample) {}
  double sample;
};

struct Throws : Observed {
  at::Tensor training_step(const Batch& batch, int64_t batch_idx) override {
    const auto first = batch["x"][0][0].item<double>();
    if (batch_idx == 1 && batch.batch_size() < 3) throw Boom(first);
    return Observed::training_step(batch, batch_idx);
  }
};

TEST(Dp, AnExceptionOfOnePartReachesTheCallerAsItIs) {
  const auto loader = tiny_loader(16, 8);  // parts of 3, 3 and 2
  const double expected = testing::tiny_dataset(16)->get(14)["x"].flatten()[0].item<double>();
  try {
    trained<Throws>(on_devices(3), loader);
    FAIL() << "nothing was thrown";
  } catch (const Boom& boom) {
    EXPECT_EQ(boom.sample, expected);
  }
}

TEST(Dp, TheFirstOfSeveralExceptionsIsThrown) {
  try {
    trained<Throws>(on_devices(5), tiny_loader(16, 8));  // four parts of 2
    FAIL() << "nothing was thrown";
  } catch (const Boom& boom) {
    EXPECT_EQ(boom.sample, testing::tiny_dataset(16)->get(8)["x"].flatten()[0].item<double>());
  }
}

TEST(Dp, ThreadsEndWithTheRun) {
  const auto num_threads = [] {
    const std::filesystem::directory_iterator tasks("/proc/self/task");
    return std::distance(begin(tasks), end(tasks));
  };
  struct Counts : Observed {
    explicit Counts(std::function<std::ptrdiff_t()> its_count) : count(std::move(its_count)) {}
    std::function<std::ptrdiff_t()> count;
    std::ptrdiff_t during = 0;
    void on_before_backward(const at::Tensor&) override { during = count(); }
  };
  trained(on_devices(1));
  const auto before = num_threads();
  const auto module = trained<Counts>(on_devices(3), uneven_loader(), num_threads);
  EXPECT_GE(module->during, before + 3);
  const auto ends_with = [&](std::ptrdiff_t count) {  // the system lists a thread for a moment after it was joined
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(10);
    while (num_threads() > count && std::chrono::steady_clock::now() < deadline) std::this_thread::yield();
    return num_threads() <= count;
  };
  EXPECT_TRUE(ends_with(before));
  EXPECT_THROW(trained<Throws>(on_devices(5)), Boom);
  EXPECT_TRUE(ends_with(before));
}

// All parts are in the region at the same time, in forward and in backward; random numbers are drawn after it.
struct Noisy : Observed {
  explicit Noisy(std::shared_ptr<std::barrier<>> its_parts) : parts(std::move(its_parts)) {}
  std::shared_ptr<std::barrier<>> parts;
  at::Tensor training_step(const Batch& batch, int64_t) override {
    const auto layer = hidden;
    const auto region = [layer, all = parts](const at::Tensor& x) {
      all->arrive_and_wait();
      return torch::nn::Linear(layer)->forward(x).tanh();
    };
    const at::Tensor y = out->forward(checkpoint(region, batch["x"]));
    return torch::nn::functional::mse_loss(y + 1e-3 * torch::rand_like(y), batch["y"]);
  }
};

TEST(Dp, RandomGeneratorsEndWhereTheyWouldOnOneDevice) {
  const auto next = [](int64_t devices) {
    trained<Noisy>(on_devices(devices, {.max_epochs = 9}), tiny_loader(40, 8),
                   std::make_shared<std::barrier<>>(devices));
    return torch::rand({4});
  };
  const at::Tensor expected = next(1);
  EXPECT_TRUE(next(4).equal(expected));
}

struct ReportsMode : WithBatchNorm {
  void on_train_epoch_start() override { norm->eval(); }
  at::Tensor training_step(const Batch& batch, int64_t batch_idx) override {
    log("norm_trains", norm->is_training() ? 1.0 : 0.0, {.reduce_fx = Reduction::max});
    log("trains", is_training() ? 1.0 : 0.0, {.reduce_fx = Reduction::min});
    return WithBatchNorm::training_step(batch, batch_idx);
  }
};

TEST(Dp, ModesOfSubmodulesAreThoseOfTheModule) {
  Trainer trainer(on_devices(3));
  trainer.fit(make_module<ReportsMode>(), {.train = uneven_loader()});
  EXPECT_EQ(trainer.callback_metrics().at("norm_trains"), 0.0);
  EXPECT_EQ(trainer.callback_metrics().at("trains"), 1.0);
}

struct BuiltInSetup : Observed {
  torch::nn::Linear added{nullptr};
  void setup(EntryPoint) override {
    if (added.is_empty()) added = register_module("added", torch::nn::Linear(4, 4));
  }
  at::Tensor training_step(const Batch& batch, int64_t batch_idx) override {
    return Observed::training_step({{"x", added->forward(batch["x"])}, {"y", batch["y"]}}, batch_idx);
  }
};

TEST_P(DpTest, ReplicasAreSetUpAsTheModuleIs) { expect_as_on_one_device<BuiltInSetup>(); }

TEST(Dp, EvaluationRunsOnTheModuleAlone) {
  const auto module = std::make_shared<TinyModule>();  // has no replicas
  const auto score = [&](int64_t devices) {
    return Trainer(on_devices(devices)).validate(module, {.val = {tiny_loader()}}).at("val_loss");
  };
  EXPECT_EQ(score(3), score(1));
}

TEST(Dp, ModulesThatCannotBeReplicatedAreRefused) {
  const Loaders loaders{.train = tiny_loader()};
  const auto refusal = [&]<class Error>(auto module, Error*) {
    return message_of<Error>([&] { Trainer(on_devices(2)).fit(module, loaders); });
  };
  constexpr UsageError* kUsage = nullptr;
  constexpr SetupError* kSetup = nullptr;
  EXPECT_THAT(refusal(std::make_shared<TinyModule>(), kUsage),
              AllOf(HasSubstr("strategy 'dp' needs make_module<"), HasSubstr("in place of std::make_shared<")));
  struct Owner : Observed {
    explicit Owner(std::unique_ptr<int>) {}
  };
  EXPECT_THAT(refusal(make_module<Owner>(std::make_unique<int>(1)), kUsage), HasSubstr("cannot be copied"));
  struct Shares : Observed {
    explicit Shares(const torch::nn::Linear& layer) { register_module("layer", layer); }
  };
  EXPECT_THAT(refusal(make_module<Shares>(torch::nn::Linear(2, 2)), kSetup), HasSubstr("share 'layer.weight'"));
  const auto changed = make_module<Observed>();
  changed->out = changed->replace_module("out", torch::nn::Linear(8, 2));
  EXPECT_THAT(refusal(changed, kSetup),
              AllOf(HasSubstr("'out.weight' of shape [1, 8]"), HasSubstr("'out.weight' of shape [2, 8]")));
  struct Manual : Observed {
    Manual() { automatic_optimization = false; }
  };
  EXPECT_THAT(refusal(make_module<Manual>(), kSetup), HasSubstr("optimises manually"));
}

TEST(Dp, IsOneProcessOnOneMachine) {
  TrainerOptions options = on_devices(2);
  options.num_nodes = 2;
  EXPECT_THAT(message_of<UsageError>([&] { Trainer trainer(options); }), HasSubstr("'ddp'"));
  EXPECT_THAT(message_of<UsageError>([] { Trainer trainer(on_devices(2, {.sync_batchnorm = true})); }),
              HasSubstr("no ranks that could exchange statistics"));
}

TEST(Dp, OnOneDeviceIsSingleDevice) {
  TrainerOptions options = on_devices(1, {.max_epochs = 3});
  const auto expected = trained(options);
  options.strategy = Dp{};
  EXPECT_TRUE(same_bits(*trained(options), *expected));
}

}  // namespace
}  // namespace fulgur
