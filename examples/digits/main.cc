// Trains a small convolutional network on the UCI digits.
#include <fmt/format.h>

#include "examples/digits/digits_data.h"
#include "fulgur.h"

namespace {

using namespace fulgur;
namespace F = torch::nn::functional;

struct DigitsOptions {
  TrainerOptions trainer{.max_epochs = 15};
  std::string data = digits::default_file();
  int64_t batch_size = 32;
  double lr = 2e-3;
  int64_t seed = 1;

  void describe(FieldVisitor& visit) {
    visit({.name = "trainer", .help = "how to train"}, &trainer);
    visit({.name = "data", .help = "file of the digits: gzipped CSV"}, &data);
    visit({.name = "batch_size", .help = "samples per step", .min = 1}, &batch_size);
    visit({.name = "lr", .help = "learning rate", .min = 0}, &lr);
    visit({.name = "seed", .help = "seed of the weights, the split and the order of samples", .min = 0}, &seed);
  }
};

class Digits : public Module {
 public:
  explicit Digits(double lr) : lr_(lr) {
    using namespace torch::nn;
    conv_ = register_module("conv", Sequential(Conv2d(Conv2dOptions(1, 32, 3).padding(1)), ReLU(),
                                               Conv2d(Conv2dOptions(32, 64, 3).padding(1)), ReLU(), MaxPool2d(2)));
    head_ = register_module("head", Sequential(Flatten(), Linear(64 * 4 * 4, 128), ReLU(), Linear(128, 10)));
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

  Optimizers configure_optimizers() override { return optim::AdamW(parameters(), {.lr = lr_}); }

 private:
  void evaluate(const std::string& stage, const Batch& batch) {
    const auto logits = forward(batch["image"]);
    log(stage + "_loss", F::cross_entropy(logits, batch["label"]), {.prog_bar = true});
    log(stage + "_acc", logits.argmax(1).eq(batch["label"]).to(at::kFloat).mean(), {.prog_bar = true});
  }

  double lr_;
  torch::nn::Sequential conv_, head_;
};

void train(DigitsOptions options) {
  seed_everything(options.seed);
  digits::DigitsData data(options.data, options.batch_size, options.seed);
  const auto digits = make_module<Digits>(options.lr);
  const auto checkpoint = ModelCheckpoint::make({.monitor = "val_loss"});
  const bool saves = options.trainer.enable_checkpointing.value_or(!options.trainer.barebones);
  if (saves) options.trainer.callbacks.push_back(checkpoint);

  Trainer trainer(options.trainer);
  trainer.fit(digits, data);
  trainer.test(digits, data, checkpoint->best_model_path().string());

  if (!trainer.is_global_zero()) return;
  const auto best = checkpoint->best_model_path();
  if (!best.empty()) fmt::print("checkpoint: {}\n", best.string());
  fmt::print("next: ./bazelw run //examples/digits -- --max_epochs=30 --lr=1e-3\n");
}

}  // namespace

int main(int argc, char** argv) { return fulgur::run_command_line(argc, argv, train); }
