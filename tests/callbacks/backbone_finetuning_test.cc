#include "fulgur/callbacks/backbone_finetuning.h"

#include <c10/util/StringUtil.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/optim/adamw.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "fulgur/base/error.h"
#include "fulgur/optim/adam.h"
#include "fulgur/trainer/trainer.h"
#include "tests/testing/errors.h"
#include "tests/testing/ranks.h"
#include "tests/testing/tiny.h"

namespace fulgur {
namespace {

using ::testing::HasSubstr;
using testing::message_of;
using testing::quiet;
using testing::tiny_loader;

constexpr double kHeadLr = 1e-2, kBackboneLr = 4e-3;
constexpr int64_t kEpochs = 6, kUnfreeze = 2, kBatchSize = 4, kSamples = 24;

struct WithBackbone : testing::TinyModule {
  std::vector<std::pair<bool, double>> seen;  // by batch: whether the backbone is trained, and its learning rate
  at::Tensor training_step(const Batch& batch, int64_t batch_idx) override {
    seen.emplace_back(hidden->weight.requires_grad(), optimizers()[0].groups()[0].lr);
    return TinyModule::training_step(batch, batch_idx);
  }
  Optimizers configure_optimizers() override {
    return optim::AdamW({{.params = hidden->parameters(), .lr = kBackboneLr, .name = "backbone"},
                         {.params = out->parameters(), .name = "head"}},
                        {.lr = kHeadLr});
  }
};

std::shared_ptr<WithBackbone> seeded_module() {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  seed_everything(6);
  return make_module<WithBackbone>();
}

std::shared_ptr<BackboneFinetuning> finetuning() {
  return BackboneFinetuning::make({.unfreeze_at_epoch = kUnfreeze, .initial_lr_ratio = 0.3, .lr_growth = 1.5});
}

// The ratios of epochs 2 to 5 are 0.3, 0.45, 0.675 and 1.
double backbone_lr(int64_t epoch) {
  return kBackboneLr * std::min(1.0, 0.3 * std::pow(1.5, static_cast<double>(epoch - kUnfreeze)));
}

// Torch's AdamW, whose parameters without a gradient stay as they are.
std::shared_ptr<WithBackbone> plain_loop(int64_t world_size) {
  const auto module = seeded_module();
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(module->hidden->parameters());
  groups.emplace_back(module->out->parameters());
  torch::optim::AdamW adamw(groups, torch::optim::AdamWOptions(kHeadLr).weight_decay(1e-2));
  for (int64_t epoch = 0; epoch < kEpochs; ++epoch) {
    for (at::Tensor& param : module->hidden->parameters()) param.requires_grad_(epoch >= kUnfreeze);
    static_cast<torch::optim::AdamWOptions&>(adamw.param_groups()[0].options()).lr(backbone_lr(epoch));
    const auto loader = tiny_loader(kSamples * world_size, kBatchSize * world_size);
    loader->begin_epoch(epoch);
    while (const auto batch = loader->next()) {
      module->zero_grad();
      module->loss(*batch).backward();
      adamw.step();
    }
  }
  return module;
}

TEST(BackboneFinetuning, TrainsAsAPlainLoopDoesUnderEveryStrategy) {
  for (const char* strategy : {"single_device", "dp", "ddp", "ddp_sharded", "zero_offload"}) {
    for (const int64_t world_size : {1, 2, 3}) {
      if (world_size > 1 && (strategy == std::string_view("single_device") || strategy == std::string_view("dp"))) {
        continue;
      }
      SCOPED_TRACE(c10::str(strategy, ", ", world_size, " ranks"));
      std::shared_ptr<WithBackbone> trained;
      const auto fit = [&](int64_t rank) {
        const auto module = seeded_module();
        TrainerOptions options{.strategy = strategy, .max_epochs = kEpochs};
        if (strategy == std::string_view("dp")) options.devices = 2;
        if (world_size > 1) options.devices = world_size;
        options.callbacks = {finetuning()};
        Trainer(quiet(options)).fit(module, {.train = tiny_loader(kSamples * world_size, kBatchSize)});
        if (rank == 0) trained = module;
      };
      if (world_size == 1) {
        fit(0);
      } else {
        testing::run_ranks(world_size, [&](World& world) { fit(world.rank()); });
      }
      const auto expected = plain_loop(world_size);
      for (const auto& item : expected->named_parameters()) {
        EXPECT_TRUE(trained->named_parameters()[item.key()].allclose(item.value(), 1e-4, 1e-5)) << item.key();
      }
      if (strategy == std::string_view("dp")) continue;  // whose replicas see the batches
      constexpr int64_t kBatches = kSamples / kBatchSize;
      ASSERT_EQ(std::ssize(trained->seen), kEpochs * kBatches);
      for (int64_t i = 0; i < std::ssize(trained->seen); ++i) {
        const int64_t epoch = i / kBatches;
        const auto [is_trained, lr] = trained->seen[static_cast<size_t>(i)];
        EXPECT_EQ(is_trained, epoch >= kUnfreeze) << i;
        EXPECT_DOUBLE_EQ(lr, is_trained ? backbone_lr(epoch) : kBackboneLr) << i;
      }
    }
  }
}

TEST(BackboneFinetuning, RefusesBadInput) {
  struct NoNames : testing::TinyModule {};
  struct OnlyBackbone : testing::TinyModule {
    Optimizers configure_optimizers() override {
      return optim::AdamW({{.params = parameters(), .name = "backbone"}}, {.lr = kHeadLr});
    }
  };
  const auto message = [](const auto& module, const BackboneFinetuningOptions& given) {
    TrainerOptions options;
    options.callbacks = {BackboneFinetuning::make(given)};
    return message_of<UsageError>([&] { Trainer(quiet(options)).fit(module, {.train = tiny_loader()}); });
  };
  EXPECT_THAT(message(make_module<NoNames>(), {}), HasSubstr("no parameter group has a name"));
  EXPECT_THAT(message(make_module<NoNames>(), {}), HasSubstr(".name = \"backbone\"}"));
  EXPECT_THAT(message(seeded_module(), {.group = "backbon"}), HasSubstr("did you mean 'backbone'"));
  EXPECT_THAT(message(make_module<OnlyBackbone>(), {}), HasSubstr("no parameter to train before epoch 10"));
  EXPECT_THAT(message_of<UsageError>([] { BackboneFinetuning::make({.unfreeze_at_epoch = -1}); }),
              HasSubstr("unfreeze_at_epoch"));
  EXPECT_THAT(message_of<UsageError>([] { BackboneFinetuning::make({.initial_lr_ratio = 0.0}); }),
              HasSubstr("initial_lr_ratio must be above 0"));
  EXPECT_THAT(message_of<UsageError>([] { BackboneFinetuning::make({.initial_lr_ratio = 1.5}); }),
              HasSubstr("initial_lr_ratio"));
  EXPECT_THAT(message_of<UsageError>([] { BackboneFinetuning::make({.lr_growth = 0.5}); }), HasSubstr("lr_growth"));
}

}  // namespace
}  // namespace fulgur
