// Training in each precision by the Trainer against the same training written out by hand.
#include <ATen/autocast_mode.h>
#include <ATen/ops/_amp_foreach_non_finite_check_and_unscale.h>
#include <ATen/ops/_amp_update_scale.h>
#include <ATen/ops/full.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/optim/lbfgs.h>

#include <array>
#include <functional>
#include <mutex>
#include <optional>
#include <set>

#include "fulgur/base/autocast.h"
#include "fulgur/base/error.h"
#include "fulgur/core/gradient_clipping.h"
#include "fulgur/optim/adam.h"
#include "fulgur/optim/lr_schedulers.h"
#include "fulgur/optim/sgd.h"
#include "fulgur/optim/torch_optimizer.h"
#include "fulgur/trainer/trainer.h"
#include "tests/testing/errors.h"
#include "tests/testing/ranks.h"
#include "tests/testing/tiny.h"

namespace fulgur {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::message_of;
using testing::quiet;
using testing::tiny_loader;
using testing::TinyModule;

constexpr int64_t kEpochs = 4;
constexpr int64_t kBatches = 5;

std::shared_ptr<DataLoader> loader() { return tiny_loader(8 * kBatches, 8, /*shuffle=*/true); }

// Records the types that a step computes in, and lets the loss overflow at one batch.
struct Spy : TinyModule {
  int64_t overflows_at = -1;  // batch index; -1: never
  std::set<std::string> dtypes{};
  std::vector<double> grad_norms{};

  at::Tensor training_step(const Batch& batch, int64_t batch_idx) override {
    look(batch);
    const at::Tensor value = TinyModule::training_step(batch, batch_idx);
    return batch_idx == overflows_at ? value * 1e37 : value;
  }
  void validation_step(const Batch& batch, int64_t) override { look(batch); }
  void test_step(const Batch& batch, int64_t) override { look(batch); }
  Batch predict_step(const Batch& batch, int64_t) override { return look(batch), Batch(); }
  void look(const Batch& batch) { dtypes.insert(c10::toString(forward(batch["x"]).scalar_type())); }
};

struct Recipe {
  std::string precision = "32";
  int64_t accumulate = 1;
  double clip_norm = 0.0;
  int64_t overflows_at = -1;
};

// Python's idiom: autocast around the forward pass, GradScaler around the rest.
class ByHand {
 public:
  ByHand(const std::shared_ptr<Spy>& module, const Recipe& recipe) : net_(module), recipe_(recipe) {
    if (recipe.precision == "64") net_->to(at::kDouble);
    optimizer_.emplace(net_->parameters(), optim::AdamWOptions{.lr = 1e-2});
  }

  void train() {
    const auto batches = loader();
    for (int64_t epoch = 0; epoch < kEpochs; ++epoch) {
      batches->begin_epoch(epoch);
      for (int64_t first = 0; first < kBatches; first += recipe_.accumulate) {
        optimizer_->zero_grad();
        const int64_t window = std::min(recipe_.accumulate, kBatches - first);
        for (int64_t i = 0; i < window; ++i) backward(*batches->next(), first + i);
        step(static_cast<double>(window));
      }
    }
  }

 private:
  void backward(Batch batch, int64_t batch_idx) {
    if (recipe_.precision == "64") batch = {{"x", batch["x"].to(at::kDouble)}, {"y", batch["y"].to(at::kDouble)}};
    at::Tensor loss;
    {
      std::optional<ScopedAutocast> autocast;
      if (recipe_.precision == "bf16-mixed") autocast.emplace(AutocastState{at::kCPU, true, at::kBFloat16});
      if (recipe_.precision == "16-mixed") autocast.emplace(AutocastState{at::kCPU, true, at::kHalf});
      loss = net_->training_step(batch, batch_idx);
    }
    (scaled() ? loss * scale_ : loss).backward();
  }

