// A fit for tests/failure/kills.py, which kills it repeatedly: saves as often as the flags say, resumes from the last
// checkpoint, and prints the final state.
#include <fmt/format.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>

#include <chrono>
#include <cstring>
#include <string>
#include <thread>

#include "fulgur.h"

namespace {

using namespace fulgur;

struct RegressionOptions {
  double dropout = 0.2;
  int64_t step_ms = 10;  // leaves time to be killed in
  void describe(FieldVisitor& visit) {
    visit({.name = "dropout", .help = "fraction of activations that are dropped", .min = 0, .max = 1}, &dropout);
    visit({.name = "step_ms", .help = "least milliseconds per batch", .min = 0}, &step_ms);
  }
};

struct ResumeOptions {
  TrainerOptions trainer{};
  RegressionOptions module{};
  int64_t save_every = 1;  // optimizer steps
  int64_t keep = 1;        // 1: the newest checkpoint, -1: all
  bool async = false;
  int64_t workers = 0;  // threads that read training batches ahead
  void describe(FieldVisitor& visit) {
    trainer.describe(visit);
    module.describe(visit);
    visit({.name = "save_every", .help = "optimizer steps from one save to the next", .min = 1}, &save_every);
    visit({.name = "keep", .help = "checkpoints to keep: 1: the newest, -1: all"}, &keep);
    visit({.name = "async", .help = "write checkpoints in the background"}, &async);
    visit({.name = "workers", .help = "threads that read training batches ahead", .min = 0}, &workers);
  }
};

// Draws random numbers in every step, has a schedule, and logs.
struct Regression : Module {
  torch::nn::Linear hidden{nullptr}, out{nullptr};
  torch::nn::Dropout dropout{nullptr};
  const int64_t step_ms;

  explicit Regression(const RegressionOptions& options) : step_ms(options.step_ms) {
    save_hyper_parameters(options);
    hidden = register_module("hidden", torch::nn::Linear(16, 64));
    dropout = register_module("dropout", torch::nn::Dropout(options.dropout));
    out = register_module("out", torch::nn::Linear(64, 1));
  }
  at::Tensor loss(const Batch& batch) {
    std::this_thread::sleep_for(std::chrono::milliseconds(step_ms));
    const at::Tensor y = out->forward(dropout->forward(hidden->forward(batch["x"]).tanh()));
    return torch::nn::functional::mse_loss(y, batch["y"]);
  }
  at::Tensor training_step(const Batch& batch, int64_t) override {
    const at::Tensor value = loss(batch);
    log("train_loss", value, {.on_step = true, .on_epoch = true});
    return value;
  }
  void validation_step(const Batch& batch, int64_t) override { log("val_loss", loss(batch)); }
  Optimizers configure_optimizers() override {
    return {optim::AdamW(parameters(), {.lr = 1e-2}),
            {.scheduler = optim::CosineAnnealingLR::make({.T_max = 60}), .interval = "step"}};
  }
};

// Each sample with noise of its own, as an augmentation adds it.
std::shared_ptr<DataLoader> loader(int64_t num_batches, bool shuffle, int64_t workers = 0) {
  const auto generator = at::make_generator<at::CPUGeneratorImpl>(7);
  const at::Tensor x = torch::randn({num_batches * 8, 16}, generator);
  const auto noisy = map_samples(
      TensorDataset::make({{"x", x}, {"y", x.sum(1, /*keepdim=*/true).sin()}}),
      [](const Batch& sample, Random& random) { return sample.with("x", sample["x"] + 0.1 * random.normal()); });
  return DataLoader::make(noisy, {.batch_size = 8, .shuffle = shuffle, .seed = 3, .workers = workers});
}

// The bits of all weights, as one number.
uint64_t digest_of(const Module& module) {
  uint64_t digest = 14695981039346656037U;  // FNV-1a
  for (const auto& param : module.parameters()) {
    const at::Tensor bytes = param.detach().contiguous().view(at::kByte);
    for (int64_t i = 0; i < bytes.numel(); ++i) digest = (digest ^ bytes.const_data_ptr<uint8_t>()[i]) * 1099511628211U;
  }
  return digest;
}

void run(ResumeOptions options) {
  seed_everything(1);
  const auto module = make_module<Regression>(options.module);
  TrainerOptions trainer_options = options.trainer;
  trainer_options.enable_progress_bar = trainer_options.enable_model_summary = false;
  trainer_options.callbacks = {ModelCheckpoint::make(
      {.save_top_k = options.keep, .every_n_train_steps = options.save_every, .async = options.async})};
  Trainer trainer(trainer_options);
  trainer.fit(module, {.train = loader(40, true, options.workers), .val = loader(8, false)});
  if (trainer.global_rank() > 0) return;
  fmt::print("steps {} weights {:016x}", trainer.state().global_step, digest_of(*module));
  for (const auto& [name, value] : trainer.callback_metrics()) fmt::print(" {} {:.17g}", name, value);
  fmt::print("\n");
}

}  // namespace

int main(int argc, char** argv) { return run_command_line(argc, argv, run); }
