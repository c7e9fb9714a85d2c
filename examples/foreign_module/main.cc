// Trains an ordinary torch::nn::Module, which knows nothing of fulgur, on the UCI digits.
//   ./bazelw run //examples/foreign_module
#include "examples/digits/digits_data.h"
#include "examples/foreign_module/conv_net.h"
#include "fulgur.h"

namespace {

using namespace fulgur;

struct Digits : Module {
  ConvNet net = register_module("net", ConvNet());

  at::Tensor training_step(const Batch& batch, int64_t) override {
    return torch::nll_loss(net->forward(batch["image"]), batch["label"]);
  }
  void validation_step(const Batch& batch, int64_t) override {
    log("val_acc", net->forward(batch["image"]).argmax(1).eq(batch["label"]).to(at::kFloat).mean(), {.prog_bar = true});
  }
  Optimizers configure_optimizers() override { return optim::AdamW(parameters(), {.lr = 2e-3}); }
};

}  // namespace

int main(int argc, char** argv) {
  return cli::run<Digits, digits::DigitsData>(
      argc, argv, {.trainer = {.max_epochs = 15, .checkpoint = {.monitor = "val_acc", .mode = "max"}}});
}