  void step(double micro_batches) {
    at::Tensor found_inf = at::zeros({});
    if (scaled()) {
      std::vector<at::Tensor> grads;
      for (const at::Tensor& param : net_->parameters()) grads.push_back(param.grad());
      at::_amp_foreach_non_finite_check_and_unscale_(grads, found_inf, scale_.reciprocal());
    }
    double factor = 1.0 / micro_batches;
    if (recipe_.clip_norm > 0.0) {
      factor *= clip_coefficient(gradient_norm(net_->parameters()) * factor, recipe_.clip_norm).item<double>();
    }
    if (found_inf.item<float>() == 0.0F) optimizer_->step({.factor = at::scalar_tensor(factor, at::kDouble)});
    if (scaled()) at::_amp_update_scale_(scale_, growth_tracker_, found_inf, 2.0, 0.5, 2000);
  }

  bool scaled() const { return recipe_.precision == "16-mixed"; }

  std::shared_ptr<Spy> net_;
  Recipe recipe_;
  std::optional<optim::AdamW> optimizer_;
  at::Tensor scale_ = at::full({}, 65536.0, at::kFloat);
  at::Tensor growth_tracker_ = at::zeros({}, at::kInt);
};

std::shared_ptr<Spy> spy(const Recipe& recipe = {}) {
  seed_everything(5);
  auto module = make_module<Spy>();
  module->overflows_at = recipe.overflows_at;
  return module;
}

TrainerOptions options(const Recipe& recipe) {
  TrainerOptions options{.max_epochs = kEpochs, .precision = recipe.precision};
  options.accumulate_grad_batches = recipe.accumulate;
  options.gradient_clip_val = recipe.clip_norm;
  return quiet(options);
}

class PrecisionParity : public ::testing::TestWithParam<Recipe> {};

TEST_P(PrecisionParity, EqualsALoopByHandBitForBit) {
  const auto expected = spy(GetParam()), trained = spy(GetParam());
  ByHand(expected, GetParam()).train();
  Trainer(options(GetParam())).fit(trained, {.train = loader()});
  ASSERT_EQ(trained->train_losses.size(), static_cast<size_t>(kEpochs * kBatches));
  EXPECT_EQ(trained->train_losses, expected->train_losses);
  EXPECT_LT(trained->train_losses.back(), trained->train_losses.front());
  for (size_t i = 0; i < expected->parameters().size(); ++i) {
    EXPECT_TRUE(trained->parameters()[i].equal(expected->parameters()[i].to(at::kFloat))) << i;
  }
}

INSTANTIATE_TEST_SUITE_P(, PrecisionParity,
                         ::testing::Values(Recipe{.precision = "32"}, Recipe{.precision = "64"},
                                           Recipe{.precision = "bf16-mixed"}, Recipe{.precision = "16-mixed"},
                                           Recipe{.precision = "bf16-mixed", .accumulate = 2, .clip_norm = 0.5},
                                           Recipe{.precision = "16-mixed", .accumulate = 2, .clip_norm = 0.5},
                                           Recipe{.precision = "16-mixed", .overflows_at = 0},
                                           Recipe{.precision = "16-mixed", .accumulate = 3, .overflows_at = 1}));

struct Seen {
  const char* precision;
  const char* forward;
};
class PrecisionOfSteps : public ::testing::TestWithParam<Seen> {};

TEST_P(PrecisionOfSteps, IsThatOfTheTrainerInEveryStage) {
  Trainer trainer(quiet({.precision = GetParam().precision}));
  const auto expect_dtype = [](const std::shared_ptr<Spy>& module, const char* stage) {
    EXPECT_THAT(module->dtypes, ElementsAre(GetParam().forward)) << stage;
    for (const at::Tensor& parameter : module->parameters()) EXPECT_EQ(parameter.scalar_type(), at::kFloat) << stage;
    EXPECT_FALSE(at::autocast::is_autocast_enabled(at::kCPU)) << stage;
  };
  auto module = spy();
  trainer.fit(module, {.train = loader(), .val = loader()});
  expect_dtype(module, "fit");
  trainer.validate(module = spy(), {.val = loader()});
  expect_dtype(module, "validate");
  trainer.test(module = spy(), {.test = loader()});
  expect_dtype(module, "test");
  trainer.predict(module = spy(), {.predict = loader()});
  expect_dtype(module, "predict");
}

INSTANTIATE_TEST_SUITE_P(, PrecisionOfSteps,
                         ::testing::Values(Seen{"32", "Float"}, Seen{"64", "Double"}, Seen{"bf16-mixed", "BFloat16"},
                                           Seen{"16-mixed", "Half"}, Seen{"32-true", "Float"},
                                           Seen{"bf16", "BFloat16"}));

TEST(TrainerPrecision, ASkippedStepChangesNothing) {
  struct Scheduled : Spy {
    std::vector<double> lrs;
    Optimizers configure_optimizers() override {
      return {optim::AdamW(parameters(), {.lr = 1e-2}),
              {.scheduler = optim::StepLR::make({.step_size = 1, .gamma = 0.5}), .interval = "step"}};
    }
    void on_train_batch_end(const at::Tensor&, const Batch&, int64_t) override {
      lrs.push_back(lr_scheduler().optimizer().groups()[0].lr);
    }
  };
  seed_everything(5);  // other weights may overflow at other batches
  const auto module = make_module<Scheduled>();
  module->overflows_at = 1;
  Trainer trainer(quiet({.max_epochs = 1, .precision = "16-mixed"}));
  ::testing::internal::CaptureStderr();
  trainer.fit(module, {.train = loader()});
  const std::string told = ::testing::internal::GetCapturedStderr();
  EXPECT_EQ(trainer.state().global_step, kBatches - 1);
  EXPECT_EQ(trainer.state().batches_that_stepped, kBatches - 1);
  EXPECT_THAT(module->lrs, ElementsAre(5e-3, 5e-3, 2.5e-3, 1.25e-3, 6.25e-4));
  EXPECT_THAT(told, HasSubstr("warning: the gradients of epoch 0, batch 1 were not finite at a loss scale of 65536"));
}

TEST(TrainerPrecision, TellsOfTheFirstSkippedStepOnly) {
  const auto module = spy({.overflows_at = 2});
  Trainer trainer(quiet({.max_epochs = 3, .precision = "16-mixed"}));
  ::testing::internal::CaptureStderr();
  trainer.fit(module, {.train = loader()});
  const std::string told = ::testing::internal::GetCapturedStderr();
  EXPECT_EQ(trainer.state().global_step, 3 * (kBatches - 1));
  EXPECT_EQ(told.find("not finite"), told.rfind("not finite"));
  EXPECT_THAT(told, HasSubstr("epoch 0, batch 2"));
}

TEST(TrainerPrecision, SixteenMixedOnACpuWarnsOnce) {
  Trainer trainer(quiet({.precision = "16-mixed"}));
  ::testing::internal::CaptureStderr();
  trainer.fit(spy(), {.train = loader()});
  trainer.test(spy(), {.test = loader()});
  const std::string told = ::testing::internal::GetCapturedStderr();
  EXPECT_THAT(told, HasSubstr("'bf16-mixed' is faster there"));
  EXPECT_EQ(told.find("bf16-mixed"), told.rfind("bf16-mixed"));
}

TEST(TrainerPrecision, HooksSeeGradientsWithoutTheLossScale) {
  struct Looks : Spy {
    at::Tensor training_step(const Batch& batch, int64_t batch_idx) override {
      return Spy::training_step(batch, batch_idx) / 16;  // avoids an overflow at the first loss scale
    }
    void on_before_optimizer_step(Optimizer& optimizer) override {
      grad_norms.push_back(gradient_norm(optimizer.params()).item<double>());
    }
  };
  const auto norms = [](const char* precision, bool clip) {
    seed_everything(5);
    const auto module = make_module<Looks>();
    TrainerOptions given{.max_epochs = kEpochs, .precision = precision, .accumulate_grad_batches = 2};
    given.gradient_clip_val = clip ? 0.5 : 0.0;
    Trainer(quiet(given)).fit(module, {.train = loader()});
    return module->grad_norms;
  };
  for (const bool clip : {false, true}) {
    const auto expected = norms("32", clip), got = norms("16-mixed", clip);
    ASSERT_EQ(got.size(), static_cast<size_t>(kEpochs * 3));
    for (size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], expected[i], 0.05 * expected[i]) << i;
  }
}

