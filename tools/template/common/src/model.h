#pragma once

#include <string>

#include "fulgur.h"

struct ModelOptions {
  int64_t width = 32;
  double lr = 1e-2;
  void describe(fulgur::FieldVisitor& visit) {
    visit({.name = "width", .help = "hidden units", .min = 1}, &width);
    visit({.name = "lr", .help = "learning rate", .min = 0}, &lr);
  }
};

// Tells points of two classes apart: a network of two layers.
class Model final : public fulgur::Module {
 public:
  using Options = ModelOptions;

  explicit Model(Options options) : options_(options) {
    using namespace torch::nn;
    net_ = register_module("net", Sequential{Linear(2, options.width), ReLU(), Linear(options.width, 2)});
  }

  at::Tensor training_step(const fulgur::Batch& batch, int64_t) override {
    const auto loss = torch::nn::functional::cross_entropy(net_->forward(batch["point"]), batch["label"]);
    log("train_loss", loss, {.prog_bar = true});
    return loss;
  }
  void validation_step(const fulgur::Batch& batch, int64_t) override { evaluate("val", batch); }
  void test_step(const fulgur::Batch& batch, int64_t) override { evaluate("test", batch); }
  fulgur::Batch predict_step(const fulgur::Batch& batch, int64_t) override {
    return {{"class", net_->forward(batch["point"]).argmax(1)}};
  }

  fulgur::Optimizers configure_optimizers() override { return fulgur::optim::AdamW(parameters(), {.lr = options_.lr}); }

 private:
  void evaluate(const std::string& stage, const fulgur::Batch& batch) {
    const auto scores = net_->forward(batch["point"]);
    log(stage + "_loss", torch::nn::functional::cross_entropy(scores, batch["label"]), {.prog_bar = true});
    log(stage + "_acc", scores.argmax(1).eq(batch["label"]).to(at::kFloat).mean(), {.prog_bar = true});
  }

  Options options_;
  torch::nn::Sequential net_{nullptr};
};
