#include "fulgur/core/module.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>

#include <functional>
#include <optional>

#include "fulgur/base/error.h"
#include "fulgur/core/make_module.h"
#include "fulgur/core/overridden_hooks.h"
#include "fulgur/optim/sgd.h"
#include "tests/testing/errors.h"

namespace fulgur {
namespace {

using ::testing::HasSubstr;
using testing::message_of;

// Modules that override a step with each kind of access, or not at all.
struct Plain : Module {};
struct Public : Module {
  void validation_step(const Batch&, int64_t) override {}
};
class Private : public Module {
  void validation_step(const Batch&, int64_t) override {}
};
class Protected : public Module {
 protected:
  void validation_step(const Batch&, int64_t) final {}
};
struct Inherited : Public {};
struct Overloaded : Module {
  using Module::validation_step;
  void validation_step(const Batch&, int64_t) noexcept override {}
  void validation_step(int) {}
};
template <class Derived>
struct Mixin : Module {
  void validation_step(const Batch&, int64_t) override {}
};
struct Mixed : Mixin<Mixed> {};

static_assert(!overridden_hooks<Plain>().validation_step);
static_assert(overridden_hooks<Public>().validation_step);
static_assert(overridden_hooks<Private>().validation_step);
static_assert(overridden_hooks<Protected>().validation_step);
static_assert(overridden_hooks<Inherited>().validation_step);
static_assert(overridden_hooks<Overloaded>().validation_step);
static_assert(overridden_hooks<Mixed>().validation_step);
static_assert(!overridden_hooks<Public>().training_step && !overridden_hooks<Public>().test_step);

TEST(Module, AStepThatIsNotOverriddenSaysSo) {
  EXPECT_THAT(message_of<c10::NotImplementedError>([] { std::make_shared<Plain>()->training_step({}, 0); }),
              HasSubstr("does not override at::Tensor training_step(const Batch&, int64_t)"));
}

TEST(Module, LoggingWithoutATrainerDoesNothing) { std::make_shared<Plain>()->log("loss", 1); }

TEST(Module, ProgressIsUnknownWithoutATrainer) {
  EXPECT_THAT(message_of<c10::Error>([] { std::make_shared<Plain>()->current_epoch(); }),
              HasSubstr("while a Trainer runs"));
}

TEST(Module, LogTakesNumbersAndTensors) {
  RunState state{.epoch = 2, .global_step = 5};
  MetricLog metrics;
  const auto module = std::make_shared<Plain>();
  module->attach({.state = &state, .metrics = &metrics});
  const Hook training_step{"training_step", LogScope::training_step};
  metrics.enter(Stage::train, training_step);
  module->log("int", 1);
  module->log("float", 1.5F);
  module->log("double", 2.5);
  module->log("tensor", torch::tensor({3.5}), {.prog_bar = true});
  EXPECT_EQ(metrics.take_step_metrics(), (Metrics{{"double", 2.5}, {"float", 1.5}, {"int", 1}, {"tensor", 3.5}}));
  EXPECT_EQ(module->current_epoch(), 2);
  EXPECT_EQ(module->global_step(), 5);
}

TEST(Module, IsRank0Of1OnTheCpuWithoutATrainer) {
  const auto module = std::make_shared<Plain>();
  EXPECT_EQ(module->global_rank(), 0);
  EXPECT_EQ(module->world_size(), 1);
  EXPECT_TRUE(module->is_global_zero());
  EXPECT_TRUE(module->device().is_cpu());
  EXPECT_THAT(message_of<c10::Error>([&] { module->request_stop("x"); }),
              HasSubstr("request_stop() can only be called while a Trainer runs"));
  EXPECT_THAT(message_of<c10::Error>([&] { module->all_gather(torch::ones(1)); }),
              HasSubstr("all_gather() can only be called while a Trainer runs"));
  EXPECT_THAT(message_of<c10::Error>([&] { module->optimizers(); }),
              HasSubstr("optimizers() can only be called while fit runs"));
}

TEST(Module, MessagesNameItsTypeWithoutANamespaceThatHasNoName) {
  EXPECT_EQ(std::make_shared<Plain>()->name(), "fulgur::Plain");
  EXPECT_EQ(std::make_shared<Mixed>()->name(), "fulgur::Mixed");
  EXPECT_THAT(message_of<UsageError>([] { ModuleHandle handle(std::shared_ptr<Plain>{}); }),
              HasSubstr("make_module<fulgur::Plain>(...)"));
}

TEST(ScopedToggle, MayMoveIntoAnOptional) {
  struct Two : Module {
    torch::nn::Linear a{nullptr}, b{nullptr};
    Two() {
      a = register_module("a", torch::nn::Linear(1, 1));
      b = register_module("b", torch::nn::Linear(1, 1));
    }
  };
  const auto module = std::make_shared<Two>();
  Optimizers optimizers;
  optimizers.add(optim::SGD(module->a->parameters()));
  optimizers.add(optim::SGD(module->b->parameters()));
  std::optional<ScopedToggle> guard;
  guard.emplace(ScopedToggle(optimizers, 0));
  EXPECT_TRUE(module->a->weight.requires_grad());
  EXPECT_FALSE(module->b->weight.requires_grad());
  guard.reset();
  EXPECT_TRUE(module->b->weight.requires_grad());
}

struct Sized : Module {
  struct Options {
    int64_t hidden = 1;
  };
  explicit Sized(Options options) : hidden(options.hidden) {}
  explicit Sized(int64_t& shared) : hidden(++shared) {}
  explicit Sized(std::unique_ptr<int64_t> owned) : hidden(*owned) {}
  int64_t hidden;
};

TEST(MakeModule, ForwardsArgumentsOfEveryKind) {
  int64_t shared = 4;
  EXPECT_EQ(make_module<Sized>({.hidden = 7})->hidden, 7);
  EXPECT_EQ(make_module<Sized>(std::ref(shared))->hidden, 5);
  EXPECT_EQ(shared, 5);
  EXPECT_EQ(make_module<Sized>(std::make_unique<int64_t>(9))->hidden, 9);
}

TEST(ModuleHandle, KnowsTheHooksOfItsType) {
  EXPECT_TRUE(ModuleHandle(std::make_shared<Private>()).hooks().validation_step);
  EXPECT_FALSE(ModuleHandle(std::make_shared<Plain>()).hooks().validation_step);
}

TEST(ModuleHandle, KnowsThemBehindAPointerToABaseIfMakeModuleMadeIt) {
  const std::shared_ptr<Module> base = make_module<Private>();
  EXPECT_TRUE(ModuleHandle(base).hooks().validation_step);
}

TEST(ModuleHandle, RefusesAPointerToABaseOtherwise) {
  const std::shared_ptr<Module> base = std::make_shared<Private>();
  EXPECT_THAT(message_of<UsageError>([&] { ModuleHandle handle(base); }), HasSubstr("make_module<"));
}

TEST(ModuleHandle, RefusesNull) {
  EXPECT_THAT(message_of<UsageError>([] { ModuleHandle handle(std::shared_ptr<Plain>{}); }), HasSubstr("null"));
}

}  // namespace
}  // namespace fulgur