// Looks at gradients, skips the first update, and has no loss on rank 1 in the second step.
struct SkipsOne : testing::TinyModule {
  int64_t rank = 0, num_updates = 0;
  at::Tensor training_step(const Batch& batch, int64_t batch_idx) override {
    return batch_idx == 1 && rank == 1 ? at::Tensor() : loss(batch) / 64;
  }
  void on_before_optimizer_step(Optimizer&) override {}
  void optimizer_step(Optimizer&, const std::function<void()>& step) override {
    if (num_updates++ > 0) step();
  }
  Optimizers configure_optimizers() override { return optim::SGD(parameters(), {.lr = 1e-2}); }
};

TEST(TrainerPrecision, ARankWithoutALossUsesTheLossScaleOfTheOthers) {
  for (const char* strategy : {"ddp", "ddp_sharded"}) {
    std::array<at::Tensor, 2> weights;
    testing::run_ranks(2, [&](World& world) {
      static std::mutex seeding;
      const auto module = [] {
        const std::lock_guard lock(seeding);
        seed_everything(5);
        return make_module<SkipsOne>();
      }();
      module->rank = world.rank();
      Trainer(quiet({.strategy = strategy, .devices = 2, .precision = "16-mixed"}))
          .fit(module, {.train = testing::tiny_loader(48, 8)});
      weights[static_cast<size_t>(world.rank())] = module->hidden->weight.detach().clone();
    });
    EXPECT_TRUE(at::equal(weights[0], weights[1])) << strategy;
    EXPECT_LT(weights[0].abs().max().item<double>(), 1.0) << strategy;
  }
}

