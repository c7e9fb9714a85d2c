// An optimizer and a schedule that a config names, beside the same ones that a Module makes itself.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>

#include <fstream>

#include "fulgur/base/error.h"
#include "fulgur/callbacks/lambda_callback.h"
#include "fulgur/cli/command_line.h"
#include "fulgur/core/make_module.h"
#include "fulgur/optim/lr_schedulers.h"
#include "fulgur/optim/optimizer_registry.h"
#include "fulgur/optim/sgd.h"
#include "fulgur/trainer/trainer.h"
#include "tests/testing/errors.h"
#include "tests/testing/temp_dir.h"
#include "tests/testing/tiny.h"

namespace fulgur {
namespace {

using ::testing::HasSubstr;
using testing::message_of;

// Leaves its optimizer to the options.
struct Plain : Module {
  torch::nn::Linear hidden = register_module("hidden", torch::nn::Linear(4, 8));
  torch::nn::Linear out = register_module("out", torch::nn::Linear(8, 1));

  at::Tensor training_step(const Batch& batch, int64_t) override {
    const at::Tensor y = out->forward(hidden->forward(batch["x"]).tanh());
    return torch::nn::functional::mse_loss(y, batch["y"]);
  }
};

struct Configured : Plain {
  Optimizers configure_optimizers() override {
    ParamGroup biases{.weight_decay = 0.0, .name = "biases"}, head{.lr = 0.05}, others;
    for (const auto& item : named_parameters()) {
      const bool is_bias = item.key().ends_with("bias");
      (is_bias ? biases : item.key() == "out.weight" ? head : others).params.push_back(item.value());
    }
    return {optim::AdamW({biases, head, others}, {.lr = 0.02, .betas = {0.8, 0.95}, .weight_decay = 0.1}),
            {.scheduler = optim::StepLR::make({.step_size = 3, .gamma = 0.5}), .interval = "step", .frequency = 2}};
  }
};

class ConfiguredOptimizerTest : public ::testing::Test {
 protected:
  TrainerOptions options(const std::string& toml, const std::vector<std::string>& flags = {}) {
    TrainerOptions options = testing::quiet({.max_epochs = 3});
    const auto path = dir_.path() / "run.toml";
    std::ofstream(path) << toml;
    std::vector<std::string> arguments{"--config=" + path.string()};
    arguments.insert(arguments.end(), flags.begin(), flags.end());
    EXPECT_TRUE(parse_flags(arguments, "program", [&](FieldVisitor& visit) {
      visit({.name = "trainer", .help = "how to train"}, &options);
    }));
    return options;
  }

  std::string refusal(const std::string& toml, const std::vector<std::string>& flags = {}) {
    return message_of<UsageError>([&] {
      Trainer trainer(options(toml, flags));
      trainer.fit(make_module<Plain>(), {.train = testing::tiny_loader()});
    });
  }

