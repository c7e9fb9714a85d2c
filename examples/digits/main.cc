// Trains a small convolutional network on the UCI digits.
#include "examples/digits/digits_data.h"
#include "fulgur.h"

namespace {

using namespace fulgur;
namespace F = torch::nn::functional;

struct DigitsOptions {
  double lr = 2e-3;
  void describe(FieldVisitor& visit) { visit({.name = "lr", .help = "learning rate", .min = 0}, &lr); }
};

class Digits final : public Module {
 public:
  using Options = DigitsOptions;
  explicit Digits(Options options) : options_(options) {
    using namespace torch::nn;
    // Braces draw the weights in the order of the layers; with parentheses the order is the compiler's.
    conv_ = register_module("conv", Sequential{Conv2d(Conv2dOptions(1, 32, 3).padding(1)), ReLU(),
                                               Conv2d(Conv2dOptions(32, 64, 3).padding(1)), ReLU(), MaxPool2d(2)});
    head_ = register_module("head", Sequential{Flatten(), Linear(64 * 4 * 4, 128), ReLU(), Linear(128, 10)});
  }

  at::Tensor forward(const at::Tensor& image) { return head_->forward(conv_->forward(image)); }

  at::Tensor training_step(const Batch& batch, int64_t) override {
    // Smoothing keeps the model from growing too sure of so few samples.
    const auto options = F::CrossEntropyFuncOptions().label_smoothing(0.1);
    const auto loss = F::cross_entropy(forward(batch["image"]), batch["label"], options);
    log("train_loss", loss, {.prog_bar = true});
    return loss;
  }
  void validation_step(const Batch& batch, int64_t) override { evaluate("val", batch); }
  void test_step(const Batch& batch, int64_t) override { evaluate("test", batch); }

  Optimizers configure_optimizers() override { return optim::AdamW(parameters(), {.lr = options_.lr}); }

 private:
  void evaluate(const std::string& stage, const Batch& batch) {
    const auto logits = forward(batch["image"]);
    log(stage + "_loss", F::cross_entropy(logits, batch["label"]), {.prog_bar = true});
    log(stage + "_acc", logits.argmax(1).eq(batch["label"]).to(at::kFloat).mean(), {.prog_bar = true});
  }

  Options options_;
  torch::nn::Sequential conv_, head_;
};

}  // namespace

int main(int argc, char** argv) {
  return cli::run<Digits, digits::DigitsData>(argc, argv,
                                              {.trainer = {.max_epochs = 15, .checkpoint = {.monitor = "val_loss"}},
                                               .after_fit = [](Trainer& trainer, const auto& digits, auto& data) {
                                                 const bool has_best = trainer.options().enable_checkpointing.value();
                                                 trainer.test(digits, data, has_best ? "best" : "");
                                               }});
}