TEST(TrainerPrecision, AHookCannotHideThatGradientsAreNotFinite) {
  struct Hides : Spy {
    void on_before_optimizer_step(Optimizer& optimizer) override {
      for (const at::Tensor& param : optimizer.params()) param.mutable_grad().nan_to_num_(0.0, 0.0, 0.0);
    }
  };
  const auto module = make_module<Hides>();
  module->overflows_at = 3;
  Trainer trainer(quiet({.max_epochs = 1, .precision = "16-mixed"}));
  trainer.fit(module, {.train = loader()});
  EXPECT_EQ(trainer.state().global_step, kBatches - 1);
}

// Two optimizers, whose gradients one backward makes; the second steps every other batch.
struct TwoOptimizers : Spy {
  TwoOptimizers() { automatic_optimization = false; }
  at::Tensor training_step(const Batch& batch, int64_t batch_idx) override {
    const at::Tensor value = loss(batch);
    train_losses.push_back(value.item<double>());
    if (batch_idx % 2 == 0) optimizer(1).zero_grad();
    optimizer(0).zero_grad();
    manual_backward(value);
    EXPECT_EQ(hidden->weight.grad().scalar_type(), at::kFloat);
    optimizer(0).step();
    if (batch_idx % 2 == 1) optimizer(1).step();
    return value;
  }
  Optimizers configure_optimizers() override {
    Optimizers optimizers;
    optimizers.add(optim::AdamW(hidden->parameters(), {.lr = 1e-2}));
    optimizers.add(optim::AdamW(out->parameters(), {.lr = 1e-2}));
    return optimizers;
  }
};

