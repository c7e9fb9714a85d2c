// A fit whose metrics and records are formulas of the step, for loggers_test.py, which reads them back. It can kill
// itself in the middle.
#include <ATen/ops/arange.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>

#include <csignal>
#include <string>

#include "fulgur.h"

namespace {

using namespace fulgur;

struct NetOptions {
  int64_t width = 3;
  double dropout = 0.25;
  bool bias = true;
  std::string activation = "tanh";
  void describe(FieldVisitor& visit) {
    visit({.name = "width", .help = "number of neurons"}, &width);
    visit({.name = "dropout", .help = "fraction dropped"}, &dropout);
    visit({.name = "bias", .help = "have biases"}, &bias);
    visit({.name = "activation", .help = "name of the activation"}, &activation);
  }
};

struct Options {
  TrainerOptions trainer{};
  NetOptions net{};
  int64_t kill_at = -1;  // batch, counted over all epochs; -1: never
  int64_t save_every = 3;
  void describe(FieldVisitor& visit) {
    trainer.describe(visit);
    net.describe(visit);
    visit({.name = "kill_at", .help = "batch in which the process kills itself; -1: none"}, &kill_at);
    visit({.name = "save_every", .help = "optimizer steps from one checkpoint to the next"}, &save_every);
  }
};

struct Net : Module {
  torch::nn::Linear layer{nullptr};
  const int64_t kill_at;

  Net(const NetOptions& options, int64_t kill_at_batch) : kill_at(kill_at_batch) {
    save_hyper_parameters(options);
    layer = register_module("layer", torch::nn::Linear(1, 1));
  }
  at::Tensor training_step(const Batch& batch, int64_t) override {
    const int64_t step = global_step();
    if (step == kill_at) std::raise(SIGKILL);
    const auto x = static_cast<double>(step);
    log("square", x * x / 7);
    log("of epoch", x, {.on_step = false, .on_epoch = true});
    log_histogram("ramp", at::arange(1000, at::kFloat).mul(0.01).sub(5).add(x));
    log_text("note", "step **" + std::to_string(step) + "**, \"ü\"");
    log_image("rgb", at::arange(3 * 4 * 5, at::kByte).view({3, 4, 5}).add(step));
    log_image("grey", at::arange(300 * 300, at::kFloat).view({300, 300}).div(300.0 * 300.0));
    return layer->forward(batch["x"]).square().mean();
  }
  void validation_step(const Batch&, int64_t) override { log("val", static_cast<double>(global_step())); }
  void on_train_epoch_end() override { log_text("end", "epoch " + std::to_string(current_epoch())); }
  Optimizers configure_optimizers() override { return optim::AdamW(parameters(), {.lr = 1e-2}); }
};

void run(Options options) {
  seed_everything(1);
  TrainerOptions trainer = options.trainer;
  trainer.log_every_n_steps = 2;
  trainer.enable_progress_bar = trainer.enable_model_summary = false;
  trainer.callbacks = {CSVLogger::make(), JsonLinesLogger::make(), TensorBoardLogger::make(),
                       ModelCheckpoint::make({.every_n_train_steps = options.save_every})};
  const auto loader = DataLoader::make(TensorDataset::make({{"x", torch::ones({10, 1})}}), {.batch_size = 2});
  Trainer(trainer).fit(make_module<Net>(options.net, options.kill_at), {.train = loader, .val = loader});
}

}  // namespace

int main(int argc, char** argv) { return run_command_line(argc, argv, run); }
