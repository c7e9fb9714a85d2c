#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "fulgur/core/make_module.h"
#include "fulgur/strategies/strategy_choice.h"
#include "fulgur/trainer/trainer.h"
#include "tests/testing/tiny.h"

namespace fulgur::testing {

inline at::Tensor flat_weights(const torch::nn::Module& module) {
  std::vector<at::Tensor> parts;
  for (const at::Tensor& parameter : module.parameters()) parts.push_back(parameter.detach().to(at::kDouble).flatten());
  return torch::cat(parts);
}

// Draws the same weights for every module of a type.
inline void draw_weights(torch::nn::Module& module) {
  const auto generator = at::make_generator<at::CPUGeneratorImpl>(9);
  const c10::NoGradGuard no_grad;
  for (const auto& parameter : module.parameters()) parameter.normal_(0, 0.5, generator);
}

// Odd sizes, two groups, a parameter that is not in the loss, one that is frozen in the first epoch.
template <class Optimizer>
struct Net : TinyModule {
  torch::nn::Linear unused{nullptr}, thawing{nullptr}, wide{nullptr};
  Net() {
    unused = register_module("unused", torch::nn::Linear(3, 5));
    thawing = register_module("thawing", torch::nn::Linear(4, 4));
    thawing->weight.set_requires_grad(false);
    wide = register_module("wide", torch::nn::Linear(7, 100));
    draw_weights(*this);
  }
  at::Tensor training_step(const Batch& batch, int64_t batch_idx) override {
    const at::Tensor loss =
        TinyModule::training_step({{"x", thawing->forward(batch["x"])}, {"y", batch["y"]}}, batch_idx);
    return loss + wide->weight.square().mean();
  }
  void on_train_epoch_start() override {
    if (current_epoch() == 1) thawing->weight.set_requires_grad(true);
    out->bias.set_requires_grad(current_epoch() != 1);  // frozen in epoch 1, which leaves its state unchanged
  }
  Optimizers configure_optimizers() override {
    return Optimizer(
        std::vector<ParamGroup>{{.params = {hidden->weight, hidden->bias, unused->weight, unused->bias, wide->weight}},
                                {.params = {out->weight, out->bias, thawing->weight, thawing->bias}, .lr = 3e-3}},
        {.lr = 1e-2});
  }
};

struct Case {
  std::string name{};
  int64_t accumulate = 1;
  double clip = 0.0;
  std::string precision = "32";
  double bucket_mib = 25;
  std::string clip_algorithm = "norm";
};

template <class M>
at::Tensor train(World& world, const Case& c, StrategyChoice strategy, bool deterministic = false) {
  const auto module = make_module<M>();
  TrainerOptions options = quiet({.strategy = std::move(strategy),
                                  .devices = world.world_size(),
                                  .max_epochs = 3,
                                  .precision = c.precision,
                                  .accumulate_grad_batches = c.accumulate,
                                  .gradient_clip_val = c.clip,
                                  .gradient_clip_algorithm = c.clip_algorithm});
  options.deterministic = deterministic;
  const auto loader = DataLoader::make(testing::tiny_dataset(48), {.batch_size = 4, .shuffle = true, .seed = 3});
  Trainer(options).fit(module, {.train = loader});
  return flat_weights(*module);
}

}  // namespace fulgur::testing