// Parameters of two optimizers, with gradients of `slope` from each backward.
struct StepsByHand : Module {
  at::Tensor first, second;
  double slope = 0.0;
  StepsByHand() {
    automatic_optimization = false;
    first = register_parameter("first", at::zeros({1}));
    second = register_parameter("second", at::zeros({1}));
  }
  Optimizers configure_optimizers() override {
    Optimizers optimizers;
    for (const at::Tensor& param : {first, second}) {
      optimizers.add(optim::SGD(std::vector<at::Tensor>{param}, {.lr = 1.0 / slope}));
    }
    return optimizers;
  }
};

// As a GAN whose generator is trained alone at first.
TEST(TrainerPrecision, TheLossScaleMovesAlthoughAnOptimizerIsNeverStepped) {
  struct TrainsOne : StepsByHand {
    at::Tensor training_step(const Batch&, int64_t) override {
      optimizer(0).zero_grad();
      manual_backward(slope * first.sum());
      optimizer(0).step();
      return {};
    }
  };
  for (const char* strategy : {"single_device", "ddp"}) {
    testing::run_ranks(strategy == std::string("ddp") ? 2 : 1, [&](World& world) {
      const auto module = make_module<TrainsOne>();
      module->slope = 1e35;  // in fp32 this overflows with a loss scale of 2^12 and more; the first is 2^16
      Trainer trainer(quiet({.strategy = strategy, .devices = world.world_size(), .precision = "16-mixed"}));
      trainer.fit(module, {.train = tiny_loader(80, 4)});
      const int64_t skipped = world.world_size() == 1 ? 5 : 6;  // a sum of two ranks overflows once more
      EXPECT_EQ(trainer.state().global_step, 20 / world.world_size() - skipped);
    });
  }
}

// The gradients of a step that optimizer_step left out stay without the loss scale if a hook has looked at them.
TEST(TrainerPrecision, ABackwardAddsToGradientsThatAHookHasLookedAt) {
  struct StepsAtTheSecond : StepsByHand {
    void on_before_optimizer_step(Optimizer&) override {}
    void optimizer_step(Optimizer&, const std::function<void()>& step) override {
      if (run_state().batch_idx == 1) step();
    }
    at::Tensor training_step(const Batch&, int64_t) override {
      manual_backward(slope * first.sum());
      optimizer(0).step();
      return {};
    }
  };
  for (const char* precision : {"32", "16-mixed"}) {
    for (const char* strategy : {"single_device", "ddp"}) {
      testing::run_ranks(strategy == std::string("ddp") ? 2 : 1, [&](World& world) {
        const auto module = make_module<StepsAtTheSecond>();
        module->slope = 0.25;
        Trainer(quiet({.strategy = strategy, .devices = world.world_size(), .precision = precision}))
            .fit(module, {.train = loader()});
        EXPECT_EQ(module->first.item<double>(), -2.0) << precision << ", " << strategy;
      });
    }
  }
}

TEST(TrainerPrecision, ManualOptimisationTrainsAsIn32) {
  const auto losses = [](const char* precision) {
    seed_everything(5);
    const auto module = make_module<TwoOptimizers>();
    Trainer(quiet({.max_epochs = 10, .precision = precision})).fit(module, {.train = loader()});
    return module->train_losses;
  };
  const auto expected = losses("32");
  EXPECT_LT(expected.back(), 0.5 * expected.front());
  for (const auto* precision : {"bf16-mixed", "16-mixed"}) {
    const auto got = losses(precision);
    ASSERT_EQ(got.size(), expected.size());
    for (size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], expected[i], 0.05) << precision << " " << i;
  }
}

TEST(TrainerPrecision, SixtyFourConvertsBuffersButNoIntegers) {
  struct Normed : Spy {
    torch::nn::BatchNorm1d norm{nullptr};
    Normed() { norm = register_module("norm", torch::nn::BatchNorm1d(4)); }
    at::Tensor training_step(const Batch& batch, int64_t batch_idx) override {
      EXPECT_EQ(norm->running_mean.scalar_type(), at::kDouble);
      EXPECT_EQ(norm->num_batches_tracked.scalar_type(), at::kLong);
      return Spy::training_step({{"x", norm(batch["x"])}, {"y", batch["y"]}}, batch_idx);
    }
  };
  const auto module = make_module<Normed>();
  Trainer(quiet({.max_epochs = 1, .precision = "64"})).fit(module, {.train = loader()});
  EXPECT_EQ(module->norm->running_mean.scalar_type(), at::kFloat);
  EXPECT_EQ(module->norm->num_batches_tracked.item<int64_t>(), kBatches);
}

