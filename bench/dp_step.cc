// What a second thread gains in a training step on the CPU: as a device of dp, and as one more thread of single_device.
// An MLP of 4 M parameters, batches of 256, Adam. With dp each device has one thread; the update has both.
//   ./bazelw run //bench:dp_step [-- rounds]
#include <ATen/Parallel.h>
#include <fmt/format.h>

#include <cstdlib>

#include "bench/side_by_side.h"
#include "fulgur.h"

namespace {

using namespace fulgur;

constexpr int64_t kSteps = 50;  // per fit
constexpr int64_t kBatchSize = 256;
constexpr int64_t kWidth = 1024;

struct Mlp : Module {
  torch::nn::Sequential layers{nullptr};
  Mlp() {
    using namespace torch::nn;
    layers = register_module("layers", Sequential(Linear(kWidth, kWidth), ReLU(), Linear(kWidth, kWidth), ReLU(),
                                                  Linear(kWidth, kWidth), ReLU(), Linear(kWidth, kWidth)));
  }
  at::Tensor training_step(const Batch& batch, int64_t) override {
    const at::Tensor loss = torch::nn::functional::cross_entropy(layers->forward(batch["x"]), batch["y"]);
    log("train_loss", loss);
    return loss;
  }
  Optimizers configure_optimizers() override { return optim::Adam(parameters(), {.lr = 1e-3}); }
};

std::shared_ptr<Loader> make_loader() {
  constexpr int64_t kSamples = kSteps * kBatchSize;
  return DataLoader::make(
      TensorDataset::make({{"x", torch::randn({kSamples, kWidth})}, {"y", torch::randint(0, kWidth, {kSamples})}}),
      {.batch_size = kBatchSize});
}

void train(std::string_view strategy, int64_t devices, int num_threads, const std::shared_ptr<Loader>& loader) {
  at::set_num_threads(num_threads);
  seed_everything(1);
  Trainer trainer({.accelerator = "cpu",
                   .strategy = strategy,
                   .devices = devices,
                   .max_epochs = 1,
                   .enable_progress_bar = false,
                   .enable_model_summary = false,
                   .enable_checkpointing = false,
                   .logger = false});
  trainer.fit(make_module<Mlp>(), {.train = loader});
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 7;
  const auto loader = make_loader();
  const std::vector<bench::Contender> contenders{
      {"single_device, one thread", [&] { train("single_device", 1, 1, loader); }},
      {"dp, two devices of one thread", [&] { train("dp", 2, 2, loader); }},
      {"single_device, two threads", [&] { train("single_device", 1, 2, loader); }}};
  const auto timings = bench::side_by_side("step", kSteps, contenders, rounds);
  fmt::print("dp is {:.2f} times as fast as one thread (the bar: 1.60), two threads of one device {:.2f} times\n",
             1.0 / timings[1].ratio, 1.0 / timings[2].ratio);
}