  const testing::TempDir dir_;
};

template <class M>
std::vector<at::Tensor> trained(TrainerOptions options) {
  seed_everything(3);
  const auto module = make_module<M>();
  Trainer(std::move(options)).fit(module, {.train = testing::tiny_loader()});
  return module->parameters();
}

constexpr const char* kLikeConfigured = R"(
[optimizer]
type = "AdamW"
lr = 0.02
betas = [0.8, 0.95]
weight_decay = 0.1

[[optimizer.groups]]
match = "*.bias"
name = "biases"
weight_decay = 0.0

[[optimizer.groups]]
match = "out.*"
lr = 0.05

[scheduler]
type = "StepLR"
step_size = 3
gamma = 0.5
interval = "step"
frequency = 2
)";

TEST_F(ConfiguredOptimizerTest, TrainsBitForBitLikeTheOneThatAModuleMakes) {
  const auto expected = trained<Configured>(testing::quiet({.max_epochs = 3}));
  const auto found = trained<Plain>(options(kLikeConfigured));
  ASSERT_EQ(found.size(), expected.size());
  for (size_t i = 0; i < found.size(); ++i) EXPECT_TRUE(found[i].equal(expected[i])) << i;
  const auto others = trained<Plain>(options(kLikeConfigured, {"--optimizer.betas=0.8,0.9"}));
  EXPECT_FALSE(others[0].equal(expected[0]));
}

TEST_F(ConfiguredOptimizerTest, WhatIsPrintedTrainsTheSame) {
  TrainerOptions printed_from;
  const auto path = dir_.path() / "like.toml";
  std::ofstream(path) << kLikeConfigured;
  ::testing::internal::CaptureStdout();
  EXPECT_FALSE(parse_flags({"--config=" + path.string(), "--print-config"}, "program", [&](FieldVisitor& visit) {
    visit({.name = "trainer", .help = "how to train"}, &printed_from);
  }));
  const std::string printed = ::testing::internal::GetCapturedStdout();
  EXPECT_THAT(printed, HasSubstr("[[trainer.optimizer.groups]]\nmatch = \"*.bias\""));
  const std::vector<std::string> quiet{"--max_epochs=3",
                                       "--accelerator=cpu",
                                       "--logger=false",
                                       "--enable_checkpointing=false",
                                       "--enable_progress_bar=false",
                                       "--enable_model_summary=false"};
  const auto expected = trained<Configured>(testing::quiet({.max_epochs = 3}));
  const auto found = trained<Plain>(options(printed, quiet));
  for (size_t i = 0; i < found.size(); ++i) EXPECT_TRUE(found[i].equal(expected[i])) << i;
}

TEST_F(ConfiguredOptimizerTest, GroupsHaveTheirNamesAndTheRestIsTheLast) {
  std::vector<std::string> names;
  std::vector<int64_t> sizes;
  TrainerOptions trained_with = options(kLikeConfigured);
  trained_with.callbacks.push_back(LambdaCallback::make({.on_train_start = [&](TrainerControl& trainer) {
    for (const auto& group : trainer.optimizers()[0].groups()) {
      names.push_back(group.name);
      sizes.push_back(group.numel());
    }
  }}));
  trained<Plain>(trained_with);
  EXPECT_THAT(names, ::testing::ElementsAre("biases", "", ""));
  EXPECT_THAT(sizes, ::testing::ElementsAre(9, 8, 32));
}

TEST_F(ConfiguredOptimizerTest, EveryOptimizerOfTheRegistryTrains) {
  for (const std::string& name : optim::optimizer_registry().names()) {
    const auto before = trained<Plain>(options("", {"--optimizer=" + name, "--optimizer.lr=0"}));
    const auto after = trained<Plain>(options("", {"--optimizer=" + name}));
    EXPECT_FALSE(after[0].equal(before[0])) << name;
    EXPECT_TRUE(after[0].isfinite().all().item<bool>()) << name;
  }
}

// An optimizer of a user, with options of its own.
struct HalvedOptions {
  double lr = 0.1;
  void describe(FieldVisitor& visit) { visit({.name = "lr", .help = "twice the learning rate", .min = 0}, &lr); }
};
struct HalvedSGD : Optimizer {
  using Options = HalvedOptions;
  HalvedSGD(std::vector<ParamGroup> groups, Options options)
      : Optimizer("HalvedSGD", std::move(groups), options.lr / 2, 0) {}
  using Optimizer::step;
  void step(const GradientTransform&) override {
    const at::NoGradGuard no_grad;
    for (const Group& group : groups()) {
      for (at::Tensor param : group.params) param.sub_(param.grad(), group.lr);
    }
  }
};

struct PlainSGD : Plain {
  Optimizers configure_optimizers() override { return optim::SGD(parameters(), {.lr = 0.25}); }
};

TEST_F(ConfiguredOptimizerTest, AUsersOwnIsNamedLikeTheOthers) {
  optim::optimizer_registry().add<HalvedSGD>();
  const auto expected = trained<PlainSGD>(testing::quiet({.max_epochs = 3}));
  const auto found = trained<Plain>(options("[optimizer]\ntype = \"HalvedSGD\"\nlr = 0.5\n"));
  for (size_t i = 0; i < found.size(); ++i) EXPECT_TRUE(found[i].allclose(expected[i], 1e-6, 1e-7)) << i;
}

TEST_F(ConfiguredOptimizerTest, BadInputIsRefused) {
  const auto at = [](const char* problem) { return HasSubstr(std::string("run.toml:") + problem); };
  EXPECT_THAT(refusal("[optimizer]\ntype = \"AdmW\""),
              at("2:8: optimizer.type: unknown optimizer 'AdmW'; did you mean 'AdamW'?"));
  EXPECT_THAT(refusal("[optimizer]\ntype = \"SGD\"\nbetas = [0.9, 0.95]"),
              at("3:9: optimizer.betas is set, but optimizer is SGD, which does not use it; leave it out, or write "
                 "optimizer = AdamW, or Adam, or LAMB, or Lion"));
  EXPECT_THAT(refusal("[optimizer]\nlr = 0.1"),
              at("2:6: optimizer.lr is set, but optimizer is none, which does not use it; leave it out, or write "
                 "optimizer = AdamW, or Adam, or SGD, or Adagrad, or LAMB, or LARS, or Lion, or RMSprop"));
  EXPECT_THAT(refusal("[optimizer]\ntype = \"AdamW\"\nbetas = [0.9]"),
              at("3:9: optimizer.betas: this is a pair, such as 0.9,0.95; got 1 values"));
  EXPECT_THAT(refusal("[optimizer]\ntype = \"AdamW\"\nbetas = [0.9, 1.5]"),
              at("3:9: optimizer.betas: element 1 must be at most 0.9999999999999999; got 1.5"));
  EXPECT_THAT(refusal("[optimizer]\nlr = -1\ntype = \"AdamW\""), at("2:6: optimizer.lr must be at least 0; got -1"));
  EXPECT_THAT(refusal("[optimizer]\ntype = \"AdamW\"\nlr = \"fast\""), at("3:6: optimizer.lr: 'fast' is not a number"));
  EXPECT_THAT(refusal("[scheduler]\ntype = \"StepLR\"\nT_max = 3"),
              at("3:9: scheduler.T_max is set, but scheduler is StepLR"));
  EXPECT_THAT(refusal("[[optimizer.groups]]\nmatch = \"*\"\nlearning_rate = 1"),
              at("3:17: unknown option 'learning_rate'"));

  EXPECT_THAT(refusal("", {"--scheduler=StepLR"}),
              HasSubstr("scheduler is StepLR, but there is no optimizer; name one"));
  EXPECT_THAT(refusal("[[optimizer.groups]]\nmatch = \"*\""),
              HasSubstr("optimizer.groups is set, but there is no optimizer"));
  EXPECT_THAT(refusal("", {"--optimizer=SGD", "--scheduler=StepLR"}),
              HasSubstr("StepLR: step_size must be at least 1; got 0"));
  EXPECT_THAT(refusal("", {"--optimizer=SGD", "--scheduler=ReduceLROnPlateau"}), HasSubstr("monitor"));
  EXPECT_THAT(
      refusal("[optimizer]\ntype = \"SGD\"\n[[optimizer.groups]]\nmatch = \"*.biass\""),
      HasSubstr("in the group of '*.biass': none has such a name, or earlier groups have them all; the names are "
                "hidden.weight, hidden.bias, out.weight, out.bias"));

  const auto own = [&] {
    Trainer trainer(options("", {"--optimizer=SGD"}));
    trainer.fit(make_module<Configured>(), {.train = testing::tiny_loader()});
  };
  EXPECT_THAT(message_of<SetupError>(own),
              HasSubstr("the option optimizer is SGD, but fulgur::Configured has a configure_optimizers"));
  const auto none = [&] {
    Trainer trainer(options(""));
    trainer.fit(make_module<Plain>(), {.train = testing::tiny_loader()});
  };
  EXPECT_THAT(message_of<SetupError>(none), HasSubstr("or name one in the options: --optimizer=AdamW"));
}

}  // namespace
}  // namespace fulgur