TEST(TrainerPrecision, RefusesWhatIsNotKnown) {
  EXPECT_THAT(message_of<UsageError>([] { Trainer(quiet({.precision = "bf17"})); }),
              HasSubstr("unknown precision 'bf17'"));
}

// One weight w and the loss w * mean(x), whose gradient is mean(x).
struct Line : Module {
  at::Tensor w;
  double lr;
  Line(double start, double given_lr) : w(register_parameter("w", torch::full({1}, start))), lr(given_lr) {}
  at::Tensor training_step(const Batch& batch, int64_t) override { return w * batch["x"].mean(); }
  Optimizers configure_optimizers() override { return optim::SGD(parameters(), {.lr = lr}); }
};

double trained_weight(const char* precision, const at::Tensor& x, double start, double lr, int64_t accumulate) {
  const auto module = make_module<Line>(start, lr);
  Trainer(quiet({.max_epochs = 1, .precision = precision, .accumulate_grad_batches = accumulate}))
      .fit(module, {.train = DataLoader::make(TensorDataset::make({{"x", x}}), {.batch_size = 1})});
  EXPECT_EQ(module->w.scalar_type(), at::kFloat);
  return module->w.item<double>();
}

TEST(TrainerPrecision, True16BitKeepsUpdatesThatItsWeightsCannotShow) {
  const at::Tensor ones =
      torch::ones({100});  // each step moves w by 1e-4, less than half the distance from 1 to the next
  EXPECT_NEAR(trained_weight("32-true", ones, 1.0, 1e-4, 1), 0.99, 1e-5);
  EXPECT_NEAR(trained_weight("bf16-true", ones, 1.0, 1e-4, 1), 0.99, 2e-3);
  EXPECT_NEAR(trained_weight("16-true", ones, 1.0, 1e-4, 1), 0.99, 3e-4);
}

TEST(TrainerPrecision, True16BitSumsMicroBatchesInSinglePrecision) {
  at::Tensor x = torch::full({17}, 1.0 / 512);  // in bf16, 1 + 1/512 is 1
  x[0] = 1.0;
  const double mean = (1.0 + 16.0 / 512) / 17;
  EXPECT_NEAR(-trained_weight("bf16-true", x, 0.0, 1.0, 17), mean, mean / 256);
}

TEST(TrainerPrecision, True16BitTrainsAsWellAs32) {
  const auto final_loss = [](const char* precision) {
    seed_everything(3);
    const auto module = make_module<TinyModule>();
    Trainer(quiet({.max_epochs = 60, .precision = precision})).fit(module, {.train = tiny_loader(40, 8)});
    const at::NoGradGuard no_grad;
    return module->loss(testing::tiny_dataset(40)->samples()).item<double>();
  };
  const double single = final_loss("32");
  EXPECT_LT(single, 0.1);
  EXPECT_LT(final_loss("bf16-true"), 1.25 * single);
  EXPECT_LT(final_loss("16-true"), 1.25 * single);
}

TEST(TrainerPrecision, RefusesAClosureWithALossScale) {
  struct WithLBFGS : Spy {
    Optimizers configure_optimizers() override {
      return optim::TorchOptimizer(std::make_unique<torch::optim::LBFGS>(parameters()));
    }
  };
  EXPECT_THAT(message_of<UsageError>(
                  [] { Trainer(quiet({.precision = "16-mixed"})).fit(make_module<WithLBFGS>(), {.train = loader()}); }),
              HasSubstr("evaluates the loss several times"));
}

}  // namespace
}  // namespace fulgur
