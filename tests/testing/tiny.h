#pragma once

#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>

#include <memory>
#include <utility>
#include <vector>

#include "fulgur/base/seed.h"
#include "fulgur/core/module.h"
#include "fulgur/data/data_loader.h"
#include "fulgur/data/data_module.h"
#include "fulgur/data/tensor_dataset.h"
#include "fulgur/optim/adam.h"
#include "fulgur/trainer/trainer_options.h"

namespace fulgur::testing {

// A two-layer regression that keeps the losses of its steps.
struct TinyModule : Module {
  torch::nn::Linear hidden{nullptr}, out{nullptr};
  std::vector<double> train_losses;

  TinyModule() {
    hidden = register_module("hidden", torch::nn::Linear(4, 8));
    out = register_module("out", torch::nn::Linear(8, 1));
  }
  at::Tensor forward(const at::Tensor& x) { return out->forward(hidden->forward(x).tanh()); }
  at::Tensor loss(const Batch& batch) { return torch::nn::functional::mse_loss(forward(batch["x"]), batch["y"]); }

  at::Tensor training_step(const Batch& batch, int64_t) override {
    const at::Tensor value = loss(batch);
    train_losses.push_back(value.item<double>());
    log("train_loss", value);
    return value;
  }
  void validation_step(const Batch& batch, int64_t) override { log("val_loss", loss(batch)); }
  void test_step(const Batch& batch, int64_t) override { log("test_loss", loss(batch)); }
  Batch predict_step(const Batch& batch, int64_t) override { return {{"y", forward(batch["x"])}}; }
  Optimizers configure_optimizers() override { return optim::AdamW(parameters(), {.lr = 1e-2}); }
};

inline std::shared_ptr<TensorDataset> tiny_dataset(int64_t size = 40) {
  const auto generator = at::make_generator<at::CPUGeneratorImpl>(7);
  const at::Tensor x = torch::randn({size, 4}, generator);
  return TensorDataset::make({{"x", x}, {"y", x.sum(1, /*keepdim=*/true).sin()}});
}

inline std::shared_ptr<DataLoader> tiny_loader(int64_t size = 40, int64_t batch_size = 8, bool shuffle = false) {
  return DataLoader::make(tiny_dataset(size), {.batch_size = batch_size, .shuffle = shuffle, .seed = 3});
}

// A Trainer's options without anything that writes to the terminal or the disk.
inline TrainerOptions quiet(TrainerOptions options = {}) {
  if (!options.max_epochs && options.max_steps < 0 && !options.max_time) options.max_epochs = 1;
  options.accelerator = "cpu";
  options.enable_progress_bar = options.enable_model_summary = options.enable_checkpointing = options.logger = false;
  options.enable_report = options.enable_report.value_or(false);
  options.enable_post_mortem = options.enable_post_mortem.value_or(false);
  return options;
}

}  // namespace fulgur::testing
